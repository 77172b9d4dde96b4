"""Muon (Jordan 2024): matrices move by their momentum made orthogonal, everything else as AdamW moves it.

A step turns and stretches all directions of a matrix alike, so that rare ones are learned as fast as frequent ones.
Its size is brought to what AdamW's would be (Liu 2025), so that one rate and one decay serve both kinds. Where matrices
are shared out among processes, everyone fetches the momentum of all of them to turn it, and moves its own rows.

Shapes   K matrices of one size   R rows that lie here   C columns   A rows in all, split into blocks

Optimizers and learning-rate schedules, each a menu.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from dragoman.config.settings import Settings, TrainSettings, pick
from dragoman.errors import UserError
from dragoman.training.distributed import gathered, here, is_shared, own

MOMENTUM = 0.95
ROUNDS = 5  # of Newton and Schulz' iteration
FACTORS = (3.4445, -4.7750, 2.0315)  # of its quintic: all singular values come near 1, quickly rather than exactly
LIKE_ADAM = 0.2  # root mean square of AdamW's own steps
BLOCKS = {"query_key_value": 3, "key_value": 2}  # modules whose weights are several matrices in one
TABLES = ("embedding.weight", "table.weight", "project.weight", "_RD", "start")  # asked for by rows: those are AdamW's


class Muon(AdamW):
    def __init__(
        self, named: Mapping[str, Tensor], *, lr: float | Tensor, beta2: float, weight_decay: float, capturable: bool
    ) -> None:
        self.blocks = {id(one): blocks_of(name) for name, one in named.items() if is_matrix(name, one)}
        matrices = [one for one in named.values() if id(one) in self.blocks]
        rest = [one for one in named.values() if id(one) not in self.blocks]
        groups: list[dict[str, Any]] = [{"params": some} for some in (rest, matrices)]
        super().__init__(
            groups, lr=lr, betas=(0.9, beta2), eps=1e-9, weight_decay=weight_decay, fused=True, capturable=capturable
        )

    __setstate__ = Optimizer.__setstate__  # AdamW's own looks for counts of steps, which matrices do not have

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rest, matrices = self.param_groups
        self.param_groups = [rest]
        try:
            super().step(closure)
        finally:
            self.param_groups = [rest, matrices]
        for some in self.alike([one for one in matrices["params"] if one.grad is not None]):
            self.move(some, matrices["lr"], matrices["weight_decay"])

    def move(self, some: list[Tensor], lr: float | Tensor, decay: float) -> None:
        """All matrices of one size at once."""
        for one in some:
            if "momentum_buffer" not in self.state[one]:
                self.state[one]["momentum_buffer"] = torch.zeros_like(one)
        bad, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        good = 1.0 if bad is None else 1 - bad
        parts, held = [here(one) for one in some], [here(self.state[one]["momentum_buffer"]) for one in some]
        grad_KRC = torch.stack([here(one.grad) for one in some])  # type: ignore[arg-type]
        if scale is not None:
            grad_KRC = grad_KRC / scale
        if bad is not None:
            grad_KRC = torch.where(bad > 0, 0.0, grad_KRC)
        momentum_KRC = torch.stack(held)
        momentum_KRC = momentum_KRC + (grad_KRC - momentum_KRC) * ((1 - MOMENTUM) * good)
        ahead_KRC = grad_KRC.lerp(momentum_KRC, MOMENTUM)
        turned_KRC = self.turned(ahead_KRC, some)
        torch._foreach_copy_(held, list(momentum_KRC))
        torch._foreach_mul_(parts, 1 - lr * decay * good)
        torch._foreach_sub_(parts, list(turned_KRC * (lr * good)))

    def turned(self, x_KRC: Tensor, some: list[Tensor]) -> Tensor:
        """What lies here of the orthogonal of all of them, in the size of AdamW's steps."""
        blocks, shared = self.blocks[id(some[0])], is_shared(some[0])
        x_KAC = torch.stack([gathered(part, like) for part, like in zip(x_KRC, some, strict=True)]) if shared else x_KRC
        K, A, C = x_KAC.shape
        out_KAC: Tensor = orthogonal(x_KAC.view(K * blocks, A // blocks, C)).view(K, A, C)
        out_KAC = out_KAC * (LIKE_ADAM * max(A // blocks, C) ** 0.5)
        if not shared:
            return out_KAC
        return torch.stack([here(own(one, like)) for one, like in zip(out_KAC, some, strict=True)])

    def alike(self, matrices: list[Tensor]) -> Iterator[list[Tensor]]:
        """Those of one size, cut into as many blocks, together."""
        kinds: dict[tuple[torch.Size, int], list[Tensor]] = {}
        for one in matrices:
            kinds.setdefault((one.shape, self.blocks[id(one)]), []).append(one)
        yield from kinds.values()


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and not name.endswith(TABLES)


def blocks_of(name: str) -> int:
    module, _, parameter = name.rpartition(".")
    return BLOCKS.get(module.rpartition(".")[2], 1) if parameter == "weight" else 1


def orthogonal(x_KRC: Tensor) -> Tensor:
    """The nearest matrices whose singular values are all about 1, whatever those of x are."""
    a, b, c = FACTORS
    tall = x_KRC.size(1) > x_KRC.size(2)
    x = (x_KRC.mT if tall else x_KRC).to(torch.bfloat16 if x_KRC.is_cuda else x_KRC.dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    out: Tensor = (x.mT if tall else x).to(x_KRC.dtype)
    return out


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
