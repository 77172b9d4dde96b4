"""Exhaustive search of one sentence: find the hypotheses with the highest scores of all, by branch and bound.

A prefix is expanded, that is, extended by every token, unless no continuation of it can beat the worst of the results
found so far. Log-probabilities are at most 0, so the score of a continuation is at most the prefix's log-probability,
normalized for the maximum length. When no prefix is left to expand, the results are proven to be the best.

The caches of a model hold prefixes of the same length only. So the search proceeds in rounds: a round starts from the
empty prefix, reads the most probable waiting prefixes, one per row, and expands them. Rows that are free at a step take
the best continuations of that step, as in beam search; all others wait for a later round. Each round is a search of its
own for the schedulers (continuous_batching.py).

Shapes   W rows of a sentence   V vocabulary   L rows that are expanded   K continuations of a prefix
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop
from itertools import count
from typing import NamedTuple

import numpy as np
from torch import Tensor, tensor

from dragoman.decoding.beam import LENGTH_NORMS, stable_topk
from dragoman.decoding.protocol import NEG_INF, BaseSearchSettings, SearchJob, SearchResult
from dragoman.decoding.sentence_beam import Extension
from dragoman.types import EOS

EXHAUSTIVE_ROWS = 32  # prefixes of a sentence that the model reads at the same time
MIN_LISTED = 16  # continuations of a prefix that are listed at a time; a vocabulary is too large to store them all
NOT_PROVEN = "not proven to have the highest score"  # how the warning about an inexact result begins


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A prefix: its last token, and the prefix before it."""

    parent: PrefixNode | None  # None for the empty prefix
    token: int
    logp: float
    length: int

    def list_tokens(self) -> list[int]:
        tokens, node = [], self
        while node.parent:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]


class WaitingPrefix(NamedTuple):
    """A prefix that must be expanded. The one with the most probable continuation comes first."""

    cost: float  # minus the log-probability of the best continuation that is not listed yet, or an upper bound of it
    order: int  # among equal costs, the prefix that was found first comes first
    node: PrefixNode
    listed: int  # its `listed` best continuations were listed before
    path: Sequence[int] = ()  # its tokens, if a row has to read them first


