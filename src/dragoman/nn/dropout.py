"""Dropout, and its fast twin for the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Dropout(nn.Module):
    """Leave out a share `rate` of the numbers at training, and scale up the others.

    A CPU draws random numbers slowly: PyTorch's own dropout costs as much as a matrix product there. So one random
    64-bit integer serves four numbers, 16 bits each; the rate is met to one part in 65,536.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.rate)
        return x * kept(x, self.rate)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + dropout(y), in one go where that is faster."""
        if self.training and self.rate and y.device.type == "cpu":
            return torch.addcmul(x, y, kept(y, self.rate))
        out: Tensor = x + self(y)
        return out

    def extra_repr(self) -> str:
        return f"{self.rate}"


def kept(x: Tensor, rate: float) -> Tensor:
    """For every number of x, 0 with chance `rate`, else 1 / (1 - rate). A function of the seed."""
    dropped = min(round(rate * 65_536), 65_535)
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    keep = bits.view(torch.int16)[: x.numel()].view(x.shape).ge_(dropped - 32_768)  # in place: booleans are slow here
    return keep.to(x.dtype).mul_(65_536 / (65_536 - dropped))
