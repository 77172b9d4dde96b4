"""Phrase pairs: extracted from word alignments, counted, scored, and kept in a table of flat arrays.

A phrase pair is a source span and a target span such that words inside are linked to each other only, with at least one
link (Och and Ney 2004). Its features are logarithms:

    p(target | source), p(source | target)    by relative frequency, discounted like n-grams (Foster 2006)
    lexical weight, both ways                 product over words of the mean probability of their links (Koehn 2003)
    orientation                               of the phrase towards the one before and the one after it

A phrase pair is *monotone* towards the one before it if a phrase pair, of any length, ends where it starts in both
languages; it is *swapped* if one ends there in the target and starts in the source where this one ends; otherwise it is
*discontinuous* (Tillmann 2004, Galley and Manning 2008). Towards the one after it is the same with starts and ends
exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.errors import UserError
from dragoman.smt.compiled import Array, compiled
from dragoman.smt.mapped_tensors import map_tensors, save_tensors_with_digest
from dragoman.smt.ngram import estimate_discounts
from dragoman.smt.trie import ROOT, Trie, number_substrings

# Flags of the corners of phrase pairs in the alignment matrix; see `mark_corners`.
ENDS, STARTS, TURNS_BACK, TURNS_FORWARD = 1, 2, 4, 8


@compiled
def bound_links(link_i: Array, link_j: Array, I: int, J: int) -> tuple[Array, Array, Array, Array]:
    """Return the first and the last target position linked to each source word, then the same for target words.

    A word without links has the length of the other sentence as its first, and -1 as its last.
    """
    target_low, target_high, source_low, source_high = np.full(I, J), np.full(I, -1), np.full(J, I), np.full(J, -1)
    for link in range(len(link_i)):
        i, j = link_i[link], link_j[link]
        target_low[i], target_high[i] = min(target_low[i], j), max(target_high[i], j)
        source_low[j], source_high[j] = min(source_low[j], i), max(source_high[j], i)
    return target_low, target_high, source_low, source_high


@compiled
def mark_corners(target_low: Array, target_high: Array, source_low: Array, source_high: Array) -> Array:
    """Return a matrix of flags: which corners of phrase pairs, of any length, lie before source word i, target word j.

    ENDS: a pair ends there in both languages; STARTS: it starts in both. TURNS_BACK: its source starts there and its
    target ends; TURNS_FORWARD: its target starts there and its source ends. The ends of the sentences count as pairs.
    """
    I, J = len(target_low), len(source_low)
    corners = np.zeros((I + 1, J + 1), np.uint8)
    corners[0, 0] |= ENDS
    corners[I, J] |= STARTS
    for i in range(I):
        first, last = J, -1  # target words linked to source words from i on
        source_first, source_last = I, -1  # source words linked to those
        for end in range(i + 1, I + 1):
            new_first, new_last = min(first, target_low[end - 1]), max(last, target_high[end - 1])
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
    before = after = 2  # 0: monotone, 1: swapped, 2: discontinuous
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

    Positions count from the beginning of the text, not of the sentence. With an empty `out`, only count.
    """
    found = 0
    for pair in range(len(source_starts) - 1):
        i0, I = source_starts[pair], source_starts[pair + 1] - source_starts[pair]
        j0, J = target_starts[pair], target_starts[pair + 1] - target_starts[pair]
        links = slice(link_starts[pair], link_starts[pair + 1])
        target_low, target_high, source_low, source_high = bound_links(link_i[links], link_j[links], I, J)
        corners = (
            mark_corners(target_low, target_high, source_low, source_high) if len(out) else np.zeros((0, 0), np.uint8)
        )
        for i in range(I):
            first, last = J, -1
            for end in range(i, min(i + longest, I)):
                first, last = min(first, target_low[end]), max(last, target_high[end])
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


