"""Search needs three verbs of a model; it never asks what kind of model it is.

    state = model.start(source_BS, keep_BS)          # one row per sentence
    logp_NV, state = model.step(token_N, state)      # one token in, log-probabilities of the next one out
    state = state.select(rows_N)                     # keep these rows, in this order

Shapes   B sentences   S source width   N rows being searched   V vocabulary   T answer length
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from dragoman.types import BOS, PAD

NEVER = float("-inf")  # the log-probability of what cannot be


class State(Protocol):
    """What a model remembers of the prefixes it has read, one row each."""

    def select(self, rows_N: Tensor) -> Self:
        """The state of these rows, in this order. Rows may repeat, and there may be more or fewer than before."""
        ...


S = TypeVar("S", bound=State)


class StepModel(Protocol[S]):
    """Anything that can say how likely each next token is."""

    def start(self, source_BS: Tensor, keep_BS: Tensor) -> S:
        """Read the sources; `keep_BS` is True where a token stands. The answers are still empty."""
        ...

    def step(self, token_N: Tensor, state: S) -> tuple[Tensor, S]:
        """Append one token to every prefix (BOS comes first); log-probabilities (N, V), none above 0, come out."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
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


def ruled(logp_NV: Tensor, prefix: Prefix, rules: Sequence[Rule]) -> Tensor:
    for rule in rules:
        logp_NV = rule(logp_NV, prefix)
    return logp_NV


def barred(logp_NV: Tensor) -> Tensor:
    """PAD and BOS never: written into the log-probabilities, which nobody else needs any more."""
    logp_NV = logp_NV.float()
    logp_NV[:, PAD] = NEVER
    logp_NV[:, BOS] = NEVER
    return logp_NV


def legal(logp_NV: Tensor) -> Tensor:
    """The log-probabilities that search goes by: PAD and BOS never; NaN and +inf, marks of a broken model, never.

    What is left is not rescaled, so that a score stays the model's own.
    """
    legal_NV = torch.nan_to_num(logp_NV.float(), nan=NEVER, posinf=NEVER, neginf=NEVER)
    legal_NV[:, PAD] = NEVER
    legal_NV[:, BOS] = NEVER
    return legal_NV
