"""What a Transformer carries through a search: keys and values of the source, and of all that was said so far.

Shapes   B sentences   W rows of a sentence   N = B * W   H heads   S source width   K places of a cache   D head width
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from dragoman.kernels.attention import KeyValue
from dragoman.kernels.masks import AttentionMask
from dragoman.models.base import expand_to_rows

CachePair = TypeVar("CachePair", KeyValue, KeyValue | None)


@dataclass(frozen=True)
class KVCache:
    """What a search carries from step to step. The source's keys and values stay one per sentence.

    A state serves for one step: the step, and a change of rows, write into its caches.

    When beams change places, most of what they have said is the same as what stood there before. `who_NK` says which
    row said each place of a row's past, so only what differs is copied; where caches `stay`, as on a GPU, nothing is,
    and the table also says where to look (kernels/attention.py).
    """

    memory: list[KeyValue | None]  # of each layer
    look: AttentionMask  # at the sources
    caches: list[KeyValue]
    at_B: Tensor  # tokens that each sentence's rows have read
    who_NK: Tensor
    stay: bool = False

    @property
    def capacity(self) -> int:
        return self.caches[0][0].size(2)

    @property
    def nbytes(self) -> int:
        """Of all keys and values."""
        return sum(each.nbytes for pair in (*self.memory, *self.caches) for each in pair or ())

    def select(self, rows_N: Tensor) -> KVCache:
        """The rows at these places. The rows of a sentence stay together, N / B of them to each."""
        who_NK = self.who_NK.index_select(0, rows_N)
        if not self.stay and (len(rows_N) != len(self.who_NK) or who_NK.is_cuda):
            return replace(self, caches=select_rows(self.caches, rows_N), who_NK=who_NK)
        if not self.stay:
            self.move(rows_N, (who_NK != self.who_NK).nonzero())
        return replace(self, who_NK=who_NK)

    def move(self, rows_N: Tensor, cell_M2: Tensor) -> None:
        """Copy these cells, each a row and a place in it, from the rows that stand at these places."""
        heads, capacity = self.caches[0][0].shape[1:3]
        row_M1, place_M1 = cell_M2[:, :1], cell_M2[:, 1:]
        head_H = torch.arange(heads, device=rows_N.device)
        to_M, from_M = (((row * heads + head_H) * capacity + place_M1).flatten() for row in (row_M1, rows_N[row_M1]))
        for each in (each for pair in self.caches for each in pair) if len(cell_M2) else ():
            flat_MD = each.view(-1, each.size(3))
            flat_MD.index_copy_(0, to_M, flat_MD.index_select(0, from_M))

    def indexed(self, capacity: int) -> KVCache:
        """The same with caches that have room for so many tokens and never move, for sentences that have read none."""
        roomy = self.reserve(capacity)
        look = AttentionMask() if self.look.bias is None else AttentionMask(stop=(self.look.bias[:, 0, 0] == 0).sum(-1))
        return replace(roomy, look=look, stay=True)

    def reserve(self, places: int) -> KVCache:
        """Room for so many more places in the caches."""
        caches = [(extend_capacity(k, places), extend_capacity(v, places)) for k, v in self.caches]
        return replace(self, caches=caches, who_NK=nn.functional.pad(self.who_NK, (0, places)))

    def rest(self, done_B: Tensor) -> KVCache:
        """Sentences that are done stand at the beginning again, where they need no room."""
        return replace(self, at_B=self.at_B.masked_fill(done_B, 0))

    def keep(self, sentences_K: Tensor) -> KVCache:
        """Only these sentences, with all of their rows."""
        return KVCache(
            select_rows(self.memory, sentences_K),
            AttentionMask(bias=None if self.look.bias is None else self.look.bias.index_select(0, sentences_K)),
            select_rows(self.caches, self.rows_of(sentences_K)),
            self.at_B.index_select(0, sentences_K),
            self.who_NK.index_select(0, self.rows_of(sentences_K)),
        )

    def part(self, first: int, count: int) -> KVCache:
        """So many sentences that have read nothing yet, from this one on; nothing is copied."""
        few = slice(first, first + count)
        stop, bias = self.look.stop, self.look.bias
        look = AttentionMask(stop=None if stop is None else stop[few], bias=None if bias is None else bias[few])
        return replace(
            self, memory=[pair and (pair[0][few], pair[1][few]) for pair in self.memory], look=look, at_B=self.at_B[few]
        )

    def put(self, sentences_K: Tensor, fresh: KVCache) -> KVCache:
        """Fresh sentences in the places of these. What stands in their caches is from now on ahead of them: unseen."""
        for held, new in zip(self.memory, fresh.memory, strict=True):
            for held_BHSD, new_BHSD in zip(held or (), new or (), strict=True):
                held_BHSD.index_copy_(0, sentences_K, new_BHSD)
        for held_B, new_B in ((self.look.bias, fresh.look.bias), (self.look.stop, fresh.look.stop)):
            if held_B is not None and new_B is not None:
                held_B.index_copy_(0, sentences_K, new_B)
        self.who_NK.index_fill_(0, self.rows_of(sentences_K), 0)
        return replace(self, at_B=self.at_B.index_copy(0, sentences_K, fresh.at_B))

    def rows_of(self, sentences_K: Tensor) -> Tensor:
        return expand_to_rows(sentences_K, len(self.caches[0][0]) // len(self.at_B))


def select_rows(caches: list[CachePair], rows_N: Tensor) -> list[CachePair]:
    return [tuple(each.index_select(0, rows_N) for each in pair) if pair else pair for pair in caches]  # type: ignore[misc]


def extend_capacity(cache_NHKD: Tensor, places: int) -> Tensor:
    return nn.functional.pad(cache_NHKD, (0, 0, 0, places))
