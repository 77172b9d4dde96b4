"""Quick versions of the experiments in labs/depth.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from dragoman.labs import depth
from dragoman.labs.depth import POINTS, build_stack, measure_slice, sample_direction, sample_order_batch
from dragoman.labs.experiment import Experiment, Trials
from dragoman.labs.registry import collect_experiments
from dragoman.labs.small_models import FIRST_ID, compute_losses
from lab_runs import check_quick_run

EXPERIMENTS = collect_experiments(depth)
FACTS: dict[str, Callable[[Trials], Mapping[str, bool]]] = {
    "depth": lambda trials: {"two layers learn": trials["residual, pre-norm"]["accuracy"][0] > 0.9},
    "residual-jacobian": lambda _: {},  # a law
    "layer-gradients": lambda trials: {
        "vanishes": trials["plain, no norm"]["ratio"] < 1e-2,
        "explodes": trials["residual, no norm"]["ratio"] > 100,
        "neither": 0.05 < trials["residual, post-norm"]["ratio"] < 20,
    },
    "variance": lambda trials: {
        "explodes": trials["residual, no norm"]["growth"] > 1e3,
        "grows slowly": 1 < trials["residual, pre-norm"]["growth"] < 100,
        "stays": 0.9 < trials["residual, post-norm"]["growth"] < 1.1,
    },
    "landscape": lambda trials: {
        name: trial["training_loss"] < 0.3 and trial["rises"][POINTS // 2] == 0 and trial["rise"] > 1e-4
        for name, trial in trials.items()
    },
}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path, FACTS[experiment.name])


def test_labels_say_which_word_comes_first_and_the_first_token_is_neither() -> None:
    batch = sample_order_batch(1, 3, texts=50)
    for ids_S, label in zip(batch.source_BS.tolist(), batch.target_out_BT[:, 0].tolist(), strict=True):
        assert ids_S.index(FIRST_ID) > 0
        assert ids_S.index(FIRST_ID + 1) > 0
        assert label == (ids_S.index(FIRST_ID) < ids_S.index(FIRST_ID + 1))


def test_slices_pass_through_the_minimum_and_restore_the_weights() -> None:
    model = build_stack(1, 8, seed=1)
    before = [weight.detach().clone() for weight in model.parameters()]
    direction = sample_direction(model, torch.Generator().manual_seed(1))
    for weight, step in zip(before, direction, strict=True):
        expected = weight.norm(dim=-1) if weight.dim() > 1 else torch.zeros(())
        torch.testing.assert_close(step.norm(dim=-1), expected.expand_as(step.norm(dim=-1)))
    batch = sample_order_batch(1, 0, texts=8)
    losses = measure_slice(model, batch, direction)
    assert losses[len(losses) // 2] == pytest.approx(float(compute_losses(model, batch).mean().detach()))
    assert losses[0] != pytest.approx(losses[-1])
    for weight, kept in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(weight.detach(), kept, rtol=0, atol=0)
