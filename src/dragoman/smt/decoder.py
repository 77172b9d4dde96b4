"""Phrase-based translation: find the phrases and their order that score best under a log-linear model.

The score of a translation is a weighted sum of features, all of them logarithms or counts: the phrase table's, the
orientation of phrases, the language model, the distance of jumps, the number of words, phrases and unknown words.
`decoder_kernels.search_stacks` is the search. Here its options (source spans with a translation each) are collected,
and its best paths become derivations: translations phrase by phrase. Forced decoding finds the best derivation of a
given translation by the same search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np

from dragoman.hardware import usable_cores
from dragoman.smt import decoder_kernels as kernels
from dragoman.smt.compiled import Array
from dragoman.smt.decoder_kernels import NgramTrie, Options, SearchLimits
from dragoman.smt.ngram import BEGIN, END, SPECIAL_WORDS, UNKNOWN, NgramModel
from dragoman.smt.phrases import PhraseTable, concatenate_ranges
from dragoman.smt.settings import FEATURE_NAMES, ORIENTATIONS, PHRASE_FEATURES, DecoderSettings
from dragoman.smt.trie import ROOT, Trie

# Indices of features and weights, in the order of FEATURE_NAMES.
LM, DISTORTION, WORDS, PHRASES, UNKNOWNS = range(len(PHRASE_FEATURES) + 2 * len(ORIENTATIONS), len(FEATURE_NAMES))
REORDERING = slice(len(PHRASE_FEATURES), len(PHRASE_FEATURES) + 2 * len(ORIENTATIONS))
SENTENCES_AT_A_TIME = 256
FORCED_STACK = 10_000  # hypotheses per stack in forced decoding
NOTHING_REQUIRED = np.zeros(0, np.int64)  # target words of forced decoding: any translation is allowed

T = TypeVar("T")
R = TypeVar("R")


class NgramScorer:
    """An n-gram model as a trie that compiled code can query, in natural logarithms."""

    def __init__(self, model: NgramModel) -> None:
        self.words = model.words
        self.ids = {word: index for index, word in enumerate(model.words)}
        trie, nodes = Trie.from_levels([(order.prefix, order.word) for order in model.orders])
        log_prob, backoff = np.zeros(len(trie.words)), np.zeros(len(trie.words))
        for node, order in zip(nodes, model.orders, strict=True):
            log_prob[node], backoff[node] = order.log_prob * np.log(10), order.backoff * np.log(10)
        suffix = np.zeros(len(trie.words), np.int64)
        kernels.link_suffixes(trie.children, trie.words, trie.parents, suffix)
        first_longest = int(trie.levels[-2]) if len(model.orders) > 1 else len(trie.words)
        begin = kernels.find_child(trie.children, trie.words, ROOT, BEGIN)
        self.trie = NgramTrie(trie.children, trie.words, log_prob, backoff, suffix, first_longest, begin, END)

    def score_sentence(self, words: Sequence[str]) -> Iterator[tuple[float, bool]]:
        """Yield the log-probability of each word and of the end of the sentence, and whether the word is unknown."""
        state = self.trie.begin
        for word in [*(self.ids.get(word, UNKNOWN) if word not in SPECIAL_WORDS else UNKNOWN for word in words), END]:
            log_prob, state = kernels.score_word(self.trie, state, word)
            yield log_prob, word == UNKNOWN

    def score(self, words: Sequence[str]) -> float:
        return sum(log_prob for log_prob, _ in self.score_sentence(words))


class PhrasePair(NamedTuple):
    """A step of a derivation: a source span, the words it becomes, and the links between the two."""

    start: int
    end: int
    words: list[str]
    links: list[tuple[int, int]]  # inside the phrase


@dataclass(frozen=True)
class Derivation:
    """A translation, phrase by phrase, with the values of all features."""

    phrases: list[PhrasePair]
    features: Array
    score: float

    @property
    def words(self) -> list[str]:
        return [word for phrase in self.phrases for word in phrase.words]

    @cached_property
    def links(self) -> list[tuple[int, int]]:
        found, target = [], 0
        for phrase in self.phrases:
            found += [(phrase.start + i, target + j) for i, j in phrase.links]
            target += len(phrase.words)
        return sorted(found)


class PhraseDecoder:
    """A decoder with its phrase table, language model and weights of features."""

    def __init__(
        self, source_words: dict[str, int], target_words: Sequence[str], table: PhraseTable, lm: NgramScorer,
        weights: Array, settings: DecoderSettings,
    ) -> None:  # fmt: skip
        self.source_words, self.target_words, self.table, self.lm = source_words, target_words, table, lm
        self.settings, self.max_phrase = settings, len(table.source.levels) - 2  # a level per length, root, end
        self.target_ids = {word: index for index, word in enumerate(target_words)}
        self.lm_ids = np.array([lm.ids.get(word, UNKNOWN) for word in target_words], np.int64)
        self.set_weights(weights)

    def set_weights(self, weights: Array) -> None:
        self.weights = weights

    def decode_all(
        self, sentences: Iterable[Sequence[str]], nbest: int = 1, stack: int | None = None
    ) -> Iterator[list[Derivation]]:
        """Yield the best derivations of each sentence, in order; several sentences are decoded at a time."""
        return map_threads(lambda words: self.decode(words, nbest, stack), sentences)

    def force_all(self, pairs: Iterable[tuple[Sequence[str], Sequence[str]]]) -> Iterator[Derivation | None]:
        return map_threads(lambda pair: self.force(*pair), pairs)

    def decode(self, words: Sequence[str], nbest: int = 1, stack: int | None = None) -> list[Derivation]:
        """Return the best derivations of a tokenised sentence, the best first.

        `stack` is the maximum number of hypotheses per stack; by default that of the settings.
        """
        limits = self.make_limits(stack or self.settings.stack, self.settings.beam)
        return self._search(words, self.collect_options(words), limits, NOTHING_REQUIRED, nbest)

    def force(self, words: Sequence[str], target: Sequence[str]) -> Derivation | None:
        """Return the best derivation of exactly these target words (forced decoding), or None if there is none.

        All options of the phrase table are tried, and the distortion limit holds. The search is exact unless more than
        FORCED_STACK hypotheses cover the same number of source words.
        """
        if not words or not target:
            return None if words or target else Derivation([], np.zeros(len(FEATURE_NAMES)), 0.0)
        return next(iter(self._search(words, *self.prepare_forced(words, target), 1)), None)

    def prepare_forced(self, words: Sequence[str], target: Sequence[str]) -> tuple[Options, SearchLimits, Array]:
        """Return the options and limits of forced decoding, and the ids of the required target words."""
        required = np.array([self._get_target_id(word, words) for word in target])
        return self.collect_options(words, required), self.make_limits(FORCED_STACK, np.inf), required

    def collect_options(self, words: Sequence[str], required: Array = NOTHING_REQUIRED) -> Options:
        """Return the `settings.options` best options of each span of a sentence, the best first.

        A word that has no translation by itself is copied. If target words are required, all options that occur in
        them as a phrase are returned.
        """
        span, rows = self._list_rows(words)
        options = self._make_options(words, span, rows)
        order = np.lexsort((-options.estimate, span))
        if len(required):
            best = order[kernels.occur_in(required, options.word_starts, options.words)[order]]
        else:
            first = np.searchsorted(span, span)  # the first option of the same span; spans are sorted
            best = order[np.arange(len(span)) - first < self.settings.options]
        return self._make_options(words, span[best], rows[best])

    def _list_rows(self, words: Sequence[str]) -> tuple[Array, Array]:
        """Return the span and the phrase table's row of every option; a word that is copied has the row -1 - position.

        The span of `size` words from `start` on has the number start * max_phrase + size - 1.
        """
        table, max_phrase = self.table, self.max_phrase
        ids = np.array([self.source_words.get(word, -1) for word in words], np.int64)
        nodes = kernels.find_spans(table.source.children, table.source.words, ids, max_phrase)
        first = np.where(nodes >= 0, table.options[nodes], 0).astype(np.int64)
        sizes = np.where(nodes >= 0, table.options[nodes + 1] - first, 0)
        copied = np.flatnonzero(sizes[:, 0] == 0)
        first[copied, 0], sizes[copied, 0] = -1 - copied, 1
        _, rows = concatenate_ranges(first.ravel(), sizes.ravel())
        return np.repeat(np.arange(first.size), sizes.ravel()), rows

    def _make_options(self, words: Sequence[str], span: Array, rows: Array) -> Options:
        """Read and score options, which are sorted by span."""
        table, weights, max_phrase = self.table, self.weights, self.max_phrase
        known, entries = rows >= 0, np.maximum(rows, 0)
        phrase = table.target[entries]
        starts = np.where(known, table.target_starts[phrase], 0).astype(np.int64)
        lengths = np.where(known, table.target_starts[phrase + 1] - starts, 1)
        word_starts, positions = concatenate_ranges(starts, lengths)
        target = table.target_words[positions].astype(np.int64)
        copied_words = [words[-1 - row] for row in rows[~known].tolist()]
        target[word_starts[:-1][~known]] = [self._get_target_id(word, words) for word in copied_words]
        lm_words, has_id = np.full(len(target), UNKNOWN), target < len(self.lm_ids)
        lm_words[has_id] = self.lm_ids[target[has_id]]

        reordering_rows = np.where(known, table.reordering_of[entries].astype(np.int64), -1)
        features = np.concatenate([table.features[entries], table.reordering[reordering_rows]], 1, dtype=np.float64)
        features[~known] = 0.0
        static = features[:, : len(PHRASE_FEATURES)] @ weights[: len(PHRASE_FEATURES)]
        static += weights[WORDS] * lengths + weights[PHRASES] + weights[UNKNOWNS] * ~known
        estimate = static + weights[LM] * kernels.score_phrases(self.lm.trie, word_starts, lm_words)
        first = np.searchsorted(span, np.arange(len(words) * max_phrase + 1))
        span_starts = np.zeros((len(words), max_phrase + 2), np.int64)
        span_starts[:, 1:-1], span_starts[:, -1] = first[:-1].reshape(-1, max_phrase), first[max_phrase::max_phrase]
        reorder = features[:, REORDERING] * weights[REORDERING]
        return Options(
            span_starts, word_starts, target, lm_words, static, estimate, reorder, reordering_rows, features, rows
        )

    def _get_target_id(self, word: str, source: Sequence[str]) -> int:
        """Return the id of a target word; words of the source that may be copied have ids after all others."""
        if word in self.target_ids:
            return self.target_ids[word]
        return len(self.target_ids) + source.index(word) if word in source else -1

    def make_limits(self, stack: int, beam: float) -> SearchLimits:
        return SearchLimits(
            self.max_phrase, self.settings.distortion_limit, stack, beam,
            recombine_phrases=not self.weights[REORDERING].any(),
            weight_lm=self.weights[LM], weight_distortion=self.weights[DISTORTION],
        )  # fmt: skip

    def _search(
        self, words: Sequence[str], options: Options, limits: SearchLimits, required: Array, nbest: int
    ) -> list[Derivation]:
        """Return the best derivations that the options allow."""
        if not words:
            return [Derivation([], np.zeros(len(FEATURE_NAMES)), 0.0)]
        hypotheses, scores, first_complete = kernels.search_stacks(options, self.lm.trie, limits, required)
        paths = kernels.rank_paths(hypotheses, scores, int(first_complete), nbest, len(words))
        features = kernels.sum_features(paths, hypotheses, scores, options)
        steps = hypotheses[:, [kernels.LAST_START, kernels.LAST_END, kernels.OPTION]]

        @cache
        def read_step(hypothesis: int) -> PhrasePair:
            start, end, option = steps[hypothesis].tolist()
            return self.read_phrase(words, start, end, int(options.rows[option]))

        return [
            Derivation([read_step(row) for row in path[path >= 0].tolist()], values, float(values @ self.weights))
            for path, values in zip(paths, features, strict=True)
        ]

    def read_phrase(self, words: Sequence[str], start: int, end: int, row: int) -> PhrasePair:
        """Return the phrase pair of a span and a row of the table; a word without a row is copied."""
        if row < 0:
            return PhrasePair(start, end, [words[start]], [(0, 0)])
        target, links = self.table.read_option(row)
        return PhrasePair(start, end, [self.target_words[word] for word in target], links)


def map_threads(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    waiting = iter(items)
    with ThreadPoolExecutor(usable_cores()) as pool:
        while batch := list(islice(waiting, SENTENCES_AT_A_TIME)):
            yield from pool.map(function, batch)
