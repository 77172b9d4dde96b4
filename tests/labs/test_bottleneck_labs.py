"""Quick versions of the experiments in labs/bottleneck.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.labs import bottleneck
from dragoman.labs.bottleneck import ATTENTIVE, LAST_STATE, score_buckets
from dragoman.labs.experiment import Experiment
from dragoman.labs.registry import collect_experiments
from lab_runs import Facts, check_quick_run

EXPERIMENTS = collect_experiments(bottleneck)
FACTS: dict[str, Facts] = {
    "bottleneck": lambda trials: {
        "all models copy two tokens": min(trial["scores"][0] for trial in trials.values()) > 80,
        "one vector does not hold twelve": trials[LAST_STATE]["longest"] < 60,
        "all scores of attention find them": min(trials[name]["longest"] for name in ATTENTIVE) > 65,
    },
}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path, FACTS.get(experiment.name))


def test_only_laws_have_no_facts() -> None:
    assert set(FACTS) == {name for name, experiment in EXPERIMENTS.items() if not experiment.law}


def test_each_line_counts_in_the_bucket_of_its_length() -> None:
    references = ["a b c d e", "f g h i j", "k l m n o"]
    texts = ["a b c d e", "x x x x x", "k l m n o"]
    short, middle, long = score_buckets([1, 5, 9], texts, references, [(1, 4), (5, 8), (9, 12)])
    assert short == long == pytest.approx(100)
    assert middle == pytest.approx(0, abs=10)  # smoothing keeps it above 0
