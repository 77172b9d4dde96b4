"""Experiments: a claim of the lectures, what is measured, and the thresholds that decide about it, fixed in advance.

    EXPERIMENTS = {
        "decay": Experiment(
            name="decay",
            ...
            conditions=("radius 0.5", "radius 1.5"),
            measure=measure_decay,                 # (condition, seed, setup) -> numbers
            checks=(Check("the state shrinks", lambda trials: trials["radius 0.5"]["norm"], at_most=1e-3),),
        )
    }

An experiment has one or more conditions, such as architectures. A trial measures one condition with one seed; its
numbers are kept as JSON, so that an interrupted experiment resumes (runner.py). A check computes one number per seed
from the trials of all conditions and compares it with a threshold.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dragoman.evaluation.figures import Chart, Point, Series

Chosen = TypeVar("Chosen")
Numbers = Mapping[str, Any]  # what a trial measured: numbers and lists of numbers by name
Trials = Mapping[str, Numbers]  # the trials of one seed: condition -> numbers
Table = Mapping[str, Mapping[int, Numbers]]  # all trials: condition -> seed -> numbers

CONFIRMED, NOT_CONFIRMED, DEPENDS = "confirmed", "not confirmed", "depends"
# 97.5 % quantiles of Student's t distribution, by degrees of freedom from 1; larger samples use the last one.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
TICK_LETTERS = 108  # letters that fit in a line below a figure


@dataclass(frozen=True)
class Setup:
    """How trials are run: the size of the experiment, the device, and a folder for files such as run folders."""

    quick: bool
    folder: Path
    device: str = "cpu"

    def pick(self, quick: Chosen, full: Chosen) -> Chosen:
        """Return the value for a quick or for a full run, such as the number of training steps."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Check:
    """A statement about one number, with the threshold that decides about it. Exactly one threshold is given.

    The number of a `ratio` is positive, and its seeds may differ by orders of magnitude: it is averaged, and its
    interval computed, on a logarithmic scale. A `control` is no part of the claim, but must hold for the experiment to
    say anything about it, such as that the task can be learned at all. An `aside` is a question of its own, which the
    claim says nothing about.
    """

    text: str  # such as "the LSTM reaches at least five times as far as the vanilla cell"
    value: Callable[[Trials], float]
    at_least: float | None = None
    at_most: float | None = None
    ratio: bool = False
    control: bool = False
    aside: bool = False

    def judge(self, table: Table) -> CheckResult:
        """Compare the mean over all seeds, with its 95 % confidence interval, with the threshold.

        The check is confirmed if the whole interval is on the right side, and not confirmed if all of it is on the
        wrong side. With one seed there is no interval, and the value itself decides. NaN decides nothing, and neither
        do finite and infinite values together, such as the logarithms of ratios of which one is 0.
        """
        seeds = set.intersection(*(set(by_seed) for by_seed in table.values()))
        values = [self.value({name: by_seed[seed] for name, by_seed in table.items()}) for seed in sorted(seeds)]
        if self.ratio:
            logarithms = [math.log(value) if value > 0 else -math.inf if value == 0 else math.nan for value in values]
            mean, low, high = map(math.exp, find_interval(logarithms))
        else:
            mean, low, high = find_interval(values)
        holds = [
            value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)
            for value in (low, high)
        ]
        verdict = CONFIRMED if all(holds) else DEPENDS if any(holds) or math.isnan(mean) else NOT_CONFIRMED
        return CheckResult(self, tuple(values), mean, low, high, verdict)


class CheckResult(NamedTuple):
    """A check with its values, one per seed, their mean, its confidence interval, and the verdict."""

    check: Check
    values: tuple[float, ...]
    mean: float
    low: float
    high: float
    verdict: str


def find_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % confidence interval by Student's t; a single value is its own interval.

    Several values of which one is not finite have no mean: NaN, unless all are the same.
    """
    count = len(values)
    mean = sum(values) / count
    if count == 1 or not math.isfinite(mean):
        mean = mean if len(set(values)) == 1 else math.nan
        return mean, mean, mean
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    half = T_QUANTILES[min(count - 1, len(T_QUANTILES)) - 1] * deviation / math.sqrt(count)
    return mean, mean - half, mean + half


class LabFigure(NamedTuple):
    """A chart and its caption."""

    caption: str
    chart: Chart


@dataclass(frozen=True)
class Experiment:
    """A claim of the lectures and how it is tested.

    `law` marks claims that follow from the formulas and must hold in every run; others are tendencies of trained
    models. Texts are Markdown without links and images.
    """

    name: str
    title: str  # a question
    lecture: str  # document and section of the lectures, such as "002, Lecture 6: LSTM"
    claim: str  # in the words of the lecture
    method: str  # what is computed or trained, and what is measured
    predict: str  # what readers should predict before they run it
    conditions: tuple[str, ...]
    measure: Callable[[str, int, Setup], Numbers]
    checks: tuple[Check, ...]
    plot: Callable[[Table], list[LabFigure]]
    conclusion: str  # what the kept results of the full run show, with their limits
    law: bool = False
    seeds: int = 3

    def judge(self, table: Table) -> tuple[str, list[CheckResult]]:
        """Return the verdict and the results of all checks.

        The claim is confirmed if all checks but controls and asides are, and not confirmed if all of them are "not
        confirmed". If a control is not confirmed, the claim has not been tested, and the verdict is that it depends.
        """
        results = [check.judge(table) for check in self.checks]
        is_tested = all(result.verdict == CONFIRMED for result in results if result.check.control)
        verdicts = {result.verdict for result in results if not result.check.control and not result.check.aside}
        return (verdicts.pop() if is_tested and len(verdicts) == 1 else DEPENDS), results


def plot_curves(
    table: Table,
    xs: Sequence[float] | str,
    key: str,
    *,
    x_title: str,
    y_title: str,
    names: Mapping[str, str] | None = None,
    ticks: Sequence[str] = (),
    logarithmic: bool = False,
    connected: bool = True,
) -> Chart:
    """Return a chart with a line per condition: the list `key` of its numbers over `xs`, one value per seed.

    `xs` may also be the name of another list of the numbers. `names` selects and renames conditions. Values that are
    not finite are left out. Without `connected`, `xs` are categories, and each condition has dots in place of a line.
    """
    series = []
    for condition, name in (names or {name: name for name in table}).items():
        trials = list(table[condition].values())
        positions = trials[0][xs] if isinstance(xs, str) else xs
        points = []
        for index, x in enumerate(positions):
            values = [trial[key][index] for trial in trials if index < len(trial[key])]
            finite = tuple(value for value in values if value is not None and math.isfinite(value))
            if finite:
                label = ticks[index].replace("\n", " ") if ticks else f"{x_title} {x:g}"
                points.append(Point(float(index if ticks else x), label, finite))
        series.append(Series(name, points))
    return Chart(series, x_title, y_title, y_title, tuple(ticks), logarithmic=logarithmic, connected=connected)


def plot_categories(table: Table, key: str, *, y_title: str) -> Chart:
    """Return a chart of one number per condition: a dot at its mean, on a bar from the lowest to the highest seed."""
    ticks = tuple(
        "\n".join(textwrap.wrap(condition, TICK_LETTERS // len(table), break_long_words=False)) for condition in table
    )
    points = [
        Point(float(index), condition, tuple(float(trial[key]) for trial in by_seed.values()))
        for index, (condition, by_seed) in enumerate(table.items())
    ]
    return Chart([Series(y_title, points)], "", y_title, y_title, ticks, connected=False)
