"""Is it chance? Intervals of a score, and two tests of the difference between two systems on the same lines.

All of them ask what else the score could have been. The bootstrap draws as many lines as there are, with replacement,
again and again. Approximate randomisation swaps the two systems' answers to each line or not, by the toss of a coin:
if it does not matter who answered, differences as large as the real one come up often. Draws depend on the seed and the
number of lines alone, so that all systems and metrics meet the same ones.

Shapes   T trials   N lines   K counts of a metric (totals.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from dragoman.metrics.metrics import METRICS, Array, CountedScore

SEED = 12345  # sacreBLEU's
BOOTSTRAP, RANDOMISATION = 1000, 10_000  # trials
CONFIDENCE = 0.95
MAX_DRAWS = 4_000_000  # draws held at a time
ROUNDING = 1e-9  # two scores nearer than this are the same

Counts = Mapping[str, CountedScore]  # by the name of a metric
Values = Mapping[str, Array]  # value_T of each metric
Tick = Callable[[int], object]  # told how many trials are done


class Interval(NamedTuple):
    low: float
    high: float

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


class Difference(NamedTuple):
    """Of a score from that of the first system, and how likely chance alone makes one as large, by either test."""

    value: float
    bootstrap: float
    randomisation: float

    @property
    def significant(self) -> bool:
        """Only where both tests say so: the bootstrap, as the field counts it, is the more easily persuaded."""
        return max(self.bootstrap, self.randomisation) < 1 - CONFIDENCE


def bootstrap_scores(counts: Counts, *, trials: int = BOOTSTRAP, seed: int = SEED, tick: Tick = id) -> dict[str, Array]:
    """The scores of so many resamples of the lines: value_T of each metric."""
    columns, line_NK = stack_counts(counts)
    rng, lines = np.random.default_rng(seed), len(line_NK)
    totals = []
    for some in split_trials(trials, lines, tick):
        drawn = rng.integers(lines, size=(some, lines)) + lines * np.arange(some)[:, None]
        times_TN = np.bincount(drawn.ravel(), minlength=some * lines).reshape(some, lines)
        totals.append(times_TN.astype(np.float64) @ line_NK)
    return compute_scores(np.concatenate(totals), columns)


def compute_interval(value_T: Array) -> Interval:
    """Where all but the outermost resamples lie."""
    low, high = np.quantile(value_T, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(low), float(high))


def compute_bootstrap_p(difference: float, first_T: Array, second_T: Array) -> float:
    """How often resamples differ by more than their mean by as much as the real difference, as sacreBLEU counts it."""
    gap_T = np.abs(second_T - first_T)
    return compute_p_value(gap_T - gap_T.mean(), abs(difference))


def randomise_systems(
    first: Counts, second: Counts, *, trials: int = RANDOMISATION, seed: int = SEED, tick: Tick = id
) -> dict[str, float]:
    """How often two systems made of these two by tosses of a coin differ as much as they do, by metric."""
    columns, first_NK = stack_counts(first)
    _, second_NK = stack_counts(second)
    rng, moved_NK = np.random.default_rng(seed), second_NK - first_NK
    gaps: dict[str, list[Array]] = {name: [] for name in columns}
    for some in split_trials(trials, len(first_NK), tick):
        swap_TN = rng.integers(2, size=(some, len(first_NK)), dtype=np.int8).astype(np.float64)
        moved_TK = swap_TN @ moved_NK
        one = compute_scores(first_NK.sum(0) + moved_TK, columns)
        other = compute_scores(second_NK.sum(0) - moved_TK, columns)
        for name in columns:
            gaps[name].append(np.abs(one[name] - other[name]))
    return {
        name: compute_p_value(np.concatenate(gap), abs(second[name].value - first[name].value))
        for name, gap in gaps.items()
    }


def compare_with_first(
    first: Counts, second: Counts, one: Values, other: Values, *, tick: Tick = id
) -> dict[str, Difference]:
    """The second system against the first, whose resamples are `other` and `one`, in the metrics that both have."""
    both = [name for name in second if name in first]
    swapped = randomise_systems({n: first[n] for n in both}, {n: second[n] for n in both}, tick=tick) if both else {}
    values = {name: second[name].value - first[name].value for name in both}
    return {name: Difference(values[name], compute_bootstrap_p(values[name], one[name], other[name]), swapped[name])
            for name in both}  # fmt: skip


def compute_p_value(value_T: Array, bound: float) -> float:
    """The share of trials that reach the bound, the real one counted among them: a share of 0 would be too sure."""
    return float(((value_T >= bound - ROUNDING).sum() + 1) / (len(value_T) + 1))


def stack_counts(counts: Counts) -> tuple[dict[str, slice], Array]:
    """The counts of all metrics side by side, and which columns are whose: one product then serves them all."""
    columns, begun = {}, 0
    for name, counted in counts.items():
        columns[name] = slice(begun, begun := begun + counted.line_NK.shape[1])
    return columns, np.concatenate([counted.line_NK for counted in counts.values()], axis=1)


def compute_scores(total_TK: Array, columns: Mapping[str, slice]) -> dict[str, Array]:
    return {name: METRICS[name].values(total_TK[:, part]) for name, part in columns.items()}


def split_trials(trials: int, lines: int, tick: Tick) -> Iterator[int]:
    """The trials in portions whose draws fit into memory, however many lines there are."""
    size = max(1, min(trials, MAX_DRAWS // lines))
    for begun in range(0, trials, size):
        yield (some := min(size, trials - begun))
        tick(begun + some)
