"""Registries of optimizers and learning-rate schedules; gradient clipping and the skipping of non-finite steps.

Muon (Jordan 2024) updates matrices by their orthogonalized momentum and all other parameters as AdamW does. All
singular directions of a matrix are updated by the same amount, so rare directions are learned as fast as frequent ones.
Updates have the same root mean square as those of AdamW (Liu 2025), so one learning rate and one weight decay suit both
kinds of parameter. If matrices are sharded, every process gathers the full momentum, orthogonalizes it and updates its
local rows.

Shapes   K matrices of one size   R local rows   A rows of the full matrix (R if it is not sharded)   C columns
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from dragoman.config.settings import Settings, TrainSettings, suggest_name
from dragoman.errors import UserError
from dragoman.training.execution import gather_like, is_sharded, shard_like, to_local

FUSED_ADAM: dict[str, Any] = {"eps": 1e-9, "fused": True}  # eps as in Vaswani 2017
NEWTON_SCHULZ_STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan's polynomial, which brings singular values near 1 in 5 steps
ADAMW_RMS = 0.2  # typical root mean square of AdamW's updates, per unit of learning rate
BLOCKS = {"query_key_value": 3, "key_value": 2}  # fused projections: number of matrices that their weight contains
# 2-D parameters that Muon updates like AdamW: embeddings, the output projection, relative-position tables and initial
# states of RNNs.
ADAMW_SUFFIXES = ("embedding.weight", "table.weight", "project.weight", "_RD", "start")


class Muon(AdamW):
    """Muon for matrices, AdamW for all other parameters. Like fused AdamW, it skips the step if `found_inf` is 1."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        lr: float | Tensor,
        betas: tuple[float, float],
        weight_decay: float,
        capturable: bool,
        momentum: float,
    ) -> None:
        self.momentum = momentum
        self.blocks: dict[int, int] = {}  # number of matrices in a parameter, by its id()
        others, matrices = list[Tensor](), list[Tensor]()
        for name, param in named_parameters:
            if param.dim() == 2 and not name.endswith(ADAMW_SUFFIXES):
                module, _, parameter = name.rpartition(".")
                self.blocks[id(param)] = BLOCKS.get(module.rpartition(".")[2], 1) if parameter == "weight" else 1
            (matrices if id(param) in self.blocks else others).append(param)
        groups: list[dict[str, Any]] = [{"params": others}, {"params": matrices}]
        super().__init__(groups, lr, betas, weight_decay=weight_decay, capturable=capturable, **FUSED_ADAM)

    __setstate__ = Optimizer.__setstate__  # AdamW's method expects a step count, which matrices do not have

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        others, matrices = self.param_groups
        self.param_groups = [others]
        try:
            super().step(closure)
        finally:
            self.param_groups = [others, matrices]
        same_size: dict[tuple[torch.Size, int], list[Tensor]] = {}
        for param in matrices["params"]:
            if param.grad is not None:
                same_size.setdefault((param.shape, self.blocks[id(param)]), []).append(param)
        for params in same_size.values():
            self.update_matrices(params, matrices["lr"], matrices["weight_decay"])

    def update_matrices(self, matrices: list[Tensor], lr: float | Tensor, decay: float) -> None:
        """Update matrices of one size together."""
        for param in matrices:
            if "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        found_inf = getattr(self, "found_inf", None)
        scale = 1.0 if found_inf is None else 1 - found_inf  # 0 leaves weights and momentum unchanged
        weights = [to_local(param) for param in matrices]
        buffers = [to_local(self.state[param]["momentum_buffer"]) for param in matrices]
        grad_KRC = torch.stack([to_local(param.grad) for param in matrices])  # type: ignore[arg-type]
        if found_inf is not None:
            grad_KRC = torch.where(found_inf > 0, 0.0, grad_KRC)
        momentum_KRC = torch.stack(buffers)
        momentum_KRC = momentum_KRC + (grad_KRC - momentum_KRC) * ((1 - self.momentum) * scale)
        nesterov_KRC = grad_KRC.lerp(momentum_KRC, self.momentum)
        update_KRC = self.orthogonalize_sharded(nesterov_KRC, matrices)
        torch._foreach_copy_(buffers, list(momentum_KRC))
        torch._foreach_mul_(weights, 1 - lr * decay * scale)
        torch._foreach_sub_(weights, list(update_KRC * (lr * scale)))

    def orthogonalize_sharded(self, x_KRC: Tensor, params: list[Tensor]) -> Tensor:
        """Orthogonalize full matrices, sharded like `params`, and scale them to AdamW's updates; return local rows."""
        blocks, sharded = self.blocks[id(params[0])], is_sharded(params[0])
        x_KAC = torch.stack([gather_like(*pair) for pair in zip(x_KRC, params, strict=True)]) if sharded else x_KRC
        K, A, C = x_KAC.shape
        out_KAC: Tensor = orthogonalize(x_KAC.view(K * blocks, A // blocks, C)).view(K, A, C)
        out_KAC = out_KAC * (ADAMW_RMS * max(A // blocks, C) ** 0.5)
        if not sharded:
            return out_KAC
        return torch.stack([to_local(shard_like(*pair)) for pair in zip(out_KAC, params, strict=True)])


def orthogonalize(x_KRC: Tensor) -> Tensor:
    """Return matrices with the same singular vectors and singular values near 1, by Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    tall = x_KRC.size(1) > x_KRC.size(2)
    x = (x_KRC.mT if tall else x_KRC).to(torch.bfloat16 if x_KRC.is_cuda else x_KRC.dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    out: Tensor = (x.mT if tall else x).to(x_KRC.dtype)
    return out


class CapturableSGD(SGD):
    """SGD whose learning rate may be a tensor, which CUDA graphs need and PyTorch's SGD does not support."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            weights = [to_local(param) for param in params]
            grads = torch._foreach_add([to_local(param.grad) for param in params], weights, alpha=group["weight_decay"])
            torch._foreach_sub_(weights, torch._foreach_mul(grads, group["lr"]))


@dataclass(frozen=True)
class OptimizerFactory:
    """An entry of OPTIMIZERS: an optimizer class that takes named parameters, as those of `torch.optim` do."""

    optimizer_class: type[Optimizer]
    fixed: Mapping[str, Any] = field(default_factory=dict)  # arguments of the constructor that users cannot change
    options: Mapping[str, float] = field(default_factory=dict)  # defaults of what train.optimizer_options may set

    def __call__(self, parameters: Mapping[str, Tensor], settings: TrainSettings) -> Optimizer:
        """Return an optimizer of these parameters; pass it those training settings that its constructor accepts.

        On a GPU the learning rate is a tensor, which CUDA graphs need.
        """
        parameter = next(iter(parameters.values()))
        tensor_lr = parameter.is_cuda and not is_sharded(parameter)
        all_arguments = {
            "lr": torch.tensor(settings.lr, device=parameter.device) if tensor_lr else settings.lr,
            "betas": (0.9, settings.beta2),
            "weight_decay": settings.weight_decay,
            "capturable": parameter.is_cuda,
        }
        accepted = inspect.signature(self.optimizer_class).parameters
        common = {name: value for name, value in all_arguments.items() if name in accepted}
        make: Callable[..., Optimizer] = self.optimizer_class
        return make(parameters.items(), **common, **self.fixed, **{**self.options, **settings.optimizer_options})


OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": OptimizerFactory(CapturableSGD),
    "adam": OptimizerFactory(Adam, FUSED_ADAM),
    "adamw": OptimizerFactory(AdamW, FUSED_ADAM),
    "muon": OptimizerFactory(Muon, options={"momentum": 0.95}),
}


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all parameters; a tensor is filled in place, so that CUDA graphs read the new value."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def compute_gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients together. It is a DTensor if the gradients are sharded."""
    return torch.nn.utils.get_total_norm([param.grad for param in parameters if param.grad is not None])


@torch.no_grad()
def clip_gradients(parameters: Sequence[Tensor], norm: Tensor, clip: float) -> None:
    """Scale all gradients in place so that their norm is at most `clip`. Does not wait for the GPU."""
    grads = [to_local(param.grad) for param in parameters if param.grad is not None]
    torch._foreach_div_(grads, (norm.float() / clip).clamp(min=1.0))


@torch.no_grad()
def step_if_finite(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Call `optimizer.step()`; if `found_inf` is 1, leave the weights and the optimizer's state as they are.

    PyTorch's fused optimizers and Muon read `found_inf` on the device. For other optimizers it is read here, which
    waits for the GPU. A CUDA graph can neither wait nor branch, so there the step is taken and then undone.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.step()
    elif not (found_inf.is_cuda and torch.cuda.is_current_stream_capturing()):
        if not found_inf:
            optimizer.step()
    else:
        tensors = _list_tensors(optimizer)
        previous = [tensor.clone() for tensor in tensors]
        optimizer.step()
        if len(_list_tensors(optimizer)) > len(tensors):  # each replay of the graph would initialize the state again
            optimizer.state.clear()
            raise RuntimeError("the optimizer must take one step before CUDA graph capture, so that its state exists")
        pairs = zip(previous, tensors, strict=True)
        torch._foreach_copy_(tensors, [torch.where(found_inf > 0, *pair) for pair in pairs])


def _list_tensors(optimizer: Optimizer) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = [value for param in params for value in optimizer.state.get(param, {}).values()]
    return [to_local(value) for value in (*params, *state) if isinstance(value, Tensor)]


def inverse_sqrt(step: int, warmup: int, run_fraction: float) -> float:  # noqa: ARG001
    """Decay as 1 / sqrt(step) (Vaswani 2017, section 5.3)."""
    return math.sqrt(warmup / max(step, warmup))


def cosine(step: int, warmup: int, run_fraction: float) -> float:  # noqa: ARG001
    """Decay to zero along a half cosine that ends with the run.

    In a run limited by train.minutes the learning rate depends on the elapsed time, so a repeated run is not
    bit-identical.
    """
    return 0.5 * (1 + math.cos(math.pi * min(run_fraction, 1.0)))


def constant(step: int, warmup: int, run_fraction: float) -> float:  # noqa: ARG001
    return 1.0


Schedule = Callable[[int, int, float], float]  # step, warmup, run_fraction -> factor of train.lr
SCHEDULES: dict[str, Schedule] = {"inverse_sqrt": inverse_sqrt, "cosine": cosine, "constant": constant}
MAX_WARMUP_FRACTION = 0.1  # of train.minutes, in case that fewer steps than expected fit into that time


def check_optimization(settings: TrainSettings, model: Settings) -> None:
    """Raise a UserError if optimizer, schedule, limits or averaging cannot work."""
    if not settings.limits_text:
        raise UserError("training needs a limit: set train.steps, train.epochs, train.minutes or train.flops")
    if settings.average > settings.keep:
        raise UserError(
            f"train.average={settings.average} needs as many checkpoints, "
            f"but train.keep={settings.keep}; raise train.keep"
        )
    options = OPTIMIZERS[settings.optimizer].options
    if unknown := [name for name in settings.optimizer_options if name not in options]:
        raise UserError(
            f"train.optimizer={settings.optimizer} has no option {unknown[0]!r}{suggest_name(unknown[0], options)} "
            f"(options: {', '.join(options) or 'none'})"
        )
    try:
        OPTIMIZERS[settings.optimizer]({"dummy": torch.zeros(1, requires_grad=True)}, settings)  # checks its arguments
    except ValueError as error:
        raise UserError(f"train.optimizer={settings.optimizer}: {error}") from None
    width = getattr(model, "width", 0)
    query_width, value_width = (getattr(model, name, 0) or width for name in ("query_width", "value_width"))
    if settings.optimizer == "muon" and query_width != value_width:
        raise UserError(
            "train.optimizer=muon splits the matrix of queries, keys and values into equal parts, so model.query_width "
            "and model.value_width must be equal; set them to the same value, or use train.optimizer=adamw"
        )


def compute_learning_rate(
    step: int, settings: TrainSettings, *, run_fraction: float, minutes_fraction: float = 0.0
) -> float:
    """Return the learning rate of a step, counted from 1: a linear warm-up, multiplied by the schedule.

    `run_fraction` is the fraction of the run that is done, `minutes_fraction` the fraction of train.minutes that has
    passed.
    """
    warmup = max(settings.warmup, 1)
    warmup_factor = min(max(step / warmup, minutes_fraction / MAX_WARMUP_FRACTION), 1.0)
    return settings.lr * warmup_factor * SCHEDULES[settings.schedule](step, warmup, run_fraction)
