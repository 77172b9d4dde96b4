"""A trie in flat arrays, for n-grams and for source phrases.

Nodes are numbered level by level; the children of a node stand side by side, sorted by word. So a node needs only the
number of its first child, and looking up a word is a binary search. Flat arrays can be memory-mapped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dragoman.smt.compiled import Array

ROOT = 0


@dataclass(frozen=True)
class Trie:
    """Children of node n are children[n] up to children[n + 1]; words[n] is its last word."""

    children: Array
    words: Array
    levels: Array  # the first node of every level, the root's being 0, and the end of the last

    @classmethod
    def from_levels(cls, levels: list[tuple[Array, Array]]) -> tuple[Trie, list[Array]]:
        """Build a trie from the (prefix, word) columns of each level, in any order; also return each entry's node."""
        words, counts, first = [np.zeros(1, np.int32)], [], [0, 1]
        parents = np.zeros(1, np.int64)
        nodes: list[Array] = []
        for prefix, word in levels:
            parent = parents[prefix]
            order = np.lexsort((word, parent))
            node = np.empty(len(order), np.int64)
            node[order] = first[-1] + np.arange(len(order))
            words.append(word[order].astype(np.int32))
            counts.append(np.bincount(parent - first[-2], minlength=first[-1] - first[-2]))
            first.append(first[-1] + len(order))
            nodes.append(node)
            parents = node
        counts.append(np.zeros(first[-1] - first[-2], np.int64))
        children = np.concatenate([[1], 1 + np.cumsum(np.concatenate(counts))]).astype(np.int32)
        return cls(children, np.concatenate(words), np.array(first)), nodes

    @property
    def parents(self) -> Array:
        """Return the parent of every node; the root is its own."""
        return np.append([ROOT], np.repeat(np.arange(len(self.words)), np.diff(self.children)))


def number_substrings(ids: Array, starts: Array, vocabulary: int, longest: int) -> list[tuple[Array, Array, Array]]:
    """Number the distinct word sequences of every length up to `longest`, none across the end of a sentence.

    For each length: the index of each sequence's first words among those one shorter, its last word, and which sequence
    starts at each position of the text (-1 where the sentence is too short).
    """
    ends = np.repeat(starts[1:], np.diff(starts))
    result = []
    at = np.zeros(len(ids), np.int64)  # which of the shorter sequences starts at each position
    for size in range(1, longest + 1):
        fits = np.flatnonzero(np.arange(len(ids)) + size <= ends)
        keys, which = np.unique(at[fits] * vocabulary + ids[fits + size - 1], return_inverse=True)
        at = np.full(len(ids), -1, np.int64)
        at[fits] = which
        result.append((keys // vocabulary, keys % vocabulary, at))
    return result
