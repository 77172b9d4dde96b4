"""Beam search that never waits for its slowest sentence: one that is done leaves its slot, and one that waits takes it.

Shapes   B slots   K sentences that come or go   W beams   N = B * W rows of the model   S source width

The steps are those of beam.py, so answers are the same; what differs is who stands beside whom, and when.

Slots on a GPU: one step, model and search together, is captured once and played again and again.

A step of a few hundred small kernels takes longer to ask for than to compute. A captured graph is asked for with one
call, but it reads and writes the same memory every time: so everything here is written in place.

Shapes   B slots   K sentences that come or go   W beams   N = B * W rows of the model

Jobs of any number through a few slots: long sentences first, each answered as soon as its own search is done.

Shapes   K sentences that come in
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from dragoman.data.batches import BatchPlan, Widths, collate_pairs, round_to_bucket
from dragoman.decoding.beam import (
    ActiveBeams,
    BeamPlan,
    BeamState,
    FinishedBeams,
    advance_beams,
    collect_results,
    init_beams,
)
from dragoman.decoding.protocol import NEVER, SearchResult, SearchState, StepModel
from dragoman.decoding.request import Job
from dragoman.hardware import memory_of
from dragoman.types import BOS, Batch, Example


class SlotState(SearchState, Protocol):
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


F = TypeVar("F", bound=SlotState)


class Slots(Generic[F]):
    """Sentences that are being answered side by side. `longest` is the most tokens that an answer may have in any."""

    def __init__(self, model: StepModel[F], plan: BeamPlan, longest: int) -> None:
        self.model, self.plan, self.longest = model, plan, longest
        self.state: F | None = None
        self.taken_B: list[bool] = []  # slots whose sentence is done and gone

    def open(self, fresh: F, limit_K: Tensor) -> None:
        """As many slots as there are sentences in a fresh state, which has one row for each."""
        self.beams = init_beams(limit_K, self.plan.width, self.longest)
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
        self.beams, rows_N, self.token_N = advance_beams(self.beams, logp_NV, self.plan)
        self.state = state.select(rows_N).rest(self.beams.done_B)

    def over(self) -> list[int]:
        """Slots whose sentence is done, and has not been taken."""
        done = self.beams.done_B.tolist()
        return [slot for slot, (over, taken) in enumerate(zip(done, self.taken_B, strict=True)) if over and not taken]

    def take(self, slots: list[int]) -> list[list[SearchResult]]:
        """The answers in these slots, which are free from now on."""
        for slot in slots:
            self.taken_B[slot] = True
        return collect_results(select_beams(self.beams, self.places(slots)), self.plan)

    @property
    def free(self) -> list[int]:
        return [slot for slot, taken in enumerate(self.taken_B) if taken]

    def fill(self, slots: list[int], fresh: F, limit_K: Tensor) -> None:
        """New sentences in free slots."""
        assert self.state
        place_K = self.places(slots)
        self.state = self.state.put(place_K, self.widened(fresh, len(slots)))
        new = init_beams(limit_K, self.plan.width, self.longest)
        self.beams = insert_beams(self.beams, place_K, new)
        self.token_N.view(len(self.taken_B), -1)[place_K] = BOS
        for slot in slots:
            self.taken_B[slot] = False

    def shrink(self) -> None:
        """Without the slots that are free."""
        assert self.state
        place_K = self.places([slot for slot, taken in enumerate(self.taken_B) if not taken])
        self.state, self.beams = self.state.keep(place_K), select_beams(self.beams, place_K)
        self.token_N = self.token_N.view(len(self.taken_B), -1)[place_K].flatten()
        self.taken_B = [False] * len(place_K)

    def places(self, slots: list[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.long, device=self.plan.penalty_T.device)


def select_beams(beams: BeamState, place_K: Tensor) -> BeamState:
    """The searches at these places."""

    def pick(each: Tensor) -> Tensor:
        return each.index_select(0, place_K)

    return BeamState(
        ActiveBeams(*map(pick, beams.live)),
        FinishedBeams(*map(pick, beams.whole)),
        pick(beams.limit_B),
        pick(beams.done_B),
    )


def insert_beams(beams: BeamState, place_K: Tensor, new: BeamState) -> BeamState:
    """New searches in these places."""

    def put(old: Tensor, fresh: Tensor) -> Tensor:
        return old.index_copy(0, place_K, fresh)

    return BeamState(
        ActiveBeams(*map(put, beams.live, new.live)),
        FinishedBeams(*map(put, beams.whole, new.whole)),
        put(beams.limit_B, new.limit_B),
        put(beams.done_B, new.done_B),
    )


WARMUP_STEPS = 3  # steps before the capture, in which libraries make up their minds


class StaticSlots(Slots[Any]):
    """A fixed number of slots that are written in place, all of them free at first."""

    def __init__(self, model: Any, plan: BeamPlan, longest: int, fresh: Any, slots: int) -> None:
        """`fresh` is the state of as many empty sources as there are slots."""
        super().__init__(model, plan, longest)
        self.open(fresh, torch.zeros(slots, dtype=torch.long, device=plan.penalty_T.device))
        self.taken_B = [True] * slots
        live, whole, limit_B, done_B = self.beams
        own = (
            ActiveBeams(*(each.clone() for each in live)),
            FinishedBeams(*(each.clone() for each in whole)),
        )  # each its own memory
        self.beams = BeamState(*own, limit_B, done_B)
        assert self.state
        self.state: Any = self.state.indexed(longest + 1)
        self.plan_here = replace(plan, penalty_T=plan.penalty_T.cpu())

    def step(self) -> None:
        """A step whose results lie where those of the step before lay."""
        logp_NV, state = self.model.step(self.token_N, self.state)
        beams, rows_N, token_N = advance_beams(self.beams, logp_NV, self.plan)
        state = state.select(rows_N).rest(beams.done_B)
        own = (self.beams.done_B, self.token_N, self.state.at_B, self.state.who_NK)
        new = (beams.done_B, token_N, state.at_B, state.who_NK)
        held = (*self.beams.live, *self.beams.whole, *own)
        for old, now in zip(held, (*beams.live, *beams.whole, *new), strict=True):
            old.copy_(now)

    def fetch(self, slots: list[int]) -> Callable[[], list[list[SearchResult]]]:
        """The answers in these slots, which are free from now on: on their way, to be waited for by whoever calls."""
        for slot in slots:
            self.taken_B[slot] = True
        picked = select_beams(self.beams, self.places(slots))
        parts = [*picked.live, *picked.whole]
        flat = torch.cat([part.double().reshape(len(slots), -1) for part in parts], 1)  # all in one, and no word lost
        here = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
        here.copy_(flat, non_blocking=True)
        sent = torch.cuda.current_stream().record_event() if flat.is_cuda else None

        def arrived() -> list[list[SearchResult]]:
            if sent:
                sent.synchronize()
            each = torch.split(here, [part[0].numel() for part in parts], 1)
            made = [one.reshape(part.shape).to(part.dtype) for one, part in zip(each, parts, strict=True)]
            return collect_results(
                BeamState(ActiveBeams(*made[:3]), FinishedBeams(*made[3:]), picked.limit_B, picked.done_B),
                self.plan_here,
            )

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


class CudaGraphSlots(StaticSlots):
    """The same, the step being captured."""

    def __init__(self, model: Any, plan: BeamPlan, longest: int, fresh: Any, slots: int) -> None:
        super().__init__(model, plan, longest, fresh, slots)
        self.graph = torch.cuda.CUDAGraph()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARMUP_STEPS):
                super().step()
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(self.graph):
            super().step()

    def step(self) -> None:
        self.graph.replay()


REFILL_DIVISOR = 16  # one slot in so many must be free before others are let in, or slots given up
MIN_ROWS = 4  # rows of the model: how floats round in a product of fewer rows than that is another matter


class JobQueue:
    """Jobs of one width, the longest first, handed out to whoever asks."""

    def __init__(self, jobs: Sequence[Job], numbers: Sequence[int]) -> None:
        self.jobs, self.lock = jobs, threading.Lock()
        self.waiting = sorted(numbers, key=lambda number: len(jobs[number].ids))
        self.width = round_to_bucket(max(len(jobs[number].ids) for number in numbers) + 1)
        self.longest = max(jobs[number].limit for number in numbers)  # of the answers

    def next(self, count: int) -> list[int]:
        with self.lock:
            some = self.waiting[-count:][::-1]
            del self.waiting[-count:]
            return some


class Scheduler:
    """One worker on a CPU: fills its slots from a queue until nothing is left, and tells what it found."""

    def __init__(self, model: Any, device: torch.device, rows: int) -> None:
        self.model, self.device, self.rows = model, device, rows

    def opened(self, queue: JobQueue, plan: BeamPlan) -> tuple[Slots[Any], list[int]]:
        """Slots, and the job in each of them; -1 where there is none."""
        fewest = -(-MIN_ROWS // plan.width)
        here = queue.next(max(self.rows // plan.width, fewest))
        slots: Slots[Any] = Slots(self.model, plan, queue.longest)
        if not here:  # another worker was quicker
            return slots, here
        slots.open(*self.started(queue, here, max(len(here), fewest)))
        return slots, here + [-1] * (fewest - len(here))

    def shrunk(self, slots: Slots[Any], here: list[int]) -> list[int]:
        """Without the slots that are free; a few always stay."""
        if (len(here) - len(slots.free)) * slots.plan.width < MIN_ROWS:
            return here
        left = [number for number, taken in zip(here, slots.taken_B, strict=True) if not taken]
        slots.shrink()
        return left

    @torch.inference_mode()
    def run(self, queue: JobQueue, plan: BeamPlan, told: Callable[[int, list[SearchResult]], None]) -> None:
        slots, here = self.opened(queue, plan)
        while here:
            free = slots.free
            if len(free) * REFILL_DIVISOR >= len(here):
                if new := queue.next(len(free)):
                    slots.fill(free[: len(new)], *self.started(queue, new, len(new)))
                    for slot, number in zip(free, new, strict=False):
                        here[slot] = number
                elif len(free) == len(here):
                    return
                else:
                    here = self.shrunk(slots, here)
            slots.step()
            over = slots.over()
            for slot, found in zip(over, slots.take(over) if over else [], strict=True):
                told(here[slot], found)

    def started(self, queue: JobQueue, numbers: Sequence[int], rows: int) -> tuple[Any, Tensor]:
        """The sources of these jobs, read, and their limits; rows beyond them are empty, and nothing is asked there."""
        jobs = [queue.jobs[number] for number in numbers]
        batch = collate_sources(jobs, queue.width, rows).to(self.device)
        trees = () if batch.depth_BS is None else (batch.depth_BS, batch.tree_BSS)
        fresh = self.model.start(batch.source_BS, batch.source_segment_BS > 0, *trees)
        limits = [job.limit for job in jobs] + [0] * (rows - len(jobs))
        return fresh, torch.tensor(limits, device=self.device)


class GpuScheduler(Scheduler):
    """The same on a GPU: slots that are captured once for each shape, and kept. Sources are read many at a time, while
    the steps before run, so that the GPU does not wait for the host."""

    LOOK = 4  # steps from one look at who is done to the next
    GROUPS = 8  # that fill all slots
    SHARE, SHARES = 32, 4  # keys and values of one pool may take that part of the GPU's memory, of all so many parts

    def __init__(self, model: Any, device: torch.device, rows: int) -> None:
        super().__init__(model, device, rows)
        self.pools: dict[tuple[Any, ...], StaticSlots] = {}
        self.share = memory_of(device) // self.SHARE

    @torch.inference_mode()
    def run(self, queue: JobQueue, plan: BeamPlan, told: Callable[[int, list[SearchResult]], None]) -> None:
        slots = self.pool(queue, plan)
        here = [-1] * len(slots.taken_B)
        reading = Prefetcher(self, queue, len(here), max(len(here) // self.GROUPS, 1))
        group = reading.next()
        coming: list[int] = []  # jobs that are done, and whose answers are on their way
        arrived: Callable[[], list[list[SearchResult]]] = list
        while group or not all(slots.taken_B):
            while group and len(slots.free) >= len(group[0]):
                free = slots.free
                for slot, number in zip(free, group[0], strict=False):
                    here[slot] = number
                slots.fill(free[: len(group[0])], *group[1:])
                group = reading.next()
            for _ in range(self.LOOK):
                slots.step()
            for number, found in zip(coming, arrived(), strict=True):  # the GPU is busy meanwhile
                told(number, found)
            reading.read()
            over = slots.over()
            coming, arrived = [here[slot] for slot in over], slots.fetch(over) if over else list
        for number, found in zip(coming, arrived(), strict=True):
            told(number, found)

    def pool(self, queue: JobQueue, plan: BeamPlan) -> StaticSlots:
        """Slots that were captured before or, where there are none, new ones, for which others may have to go."""
        longest, asked = (
            round_up_length(queue.longest),
            plan.key[1:],
        )  # the longest answer of another queue does not matter
        shape = (queue.width, longest, asked)
        if shape not in self.pools:
            kind = CudaGraphSlots if self.device.type == "cuda" else StaticSlots
            one = self.started(queue, [], 1)[0].indexed(longest + 1).nbytes * plan.width
            count = max(min(self.rows // plan.width, self.share // one), 1)
            while self.pools and one * count + self.held > self.SHARES * self.share:
                self.forget(asked)
            empty = self.started(queue, [], count)[0]
            self.pools[shape] = kind(self.model, plan, longest, empty, count)
        return self.pools[shape]

    def forget(self, asked: tuple[Any, ...]) -> None:
        """Give up slots of a search that was asked for before or, of this one, those made last: widths come in turn, so
        that the oldest are wanted next."""
        others = [shape for shape in self.pools if shape[-1] != asked]
        del self.pools[others[0] if others else next(reversed(self.pools))]

    @property
    def held(self) -> int:
        """Bytes of the keys and values of all pools."""
        return sum(slots.state.nbytes for slots in self.pools.values())


class Prefetcher:
    """The jobs of a queue: their sources are read many at a time, always in a grid of one shape; they are handed out a
    few at a time."""

    def __init__(self, flow: Scheduler, queue: JobQueue, many: int, few: int) -> None:
        self.flow, self.queue, self.many, self.few = flow, queue, many, few
        self.numbers: list[int] = []  # jobs that were read and not handed out
        self.given = 0  # of those that were read together
        self.fresh: Any = None
        self.limit_K = torch.zeros(0)

    def read(self) -> None:
        """Have something to hand out, if there is anything left."""
        if not self.numbers and (numbers := self.queue.next(self.many)):
            fresh, self.limit_K = self.flow.started(self.queue, numbers, self.many)
            self.fresh, self.numbers, self.given = fresh.indexed(0), numbers, 0

    def next(self) -> tuple[list[int], Any, Tensor] | None:
        """Some jobs, the state that their sources were read into, and their limits."""
        self.read()
        some, self.numbers = self.numbers[: self.few], self.numbers[self.few :]
        if not some:
            return None
        first, self.given = self.given, self.given + len(some)
        return some, self.fresh.part(first, len(some)), self.limit_K[first : self.given]


def round_up_length(tokens: int) -> int:
    """So many or a few more: few different numbers, for each of which something is captured."""
    return -(-tokens // 64) * 64


def collate_sources(jobs: Sequence[Job], width: int, rows: int) -> Batch:
    """The sources in a grid, one to a row."""
    nothing = np.zeros(0, dtype=np.int64)
    examples = [Example(np.array(job.ids, dtype=np.int64), nothing, i, job.links) for i, job in enumerate(jobs)]
    return collate_pairs(
        BatchPlan([[row] for row in range(len(jobs))] + [[]] * (rows - len(jobs)), Widths(width, 1)), examples
    )