def compute_token_weights(
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
    """Options (translations) by source phrase, in flat arrays that a file can be mapped to.

    What many options share is stored once: target phrases, distributions of orientations and patterns of links.
    Features are float16: their rounding error of at most 0.05 % is far below the error of the estimates.
    """

    source: Trie
    options: Array  # those of trie node n are options[n] to options[n + 1] - 1, the likeliest first
    target: Array  # index of every option's target phrase
    target_starts: Array  # where the words of each target phrase start
    target_words: Array
    features: Array  # options x 4
    reordering_of: Array  # row in `reordering` of every option
    reordering: Array  # rows x 6: three orientations towards the phrase before, three towards the one after
    links_of: Array  # index of every option's pattern of links
    link_starts: Array
    links: Array  # (source, target) positions inside the phrase

    def read_option(self, row: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the target words of an option, and its links."""
        phrase, pattern = int(self.target[row]), int(self.links_of[row])
        words = self.target_words[self.target_starts[phrase] : self.target_starts[phrase + 1]]
        links = self.links[self.link_starts[pattern] : self.link_starts[pattern + 1]]
        return words.tolist(), [(i, j) for i, j in links.tolist()]

    def list_lines(self, source_words: Sequence[str], target_words: Sequence[str]) -> Iterator[str]:
        """Yield the table as text in the form of Moses: source ||| target ||| probabilities ||| links."""
        parents = self.source.parents
        for node in np.flatnonzero(np.diff(self.options)).tolist():
            source, ancestor = [], node
            while ancestor != ROOT:
                source.append(source_words[self.source.words[ancestor]])
                ancestor = parents[ancestor]
            for row in range(self.options[node], self.options[node + 1]):
                words, links = self.read_option(row)
                yield " ||| ".join(
                    [
                        " ".join(reversed(source)),
                        " ".join(target_words[word] for word in words),
                        " ".join(f"{value:.6g}" for value in np.exp(self.features[row].astype(np.float64))),
                        " ".join(f"{i}-{j}" for i, j in links),
                    ]
                )

    def save(self, path: Path, about: Mapping[str, str]) -> None:
        arrays = {name: value for name, value in vars(self).items() if name != "source"}
        arrays |= {f"trie.{name}": value for name, value in vars(self.source).items()}
        save_tensors_with_digest(path, arrays, about)

    @classmethod
    def load(cls, path: Path) -> PhraseTable:
        """Map a table that `save` wrote into memory; a damaged file is refused."""
        arrays = map_tensors(path)
        try:
            trie = Trie(**{name.removeprefix("trie."): arrays.pop(name) for name in list(arrays) if "." in name})
            table = cls(source=trie, **arrays)
        except TypeError as error:
            raise UserError(f"{str(path)!r} has no phrase table of this version; train it again: {error}") from error
        sizes = {len(table.target), len(table.features), len(table.reordering_of), len(table.links_of)}
        if sizes != {int(table.options[-1])} or len(table.options) != len(trie.words) + 1:
            raise UserError(f"{str(path)!r} is damaged: the lengths of its arrays do not fit together; train it again")
        return table


def build_table(
    source: Any,
    target: Any,
    words: tuple[int, int],
    links: tuple[Array, Array, Array],
    *,
    longest: int = 7,
    limit: int = 30,
    min_count: int = 1,
) -> PhraseTable:
    """Extract and score the phrase pairs of aligned sentences; keep the `limit` likeliest targets of each source.

    `words` are the sizes of both vocabularies, `links` the three arrays (index of the first link of each sentence pair,
    source positions, target positions). Phrase pairs that occur less than `min_count` times are left out, unless the
    source is a single word: without them, known words would become unknown ones.
    """
    link_starts, link_i, link_j = links
    arguments = (source.starts, target.starts, link_starts, link_i, link_j, longest)
    spans = np.empty((extract_spans(*arguments, np.empty((0, 6), np.int64)), 6), np.int64)
    if not len(spans):
        raise UserError("there are no phrase pairs to extract: no words of the training text are aligned")
    extract_spans(*arguments, spans)
    i, i_end, j, j_end, before, after = spans.T
    per_pair = np.diff(link_starts)
    at_i = link_i + np.repeat(source.starts[:-1], per_pair)
    at_j = link_j + np.repeat(target.starts[:-1], per_pair)
    lexical = compute_lexical_weights(source, target, words, (at_i, at_j), spans)
    source_levels, source_phrase = number_phrases(source, i, i_end, words[0], longest)
    _, target_phrase = number_phrases(target, j, j_end, words[1], longest)

    # One row for every distinct (source, target), from the instance with the best lexical weight.
    order = np.lexsort((-lexical.sum(1), target_phrase, source_phrase))
    is_first = (np.diff(source_phrase[order], prepend=-1) != 0) | (np.diff(target_phrase[order], prepend=-1) != 0)
    pair_of = np.empty(len(spans), np.int64)
    pair_of[order] = np.cumsum(is_first) - 1
    instance, count = order[is_first], np.bincount(pair_of)
    given, outcome = source_phrase[instance], target_phrase[instance]
    probabilities = smooth_counts(count, given, outcome), smooth_counts(count, outcome, given)
    features = np.stack([*probabilities, *lexical[instance].T], 1)

    kept = np.flatnonzero((count >= min_count) | ((i_end - i)[instance] == 1))
    kept = kept[np.lexsort((-features[kept, 0], given[kept]))]
    kept = kept[np.arange(len(kept)) - np.searchsorted(given[kept], given[kept]) < limit]
    trie, node_of = make_trie(source_levels, given[kept])
    kept = kept[np.argsort(node_of[given[kept]], kind="stable")]
    instance = instance[kept]
    reordering_of, reordering = score_orientations(pair_of, before, after, kept)
    links_of, pattern_starts, patterns = share_links(spans[instance], at_i, at_j, longest)
    target_of, target_starts, target_words = share_phrases(target.ids, j[instance], j_end[instance], outcome[kept])
    options = np.searchsorted(node_of[given[kept]], np.arange(len(trie.words) + 1))
    return PhraseTable(
        trie, options.astype(np.int32), target_of.astype(np.int32), target_starts.astype(np.int32),
        shrink_integers(target_words), features[kept].astype(np.float16), shrink_integers(reordering_of),
        reordering.astype(np.float32), shrink_integers(links_of), pattern_starts.astype(np.int32),
        patterns.astype(np.uint8),
    )  # fmt: skip


def compute_lexical_weights(
    source: Any, target: Any, words: tuple[int, int], links: tuple[Array, Array], spans: Array
) -> Array:
    """Return the lexical weights of phrase pairs in both directions, two columns.

    They are differences of sums over the tokens of the text: links of a phrase never leave it.
    """
    at_i, at_j = links
    word_i, word_j = source.ids[at_i].astype(np.int64), target.ids[at_j].astype(np.int64)
    forward = compute_token_weights(word_j, word_i, at_j, len(target.ids), target.ids, words[0])
    backward = compute_token_weights(word_i, word_j, at_i, len(source.ids), source.ids, words[1])
    forward, backward = (np.concatenate([[0.0], np.cumsum(scores)]) for scores in (forward, backward))
    i, i_end, j, j_end = spans.T[:4]
    return np.stack([forward[j_end] - forward[j], backward[i_end] - backward[i]], 1)


def number_phrases(
    side: Any, start: Array, end: Array, vocabulary: int, longest: int
) -> tuple[list[tuple[Array, Array]], Array]:
    """Number all word sequences of a text, the shorter ones first, up to the length `longest`.

    Return the columns (index of the prefix among the sequences one shorter, last word) of each length, and the number
    of the sequence in each span from `start` to `end`.
    """
    levels = number_substrings(side.ids, side.starts, vocabulary, longest)
    phrase = np.empty(len(start), np.int64)
    offset = 0
    for size, (_, word, starting_at) in enumerate(levels, 1):
        chosen = end - start == size
        phrase[chosen] = offset + starting_at[start[chosen]]
        offset += len(word)
    return [(prefix, word) for prefix, word, _ in levels], phrase


def make_trie(levels: list[tuple[Array, Array]], phrases: Array) -> tuple[Trie, Array]:
    """Return a trie of these phrases and their prefixes, and the node of every phrase by number (-1: not in it)."""
    ends = np.cumsum([len(word) for _, word in levels])
    needed = np.zeros(ends[-1], bool)
    needed[phrases] = True
    needed_at = np.split(needed, ends[:-1])
    for size in range(len(levels) - 1, 0, -1):
        needed_at[size - 1][levels[size][0][needed_at[size]]] = True
    columns, index = [], np.zeros(1, np.int64)  # index: of the sequences one shorter among those that are needed
    for (prefix, word), chosen in zip(levels, needed_at, strict=True):
        columns.append((index[prefix[chosen]], word[chosen]))
        index = np.cumsum(chosen) - 1
    while len(columns) > 1 and not len(columns[-1][1]):
        columns.pop()
    trie, nodes = Trie.from_levels(columns)
    node_of = np.full(ends[-1], -1)
    node_of[needed] = np.concatenate(nodes)
    return trie, node_of


def share_phrases(ids: Array, start: Array, end: Array, phrase: Array) -> tuple[Array, Array, Array]:
    """Store each phrase once: return its index by option, where the words of each start, and the words."""
    _, example, index = np.unique(phrase, return_index=True, return_inverse=True)
    starts, positions = concatenate_ranges(start[example], (end - start)[example])
    return index, starts, ids[positions]


def share_links(spans: Array, at_i: Array, at_j: Array, longest: int) -> tuple[Array, Array, Array]:
    """Store each pattern of links once: return its index by span, where the links of each start, and the links."""
    order = np.argsort(at_i, kind="stable")
    at_i, at_j = at_i[order], at_j[order]
    low, high = np.searchsorted(at_i, spans[:, 0]), np.searchsorted(at_i, spans[:, 1])
    starts, positions = concatenate_ranges(low, high - low)
    inside_i = at_i[positions] - np.repeat(spans[:, 0], high - low)
    inside_j = at_j[positions] - np.repeat(spans[:, 2], high - low)
    # A pattern is a set of bits, one per link; those beyond an int64 are in further columns.
    bits, word_bits = inside_i * longest + inside_j, 62
    masks = [
        np.add.reduceat(np.where(bits // word_bits == column, 1 << (bits % word_bits), 0), starts[:-1])
        for column in range(longest * longest // word_bits + 1)
    ]
    example, index = number_rows(masks)
    pattern_starts, positions = concatenate_ranges(starts[example], np.diff(starts)[example])
    return index, pattern_starts, np.stack([inside_i[positions], inside_j[positions]], 1)


def number_rows(columns: Sequence[Array]) -> tuple[Array, Array]:
    """Number the distinct rows of integer columns; return one row of each number, and the number of each row."""
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, value = np.unique(column, return_inverse=True)
        _, example, number = np.unique(number * len(values) + value, return_index=True, return_inverse=True)
    return example, number


def shrink_integers(values: Array) -> Array:
    return values.astype(np.uint16 if values.max(initial=0) < 1 << 16 else np.int32)


def concatenate_ranges(starts: Array, lengths: Array) -> tuple[Array, Array]:
    """Concatenate ranges of integers; return where each begins and ends in the result, and the result."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return ends, np.repeat(starts - ends[:-1], lengths) + np.arange(ends[-1])


def score_orientations(pair_of: Array, before: Array, after: Array, kept: Array) -> tuple[Array, Array]:
    """Return the index of each kept phrase pair's distribution of orientations, and the distinct distributions.

    These are log p(orientation | phrase pair), three towards the phrase before and three towards the one after, with
    half a count added to each.
    """
    pairs = int(pair_of.max()) + 1
    counts = [
        np.bincount(pair_of[side == value], minlength=pairs)[kept] for side in (before, after) for value in range(3)
    ]
    example, index = number_rows(counts)
    smoothed = np.stack(counts, 1)[example].reshape(-1, 2, 3) + 0.5
    return index, np.log(smoothed / smoothed.sum(2, keepdims=True)).reshape(-1, 6)


def smooth_counts(count: Array, given: Array, outcome: Array) -> Array:
    """Return log p(outcome | given) with Kneser-Ney smoothing: interpolated with each outcome's continuation counts."""
    discount = estimate_discounts(count)[np.minimum(count, 3)]
    total = np.bincount(given, count)
    mass = np.bincount(given, discount) / np.maximum(total, 1)
    continuation = np.bincount(outcome)[outcome] / len(count)
    return np.log((count - discount) / total[given] + mass[given] * continuation)
