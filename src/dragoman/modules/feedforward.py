"""What stands around attention: the feed-forward nets on a menu, and the residual wiring.

Shapes   B batch   T tokens   C model width   I inner width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.modules.dropout import Dropout
from dragoman.modules.linear import Linear, linear_relu
from dragoman.modules.norms import Norm

Sublayer = TypeVar("Sublayer", bound=nn.Module)

NORM_PLACES = {"pre": "pre", "post": "post"}  # norm before the sublayer, or after the residual sum (as in the paper)


class FeedForward(nn.Module):
    """Two products on every token alone, and nothing between them: the net stays linear."""

    def __init__(self, width: int, inner: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.wide = Linear(width, inner)
        self.dropout = Dropout(dropout)
        self.narrow = Linear(inner, width)

    def inner(self, x_BTC: Tensor) -> Tensor:
        """What stands between the two products."""
        out: Tensor = self.wide(x_BTC)
        return out

    def forward(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.narrow(self.dropout(self.inner(x_BTC)))
        return out


class ReluFeedForward(FeedForward):
    def inner(self, x_BTC: Tensor) -> Tensor:
        return linear_relu(x_BTC, self.wide)


class GeluFeedForward(FeedForward):
    def inner(self, x_BTC: Tensor) -> Tensor:
        return F.gelu(self.wide(x_BTC))


class SwiGluFeedForward(FeedForward):
    """One half of the wide product lets the other through (Shazeer 2020); a third narrower, so as many parameters."""

    def __init__(self, width: int, inner: int, dropout: float = 0.0) -> None:
        inner = max(inner * 2 // 3, 1)
        super().__init__(width, inner, dropout)
        self.wide = Linear(width, 2 * inner)

    def inner(self, x_BTC: Tensor) -> Tensor:
        gate, value = self.wide(x_BTC).chunk(2, -1)
        out: Tensor = F.silu(gate) * value
        return out


class Residual(nn.Module, Generic[Sublayer]):
    """x + f(norm(x)) or norm(x + f(x)), with dropout on what f gives; without `skip` the x + is left out."""

    def __init__(self, sublayer: Sublayer, norm: Norm, *, place: str, skip: bool, dropout: float) -> None:
        super().__init__()
        self.sublayer, self.norm, self.place, self.skip = sublayer, norm, place, skip
        self.dropout = Dropout(dropout)

    def forward(self, x_BTC: Tensor, real_BT: Tensor | None, *args: Any) -> Tensor:
        return self.around(x_BTC, real_BT, self.sublayer, *args)

    def around(self, x_BTC: Tensor, real_BT: Tensor | None, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """The same wiring around another verb of the sublayer, such as its `step`."""
        x_BTC, inlet_BTC = self.norm.fork(x_BTC, real_BT) if self.place == "pre" else (x_BTC, x_BTC)
        y_BTC = function(inlet_BTC, *args)
        out: Tensor = self.dropout.add(x_BTC, y_BTC) if self.skip else self.dropout(y_BTC)
        return out if self.place == "pre" else self.norm(out, real_BT)

    def inlet(self, x_BTC: Tensor, real_BT: Tensor | None) -> Tensor:
        """What the sublayer sees of x."""
        out: Tensor = self.norm(x_BTC, real_BT) if self.place == "pre" else x_BTC
        return out


FEEDFORWARDS: dict[str, type[FeedForward] | None] = {
    "relu": ReluFeedForward,
    "gelu": GeluFeedForward,
    "swiglu": SwiGluFeedForward,
    "identity": FeedForward,
    "none": None,  # no feed-forward sublayer at all
}
