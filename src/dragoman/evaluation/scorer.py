"""Score systems side by side: scores with confidence intervals, each system tested against the first on the same test
set, scores by the length of the source, and word F1 by word frequency.

Shapes   N lines   K counts of a metric (metrics/metrics.py)
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dragoman.data.corpus import read_pairs
from dragoman.evaluation.systems import SILENT, SystemOutput
from dragoman.metrics.metrics import (
    METRICS,
    SPACELESS_LANGUAGES,
    detect_eastern_script,
    extract_words,
    select_metrics,
)
from dragoman.metrics.significance import (
    RANDOMISATION,
    Counts,
    Values,
    bootstrap_scores,
    compare_with_first,
    compute_interval,
)
from dragoman.progress import Report
from dragoman.recipe import Recipe

LENGTH_BUCKETS = 6
TRAINING_DATA = "the training data of "
FREQUENCIES = ((0, 0), (1, 1), (2, 4), (5, 9), (10, 99), (100, 999), (1000, None))  # buckets of word counts

Bounds = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class ScoredSystem:
    """A system's output on a test set with its scores.

    `values` are the scores of bootstrap resamples, for the comparison with later systems.
    """

    name: str
    output: SystemOutput
    counts: Counts
    values: Values
    result: Mapping[str, Any]


class WordCounts(NamedTuple):
    """How often words occur, and where they were counted."""

    times: Mapping[str, int]
    where: str


class Scorer:
    """Score systems one after another. `tests` holds the systems of each test set in the order in which they came.

    `recipes` are those of the runs, by name: words are counted in their training data. Without them there is no
    breakdown by length and word frequency.
    """

    def __init__(
        self, *, tokenize: str = "", recipes: Mapping[str, Recipe] | None = None, report: Report = SILENT
    ) -> None:
        self.tokenize, self.recipes, self.report = tokenize, recipes, report
        self.tests: list[list[ScoredSystem]] = []

    def score(self, name: str, output: SystemOutput) -> dict[str, Any]:
        """Return one system's result on one test set, as JSON has it."""
        key = (output.sources, output.references)
        same = (some for some in self.tests if (some[0].output.sources, some[0].output.references) == key)
        systems: list[ScoredSystem] = next(same, [])  # the earlier systems on the same test set
        metrics = select_metrics(output.metrics, tokenize=self.tokenize) if output.texts else []
        counts = {metric.name: metric.counted(output.texts, output.references) for metric in metrics}
        values = bootstrap_scores(counts) if counts else {}
        scores: dict[str, dict[str, Any]] = {}
        for metric in metrics:
            counted = counts[metric.name]
            scores[metric.name] = {
                "value": counted.value,
                "signature": counted.signature,
                "interval": list(compute_interval(values[metric.name])),
                **(metric.parts(counted.line_NK.sum(0)) if metric.parts else {}),
            }
        if systems:
            first = systems[0]
            with self.report.progress("comparing with the first system", total=RANDOMISATION, unit="trials") as bar:
                found = compare_with_first(first.counts, counts, first.values, values, tick=bar.update)
            for metric_name, one in found.items():
                scores[metric_name]["against"] = {
                    "run": first.name,
                    "difference": one.value,
                    "p_bootstrap": one.bootstrap,
                    "p_randomisation": one.randomisation,
                    "significant": one.significant,
                }
        result = {"run": name, **output.describe(), **scores, **output.about}
        if counts and self.recipes is not None:
            result["lengths"] = score_by_length(output, counts)
            if "confusion" not in output.about:  # labels are no words
                known = self.training_words or WordCounts(count_words(chain(*output.references)), "the references")
                result["rarity"] = score_by_frequency(output, known)
        if not systems:
            self.tests.append(systems)
        systems.append(ScoredSystem(name, output, counts, values, result))
        return result

    @cached_property
    def training_words(self) -> WordCounts | None:
        """Count the target words in the training data of the first run whose data is still there.

        One count serves all systems, so that they are scored on the same words.
        """
        for name, recipe in (self.recipes or {}).items():
            data = recipe.data
            if data.train and all(Path(file).exists() for corpus in data.train for file in corpus.files):
                pairs = chain.from_iterable(
                    read_pairs(corpus, split="train", direction=data.direction) for corpus in data.train
                )
                bar = self.report.progress("counting words of the training data")
                return WordCounts(count_words(pair.target for pair in bar.iterate(pairs)), f"{TRAINING_DATA}{name}")
        return None


def count_words(lines: Iterable[str]) -> Counter[str]:
    """Return how often each word occurs, punctuation left out."""
    return Counter(word for line in lines for word in extract_words(line))


def fit_buckets(numbers: Sequence[int], most: int = LENGTH_BUCKETS) -> list[tuple[int, int]]:
    """Return bounds that put about as many of these numbers into each bucket, none of them empty."""
    ends = np.unique(np.quantile(numbers, np.arange(1, most + 1) / most, method="inverted_cdf")).tolist()
    return list(zip([min(numbers), *(end + 1 for end in ends[:-1])], ends, strict=True))


def score_by_length(output: SystemOutput, counts: Counts) -> dict[str, Any]:
    """Return every metric on the lines of each length of the source or, where it is not known, of the reference.

    Scores come from sums of the counts of each line, so no line is counted again.
    """
    texts = output.sources or output.references[0]
    spaceless = detect_eastern_script(texts) in SPACELESS_LANGUAGES
    length_N = np.array([len(line) if spaceless else len(line.split()) for line in texts])
    rows = []
    for low, high in fit_buckets(length_N.tolist()):
        inside_N = (low <= length_N) & (length_N <= high)
        values = {name: float(METRICS[name].values(one.line_NK[inside_N].sum(0))) for name, one in counts.items()}
        rows.append({"low": low, "high": high, "lines": int(inside_N.sum()), **values})
    side = "source" if output.sources else "reference"
    return {"unit": "characters" if spaceless else "words", "side": side, "buckets": rows}


def score_by_frequency(output: SystemOutput, word_counts: WordCounts) -> dict[str, Any]:
    """Return precision, recall and F1 of words by their frequency. Of several references, the first counts."""
    given, wanted, both = Counter[Bounds](), Counter[Bounds](), Counter[Bounds]()
    lows = [low for low, _ in FREQUENCIES]
    for text, reference in zip(output.texts, output.references[0], strict=True):
        here, there = count_words([text]), count_words([reference])
        for tally, counted in ((given, here), (wanted, there), (both, here & there)):
            for word, times in counted.items():
                tally[FREQUENCIES[bisect_right(lows, word_counts.times.get(word, 0)) - 1]] += times
    rows = [
        {
            "low": bounds[0],
            "high": bounds[1],
            "words": wanted[bounds],
            "precision": 100 * both[bounds] / max(given[bounds], 1),
            "recall": 100 * both[bounds] / wanted[bounds],
            "f1": 200 * both[bounds] / (given[bounds] + wanted[bounds]),
        }
        for bounds in FREQUENCIES
        if wanted[bounds]
    ]
    return {"counted_in": word_counts.where, "buckets": rows}
