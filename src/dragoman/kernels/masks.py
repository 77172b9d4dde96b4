"""Masks: boolean, True = may look, built from segments and positions and joined with `&`.

Shapes   B batch   T tokens   Q queries   K keys   (broadcast over heads by the kernel)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.types import Batch


@dataclass(frozen=True)
class RowLayout:
    """Where the tokens of a grid stand: which sentence of its row each belongs to, and its place in that sentence.

    Segment 0 is padding. `alone` says that no row holds two sentences: then each begins at the left, padding follows,
    and attention needs no mask of its own for every row.
    """

    segment_BT: Tensor
    position_BT: Tensor
    alone: bool = False
    depth_BT: Tensor | None = None  # in a dependency tree, from 1; 0: unknown
    tree_BTT: Tensor | None = None  # ways from token to token through it; NO_WAY: unknown
    seen_BT: Tensor | None = None  # False: of this token the place alone is seen; None: all are seen

    @classmethod
    def of_source(cls, batch: Batch) -> RowLayout:
        trees = batch.depth_BS, batch.tree_BSS
        return cls(batch.source_segment_BS, batch.source_position_BS, batch.unpacked, *trees, batch.source_seen_BS)

    @classmethod
    def of_target(cls, batch: Batch) -> RowLayout:
        return cls(batch.target_segment_BT, batch.target_position_BT, batch.unpacked, seen_BT=batch.target_seen_BT)

    @classmethod
    def one_each(cls, keep_BT: Tensor, depth_BT: Tensor | None = None, tree_BTT: Tensor | None = None) -> RowLayout:
        """One sentence to a row; `keep_BT` is True where a token stands. What is no token has no place of its own."""
        position_BT = torch.arange(keep_BT.size(1), device=keep_BT.device) * keep_BT
        return cls(keep_BT.long(), position_BT, True, depth_BT, tree_BTT)

    @property
    def real_BT(self) -> Tensor:
        return self.segment_BT > 0

    @property
    def places_BT(self) -> Tensor:
        """The positions; of sentences alone in their rows one row of them, since all begin at the left."""
        if not self.alone:
            return self.position_BT
        return torch.arange(self.position_BT.size(1), device=self.position_BT.device)[None]


class SegmentIds(NamedTuple):
    """Whose sentence each query and each key is of: all that a mask of packed rows is made of."""

    query_BQ: Tensor
    key_BK: Tensor
    causal: bool  # and not ahead


@dataclass(frozen=True)
class AttentionMask:
    """Who may look at whom in one attention, and how far apart they are.

    `keep` broadcasts to BHQK; None lets everyone look everywhere. `causal` adds "not ahead", counted from the first
    query and the first key, so that no mask has to be built for it. `gap` is what a position scheme knows of each
    query and key (BQK), and `bias` is added to the scores. `stop` says the same as a `keep` of places that stand at the
    left: how many of each sentence's keys count. `segments`, where they are given, say all that `keep`
    and `make_causal_mask` say, but for queries that have nobody to look at.
    """

    keep: Tensor | None = None
    causal: bool = False
    gap: Tensor | None = None
    bias: Tensor | None = None
    stop: Tensor | None = None
    segments: SegmentIds | None = None


def make_additive_mask(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores so that only `keep` is looked at: 0 there, and the lowest number elsewhere."""
    return keep.to(dtype).sub_(1).mul_(torch.finfo(dtype).max)


def make_segment_mask(segment_BQ: Tensor, segment_BK: Tensor) -> Tensor:
    """Look only inside one's own sentence. Padding is segment 0, which no sentence is in.

    This one rule covers padding and packing: a padded batch is a packed batch with one sentence per row.
    """
    return segment_BQ[..., :, None] == segment_BK[..., None, :]


def make_causal_mask(position_BQ: Tensor, position_BK: Tensor) -> Tensor:
    """Look at one's own position and before it. Positions restart in every packed sentence."""
    return position_BQ[..., :, None] >= position_BK[..., None, :]


def unmask_empty_queries(keep_BQK: Tensor) -> Tensor:
    """Padding that would have no key at all may look everywhere: softmax over nothing is NaN.

    What such a query sees does not matter, since no loss and no sentence ever looks at it.
    """
    return keep_BQK | ~keep_BQK.any(-1, keepdim=True)


def make_self_attention_mask(rows: RowLayout, *, ahead: bool) -> AttentionMask:
    """Every token looks inside its own sentence; with `ahead` also at what follows.

    Of sentences alone in their rows, the padding behind them is all that must be hidden; a query that may not look
    ahead never meets it.
    """
    if rows.alone:
        return AttentionMask(unmask_empty_queries(rows.real_BT[:, None, None]) if ahead else None, causal=not ahead)
    keep_BTT = make_segment_mask(rows.segment_BT, rows.segment_BT)
    if not ahead:
        keep_BTT = keep_BTT & make_causal_mask(rows.position_BT, rows.position_BT)
    return AttentionMask(keep_BTT[:, None], segments=SegmentIds(rows.segment_BT, rows.segment_BT, not ahead))


def make_cross_attention_mask(target: RowLayout, source: RowLayout) -> AttentionMask:
    """Every target token looks at the source of its own pair."""
    if source.alone:
        return AttentionMask(unmask_empty_queries(source.real_BT[:, None, None]))
    keep_BTS = unmask_empty_queries(make_segment_mask(target.segment_BT, source.segment_BT))
    return AttentionMask(keep_BTS[:, None], segments=SegmentIds(target.segment_BT, source.segment_BT, causal=False))
