"""Jobs of any number through a few slots: long sentences first, each answered as soon as its own search is done.

Shapes   K sentences that come in
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.data.batch import Grid, Widths, lay
from dragoman.door import rung
from dragoman.engines.base import Job
from dragoman.engines.captured import CapturedSlots, FixedSlots
from dragoman.hardware import memory_of
from dragoman.search.beam import Plan
from dragoman.search.slots import Slots
from dragoman.search.step import Found
from dragoman.types import Batch, Example

WORTH = 16  # one slot in so many must be free before others are let in, or slots given up
FEWEST = 4  # rows of the model: how floats round in a product of fewer rows than that is another matter


class Queue:
    """Jobs of one width, the longest first, handed out to whoever asks."""

    def __init__(self, jobs: Sequence[Job], numbers: Sequence[int]) -> None:
        self.jobs, self.lock = jobs, threading.Lock()
        self.waiting = sorted(numbers, key=lambda number: len(jobs[number].ids))
        self.width = rung(max(len(jobs[number].ids) for number in numbers) + 1)
        self.longest = max(jobs[number].limit for number in numbers)  # of the answers

    def next(self, count: int) -> list[int]:
        with self.lock:
            some = self.waiting[-count:][::-1]
            del self.waiting[-count:]
            return some


class Flow:
    """One worker on a CPU: fills its slots from a queue until nothing is left, and tells what it found."""

    def __init__(self, model: Any, device: torch.device, rows: int) -> None:
        self.model, self.device, self.rows = model, device, rows

    def opened(self, queue: Queue, plan: Plan) -> tuple[Slots[Any], list[int]]:
        """Slots, and the job in each of them; -1 where there is none."""
        fewest = -(-FEWEST // plan.width)
        here = queue.next(max(self.rows // plan.width, fewest))
        slots: Slots[Any] = Slots(self.model, plan, queue.longest)
        if not here:  # another worker was quicker
            return slots, here
        slots.open(*self.started(queue, here, max(len(here), fewest)))
        return slots, here + [-1] * (fewest - len(here))

    def shrunk(self, slots: Slots[Any], here: list[int]) -> list[int]:
        """Without the slots that are free; a few always stay."""
        if (len(here) - len(slots.free)) * slots.plan.width < FEWEST:
            return here
        left = [number for number, taken in zip(here, slots.taken_B, strict=True) if not taken]
        slots.shrink()
        return left

    @torch.inference_mode()
    def run(self, queue: Queue, plan: Plan, told: Callable[[int, list[Found]], None]) -> None:
        slots, here = self.opened(queue, plan)
        while here:
            free = slots.free
            if len(free) * WORTH >= len(here):
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

    def started(self, queue: Queue, numbers: Sequence[int], rows: int) -> tuple[Any, Tensor]:
        """The sources of these jobs, read, and their limits; rows beyond them are empty, and nothing is asked there."""
        jobs = [queue.jobs[number] for number in numbers]
        batch = laid(jobs, queue.width, rows).to(self.device)
        trees = () if batch.depth_BS is None else (batch.depth_BS, batch.tree_BSS)
        fresh = self.model.start(batch.source_BS, batch.source_segment_BS > 0, *trees)
        limits = [job.limit for job in jobs] + [0] * (rows - len(jobs))
        return fresh, torch.tensor(limits, device=self.device)


class GpuFlow(Flow):
    """The same on a GPU: slots that are captured once for each shape, and kept. Sources are read many at a time, while
    the steps before run, so that the GPU does not wait for the host."""

    LOOK = 4  # steps from one look at who is done to the next
    GROUPS = 8  # that fill all slots
    SHARE, SHARES = 32, 4  # keys and values of one pool may take that part of the GPU's memory, of all so many parts

    def __init__(self, model: Any, device: torch.device, rows: int) -> None:
        super().__init__(model, device, rows)
        self.pools: dict[tuple[Any, ...], FixedSlots] = {}
        self.share = memory_of(device) // self.SHARE

    @torch.inference_mode()
    def run(self, queue: Queue, plan: Plan, told: Callable[[int, list[Found]], None]) -> None:
        slots = self.pool(queue, plan)
        here = [-1] * len(slots.taken_B)
        reading = Reading(self, queue, len(here), max(len(here) // self.GROUPS, 1))
        group = reading.next()
        coming: list[int] = []  # jobs that are done, and whose answers are on their way
        arrived: Callable[[], list[list[Found]]] = list
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

    def pool(self, queue: Queue, plan: Plan) -> FixedSlots:
        """Slots that were captured before or, where there are none, new ones, for which others may have to go."""
        longest, asked = roomy(queue.longest), plan.key[1:]  # the longest answer of another queue does not matter
        shape = (queue.width, longest, asked)
        if shape not in self.pools:
            kind = CapturedSlots if self.device.type == "cuda" else FixedSlots
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


class Reading:
    """The jobs of a queue: their sources are read many at a time, always in a grid of one shape; they are handed out a
    few at a time."""

    def __init__(self, flow: Flow, queue: Queue, many: int, few: int) -> None:
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


def roomy(tokens: int) -> int:
    """So many or a few more: few different numbers, for each of which something is captured."""
    return -(-tokens // 64) * 64


def laid(jobs: Sequence[Job], width: int, rows: int) -> Batch:
    """The sources in a grid, one to a row."""
    nothing = np.zeros(0, dtype=np.int64)
    examples = [Example(np.array(job.ids, dtype=np.int64), nothing, i, job.links) for i, job in enumerate(jobs)]
    return lay(Grid([[row] for row in range(len(jobs))] + [[]] * (rows - len(jobs)), Widths(width, 1)), examples)
