"""One update: what its dropout is drawn from, and how long a step is."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from dragoman.config.settings import TrainSettings
from dragoman.training.choices import Choices
from dragoman.training.step import Stepper, settled
from dragoman.types import Batch
from tolerance import differ, same
from toy_batch import examples, in_rows
from toy_models import SMALL_TRANSFORMER, built

BATCH = in_rows([[0, 1], [2, 3], [4], [5]], examples(6))


def stepper(dropout: float = 0.0, **settings: Any) -> Stepper:
    """The same model every time."""
    model = built({**SMALL_TRANSFORMER, "dropout": dropout}, dtype=torch.float32)
    return Stepper(model, TrainSettings(**settings), Choices("cpu", "float32", False, 1))


def loss(*batches: Batch, step: int = 1, seed: int = 1) -> Tensor:
    return stepper(0.3, seed=seed).update(batches, step, 0.0).numbers_4[0]


def test_dropout_is_drawn_from_the_seed_the_step_and_the_batch() -> None:
    """The second batch of a step is not the first of the next, either."""
    first, both = loss(BATCH), loss(BATCH, BATCH)
    for one, other in combinations([first, 2 * both - first, loss(BATCH, step=2), loss(BATCH, seed=2)], 2):
        differ(one, other)
    assert torch.equal(first, loss(BATCH))


def moved(clip: float) -> tuple[Tensor, float]:
    """What a step of plain gradient descent, at a rate of 0.5, adds to all weights; and the norm it reports."""
    one = stepper(optimizer="sgd", clip=clip)
    before = torch.nn.utils.parameters_to_vector(one.parameters).detach()
    (update,) = settled([one.update([BATCH], 1, 0.5)])
    return torch.nn.utils.parameters_to_vector(one.parameters).detach() - before, update.norm


@pytest.mark.parametrize("share", [0.1, 0.9, 1.1, 10.0])
def test_a_step_is_as_long_as_the_gradient_but_no_longer_than_clip(share: float) -> None:
    """And its direction stays. What is reported is the norm before."""
    free, norm = moved(clip=0.0)
    held, reported = moved(clip=share * norm)
    assert reported == norm
    assert free.norm().item() == pytest.approx(0.5 * norm, rel=1e-5)
    assert held.norm().item() == pytest.approx(0.5 * min(share * norm, norm), rel=1e-5)
    same(held, min(share, 1.0) * free)
