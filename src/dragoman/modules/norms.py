"""Normalization of activations.

To add a norm, write a subclass of Norm and add it to NORMS. Settings that only this norm reads are fields of
NormSettings, and the norm lists their names in `uses`.

The arguments of a norm are the activations and `real_BT`, which is True at tokens and False at padding; only batch norm
uses it. Under autocast, norms compute in float32 and return the dtype of their input. `formula` is a reference
implementation of a norm with its initial parameters; tests compare `forward` with it.

Shapes   B rows of a batch   T tokens   C model width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.config.settings import Settings, setting

WIDEST_FUSED_NORM = 4096  # maximum model width of the Triton kernel


class NormSettings(Settings):
    """The settings that norms read, and those that attention and feed-forward networks have in common."""

    width: int = setting(512, "width of the token states", ge=1, le=65_536)
    biases: bool = setting(True, "linear layers of attention and feed-forward networks add a bias")
    norm_epsilon: float = setting(
        0.0,
        "added to the variance or mean square by a norm, minimum length of `scale`; 0: 1e-5, of rms 1e-6",
        ge=0,
        le=1,
    )


class Norm(nn.Module):
    """The base class of the norms, and the norm "none", which returns its input."""

    __call__: Callable[..., Tensor]  # nn.Module has no type for its result
    uses: tuple[str, ...] = ()  # names of settings that some other norms ignore
    default_epsilon = 1e-5  # used if the setting `norm_epsilon` is 0

    def __init__(self, settings: NormSettings) -> None:
        super().__init__()
        self.settings, self.width = settings, settings.width
        self.epsilon = settings.norm_epsilon or self.default_epsilon

    @staticmethod
    def formula(x_BTC: Tensor) -> Tensor:
        """Compute the norm with its initial parameters (reference implementation)."""
        return x_BTC

    def forward(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> Tensor:  # noqa: ARG002 - the signature of all norms
        return x_BTC

    def normalize_with_residual(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (x, norm(x)) for a residual connection, so that one kernel can add the gradients of both."""
        return x_BTC, self(x_BTC, real_BT)


