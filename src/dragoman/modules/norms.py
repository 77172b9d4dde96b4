"""Normalisation of activations. To add one: a module that takes the width, and a line in NORMS.

Shapes   B batch   T tokens   C model width   N real tokens
Every norm is called with the activations and with `real_BT`, True where a token stands; only one of them asks for it.
Autocast computes them in float32; what comes out is as precise as what went in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDEST_FUSED_NORM = 4096  # model width whose sums a program of a GPU can hold


class Norm(nn.Module):
    """No normalisation at all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> Tensor:  # noqa: ARG002 - the menu's shape
        return x_BTC

    def fork(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x as it is, and its norm. Who goes on with both gets the slopes of both in one."""
        return x_BTC, self(x_BTC, real_BT)


class LayerNorm(Norm):
    """Mean 0 and variance 1 over the features of a token; then a gain and a bias for each feature (Ba 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> Tensor:  # noqa: ARG002
        if self.fused(x_BTC):
            out_BTC: Tensor = _FusedLayerNorm.apply(x_BTC, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return out_BTC
        return F.layer_norm(x_BTC, (self.width,), self.weight, self.bias).to(x_BTC.dtype)

    def fork(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.fused(x_BTC):
            both: tuple[Tensor, Tensor] = _FusedFork.apply(x_BTC, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return both
        return super().fork(x_BTC, real_BT)

    def fused(self, x_BTC: Tensor) -> bool:
        """Whether all slopes are made by one kernel: at training in half precision on a GPU."""
        half = x_BTC.is_cuda and x_BTC.dtype in (torch.bfloat16, torch.float16)
        return half and self.weight.dtype == torch.float32 and self.training and self.width <= WIDEST_FUSED_NORM


class _FusedLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, weight_C: Tensor, bias_C: Tensor) -> Tensor:
        x_BTC = x_BTC.contiguous()
        out_BTC, mean_BT1, scale_BT1 = torch.native_layer_norm(x_BTC.float(), weight_C.shape, weight_C, bias_C, 1e-5)
        ctx.save_for_backward(x_BTC, mean_BT1, scale_BT1, weight_C)
        return out_BTC.to(x_BTC.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return _layer_norm_gradients(ctx, grads[0])


class _FusedFork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, weight_C: Tensor, bias_C: Tensor) -> tuple[Tensor, Tensor]:
        return x_BTC.view_as(x_BTC), _FusedLayerNorm.forward(ctx, x_BTC, weight_C, bias_C)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return _layer_norm_gradients(ctx, grads[1], grads[0].contiguous())


def _layer_norm_gradients(ctx: Any, grad_BTC: Tensor, beside_BTC: Tensor | None = None) -> tuple[Tensor, ...]:
    from dragoman.kernels.rowwise_triton import layer_norm_backward

    slope_BTC, slope_2C = layer_norm_backward(grad_BTC.contiguous(), beside_BTC, *ctx.saved_tensors)
    return slope_BTC, *slope_2C.unbind()


class ScalarLayerNorm(Norm):
    """The same with one gain a and one bias b for all features, as the lectures write it: a (x - mean) / sd + b."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.weight, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))

    def forward(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return (self.weight * F.layer_norm(x_BTC, (self.width,)) + self.bias).to(x_BTC.dtype)


class RmsNorm(Norm):
    """Mean square 1 over the features, the mean left as it is; then a gain for each feature (Zhang 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return F.rms_norm(x_BTC.to(self.weight.dtype), (self.width,), self.weight, eps=1e-6).to(x_BTC.dtype)


class ScaleNorm(Norm):
    """Every token's vector brought to one learned length (Nguyen 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.weight = nn.Parameter(torch.tensor(width**0.5))

    def forward(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return (self.weight * F.normalize(x_BTC, dim=-1, eps=1e-5)).to(x_BTC.dtype)


class BatchNorm(Norm):
    """Mean 0 and variance 1 of each feature over a batch's real tokens; at use, over those of training (Ioffe 2015).

    At training a token therefore sees its neighbours, and a decoder's even what follows; at use it does not.
    """

    MOMENTUM = 0.1  # how much of the running statistics a batch replaces
    mean: Tensor
    variance: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> Tensor:
        mean, variance = self.mean, self.variance
        if self.training:
            real_BT1 = torch.ones_like(x_BTC[..., :1]) if real_BT is None else real_BT[..., None].to(x_BTC.dtype)
            mean, variance = self.measure(x_BTC.float(), real_BT1.float())
        return ((x_BTC - mean) * (variance + 1e-5).rsqrt() * self.weight + self.bias).to(x_BTC.dtype)

    def measure(self, x_BTC: Tensor, real_BT1: Tensor) -> tuple[Tensor, Tensor]:
        """Statistics of these tokens. The running ones move towards them, unless they are not numbers."""
        count = real_BT1.sum()
        mean = (x_BTC * real_BT1).sum((0, 1)) / count
        variance = ((x_BTC - mean).square() * real_BT1).sum((0, 1)) / count
        with torch.no_grad():
            for running, now in ((self.mean, mean), (self.variance, variance)):
                running.lerp_(torch.where(now.isfinite(), now, running), self.MOMENTUM)
        return mean, variance


NORMS: dict[str, type[Norm]] = {
    "layer": LayerNorm,
    "layer_scalar": ScalarLayerNorm,
    "rms": RmsNorm,
    "scale": ScaleNorm,
    "batch": BatchNorm,
    "none": Norm,
}
