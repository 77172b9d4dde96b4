"""Dropout. What a row draws does not depend on how its grid was cut.

A grid may be worked on in parts: by several processes, or one part after the other where it does not fit into memory.
What is drawn is that of the whole grid: a CPU draws all of it, and each part takes its own rows; a GPU draws by
counting, and begins to count where the part begins.

Dropout of whole things: words, heads, layers. All the numbers that make one up share one draw.

Shapes   B rows   T tokens   C model width   H heads   D head width
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class RowSlice(NamedTuple):
    """The rows at hand: so many from `first` on, of a grid of `height` rows that is passed through `passes` times."""

    first: int
    height: int
    passes: int = 1


_row_slice: RowSlice | None = None  # None: the rows at hand are all there are


@contextmanager
def use_row_slice(first: int, height: int, passes: int = 1) -> Iterator[None]:
    """Inside, everything is drawn for a grid of `height` rows, of which those from `first` on are at hand."""
    global _row_slice
    before, _row_slice = _row_slice, RowSlice(first, height, passes) if height else None
    try:
        yield
    finally:
        _row_slice = before


class Dropout(nn.Module):
    """Leave out a share `rate` of the numbers at training, and scale up the others. Rows come first.

    Random numbers are slow to draw: PyTorch's own dropout costs as much as a matrix product on a CPU, and on a GPU more
    than it takes to move the numbers. So 16 bits serve for each; the rate is met to one part in 65,536.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factors(x.shape, x)
        return x if factor is None else x * factor

    def factors(self, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        """What it multiplies numbers of this shape by; None where it does nothing."""
        return sample_dropout_mask(shape, self.rate, like) if self.training and self.rate else None

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + dropout(y), in one go where that is faster."""
        if self.training and self.rate and y.device.type == "cpu":
            return torch.addcmul(x, y, sample_dropout_mask(y.shape, self.rate, y))
        out: Tensor = x + self(y)
        return out

    def extra_repr(self) -> str:
        return f"{self.rate}"


def sample_dropout_mask(shape: tuple[int, ...], rate: float, like: Tensor) -> Tensor:
    """For every number of this shape, rows first, 0 with chance `rate`, else 1 / (1 - rate). A function of the seed."""
    first, height, passes = _row_slice or RowSlice(0, shape[0] if shape else 1)
    if like.is_cuda:
        from dragoman.kernels.rowwise_triton import sample_keep_mask

        seed_1 = torch.randint(2**31, (1,), device=like.device)
        keep: Tensor = sample_keep_mask(seed_1, list(shape), rate, first, height, passes)
        return keep.to(like.dtype) / (1 - rate)
    if _row_slice is None:
        return _sample_on_cpu(shape, rate, like)
    whole = _sample_on_cpu((passes, height, *shape[1:]), rate, like)
    return whole[:, first : first + shape[0] // passes].reshape(shape)


def _sample_on_cpu(shape: tuple[int, ...], rate: float, like: Tensor) -> Tensor:
    dropped = min(round(rate * 65_536), 65_535)
    count = math.prod(shape)
    bits = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    keep = bits.view(torch.int16)[:count].view(shape).ge_(dropped - 32_768)  # in place: booleans are slow here
    return keep.to(like.dtype).mul_(65_536 / (65_536 - dropped))


class StructuredDropout(nn.Module):
    """Leave out a share `rate` of all things at training. Rows come first."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    @property
    def on(self) -> bool:
        return self.training and self.rate > 0

    def draw(self, x: Tensor, axes: int) -> Tensor:
        """For all that lies along the last axes, 0 if it is left out, else 1 / (1 - rate)."""
        return sample_dropout_mask((*x.shape[:-axes], *[1] * axes), self.rate, x)

    def extra_repr(self) -> str:
        return f"{self.rate}"


class WordDropout(StructuredDropout):
    """The model must do without a word, though not without its place (Sennrich 2019); the others are scaled up."""

    def forward(self, x_BTC: Tensor, seen_BT: Tensor | None = None) -> Tensor:
        """Where `seen_BT` is False, a word is left out whatever is drawn."""
        x_BTC = x_BTC * self.draw(x_BTC, 1) if self.on else x_BTC
        return x_BTC if seen_BT is None else x_BTC * seen_BT[..., None]


class HeadDropout(StructuredDropout):
    """No head can rely on what another has read (DropHead, Zhou 2020); the others are scaled up."""

    def forward(self, read_BHTD: Tensor) -> Tensor:
        return read_BHTD * self.draw(read_BHTD, 2) if self.on else read_BHTD


class LayerDropout(StructuredDropout):
    """Of layers: a row goes round a layer instead of through it (LayerDrop, Fan 2020).

    Nothing is scaled up, since the norm that follows would scale it down. Rows draw each for themselves, so that it
    does not matter which of them are at hand; all of them are computed either way.
    """

    def forward(self, before_BTC: Tensor, after_BTC: Tensor) -> Tensor:
        return torch.where(self.draw(after_BTC, 2) > 0, after_BTC, before_BTC) if self.on else after_BTC
