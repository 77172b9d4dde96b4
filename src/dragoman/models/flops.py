"""What a batch costs in floating-point operations: matrix products alone, as everyone counts them.

A weight costs two operations per entry for each token that it meets; in attention each query meets each key twice,
once for its score and once for its value. Half of what a decoder scores lies ahead and is thrown away; it counts all
the same, because it is computed. The backward pass costs twice the forward one. Padding costs nothing here.

Shapes   N pairs of a batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.models.base import Model
from dragoman.modules.attention import CrossAttention, SelfAttention
from dragoman.modules.attention_scores import SourceAttention
from dragoman.types import Batch

Lengths = NDArray[np.int64]
BACKWARD_FACTOR = 2  # times the forward pass: one product for the slope of the input, one for that of the weight
WEIGHT_SIDES = {  # by a mark in the name of a weight: what meets it; the rest meets every target token
    "bridge.": "pair",
    "encoder.": "source",
    ".key_value.": "source",
    ".score.key.": "source",
}
NO_PRODUCTS = (".pattern.", ".relate.", ".start")  # tables and first states, or costs that are counted apart


@dataclass(frozen=True)
class AttentionCost:
    """An attention: who asks, whom, and how many multiply-adds it costs when one meets the other."""

    query: str
    key: str
    width: int
    keys: Callable[[Lengths], Lengths]  # that a query of a sentence of this length meets


@dataclass(frozen=True)
class Cost:
    """Multiply-adds of a forward pass: for each token of a side, each pair, and all that look at one another."""

    source: int
    target: int
    pair: int
    looks: tuple[AttentionCost, ...]
    passes: int = 1  # over a batch, at training

    @classmethod
    def of(cls, model: Model, passes: int = 1) -> Cost:
        sides = dict.fromkeys(("source", "target", "pair"), 0)
        for name, weight in iterate_weights(model):
            side = next((side for mark, side in WEIGHT_SIDES.items() if mark in f".{name}"), "target")
            sides[side] += weight.numel()
        looks = (make_attention_cost(name, module) for name, module in model.named_modules(remove_duplicate=False))
        return cls(**sides, looks=tuple(each for each in looks if each), passes=passes)

    def forward(self, source_N: Lengths, target_N: Lengths) -> float:
        """Operations for sentences of these lengths, their marks counted."""
        length = {"source": source_N, "target": target_N}
        products = self.source * float(source_N.sum()) + self.target * float(target_N.sum())
        products += self.pair * np.count_nonzero(target_N)
        for each in self.looks:
            products += each.width * float((length[each.query] * each.keys(length[each.key])).sum())
        return 2 * products

    def training(self, batch: Batch) -> float:
        sides = (batch.source_segment_BS, batch.target_segment_BT)
        return self.passes * (1 + BACKWARD_FACTOR) * self.forward(*(measure_segments(segment) for segment in sides))


def make_attention_cost(name: str, module: nn.Module) -> AttentionCost | None:
    if isinstance(module, SelfAttention):
        side = "source" if name.startswith("encoder.") else "target"
        return AttentionCost(side, side, module.query_width + module.value_width, module.pattern.keys)
    if isinstance(module, CrossAttention):
        return AttentionCost("target", "source", module.query_width + module.value_width, attend_all_keys)
    if isinstance(module, SourceAttention):
        return AttentionCost("target", "source", module.score.products + module.width, attend_all_keys)
    return None


def attend_all_keys(length_N: Lengths) -> Lengths:
    """A query meets all keys of the sentence."""
    return length_N


def iterate_weights(model: Model) -> Iterator[tuple[str, Tensor]]:
    """The matrices that something is multiplied by, as often as layers share them.

    A table that is looked up is none, unless it also projects.
    """
    tables = {id(m.weight): name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight.dim() == 2 and id(weight) not in tables and not any(mark in name for mark in NO_PRODUCTS):
            yield name, weight
    if id(model.project.weight) in tables:
        yield "project.weight", model.project.weight


def measure_segments(segment_BT: Tensor) -> Lengths:
    """Of the sentences of a grid, row by row; both sides of a pair come at the same place."""
    segment = segment_BT.numpy()
    most = int(segment.max(initial=0)) + 1
    counts = np.bincount((segment + most * np.arange(len(segment))[:, None]).ravel(), minlength=most * len(segment))
    return counts.reshape(-1, most)[:, 1:].ravel()
