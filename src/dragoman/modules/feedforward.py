"""The parts of a Transformer layer around attention: linear layers, feed-forward networks, residual connections.

`Linear` uses faster matrix products for training in float32 on a CPU. To add a feed-forward network, write a subclass
of FeedForward and add it to FEEDFORWARDS. Settings that only this network reads are fields of FeedForwardSettings, and
the network lists their names in `uses`.

Shapes   B rows of a batch   T tokens   C model width   N tokens of all rows (B x T)   I inputs   O outputs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.config.settings import Fraction, setting
from dragoman.modules.dropout import Dropout
from dragoman.modules.norms import Norm, NormSettings


class Linear(nn.Linear):
    """Compute x W^T + b, as nn.Linear does, through oneDNN where that is faster."""

    __call__: Callable[..., Tensor]  # nn.Module has no type for its result

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or torch.is_autocast_enabled(x.device.type) or not uses_onednn(x):
            return super().forward(x)
        out: Tensor = _Linear.apply(x.flatten(0, -2), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)


class ReluLinear(torch.autograd.Function):
    """Compute relu(x W^T + b) on a GPU in the autocast precision, with one kernel instead of two."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cuda")
        x, weight = x_NI.to(dtype), weight_OI.to(dtype)
        out_NO = torch._addmm_activation(bias_O.to(dtype), x, weight.T)  # the default activation is ReLU
        ctx.save_for_backward(x, weight, out_NO)
        ctx.dtypes = x_NI.dtype, weight_OI.dtype
        return out_NO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        from dragoman.kernels.rowwise_triton import relu_backward

        (x, weight, out_NO), (x_dtype, weight_dtype) = ctx.saved_tensors, ctx.dtypes
        grad_NO, bias_grad_O = relu_backward(grads[0].contiguous(), out_NO)
        return (grad_NO @ weight).to(x_dtype), (grad_NO.T @ x).to(weight_dtype), bias_grad_O.to(weight_dtype)


class _Linear(torch.autograd.Function):
    """The differentiable form of `fast_linear`."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return fast_linear(x_NI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_NO = grads[0].contiguous()  # oneDNN is slow if the gradient in compute_weight_gradient is strided
        x_NI, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            fast_linear(grad_NO, weight_OI.T) if needs_x else None,
            compute_weight_gradient(grad_NO, x_NI) if needs_weight else None,
            grad_NO.sum(0) if needs_bias else None,
        )


def uses_onednn(x: Tensor) -> bool:
    """Return whether a matrix product with x is faster through oneDNN than through PyTorch's default.

    In float32 a Zen 4 core reaches 105 to 110 GFLOP/s through oneDNN, but 92 to 97 through PyTorch's default. In
    bfloat16 PyTorch uses oneDNN by default. So does torch.compile, which cannot trace the operator of `fast_linear`.
    """
    available = ONEDNN_AVAILABLE and not torch.compiler.is_compiling()
    return available and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0


def fast_linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute x W^T + b, through oneDNN where that is faster."""
    if not uses_onednn(x_NI):
        return nn.functional.linear(x_NI, weight_OI, bias_O)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")  # no activation
    return out


