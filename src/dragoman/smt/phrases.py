"""Phrase pairs: extracted from word alignments, counted, scored, and kept in a table of flat arrays.

A phrase pair is a source span and a target span such that words inside are linked to each other only, with at least one
link (Och and Ney 2004). Its features are logarithms:

    p(target | source), p(source | target)    by relative frequency, discounted like n-grams (Foster 2006)
    lexical weight, both ways                 product over words of the mean probability of their links (Koehn 2003)
    orientation                               of the phrase towards the one before and the one after it

A phrase pair is *monotone* towards the one before it if some phrase pair, of any length, ends where it starts in both
languages; it is *swapped* if one ends there in the target and starts in the source where this one ends; otherwise it is
*discontinuous* (Tillmann 2004, Galley and Manning 2008). Towards the one after it is the same with starts and ends
exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from dragoman.smt.compiled import Array, compiled
from dragoman.smt.ngram import estimate_discounts
from dragoman.smt.trie import ROOT, Trie, number_substrings

PHRASE_FEATURES = ("p(target|source)", "p(source|target)", "lex(target|source)", "lex(source|target)")
ORIENTATIONS = ("monotone", "swap", "discontinuous")


# What phrase pairs, of any length, have a corner at a point between words; flags of a matrix.
ENDS, STARTS, TURNS_BACK, TURNS_FORWARD = 1, 2, 4, 8


@compiled
def bound_links(link_i: Array, link_j: Array, I: int, J: int) -> tuple[Array, Array, Array, Array]:
    """Return the first and the last target position linked to each source word, and the other way round.

    A word without links has the length of the other sentence as its first, and -1 as its last.
    """
    low, high, source_low, source_high = np.full(I, J), np.full(I, -1), np.full(J, I), np.full(J, -1)
    for link in range(len(link_i)):
        i, j = link_i[link], link_j[link]
        low[i], high[i] = min(low[i], j), max(high[i], j)
        source_low[j], source_high[j] = min(source_low[j], i), max(source_high[j], i)
    return low, high, source_low, source_high


@compiled
def mark_corners(low: Array, high: Array, source_low: Array, source_high: Array) -> Array:
    """Return a matrix of flags: which corners of phrase pairs, of any length, lie before source word i, target word j.

    ENDS: a pair ends there in both languages; STARTS: it starts in both. TURNS_BACK: its source starts there and its
    target ends; TURNS_FORWARD: its target starts there and its source ends. The ends of the sentences count as pairs.
    """
    I, J = len(low), len(source_low)
    corners = np.zeros((I + 1, J + 1), np.uint8)
    corners[0, 0] |= ENDS
    corners[I, J] |= STARTS
    for i in range(I):
        first, last = J, -1  # target words linked to source words from i on
        source_first, source_last = I, -1  # source words linked to those
        for end in range(i + 1, I + 1):
            new_first, new_last = min(first, low[end - 1]), max(last, high[end - 1])
            for j in range(new_first, new_last + 1):
                if j < first or j > last:
                    source_first, source_last = min(source_first, source_low[j]), max(source_last, source_high[j])
            first, last = new_first, new_last
            if source_first < i:
                break
            if last < 0 or source_last >= end:
                continue
            start = first  # target words without links around the phrase may belong to it
            while start >= 0 and (start == first or source_high[start] < 0):
                corners[i, start] |= STARTS
                corners[end, start] |= TURNS_FORWARD
                start -= 1
            stop = last + 1
            while stop <= J and (stop == last + 1 or source_high[stop - 1] < 0):
                corners[end, stop] |= ENDS
                corners[i, stop] |= TURNS_BACK
                stop += 1
    return corners


@compiled
def find_orientations(corners: Array, i: int, end: int, start: int, stop: int) -> tuple[int, int]:
    """Return the orientations of the phrase pair (source i to end, target start to stop) before and after it."""
    before = after = 2
    if corners[i, start] & ENDS:
        before = 0
    elif corners[end, start] & TURNS_BACK:
        before = 1
    if corners[end, stop] & STARTS:
        after = 0
    elif corners[i, stop] & TURNS_FORWARD:
        after = 1
    return before, after


@compiled
def extract_spans(
    source_starts: Array,
    target_starts: Array,
    link_starts: Array,
    link_i: Array,
    link_j: Array,
    longest: int,
    out: Array,
) -> int:
    """Write a row (i, i end, j, j end, orientation before, orientation after) for every phrase pair; return how many.

    Positions count from the beginning of the text, not of the sentence. With an empty `out` it only counts.
    """
    found = 0
    for pair in range(len(source_starts) - 1):
        i0, I = source_starts[pair], source_starts[pair + 1] - source_starts[pair]
        j0, J = target_starts[pair], target_starts[pair + 1] - target_starts[pair]
        links = slice(link_starts[pair], link_starts[pair + 1])
        low, high, source_low, source_high = bound_links(link_i[links], link_j[links], I, J)
        corners = mark_corners(low, high, source_low, source_high) if len(out) else np.zeros((0, 0), np.uint8)
        for i in range(I):
            first, last = J, -1
            for end in range(i, min(i + longest, I)):
                first, last = min(first, low[end]), max(last, high[end])
                if last < 0:
                    continue
                if last - first >= longest:
                    break
                inside = True
                for j in range(first, last + 1):
                    if source_high[j] >= 0 and (source_low[j] < i or source_high[j] > end):
                        inside = False
                if not inside:
                    continue
                start = first
                while start >= 0 and last - start < longest and (start == first or source_high[start] < 0):
                    stop = last
                    while stop < J and stop - start < longest and (stop == last or source_high[stop] < 0):
                        if len(out):
                            before, after = find_orientations(corners, i, end + 1, start, stop + 1)
                            out[found] = (i0 + i, i0 + end + 1, j0 + start, j0 + stop + 1, before, after)
                        found += 1
                        stop += 1
                    start -= 1
    return found


def score_tokens(
    link_words: Array, link_given: Array, token: Array, tokens: int, text: Array, given_words: int
) -> Array:
    """Return the logarithm of every token's lexical weight: the mean of p(word | linked word) over its links.

    `link_words` are the words at this side of each link and `link_given` those at the other; `token` is the position of
    each link in the text. Words without a link count as linked to nothing.
    """
    linked = np.zeros(tokens, bool)
    linked[token] = True
    nothing = given_words
    words = np.concatenate([link_words, text[~linked]])
    given = np.concatenate([link_given, np.full((~linked).sum(), nothing)])
    position = np.concatenate([token, np.flatnonzero(~linked)])
    keys, which, count = np.unique(words * np.int64(given_words + 1) + given, return_inverse=True, return_counts=True)
    total = np.bincount(given, minlength=given_words + 1)
    probability = count / total[keys % (given_words + 1)]
    sums = np.bincount(position, probability[which], tokens)
    return np.log(sums / np.bincount(position, minlength=tokens))


@dataclass(frozen=True)
class PhraseTable:
    """Options by source phrase. All are flat arrays, so that a table of any size can be memory-mapped."""

    source: Trie
    options: Array  # of node n: options[n] up to options[n + 1], the likeliest first
    target: Array  # target phrase of every option
    target_starts: Array  # where the words of each target phrase start
    target_words: Array
    features: Array  # options x 4
    reordering: Array  # options x 6: three orientations towards the phrase before, three towards the one after
    link_starts: Array  # where the links of each option start
    links: Array  # (source, target) positions inside the phrase

    def read_option(self, row: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the target words of an option, and its links."""
        phrase = self.target[row]
        words = self.target_words[self.target_starts[phrase] : self.target_starts[phrase + 1]]
        links = self.links[self.link_starts[row] : self.link_starts[row + 1]]
        return words.tolist(), [(i, j) for i, j in links.tolist()]

    def list_lines(self, source_words: Sequence[str], target_words: Sequence[str]) -> Iterator[str]:
        """Yield the table as text in the form of Moses: source ||| target ||| probabilities ||| links."""
        trie = self.source
        for node in np.flatnonzero(np.diff(self.options)).tolist():
            source, at = [], node
            while at != ROOT:
                source.append(source_words[trie.words[at]])
                at = trie.parents[at]
            for row in range(self.options[node], self.options[node + 1]):
                words, links = self.read_option(row)
                yield " ||| ".join(
                    [
                        " ".join(reversed(source)),
                        " ".join(target_words[word] for word in words),
                        " ".join(f"{value:.6g}" for value in np.exp(self.features[row])),
                        " ".join(f"{i}-{j}" for i, j in links),
                    ]
                )

    def save(self, path: Path) -> None:
        """Write all arrays into a file."""
        arrays = {name: value for name, value in vars(self).items() if name != "source"}
        save_file({**arrays, **{f"trie.{name}": value for name, value in vars(self.source).items()}}, path)

    @classmethod
    def load(cls, path: Path) -> PhraseTable:
        """Read a table that `save` wrote."""
        arrays = load_file(path)
        trie = Trie(**{name.removeprefix("trie."): arrays.pop(name) for name in list(arrays) if "." in name})
        return cls(source=trie, **arrays)


