"""Systems judged side by side: scores with intervals, and each against the first that answered the same test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dragoman.config import Recipe
from dragoman.evaluation.answered import Answered, Ticker, silent
from dragoman.evaluation.breakdown import Seen, by_length, by_rarity, words_learnt, words_of
from dragoman.score.metrics import chosen, cut_by
from dragoman.score.significance import RANDOMISATION, Counts, Values, differences, interval, resampled


@dataclass(frozen=True, slots=True)
class Sheet:
    """All that is known of a system on a test; `values` are the scores of resamples, for those who come after."""

    name: str
    answered: Answered
    counts: Counts
    values: Values
    result: Mapping[str, Any]


class Panel:
    """Judges systems as they come. `recipes` of the runs, by name, say where words were learnt: without them, nothing
    is broken down by length and rarity."""

    def __init__(
        self, *, tokenize: str = "", recipes: Mapping[str, Recipe] | None = None, ticker: Ticker = silent
    ) -> None:
        self.tokenize, self.recipes, self.ticker = tokenize, recipes, ticker
        self.tests: list[list[Sheet]] = []  # by what was answered, the systems in the order they came

    def judge(self, name: str, answered: Answered) -> dict[str, Any]:
        """One system's result on one test, as JSON has it."""
        sheets = self.beside(answered)
        metrics = [cut_by(metric, self.tokenize) for metric in chosen(answered.names)] if answered.texts else []
        counts = {metric.name: metric.counted(answered.texts, answered.references) for metric in metrics}
        values = resampled(counts) if counts else {}
        found = {
            score: {"value": c.value, "signature": c.signature, "interval": list(interval(values[score]))}
            for score, c in counts.items()
        }
        for metric in metrics:
            if metric.parts:
                found[metric.name] |= metric.parts(counts[metric.name].line_NK.sum(0))
        for score, against in (self.against(sheets[0], counts, values) if sheets else {}).items():
            found[score]["against"] = against
        broken = self.broken_down(answered, counts) if counts and self.recipes is not None else {}
        result = {"run": name, **answered.head(), **found, **answered.about, **broken}
        sheets.append(Sheet(name, answered, counts, values, result))
        return result

    def beside(self, answered: Answered) -> list[Sheet]:
        """The sheets of those who answered the same before."""
        for sheets in self.tests:
            first = sheets[0].answered
            if (first.sources, first.references) == (answered.sources, answered.references):
                return sheets
        self.tests.append([])
        return self.tests[-1]

    def against(self, first: Sheet, counts: Counts, values: Values) -> dict[str, dict[str, Any]]:
        found = differences(
            first.counts, counts, first.values, values, tick=self.ticker("swapping answers", RANDOMISATION)
        )
        return {
            score: {
                "run": first.name,
                "difference": one.value,
                "p_bootstrap": one.bootstrap,
                "p_randomisation": one.randomisation,
                "significant": one.significant,
            }
            for score, one in found.items()
        }

    def broken_down(self, answered: Answered, counts: Counts) -> dict[str, Any]:
        lengths = {"lengths": by_length(answered, counts)}
        if "confusion" in answered.about:  # labels are no words
            return lengths
        return {**lengths, "rarity": by_rarity(answered, self.learnt or words_of(answered.references))}

    @cached_property
    def learnt(self) -> Seen | None:
        return words_learnt(self.recipes or {}, self.ticker("counting words of training lines", 0))