class LayerNorm(Norm):
    """Normalize each token to mean 0 and variance 1; then apply a gain and a bias per feature (Ba 2016)."""

    uses = ("norm_epsilon",)

    def __init__(self, settings: NormSettings) -> None:
        super().__init__(settings)
        self.weight, self.bias = nn.Parameter(torch.ones(self.width)), nn.Parameter(torch.zeros(self.width))

    @staticmethod
    def formula(x_BTC: Tensor) -> Tensor:
        return (x_BTC - x_BTC.mean(-1, keepdim=True)) / (x_BTC.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()

    def forward(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> Tensor:  # noqa: ARG002
        if self.training and self.supports_fused_kernel(x_BTC):
            out_BTC: Tensor = _FusedLayerNorm.apply(x_BTC, self.weight, self.bias, self.epsilon)  # type: ignore[no-untyped-call]
            return out_BTC
        return F.layer_norm(x_BTC, (self.width,), self.weight, self.bias, self.epsilon).to(x_BTC.dtype)

    def normalize_with_residual(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.training and self.supports_fused_kernel(x_BTC):
            inputs = x_BTC, self.weight, self.bias, self.epsilon
            both: tuple[Tensor, Tensor] = _FusedResidualNorm.apply(*inputs)  # type: ignore[no-untyped-call]
            return both
        return x_BTC, self(x_BTC, real_BT)

    def supports_fused_kernel(self, x_BTC: Tensor) -> bool:
        """Return whether the Triton kernel can compute the backward pass: on a GPU in half precision."""
        is_half = x_BTC.is_cuda and x_BTC.dtype in (torch.bfloat16, torch.float16)
        return is_half and self.weight.dtype == torch.float32 and self.width <= WIDEST_FUSED_NORM


class _FusedLayerNorm(torch.autograd.Function):
    """Layer norm with the Triton kernel as its backward pass."""

    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
        x_BTC = x_BTC.contiguous()
        inputs = x_BTC.float(), weight_C.shape, weight_C, bias_C, epsilon
        out_BTC, mean_BT1, inv_std_BT1 = torch.native_layer_norm(*inputs)
        ctx.save_for_backward(x_BTC, mean_BT1, inv_std_BT1, weight_C)
        return out_BTC.to(x_BTC.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _layer_norm_gradients(ctx, grads[0])


class _FusedResidualNorm(torch.autograd.Function):
    """Return (x, layer_norm(x)); the backward pass adds the gradients of both in one kernel."""

    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        # A view, so that this output is a tensor of its own, with its own gradient.
        return x_BTC.view_as(x_BTC), _FusedLayerNorm.forward(ctx, x_BTC, weight_C, bias_C, epsilon)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _layer_norm_gradients(ctx, grads[1], grads[0].contiguous())


def _layer_norm_gradients(
    ctx: Any, grad_BTC: Tensor, residual_grad_BTC: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, gain, bias and epsilon (None); `residual_grad_BTC` is added to the first one."""
    from dragoman.kernels.rowwise_triton import layer_norm_backward

    grad_x_BTC, grad_2C = layer_norm_backward(grad_BTC.contiguous(), residual_grad_BTC, *ctx.saved_tensors)
    return grad_x_BTC, *grad_2C.unbind(), None


class ScalarLayerNorm(Norm):
    """Layer norm with a single gain a and a single bias b for all features: a (x - mean) / std + b."""

    uses = ("norm_epsilon",)

    def __init__(self, settings: NormSettings) -> None:
        super().__init__(settings)
        self.weight, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))

    @staticmethod
    def formula(x_BTC: Tensor) -> Tensor:
        return LayerNorm.formula(x_BTC)

    def forward(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> Tensor:  # noqa: ARG002
        out_BTC = F.layer_norm(x_BTC, (self.width,), eps=self.epsilon)
        return (self.weight * out_BTC + self.bias).to(x_BTC.dtype)


class RmsNorm(Norm):
    """Divide each token by its root mean square, then apply a gain per feature (Zhang 2019)."""

    uses = ("norm_epsilon",)
    default_epsilon = 1e-6

    def __init__(self, settings: NormSettings) -> None:
        super().__init__(settings)
        self.weight = nn.Parameter(torch.ones(self.width))

    @staticmethod
    def formula(x_BTC: Tensor) -> Tensor:
        return x_BTC / (x_BTC.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def forward(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return F.rms_norm(x_BTC.to(self.weight.dtype), (self.width,), self.weight, eps=self.epsilon).to(x_BTC.dtype)


class ScaleNorm(Norm):
    """Scale the vector of each token to a learned length, the same for all tokens (Nguyen 2019)."""

    uses = ("norm_epsilon",)

    def __init__(self, settings: NormSettings) -> None:
        super().__init__(settings)
        self.weight = nn.Parameter(torch.tensor(self.width**0.5))

    @staticmethod
    def formula(x_BTC: Tensor) -> Tensor:
        length_BT1 = x_BTC.square().sum(-1, keepdim=True).sqrt()
        out: Tensor = x_BTC / length_BT1 * x_BTC.size(-1) ** 0.5
        return out

    def forward(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return (self.weight * F.normalize(x_BTC, dim=-1, eps=self.epsilon)).to(x_BTC.dtype)


class BatchNorm(Norm):
    """Normalize each feature over all tokens of a batch, except for padding; in evaluation, by running statistics.

    See Ioffe 2015. In training a token therefore depends on the other tokens of the batch, in a decoder even on later
    tokens.
    """

    uses = ("norm_epsilon",)
    MOMENTUM = 0.1  # weight of the current batch in the running statistics
    mean: Tensor
    variance: Tensor

    def __init__(self, settings: NormSettings) -> None:
        super().__init__(settings)
        self.weight, self.bias = nn.Parameter(torch.ones(self.width)), nn.Parameter(torch.zeros(self.width))
        self.register_buffer("mean", torch.zeros(self.width))
        self.register_buffer("variance", torch.ones(self.width))

    @staticmethod
    def formula(x_BTC: Tensor) -> Tensor:
        return (x_BTC - x_BTC.mean((0, 1))) / (x_BTC.var((0, 1), correction=0) + 1e-5).sqrt()

    def forward(self, x_BTC: Tensor, real_BT: Tensor | None = None) -> Tensor:
        mean, variance = self.mean, self.variance
        if self.training:
            real_BT1 = torch.ones_like(x_BTC[..., :1]) if real_BT is None else real_BT[..., None].to(x_BTC.dtype)
            mean, variance = self.compute_statistics(x_BTC.float(), real_BT1.float())
        return ((x_BTC - mean) * (variance + self.epsilon).rsqrt() * self.weight + self.bias).to(x_BTC.dtype)

    def compute_statistics(self, x_BTC: Tensor, real_BT1: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the tokens, and update the running statistics with finite values only."""
        count = real_BT1.sum()
        mean = (x_BTC * real_BT1).sum((0, 1)) / count
        variance = ((x_BTC - mean).square() * real_BT1).sum((0, 1)) / count
        with torch.no_grad():
            for running, current in ((self.mean, mean), (self.variance, variance)):
                running.lerp_(torch.where(current.isfinite(), current, running), self.MOMENTUM)
        return mean, variance


NORMS: dict[str, type[Norm]] = {
    "layer": LayerNorm,
    "layer_scalar": ScalarLayerNorm,
    "rms": RmsNorm,
    "scale": ScaleNorm,
    "batch": BatchNorm,
    "none": Norm,
}