def build_table(
    source: Any,
    target: Any,
    words: tuple[int, int],
    links: tuple[Array, Array, Array],
    *,
    longest: int = 7,
    limit: int = 30,
) -> PhraseTable:
    """Extract and score the phrase pairs of aligned sentences; keep the `limit` likeliest targets of each source."""
    link_starts, link_i, link_j = links
    arguments = (source.starts, target.starts, link_starts, link_i, link_j, longest)
    spans = np.empty((extract_spans(*arguments, np.empty((0, 6), np.int64)), 6), np.int64)
    extract_spans(*arguments, spans)
    i, i_end, j, j_end, before, after = spans.T

    # Lexical weights of spans are differences of sums over tokens: links of a phrase never leave it.
    per_pair = np.diff(link_starts)
    at_i = link_i + np.repeat(source.starts[:-1], per_pair)
    at_j = link_j + np.repeat(target.starts[:-1], per_pair)
    word_i, word_j = source.ids[at_i].astype(np.int64), target.ids[at_j].astype(np.int64)
    forward = score_tokens(word_j, word_i, at_j, len(target.ids), target.ids, words[0])
    backward = score_tokens(word_i, word_j, at_i, len(source.ids), source.ids, words[1])
    forward, backward = (np.concatenate([[0.0], np.cumsum(each)]) for each in (forward, backward))
    lex_forward, lex_backward = forward[j_end] - forward[j], backward[i_end] - backward[i]

    trie, node = number_phrases(source, i, i_end, words[0], longest)
    _, phrase = number_phrases(target, j, j_end, words[1], longest)

    # One row for every distinct (source, target), from the instance with the best lexical weight.
    order = np.lexsort((-(lex_forward + lex_backward), phrase, node))
    new = np.concatenate([[True], (np.diff(node[order]) != 0) | (np.diff(phrase[order]) != 0)])
    first = np.flatnonzero(new)
    kind = np.empty(len(spans), np.int64)
    kind[order] = np.cumsum(new) - 1
    count = np.bincount(kind)
    instance = order[first]
    row_node, row_phrase = node[instance], phrase[instance]
    reordering = np.concatenate([score_orientations(column, kind, len(count)) for column in (before, after)], 1)
    probabilities = _smooth(count, row_node, row_phrase), _smooth(count, row_phrase, row_node)
    features = np.stack([*probabilities, lex_forward[instance], lex_backward[instance]], 1)
    rank_order = np.lexsort((-features[:, 0], row_node))
    start_of = np.searchsorted(row_node[rank_order], row_node[rank_order])
    kept = rank_order[np.arange(len(rank_order)) - start_of < limit]
    instance, row_node, row_phrase = instance[kept], row_node[kept], row_phrase[kept]
    options = np.searchsorted(row_node, np.arange(len(trie.words) + 1))
    phrases, target_index = np.unique(row_phrase, return_inverse=True)
    example = np.empty(len(phrases), np.int64)
    example[target_index] = instance
    lengths = (j_end - j)[example]
    target_starts = np.concatenate([[0], np.cumsum(lengths)])
    target_words = target.ids[np.repeat(j[example] - target_starts[:-1], lengths) + np.arange(target_starts[-1])]
    inner_starts, inner = _links_inside(spans[instance], at_i, at_j)
    return PhraseTable(
        trie, options, target_index, target_starts, target_words, features[kept].astype(np.float32),
        reordering[kept].astype(np.float32), inner_starts, inner,
    )  # fmt: skip


