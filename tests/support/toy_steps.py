"""Toy implementations of the decoding protocol for tests of search: fast, and different for every prefix.

Shapes   B sentences   S source width   N rows   V vocabulary   T steps
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.protocol import SearchResult, forbid_invalid_tokens
from dragoman.types import BOS, EOS


@dataclass
class ToyState:
    """The state of hypotheses: a hash of source and prefix, the number of tokens read, and the first source token."""

    hash_N: Tensor
    age_N: Tensor
    source_N: Tensor

    def select(self, rows_N: Tensor) -> ToyState:
        return ToyState(self.hash_N[rows_N], self.age_N[rows_N], self.source_N[rows_N])


def mix(hash_N: Tensor, value: Tensor) -> Tensor:
    mixed = (hash_N + value + 1) * 6364136223846793005 + 1442695040888963407
    return mixed ^ ((mixed >> 29) & 0xFFFFFFFF)


class Toy:
    """Log-probabilities computed from a hash of the source and the prefix. Few `levels` give many ties."""

    def __init__(self, *, vocabulary: int = 6, seed: int = 0, levels: int = 1 << 20, sharp: float = 4.0) -> None:
        self.vocabulary, self.seed, self.levels, self.sharp = vocabulary, seed, levels, sharp
        self.steps = 0

    def start(self, source_BS: Tensor, real_BS: Tensor) -> ToyState:
        hash_B = torch.full((len(source_BS),), self.seed, device=source_BS.device)
        for token_B, keep_B in zip(source_BS.T, real_BS.T):
            hash_B = torch.where(keep_B, mix(hash_B, token_B), hash_B)
        return ToyState(hash_B, torch.zeros_like(hash_B), source_BS[:, 0])

    def step(self, token_N: Tensor, state: ToyState) -> tuple[Tensor, ToyState]:
        self.steps += 1
        state = ToyState(mix(state.hash_N, token_N), state.age_N + 1, state.source_N)
        return self.logp(state), state

    def logp(self, state: ToyState) -> Tensor:
        hash_NV = mix(state.hash_N[:, None], torch.arange(self.vocabulary, device=state.hash_N.device))
        level_NV = ((hash_NV >> 24) & 0xFFFFFFFF) % self.levels
        return (level_NV / self.levels * self.sharp).log_softmax(-1)


class Script(Toy):
    """Given log-probabilities by length of the prefix, one row per length; the last row is repeated."""

    def __init__(self, *rows: list[float]) -> None:
        super().__init__(vocabulary=len(rows[0]))
        self.logp_TV = torch.tensor(rows)

    def logp(self, state: ToyState) -> Tensor:
        return self.logp_TV.to(state.age_N.device)[(state.age_N - 1).clamp(max=len(self.logp_TV) - 1)]


class Broken(Toy):
    """Returns `value` for all tokens after more than `age` tokens, for sentences whose source starts with `culprit`."""

    def __init__(self, value: float, age: int, culprit: int, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.value, self.age, self.culprit = value, age, culprit

    def logp(self, state: ToyState) -> Tensor:
        bad_N1 = ((state.age_N > self.age) & (state.source_N == self.culprit))[:, None]
        return super().logp(state).masked_fill(bad_N1, self.value)


def sources(*firsts: int) -> tuple[Tensor, Tensor]:
    """Return sources of two tokens and padding that differ in their first token, and a mask (True: not padding)."""
    source_BS = torch.tensor([[first, 5, 0] for first in firsts]).reshape(-1, 3)
    return source_BS, source_BS != 0


def rescore(model: Toy, first: int, tokens: list[int]) -> float:
    """Return the sum of the log-probabilities of tokens, computed step by step."""
    state, total, previous = model.start(*sources(first)), 0.0, BOS
    for token in tokens:
        logp_NV, state = model.step(torch.tensor([previous]), state)
        total, previous = total + float(logp_NV[0, token]), token
    return total


def exhaustive(model: Toy, first: int, limit: int, alpha: float) -> list[SearchResult]:
    """Return every hypothesis of up to `limit` tokens: finished ones by score, then truncated ones by score."""

    def every(prefix: list[int], logp: np.float32, state: ToyState) -> Iterator[tuple[list[int], np.float32]]:
        logp_NV, state = model.step(torch.tensor([prefix[-1] if prefix else BOS]), state)
        for token, more in enumerate(forbid_invalid_tokens(logp_NV)[0].tolist()):
            longer, total = [*prefix, token], np.float32(logp + np.float32(more))
            if total == -np.inf:
                continue
            if token == EOS or len(longer) == limit:
                yield longer, total
            else:
                yield from every(longer, total, state)

    found = []
    for tokens, logp in every([], np.float32(0), model.start(*sources(first))):
        score = logp / np.float32(len(tokens) ** alpha)
        finished = tokens[-1] == EOS
        found.append(SearchResult(tokens[:-1] if finished else tokens, float(logp), float(score), finished))
    return sorted(found, key=lambda f: (not f.finished, -f.score))
