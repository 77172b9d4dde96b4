"""Quick versions of the experiments in labs/search.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.labs import search
from dragoman.labs.experiment import Experiment, Setup
from dragoman.labs.registry import collect_experiments
from dragoman.labs.search import AMBIGUOUS, LARGE_DATA, SMALL_DATA, UNAMBIGUOUS
from dragoman.types import Pair
from lab_runs import Facts, check_quick_run

DATA = (SMALL_DATA, LARGE_DATA)
EXPERIMENTS = collect_experiments(search)
FACTS: dict[str, Facts] = {
    "greedy": lambda trials: {
        "nothing is missed with one translation": max(trials[UNAMBIGUOUS]["missed"]) < 0.1,
        "greedy search misses most with several": trials[AMBIGUOUS]["missed"][0] > 0.5,
        "a beam of 4 misses few": trials[AMBIGUOUS]["missed"][2] < 0.3,
    },
    "beam-width": lambda trials: {
        "a beam of 64 finds more probable outputs": all(
            trials[name]["logp"][-1] > trials[name]["logp"][0] + 0.3 for name in DATA
        ),
        "it finds what is more probable than wrong outputs": all(
            trials[name]["search_errors"][-1] < 0.05 for name in DATA
        ),
        "more data give a higher BLEU": trials[LARGE_DATA]["bleu"][-1] > trials[SMALL_DATA]["bleu"][-1] + 5,
    },
    "length-normalization": lambda trials: {
        "longer references are less probable": all(trials[name]["correlation"] < -0.15 for name in DATA),
        "normalized outputs are longer": all(
            trials[name]["ratio"][2] > trials[name]["ratio"][0] + 0.02 for name in DATA
        ),
    },
    "stopping": lambda trials: {
        "a larger n takes more steps": all(
            trials[name]["n_steps"][-1] > trials[name]["n_steps"][0] + 0.5 for name in DATA
        ),
        "a small T truncates outputs": all(trials[name]["T_truncated"][0] > 0.3 for name in DATA),
        "a large T truncates none": all(trials[name]["T_truncated"][-1] < 0.1 for name in DATA),
    },
}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path, FACTS.get(experiment.name))


def test_only_laws_have_no_facts() -> None:
    assert set(FACTS) == {name for name, experiment in EXPERIMENTS.items() if not experiment.law}


def test_a_right_output_is_no_search_error_even_if_rounding_lowers_its_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = {"a": ("right", -1.1), "b": ("missed", -2.0), "c": ("preferred", -0.5), "d": ("right", -1.0)}
    translator: Any = SimpleNamespace(
        score=lambda sources, _targets: [SimpleNamespace(logp=-1.0) for _ in sources],
        translate=lambda sources, **_: [SimpleNamespace(text=outputs[s][0], logp=outputs[s][1]) for s in sources],
    )
    pairs = [Pair(source, "right") for source in outputs]
    monkeypatch.setattr(search, "train_for_search", lambda *_: (translator, pairs))
    numbers = search.measure_widths(SMALL_DATA, 1, Setup(True, tmp_path))
    assert set(numbers["search_errors"]) == {0.25}
    assert set(numbers["model_errors"]) == {0.25}
