"""Quick versions of the experiments in labs/bottleneck.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.labs.bottleneck import EXPERIMENTS, score_buckets
from dragoman.labs.experiment import Experiment
from lab_runs import check_quick_run


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path)


def test_each_line_counts_in_the_bucket_of_its_length() -> None:
    references = ["a b c d e", "f g h i j", "k l m n o"]
    texts = ["a b c d e", "x x x x x", "k l m n o"]
    short, middle, long = score_buckets([1, 5, 9], texts, references, [(1, 4), (5, 8), (9, 12)])
    assert short == long == pytest.approx(100)
    assert middle == pytest.approx(0, abs=10)  # smoothing keeps it above 0
