"""What search needs from a model, and the small types that all decoding methods share.

    state = model.start(source_BS, keep_BS)          # one row per sentence
    logp_NV, state = model.step(token_N, state)      # one token in, log-probabilities of the next one out
    state = state.select(rows_N)                     # keep these rows, in this order

Search never asks what kind of model it has; an `Ensemble` implements the same protocol.

Shapes   B sentences   S source width   N rows being searched   V vocabulary   T target length
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from dragoman.types import BOS, PAD

NEVER = float("-inf")  # the log-probability of what is impossible


class SearchState(Protocol):
    """What a model keeps of the prefixes it has read, one row each."""

    def select(self, rows_N: Tensor) -> Self:
        """Return the state of these rows, in this order. Rows may repeat, and their number may change."""
        ...


StateT = TypeVar("StateT", bound=SearchState)


class StepModel(Protocol[StateT]):
    """A model that predicts one token at a time."""

    def start(self, source_BS: Tensor, keep_BS: Tensor) -> StateT:
        """Read the sources and return the state of empty prefixes; `keep_BS` is False at padding."""
        ...

    def step(self, token_N: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Append one token to every prefix, BOS first; return log-probabilities, none above 0, and the new state."""
        ...


@dataclass(frozen=True, slots=True)
class SearchResult:
    """One hypothesis, without BOS and EOS.

    `logp` is the sum over its tokens and EOS; `score` is logp / length ** alpha, where length counts EOS. `finished`
    is False if it has no EOS, because it reached its limit or the model gave no continuation any probability.
    """

    tokens: list[int]
    logp: float
    score: float
    finished: bool


class Prefix(NamedTuple):
    """The tokens of the rows so far: the first `length` of each are valid.

    Rows of one sentence are adjacent, and sentences keep their order.
    """

    token_NT: Tensor
    length_N: Tensor


Rule = Callable[[Tensor, Prefix], Tensor]  # returns log-probabilities_NV with NEVER where it forbids a token


def apply_rules(logp_NV: Tensor, prefix: Prefix, rules: Sequence[Rule]) -> Tensor:
    """Apply the rules one after the other."""
    for rule in rules:
        logp_NV = rule(logp_NV, prefix)
    return logp_NV


def sanitize_logp(logp_NV: Tensor) -> Tensor:
    """Forbid PAD and BOS, and NaN and +inf, which only a broken model returns.

    The rest is not rescaled, so that scores stay the model's own.
    """
    clean_NV = torch.nan_to_num(logp_NV.float(), nan=NEVER, posinf=NEVER, neginf=NEVER)
    clean_NV[:, PAD] = NEVER
    clean_NV[:, BOS] = NEVER
    return clean_NV


@dataclass(frozen=True)
class EnsembleState:
    """The states of all models."""

    each: tuple[Any, ...]

    def select(self, rows_N: Tensor) -> EnsembleState:
        return EnsembleState(tuple(state.select(rows_N) for state in self.each))

    def keep(self, sentences_K: Tensor) -> EnsembleState:
        return EnsembleState(tuple(state.keep(sentences_K) for state in self.each))

    def put(self, sentences_K: Tensor, fresh: EnsembleState) -> EnsembleState:
        return EnsembleState(
            tuple(state.put(sentences_K, new) for state, new in zip(self.each, fresh.each, strict=True))
        )

    def rest(self, done_B: Tensor) -> EnsembleState:
        return EnsembleState(tuple(state.rest(done_B) for state in self.each))


@dataclass(frozen=True)
class Ensemble:
    """Models that share a vocabulary, averaged. `features` of the sources are for models that need them."""

    models: Sequence[StepModel[Any]]

    def start(self, source_BS: Tensor, keep_BS: Tensor, *features: Mapping[str, Tensor]) -> EnsembleState:
        return EnsembleState(tuple(model.start(source_BS, keep_BS, *features) for model in self.models))

    def step(self, token_N: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
        stepped = [model.step(token_N, one) for model, one in zip(self.models, state.each, strict=True)]
        return mean_logp([logp_NV for logp_NV, _ in stepped]), EnsembleState(tuple(one for _, one in stepped))


def mean_logp(logps: Sequence[Tensor]) -> Tensor:
    """Return the log of the mean probability: one confident model can outvote several unsure ones."""
    return (torch.stack([logp.float() for logp in logps]).logsumexp(0) - math.log(len(logps))).clamp(max=0)
