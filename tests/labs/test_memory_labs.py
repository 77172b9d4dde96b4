"""Quick versions of the experiments in labs/memory.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dragoman.labs import memory
from dragoman.labs.experiment import Experiment, Setup
from dragoman.labs.memory import (
    ATTENTIVE_LSTM,
    LARGE_CLIPPED,
    LARGE_FREE,
    PLAIN_LSTM,
    REACH_TRANSFORMER,
    SMALL_CLIPPED,
    SMALL_FREE,
    VANILLA,
)
from dragoman.labs.registry import collect_experiments
from lab_runs import Facts, check_quick_run

EXPERIMENTS = collect_experiments(memory)
FACTS: dict[str, Facts] = {
    "clipping": lambda trials: {
        "small weights learn": max(trials[name]["final"] for name in (SMALL_FREE, SMALL_CLIPPED)) < 0.1,
        "large weights do not learn without clipping": trials[LARGE_FREE]["final"] > 0.7,
        "only large weights explode": trials[LARGE_CLIPPED]["largest"] > 1000 * trials[SMALL_CLIPPED]["largest"],
    },
    "reach": lambda trials: {
        "gates and attention recall the first token": min(
            min(trials[name]["accuracies"]) for name in (PLAIN_LSTM, ATTENTIVE_LSTM, REACH_TRANSFORMER)
        )
        > 0.9,
        "the gradient vanishes faster without gates": trials[PLAIN_LSTM]["gradients"][-1]
        > 1000 * trials[VANILLA]["gradients"][-1],
        "it does not vanish with attention": trials[REACH_TRANSFORMER]["gradients"][-1] > 0.1,
    },
}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path, FACTS.get(experiment.name))


def test_only_laws_have_no_facts() -> None:
    assert set(FACTS) == {name for name, experiment in EXPERIMENTS.items() if not experiment.law}


def test_a_model_that_recalls_nothing_has_no_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "fit", lambda *_, **__: [])
    monkeypatch.setattr(memory, "measure_accuracy", lambda *_, **__: 0.0)
    numbers = memory.measure_reach(VANILLA, 1, Setup(True, tmp_path))
    assert set(numbers["accuracies"]) == {0.0}
    assert numbers["reach"] == 0


@pytest.mark.parametrize(
    ("norms", "largest"), [([math.nan, 1.0, 3.0], 3.0), ([3.0, 1.0, math.nan], 3.0), ([math.nan], math.inf)]
)
def test_the_largest_gradient_does_not_depend_on_the_position_of_a_nan(
    norms: list[float], largest: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(*_: Any, gradient_norms: list[float], **__: Any) -> list[float]:
        gradient_norms.extend(norms)
        return [1.0] * 15

    monkeypatch.setattr(memory, "fit", diverge)
    assert memory.measure_clipping(LARGE_FREE, 1, Setup(True, tmp_path))["largest"] == largest
