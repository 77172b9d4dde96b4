"""Optimizers and learning-rate schedules, each a menu."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from dragoman.config import Settings, TrainSettings, pick
from dragoman.train.muon import Muon
from dragoman.train.parallel import here
from dragoman.types import UserError

Named = Mapping[str, Tensor]  # parameters by their names


def _adam(kind: type[Adam]) -> Callable[[Named, TrainSettings], Optimizer]:
    def make(named: Named, s: TrainSettings) -> Optimizer:
        about: dict[str, Any] = {"betas": (0.9, s.beta2), "eps": 1e-9, "weight_decay": s.weight_decay}
        return kind(list(named.values()), lr=_rate(named, s), fused=True, capturable=_on_gpu(named), **about)

    return make


class Sgd(SGD):
    """PyTorch's own, whose fused kernel does not know tensors that are shared out among processes."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        bad, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        for group in self.param_groups:
            parameters = [one for one in group["params"] if one.grad is not None]
            parts = [here(one) for one in parameters]
            slopes: tuple[Tensor, ...] | list[Tensor] = [here(one.grad) for one in parameters]
            if scale is not None:
                slopes = torch._foreach_div(slopes, scale)
            slopes = torch._foreach_add(slopes, parts, alpha=group["weight_decay"])
            if bad is not None:
                slopes = [torch.where(bad > 0, 0.0, slope) for slope in slopes]
            torch._foreach_sub_(parts, torch._foreach_mul(slopes, group["lr"]))


def _sgd(named: Named, s: TrainSettings) -> Optimizer:
    return Sgd(list(named.values()), lr=_rate(named, s), weight_decay=s.weight_decay)


def _muon(named: Named, s: TrainSettings) -> Optimizer:
    return Muon(named, lr=_rate(named, s), beta2=s.beta2, weight_decay=s.weight_decay, capturable=_on_gpu(named))


def _on_gpu(named: Named) -> bool:
    return any(parameter.is_cuda for parameter in named.values())


def _rate(named: Named, s: TrainSettings) -> Any:
    """A number; on a GPU a tensor, which a captured step reads anew each time."""
    device = next(iter(named.values())).device
    return torch.tensor(s.lr, device=device) if device.type == "cuda" else s.lr


# Each divides gradients by `grad_scale` and does nothing at all where `found_inf` is 1, if it is given such tensors.
OPTIMIZERS: dict[str, Callable[[Named, TrainSettings], Optimizer]] = {
    "sgd": _sgd,
    "adam": _adam(Adam),
    "adamw": _adam(AdamW),
    "muon": _muon,
}


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def inverse_sqrt(step: int, warmup: int, done: float) -> float:  # noqa: ARG001
    """Down as 1 / sqrt(step) (Vaswani 2017, section 5.3)."""
    return math.sqrt(warmup / max(step, warmup))


def cosine(step: int, warmup: int, done: float) -> float:  # noqa: ARG001
    """Down to nothing along a half wave that ends with the run.

    A run with a limit in minutes comes down with the clock, so it gives the same quality, not the same bits, again.
    """
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def constant(step: int, warmup: int, done: float) -> float:  # noqa: ARG001
    """Level."""
    return 1.0


SCHEDULES: dict[str, Callable[[int, int, float], float]] = {
    "inverse_sqrt": inverse_sqrt,
    "cosine": cosine,
    "constant": constant,
}
WARM_AT_MOST = 0.1  # of a run with a limit in minutes: one cannot know how many steps it will have


def check(settings: TrainSettings, model: Settings) -> None:
    pick(OPTIMIZERS, settings.optimizer, "train.optimizer")
    pick(SCHEDULES, settings.schedule, "train.schedule")
    if not settings.limit:
        raise UserError("training needs an end: set train.steps, train.epochs, train.minutes or train.flops")
    if settings.average > settings.keep:
        raise UserError(
            f"train.average={settings.average} needs as many checkpoints, "
            f"but train.keep={settings.keep}; raise train.keep"
        )
    query, value = (getattr(model, f"{name}_width", 0) or getattr(model, "width", 0) for name in ("query", "value"))
    if settings.optimizer == "muon" and query != value:
        raise UserError(
            "train.optimizer=muon cuts the matrix of queries, keys and values into equal parts, so model.query_width "
            "and model.value_width must be the same; make them so, or take train.optimizer=adamw"
        )


def rate(step: int, settings: TrainSettings, *, done: float, clock: float = 0.0) -> float:
    """The learning rate of a step, counted from 1: up in a line, then as the schedule has it.

    `done` is the share of the run's limit that is used up, `clock` that of its minutes alone.
    """
    warmup = max(settings.warmup, 1)
    warm = min(max(step / warmup, clock / WARM_AT_MOST), 1.0)
    return settings.lr * warm * SCHEDULES[settings.schedule](step, warmup, done)


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    grads = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(grads)
