"""The tolerances of all tests that compare two ways to compute the same numbers, by dtype."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2}  # a few dozen times the rounding error


def assert_same(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Assert that tensors are equal up to the rounding of `dtype` (default: that of `actual`).

    The tolerance is relative to the largest expected number.
    """
    limit = TOLERANCE[dtype or actual.dtype]
    size = expected.detach().abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual.cpu().double(), expected.cpu().double(), rtol=limit, atol=limit * max(size, 1e-3))


def assert_different(one: Tensor, other: Tensor) -> None:
    """Assert that tensors differ by more than rounding errors."""
    assert (one.detach().double() - other.detach().double()).abs().max().item() > 1e-3
