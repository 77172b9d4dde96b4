"""Dropout of elements, tokens, attention heads and layers.

The dropout mask of a row does not depend on how the batch is split over processes or by gradient accumulation: see
`use_dropout_rows` and `sample_dropout_mask`.

Shapes   B rows   T tokens   C model width   H heads   D head width
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class RowSlice(NamedTuple):
    """The part of a full batch that the model gets: rows from `first` on. The full batch has `total_rows` rows.

    Every row occurs `passes` times, once for each forward pass that a consistency loss (R-Drop) compares.
    """

    first: int
    total_rows: int
    passes: int = 1


_row_slice: RowSlice | None = None  # None: the model gets the full batch


@contextmanager
def use_dropout_rows(first: int, total_rows: int, passes: int = 1) -> Iterator[None]:
    """Sample dropout masks of `total_rows` rows, and use the rows from `first` on. 0: the model gets the full batch."""
    global _row_slice
    previous, _row_slice = _row_slice, RowSlice(first, total_rows, passes) if total_rows else None
    try:
        yield
    finally:
        _row_slice = previous


class Dropout(nn.Module):
    """Zero elements with probability `rate` in training, and scale up the others. The first axis is the rows.

    Generating random numbers is slow: PyTorch's dropout takes as long as a matrix product on a CPU, and longer than
    reading x on a GPU. This class uses 16 random bits per element, so rates are rounded to multiples of 1 / 65,536.
    """

    __call__: Callable[..., Tensor]  # nn.Module has no type for its result
    shared_axes = 0  # number of trailing axes along which all elements are dropped together

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.sample_mask(x) if self.training and self.rate else x

    def sample_mask(self, x: Tensor) -> Tensor:
        """Return the factors for the elements of x: 0 or 1 / (1 - rate)."""
        return sample_dropout_mask((*x.shape[: x.dim() - self.shared_axes], *[1] * self.shared_axes), self.rate, x)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + dropout(y), on a CPU as one operation."""
        if self.training and self.rate and y.device.type == "cpu":
            return torch.addcmul(x, y, self.sample_mask(y))
        return x + self(y)

    def extra_repr(self) -> str:
        return f"{self.rate}"


def sample_dropout_mask(shape: tuple[int, ...], rate: float, like: Tensor) -> Tensor:
    """Return a tensor of factors: 0 with probability `rate`, else 1 / (1 - rate).

    The factors depend on the random seed, but not on how the batch is split: a CPU samples the full batch and selects
    the rows of this slice; a GPU has a counter-based generator, which starts at the first row of the slice.
    """
    first, total_rows, passes = _row_slice or RowSlice(0, shape[0] if shape else 1)
    if like.is_cuda:
        from dragoman.kernels.rowwise_triton import sample_keep_mask

        seed = torch.randint(2**31, (1,), device=like.device)
        keep: Tensor = sample_keep_mask(seed, list(shape), rate, first, total_rows, passes)
        return keep.to(like.dtype) / (1 - rate)
    if _row_slice is None:
        return _sample_on_cpu(shape, rate, like)
    full = _sample_on_cpu((passes, total_rows, *shape[1:]), rate, like)
    return full[:, first : first + shape[0] // passes].reshape(shape)


def _sample_on_cpu(shape: tuple[int, ...], rate: float, like: Tensor) -> Tensor:
    """Sample a 16-bit number for each element, and drop the elements whose number is below a threshold."""
    threshold, count = min(round(rate * 65_536), 65_535), math.prod(shape)
    bits = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)  # 64 bits for four elements
    # In place, so that the result stays int16: booleans are slower.
    keep = bits.view(torch.int16)[:count].view(shape).ge_(threshold - 32_768)  # int16 begins at -32,768
    return keep.to(like.dtype).mul_(65_536 / (65_536 - threshold))


class WordDropout(Dropout):
    """Drop the embeddings of tokens, but not their positions, and scale up the others (Sennrich 2019)."""

    shared_axes = 1

    def forward(self, x_BTC: Tensor, visible_BT: Tensor | None = None) -> Tensor:
        """Zero the embeddings of dropped tokens and of those where `visible_BT` is False."""
        x_BTC = super().forward(x_BTC)
        return x_BTC if visible_BT is None else x_BTC * visible_BT[..., None]


class HeadDropout(Dropout):
    """Drop the outputs of attention heads, out_BHTD, and scale up the others (DropHead, Zhou 2020)."""

    shared_axes = 2


class LayerDropout(Dropout):
    """Let each row of a batch skip a layer with probability `rate` (LayerDrop, Fan 2020).

    Nothing is scaled up, since the norm after the layer would cancel the factor. The layer is computed for all rows.
    """

    shared_axes = 2

    def forward(self, before_BTC: Tensor, after_BTC: Tensor) -> Tensor:  # type: ignore[override]
        """Return, for each row, the states before or after the layer."""
        if not (self.training and self.rate):
            return after_BTC
        return torch.where(self.sample_mask(after_BTC) > 0, after_BTC, before_BTC)
