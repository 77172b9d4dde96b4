"""Attention patterns: the keys to which each query of a sentence attends, either all or, for long texts, a few.

`make_pattern_mask` states the rule of a pattern as a mask; `forward` computes the same attention without materializing
the scores of all pairs. To add a pattern, write a subclass of FullAttention and add it to PATTERNS. Its class
attributes declare what it supports, for checks of settings and for tests. Settings that only this pattern reads are
fields of AttentionSettings, and the pattern lists their names in `uses`.

Shapes   B rows of a batch   H heads   T tokens   D head width   N blocks of a row; in `count_keys`, sentences
         Q queries (of a block)   K keys (of all blocks linked to a block)   L links of a block
         M links of all blocks (N x L)   R rank in Linformer, random links in BigBird
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

from dragoman.config.settings import Amount, Count, Seed, setting
from dragoman.errors import UserError
from dragoman.kernels.attention import (
    AttentionMask,
    Kernel,
    RowLayout,
    make_causal_mask,
    make_segment_mask,
    make_self_attention_mask,
)
from dragoman.modules.positions import AttentionPosition, PositionSettings

Lengths = NDArray[np.int64]  # lengths of sentences, or numbers of keys
IntOrTensor = TypeVar("IntOrTensor", int, Tensor)


class AttentionSettings(PositionSettings):
    """The settings that attention and its patterns read."""

    attention: str = setting("full", "attention pattern of the encoder")
    decoder_attention: str = setting("full", "attention pattern of the decoder")
    window: Count = setting(64, "local: number of tokens attended to on either side")
    block: Count = setting(16, "BigBird: number of tokens per block")
    window_blocks: Count = setting(1, "BigBird: neighbouring blocks attended to on either side")
    global_blocks: Amount = setting(1, "BigBird: first blocks, which attend to all blocks and are attended to by all")
    random_blocks: Amount = setting(1, "BigBird: random blocks that each block attends to in addition")
    random_seed: Seed = setting(1, "BigBird: seed of the random blocks")
    rank: Count = setting(64, "Linformer: number of keys and values after the projection")


class FullAttention(nn.Module):
    """Every token attends to its full sentence. Base class of the patterns."""

    packable = True  # whether a row may contain several sentences
    causal = True  # whether the pattern can be used in a decoder
    has_max_length = False  # whether sentences are limited to settings.max_length
    keys_are_tokens = True  # whether each key belongs to one token of the sentence
    key_cost = 1  # cost of a key in `count_keys`; 2 if computing a key takes as many operations as attending to it
    supported_distances = frozenset({"none", "tokens", "tree"})  # see `AttentionPosition.needed_distance`
    # Names of settings that this pattern reads and some other attention patterns or position encodings ignore.
    uses: tuple[str, ...] = ()

    def __init__(self, settings: AttentionSettings, *, bidirectional: bool) -> None:
        super().__init__()
        self.settings, self.bidirectional = settings, bidirectional

    def make_pattern_mask(self, query_Q: Tensor, key_K: Tensor) -> Tensor | None:  # noqa: ARG002 - the signature of all patterns
        """Return which query positions attend to which key positions, without causality: allowed_QK; None: all."""
        return None

    def count_keys(self, length_N: Lengths) -> Lengths:
        """Return the number of keys per query in sentences of these lengths, for FLOP counts (models/registry.py)."""
        return length_N

    def make_mask(self, rows: RowLayout, position: AttentionPosition) -> AttentionMask:
        """Return the mask of these rows, which all layers share. `position` computes relative positions."""
        mask = make_self_attention_mask(rows, bidirectional=self.bidirectional)
        if position.needed_distance == "none":
            return mask
        return replace(mask, relative_position=position.compute_relative_in_rows(rows))

    def forward(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: AttentionMask, attend: Kernel) -> Tensor:
        """Compute attention by `attend`, a kernel that also applies the position scheme."""
        return attend(q_BHTD, k_BHTD, v_BHTD, mask)

    def compute_weights(
        self, q_BHTD: Tensor, k_BHTD: Tensor, mask: AttentionMask, position: AttentionPosition
    ) -> Tensor:
        """Return the attention weights of `forward`, weight_BHTT, with 0 where a query does not attend to a key.

        The output for the value vectors e_1, e_2, ... (rows of the identity matrix) has the weights as its components.
        """
        eye_BHTT = torch.eye(k_BHTD.size(2), dtype=k_BHTD.dtype, device=k_BHTD.device).expand(*k_BHTD.shape[:2], -1, -1)
        return self.forward(q_BHTD, k_BHTD, eye_BHTT, mask, lambda q, k, v, m: position.compute_weights(q, k, m) @ v)


@dataclass(frozen=True, kw_only=True)
class BlockMask(AttentionMask):
    """The mask between each block and the blocks linked to it: `allowed` is B1NQK and `relative_position` BNQK."""

    links_NL: Tensor  # indices of the linked blocks; the index N stands for a block of zeros
    global_mask: AttentionMask | None = None  # mask of the queries in global blocks, which attend to all keys


class BlockedAttention(FullAttention, ABC):
    """The common part of patterns that split rows into blocks of `block` tokens.

    Each block is linked to a few blocks, which contain all keys of its queries; the mask hides the other keys in them.
    If a row has no more blocks than a block has links, full attention is computed with a mask instead.
    """

    supported_distances = frozenset({"none", "tokens"})

    def __init__(self, settings: AttentionSettings, *, bidirectional: bool, block: int) -> None:
        super().__init__(settings, bidirectional=bidirectional)
        self.block = block

    @abstractmethod
    def make_links(self, blocks: int, device: torch.device) -> Tensor:
        """Return the indices of the blocks to which each of `blocks` blocks is linked: links_NL.

        No index may occur twice for the same block. Indices of blocks outside the row are allowed, and ignored.
        """

    def count_keys(self, length_N: Lengths) -> Lengths:
        links_per_block = self.make_links(1, torch.device("cpu")).numel()
        keys: Lengths = np.minimum(length_N, links_per_block * self.block)
        return keys

    def make_allowed(self, segments: tuple[Tensor, Tensor], positions: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mask of queries and keys with these (query, key) segments and positions."""
        allowed, pattern = make_segment_mask(*segments), self.make_pattern_mask(*positions)
        allowed = allowed if pattern is None else allowed & pattern
        return allowed if self.bidirectional else allowed & make_causal_mask(*positions)

    def make_mask(self, rows: RowLayout, position: AttentionPosition) -> AttentionMask:
        segment_BT, position_BT = rows.segment_BT, rows.shared_position_BT
        blocks = -(-segment_BT.size(1) // self.block)
        links_NL = self.make_links(blocks, segment_BT.device)
        if blocks <= links_NL.size(1):  # full attention is not more expensive
            allowed_BTT = self.make_allowed((segment_BT, segment_BT), (position_BT, position_BT))
            relative_BTT = position.compute_relative(position_BT, position_BT)
            return AttentionMask(allowed_BTT[:, None], relative_position=relative_BTT)
        links_NL = links_NL.where((links_NL >= 0) & (links_NL < blocks), blocks)

        def split_queries_keys(x_BT: Tensor) -> tuple[Tensor, Tensor]:
            """Return the values of the queries and of the linked keys of each block: x_BNQ and x_BNK."""
            x_B1T1 = x_BT[:, None, :, None]
            query_B1NQ1 = split_into_row_blocks(x_B1T1, self.block)
            return query_B1NQ1[:, 0, ..., 0], gather_linked_blocks(x_B1T1, links_NL, self.block)[:, 0, ..., 0]

        positions = split_queries_keys(position_BT)
        allowed_BNQK = self.make_allowed(split_queries_keys(segment_BT), positions)
        relative_BNQK = position.compute_relative(*positions)
        return BlockMask(allowed_BNQK[:, None], relative_position=relative_BNQK, links_NL=links_NL)

    def forward(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: AttentionMask, attend: Kernel) -> Tensor:
        if not isinstance(mask, BlockMask):
            return super().forward(q_BHTD, k_BHTD, v_BHTD, mask, attend)
        q_BHNQD = split_into_row_blocks(q_BHTD, self.block)
        k_BHNKD, v_BHNKD = (gather_linked_blocks(x_BHTD, mask.links_NL, self.block) for x_BHTD in (k_BHTD, v_BHTD))
        out_BHNQD = attend(q_BHNQD, k_BHNKD, v_BHNKD, mask)
        return out_BHNQD.flatten(2, 3)[:, :, : q_BHTD.size(2)]


class LocalAttention(BlockedAttention):
    """Every token attends to itself and to `window` tokens on either side; in a decoder, only before it."""

    uses = ("window",)

    def __init__(self, settings: AttentionSettings, *, bidirectional: bool) -> None:
        # With blocks as long as the window, all keys of a block are in the block itself and its neighbours.
        super().__init__(settings, bidirectional=bidirectional, block=settings.window)

    def make_pattern_mask(self, query_Q: Tensor, key_K: Tensor) -> Tensor:
        return (query_Q[..., :, None] - key_K[..., None, :]).abs() <= self.settings.window

    def make_links(self, blocks: int, device: torch.device) -> Tensor:
        return list_neighbour_blocks(blocks, 1, self.bidirectional, device)


class BigBird(BlockedAttention):
    """Each block attends to neighbours, to the first (global) blocks, and to random blocks (Zaheer 2020).

    Global blocks attend to all blocks. Blocks are counted from the start of the sentence, and the random links of a
    block depend only on its index, so neither padding nor later tokens change them. In an encoder, about one random
    link in seven points beyond the end of the sentence and is ignored.
    """

    packable = False  # blocks of packed sentences would not be aligned
    uses = ("block", "window_blocks", "global_blocks", "random_blocks", "random_seed")

    def __init__(self, settings: AttentionSettings, *, bidirectional: bool) -> None:
        super().__init__(settings, bidirectional=bidirectional, block=settings.block)

    def count_keys(self, length_N: Lengths) -> Lengths:
        """Return the number of keys per query, on average: queries of global blocks attend to all keys."""
        global_queries = self.settings.global_blocks * self.block if self.bidirectional else 0
        keys: Lengths = np.minimum(length_N, super().count_keys(length_N) + global_queries)
        return keys

    def make_pattern_mask(self, query_Q: Tensor, key_K: Tensor) -> Tensor:
        query_Q, key_K = query_Q // self.block, key_K // self.block  # indices of the blocks
        query_Q1, key_1K = query_Q[..., :, None], key_K[..., None, :]
        near_QK = (query_Q1 - key_1K).abs() <= self.settings.window_blocks
        global_QK = (query_Q1 < self.settings.global_blocks) | (key_1K < self.settings.global_blocks)
        random_QK = (self.sample_links(query_Q)[..., :, None, :] == key_1K[..., None]).any(-1)
        return near_QK | global_QK | random_QK

    def sample_links(self, block_N: Tensor) -> Tensor:
        """Return the random links of each block: links_NR, where -1 means no link.

        Candidates are the blocks between the global blocks and the window before the block. In an encoder, block n also
        has n + 1 candidates after the window, whatever the length of the sentence. All candidates are split into
        `random_blocks` parts of equal size, and one block is sampled from each part, so that no link occurs twice.
        """
        count, first, window = self.settings.random_blocks, self.settings.global_blocks, self.settings.window_blocks
        block_N1 = block_N[..., None]
        before_N1 = (block_N1 - window - first).clamp(min=0)
        candidates_N1 = before_N1 + block_N1 + 1 if self.bidirectional else before_N1
        part_R = torch.arange(count, device=block_N.device)
        begin_NR, end_NR = (part * candidates_N1 // max(count, 1) for part in (part_R, part_R + 1))
        random_NR = hash_integers(hash_integers(hash_integers(self.settings.random_seed) ^ block_N1) ^ part_R)
        sampled_NR = begin_NR + ((end_NR - begin_NR) * random_NR >> 32)  # candidates; random_NR is below 2 ** 32
        link_NR = sampled_NR + torch.where(sampled_NR < before_N1, first, block_N1 + window + 1 - before_N1)
        return link_NR.where(begin_NR < end_NR, -1)

    def make_links(self, blocks: int, device: torch.device) -> Tensor:
        global_NL = torch.arange(self.settings.global_blocks, device=device).expand(blocks, -1)
        window_NL = list_neighbour_blocks(blocks, self.settings.window_blocks, self.bidirectional, device)
        window_NL = window_NL.where(window_NL >= self.settings.global_blocks, -1)
        return torch.cat([global_NL, window_NL, self.sample_links(torch.arange(blocks, device=device))], -1)

    def make_mask(self, rows: RowLayout, position: AttentionPosition) -> AttentionMask:
        assert rows.is_unpacked
        mask = super().make_mask(rows, position)
        if not self.bidirectional or not self.settings.global_blocks or not isinstance(mask, BlockMask):
            return mask
        position_1T = rows.shared_position_BT
        relative = position.compute_relative(position_1T[:, : self.settings.global_blocks * self.block], position_1T)
        global_mask = replace(make_self_attention_mask(rows, bidirectional=True), relative_position=relative)
        return replace(mask, global_mask=global_mask)

    def forward(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: AttentionMask, attend: Kernel) -> Tensor:
        out_BHTD = super().forward(q_BHTD, k_BHTD, v_BHTD, mask, attend)
        if not isinstance(mask, BlockMask) or mask.global_mask is None:
            return out_BHTD
        global_tokens = self.settings.global_blocks * self.block
        global_BHQD = attend(q_BHTD[:, :, :global_tokens], k_BHTD, v_BHTD, mask.global_mask)
        return torch.cat([global_BHQD, out_BHTD[:, :, global_tokens:]], 2)


class Linformer(FullAttention):
    """Project the keys of a sentence to `rank` keys, and likewise the values (Wang 2020).

    The weights of the projections are learned per position; all heads of a layer share them. Each projected key is a
    mixture of the full sentence. Therefore the pattern cannot be used in a decoder or in packed rows.
    """

    packable = False
    causal = False
    has_max_length = True
    keys_are_tokens = False
    key_cost = 2
    supported_distances = frozenset({"none"})
    uses = ("rank", "max_length")

    def __init__(self, settings: AttentionSettings, *, bidirectional: bool) -> None:
        super().__init__(settings, bidirectional=bidirectional)
        self.key_TR, self.value_TR = (
            nn.Parameter(torch.randn(settings.max_length, settings.rank) * settings.rank**-0.5) for _ in range(2)
        )

    def count_keys(self, length_N: Lengths) -> Lengths:
        """Return twice the number of projected keys, since projecting them takes as many operations as attending."""
        return np.full_like(length_N, self.key_cost * self.settings.rank)

    def make_mask(self, rows: RowLayout, position: AttentionPosition) -> AttentionMask:
        assert rows.is_unpacked
        max_length, real_BT = self.settings.max_length, rows.real_BT
        if real_BT.device.type == "cpu" and real_BT[:, max_length:].any():  # on a GPU, this would wait
            raise UserError(
                f"a sentence of {int(real_BT.sum(-1).max())} tokens is too long for Linformer attention: "
                f"model.max_length is {max_length}; split it, or train with a greater model.max_length"
            )
        return super().make_mask(rows, position)

    def forward(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: AttentionMask, attend: Kernel) -> Tensor:
        k_BHRD, v_BHRD = self.project(k_BHTD, self.key_TR, mask), self.project(v_BHTD, self.value_TR, mask)
        return attend(q_BHTD, k_BHRD, v_BHRD, AttentionMask())

    def compute_weights(
        self, q_BHTD: Tensor, k_BHTD: Tensor, mask: AttentionMask, position: AttentionPosition
    ) -> Tensor:
        """Return the weights of the projected keys, weight_BHTR: they are not those of single tokens."""
        return position.compute_weights(q_BHTD, self.project(k_BHTD, self.key_TR, mask), AttentionMask())

    def project(self, x_BHTD: Tensor, weight_TR: Tensor, mask: AttentionMask) -> Tensor:
        """Return the projected keys or values, x_BHRD. Padding counts as zeros."""
        assert mask.allowed is not None
        real_B1T1 = mask.allowed.mT  # in unpacked rows, `allowed` is the padding mask, real_B11T
        real_BHTD = x_BHTD.where(real_B1T1, 0)[:, :, : len(weight_TR)]
        return (real_BHTD.mT @ weight_TR[: real_BHTD.size(2)].to(x_BHTD.dtype)).mT.contiguous()


def list_neighbour_blocks(blocks: int, window: int, bidirectional: bool, device: torch.device) -> Tensor:
    """Return the indices of each block and of `window` blocks before and, if bidirectional, after it: links_NL."""
    offset_L = torch.arange(-window, window + 1 if bidirectional else 1, device=device)
    return torch.arange(blocks, device=device)[:, None] + offset_L


def split_into_row_blocks(x_BHTD: Tensor, block: int) -> Tensor:
    """Split rows into blocks, x_BHNQD. The last block is padded with zeros."""
    padded_BHTD = F.pad(x_BHTD, (0, 0, 0, -x_BHTD.size(2) % block))
    return padded_BHTD.view(*x_BHTD.shape[:2], -1, block, x_BHTD.size(-1))


def gather_linked_blocks(x_BHTD: Tensor, links_NL: Tensor, block: int) -> Tensor:
    """Return the linked blocks of each block, concatenated: x_BHNKD. The link N is a block of zeros."""
    linked_BHMQD = split_into_row_blocks(F.pad(x_BHTD, (0, 0, 0, block)), block).index_select(2, links_NL.flatten())
    return linked_BHMQD.view(*x_BHTD.shape[:2], len(links_NL), -1, x_BHTD.size(-1))


def hash_integers(x: IntOrTensor) -> IntOrTensor:
    """Map integers below 2 ** 32 to pseudo-random integers below 2 ** 32. These factors are known to mix bits well."""
    for factor in (0x7FEB352D, 0x45D9F3B):
        x = ((x ^ (x >> 16)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


PATTERNS: dict[str, type[FullAttention]] = {
    "full": FullAttention,
    "linformer": Linformer,
    "bigbird": BigBird,
    "local": LocalAttention,
}
