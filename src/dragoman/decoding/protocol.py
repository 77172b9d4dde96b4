"""Search needs three verbs of a model; it never asks what kind of model it is.

    state = model.start(source_BS, keep_BS)          # one row per sentence
    logp_NV, state = model.step(token_N, state)      # one token in, log-probabilities of the next one out
    state = state.select(rows_N)                     # keep these rows, in this order

Shapes   B sentences   S source width   N rows being searched   V vocabulary   T answer length

What a log-probability is divided by, so that long answers are not worse for being long.

Each entry of the menu gives a table: a divisor for every length from 0 to `longest`, the end mark counted, none of them
below 1 and none below the one before it (the stop rules lean on that). A table, because a power computed inside the
search may round differently from one batch to the next.

Several models as one: what each holds likely, averaged. Search does not notice.

Shapes   B sentences   S source width   N rows   V vocabulary   M models
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from dragoman.errors import UserError
from dragoman.types import BOS, PAD

NEVER = float("-inf")  # the log-probability of what cannot be


class SearchState(Protocol):
    """What a model remembers of the prefixes it has read, one row each."""

    def select(self, rows_N: Tensor) -> Self:
        """The state of these rows, in this order. Rows may repeat, and there may be more or fewer than before."""
        ...


S = TypeVar("S", bound=SearchState)


class StepModel(Protocol[S]):
    """Anything that can say how likely each next token is."""

    def start(self, source_BS: Tensor, keep_BS: Tensor) -> S:
        """Read the sources; `keep_BS` is True where a token stands. The answers are still empty."""
        ...

    def step(self, token_N: Tensor, state: S) -> tuple[Tensor, S]:
        """Append one token to every prefix (BOS comes first); log-probabilities (N, V), none above 0, come out."""
        ...


@dataclass(frozen=True, slots=True)
class SearchResult:
    """One answer, without begin and end marks.

    `logp` is the sum over its tokens, the end mark among them; `score` is logp / length ** alpha, where length
    counts the end mark. `finished` is False when there is no end mark, because the answer was cut: it had reached
    its limit, or the model held every continuation to be impossible.
    """

    tokens: list[int]
    logp: float
    score: float
    finished: bool


class Prefix(NamedTuple):
    """What the rows of a search have said so far: the first `length` tokens of each; what stands behind is no matter.

    A sentence's rows stand together, and sentences in the order they came.
    """

    token_NT: Tensor
    length_N: Tensor


Rule = Callable[[Tensor, Prefix], Tensor]  # log-probabilities_NV in, the same out with NEVER where it forbids


def apply_rules(logp_NV: Tensor, prefix: Prefix, rules: Sequence[Rule]) -> Tensor:
    for rule in rules:
        logp_NV = rule(logp_NV, prefix)
    return logp_NV


def forbid_pad_and_bos(logp_NV: Tensor) -> Tensor:
    """PAD and BOS never: written into the log-probabilities, which nobody else needs any more."""
    logp_NV = logp_NV.float()
    logp_NV[:, PAD] = NEVER
    logp_NV[:, BOS] = NEVER
    return logp_NV


def sanitize_logp(logp_NV: Tensor) -> Tensor:
    """The log-probabilities that search goes by: PAD and BOS never; NaN and +inf, marks of a broken model, never.

    What is left is not rescaled, so that a score stays the model's own.
    """
    legal_NV = torch.nan_to_num(logp_NV.float(), nan=NEVER, posinf=NEVER, neginf=NEVER)
    legal_NV[:, PAD] = NEVER
    legal_NV[:, BOS] = NEVER
    return legal_NV


def divide_by_length(longest: int, alpha: float) -> Tensor:
    """length ** alpha: with 1, the mean log-probability of a token."""
    return torch.tensor([float(max(length, 1)) ** checked(alpha) for length in range(longest + 1)])


def divide_by_gnmt(longest: int, alpha: float) -> Tensor:
    """((5 + length) / 6) ** alpha, which is kinder to short answers (Wu 2016)."""
    return torch.tensor([((5.0 + max(length, 1)) / 6.0) ** checked(alpha) for length in range(longest + 1)])


def divide_by_one(longest: int, alpha: float) -> Tensor:  # noqa: ARG001 - the menu's shape
    return torch.ones(longest + 1)


def checked(alpha: float) -> float:
    if not alpha >= 0:
        raise UserError(f"the length penalty must be 0 or more, got {alpha}")
    return alpha


LENGTH_NORMS: dict[str, Callable[[int, float], Tensor]] = {
    "length": divide_by_length,
    "gnmt": divide_by_gnmt,
    "none": divide_by_one,
}


@dataclass(frozen=True)
class EnsembleState:
    """The state of each model; what is asked of one is asked of all."""

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
    """Models that share a vocabulary. `more` are grids that they take beside the sources, such as trees."""

    models: Sequence[StepModel[Any]]

    def start(self, source_BS: Tensor, keep_BS: Tensor, *more: Tensor) -> EnsembleState:
        return EnsembleState(tuple(model.start(source_BS, keep_BS, *more) for model in self.models))

    def step(self, token_N: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
        stepped = [model.step(token_N, one) for model, one in zip(self.models, state.each, strict=True)]
        return mean_logp([logp_NV for logp_NV, _ in stepped]), EnsembleState(tuple(one for _, one in stepped))


def mean_logp(logps: Sequence[Tensor]) -> Tensor:
    """The logarithm of the mean probability: one model that is sure can outvote several that are not."""
    return (torch.stack([logp.float() for logp in logps]).logsumexp(0) - math.log(len(logps))).clamp(max=0)
