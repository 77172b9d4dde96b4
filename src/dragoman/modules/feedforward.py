"""The parts of a Transformer layer around attention: feed-forward networks and residual connections.

To add a feed-forward network, write a subclass of FeedForward and a line in FEEDFORWARDS.

Shapes   B batch   T tokens   C model width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.modules.dropout import Dropout
from dragoman.modules.linear import Linear, ReluLinear
from dragoman.modules.norms import Norm

Sublayer = TypeVar("Sublayer", bound=nn.Module)

NORM_PLACES = {"pre": "pre", "post": "post"}  # norm before the sublayer, or after the residual sum (Vaswani 2017)


class FeedForward(nn.Module):
    """Two linear layers on each token without a nonlinearity. Base class of the others."""

    def __init__(self, width: int, inner: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.wide = Linear(width, inner)
        self.dropout = Dropout(dropout)
        self.narrow = Linear(inner, width)

    def inner(self, x_BTC: Tensor) -> Tensor:
        """Return the activations between the two layers."""
        return self.wide(x_BTC)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.narrow(self.dropout(self.inner(x_BTC)))


class ReluFeedForward(FeedForward):
    """Feed-forward network with ReLU (Vaswani 2017)."""

    def inner(self, x_BTC: Tensor) -> Tensor:
        if not x_BTC.is_cuda or not torch.is_autocast_enabled("cuda"):
            return F.relu(self.wide(x_BTC))
        out: Tensor = ReluLinear.apply(x_BTC.flatten(0, -2), self.wide.weight, self.wide.bias)  # type: ignore[no-untyped-call]
        return out.view(*x_BTC.shape[:-1], -1)


class GeluFeedForward(FeedForward):
    """Feed-forward network with GELU (Hendrycks 2016)."""

    def inner(self, x_BTC: Tensor) -> Tensor:
        return F.gelu(self.wide(x_BTC))


class SwiGluFeedForward(FeedForward):
    """One half of the inner layer gates the other (Shazeer 2020); a third narrower, for as many parameters."""

    def __init__(self, width: int, inner: int, dropout: float = 0.0) -> None:
        inner = max(inner * 2 // 3, 1)
        super().__init__(width, inner, dropout)
        self.wide = Linear(width, 2 * inner)

    def inner(self, x_BTC: Tensor) -> Tensor:
        gate, value = self.wide(x_BTC).chunk(2, -1)
        return F.silu(gate) * value


class Residual(nn.Module, Generic[Sublayer]):
    """Compute x + f(norm(x)) or norm(x + f(x)), with dropout on the output of f; without `skip`, no x is added."""

    def __init__(self, sublayer: Sublayer, norm: Norm, *, norm_place: str, skip: bool, dropout: float) -> None:
        super().__init__()
        self.sublayer, self.norm, self.norm_place, self.skip = sublayer, norm, norm_place, skip
        self.dropout = Dropout(dropout)

    def forward(
        self, x_BTC: Tensor, real_BT: Tensor | None, *args: Any, function: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """Apply the sublayer, or another function of it such as its `step`, to the input and these arguments."""
        pre = self.norm_place == "pre"
        x_BTC, input_BTC = self.norm.fork(x_BTC, real_BT) if pre else (x_BTC, x_BTC)
        y_BTC = (function or self.sublayer)(input_BTC, *args)
        out = self.dropout.add(x_BTC, y_BTC) if self.skip else self.dropout(y_BTC)
        return out if pre else self.norm(out, real_BT)

    def normalize_input(self, x_BTC: Tensor, real_BT: Tensor | None) -> Tensor:
        """Return what the sublayer gets as input."""
        return self.norm(x_BTC, real_BT) if self.norm_place == "pre" else x_BTC


FEEDFORWARDS: dict[str, type[FeedForward] | None] = {
    "relu": ReluFeedForward,
    "gelu": GeluFeedForward,
    "swiglu": SwiGluFeedForward,
    "identity": FeedForward,
    "none": None,  # no feed-forward sublayer at all
}
