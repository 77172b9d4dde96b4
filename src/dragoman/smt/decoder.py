"""Phrase-based translation: the phrases, the order and the words that a log-linear model holds best.

The score of a translation is a weighted sum of features, all of them logarithms or counts: the phrase table's, the
orientation of phrases, the language model, the distance of jumps, the number of words, phrases and unknown words.
`decoder_kernels.search_stacks` is the search; here its options are collected and its hypotheses are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np

from dragoman.config.settings import Settings, setting
from dragoman.hardware import usable_cores
from dragoman.smt import decoder_kernels as kernels
from dragoman.smt.compiled import Array
from dragoman.smt.decoder_kernels import NgramTrie, Options, SearchLimits
from dragoman.smt.ngram import BEGIN, END, UNKNOWN, NgramModel
from dragoman.smt.phrases import ORIENTATIONS, PHRASE_FEATURES, PhraseTable
from dragoman.smt.trie import ROOT, Trie

FEATURE_NAMES = (
    *PHRASE_FEATURES, *(f"{way} {side}" for side in ("before", "after") for way in ORIENTATIONS),
    "language model", "distortion", "words", "phrases", "unknown words",
)  # fmt: skip
LM, DISTORTION, WORDS, PHRASES, UNKNOWNS = range(len(PHRASE_FEATURES) + 6, len(FEATURE_NAMES))
REORDERING = slice(len(PHRASE_FEATURES), len(PHRASE_FEATURES) + 6)
DEFAULT_WEIGHTS = np.array([0.2, 0.15, 0.2, 0.15, *[0.1] * 6, 0.45, 0.15, 0.8, -0.1, -10.0])
SENTENCES_AT_A_TIME = 256
NOISY_CHANNEL = np.array([0, 1, 0, 0, *[0] * 6, 1, 0.1, 0, 0, -100.0])  # P(source | target) P(target)


class DecoderSettings(Settings):
    """How far the decoder looks for the best translation."""

    stack: int = setting(100, "maximum number of hypotheses per stack (one stack per number of covered words)", ge=1)
    beam: float = setting(8.0, "drop hypotheses whose score is below the best of their stack by more than this", gt=0)
    distortion_limit: int = setting(6, "maximum jump between two phrases in source words; -1: no limit", ge=-1)
    options: int = setting(20, "number of translations tried per source phrase", ge=1)


class NgramScorer:
    """An n-gram model as a trie that compiled code can ask, in natural logarithms."""

    def __init__(self, model: NgramModel) -> None:
        self.words = model.words
        self.ids = {word: index for index, word in enumerate(model.words)}
        trie, nodes = Trie.of([(order.prefix, order.word) for order in model.orders])
        log_prob, backoff = np.zeros(len(trie.words)), np.zeros(len(trie.words))
        for node, order in zip(nodes, model.orders, strict=True):
            log_prob[node], backoff[node] = order.log_prob * np.log(10), order.backoff * np.log(10)
        suffix = np.zeros(len(trie.words), np.int64)
        kernels.link_suffixes(trie.children, trie.words, trie.parents, suffix)
        longest = int(trie.levels[-2]) if len(model.orders) > 1 else len(trie.words)
        begin = kernels.find_child(trie.children, trie.words, ROOT, BEGIN)
        self.trie = NgramTrie(trie.children, trie.words, log_prob, backoff, suffix, longest, begin, END)

    def score(self, words: Sequence[str]) -> float:
        """Return the log-probability of a sentence, its end included."""
        total, state = 0.0, self.trie.begin
        for word in [*(self.ids.get(word, UNKNOWN) for word in words), END]:
            logp, state = kernels.score_word(self.trie, state, word)
            total += logp
        return total


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
        """Return the alignment of source and target positions."""
        found, target = [], 0
        for phrase in self.phrases:
            found += [(phrase.start + i, target + j) for i, j in phrase.links]
            target += len(phrase.words)
        return sorted(found)


class PhraseDecoder:
    """A phrase table and a language model, weighted."""

    def __init__(
        self, source_words: dict[str, int], target_words: Sequence[str], table: PhraseTable, lm: NgramScorer,
        weights: Array, settings: DecoderSettings,
    ) -> None:  # fmt: skip
        self.source_words, self.target_words, self.table, self.lm = source_words, target_words, table, lm
        self.settings = settings
        self.lm_words = np.array([lm.ids.get(word, UNKNOWN) for word in target_words])[table.target_words]
        self.phrase_lm = kernels.score_phrases(lm.trie, table.target_starts, self.lm_words)
        self.longest = len(table.source.levels) - 2
        self.set_weights(weights)

    def set_weights(self, weights: Array) -> None:
        """Weight all features, and keep the best options of each source phrase by themselves."""
        self.weights, table = weights, self.table
        lengths = np.diff(table.target_starts)
        static = (
            table.features @ weights[: len(PHRASE_FEATURES)] + weights[WORDS] * lengths[table.target] + weights[PHRASES]
        )
        estimate = static + weights[LM] * self.phrase_lm[table.target]
        node = np.repeat(np.arange(len(table.options) - 1), np.diff(table.options))
        order = np.lexsort((-estimate, node))
        best = order[np.arange(len(order)) - table.options[node] < self.settings.options]
        self.rows, self.first = best, np.searchsorted(node[best], np.arange(len(table.options)))
        self.static, self.estimate = static[best], estimate[best]
        self.reorder = table.reordering[best] * weights[REORDERING]

    def collect(self, words: Sequence[str]) -> tuple[Options, Array]:
        """Return the options of a sentence, and the row of each in the table, which is -1 for a word that is copied.

        A word is copied if it has no translation by itself.
        """
        ids = np.array([self.source_words.get(word, -1) for word in words], np.int64)
        nodes = kernels.find_spans(self.table.source.children, self.table.source.words, ids, self.longest)
        group = np.zeros((len(words), self.longest + 2), np.int64)
        chosen: list[Array] = [np.zeros(0, np.int64)]
        count = 0
        for start in range(len(words)):
            for size in range(1, self.longest + 1):
                node = nodes[start, size]
                some = np.arange(self.first[node], self.first[node + 1]) if node >= 0 else chosen[0]
                if size == 1 and not len(some):
                    some = np.array([-1])
                group[start, size] = count
                chosen.append(some)
                count += len(some)
            group[start, self.longest + 1] = count
        index = np.concatenate(chosen)
        known = index >= 0
        rows = np.where(known, self.rows[index], -1)
        phrase = self.table.target[rows]
        lengths = np.where(known, np.diff(self.table.target_starts)[phrase], 1)
        word_starts = np.concatenate([[0], np.cumsum(lengths)])
        at = np.repeat(self.table.target_starts[phrase] - word_starts[:-1], lengths) + np.arange(word_starts[-1])
        target = np.where(np.repeat(known, lengths), self.lm_words[at], UNKNOWN)
        copied = self.weights[UNKNOWNS] + self.weights[WORDS] + self.weights[PHRASES]
        guess = copied + self.weights[LM] * self.lm.trie.log_prob[1]
        static, estimate = np.where(known, self.static[index], copied), np.where(known, self.estimate[index], guess)
        return Options(
            group, word_starts, target, static, estimate, np.where(known[:, None], self.reorder[index], 0.0)
        ), rows

    def decode_all(self, sentences: Iterable[Sequence[str]], nbest: int = 1) -> Iterator[list[Derivation]]:
        """Yield the best derivations of each sentence, in order; several sentences are decoded at a time."""
        waiting = iter(sentences)
        with ThreadPoolExecutor(usable_cores()) as pool:
            while some := list(islice(waiting, SENTENCES_AT_A_TIME)):
                yield from pool.map(self.decode, some, repeat(nbest))

    def decode(self, words: Sequence[str], nbest: int = 1) -> list[Derivation]:
        """Return the best derivations of a tokenised sentence, the best first."""
        if not words:
            return [Derivation([], np.zeros(len(FEATURE_NAMES)), 0.0)]
        settings, weights = self.settings, self.weights
        limits = SearchLimits(
            self.longest, settings.distortion_limit, settings.stack, settings.beam, not weights[REORDERING].any(),
            weights[LM], weights[DISTORTION],
        )  # fmt: skip
        options, rows = self.collect(words)
        info, score, head = kernels.search_stacks(options, self.lm.trie, limits)
        paths = kernels.rank_paths(info, score, int(head), nbest, len(words))
        features = kernels.sum_features(paths, info, score, rows, self.table.features, self.table.reordering)
        steps = info[:, [kernels.LAST_START, kernels.LAST_END, kernels.OPTION]]

        @cache
        def read_step(row: int) -> PhrasePair:
            start, end, option = steps[row].tolist()
            return self.read_phrase(words, start, end, int(rows[option]))

        found = []
        for path, values in zip(paths, features, strict=True):
            phrases = [read_step(row) for row in path[path >= 0].tolist()]
            values[WORDS] = sum(len(phrase.words) for phrase in phrases)
            found.append(Derivation(phrases, values, float(values @ weights)))
        return found

    def read_phrase(self, words: Sequence[str], start: int, end: int, row: int) -> PhrasePair:
        """Return the phrase pair of a span and a row of the table; a word without a row is copied."""
        if row < 0:
            return PhrasePair(start, end, [words[start]], [(0, 0)])
        target, links = self.table.read_option(row)
        return PhrasePair(start, end, [self.target_words[word] for word in target], links)
