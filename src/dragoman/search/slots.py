"""Beam search that never waits for its slowest sentence: one that is done leaves its slot, and one that waits takes it.

Shapes   B slots   K sentences that come or go   W beams   N = B * W rows of the model   S source width

The steps are those of beam.py, so answers are the same; what differs is who stands beside whom, and when.
"""

from __future__ import annotations

from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from dragoman.search.beam import Beams, Live, Plan, Whole, advance, begin, harvest
from dragoman.search.step import Found, State, StepModel
from dragoman.types import BOS


class Flowing(State, Protocol):
    """A state whose sentences may come and go. Each has as many rows as every other."""

    def keep(self, sentences_K: Tensor) -> Self:
        """Only these sentences, in this order."""
        ...

    def put(self, sentences_K: Tensor, fresh: Self) -> Self:
        """The sentences of a fresh state in the places of these. The state that it is asked of is used up."""
        ...

    def rest(self, done_B: Tensor) -> Self:
        """Sentences that are done wait to be replaced, and need no room for more tokens."""
        ...


F = TypeVar("F", bound=Flowing)


class Slots(Generic[F]):
    """Sentences that are being answered side by side. `longest` is the most tokens that an answer may have in any."""

    def __init__(self, model: StepModel[F], plan: Plan, longest: int) -> None:
        self.model, self.plan, self.longest = model, plan, longest
        self.state: F | None = None
        self.taken_B: list[bool] = []  # slots whose sentence is done and gone

    def open(self, fresh: F, limit_K: Tensor) -> None:
        """As many slots as there are sentences in a fresh state, which has one row for each."""
        self.beams = begin(limit_K, self.plan.width, self.longest)
        self.state = self.widened(fresh, len(limit_K))
        self.token_N = torch.full((len(limit_K) * self.plan.width,), BOS, device=limit_K.device)
        self.taken_B = (limit_K == 0).tolist()  # where nothing is asked, nothing is given

    def widened(self, fresh: F, sentences: int) -> F:
        return fresh.select(
            torch.arange(sentences, device=self.plan.penalty_T.device).repeat_interleave(self.plan.width)
        )

    def step(self) -> None:
        assert self.state
        logp_NV, state = self.model.step(self.token_N, self.state)
        self.beams, rows_N, self.token_N = advance(self.beams, logp_NV, self.plan)
        self.state = state.select(rows_N).rest(self.beams.done_B)

    def over(self) -> list[int]:
        """Slots whose sentence is done, and has not been taken."""
        done = self.beams.done_B.tolist()
        return [slot for slot, (over, taken) in enumerate(zip(done, self.taken_B, strict=True)) if over and not taken]

    def take(self, slots: list[int]) -> list[list[Found]]:
        """The answers in these slots, which are free from now on."""
        for slot in slots:
            self.taken_B[slot] = True
        return harvest(chosen(self.beams, self.places(slots)), self.plan)

    @property
    def free(self) -> list[int]:
        return [slot for slot, taken in enumerate(self.taken_B) if taken]

    def fill(self, slots: list[int], fresh: F, limit_K: Tensor) -> None:
        """New sentences in free slots."""
        assert self.state
        place_K = self.places(slots)
        self.state = self.state.put(place_K, self.widened(fresh, len(slots)))
        new = begin(limit_K, self.plan.width, self.longest)
        self.beams = placed(self.beams, place_K, new)
        self.token_N.view(len(self.taken_B), -1)[place_K] = BOS
        for slot in slots:
            self.taken_B[slot] = False

    def shrink(self) -> None:
        """Without the slots that are free."""
        assert self.state
        place_K = self.places([slot for slot, taken in enumerate(self.taken_B) if not taken])
        self.state, self.beams = self.state.keep(place_K), chosen(self.beams, place_K)
        self.token_N = self.token_N.view(len(self.taken_B), -1)[place_K].flatten()
        self.taken_B = [False] * len(place_K)

    def places(self, slots: list[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.long, device=self.plan.penalty_T.device)


def chosen(beams: Beams, place_K: Tensor) -> Beams:
    """The searches at these places."""

    def pick(each: Tensor) -> Tensor:
        return each.index_select(0, place_K)

    return Beams(Live(*map(pick, beams.live)), Whole(*map(pick, beams.whole)), pick(beams.limit_B), pick(beams.done_B))


def placed(beams: Beams, place_K: Tensor, new: Beams) -> Beams:
    """New searches in these places."""

    def put(old: Tensor, fresh: Tensor) -> Tensor:
        return old.index_copy(0, place_K, fresh)

    return Beams(
        Live(*map(put, beams.live, new.live)),
        Whole(*map(put, beams.whole, new.whole)),
        put(beams.limit_B, new.limit_B),
        put(beams.done_B, new.done_B),
    )
