"""Length-bucketed batches for contestants that take one pair per row: pairs of like length together, little padding.

Shapes   B rows   S source width   T target width
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

PAD, BOS, EOS = 0, 2, 3


class Padded(NamedTuple):
    source_BS: torch.Tensor
    target_in_BT: torch.Tensor
    target_out_BT: torch.Tensor
    tokens: int


def read_pairs(folder: str) -> list[tuple[Any, Any]]:
    """The pairs as token ids, without begin and end marks."""
    with np.load(Path(folder) / "pairs.npz") as stored:
        sides = [
            np.split(stored[f"{side}_ids"], np.cumsum(stored[f"{side}_lengths"])[:-1]) for side in ("source", "target")
        ]
    return list(zip(*sides, strict=True))


def padded_batches(folder: str, *, tokens: int, seed: int = 1) -> Iterator[Padded]:
    """Endless batches in random order; rows times width stays within the budget on both sides."""
    pairs = read_pairs(folder)
    pairs.sort(key=lambda pair: (len(pair[1]), len(pair[0])))
    batches: list[Padded] = []
    some: list[tuple[Any, Any]] = []
    width = 0
    for pair in pairs:
        wider = max(width, len(pair[0]) + 1, len(pair[1]) + 1)
        if some and (len(some) + 1) * wider > tokens:
            batches.append(_lay(some))
            some, wider = [], max(len(pair[0]), len(pair[1])) + 1
        some.append(pair)
        width = wider
    order = np.random.default_rng(seed)
    while True:
        for index in order.permutation(len(batches)):
            yield batches[index]


def _lay(pairs: list[tuple[Any, Any]]) -> Padded:
    source = np.full((len(pairs), max(len(s) for s, _ in pairs) + 1), PAD)
    target_in = np.full((len(pairs), max(len(t) for _, t in pairs) + 1), PAD)
    target_out = target_in.copy()
    for row, (s, t) in enumerate(pairs):
        source[row, : len(s)], source[row, len(s)] = s, EOS
        target_in[row, 0], target_in[row, 1 : len(t) + 1] = BOS, t
        target_out[row, : len(t)], target_out[row, len(t)] = t, EOS
    real = sum(len(s) + len(t) + 2 for s, t in pairs)
    return Padded(*(torch.from_numpy(grid) for grid in (source, target_in, target_out)), tokens=real)


def fill(folder: str, *, tokens: int) -> float:
    """The share of the grids that is real, over the first hundred batches."""
    some = list(itertools.islice(padded_batches(folder, tokens=tokens), 100))
    return sum(b.tokens for b in some) / sum(b.source_BS.numel() + b.target_out_BT.numel() for b in some)
