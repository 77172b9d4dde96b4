"""Beam search in which terms must appear: rows are kept apart by how much of the terms they have said.

Left to itself, a beam drops the rows that say an unlikely word, long before they could profit from it. So the rows are
shared out over banks, one for each number of tokens that the terms still need, and each bank keeps its best (Post and
Vilar 2018). Every row also tries the likeliest token that brings a term nearer, for each of its terms. A row may not
end before all terms are there. How a term is spelt in tokens is left to the model, and a row that begins a term and
turns away from it falls back to a lower bank by itself: the machines of terms.py say where each row stands.

Shapes   L rows that live   K terms   V vocabulary   W rows of a sentence
"""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from dragoman.decoding.lockstep import Extension, SentenceBeam, run_in_lockstep
from dragoman.decoding.protocol import NEVER, SearchResult
from dragoman.decoding.request import DecodingConstraints, Request, Term
from dragoman.types import EOS

MAX_WIDTH = 64  # rows of a sentence


class ConstrainedBeam(SentenceBeam):
    """The search of one sentence. Terms that the vocabulary cannot spell are left out: no search can meet them."""

    def __init__(self, request: Request[Any], row: int, *, width: int) -> None:
        super().__init__(request, row, width=width, nbest=min(request.settings.nbest, width))
        terms = spellable_terms(request.constraints[row])
        self.next = [torch.tensor(term.next_SV, device=request.device) for term in terms]
        self.left = [torch.tensor(term.left_S, device=request.device) for term in terms]
        self.ends = [torch.tensor(term.ends_S, device=request.device) for term in terms]
        self.states: list[list[int]] = [[0] * len(terms)]  # of each row that lives: where its terms stand

    def advance(self, logp_WV: Tensor) -> list[Extension]:
        total_LV = self.total(logp_WV)
        state_KL = torch.tensor(self.states, device=total_LV.device).T
        left_KLV = torch.stack(
            [left[table[state_L].int()] for left, table, state_L in zip(self.left, self.next, state_KL)]
        )
        may_end_L = torch.stack([ends[state_L] for ends, state_L in zip(self.ends, state_KL)]).all(0)
        total_LV[:, EOS] = torch.where(may_end_L, total_LV[:, EOS], NEVER)
        left_LV = left_KLV.sum(0)
        left_LV[:, EOS] = 0  # whoever may end has said them all
        banks = defaultdict(list)
        for way in self.tried(total_LV, left_KLV < left_KLV[:, :, EOS, None]):  # an end mark leaves a term as it is
            banks[int(left_LV[way.row, way.token])].append(way)
        ends = [way for way in banks[0][: self.width] if way.token == EOS]
        grown = [[way for way in banks[left] if way.token != EOS] for left in sorted(banks)]
        growing = [way for turn in zip_longest(*grown) for way in turn if way][: self.width]
        states = [[int(t[self.states[w.row][k], w.token]) for k, t in enumerate(self.next)] for w in growing]
        ways = self.step(ends, growing)
        self.states = states or self.states
        return ways

    def tried(self, total_LV: Tensor, nearer_KLV: Tensor) -> list[Extension]:
        """The best ways of all rows, the best of each row, and the best of each row that brings a term nearer."""
        apart_KLV = torch.where(nearer_KLV, total_LV, NEVER)
        logp, token = torch.cat([total_LV[None], apart_KLV]).max(-1)
        each = [
            Extension(row, *one)
            for logps, tokens in zip(logp.tolist(), token.tolist())
            for row, one in enumerate(zip(tokens, logps))
        ]
        every = {way[:2]: way for way in each + self.ranked(total_LV, total_LV, 2 * self.width) if way.logp > NEVER}
        return sorted(every.values(), key=lambda way: (-way.logp, way.row, way.token))

    def answers(self) -> list[SearchResult]:
        """Those that have all terms; none, where the search has not come so far. The rows that live are in the order
        of their banks."""
        met = [all(bool(ends[state]) for ends, state in zip(self.ends, states)) for states in self.states]
        self.live = [row for row, all_met in zip(self.live, met) if all_met]
        return super().answers()


def spellable_terms(wish: DecodingConstraints) -> list[Term]:
    return [term for term in wish.must if term.possible]


def count_needed_tokens(wish: DecodingConstraints) -> int:
    """Tokens that the terms of a wish take at least."""
    return sum(int(term.left_S[0]) for term in spellable_terms(wish))


def choose_width(wish: DecodingConstraints, beam: int) -> int:
    """Rows for a sentence: by its own wish alone, so that its neighbours do not matter. A bank has some beams."""
    width = max(beam, 8)
    while width < min(beam + count_needed_tokens(wish), MAX_WIDTH):
        width *= 2
    return width


def search_constrained(request: Request[Any]) -> list[list[SearchResult]]:
    """Answers with all their terms, for sentences whose wish names some; the others, and those for which none was
    found, have no answers here."""
    found: list[list[SearchResult]] = [[] for _ in request.constraints]
    widths = [choose_width(wish, request.settings.beam) if spellable_terms(wish) else 0 for wish in request.constraints]
    for width in sorted(set(widths) - {0}):
        some = request.only([each == width for each in widths])
        rows = [ConstrainedBeam(some, row, width=width) if each == width else Idle() for row, each in enumerate(widths)]
        for row, answers in enumerate(run_in_lockstep(some, rows, width)):
            found[row] = found[row] or answers
    return found


class Idle:
    """The search of a sentence that is not searched."""

    done = True

    def advance(self, logp_WV: Tensor) -> list[Extension]:  # noqa: ARG002 - the protocol's shape
        return []

    def answers(self) -> list[SearchResult]:
        return []
