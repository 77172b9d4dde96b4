"""Optimizers and learning-rate schedules, each a menu."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from dragoman.config import TrainSettings, pick
from dragoman.types import Mistake

Parameters = Iterable[Tensor]

OPTIMIZERS: dict[str, Callable[[Parameters, TrainSettings], Optimizer]] = {
    "sgd": lambda p, s: SGD(p, lr=s.lr, weight_decay=s.weight_decay),
    "adam": lambda p, s: Adam(p, lr=s.lr, betas=(0.9, s.beta2), eps=1e-9, weight_decay=s.weight_decay, fused=True),
    "adamw": lambda p, s: AdamW(p, lr=s.lr, betas=(0.9, s.beta2), eps=1e-9, weight_decay=s.weight_decay, fused=True),
}


def inverse_sqrt(step: int, warmup: int, done: float) -> float:  # noqa: ARG001
    """Up in a line, then down as 1 / sqrt(step) (Vaswani 2017, section 5.3)."""
    return min(step / warmup, math.sqrt(warmup / step))


def cosine(step: int, warmup: int, done: float) -> float:
    """Down to nothing along a half wave that ends with the run; the warm-up is laid over its beginning.

    A run with a limit in minutes comes down with the clock, so it gives the same quality, not the same bits, again.
    """
    return min(step / warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def constant(step: int, warmup: int, done: float) -> float:  # noqa: ARG001
    """Up in a line, then level."""
    return min(step / warmup, 1.0)


SCHEDULES: dict[str, Callable[[int, int, float], float]] = {
    "inverse_sqrt": inverse_sqrt,
    "cosine": cosine,
    "constant": constant,
}


def check(settings: TrainSettings) -> None:
    pick(OPTIMIZERS, settings.optimizer, "train.optimizer")
    pick(SCHEDULES, settings.schedule, "train.schedule")
    if not (settings.steps or settings.epochs or settings.minutes):
        raise Mistake("training needs an end: set train.steps, train.epochs or train.minutes")
    if settings.average > settings.keep:
        raise Mistake(
            f"train.average={settings.average} needs as many checkpoints, "
            f"but train.keep={settings.keep}; raise train.keep"
        )


def rate(step: int, done: float, settings: TrainSettings) -> float:
    """The learning rate of a step, counted from 1; `done` is the share of the run's limit that is used up."""
    return settings.lr * SCHEDULES[settings.schedule](step, max(settings.warmup, 1), done)


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    grads = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(grads)
