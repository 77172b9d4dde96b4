"""Attention masks: boolean, True = attend, built from segment and position ids and combined with `&`.

Shapes   B batch   T tokens   Q queries   K keys   (masks broadcast over heads)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.types import Batch


@dataclass(frozen=True)
class RowLayout:
    """Where the tokens of a batch of rows are: the sentence of its row that each belongs to, and its position in it.

    Segment 0 is padding. `unpacked` means one sentence per row: each starts at the left and padding follows, so
    attention needs no mask per row.
    """

    segment_BT: Tensor
    position_BT: Tensor
    unpacked: bool = False
    features: Mapping[str, Tensor] = field(default_factory=dict)  # of the tokens of a source, by name
    seen_BT: Tensor | None = None  # False: this token's embedding is hidden, its position is not; None: all are seen

    @classmethod
    def from_source(cls, batch: Batch) -> RowLayout:
        segment_BS, position_BS = batch.source_segment_BS, batch.source_position_BS
        return cls(segment_BS, position_BS, batch.unpacked, batch.features, batch.source_seen_BS)

    @classmethod
    def from_target(cls, batch: Batch) -> RowLayout:
        return cls(batch.target_segment_BT, batch.target_position_BT, batch.unpacked, seen_BT=batch.target_seen_BT)

    @classmethod
    def from_padding_mask(cls, keep_BT: Tensor, features: Mapping[str, Tensor] | None = None) -> RowLayout:
        """Lay out one sentence per row; `keep_BT` is False at padding, whose position is 0."""
        position_BT = torch.arange(keep_BT.size(1), device=keep_BT.device) * keep_BT
        return cls(keep_BT.long(), position_BT, True, features or {})

    @property
    def real_BT(self) -> Tensor:
        """True at tokens, False at padding."""
        return self.segment_BT > 0

    @property
    def shared_position_BT(self) -> Tensor:
        """Return the positions, as a single row if the rows are unpacked: then all of them count from the left."""
        if not self.unpacked:
            return self.position_BT
        return torch.arange(self.position_BT.size(1), device=self.position_BT.device)[None]


class SegmentIds(NamedTuple):
    """The segments of queries and keys, from which a kernel for packed rows derives the mask itself."""

    query_BQ: Tensor
    key_BK: Tensor
    causal: bool


@dataclass(frozen=True)
class AttentionMask:
    """Which queries attend to which keys in one attention, and what else depends on the pair.

    `allowed` broadcasts to BHQK; None allows all. `causal` additionally hides later keys, counted from the first query
    and the first key, without a mask being built. `relative` is what a position scheme needs to know about a query and
    a key (BQK), and `bias` is added to the scores. `length_B`, an alternative to `allowed` for unpacked rows, is how
    many keys of each sentence are valid. `segments`, if given, say the same as `allowed` and `causal` together, except
    for queries without any key.
    """

    allowed: Tensor | None = None
    causal: bool = False
    relative: Tensor | None = None
    bias: Tensor | None = None
    length_B: Tensor | None = None
    segments: SegmentIds | None = None


def make_additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias for the scores: 0 where attention is allowed, the lowest number of the dtype elsewhere."""
    return allowed.to(dtype).sub_(1).mul_(torch.finfo(dtype).max)


def make_segment_mask(segment_BQ: Tensor, segment_BK: Tensor) -> Tensor:
    """Allow attention within the own sentence. Padding is segment 0, which belongs to no sentence.

    This one rule covers padding and packing: a padded batch is a packed batch with one sentence per row.
    """
    return segment_BQ[..., :, None] == segment_BK[..., None, :]


def make_causal_mask(position_BQ: Tensor, position_BK: Tensor) -> Tensor:
    """Allow attention to the own position and earlier ones. Positions restart in every packed sentence."""
    return position_BQ[..., :, None] >= position_BK[..., None, :]


def unmask_empty_queries(allowed_BQK: Tensor) -> Tensor:
    """Allow everything to queries (of padding) without any key, since a softmax over nothing is NaN.

    Their outputs do not matter: neither the loss nor any sentence depends on them.
    """
    return allowed_BQK | ~allowed_BQK.any(-1, keepdim=True)


def make_self_attention_mask(rows: RowLayout, *, bidirectional: bool) -> AttentionMask:
    """Mask the tokens of other sentences and, unless `bidirectional`, later tokens.

    In unpacked rows only the padding on the right has to be hidden, and causal queries never reach it.
    """
    if rows.unpacked:
        allowed = unmask_empty_queries(rows.real_BT[:, None, None]) if bidirectional else None
        return AttentionMask(allowed, causal=not bidirectional)
    allowed_BTT = make_segment_mask(rows.segment_BT, rows.segment_BT)
    if not bidirectional:
        allowed_BTT = allowed_BTT & make_causal_mask(rows.position_BT, rows.position_BT)
    segments = SegmentIds(rows.segment_BT, rows.segment_BT, causal=not bidirectional)
    return AttentionMask(allowed_BTT[:, None], segments=segments)


def make_cross_attention_mask(target: RowLayout, source: RowLayout) -> AttentionMask:
    """Mask everything but the source of the own pair."""
    if source.unpacked:
        return AttentionMask(unmask_empty_queries(source.real_BT[:, None, None]))
    allowed_BTS = unmask_empty_queries(make_segment_mask(target.segment_BT, source.segment_BT))
    segments = SegmentIds(target.segment_BT, source.segment_BT, causal=False)
    return AttentionMask(allowed_BTS[:, None], segments=segments)
