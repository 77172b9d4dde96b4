"""Confidence intervals of scores, and two significance tests of the difference between two systems on the same lines.

Each trial of the bootstrap scores a resample: as many lines as the test set has, sampled with replacement. A trial of
approximate randomisation swaps the outputs of the two systems for each line with probability 1/2. If the systems are
equally good, differences as large as the observed one are frequent. The random numbers depend only on the seed and the
number of lines, so that they are the same for all systems and metrics.

sacreBLEU has both tests, but only for its own metrics, and it computes one score at a time. Here the scores of all
trials are computed at once from sums of counts, for every metric. Tests compare the p-values with sacreBLEU's.

Shapes   T trials   N lines   K counts of a metric (metrics.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from dragoman.metrics.metrics import METRICS, CountedScore, FloatArray

SEED = 12345  # the default of sacreBLEU
BOOTSTRAP_TRIALS, RANDOMISATION_TRIALS = 1000, 10_000
CONFIDENCE = 0.95
MAX_RANDOM_NUMBERS = 4_000_000  # in memory at a time
TOLERANCE = 1e-9  # scores that differ by less are equal

Counts = Mapping[str, CountedScore]  # by the name of a metric: the score of a system and its counts per line
Resamples = Mapping[str, FloatArray]  # by the name of a metric: value_T, the scores of the bootstrap resamples
OnProgress = Callable[[int], object]  # called with the number of trials done so far; `id` by default: no effect


class Difference(NamedTuple):
    """The score of a system minus that of the first system, and the p-values of both significance tests."""

    difference: float
    p_bootstrap: float
    p_randomisation: float

    @property
    def significant(self) -> bool:
        """Whether both tests find the difference significant. sacreBLEU's bootstrap is the more lenient test."""
        return max(self.p_bootstrap, self.p_randomisation) < 1 - CONFIDENCE


def bootstrap_scores(counts: Counts, *, trials: int = BOOTSTRAP_TRIALS) -> dict[str, FloatArray]:
    """Return value_T of each metric: its score on each of `trials` resamples of the lines."""
    rng, lines = np.random.default_rng(SEED), len(next(iter(counts.values())).count_NK)
    totals: dict[str, list[FloatArray]] = {name: [] for name in counts}
    for chunk in split_into_chunks(trials, lines):
        # Number the lines of all trials consecutively, so that one bincount tells how often each trial has each line.
        sampled_TN = rng.integers(lines, size=(chunk, lines)) + lines * np.arange(chunk)[:, None]
        times_TN = np.bincount(sampled_TN.ravel(), minlength=chunk * lines).reshape(chunk, lines).astype(np.float64)
        for name, counted in counts.items():
            totals[name].append(times_TN @ counted.count_NK)
    return {name: METRICS[name].compute_scores(np.concatenate(parts)) for name, parts in totals.items()}


def compute_interval(value_T: FloatArray) -> list[float]:
    """Return the bounds of the confidence interval: the central CONFIDENCE of the resamples lie between them."""
    bounds: list[float] = np.quantile(value_T, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return bounds


def run_randomisation_test(
    first: Counts, second: Counts, *, trials: int = RANDOMISATION_TRIALS, on_progress: OnProgress = id
) -> dict[str, float]:
    """Return the p-value of each metric: how often two systems with randomly swapped lines differ as much as these."""
    rng, lines = np.random.default_rng(SEED), len(next(iter(first.values())).count_NK)
    gaps: dict[str, list[FloatArray]] = {name: [] for name in first}
    done = 0
    for chunk in split_into_chunks(trials, lines):
        swap_TN = rng.integers(2, size=(chunk, lines), dtype=np.int8).astype(np.float64)
        for name in gaps:
            first_NK, second_NK = first[name].count_NK, second[name].count_NK
            change_TK = swap_TN @ (second_NK - first_NK)  # what swapping adds to the first system's sums
            first_T = METRICS[name].compute_scores(first_NK.sum(0) + change_TK)
            second_T = METRICS[name].compute_scores(second_NK.sum(0) - change_TK)
            gaps[name].append(np.abs(first_T - second_T))
        on_progress(done := done + chunk)
    return {
        name: compute_p_value(np.concatenate(parts), abs(second[name].value - first[name].value))
        for name, parts in gaps.items()
    }


def compare_with_first(
    first: Counts, second: Counts, first_values: Resamples, second_values: Resamples, *, on_progress: OnProgress = id
) -> dict[str, Difference]:
    """Return the differences between the second system and the first, for the metrics that both have.

    The values are those of `bootstrap_scores`. The p-value of the bootstrap is the fraction of resamples whose
    difference exceeds the mean over all resamples by the observed difference, as in sacreBLEU.
    """
    both = [name for name in second if name in first]
    if not both:
        return {}
    first_counts, second_counts = ({name: counts[name] for name in both} for counts in (first, second))
    p_values = run_randomisation_test(first_counts, second_counts, on_progress=on_progress)
    differences = {}
    for name, p_randomisation in p_values.items():
        difference = second[name].value - first[name].value
        gap_T = np.abs(second_values[name] - first_values[name])
        p_bootstrap = compute_p_value(gap_T - gap_T.mean(), abs(difference))
        differences[name] = Difference(difference, p_bootstrap, p_randomisation)
    return differences


def compute_p_value(value_T: FloatArray, bound: float) -> float:
    """Return the fraction of trials that reach the bound. The observation counts as a trial, so p is never 0."""
    return float(((value_T >= bound - TOLERANCE).sum() + 1) / (len(value_T) + 1))


def split_into_chunks(trials: int, lines: int) -> Iterator[int]:
    """Yield how many trials to compute at a time, so that their random numbers, one per line, fit into memory."""
    size = max(1, min(trials, MAX_RANDOM_NUMBERS // lines))
    yield from (min(size, trials - done) for done in range(0, trials, size))
