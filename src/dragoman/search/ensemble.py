"""Several models as one: what each holds likely, averaged. Search does not notice.

Shapes   B sentences   S source width   N rows   V vocabulary   M models
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dragoman.search.step import StepModel


@dataclass(frozen=True)
class States:
    """The state of each model; what is asked of one is asked of all (search/step.py, search/slots.py)."""

    each: tuple[Any, ...]

    def select(self, rows_N: Tensor) -> States:
        return States(tuple(state.select(rows_N) for state in self.each))

    def keep(self, sentences_K: Tensor) -> States:
        return States(tuple(state.keep(sentences_K) for state in self.each))

    def put(self, sentences_K: Tensor, fresh: States) -> States:
        return States(tuple(state.put(sentences_K, new) for state, new in zip(self.each, fresh.each, strict=True)))

    def rest(self, done_B: Tensor) -> States:
        return States(tuple(state.rest(done_B) for state in self.each))


@dataclass(frozen=True)
class Ensemble:
    """Models that share a vocabulary. `more` are grids that they take beside the sources, such as trees."""

    models: Sequence[StepModel[Any]]

    def start(self, source_BS: Tensor, keep_BS: Tensor, *more: Tensor) -> States:
        return States(tuple(model.start(source_BS, keep_BS, *more) for model in self.models))

    def step(self, token_N: Tensor, state: States) -> tuple[Tensor, States]:
        stepped = [model.step(token_N, one) for model, one in zip(self.models, state.each, strict=True)]
        return mean([logp_NV for logp_NV, _ in stepped]), States(tuple(one for _, one in stepped))


def mean(logps: Sequence[Tensor]) -> Tensor:
    """The logarithm of the mean probability: one model that is sure can outvote several that are not."""
    return (torch.stack([logp.float() for logp in logps]).logsumexp(0) - math.log(len(logps))).clamp(max=0)
