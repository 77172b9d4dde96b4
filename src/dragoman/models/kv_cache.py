"""The KV cache of a Transformer decoder: keys and values of the source and of all tokens decoded so far.

Shapes   B sentences   W rows (beams) of a sentence   N = B * W   K sentences, or positions of a cache   H heads
         S source width   D head width   M moved positions
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.kernels.attention import KeyValue
from dragoman.kernels.masks import AttentionMask
from dragoman.models.base import expand_to_rows

CachePair = TypeVar("CachePair", KeyValue, KeyValue | None)


@dataclass(frozen=True)
class KVCache:
    """The decoder state that a search carries from step to step.

    `memory` and `caches` have one entry per layer. Memory is stored once per sentence, (B, H, S, D); a cache has a row
    per hypothesis, (N, H, K, D), and its first `length_B` positions are valid. Rows of a sentence are adjacent.

    `beam_indices_NK[n, k]` is the row that wrote position k of hypothesis n. When beams are reordered, `select` copies
    only the positions in which the old and the new hypothesis of a row differ. An `indirect` cache, as on a GPU, never
    copies: attention looks up the row in this table (kernels/attention.py).

    A state serves for one step: `step` and the methods below write into its tensors.
    """

    memory: list[KeyValue | None]
    mask: AttentionMask  # of the sources
    caches: list[KeyValue]
    length_B: Tensor
    beam_indices_NK: Tensor
    indirect: bool = False

    @property
    def capacity(self) -> int:
        return self.caches[0][0].size(2)

    @property
    def nbytes(self) -> int:
        """The size of all keys and values."""
        return sum(tensor.nbytes for pair in (*self.memory, *self.caches) for tensor in pair or ())

    def select(self, rows_N: Tensor) -> KVCache:
        """Return the state of these rows, in this order, N / B of them per sentence."""
        beam_indices_NK = self.beam_indices_NK.index_select(0, rows_N)
        if self.indirect:
            return replace(self, beam_indices_NK=beam_indices_NK)
        if len(rows_N) != len(self.beam_indices_NK) or beam_indices_NK.is_cuda:
            return replace(self, caches=select_rows(self.caches, rows_N), beam_indices_NK=beam_indices_NK)
        changed_M2 = (beam_indices_NK != self.beam_indices_NK).nonzero()
        row_M1, position_M1 = changed_M2[:, :1], changed_M2[:, 1:]
        if len(row_M1):  # copy these positions, each from the row that its new hypothesis comes from
            heads, capacity = self.caches[0][0].shape[1:3]
            head_H = torch.arange(heads, device=rows_N.device)
            to_M, from_M = (
                ((row * heads + head_H) * capacity + position_M1).flatten() for row in (row_M1, rows_N[row_M1])
            )
            for cached_NHKD in (cached_NHKD for pair in self.caches for cached_NHKD in pair):
                flat_MD = cached_NHKD.view(-1, cached_NHKD.size(3))
                flat_MD.index_copy_(0, to_M, flat_MD.index_select(0, from_M))
        return replace(self, beam_indices_NK=beam_indices_NK)

    def make_indirect(self, capacity: int) -> KVCache:
        """Return a state with an indirect cache of this capacity, before the first token is decoded."""
        bias = self.mask.bias
        mask = AttentionMask() if bias is None else AttentionMask(length_B=(bias[:, 0, 0] == 0).sum(-1))
        return replace(self.reserve(capacity), mask=mask, indirect=True)

    def reserve(self, positions: int) -> KVCache:
        """Extend the capacity by this number of positions."""
        caches = [(F.pad(k, (0, 0, 0, positions)), F.pad(v, (0, 0, 0, positions))) for k, v in self.caches]
        return replace(self, caches=caches, beam_indices_NK=F.pad(self.beam_indices_NK, (0, positions)))

    def rest(self, done_B: Tensor) -> KVCache:
        """Reset the length of finished sentences, so that they need no capacity."""
        return replace(self, length_B=self.length_B.masked_fill(done_B, 0))

    def keep(self, sentences_K: Tensor) -> KVCache:
        """Return only these sentences, with all of their rows."""
        bias, width = self.mask.bias, len(self.caches[0][0]) // len(self.length_B)
        rows_N = expand_to_rows(sentences_K, width)
        return KVCache(
            select_rows(self.memory, sentences_K),
            AttentionMask(bias=None if bias is None else bias.index_select(0, sentences_K)),
            select_rows(self.caches, rows_N),
            self.length_B.index_select(0, sentences_K),
            self.beam_indices_NK.index_select(0, rows_N),
        )

    def slice_sentences(self, first: int, count: int) -> KVCache:
        """Return views of `count` sentences from `first` on, before any token is decoded."""
        few = slice(first, first + count)
        length_B, bias = self.mask.length_B, self.mask.bias
        mask = AttentionMask(
            length_B=None if length_B is None else length_B[few], bias=None if bias is None else bias[few]
        )
        memory = [pair and (pair[0][few], pair[1][few]) for pair in self.memory]
        return replace(self, memory=memory, mask=mask, length_B=self.length_B[few])

    def put(self, sentences_K: Tensor, fresh: KVCache) -> KVCache:
        """Replace these sentences by fresh ones. Old cache entries lie ahead of them and are masked."""
        for pair, new_pair in zip(self.memory, fresh.memory, strict=True):
            for old_BHSD, new_BHSD in zip(pair or (), new_pair or (), strict=True):
                old_BHSD.index_copy_(0, sentences_K, new_BHSD)
        for old_B, new_B in ((self.mask.bias, fresh.mask.bias), (self.mask.length_B, fresh.mask.length_B)):
            if old_B is not None and new_B is not None:
                old_B.index_copy_(0, sentences_K, new_B)
        width = len(self.caches[0][0]) // len(self.length_B)
        self.beam_indices_NK.index_fill_(0, expand_to_rows(sentences_K, width), 0)
        return replace(self, length_B=self.length_B.index_copy(0, sentences_K, fresh.length_B))


def select_rows(caches: list[CachePair], rows_N: Tensor) -> list[CachePair]:
    """Return these rows of the keys and values of each layer."""
    return [tuple(tensor.index_select(0, rows_N) for tensor in pair) if pair else pair for pair in caches]  # type: ignore[misc]
