"""Answers that differ: groups of beams, where a word that one group has just said costs the next ones more.

Diverse beam search (Vijayakumar 2018). The other way, drawing without replacement (Kool 2019), needs a temperature to
give good answers, and its best one is not the one that beam search would find. Here the first group is a beam search
like any other, nothing is drawn, and the answers after the first are looked for where the others did not look.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dragoman.decoding.lockstep import Extension, SentenceBeam, pad_extensions, run_in_lockstep
from dragoman.decoding.protocol import SearchResult
from dragoman.decoding.request import Request


class DiverseBeam:
    """The search of one sentence by several searches, each with the same number of rows."""

    def __init__(self, request: Request[Any], row: int) -> None:
        settings = request.settings
        self.each = settings.beam // settings.groups
        self.cost, self.nbest = settings.diversity, settings.nbest
        self.groups = [SentenceBeam(request, row, width=self.each, nbest=self.each) for _ in range(settings.groups)]

    @property
    def done(self) -> bool:
        return all(group.done for group in self.groups)

    def advance(self, logp_WV: Tensor) -> list[Extension]:
        cost_V = torch.zeros_like(logp_WV[0])
        ways = []
        for number, group in enumerate(self.groups):
            first, some = number * self.each, []
            if not group.done:
                total_LV = group.total(logp_WV[first:])
                some = group.follow(total_LV, total_LV - cost_V)
            for way in some:
                cost_V[way.token] += self.cost
            ways += [way._replace(row=first + way.row) for way in pad_extensions(some, self.each)]
        return ways

    def answers(self) -> list[SearchResult]:
        """The best of each group, then the second of each, and so on; of equal ones the first. Sorted at the end."""
        lists = [group.answers() for group in self.groups]
        chosen: dict[tuple[int, ...], SearchResult] = {}
        for one in (some[place] for place in range(self.each) for some in lists if place < len(some)):
            chosen.setdefault(tuple(one.tokens), one)
        return sorted(list(chosen.values())[: self.nbest], key=lambda one: (not one.finished, -one.score))


def search_diverse(request: Request[Any]) -> list[list[SearchResult]]:
    """Answers that differ, from a beam in groups."""
    searches = [DiverseBeam(request, row) for row in range(len(request.constraints))]
    return run_in_lockstep(request, searches, request.settings.beam)
