"""The stacks of a phrase-based search, to show how the decoder works.

The search itself (decoder_kernels.py) returns one table of all hypotheses. Here they are grouped into the stacks from
which they were extended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dragoman.smt import decoder_kernels as kernels
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


def list_stacks(decoder: PhraseDecoder, words: Sequence[str]) -> list[Stack]:
    """Translate the tokens of a sentence; return its stacks, by the number of covered words from 0 on."""
    if not words:
        return [Stack([PartialTranslation((), 0.0, 0.0)], 0, 0)]
    options, limits = decoder.collect_options(words), decoder.make_limits(decoder.settings.stack, decoder.settings.beam)
    hypotheses, scores, _ = kernels.search_stacks(options, decoder.lm.trie, limits, NOTHING_REQUIRED)
    phrases: list[tuple[PhrasePair, ...]] = [()]
    covered = np.zeros(len(hypotheses), np.int64)
    for row in range(1, len(hypotheses)):  # every hypothesis comes after the one that it extends
        parent, start, end = hypotheses[row, [kernels.PARENT, kernels.LAST_START, kernels.LAST_END]].tolist()
        option = int(options.rows[hypotheses[row, kernels.OPTION]])
        phrases.append((*phrases[parent], decoder.read_phrase(words, start, end, option)))
        covered[row] = covered[parent] + end - start
    stacks, future = [], scores[:, kernels.TOTAL] - scores[:, kernels.SCORE]
    for size in range(len(words) + 1):
        rows = np.flatnonzero(covered == size)
        extendable = rows[hypotheses[rows, kernels.MERGED] < 0]
        extendable = extendable[np.argsort(-scores[extendable, kernels.TOTAL], kind="stable")]
        best = scores[extendable[:1], kernels.TOTAL].max(initial=-np.inf)
        kept = extendable[: limits.stack_size]
        kept = kept[scores[kept, kernels.TOTAL] >= best - limits.beam]
        translations = [
            PartialTranslation(phrases[row], float(scores[row, kernels.SCORE]), float(future[row]))
            for row in kept.tolist()
        ]
        stacks.append(Stack(translations, len(rows) - len(extendable), len(extendable) - len(kept)))
    return stacks
