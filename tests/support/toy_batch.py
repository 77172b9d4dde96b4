"""Random examples and lengths, for tests of code that reads batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dragoman.data.batches import BatchPlan, Widths, collate_pairs
from dragoman.types import Batch, Example

VOCABULARY = 40


def examples(count: int, *, seed: int = 0, longest: int = 9, size: int = VOCABULARY) -> list[Example]:
    """Return examples with random lengths and random token ids above those of the special tokens."""
    rng = np.random.default_rng(seed)

    def some_ids() -> NDArray[np.integer]:
        return rng.integers(4, size, rng.integers(1, longest + 1))

    return [Example(some_ids(), some_ids(), line) for line in range(count)]


def in_rows(rows: Sequence[Sequence[int]], some: Sequence[Example], widths: Widths | None = None) -> Batch:
    """Collate examples into rows, given as lists of indices; `widths` are by default as small as possible."""
    needed = (
        max(sum(len(getattr(some[item], side)) + 1 for item in row) for row in rows) for side in ("source", "target")
    )
    return collate_pairs(BatchPlan([list(row) for row in rows], widths or Widths(*needed)), some)


def log_normal(
    count: int, *, mean: float, spread: float, ratio: float, noise: float, longest: int = 500
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return realistic lengths: of sources from a log-normal distribution, of targets as a noisy multiple of these."""
    rng = np.random.default_rng(1)
    source = np.clip(rng.lognormal(np.log(mean) - spread**2 / 2, spread, count).round(), 1, longest)
    target = np.clip((source * ratio * np.exp(rng.normal(0, noise, count))).round(), 1, longest)
    return source.astype(np.int64) + 1, target.astype(np.int64) + 1
