"""The stacks of a phrase-based search, to show how the decoder works.

The search itself (decoder_kernels.py) returns one table of all hypotheses. Here they are grouped into the stacks from
which they were extended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dragoman.smt import decoder_kernels as kernels
from dragoman.smt.compiled import Array
from dragoman.smt.decoder import NOTHING_REQUIRED, PhraseDecoder, PhrasePair


@dataclass(frozen=True)
class PartialTranslation:
    """A partial translation: its phrases in target order, and its score without and with the future cost."""

    phrases: tuple[PhrasePair, ...]
    score: float  # weighted features of what is translated
    future: float  # estimated score of the rest; a cost is a negative number here

    @property
    def total(self) -> float:
        """The value by which the hypotheses of a stack are compared."""
        return self.score + self.future

    @property
    def words(self) -> list[str]:
        return [word for phrase in self.phrases for word in phrase.words]

    def coverage(self, length: int) -> str:
        """Return a mark for each source word: `x` if it is translated, `-` if not."""
        covered = {position for phrase in self.phrases for position in range(phrase.start, phrase.end)}
        return "".join("x" if position in covered else "-" for position in range(length))


@dataclass(frozen=True)
class Stack:
    """All hypotheses that cover the same number of source words."""

    kept: list[PartialTranslation]  # the best first; these are extended, or, in the last stack, complete
    recombined: int  # merged into a better hypothesis with the same continuations
    pruned: int  # beyond the size of the stack, or too far below its best; only those that were scored to the end


@dataclass(frozen=True)
class StackSearch:
    """The search for translations of a sentence, which has at least one word. Hypothesis 0 is empty."""

    decoder: PhraseDecoder
    words: Sequence[str]
    options: kernels.Options
    limits: kernels.SearchLimits
    info: Array  # a row for each hypothesis, with columns such as kernels.PARENT
    score: Array  # a row for each hypothesis, with columns such as kernels.TOTAL
    best: list[int]  # the hypotheses of the best derivation from the first phrase to the last; empty if there is none

    @classmethod
    def run(
        cls, decoder: PhraseDecoder, words: Sequence[str], stack: int | None = None, target: Sequence[str] = ()
    ) -> StackSearch:
        """Translate the tokens of a sentence, or find the derivations of a target (forced decoding)."""
        if target:
            options, limits, required = decoder.prepare_forced(words, target)
        else:
            limits = decoder.make_limits(stack or decoder.settings.stack, decoder.settings.beam)
            options, required = decoder.collect_options(words), NOTHING_REQUIRED
        info, score, first_complete = kernels.search_stacks(options, decoder.lm.trie, limits, required)
        paths = kernels.rank_paths(info, score, int(first_complete), 1, len(words))
        best = [row for path in paths.tolist() for row in path if row >= 0]
        return cls(decoder, words, options, limits, info, score, best)

    @cached_property
    def covered(self) -> Array:
        """The number of source words that each hypothesis covers."""
        covered = np.zeros(len(self.info), np.int64)
        for row, (parent, start, end) in enumerate(self.steps[1:], 1):  # a hypothesis comes after the one it extends
            covered[row] = covered[parent] + end - start
        return covered

    @cached_property
    def steps(self) -> list[list[int]]:
        """The hypothesis that each one extends, and the span of the source that it adds."""
        steps: list[list[int]] = self.info[:, [kernels.PARENT, kernels.LAST_START, kernels.LAST_END]].tolist()
        return steps

    def read_phrase(self, row: int) -> PhrasePair:
        """Return the phrase that a hypothesis adds."""
        _, start, end = self.steps[row]
        option = int(self.options.rows[self.info[row, kernels.OPTION]])
        return self.decoder.read_phrase(self.words, start, end, option)

    def list_kept(self, size: int) -> tuple[list[int], int, int]:
        """Return the hypotheses of a stack that are extended, best first, and how many were recombined and pruned."""
        rows, total = np.flatnonzero(self.covered == size), self.score[:, kernels.TOTAL]
        alive = rows[self.info[rows, kernels.MERGED] < 0]
        alive = alive[np.argsort(-total[alive], kind="stable")]
        kept = alive[: self.limits.stack_size]
        kept = kept[total[kept] >= total[alive[:1]].max(initial=-np.inf) - self.limits.beam]
        return kept.tolist(), len(rows) - len(alive), len(alive) - len(kept)

    def split_features(self) -> Array:
        """Return what each phrase of the best derivation adds to the features; a row per phrase."""
        beginnings = np.full((len(self.best) + 1, len(self.words)), -1)
        for size in range(len(self.best) + 1):
            beginnings[size, :size] = self.best[:size]
        sums: Array = kernels.sum_features(beginnings, self.info, self.score, self.options)
        return np.diff(sums, axis=0)


def list_stacks(decoder: PhraseDecoder, words: Sequence[str]) -> list[Stack]:
    """Translate the tokens of a sentence; return its stacks, by the number of covered words from 0 on."""
    if not words:
        return [Stack([PartialTranslation((), 0.0, 0.0)], 0, 0)]
    search = StackSearch.run(decoder, words)
    phrases: list[tuple[PhrasePair, ...]] = [()]
    for row, (parent, _, _) in enumerate(search.steps[1:], 1):
        phrases.append((*phrases[parent], search.read_phrase(row)))
    stacks = []
    for size in range(len(words) + 1):
        kept, recombined, pruned = search.list_kept(size)
        hypotheses = [
            PartialTranslation(
                phrases[row], float(search.score[row, kernels.SCORE]), float(np.diff(search.score[row, :2])[0])
            )
            for row in kept
        ]
        stacks.append(Stack(hypotheses, recombined, pruned))
    return stacks
