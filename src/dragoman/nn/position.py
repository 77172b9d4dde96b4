"""Where a token stands. A variant overrides the hook it needs.

Shapes   B batch   T tokens   C model width
"""

import torch
from torch import Tensor, nn


class Position(nn.Module):
    """No position at all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def embed(self, x_BTC: Tensor, position_BT: Tensor) -> Tensor:  # noqa: ARG002 - the hook's shape
        """What the embeddings become."""
        return x_BTC


class Sinusoidal(Position):
    """Waves of growing length, sine and cosine interleaved, as in the paper (Vaswani 2017, section 3.5)."""

    def embed(self, x_BTC: Tensor, position_BT: Tensor) -> Tensor:
        return x_BTC + sinusoids(position_BT, self.width).to(x_BTC.dtype)


def sinusoids(position_BT: Tensor, width: int) -> Tensor:
    even = torch.arange(0, width, 2, device=position_BT.device, dtype=torch.float32)
    angle = position_BT[..., None].float() * 10_000.0 ** (-even / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width]


POSITIONS: dict[str, type[Position]] = {"none": Position, "sinusoidal": Sinusoidal}
