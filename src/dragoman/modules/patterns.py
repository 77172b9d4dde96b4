"""Patterns: which keys the queries of a sentence meet. All of them, or so few that long texts stay cheap.

Shapes   B batch   H heads   T tokens   D head width   N blocks of a row   Q queries of a block   K keys that they meet
         L links of a block   R rank, or random links
A pattern takes queries, keys and values of the same rows. Its rule, who may look at whom, is `visible`, written to be
read; its `forward` gives the same answers without ever making all pairs. To add one: a class below and a line in
PATTERNS.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.errors import UserError
from dragoman.kernels.attention import Kernel
from dragoman.kernels.masks import (
    AttentionMask,
    RowLayout,
    make_causal_mask,
    make_segment_mask,
    make_self_attention_mask,
)
from dragoman.modules.positions import AttentionPosition
from dragoman.modules.settings import AttentionSettings

Lengths = NDArray[np.int64]
IntOrTensor = TypeVar("IntOrTensor", int, Tensor)


class FullAttention(nn.Module):
    """Everyone looks at everyone in the sentence."""

    shares_rows = True  # several sentences may lie in one row
    causal = True  # may stand in a decoder
    limited = False  # knows no place beyond settings.max_length
    tells = frozenset({"nothing", "distance", "tree"})  # what a position scheme may ask for (modules/positions.py)
    uses: tuple[str, ...] = ()  # settings that only some patterns and positions read

    def __init__(self, settings: AttentionSettings, *, ahead: bool) -> None:
        super().__init__()
        self.settings, self.ahead = settings, ahead

    def visible(self, query_Q: Tensor, key_K: Tensor) -> Tensor | None:  # noqa: ARG002 - the rule's shape
        """Who may look at whom by their places in the sentence, apart from "not ahead": keep_QK, or None for all."""
        return None

    def keys(self, length_N: Lengths) -> Lengths:
        """How many keys each query of sentences of these lengths is multiplied with (models/flops.py)."""
        return length_N

    def look(self, rows: RowLayout, relate: AttentionPosition) -> AttentionMask:
        """What every layer must know of the rows: made once, used by all."""
        return replace(make_self_attention_mask(rows, ahead=self.ahead), gap=relate.between(rows))

    def forward(
        self,
        q_BHTD: Tensor,
        k_BHTD: Tensor,
        v_BHTD: Tensor,
        look: AttentionMask,
        relate: AttentionPosition,
        kernel: Kernel,
    ) -> Tensor:
        return relate.attend(kernel, q_BHTD, k_BHTD, v_BHTD, look)


@dataclass(frozen=True, kw_only=True)
class BlockMask(AttentionMask):
    """A look of blocks at the blocks that they are linked to: `keep` is B1NQK and `gap` BNQK."""

    links_NL: Tensor  # numbers of blocks; N, one past the last, is a block of nothing
    everywhere: AttentionMask | None = None  # of the first queries, where they look at all keys


class BlockedAttention(FullAttention, ABC):
    """The common part of patterns whose rows are cut into blocks, each of which meets a few others.

    A block meets all that its tokens may look at, and the rule hides the rest. A row so short that this would not
    pay is met whole.
    """

    tells = frozenset({"nothing", "distance"})

    def __init__(self, settings: AttentionSettings, *, ahead: bool, block: int) -> None:
        super().__init__(settings, ahead=ahead)
        self.block = block

    @abstractmethod
    def links(self, blocks: int, device: torch.device) -> Tensor:
        """The blocks that each of so many meets, none of them twice: links_NL. Numbers of no block are passed over."""

    def keys(self, length_N: Lengths) -> Lengths:
        met: Lengths = np.minimum(length_N, self.links(1, torch.device("cpu")).numel() * self.block)
        return met

    def keep(self, segments: tuple[Tensor, Tensor], places: tuple[Tensor, Tensor]) -> Tensor:
        """The rule, inside the own sentence, for queries and keys of these segments and places."""
        keep, visible = make_segment_mask(*segments), self.visible(*places)
        keep = keep if visible is None else keep & visible
        return keep if self.ahead else keep & make_causal_mask(*places)

    def look(self, rows: RowLayout, relate: AttentionPosition) -> AttentionMask:
        segment_BT, place_BT = rows.segment_BT, rows.places_BT
        blocks = -(-segment_BT.size(1) // self.block)
        links_NL = self.links(blocks, segment_BT.device)
        if blocks <= links_NL.size(1):
            keep_BTT = self.keep((segment_BT, segment_BT), (place_BT, place_BT))
            return AttentionMask(keep_BTT[:, None], gap=relate.gap(place_BT, place_BT))
        links_NL = links_NL.where((links_NL >= 0) & (links_NL < blocks), blocks)

        def both(x_BT: Tensor) -> tuple[Tensor, Tensor]:
            """Of queries and of the keys they meet: x_BNQ and x_BNK."""
            x_B1T1 = x_BT[:, None, :, None]
            return split_into_row_blocks(x_B1T1, self.block)[:, 0, ..., 0], gather_linked_blocks(
                x_B1T1, links_NL, self.block
            )[:, 0, ..., 0]

        places = both(place_BT)
        keep_BNQK = self.keep(both(segment_BT), places)
        return BlockMask(keep_BNQK[:, None], gap=relate.gap(*places), links_NL=links_NL)

    def forward(
        self,
        q_BHTD: Tensor,
        k_BHTD: Tensor,
        v_BHTD: Tensor,
        look: AttentionMask,
        relate: AttentionPosition,
        kernel: Kernel,
    ) -> Tensor:
        if not isinstance(look, BlockMask):
            return super().forward(q_BHTD, k_BHTD, v_BHTD, look, relate, kernel)
        q_BHNQD = split_into_row_blocks(q_BHTD, self.block)
        k_BHNKD, v_BHNKD = (gather_linked_blocks(x_BHTD, look.links_NL, self.block) for x_BHTD in (k_BHTD, v_BHTD))
        out_BHNQD = relate.attend(kernel, q_BHNQD, k_BHNKD, v_BHNKD, look)
        return out_BHNQD.flatten(2, 3)[:, :, : q_BHTD.size(2)]


class LocalAttention(BlockedAttention):
    """Everyone looks at the `window` tokens on either side; in a decoder, at those before."""

    uses = ("window",)

    def __init__(self, settings: AttentionSettings, *, ahead: bool) -> None:
        super().__init__(settings, ahead=ahead, block=settings.window)

    def visible(self, query_Q: Tensor, key_K: Tensor) -> Tensor:
        return (query_Q[..., :, None] - key_K[..., None, :]).abs() <= self.settings.window

    def links(self, blocks: int, device: torch.device) -> Tensor:
        return list_neighbour_blocks(blocks, 1, self.ahead, device)


class BigBird(BlockedAttention):
    """Blocks look at their neighbours, at the first blocks and at random ones; the first look at all (Zaheer 2020).

    Blocks count from the start of the sentence, and a block's random links depend on its number alone: neither padding
    nor what is yet to come changes them. In an encoder about one in seven leads beyond the end, and is lost.
    """

    shares_rows = False  # blocks of sentences that begin anywhere would not lie side by side
    uses = ("block", "window_blocks", "global_blocks", "random_blocks", "random_seed")

    def __init__(self, settings: AttentionSettings, *, ahead: bool) -> None:
        super().__init__(settings, ahead=ahead, block=settings.block)

    def keys(self, length_N: Lengths) -> Lengths:
        """The queries of the first blocks meet everyone: each query has a share in that."""
        everywhere = self.settings.global_blocks * self.block if self.ahead else 0
        met: Lengths = np.minimum(length_N, super().keys(length_N) + everywhere)
        return met

    def visible(self, query_Q: Tensor, key_K: Tensor) -> Tensor:
        query_Q, key_K = query_Q // self.block, key_K // self.block
        query_Q1, key_1K = query_Q[..., :, None], key_K[..., None, :]
        near_QK = (query_Q1 - key_1K).abs() <= self.settings.window_blocks
        global_QK = (query_Q1 < self.settings.global_blocks) | (key_1K < self.settings.global_blocks)
        random_QK = (self.drawn(query_Q)[..., :, None, :] == key_1K[..., None]).any(-1)
        return near_QK | global_QK | random_QK

    def drawn(self, block_N: Tensor) -> Tensor:
        """Each block's random links, links_NR: all blocks between the first ones and its window, and in an encoder as
        many behind the window as stand up to it, are cut into equal parts, and one is drawn from each. -1 is no block.
        """
        count, first, window = self.settings.random_blocks, self.settings.global_blocks, self.settings.window_blocks
        block_N1 = block_N[..., None]
        before_N1 = (block_N1 - window - first).clamp(min=0)
        number_N1 = before_N1 + block_N1 + 1 if self.ahead else before_N1
        part_R = torch.arange(count, device=block_N.device)
        begin_NR, end_NR = (part * number_N1 // max(count, 1) for part in (part_R, part_R + 1))
        chance_NR = hash_integers(hash_integers(hash_integers(self.settings.random_seed) ^ block_N1) ^ part_R)
        drawn_NR = begin_NR + ((end_NR - begin_NR) * chance_NR >> 32)
        link_NR = drawn_NR + torch.where(drawn_NR < before_N1, first, block_N1 + window + 1 - before_N1)
        return link_NR.where(begin_NR < end_NR, -1)

    def links(self, blocks: int, device: torch.device) -> Tensor:
        first_NL = torch.arange(self.settings.global_blocks, device=device).expand(blocks, -1)
        window_NL = list_neighbour_blocks(blocks, self.settings.window_blocks, self.ahead, device)
        window_NL = window_NL.where(window_NL >= self.settings.global_blocks, -1)
        return torch.cat([first_NL, window_NL, self.drawn(torch.arange(blocks, device=device))], -1)

    def look(self, rows: RowLayout, relate: AttentionPosition) -> AttentionMask:
        assert rows.alone
        look = super().look(rows, relate)
        if not self.ahead or not self.settings.global_blocks or not isinstance(look, BlockMask):
            return look
        place_1T = rows.places_BT
        gap = relate.gap(place_1T[:, : self.settings.global_blocks * self.block], place_1T)
        return replace(look, everywhere=replace(make_self_attention_mask(rows, ahead=True), gap=gap))

    def forward(
        self,
        q_BHTD: Tensor,
        k_BHTD: Tensor,
        v_BHTD: Tensor,
        look: AttentionMask,
        relate: AttentionPosition,
        kernel: Kernel,
    ) -> Tensor:
        out_BHTD = super().forward(q_BHTD, k_BHTD, v_BHTD, look, relate, kernel)
        if not isinstance(look, BlockMask) or look.everywhere is None:
            return out_BHTD
        few = self.settings.global_blocks * self.block
        first_BHQD = relate.attend(kernel, q_BHTD[:, :, :few], k_BHTD, v_BHTD, look.everywhere)
        return torch.cat([first_BHQD, out_BHTD[:, :, few:]], 2)


class Linformer(FullAttention):
    """Keys and values are squeezed to `rank` of each by learned weights for every place (Wang 2020).

    One pair of matrices serves all heads of a layer. What is squeezed holds the whole sentence, so that no query could
    look at a part of it: not for decoders, and one sentence to a row.
    """

    shares_rows = False
    causal = False
    limited = True
    tells = frozenset({"nothing"})
    uses = ("rank", "max_length")

    def __init__(self, settings: AttentionSettings, *, ahead: bool) -> None:
        super().__init__(settings, ahead=ahead)
        self.key_TR, self.value_TR = (
            nn.Parameter(torch.randn(settings.max_length, settings.rank) * settings.rank**-0.5) for _ in range(2)
        )

    def keys(self, length_N: Lengths) -> Lengths:
        """Squeezing costs as much as looking."""
        return np.full_like(length_N, 2 * self.settings.rank)

    def look(self, rows: RowLayout, relate: AttentionPosition) -> AttentionMask:
        assert rows.alone
        most, real_BT = self.settings.max_length, rows.real_BT
        if real_BT.device.type == "cpu" and real_BT[:, most:].any():
            raise UserError(
                f"a sentence of {int(real_BT.sum(-1).max())} tokens is longer than Linformer attention reaches; "
                f"model.max_length is {most}"
            )
        return super().look(rows, relate)

    def forward(
        self,
        q_BHTD: Tensor,
        k_BHTD: Tensor,
        v_BHTD: Tensor,
        look: AttentionMask,
        relate: AttentionPosition,
        kernel: Kernel,
    ) -> Tensor:
        assert look.keep is not None
        real_B1T1 = look.keep.mT

        def squeezed(x_BHTD: Tensor, weight_TR: Tensor) -> Tensor:
            real_BHTD = x_BHTD.where(real_B1T1, 0)[:, :, : len(weight_TR)]
            return (real_BHTD.mT @ weight_TR[: real_BHTD.size(2)].to(x_BHTD.dtype)).mT.contiguous()

        k_BHRD, v_BHRD = squeezed(k_BHTD, self.key_TR), squeezed(v_BHTD, self.value_TR)
        return relate.attend(kernel, q_BHTD, k_BHRD, v_BHRD, AttentionMask())


def list_neighbour_blocks(blocks: int, window: int, ahead: bool, device: torch.device) -> Tensor:
    """Each block with so many before it and, looking ahead, after it: links_NL."""
    offset_L = torch.arange(-window, window + 1 if ahead else 1, device=device)
    return torch.arange(blocks, device=device)[:, None] + offset_L


def split_into_row_blocks(x_BHTD: Tensor, block: int) -> Tensor:
    """Rows in blocks, the last one filled up with zeros: x_BHNQD."""
    filled_BHTD = F.pad(x_BHTD, (0, 0, 0, -x_BHTD.size(2) % block))
    return filled_BHTD.view(*x_BHTD.shape[:2], -1, block, x_BHTD.size(-1))


def gather_linked_blocks(x_BHTD: Tensor, links_NL: Tensor, block: int) -> Tensor:
    """The blocks that each block is linked to, end to end: x_BHNKD. One block of zeros is put behind the last one."""
    met_BHMQD = split_into_row_blocks(F.pad(x_BHTD, (0, 0, 0, block)), block).index_select(2, links_NL.flatten())
    return met_BHMQD.view(*x_BHTD.shape[:2], len(links_NL), -1, x_BHTD.size(-1))


def hash_integers(x: IntOrTensor) -> IntOrTensor:
    """Whole numbers below 2 ** 32 into others of the same size, without a pattern."""
    for factor in (0x7FEB352D, 0x45D9F3B):
        x = ((x ^ (x >> 16)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


PATTERNS: dict[str, type[FullAttention]] = {
    "full": FullAttention,
    "linformer": Linformer,
    "bigbird": BigBird,
    "local": LocalAttention,
}
