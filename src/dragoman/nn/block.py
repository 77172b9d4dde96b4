"""What stands around attention: the feed-forward net and the residual wiring.

Shapes   B batch   T tokens   C model width
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.nn.dropout import Dropout
from dragoman.nn.linear import Linear

M = TypeVar("M", bound=nn.Module)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}
PLACES = {"pre": "pre", "post": "post"}  # norm before the sublayer, or after the residual sum (as in the paper)


class FeedForward(nn.Module):
    """Two products with an activation between them, on every token alone."""

    def __init__(self, width: int, inner: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.wide = Linear(width, inner)
        self.narrow = Linear(inner, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.narrow(self.activation(self.wide(x_BTC)))
        return out


class Residual(nn.Module, Generic[M]):
    """x + f(norm(x)) or norm(x + f(x)), with dropout on what f gives."""

    def __init__(self, sublayer: M, norm: nn.Module, place: str, dropout: float) -> None:
        super().__init__()
        self.sublayer, self.norm, self.place = sublayer, norm, place
        self.dropout = Dropout(dropout)

    def forward(self, x_BTC: Tensor, *args: Any) -> Tensor:
        return self.around(x_BTC, self.sublayer, *args)

    def around(self, x_BTC: Tensor, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """The same wiring around another verb of the sublayer, such as its `step`."""
        out: Tensor
        if self.place == "pre":
            out = self.dropout.add(x_BTC, function(self.norm(x_BTC), *args))
        else:
            out = self.norm(self.dropout.add(x_BTC, function(x_BTC, *args)))
        return out

    def inlet(self, x_BTC: Tensor) -> Tensor:
        """What the sublayer sees of x."""
        out: Tensor = self.norm(x_BTC) if self.place == "pre" else x_BTC
        return out
