"""Quick versions of the experiments in labs/history.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.labs import history
from dragoman.labs.experiment import Experiment
from dragoman.labs.history import COPY, DICTIONARY, NEURAL
from dragoman.labs.registry import collect_experiments
from lab_runs import Facts, check_quick_run

EXPERIMENTS = collect_experiments(history)
FACTS: dict[str, Facts] = {
    "data-size": lambda trials: {
        "the statistical system learns from few pairs": trials["SMT"]["bleu"][0] > 20,
        "and more from more of them": trials["SMT"]["bleu"][1] > trials["SMT"]["bleu"][0] + 10,
        "neural ones hardly do": max(trials[name]["bleu"][0] for name in NEURAL) < 20,
    },
    "layers": lambda trials: {
        "parameters grow with the layers": trials["1 + 1"]["parameters"]
        < trials["2 + 1"]["parameters"]
        < trials["2 + 2"]["parameters"]
        < trials["2 + 4"]["parameters"]
        < trials["4 + 4"]["parameters"]
        < trials["8 + 8"]["parameters"],
        "in few steps, one layer learns more than eight": trials["1 + 1"]["chrf"] > trials["8 + 8"]["chrf"],
    },
    "baselines": lambda trials: {
        "a copy is no translation": trials[COPY]["bleu"] < 5,
        "a dictionary is more": trials[DICTIONARY]["bleu"] > trials[COPY]["bleu"] + 10,
        "phrases are more than words": trials["SMT"]["bleu"] > trials[DICTIONARY]["bleu"] + 10,
    },
}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path, FACTS.get(experiment.name))


def test_only_laws_have_no_facts() -> None:
    assert set(FACTS) == {name for name, experiment in EXPERIMENTS.items() if not experiment.law}
