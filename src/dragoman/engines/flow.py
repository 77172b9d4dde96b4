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

    def next(self, count: int) -> list[int]:
        with self.lock:
            some = self.waiting[-count:][::-1]
            del self.waiting[-count:]
            return some


class Flow:
    """One worker on a CPU: fills its slots from a queue until nothing is left, and tells what it found."""

    def __init__(self, model: Any, device: torch.device, rows: int) -> None:
        self.model, self.device, self.rows = model, device, rows

    def opened(self, queue: Queue, plan: Plan, longest: int) -> tuple[Slots[Any], list[int]]:
        """Slots, and the job in each of them; -1 where there is none."""
        fewest = -(-FEWEST // plan.width)
        here = queue.next(max(self.rows // plan.width, fewest))
        slots: Slots[Any] = Slots(self.model, plan, longest)
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
    def run(self, queue: Queue, plan: Plan, longest: int, told: Callable[[int, list[Found]], None]) -> None:
        slots, here = self.opened(queue, plan, longest)
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
    """The same on a GPU: slots that are captured once for each shape, and kept. Sentences come in groups of one size,
    which are read while the steps before run, so that the GPU does not wait for the host."""

    LOOK = 4  # steps from one look at who is done to the next
    GROUPS = 8  # that fill all slots

    def __init__(self, model: Any, device: torch.device, rows: int) -> None:
        super().__init__(model, device, rows)
        self.pools: dict[tuple[Any, ...], Slots[Any]] = {}

    @torch.inference_mode()
    def run(self, queue: Queue, plan: Plan, longest: int, told: Callable[[int, list[Found]], None]) -> None:
        slots = self.pool(queue, plan, longest)
        here = [-1] * len(slots.taken_B)
        size = max(len(here) // self.GROUPS, 1)
        group = self.group(queue, size)
        while True:
            while group and len(slots.free) >= len(group[0]):
                for slot, number in zip(slots.free, group[0], strict=False):
                    here[slot] = number
                slots.fill(slots.free[: len(group[0])], *group[1:])
                group = self.group(queue, size) if len(slots.free) >= size else None
            if all(slots.taken_B) and not group and not (group := self.group(queue, size)):
                return
            for _ in range(self.LOOK):
                slots.step()
            group = group or self.group(queue, size)
            over = slots.over()
            for slot, found in zip(over, slots.take(over) if over else [], strict=True):
                told(here[slot], found)

    def group(self, queue: Queue, size: int) -> tuple[list[int], Any, Tensor] | None:
        """The next few jobs, their sources being read, and their limits."""
        numbers = queue.next(size)
        if not numbers:
            return None
        fresh, limit_K = self.started(queue, numbers, size)
        if len(numbers) < size:
            fresh = fresh.keep(torch.arange(len(numbers), device=self.device))
        return numbers, fresh, limit_K[: len(numbers)]

    def pool(self, queue: Queue, plan: Plan, longest: int) -> Slots[Any]:
        from dragoman.engines.captured import CapturedSlots

        count, longest = max(self.rows // plan.width, 1), -(-longest // 64) * 64
        shape = (queue.width, longest, plan.key)
        if shape not in self.pools:
            empty = self.started(queue, [], count)[0]
            self.pools[shape] = CapturedSlots(self.model, plan, longest, empty, count)
        return self.pools[shape]


def laid(jobs: Sequence[Job], width: int, rows: int) -> Batch:
    """The sources in a grid, one to a row."""
    nothing = np.zeros(0, dtype=np.int64)
    examples = [Example(np.array(job.ids, dtype=np.int64), nothing, i, job.links) for i, job in enumerate(jobs)]
    return lay(Grid([[row] for row in range(len(jobs))] + [[]] * (rows - len(jobs)), Widths(width, 1)), examples)
