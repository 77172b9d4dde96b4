"""Searches of many sentences in step, each by a record of its own in plain Python: the ways to search that are rare.

`SentenceBeam` is beam search written to be read, as beam.py does it for many at once. Other
searches (diverse.py, constrained.py) choose differently among the ways to go on, and leave the rest to it.

Shapes   B sentences   W rows of a sentence   N = B * W rows of the model   V vocabulary   T tokens so far
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dragoman.config.settings import pick
from dragoman.decoding.beam import STOP_RULES, stable_topk
from dragoman.decoding.protocol import LENGTH_NORMS, NEVER, Prefix, SearchResult, apply_rules, sanitize_logp
from dragoman.decoding.request import Request
from dragoman.decoding.rules import make_rules
from dragoman.types import BOS, EOS


class Extension(NamedTuple):
    """A way to go on: the row it comes from, the token it adds, and how likely the whole is."""

    row: int
    token: int
    logp: float


class SentenceSearch(Protocol):
    """The search of one sentence."""

    @property
    def done(self) -> bool: ...

    def advance(self, logp_WV: Tensor) -> list[Extension]:
        """Take what may be said next in each of its rows; give up to W ways that live on, and remember the answers."""
        ...

    def answers(self) -> list[SearchResult]: ...


@torch.inference_mode()
def run_in_lockstep(request: Request[Any], searches: Sequence[SentenceSearch], width: int) -> list[list[SearchResult]]:
    """Run them all, a token at a time, until each is done. Shapes stay the same, whoever is done before."""
    B, W, device = len(searches), width, request.device
    rules = make_rules(request)
    state = request.model.start(request.source_BS, request.keep_BS)
    state = state.select(torch.arange(B, device=device).repeat_interleave(W))
    token_N = torch.full((B * W,), BOS, device=device)
    said_NT = torch.zeros(B * W, 0, dtype=torch.long, device=device)
    while not all(search.done for search in searches):
        logp_NV, state = request.model.step(token_N, state)
        length_N = torch.full((B * W,), said_NT.size(1), device=device)
        logp_NV = apply_rules(sanitize_logp(logp_NV), Prefix(said_NT, length_N), rules)
        ways = [
            pad_extensions([] if search.done else search.advance(logp_WV), W)
            for search, logp_WV in zip(searches, logp_NV.view(B, W, -1))
        ]
        rows_N = torch.tensor([b * W + way.row for b, some in enumerate(ways) for way in some], device=device)
        token_N = torch.tensor([way.token for some in ways for way in some], device=device)
        said_NT = torch.cat([said_NT[rows_N], token_N[:, None]], 1)
        state = state.select(rows_N)
    return [search.answers() for search in searches]


def pad_extensions(ways: list[Extension], width: int) -> list[Extension]:
    """With dummies for the rows that have nothing to do."""
    return ways + [Extension(0, EOS, NEVER)] * (width - len(ways))


class SentenceBeam:
    """Beam search of one sentence.

    `live` holds the tokens and the log-probability of each row that lives, best first; `whole` the answers that came
    to their end mark, best first. Sums are made in float32, as beam.py makes them.
    """

    def __init__(self, request: Request[Any], row: int, *, width: int, nbest: int) -> None:
        self.limit, self.width, self.nbest = int(request.limit_B[row]), width, nbest
        settings = request.settings
        self.norm_T = pick(LENGTH_NORMS, settings.length_norm, "length norm")(self.limit, settings.length_penalty)
        self.stop = pick(STOP_RULES, settings.stop, "stop rule")
        self.live: list[tuple[list[int], float]] = [([], 0.0)]
        self.whole: list[SearchResult] = []
        self.done = self.limit == 0

    def advance(self, logp_WV: Tensor) -> list[Extension]:
        total_LV = self.total(logp_WV)
        return self.follow(total_LV, total_LV)

    def follow(self, total_LV: Tensor, rank_LV: Tensor) -> list[Extension]:
        """Go the ways of the best ranks, which need not be the likeliest; scores stay the model's own."""
        ways = self.ranked(total_LV, rank_LV, 2 * self.width)
        ends = [way for way in ways[: self.width] if way.token == EOS]
        return self.step(ends, [way for way in ways if way.token != EOS][: self.width])

    def total(self, logp_WV: Tensor) -> Tensor:
        live_L = torch.tensor([logp for _, logp in self.live], device=logp_WV.device)
        return live_L[:, None] + logp_WV[: len(self.live)]

    @staticmethod
    def ranked(total_LV: Tensor, rank_LV: Tensor, count: int) -> list[Extension]:
        """The best ways, best first; among equals the better row and the lower token."""
        V = total_LV.size(1)
        rank_1K, place_1K = stable_topk(rank_LV.reshape(1, -1), count)
        logps = total_LV.flatten()[place_1K[0]].tolist()
        rows = zip(rank_1K[0].tolist(), place_1K[0].tolist(), logps)
        return [Extension(place // V, place % V, logp) for rank, place, logp in rows if rank > NEVER]

    def step(self, ends: list[Extension], growing: list[Extension]) -> list[Extension]:
        """Take these in: answers, and rows that are one token longer."""
        if not ends and not growing:
            self.done = True
            return []
        for way in ends:
            tokens = self.live[way.row][0]
            self.whole.append(SearchResult(tokens, way.logp, self.score(way.logp, len(tokens) + 1), True))
        self.whole = sorted(self.whole, key=lambda found: -found.score)[: self.width]
        self.live = [([*self.live[way.row][0], way.token], way.logp) for way in growing]
        self.done = not growing or len(self.live[0][0]) >= self.limit or self.stopped()
        return growing

    def stopped(self) -> bool:
        scores = [found.score for found in self.whole] + [NEVER] * (self.width - len(self.whole))
        hope_1 = torch.tensor([max(logp for _, logp in self.live)]) / self.norm_T[self.limit]
        return bool(self.stop(torch.tensor([scores]), hope_1, self.nbest))

    def score(self, logp: float, length: int) -> float:
        return float(torch.tensor(logp) / self.norm_T[length])

    def answers(self) -> list[SearchResult]:
        """Whole ones by score, then, if those are too few, cut ones."""
        if self.limit == 0:
            return []
        cut = [SearchResult(tokens, logp, self.score(logp, len(tokens)), False) for tokens, logp in self.live]
        return (self.whole + cut)[: self.nbest]


def search_reference(request: Request[Any]) -> list[list[SearchResult]]:
    """Beam search, written to be read."""
    settings = request.settings
    sentences = [
        SentenceBeam(request, row, width=settings.beam, nbest=settings.nbest) for row in range(len(request.constraints))
    ]
    return run_in_lockstep(request, sentences, settings.beam)
