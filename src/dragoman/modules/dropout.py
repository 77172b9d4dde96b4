"""Dropout of single elements, and of tokens, heads and layers.

What is sampled for a row does not depend on how its batch is split over processes or over gradient accumulation: see
`use_row_slice` and `sample_dropout_mask`.

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
    """Which rows of a batch are being computed: those from `first` on, of `height` rows, in `passes` copies."""

    first: int
    height: int
    passes: int = 1


_row_slice: RowSlice | None = None  # None: the full batch is being computed


@contextmanager
def use_row_slice(first: int, height: int, passes: int = 1) -> Iterator[None]:
    """Sample dropout masks for a batch of `height` rows and use the part that starts at row `first`."""
    global _row_slice
    before, _row_slice = _row_slice, RowSlice(first, height, passes) if height else None
    try:
        yield
    finally:
        _row_slice = before


class Dropout(nn.Module):
    """Zero a fraction `rate` of the elements in training and scale up the others. The first axis is the rows.

    Sampling is slow: PyTorch's dropout costs as much as a matrix product on a CPU, and more than the memory traffic on
    a GPU. Here each element uses only 16 random bits, so the rate is exact to one part in 65,536.
    """

    __call__: Callable[..., Tensor]  # nn.Module has no type for its result
    shared_axes = 0  # trailing axes along which one sample decides for all elements

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.sample_mask(x) if self.training and self.rate else x

    def sample_mask(self, x: Tensor) -> Tensor:
        """Return the factors for a tensor: 0 where it is dropped, else 1 / (1 - rate)."""
        return sample_dropout_mask((*x.shape[: x.dim() - self.shared_axes], *[1] * self.shared_axes), self.rate, x)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + dropout(y), fused where that is faster."""
        if self.training and self.rate and y.device.type == "cpu":
            return torch.addcmul(x, y, self.sample_mask(y))
        return x + self(y)

    def extra_repr(self) -> str:
        return f"{self.rate}"


def sample_dropout_mask(shape: tuple[int, ...], rate: float, like: Tensor) -> Tensor:
    """Return 0 with probability `rate`, else 1 / (1 - rate), for every element. A function of the seed alone.

    The result does not depend on how the batch is split: a CPU samples the full batch and takes its rows, and a GPU
    uses a counter-based generator that starts at the first row.
    """
    first, height, passes = _row_slice or RowSlice(0, shape[0] if shape else 1)
    if like.is_cuda:
        from dragoman.kernels.rowwise_triton import sample_keep_mask

        seed_1 = torch.randint(2**31, (1,), device=like.device)
        keep: Tensor = sample_keep_mask(seed_1, list(shape), rate, first, height, passes)
        return keep.to(like.dtype) / (1 - rate)
    if _row_slice is None:
        return _sample_on_cpu(shape, rate, like)
    full = _sample_on_cpu((passes, height, *shape[1:]), rate, like)
    return full[:, first : first + shape[0] // passes].reshape(shape)


def _sample_on_cpu(shape: tuple[int, ...], rate: float, like: Tensor) -> Tensor:
    dropped = min(round(rate * 65_536), 65_535)
    count = math.prod(shape)
    bits = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    keep = bits.view(torch.int16)[:count].view(shape).ge_(dropped - 32_768)  # in place: booleans are slow here
    return keep.to(like.dtype).mul_(65_536 / (65_536 - dropped))


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
    """Let rows of a batch skip a layer (LayerDrop, Fan 2020).

    Nothing is scaled up, since the norm that follows would undo it. Each row is sampled separately, so the result does
    not depend on how the batch is split; the layer is computed for all rows either way.
    """

    shared_axes = 2

    def forward(self, before_BTC: Tensor, after_BTC: Tensor) -> Tensor:  # type: ignore[override]
        if not (self.training and self.rate):
            return after_BTC
        return torch.where(self.sample_mask(after_BTC) > 0, after_BTC, before_BTC)
