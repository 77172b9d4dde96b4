"""Continuous batching of the jobs of many callers on a GPU.

Launching the few hundred operations of a step takes several times as long as the GPU needs for them, and longer in a
server: every operation gives up Python's global lock, which the threads of requests want. Therefore `LiveSlots` have
two CUDA graphs: one starts a group of jobs, the other advances all sentences by several tokens and copies the state of
the search to the host. A turn replays the second one once, and waits once.

Results of `LiveSlots` do not depend on the other jobs, to the bit: shapes never change, and a row of a batch has the
same rounding wherever it is.

Shapes   B slots   W beams per slot   N = B * W rows of the model   G new jobs   S source length
         X numbers of a slot, or of a new job
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.beam import BeamSearch, BeamState
from dragoman.decoding.continuous_batching import (
    EMPTY_JOB,
    FREE,
    Slots,
    StaticSlots,
    capture_graph,
    pack_state,
    release_gpu_memory,
    unpack_state,
)
from dragoman.decoding.live_batching import LiveQueue, LiveScheduler
from dragoman.decoding.protocol import SearchJob, StepModel
from dragoman.hardware import total_memory
from dragoman.types import BOS, EOS, PAD

SLOTS_DIVISOR = 16  # the slots of one kind may use 1/16 of the GPU's memory for keys and values
KEPT_DIVISOR = 8  # all that are kept may use 1/8, unless more are in use at the same time


class LiveSlots(StaticSlots):
    """Static slots, in which jobs are started by one graph and all sentences advanced by another."""

    steps = 4  # of `advance`
    GROUP = 8  # jobs that are started at a time: the sources of a group are encoded together

    def __init__(self, model: StepModel[Any], search: BeamSearch, fresh: Any, width: int, memory_pool: Any) -> None:
        """Make a free slot for each row of `fresh`. `width` is that of the sources."""
        self.count, self.width, self.memory_pool = len(fresh.length_B), width, memory_pool
        self.start_graph: torch.cuda.CUDAGraph | None = None
        # Sources, padded, their lengths, and the limits of the results; then for each slot the row of its new job, or
        # -1. All of that is one tensor, which is copied to the GPU at once.
        size, is_gpu = self.GROUP * (width + 2) + self.count, search.device.type == "cuda"
        self.host_new = torch.zeros(size, dtype=torch.long, pin_memory=is_gpu)
        self.new = torch.zeros(size, dtype=torch.long, device=search.device)
        self.split_new(self.host_new)[1].fill_(-1)
        super().__init__(model, search, [FREE] * self.count, fresh, [EMPTY_JOB] * self.count)
        if not is_gpu:
            self.host_state_BX = pack_state(search.state)

    def split_new(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two parts of `new`: job_GX and row_B."""
        first, second = torch.split(joined, [self.GROUP * (self.width + 2), self.count])
        return first.view(self.GROUP, -1), second

    def capture(self) -> None:
        joined_BX = pack_state(self.search.state)
        self.host_state_BX = torch.empty(joined_BX.shape, dtype=joined_BX.dtype, pin_memory=True)
        self.start_graph = capture_graph(self.start_group, self.memory_pool)
        self.graph = capture_graph(self.take_steps, self.memory_pool)

    def start_group(self) -> None:
        """Encode the sources in `host_new` and start their searches; all other slots stay as they are."""
        self.new.copy_(self.host_new, non_blocking=True)
        job_GX, row_B = self.split_new(self.new)
        is_new_B, row_B = row_B >= 0, row_B.clamp(min=0)
        source_GS, (length_G, limit_G) = job_GX[:, : self.width], job_GX[:, self.width :].unbind(1)
        real_GS = torch.arange(self.width, device=row_B.device) < length_G[:, None]
        fresh = self.model.start(source_GS, real_GS).make_indirect(capacity=0)
        for old, new in zip(self.state.memory, fresh.memory, strict=True):
            for old_B, new_G in zip(old or (), new or (), strict=True):
                replace_where(is_new_B, old_B, new_G.index_select(0, row_B))
        if self.state.mask.length_B is not None:
            replace_where(is_new_B, self.state.mask.length_B, fresh.mask.length_B.index_select(0, row_B))
        self.state.length_B.masked_fill_(is_new_B, 0)
        self.token_N.masked_fill_(is_new_B.repeat_interleave(self.search.width), BOS)
        for old_B, initial in zip(self.search.state, self.initial, strict=True):
            replace_where(is_new_B, old_B, initial.expand_as(old_B))
        replace_where(is_new_B, self.search.state.limit_B, limit_G.index_select(0, row_B))

    def take_steps(self) -> None:
        """Advance all sentences, and copy the state of the search to the host."""
        for _ in range(self.steps):
            self.step()
        self.host_state_BX.copy_(pack_state(self.search.state), non_blocking=True)

    def start_jobs(self, numbers: Sequence[int], jobs: Sequence[SearchJob]) -> None:
        """Start new jobs in free slots. The GPU has finished the last turn, since `advance` waits for it."""
        new_GX, row_B = (part.numpy() for part in self.split_new(self.host_new))
        free = self.free
        for first in range(0, len(jobs), self.GROUP):
            if first and self.start_graph:
                torch.cuda.current_stream().synchronize()  # the last group has been copied
            new_GX[:], row_B[:] = 0, -1
            new_GX[:, : self.width] = PAD
            for row, job in enumerate(jobs[first : first + self.GROUP]):
                length, slot = len(job.ids) + 1, free[first + row]
                new_GX[row, :length], new_GX[row, self.width :] = (*job.ids, EOS), (length, job.max_tokens)
                row_B[slot], self.job_numbers[slot] = row, numbers[first + row]
            if self.start_graph:
                self.start_graph.replay()
            else:
                self.start_group()

    def advance(self) -> list[int]:
        if self.graph:
            self.graph.replay()
            torch.cuda.current_stream().synchronize()
        else:
            self.take_steps()
        done_B = self.host_state_BX.numpy()[:, -1]  # the last field of a BeamState
        return [int(slot) for slot in np.flatnonzero(done_B) if self.job_numbers[slot] != FREE]

    def read_state(self, slots: Sequence[int]) -> BeamState:
        """Return the state of the search in these slots, on the host."""
        return unpack_state(self.host_state_BX[list(slots)], self.search.state)