class ExhaustiveSearch:
    """Exhaustive search of one sentence. `beam_results`, of a beam search, are the results to beat at first.

    If `max_expansions` prefixes have been expanded and others are still waiting, the search stops. Its results then
    carry a warning, because there may be better ones.
    """

    def __init__(
        self, job: SearchJob, settings: BaseSearchSettings, max_expansions: int, beam_results: Sequence[SearchResult]
    ) -> None:
        self.max_tokens, self.nbest, self.max_expansions = job.max_tokens, settings.nbest, max_expansions
        self.norm_T = LENGTH_NORMS[settings.length_norm](job.max_tokens, settings.length_penalty).numpy()
        self.max_norm = float(self.norm_T[-1])
        self.numbers, self.expansions = count(), 0
        self.fallback = [result for result in beam_results if not result.finished]
        self.finished = [result for result in beam_results if result.finished]  # best first, at most `nbest`
        self.unfinished: list[SearchResult] = []  # those that have reached the maximum length
        root = WaitingPrefix(0.0, next(self.numbers), PrefixNode(None, EOS, 0.0, 0), 0)
        self.waiting = [root] if job.max_tokens else []  # a heap between rounds

    def start_round(self) -> ExhaustiveSearch:
        """Let the rows read the best waiting prefixes; return this search."""
        self.depth, self.rows = 0, list[WaitingPrefix]()
        while self.is_pending and len(self.rows) < EXHAUSTIVE_ROWS:
            prefix = heappop(self.waiting)
            self.rows.append(prefix._replace(path=prefix.node.list_tokens()))
        self.done = not self.rows
        return self

    @property
    def is_proven(self) -> bool:
        """Whether no other hypothesis can be better than the results."""
        return not self.waiting or not self.can_improve(-self.waiting[0].cost)

    @property
    def is_pending(self) -> bool:
        return not self.is_proven and self.expansions < self.max_expansions

    def can_improve(self, logp: float) -> bool:
        """Return whether a continuation of a prefix with this log-probability may become a result."""
        return len(self.finished) < self.nbest or logp / self.max_norm > self.finished[-1].score

    def advance(self, logp_WV: Tensor) -> list[Extension]:
        """Read or expand the prefix of every row; return the prefixes that the rows have afterwards, at most W."""
        reading = [(row, prefix) for row, prefix in enumerate(self.rows) if prefix.node.length > self.depth]
        ready = [(row, prefix) for row, prefix in enumerate(self.rows) if prefix.node.length == self.depth]
        affordable = self.max_expansions - self.expansions
        continuations = sorted(self.expand(ready[:affordable], logp_WV), key=lambda pair: pair[1])
        free = EXHAUSTIVE_ROWS - len(reading)
        kept = [*reading, *continuations[:free]]
        self.waiting += [prefix for _, prefix in [*ready[affordable:], *continuations[free:]]]
        extensions = [
            Extension(row, prefix.path[self.depth] if prefix.node.length > self.depth + 1 else prefix.node.token, 0.0)
            for row, prefix in kept
        ]
        self.depth, self.rows = self.depth + 1, [prefix for _, prefix in kept]
        self.done = not self.rows or self.expansions >= self.max_expansions
        if self.done:
            self.waiting += self.rows
            self.waiting = [prefix for prefix in self.waiting if self.can_improve(-prefix.cost)]
            heapify(self.waiting)
        return extensions

    def expand(self, ready: list[tuple[int, WaitingPrefix]], logp_WV: Tensor) -> list[tuple[int, WaitingPrefix]]:
        """Extend prefixes by all tokens, given their rows; return the continuations that must be expanded, with rows.

        Hypotheses that end here are added to the results. Of each prefix only some continuations are listed. The prefix
        itself is returned again, to wait, if others may lead to results.
        """
        self.expansions += len(ready)
        total_LV = logp_WV[[row for row, _ in ready]]
        total_LV = total_LV + tensor([prefix.node.logp for _, prefix in ready], device=logp_WV.device)[:, None]
        for (_, prefix), logp in zip(ready, total_LV[:, EOS].tolist(), strict=True):
            if not prefix.listed:
                self.add_result(prefix.node, logp, self.depth + 1, finished=True)
        total_LV[:, EOS] = NEG_INF
        size = max(MIN_LISTED, self.nbest)
        logp_LK, token_LK = stable_topk(total_LV, size + 1 + max((prefix.listed for _, prefix in ready), default=0))
        found: list[tuple[int, WaitingPrefix]] = []
        for (row, prefix), logps, tokens in zip(ready, logp_LK.tolist(), token_LK.tolist(), strict=True):
            pairs = list(zip(logps, tokens, strict=True))[prefix.listed :]
            for logp, token in pairs[:size]:
                node = PrefixNode(prefix.node, token, logp, self.depth + 1)
                if node.length == self.max_tokens and len(self.finished) < self.nbest:
                    self.add_result(node, logp, node.length, finished=False)
                elif node.length < self.max_tokens and logp > NEG_INF and self.can_improve(logp):
                    found.append((row, WaitingPrefix(-logp, next(self.numbers), node, 0)))
            rest = pairs[size][0] if len(pairs) > size else NEG_INF
            if rest > NEG_INF and self.can_improve(rest) and self.depth + 1 < self.max_tokens:
                self.waiting.append(prefix._replace(cost=-rest, listed=prefix.listed + size, path=()))
        return found

    def add_result(self, node: PrefixNode, logp: float, length: int, *, finished: bool) -> None:
        """Add a hypothesis, of a length with EOS, if it is among the best; of equal scores, the shorter is better."""
        best = self.finished if finished else self.unfinished
        score = float(np.float32(logp) / self.norm_T[length])  # float32, as in beam.py
        if logp == NEG_INF or (len(best) >= self.nbest and score < best[-1].score):
            return
        result = SearchResult(node.list_tokens(), logp, score, finished)
        if all(result.tokens != other.tokens for other in best):  # beam search may have found it
            best.append(result)
            best.sort(key=lambda other: (-other.score, len(other.tokens)))
            del best[self.nbest :]

    def results(self) -> list[SearchResult]:
        """Return the best results: finished ones by score, then, if there are fewer than `nbest`, unfinished ones."""
        results = [*self.finished, *(self.unfinished or self.fallback)][: self.nbest]
        if self.is_proven:
            return results
        warning = f"{NOT_PROVEN}: search.max_expansions={self.max_expansions} prefixes were expanded"
        return [replace(result, warning=warning) for result in results]