def number_phrases(side: Any, start: Array, end: Array, words: int, longest: int) -> tuple[Trie, Array]:
    """Return a trie of all word sequences of a text up to a length, and the node of each span."""
    levels = number_substrings(side.ids, side.starts, words, longest)
    trie, nodes = Trie.of([(prefix, word) for prefix, word, _ in levels])
    found = np.empty(len(start), np.int64)
    for size, (level_nodes, (_, _, at)) in enumerate(zip(nodes, levels, strict=True), 1):
        chosen = end - start == size
        found[chosen] = level_nodes[at[start[chosen]]]
    return trie, found


def score_orientations(orientation: Array, kind: Array, kinds: int) -> Array:
    """Return log p(orientation | phrase pair) for the three orientations, with half a count added to each."""
    counts = np.stack([np.bincount(kind[orientation == value], minlength=kinds) for value in range(3)], 1) + 0.5
    shares: Array = counts / counts.sum(1, keepdims=True)
    return np.log(shares)


def _smooth(count: Array, given: Array, outcome: Array) -> Array:
    """Return log p(outcome | given), interpolated with how many different things each outcome was seen with."""
    discount = estimate_discounts(count)[np.minimum(count, 3)]
    total = np.bincount(given, count)
    mass = np.bincount(given, discount) / np.maximum(total, 1)
    variety = np.bincount(outcome)[outcome] / len(count)
    return np.log((count - discount) / total[given] + mass[given] * variety)


def _links_inside(spans: Array, at_i: Array, at_j: Array) -> tuple[Array, Array]:
    """Return the links of every span, relative to its beginning, and where each span's start."""
    order = np.argsort(at_i, kind="stable")
    at_i, at_j = at_i[order], at_j[order]
    low, high = np.searchsorted(at_i, spans[:, 0]), np.searchsorted(at_i, spans[:, 1])
    starts = np.concatenate([[0], np.cumsum(high - low)])
    which = np.repeat(low - starts[:-1], high - low) + np.arange(starts[-1])
    inside = np.stack(
        [at_i[which] - np.repeat(spans[:, 0], high - low), at_j[which] - np.repeat(spans[:, 2], high - low)], 1
    )
    return starts, inside.astype(np.uint8)