def replace_where(is_new_B: Tensor, old_B: Tensor, new_B: Tensor) -> None:
    """Replace the rows of `old_B`, in place, where `is_new_B` is True."""
    old_B.copy_(torch.where(is_new_B.view(-1, *[1] * (old_B.dim() - 1)), new_B, old_B))


class LiveGpuScheduler(LiveScheduler):
    """Run plain beam search in `LiveSlots`, and all other searches as `LiveScheduler` does.

    Slots are kept when their batch ends, since capturing graphs takes longer than a sentence. A step takes as long with
    one sentence as with all slots in use, so that fewer kinds of jobs, by the width of the source, are faster.
    """

    min_width = 64

    def __init__(self, model: StepModel[Any], device: torch.device, slots: int) -> None:
        self.kept: dict[Hashable, LiveSlots] = {}  # by the keys of their queues; those that were used last are last
        self.memory_pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.slots_bytes, self.kept_bytes = (total_memory(device) // part for part in (SLOTS_DIVISOR, KEPT_DIVISOR))
        super().__init__(model, device, rows=slots, threads=1, fixed_slots=slots)

    def close(self) -> None:
        super().close()
        self.kept.clear()
        if self.device.type == "cuda":
            release_gpu_memory()

    def make_slots(self, queue: LiveQueue, numbers: Sequence[int]) -> Slots:
        jobs = [self.jobs[number] for number in numbers]
        slots = self.find_slots(queue, jobs[0])
        if slots is None:
            return super().make_slots(queue, numbers)
        slots.job_numbers = [FREE] * self.fixed_slots
        slots.start_jobs(numbers, jobs)
        return slots

    def join(self, slots: Slots, queue: LiveQueue, numbers: list[int]) -> None:
        if isinstance(slots, LiveSlots):
            slots.start_jobs(numbers, [self.jobs[number] for number in numbers])
        else:
            super().join(slots, queue, numbers)

    def find_slots(self, queue: LiveQueue, job: SearchJob) -> LiveSlots | None:
        """Return the slots that are kept for jobs of this kind, or new ones; None if graphs do not support it."""
        if not queue.is_plain or not supports_graphs(self.model) or job.features:
            return None
        slots = self.kept.pop(queue.key, None)
        if slots is None:
            cache = self.encode_sources(queue, [FREE])[0].make_indirect(capacity=queue.max_length + 1)  # of one row
            needed = cache.nbytes * queue.rows * self.fixed_slots
            if needed > self.slots_bytes:
                return None
            self.drop_unused(needed)
            search = queue.make_search(queue.max_length, self.device)
            assert isinstance(search, BeamSearch)
            fresh, _ = self.encode_sources(queue, [FREE] * self.fixed_slots)
            slots = LiveSlots(self.model, search, fresh, queue.width, self.memory_pool)
        self.kept[queue.key] = slots
        return slots

    def drop_unused(self, needed: int) -> None:
        """Drop slots that no batch uses, the oldest first, until there is room for others."""
        for key in list(self.kept):
            if needed + sum(slots.state.nbytes for slots in self.kept.values()) <= self.kept_bytes:
                return
            if key not in self.queues or not self.queues[key].users:
                del self.kept[key]

    def decode_again(
        self, batches: dict[LiveQueue, Slots], queue: LiveQueue, numbers: Sequence[int], error: Exception
    ) -> None:
        self.kept.pop(queue.key, None)  # its tensors may be in any state
        super().decode_again(batches, queue, numbers, error)


def supports_graphs(model: StepModel[Any]) -> bool:
    """Return whether a model can run in `LiveSlots`: with an indirect KV cache, and an encoder of plain attention."""
    settings = getattr(model, "settings", None)
    return getattr(model, "supports_indirect_cache", False) and getattr(settings, "attention", "") == "full"
