"""A trie in flat arrays, for n-grams and for source phrases.

A node is a sequence of words. Nodes are numbered level by level, where level n has the sequences of n words, and the
children of a node are adjacent and sorted by word. So a node needs only the number of its first child, and a word is
looked up by binary search. Flat arrays can be memory-mapped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dragoman.smt.compiled import Array

ROOT = 0


@dataclass(frozen=True)
class Trie:
    """The nodes of a trie. The children of node n are the nodes from children[n] to children[n + 1] - 1."""

    children: Array
    words: Array  # the last word of each node
    levels: Array  # the first node of every level, beginning with the root, and the number of nodes

    @classmethod
    def from_levels(cls, levels: list[tuple[Array, Array]]) -> tuple[Trie, list[Array]]:
        """Build a trie from the columns (index of prefix in the level before, last word); also return all nodes."""
        words, counts, level_starts = [np.zeros(1, np.int32)], [], [0, 1]
        parents = np.zeros(1, np.int64)
        nodes: list[Array] = []
        for prefix, word in levels:
            parent = parents[prefix]
            order = np.lexsort((word, parent))
            node = np.empty(len(order), np.int64)
            node[order] = level_starts[-1] + np.arange(len(order))
            words.append(word[order].astype(np.int32))
            counts.append(np.bincount(parent - level_starts[-2], minlength=level_starts[-1] - level_starts[-2]))
            level_starts.append(level_starts[-1] + len(order))
            nodes.append(node)
            parents = node
        counts.append(np.zeros(level_starts[-1] - level_starts[-2], np.int64))
        children = np.concatenate([[1], 1 + np.cumsum(np.concatenate(counts))]).astype(np.int32)
        return cls(children, np.concatenate(words), np.array(level_starts)), nodes

    @property
    def parents(self) -> Array:
        """Return the parent of every node; the root is its own."""
        return np.append([ROOT], np.repeat(np.arange(len(self.words)), np.diff(self.children)))


def number_substrings(ids: Array, starts: Array, vocabulary: int, longest: int) -> list[tuple[Array, Array, Array]]:
    """Number the distinct word sequences of every length up to `longest`, none across the end of a sentence.

    Return three arrays for each length: the index of each sequence's prefix among the sequences one shorter, its last
    word, and the index of the sequence that starts at each position of the text (-1 if the sentence is too short).
    """
    ends = np.repeat(starts[1:], np.diff(starts))
    result = []
    starting_at = np.zeros(len(ids), np.int64)  # index of the sequence that starts at each position, one word shorter
    for size in range(1, longest + 1):
        fits = np.flatnonzero(np.arange(len(ids)) + size <= ends)
        keys, which = np.unique(starting_at[fits] * vocabulary + ids[fits + size - 1], return_inverse=True)
        starting_at = np.full(len(ids), -1, np.int64)
        starting_at[fits] = which
        result.append((keys // vocabulary, keys % vocabulary, starting_at))
    return result
