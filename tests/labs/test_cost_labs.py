"""Quick versions of the experiments in labs/cost.py, and the functions that count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dragoman.labs.cost import EXPERIMENTS, build_classifier, fit_exponent, measure_graph_depth, measure_saved_bytes
from dragoman.labs.experiment import Experiment
from lab_runs import check_quick_run


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path)


def test_depth_is_the_longest_path() -> None:
    x = torch.ones(3, requires_grad=True)
    assert measure_graph_depth((x.exp().exp().exp() + x).sum()) == 6  # leaf, three times exp, addition, sum


def test_saved_bytes_count_each_tensor_once_and_no_weights() -> None:
    model = build_classifier("full", 1)
    weight = next(model.parameters())
    x = torch.ones(100, requires_grad=True)
    assert measure_saved_bytes(model, lambda: (weight.flatten()[:100] * x).sum() + (x * x).sum()) == 400


def test_exponent_of_a_power() -> None:
    assert fit_exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
