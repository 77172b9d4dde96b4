"""Quick versions of the experiments in labs/cost.py, and the functions that count."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from dragoman.labs.cost import (
    COST,
    COST_TIME,
    build_classifier,
    fit_exponent,
    make_step,
    measure_graph_depth,
    measure_saved_bytes,
)
from dragoman.labs.experiment import Trials
from dragoman.labs.small_models import count_flops
from lab_runs import check_quick_run


def test_quick_version_of_cost(tmp_path: Path) -> None:
    check_quick_run(COST, tmp_path)  # a law


def test_quick_version_of_cost_time(tmp_path: Path) -> None:
    def tell(trials: Trials) -> Mapping[str, bool]:
        recurrent = trials["recurrent"]
        return {
            "a longer text takes longer": recurrent["ms"][-1] > recurrent["ms"][0],
            "CPU time is measured": recurrent["cpu_ms"][-1] > recurrent["cpu_ms"][0],
        }

    threads = torch.get_num_threads()
    check_quick_run(COST_TIME, tmp_path, tell)
    assert torch.get_num_threads() == threads


def test_flops_are_those_of_the_products_that_run() -> None:
    """Two products of T x T x width in attention; per token 4 width^2 in attention and 8 in the feed-forward network.

    In training, the counter would not see the linear layers.
    """
    model, length, width = build_classifier("full", 1), 128, 32
    total, interaction = count_flops(model, make_step(model, length, "cpu"))
    assert interaction == 2 * 2 * length * length * width
    assert total == interaction + 2 * length * 12 * width * width
    assert model.training


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
