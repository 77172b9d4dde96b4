"""Slots on a GPU: one step, model and search together, is captured once and played again and again.

A step of a few hundred small kernels takes longer to ask for than to compute. A captured graph is asked for with one
call, but it reads and writes the same memory every time: so everything here is written in place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dragoman.search.beam import Beams, Live, Plan, Whole, advance, begin, harvest
from dragoman.search.slots import Slots, chosen
from dragoman.search.step import Found
from dragoman.types import BOS

WARM = 3  # steps before the capture, in which libraries make up their minds


class CapturedSlots(Slots[Any]):
    """A fixed number of slots, all of them free at first."""

    def __init__(self, model: Any, plan: Plan, longest: int, fresh: Any, slots: int) -> None:
        """`fresh` is the state of as many empty sources as there are slots."""
        super().__init__(model, plan, longest)
        self.open(fresh, torch.zeros(slots, dtype=torch.long, device=plan.penalty_T.device))
        self.taken_B = [True] * slots
        self.penalty_T = plan.penalty_T.cpu()
        live, whole, limit_B, done_B = self.beams
        own = Live(*(each.clone() for each in live)), Whole(*(each.clone() for each in whole))  # each its own memory
        self.beams = Beams(*own, limit_B, done_B)
        assert self.state
        self.state = self.state.indexed(longest + 1)
        self.graph = torch.cuda.CUDAGraph()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM):
                self.in_place()
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(self.graph):
            self.in_place()

    def in_place(self) -> None:
        """A step whose results lie where those of the step before lay."""
        logp_NV, state = self.model.step(self.token_N, self.state)
        beams, rows_N, token_N = advance(self.beams, logp_NV, self.plan)
        state = state.select(rows_N).rest(beams.done_B)
        assert self.state
        held = [
            *self.beams.live,
            *self.beams.whole,
            self.beams.done_B,
            self.token_N,
            self.state.at_B,
            self.state.who_NK,
        ]
        new = [*beams.live, *beams.whole, beams.done_B, token_N, state.at_B, state.who_NK]
        for old, now in zip(held, new, strict=True):
            old.copy_(now)

    def step(self) -> None:
        self.graph.replay()

    def take(self, slots: list[int]) -> list[list[Found]]:
        """The answers in these slots, in one go: every word from the GPU is waited for."""
        for slot in slots:
            self.taken_B[slot] = True
        picked = chosen(self.beams, self.places(slots))
        parts = [*picked.live, *picked.whole]
        whole = torch.cat(
            [part.double().flatten(1) if part.dim() > 1 else part.double()[:, None] for part in parts], 1
        ).cpu()
        sizes = [part[0].numel() for part in parts]
        here = [
            each.view(part.shape).to(part.dtype) for each, part in zip(torch.split(whole, sizes, 1), parts, strict=True)
        ]
        beams = Beams(Live(*here[:3]), Whole(*here[3:]), picked.limit_B, picked.done_B)
        return harvest(beams, replace(self.plan, penalty_T=self.penalty_T))

    def fill(self, slots: list[int], fresh: Any, limit_K: Tensor) -> None:
        assert self.state
        place_K = self.places(slots)
        after = self.state.put(place_K, self.widened(fresh, len(slots)).indexed(0))
        self.state.at_B.copy_(after.at_B)
        new = begin(limit_K, self.plan.width, self.longest)
        pairs = zip((*self.beams.live, *self.beams.whole), (*new.live, *new.whole), strict=True)
        for old, now in (*pairs, (self.beams.limit_B, new.limit_B), (self.beams.done_B, new.done_B)):
            old.index_copy_(0, place_K, now)
        self.token_N.view(len(self.taken_B), -1)[place_K] = BOS
        for slot in slots:
            self.taken_B[slot] = False
