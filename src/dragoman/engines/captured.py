"""Slots on a GPU: one step, model and search together, is captured once and played again and again.

A step of a few hundred small kernels takes longer to ask for than to compute. A captured graph is asked for with one
call, but it reads and writes the same memory every time: so everything here is written in place.

Shapes   B slots   K sentences that come or go   W beams   N = B * W rows of the model
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dragoman.search.beam import Beams, Live, Plan, Whole, advance, harvest
from dragoman.search.slots import Slots, chosen
from dragoman.search.step import NEVER, Found
from dragoman.types import BOS

WARM = 3  # steps before the capture, in which libraries make up their minds


class FixedSlots(Slots[Any]):
    """A fixed number of slots that are written in place, all of them free at first."""

    def __init__(self, model: Any, plan: Plan, longest: int, fresh: Any, slots: int) -> None:
        """`fresh` is the state of as many empty sources as there are slots."""
        super().__init__(model, plan, longest)
        self.open(fresh, torch.zeros(slots, dtype=torch.long, device=plan.penalty_T.device))
        self.taken_B = [True] * slots
        live, whole, limit_B, done_B = self.beams
        own = Live(*(each.clone() for each in live)), Whole(*(each.clone() for each in whole))  # each its own memory
        self.beams = Beams(*own, limit_B, done_B)
        assert self.state
        self.state: Any = self.state.indexed(longest + 1)
        self.plan_here = replace(plan, penalty_T=plan.penalty_T.cpu())

    def step(self) -> None:
        """A step whose results lie where those of the step before lay."""
        logp_NV, state = self.model.step(self.token_N, self.state)
        beams, rows_N, token_N = advance(self.beams, logp_NV, self.plan)
        state = state.select(rows_N).rest(beams.done_B)
        own = (self.beams.done_B, self.token_N, self.state.at_B, self.state.who_NK)
        new = (beams.done_B, token_N, state.at_B, state.who_NK)
        held = (*self.beams.live, *self.beams.whole, *own)
        for old, now in zip(held, (*beams.live, *beams.whole, *new), strict=True):
            old.copy_(now)

    def fetch(self, slots: list[int]) -> Callable[[], list[list[Found]]]:
        """The answers in these slots, which are free from now on: on their way, to be waited for by whoever calls."""
        for slot in slots:
            self.taken_B[slot] = True
        picked = chosen(self.beams, self.places(slots))
        parts = [*picked.live, *picked.whole]
        flat = torch.cat([part.double().reshape(len(slots), -1) for part in parts], 1)  # all in one, and no word lost
        here = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
        here.copy_(flat, non_blocking=True)
        sent = torch.cuda.current_stream().record_event() if flat.is_cuda else None

        def arrived() -> list[list[Found]]:
            if sent:
                sent.synchronize()
            each = torch.split(here, [part[0].numel() for part in parts], 1)
            made = [one.reshape(part.shape).to(part.dtype) for one, part in zip(each, parts, strict=True)]
            return harvest(Beams(Live(*made[:3]), Whole(*made[3:]), picked.limit_B, picked.done_B), self.plan_here)

        return arrived

    def fill(self, slots: list[int], fresh: Any, limit_K: Tensor) -> None:
        """New sentences, of which `fresh` has one row each, in free slots. Tokens of before are not looked at again."""
        place_K = self.places(slots)
        self.state.at_B.copy_(self.state.put(place_K, fresh).at_B)
        live, whole, limit_B, done_B = self.beams
        for held, value in ((live.logp_BW, NEVER), (live.logp_BW[:, 0], 0), (live.length_B, 0), (done_B, False)):
            held.index_fill_(0, place_K, value)
        whole.score_BW.index_fill_(0, place_K, NEVER)
        limit_B.index_copy_(0, place_K, limit_K)
        self.token_N.view(len(self.taken_B), -1).index_fill_(0, place_K, BOS)
        for slot in slots:
            self.taken_B[slot] = False


class CapturedSlots(FixedSlots):
    """The same, the step being captured."""

    def __init__(self, model: Any, plan: Plan, longest: int, fresh: Any, slots: int) -> None:
        super().__init__(model, plan, longest, fresh, slots)
        self.graph = torch.cuda.CUDAGraph()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM):
                super().step()
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(self.graph):
            super().step()

    def step(self) -> None:
        self.graph.replay()
