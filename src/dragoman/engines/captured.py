"""Slots on a GPU: one step, model and search together, is captured once and played again and again.

A step of a few hundred small kernels takes longer to ask for than to compute. A captured graph is asked for with one
call, but it reads and writes the same memory every time: so everything here is written in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dragoman.search.beam import Beams, Live, Plan, Whole, advance, begin
from dragoman.search.slots import Slots
from dragoman.types import BOS

WARM = 3  # steps before the capture, in which libraries make up their minds


class CapturedSlots(Slots[Any]):
    """A fixed number of slots, all of them free at first."""

    def __init__(self, model: Any, plan: Plan, longest: int, fresh: Any, slots: int) -> None:
        """`fresh` is the state of as many empty sources as there are slots."""
        super().__init__(model, plan, longest)
        self.open(fresh, torch.zeros(slots, dtype=torch.long, device=plan.penalty_T.device))
        self.taken_B = [True] * slots
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
