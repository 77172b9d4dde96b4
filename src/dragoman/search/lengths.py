"""What a log-probability is divided by, so that long answers are not worse for being long.

Each entry of the menu gives a table: a divisor for every length from 0 to `longest`, the end mark counted, none of them
below 1 and none below the one before it (the stop rules lean on that). A table, because a power computed inside the
search may round differently from one batch to the next.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dragoman.types import UserError


def by_length(longest: int, alpha: float) -> Tensor:
    """length ** alpha: with 1, the mean log-probability of a token."""
    return torch.tensor([float(max(length, 1)) ** checked(alpha) for length in range(longest + 1)])


def gnmt(longest: int, alpha: float) -> Tensor:
    """((5 + length) / 6) ** alpha, which is kinder to short answers (Wu 2016)."""
    return torch.tensor([((5.0 + max(length, 1)) / 6.0) ** checked(alpha) for length in range(longest + 1)])


def by_nothing(longest: int, alpha: float) -> Tensor:  # noqa: ARG001 - the menu's shape
    return torch.ones(longest + 1)


def checked(alpha: float) -> float:
    if not alpha >= 0:
        raise UserError(f"the length penalty must be 0 or more, got {alpha}")
    return alpha


NORMS: dict[str, Callable[[int, float], Tensor]] = {"length": by_length, "gnmt": gnmt, "none": by_nothing}
