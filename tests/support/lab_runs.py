"""Run the quick version of an experiment and check what every experiment must fulfil."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from dragoman.labs.experiment import CONFIRMED, Experiment, Trials
from dragoman.labs.report import render_markdown, render_result
from dragoman.labs.runner import LabResult, run_experiments

Facts = Callable[[Trials], Mapping[str, bool]]  # statements about the trials of a quick run, and whether they hold


def check_quick_run(
    experiment: Experiment, folder: Path, facts: Facts | None = None, *, decides: bool = True
) -> LabResult:
    """Run an experiment quickly and return its result. A law must be confirmed; figures and pages must render.

    `facts` are statements that even the quick version shows on any CPU, such as that the easy case is learned. They
    would not hold if the experiment measured something else. `decides` is False if the quick version may learn too
    little for a check to have a number.
    """
    [result] = run_experiments([experiment.name], out=folder, quick=True)
    assert set(result.table) == set(experiment.conditions)
    for checked in result.checks:
        assert not decides or all(value == value for value in checked.values), f"{checked.check.text}: not a number"
        if experiment.law:
            assert checked.verdict == CONFIRMED, f"{checked.check.text}: {checked.values}"
    if facts:
        holds = facts({condition: by_seed[1] for condition, by_seed in result.table.items()})
        assert all(holds.values()), [fact for fact, is_true in holds.items() if not is_true]
    figures = experiment.plot(result.table)
    assert figures
    assert all(figure.chart.series and all(series.points for series in figure.chart.series) for figure in figures)
    assert experiment.title in render_result(result).replace("&#39;", "'")
    kept = LabResult.from_json(json.loads(json.dumps(result.to_json())))
    assert kept.verdict == result.verdict
    page = "\n".join(render_markdown(experiment, kept))
    assert page.count("<svg") == len(figures)
    assert "](../../src/dragoman/labs/" in page
    return result
