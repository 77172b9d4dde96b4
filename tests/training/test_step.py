"""Tests of one training step: seeds of dropout, clipping, skipped steps and restoring."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from dragoman.config.settings import TrainSettings
from dragoman.models.base import collect_weights
from dragoman.training.execution import ExecutionPlan
from dragoman.training.optim import OPTIMIZERS, OptimizerFactory
from dragoman.training.step import Stepper, fetch_metrics
from dragoman.types import Batch
from tolerance import assert_different, assert_same
from toy_batch import examples, in_rows
from toy_models import SMALL_TRANSFORMER, build_small_model

BATCH = in_rows([[0, 1], [2, 3], [4], [5]], examples(6))


def stepper(dropout: float = 0.0, **settings: Any) -> Stepper:
    """Return a stepper with the same weights every time."""
    model = build_small_model({**SMALL_TRANSFORMER, "dropout": dropout}, dtype=torch.float32)
    return Stepper(model, TrainSettings(**settings), ExecutionPlan("cpu", "float32", False, 1))


def loss(*batches: Batch, step: int = 1, seed: int = 1) -> Tensor:
    return stepper(0.3, seed=seed).update(batches, step, 0.0).metrics_4[0]


def test_dropout_depends_on_seed_step_and_batch() -> None:
    """The second batch of a step has another seed than the first batch of the next step."""
    first, both = loss(BATCH), loss(BATCH, BATCH)
    for one, other in combinations([first, 2 * both - first, loss(BATCH, step=2), loss(BATCH, seed=2)], 2):
        assert_different(one, other)
    assert torch.equal(first, loss(BATCH))


def sgd_step(clip: float) -> tuple[Tensor, float]:
    """Return the change of all weights by an SGD step with learning rate 0.5, and the reported norm."""
    one = stepper(optimizer="sgd", clip=clip)
    before = torch.nn.utils.parameters_to_vector(one.parameters).detach()
    (update,) = fetch_metrics([one.update([BATCH], 1, 0.5)])
    return torch.nn.utils.parameters_to_vector(one.parameters).detach() - before, update.norm


@pytest.mark.parametrize("share", [0.1, 0.9, 1.1, 10.0])
def test_gradient_is_clipped_to_the_maximum_norm(share: float) -> None:
    """The direction does not change, and the reported norm is that before clipping."""
    free, norm = sgd_step(clip=0.0)
    held, reported = sgd_step(clip=share * norm)
    assert reported == norm
    assert free.norm().item() == pytest.approx(0.5 * norm, rel=1e-5)
    assert held.norm().item() == pytest.approx(0.5 * min(share * norm, norm), rel=1e-5)
    assert_same(held, min(share, 1.0) * free)


def tensors_after(one: Stepper, steps: list[int], *, bad: int = 0) -> list[Tensor]:
    """Return copies of weights, optimizer state and EMA after these steps, of which step `bad` has a NaN gradient."""
    weight = one.parameters[0]
    for step in steps:
        hook = weight.register_hook(lambda grad, step=step: grad * torch.nan if step == bad else grad)
        one.update([BATCH], step, 0.01)
        hook.remove()
    groups = (collect_weights(one.model), one.optimizer_tensors(), one.ema)
    return [tensor.detach().clone() for group in groups for tensor in group.values()]


EVERY_OPTIMIZER = pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "stock nadam"])


@pytest.fixture(autouse=True)
def _stock_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register an optimizer of PyTorch with one line."""
    monkeypatch.setitem(OPTIMIZERS, "stock nadam", OptimizerFactory(torch.optim.NAdam))


@EVERY_OPTIMIZER
def test_step_that_is_not_finite_changes_nothing(optimizer: str) -> None:
    settings: dict[str, Any] = {"optimizer": optimizer, "ema": 0.9, "weight_decay": 0.1}
    found, expected = tensors_after(stepper(**settings), [1, 2, 3], bad=2), tensors_after(stepper(**settings), [1, 3])
    assert all(map(torch.equal, found, expected))


@EVERY_OPTIMIZER
def test_every_optimizer_gets_clipped_gradients(optimizer: str) -> None:
    one = stepper(optimizer=optimizer, clip=1e-3)
    (update,) = fetch_metrics([one.update([BATCH], 1, 0.01)])
    grads = [parameter.grad for parameter in one.parameters if parameter.grad is not None]
    assert update.norm > 1e-3
    assert torch.nn.utils.get_total_norm(grads).item() == pytest.approx(1e-3, rel=1e-4)
    for name, moment in one.optimizer_tensors().items():
        if name.endswith(("exp_avg", "momentum_buffer")):  # what the optimizer saw, times 1 - momentum
            assert moment.norm() < 1e-3


@EVERY_OPTIMIZER
def test_restored_stepper_continues_bit_identically(optimizer: str) -> None:
    settings: dict[str, Any] = {"optimizer": optimizer, "ema": 0.9}
    before, after = stepper(**settings), stepper(**settings)
    tensors_after(before, [1, 2])
    saved = {
        kind: {name: tensor.clone() for name, tensor in some.items()}
        for kind, some in before.checkpoint_tensors().items()
    }
    after.restore(saved["model"], saved["optimizer"], saved["ema"])
    assert all(map(torch.equal, tensors_after(after, [3, 4]), tensors_after(before, [3, 4])))
