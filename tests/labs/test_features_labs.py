"""Quick versions of the experiments in labs/features.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.labs.experiment import Experiment
from dragoman.labs.features import EXPERIMENTS
from lab_runs import check_quick_run


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path)
