"""Dropout of whole things: words, heads, layers. All the numbers that make one up share one draw.

Shapes   B rows   T tokens   C model width   H heads   D head width
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dragoman.nn.dropout import drawn


class Whole(nn.Module):
    """Leave out a share `rate` of all things at training. Rows come first."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    @property
    def on(self) -> bool:
        return self.training and self.rate > 0

    def draw(self, x: Tensor, axes: int) -> Tensor:
        """For all that lies along the last axes, 0 if it is left out, else 1 / (1 - rate)."""
        return drawn((*x.shape[:-axes], *[1] * axes), self.rate, x)

    def extra_repr(self) -> str:
        return f"{self.rate}"


class WordDropout(Whole):
    """The model must do without a word, though not without its place (Sennrich 2019); the others are scaled up."""

    def forward(self, x_BTC: Tensor, seen_BT: Tensor | None = None) -> Tensor:
        """Where `seen_BT` is False, a word is left out whatever is drawn."""
        x_BTC = x_BTC * self.draw(x_BTC, 1) if self.on else x_BTC
        return x_BTC if seen_BT is None else x_BTC * seen_BT[..., None]


class HeadDropout(Whole):
    """No head can rely on what another has read (DropHead, Zhou 2020); the others are scaled up."""

    def forward(self, read_BHTD: Tensor) -> Tensor:
        return read_BHTD * self.draw(read_BHTD, 2) if self.on else read_BHTD


class LayerDropout(Whole):
    """Of layers: a row goes round a layer instead of through it (LayerDrop, Fan 2020).

    Nothing is scaled up, since the norm that follows would scale it down. Rows draw each for themselves, so that it
    does not matter which of them are at hand; all of them are computed either way.
    """

    def forward(self, before_BTC: Tensor, after_BTC: Tensor) -> Tensor:
        return torch.where(self.draw(after_BTC, 2) > 0, after_BTC, before_BTC) if self.on else after_BTC
