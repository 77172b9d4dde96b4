"""Dependency trees in grids: how deep each source token lies, and the way from each to each other.

A way is the number of arcs between two words, positive where the second stands to the right of the first and negative
where it stands to the left; between the tokens of one word it is 0. Ways longer than FAR count as FAR, so that a byte
holds one. NO_WAY stands where there is none: between sentences, at padding, at </s>, and where no tree is known.

Shapes   B rows   S source width   W words of a row   N tokens of all rows   K words of all rows, from 1; 0 is no word
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.types import NO_WAY, Batch, Links

FAR = 127
Numbers = NDArray[np.int64]


def lay_trees(links: Sequence[Links], row: Numbers, place_N: Numbers, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """depth_BS and tree_BSS of sentences in these rows; `place_N` is where each token lies, every </s> among them.

    Two words have as many ancestors in common, themselves included, as the lowest that they share is deep. So one
    matrix product gives all ways at once.
    """
    word_N, head_K, column_K = _numbered(links, row)
    sentence_N = np.repeat(np.arange(1, len(links) + 1), [len(one.word) + 1 for one in links])
    word_BS, sentence_BS = (_grid(each, place_N, shape) for each in (word_N, np.where(word_N, sentence_N, 0)))
    ancestor_BSW = torch.zeros(*shape, int(column_K.max()) + 1)
    flat = ancestor_BSW.flatten(0, 1).numpy()
    while word_N.any():
        known = word_N > 0
        flat[place_N[known], column_K[word_N[known]]] = 1
        word_N = head_K[word_N]
    depth_BS = ancestor_BSW.sum(-1)
    arcs_BSS = depth_BS[:, :, None] + depth_BS[:, None] - 2 * ancestor_BSW @ ancestor_BSW.mT
    way_BSS = arcs_BSS.clamp(max=FAR) * (word_BS[:, None] - word_BS[:, :, None]).sign()
    known_BSS = (sentence_BS[:, None] == sentence_BS[:, :, None]) & (sentence_BS > 0)[:, None]
    return depth_BS.long(), way_BSS.masked_fill(~known_BSS, NO_WAY).to(torch.int8)


def without_trees(batch: Batch) -> Batch:
    """A grid of which no tree is known, for a model that asks for trees."""
    depth_BS = torch.zeros_like(batch.source_BS)
    tree_BSS = torch.full((*depth_BS.shape, depth_BS.size(1)), NO_WAY, dtype=torch.int8)
    return replace(batch, depth_BS=depth_BS, tree_BSS=tree_BSS)


def _numbered(links: Sequence[Links], row: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """All words numbered through: the word of each token, and of each word its head and its column in its row."""
    size = np.array([len(one.head) for one in links])
    before = np.cumsum(size) - size
    own_N = np.concatenate([part for one in links for part in (one.word.astype(np.int64), [0])])
    own_K = np.concatenate([[0], *(one.head.astype(np.int64) for one in links)])
    word_N = np.where(own_N, own_N + np.repeat(before, [len(one.word) + 1 for one in links]), 0)
    head_K = np.where(own_K, own_K + np.repeat([0, *before], [1, *size]), 0)
    first = before[np.searchsorted(row, row)]  # of the row
    column_K = np.arange(-1, len(head_K) - 1) - np.repeat([0, *first], [1, *size])
    return word_N, head_K, column_K


def _grid(values_N: Numbers, place_N: Numbers, shape: tuple[int, int]) -> Tensor:
    out = np.zeros(shape, dtype=np.int64)
    out.ravel()[place_N] = values_N
    return torch.from_numpy(out)