def compute_weight_gradient(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """Return grad^T x, the gradient of weight_OI. The branches differ only in speed, which depends on the shape."""
    outputs, inputs = grad_NO.size(1), x_NI.size(1)
    if uses_onednn(x_NI) and outputs >= 2 * inputs:
        return fast_linear(x_NI.T, grad_NO.T).T
    if uses_onednn(x_NI) and inputs >= 2 * outputs:
        return fast_linear(grad_NO.T, x_NI.T)
    return grad_NO.T @ x_NI


ONEDNN_AVAILABLE: bool = torch.backends.mkldnn.is_available() and hasattr(  # type: ignore[no-untyped-call]
    torch.ops.mkldnn, "_linear_pointwise"
)

Sublayer = TypeVar("Sublayer", bound=nn.Module)

# Values of `norm_place`: before the sublayer, or after the residual sum (Vaswani 2017); a dict, as all registries are.
NORM_PLACES = {"pre": "pre", "post": "post"}


class FeedForwardSettings(NormSettings):
    feedforward_width: int = setting(0, "hidden width of the feed-forward network; 0: 4 * `width`", ge=0, le=1_000_000)
    activation: str = setting("relu", "activation of the feed-forward network; none: no such network")
    activation_dropout: Fraction = setting(0.0, "dropout rate between the two layers of the feed-forward network")

    @property
    def inner_width(self) -> int:
        return self.feedforward_width or 4 * self.width


class FeedForward(nn.Module):
    """Two linear layers on each token, without a nonlinearity between them. Base class of the other networks."""

    uses: tuple[str, ...] = ("feedforward_width",)  # names of settings that some other networks ignore

    def __init__(self, settings: FeedForwardSettings) -> None:
        super().__init__()
        self.wide = Linear(settings.width, settings.inner_width, bias=settings.biases)
        self.dropout = Dropout(settings.activation_dropout)
        self.narrow = Linear(settings.inner_width, settings.width, bias=settings.biases)

    def compute_hidden(self, x_BTC: Tensor) -> Tensor:
        """Return the activations between the two layers. Subclasses add a nonlinearity."""
        return self.wide(x_BTC)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.narrow(self.dropout(self.compute_hidden(x_BTC)))


class ReluFeedForward(FeedForward):
    """Feed-forward network with ReLU (Vaswani 2017)."""

    def compute_hidden(self, x_BTC: Tensor) -> Tensor:
        if not x_BTC.is_cuda or not torch.is_autocast_enabled("cuda") or self.wide.bias is None:
            return F.relu(self.wide(x_BTC))
        out: Tensor = ReluLinear.apply(x_BTC.flatten(0, -2), self.wide.weight, self.wide.bias)  # type: ignore[no-untyped-call]
        return out.view(*x_BTC.shape[:-1], -1)


class GeluFeedForward(FeedForward):
    """Feed-forward network with GELU (Hendrycks 2016)."""

    def compute_hidden(self, x_BTC: Tensor) -> Tensor:
        return F.gelu(self.wide(x_BTC))


class SwishFeedForward(FeedForward):
    """Feed-forward network with x * sigmoid(x), also called SiLU (Ramachandran 2017), as MarianMT models have."""

    def compute_hidden(self, x_BTC: Tensor) -> Tensor:
        return F.silu(self.wide(x_BTC))


class SwiGluFeedForward(FeedForward):
    """Feed-forward network with SwiGLU: one half of the first layer's output gates the other half (Shazeer 2020).

    Since the first layer is twice as wide as the activations, these are a third narrower, so that the number of
    parameters is the same as in the other networks.
    """

    def __init__(self, settings: FeedForwardSettings) -> None:
        inner = max(settings.inner_width * 2 // 3, 1)
        super().__init__(settings.model_copy(update={"feedforward_width": inner}))
        self.wide = Linear(settings.width, 2 * inner, bias=settings.biases)

    def compute_hidden(self, x_BTC: Tensor) -> Tensor:
        gate, value = self.wide(x_BTC).chunk(2, -1)
        return F.silu(gate) * value


class Residual(nn.Module, Generic[Sublayer]):
    """A residual connection around a sublayer f: x + f(norm(x)) or norm(x + f(x)), with dropout on the output of f.

    `skip`: whether x is added. `real_BT` is False at padding, which batch norm leaves out of its statistics.
    """

    def __init__(self, sublayer: Sublayer, norm: Norm, *, norm_place: str, skip: bool, dropout: float) -> None:
        super().__init__()
        self.sublayer, self.norm, self.norm_place, self.skip = sublayer, norm, norm_place, skip
        self.dropout = Dropout(dropout)

    def forward(
        self, x_BTC: Tensor, real_BT: Tensor | None, *args: Any, function: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """Apply the sublayer to x and `args`. `function` replaces its `forward`, for instance by its method `step`."""
        pre = self.norm_place == "pre"
        x_BTC, input_BTC = self.norm.normalize_with_residual(x_BTC, real_BT) if pre else (x_BTC, x_BTC)
        y_BTC = (function or self.sublayer)(input_BTC, *args)
        out = self.dropout.add(x_BTC, y_BTC) if self.skip else self.dropout(y_BTC)
        return out if pre else self.norm(out, real_BT)

    def normalize_input(self, x_BTC: Tensor, real_BT: Tensor | None) -> Tensor:
        return self.norm(x_BTC, real_BT) if self.norm_place == "pre" else x_BTC


FEEDFORWARDS: dict[str, type[FeedForward] | None] = {
    "relu": ReluFeedForward,
    "gelu": GeluFeedForward,
    "swish": SwishFeedForward,
    "swiglu": SwiGluFeedForward,
    "identity": FeedForward,
    "none": None,  # layers without a feed-forward network
}
