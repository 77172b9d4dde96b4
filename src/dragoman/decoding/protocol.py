"""What search needs from a model, and the records that all decoding methods share.

    state = model.start(source_BS, keep_BS)          # one row per sentence
    logp_NV, state = model.step(token_N, state)      # one token in, log-probabilities of the next one out
    state = state.select(rows_N)                     # keep these rows, in this order

Search never asks what kind of model it has; an `Ensemble` implements the same protocol.

Shapes   B sentences   S source width   N rows being searched   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from dragoman.decoding.terms import Term
from dragoman.types import TokenFeature

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
class DecodingConstraints:
    """What the translation of one sentence must satisfy."""

    prefix: tuple[int, ...] = ()  # tokens that it starts with
    must: tuple[Term, ...] = ()  # terms that must appear
    avoid: tuple[Term, ...] = ()  # terms that must not appear
    minimum: int = 0  # fewest tokens, without EOS
    text: str = ""  # of the source: random numbers of a sentence depend on it, not on its row

    @property
    def any(self) -> bool:
        """Return whether there is any constraint at all."""
        return bool(self.prefix or self.must or self.avoid or self.minimum)

    @property
    def spellable(self) -> list[Term]:
        """Return the required terms that the vocabulary can spell."""
        return [term for term in self.must if term.possible]

    @property
    def needed_tokens(self) -> int:
        """Return the fewest tokens that the required terms take."""
        return sum(int(term.left_S[0]) for term in self.must if term.possible)


class Job(NamedTuple):
    """A source to decode: its ids without BOS and EOS, and the most tokens of a result, EOS counted."""

    ids: list[int]
    limit: int  # 0: no result
    constraints: DecodingConstraints = DecodingConstraints()
    features: Mapping[str, TokenFeature] = {}  # of the source, for models that need them


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
