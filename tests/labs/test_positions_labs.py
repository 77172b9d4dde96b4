"""Quick versions of the experiments in labs/positions.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.labs import positions
from dragoman.labs.experiment import Experiment
from dragoman.labs.registry import collect_experiments
from lab_runs import Facts, check_quick_run

EXPERIMENTS = collect_experiments(positions)
FACTS: dict[str, Facts] = {
    "extrapolation": lambda trials: {
        "the task is learned with relative and with learned positions": trials["relative"]["trained"] > 0.9
        and trials["learned"]["trained"] > 0.9,
        "learned positions end with the trained lengths": trials["learned"]["longest"]
        < trials["learned"]["trained"] - 0.3,
        "relative ones do not": trials["relative"]["longest"] > 0.9,
    },
}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path, FACTS.get(experiment.name))


def test_only_laws_have_no_facts() -> None:
    assert set(FACTS) == {name for name, experiment in EXPERIMENTS.items() if not experiment.law}
