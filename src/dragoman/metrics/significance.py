"""Confidence intervals of scores, and two significance tests of the difference between two systems on the same lines.

The bootstrap samples as many lines as there are, with replacement, again and again. Approximate randomisation swaps the
two systems' outputs for each line with probability 1/2: if the systems are equally good, differences as large as the
observed one are frequent. Samples depend only on the seed and the number of lines, so that they are the same for all
systems and metrics.

sacreBLEU has both tests, but only for its own metrics, and it computes one score at a time. Here the scores of all
trials are computed at once from sums of counts, for every metric. Tests compare the p-values with sacreBLEU's.

Shapes   T trials   N lines   K counts of a metric (metrics.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from dragoman.metrics.metrics import METRICS, Array, CountedScore

SEED = 12345  # sacreBLEU's
BOOTSTRAP, RANDOMISATION = 1000, 10_000  # trials
CONFIDENCE = 0.95
MAX_DRAWS = 4_000_000  # random numbers held at a time
ROUNDING = 1e-9  # scores that differ by less are equal

Counts = Mapping[str, CountedScore]  # by the name of a metric
Values = Mapping[str, Array]  # value_T of each metric
Tick = Callable[[int], object]  # called with the number of trials done


class Difference(NamedTuple):
    """The difference of a score from that of the first system, and its p-value by either test."""

    difference: float
    p_bootstrap: float
    p_randomisation: float

    @property
    def significant(self) -> bool:
        """Return whether both tests find it significant; the bootstrap, as sacreBLEU has it, is more lenient."""
        return max(self.p_bootstrap, self.p_randomisation) < 1 - CONFIDENCE


def bootstrap_scores(counts: Counts, *, trials: int = BOOTSTRAP, seed: int = SEED, tick: Tick = id) -> dict[str, Array]:
    """Return value_T of each metric: its scores of as many resamples of the lines."""
    rng, lines = np.random.default_rng(seed), len(next(iter(counts.values())).line_NK)
    totals: dict[str, list[Array]] = {name: [] for name in counts}
    for some in split_trials(trials, lines, tick):
        sampled = rng.integers(lines, size=(some, lines)) + lines * np.arange(some)[:, None]
        times_TN = np.bincount(sampled.ravel(), minlength=some * lines).reshape(some, lines).astype(np.float64)
        for name, counted in counts.items():
            totals[name].append(times_TN @ counted.line_NK)
    return {name: METRICS[name].values(np.concatenate(parts)) for name, parts in totals.items()}


def compute_interval(value_T: Array) -> list[float]:
    """Return the lower and the upper bound of a confidence interval: all but the outermost resamples lie inside."""
    bounds: list[float] = np.quantile(value_T, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return bounds


def randomise_systems(
    first: Counts, second: Counts, *, trials: int = RANDOMISATION, seed: int = SEED, tick: Tick = id
) -> dict[str, float]:
    """Return, by metric, how often two systems differ as much as these after their lines were swapped at random."""
    rng, lines = np.random.default_rng(seed), len(next(iter(first.values())).line_NK)
    gaps: dict[str, list[Array]] = {name: [] for name in first}
    for some in split_trials(trials, lines, tick):
        swap_TN = rng.integers(2, size=(some, lines), dtype=np.int8).astype(np.float64)
        for name in gaps:
            first_NK, second_NK, scores_of = first[name].line_NK, second[name].line_NK, METRICS[name].values
            moved_TK = swap_TN @ (second_NK - first_NK)
            one_T, other_T = scores_of(first_NK.sum(0) + moved_TK), scores_of(second_NK.sum(0) - moved_TK)
            gaps[name].append(np.abs(one_T - other_T))
    return {
        name: compute_p_value(np.concatenate(parts), abs(second[name].value - first[name].value))
        for name, parts in gaps.items()
    }


def compare_with_first(
    first: Counts, second: Counts, first_values: Values, second_values: Values, *, tick: Tick = id
) -> dict[str, Difference]:
    """Return the differences of the second system from the first, in the metrics that both have.

    The values are those of `bootstrap_scores`. Its p-value is how often the differences of resamples exceed their mean
    by the observed one, as sacreBLEU counts it.
    """
    both = [name for name in second if name in first]
    swapped = randomise_systems({n: first[n] for n in both}, {n: second[n] for n in both}, tick=tick) if both else {}
    found = {}
    for name, p_randomisation in swapped.items():
        difference = second[name].value - first[name].value
        gap_T = np.abs(second_values[name] - first_values[name])
        p_bootstrap = compute_p_value(gap_T - gap_T.mean(), abs(difference))
        found[name] = Difference(difference, p_bootstrap, p_randomisation)
    return found


def compute_p_value(value_T: Array, bound: float) -> float:
    """Return the share of trials that reach the bound. The observed one counts as a trial, so that p is never 0."""
    return float(((value_T >= bound - ROUNDING).sum() + 1) / (len(value_T) + 1))


def split_trials(trials: int, lines: int, tick: Tick) -> Iterator[int]:
    """Yield the sizes of portions of the trials whose random numbers fit into memory."""
    size = max(1, min(trials, MAX_DRAWS // lines))
    for begun in range(0, trials, size):
        yield (some := min(size, trials - begun))
        tick(begun + some)
