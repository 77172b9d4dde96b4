"""Beam search of one sentence in plain Python, and the methods that choose differently among its candidates.

`SentenceBeam` is the readable reference implementation of beam.py, which searches for many sentences at once. The rarer
methods build on it and change only which candidates survive a step:

    DiverseBeam      groups of beams; a token that one group has just used costs the later groups more
    ConstrainedBeam  beams are kept apart by how many tokens of the required terms are still missing

Shapes   B sentences   W beams of a sentence   N = B * W rows of the model   V vocabulary   T tokens so far
         L active beams   K terms
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dragoman.config.settings import pick
from dragoman.decoding.beam import LENGTH_NORMS, STOP_RULES, stable_topk
from dragoman.decoding.protocol import NEVER, Prefix, SearchResult, apply_rules, sanitize_logp
from dragoman.decoding.request import DecodingConstraints, Request
from dragoman.decoding.rules import make_rules
from dragoman.types import BOS, EOS

MAX_WIDTH = 64  # beams of a sentence in constrained search


class Extension(NamedTuple):
    """A candidate: the beam that it extends, the token that it adds, and the log-probability of all its tokens."""

    row: int
    token: int
    logp: float


class SentenceSearch(Protocol):
    """The search of one sentence."""

    @property
    def done(self) -> bool: ...

    def advance(self, logp_WV: Tensor) -> list[Extension]:
        """Take the log-probabilities of the next token of each beam, and return up to W extensions that stay active."""
        ...

    def results(self) -> list[SearchResult]: ...


@torch.inference_mode()
def run_in_lockstep(request: Request[Any], searches: Sequence[SentenceSearch], width: int) -> list[list[SearchResult]]:
    """Run all searches, one token at a time, until each is done. Shapes stay the same when some are done earlier."""
    B, W, device = len(searches), width, request.device
    rules = make_rules(request)
    state = request.model.start(request.source_BS, request.keep_BS)
    state = state.select(torch.arange(B, device=device).repeat_interleave(W))
    token_N = torch.full((B * W,), BOS, device=device)
    prefix_NT = torch.zeros(B * W, 0, dtype=torch.long, device=device)
    while not all(search.done for search in searches):
        logp_NV, state = request.model.step(token_N, state)
        length_N = torch.full((B * W,), prefix_NT.size(1), device=device)
        logp_NV = apply_rules(sanitize_logp(logp_NV), Prefix(prefix_NT, length_N), rules)
        extensions = [
            pad_extensions([] if search.done else search.advance(logp_WV), W)
            for search, logp_WV in zip(searches, logp_NV.view(B, W, -1), strict=True)
        ]
        rows_N = torch.tensor([b * W + one.row for b, some in enumerate(extensions) for one in some], device=device)
        token_N = torch.tensor([one.token for some in extensions for one in some], device=device)
        prefix_NT = torch.cat([prefix_NT[rows_N], token_N[:, None]], 1)
        state = state.select(rows_N)
    return [search.results() for search in searches]


def pad_extensions(extensions: list[Extension], width: int) -> list[Extension]:
    """Add dummies for the rows that have nothing to extend."""
    return extensions + [Extension(0, EOS, NEVER)] * (width - len(extensions))


class SentenceBeam:
    """Beam search of one sentence.

    `active` holds the tokens and the log-probability of each active beam, best first; `finished` the results that
    reached EOS, best first. Sums are float32, as in beam.py.
    """

    def __init__(self, request: Request[Any], row: int, *, width: int, nbest: int) -> None:
        self.limit, self.width, self.nbest = int(request.limit_B[row]), width, nbest
        settings = request.settings
        self.norm_T = pick(LENGTH_NORMS, settings.length_norm, "length norm")(self.limit, settings.length_penalty)
        self.should_stop = pick(STOP_RULES, settings.stop, "stop rule")
        self.active: list[tuple[list[int], float]] = [([], 0.0)]
        self.finished: list[SearchResult] = []
        self.done = self.limit == 0

    def advance(self, logp_WV: Tensor) -> list[Extension]:
        """Extend the likeliest candidates."""
        total_LV = self.add_logp(logp_WV)
        return self.advance_by_rank(total_LV, total_LV)

    def advance_by_rank(self, total_LV: Tensor, rank_LV: Tensor) -> list[Extension]:
        """Extend the candidates of the highest rank, which need not be the likeliest. Scores ignore the rank."""
        best = self.find_candidates(total_LV, rank_LV, 2 * self.width)
        ends = [one for one in best[: self.width] if one.token == EOS]
        return self.extend(ends, [one for one in best if one.token != EOS][: self.width])

    def add_logp(self, logp_WV: Tensor) -> Tensor:
        """Return the log-probability of every continuation of the active beams."""
        active_L = torch.tensor([logp for _, logp in self.active], device=logp_WV.device)
        return active_L[:, None] + logp_WV[: len(self.active)]

    @staticmethod
    def find_candidates(total_LV: Tensor, rank_LV: Tensor, count: int) -> list[Extension]:
        """Return the candidates of the highest rank, best first; ties go to the better beam, then the lower token."""
        V = total_LV.size(1)
        rank_1K, index_1K = stable_topk(rank_LV.reshape(1, -1), count)
        logps = total_LV.flatten()[index_1K[0]].tolist()
        rows = zip(rank_1K[0].tolist(), index_1K[0].tolist(), logps, strict=True)
        return [Extension(index // V, index % V, logp) for rank, index, logp in rows if rank > NEVER]

    def extend(self, ends: list[Extension], growing: list[Extension]) -> list[Extension]:
        """Add the finished results, replace the active beams by the growing ones, and decide whether to stop."""
        if not ends and not growing:
            self.done = True
            return []
        for one in ends:
            tokens = self.active[one.row][0]
            self.finished.append(SearchResult(tokens, one.logp, self.score(one.logp, len(tokens) + 1), True))
        self.finished = sorted(self.finished, key=lambda result: -result.score)[: self.width]
        self.active = [([*self.active[one.row][0], one.token], one.logp) for one in growing]
        self.done = not growing or len(self.active[0][0]) >= self.limit
        if not self.done:
            scores = [result.score for result in self.finished] + [NEVER] * (self.width - len(self.finished))
            hope_1 = torch.tensor([max(logp for _, logp in self.active)]) / self.norm_T[self.limit]
            self.done = bool(self.should_stop(torch.tensor([scores]), hope_1, self.nbest))
        return growing

    def score(self, logp: float, length: int) -> float:
        return float(torch.tensor(logp) / self.norm_T[length])

    def results(self) -> list[SearchResult]:
        """Return finished results by score, then, if they are too few, unfinished ones."""
        if self.limit == 0:
            return []
        cut = [SearchResult(tokens, logp, self.score(logp, len(tokens)), False) for tokens, logp in self.active]
        return (self.finished + cut)[: self.nbest]


def search_reference(request: Request[Any]) -> list[list[SearchResult]]:
    """Run the readable beam search."""
    beam, nbest = request.settings.beam, request.settings.nbest
    searches = [SentenceBeam(request, row, width=beam, nbest=nbest) for row in range(len(request.constraints))]
    return run_in_lockstep(request, searches, beam)


class DiverseBeam:
    """Diverse beam search (Vijayakumar 2018): several groups, each a beam search of the same width.

    The alternative, sampling without replacement (Kool 2019), needs a temperature to give good results, and its best
    one is not the one that beam search finds. Here the first group is a plain beam search and nothing is random.
    """

    def __init__(self, request: Request[Any], row: int) -> None:
        settings = request.settings
        self.width = settings.beam // settings.groups
        self.penalty, self.nbest = settings.diversity, settings.nbest
        self.groups = [SentenceBeam(request, row, width=self.width, nbest=self.width) for _ in range(settings.groups)]

    @property
    def done(self) -> bool:
        return all(group.done for group in self.groups)

    def advance(self, logp_WV: Tensor) -> list[Extension]:
        """Advance the groups in order; a token costs more each time an earlier group has chosen it in this step."""
        cost_V = torch.zeros_like(logp_WV[0])
        extensions = []
        for number, group in enumerate(self.groups):
            first, some = number * self.width, []
            if not group.done:
                total_LV = group.add_logp(logp_WV[first:])
                some = group.advance_by_rank(total_LV, total_LV - cost_V)
            for one in some:
                cost_V[one.token] += self.penalty
            extensions += [one._replace(row=first + one.row) for one in pad_extensions(some, self.width)]
        return extensions

    def results(self) -> list[SearchResult]:
        """Take the best of each group, then the second of each, and so on without repeats; sort what was taken."""
        lists = [group.results() for group in self.groups]
        chosen: dict[tuple[int, ...], SearchResult] = {}
        for one in (some[rank] for rank in range(self.width) for some in lists if rank < len(some)):
            chosen.setdefault(tuple(one.tokens), one)
        return sorted(list(chosen.values())[: self.nbest], key=lambda one: (not one.finished, -one.score))


def search_diverse(request: Request[Any]) -> list[list[SearchResult]]:
    """Run diverse beam search."""
    searches = [DiverseBeam(request, row) for row in range(len(request.constraints))]
    return run_in_lockstep(request, searches, request.settings.beam)


class ConstrainedBeam(SentenceBeam):
    """Beam search in which terms must appear. Terms that the vocabulary cannot spell are left out.

    A plain beam drops a prefix with an unlikely term long before the term pays off. So the beams are shared among
    banks, one for each number of tokens that the terms still need, and each bank keeps its best (Post and Vilar 2018).
    Every beam also tries the likeliest token that brings each of its terms nearer, and cannot end before all terms are
    there. The model chooses how to spell a term; a beam that starts a term and turns away from it falls back to a
    lower bank, because the automata of its terms say how far each term has come.
    """

    def __init__(self, request: Request[Any], row: int, *, width: int) -> None:
        super().__init__(request, row, width=width, nbest=min(request.settings.nbest, width))
        terms = request.constraints[row].spellable
        self.next = [torch.tensor(term.next_SV, device=request.device) for term in terms]
        self.left = [torch.tensor(term.left_S, device=request.device) for term in terms]
        self.ends = [torch.tensor(term.ends_S, device=request.device) for term in terms]
        self.states: list[list[int]] = [[0] * len(terms)]  # automaton states of each active beam

    def advance(self, logp_WV: Tensor) -> list[Extension]:
        """Extend the best candidates of every bank."""
        total_LV = self.add_logp(logp_WV)
        state_KL = torch.tensor(self.states, device=total_LV.device).T
        left_KLV = torch.stack(
            [left[table[state_L].int()] for left, table, state_L in zip(self.left, self.next, state_KL, strict=True)]
        )
        may_end_L = torch.stack([ends[state_L] for ends, state_L in zip(self.ends, state_KL, strict=True)]).all(0)
        total_LV[:, EOS] = torch.where(may_end_L, total_LV[:, EOS], NEVER)
        left_LV = left_KLV.sum(0)
        left_LV[:, EOS] = 0  # a beam that may end has all terms
        banks = defaultdict(list)
        for one in self.try_terms(total_LV, left_KLV < left_KLV[:, :, EOS, None]):  # EOS leaves a term's state as it is
            banks[int(left_LV[one.row, one.token])].append(one)
        ends = [one for one in banks[0][: self.width] if one.token == EOS]
        by_bank = [[one for one in banks[left] if one.token != EOS] for left in sorted(banks)]
        growing = [one for rank in zip_longest(*by_bank) for one in rank if one][: self.width]
        states = [[int(t[self.states[e.row][k], e.token]) for k, t in enumerate(self.next)] for e in growing]
        extensions = self.extend(ends, growing)
        self.states = states or self.states
        return extensions

    def try_terms(self, total_LV: Tensor, nearer_KLV: Tensor) -> list[Extension]:
        """Return the best candidates of all beams, the best of each, and each beam's best that brings a term nearer."""
        apart_KLV = torch.where(nearer_KLV, total_LV, NEVER)
        logp, token = torch.cat([total_LV[None], apart_KLV]).max(-1)
        each = [
            Extension(row, *one)
            for logps, tokens in zip(logp.tolist(), token.tolist(), strict=True)
            for row, one in enumerate(zip(tokens, logps, strict=True))
        ]
        best = each + self.find_candidates(total_LV, total_LV, 2 * self.width)
        unique = {one[:2]: one for one in best if one.logp > NEVER}
        return sorted(unique.values(), key=lambda one: (-one.logp, one.row, one.token))

    def results(self) -> list[SearchResult]:
        """Return those that have all terms, or none if the search has not come so far."""
        met = [all(bool(ends[s]) for ends, s in zip(self.ends, states, strict=True)) for states in self.states]
        self.active = [beam for beam, all_met in zip(self.active, met, strict=False) if all_met]
        return super().results()


def choose_width(constraints: DecodingConstraints, beam: int) -> int:
    """Return the beams of a sentence, with some for each bank. They depend on its own constraints, not on the batch."""
    width = max(beam, 8)
    while width < min(beam + constraints.needed_tokens, MAX_WIDTH):
        width *= 2
    return width


def search_constrained(request: Request[Any]) -> list[list[SearchResult]]:
    """Return results with all required terms; an empty list where no term is required or none was found."""
    results: list[list[SearchResult]] = [[] for _ in request.constraints]
    widths = [choose_width(c, request.settings.beam) if c.spellable else 0 for c in request.constraints]
    for width in sorted(set(widths) - {0}):
        some = request.only([each == width for each in widths])
        searches = [
            ConstrainedBeam(some, row, width=width) if each == width else IdleSearch()
            for row, each in enumerate(widths)
        ]
        for row, found in enumerate(run_in_lockstep(some, searches, width)):
            results[row] = results[row] or found
    return results


class IdleSearch:
    """The search of a sentence that takes part in the batch only to keep its shape."""

    done = True

    def advance(self, logp_WV: Tensor) -> list[Extension]:  # noqa: ARG002 - the protocol's shape
        return []

    def results(self) -> list[SearchResult]:
        return []
