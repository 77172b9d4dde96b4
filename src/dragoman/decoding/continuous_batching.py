"""Continuous batching: a sentence that is done leaves its slot, and a waiting one takes it.

Beam search never waits for its slowest sentence this way. The steps are those of beam.py, so results are the same; only
which sentences share a batch differs. There are two schedulers:

    Scheduler      one worker of a CPU; slots are refilled as soon as enough of them are free, and given up at the end
    GpuScheduler   a fixed number of slots per shape; one step of model and search is captured as a CUDA graph and
                   replayed, because launching its few hundred small kernels takes longer than running them. A graph
                   reads and writes the same memory every time, so these slots are updated in place

Shapes   B slots   K sentences that enter or leave   W beams   N = B * W rows of the model   S source width
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from dragoman.data.batches import BatchPlan, Widths, collate_pairs, round_to_bucket
from dragoman.decoding.beam import ActiveBeams, BeamPlan, FinishedBeams, advance_beams, init_beams
from dragoman.decoding.protocol import NEVER, SearchResult, SearchState, StepModel
from dragoman.decoding.request import Job
from dragoman.hardware import total_memory
from dragoman.types import BOS, Batch, Example

WARMUP_STEPS = 3  # before a capture, in which libraries choose their algorithms
REFILL_DIVISOR = 16  # one slot in so many must be free before others are let in, or slots given up
MIN_ROWS = 4  # of the model: products of fewer rows round differently
Results = list[list[SearchResult]]


class SlotState(SearchState, Protocol):
    """A state whose sentences may come and go. All sentences have the same number of rows."""

    def keep(self, sentences_K: Tensor) -> Self:
        """Return the state of these sentences, in this order."""
        ...

    def put(self, sentences_K: Tensor, fresh: Self) -> Self:
        """Replace these sentences by those of a fresh state. The old state must not be used any more."""
        ...

    def rest(self, done_B: Tensor) -> Self:
        """Let sentences that are done wait to be replaced; they need no room for more tokens."""
        ...


F = TypeVar("F", bound=SlotState)


class Slots(Generic[F]):
    """Sentences that are decoded side by side, one per slot."""

    def __init__(self, model: StepModel[F], plan: BeamPlan, longest: int, fresh: F, limit_B: Tensor) -> None:
        """Open a slot for each sentence of a fresh state, which has one row per sentence.

        `longest` is the highest limit of any sentence that will come; a slot whose limit is 0 is free.
        """
        self.model, self.plan, self.longest = model, plan, longest
        self.beams = init_beams(limit_B, plan.width, longest)
        self.state = self._repeat_rows(fresh, len(limit_B))
        self.token_N = torch.full((len(limit_B) * plan.width,), BOS, device=limit_B.device)
        self.is_free = (limit_B == 0).tolist()

    @property
    def free(self) -> list[int]:
        return [slot for slot, is_free in enumerate(self.is_free) if is_free]

    def step(self) -> None:
        """Advance every sentence by one token."""
        logp_NV, state = self.model.step(self.token_N, self.state)
        self.beams, rows_N, self.token_N = advance_beams(self.beams, logp_NV, self.plan)
        self.state = state.select(rows_N).rest(self.beams.done_B)

    def free_done(self) -> list[int]:
        """Free the slots whose sentence is done, and return them."""
        done = self.beams.done_B.tolist()
        slots = [slot for slot, is_free in enumerate(self.is_free) if done[slot] and not is_free]
        for slot in slots:
            self.is_free[slot] = True
        return slots

    def take_done(self) -> Iterator[tuple[int, list[SearchResult]]]:
        """Free the slots whose sentence is done, and yield their results."""
        if slots := self.free_done():
            done = self.beams.select(self._index(slots))
            yield from zip(slots, done.results(self.plan), strict=True)

    def fill(self, slots: list[int], fresh: F, limit_K: Tensor) -> None:
        """Put new sentences into free slots."""
        index_K = self._index(slots)
        self.state = self.state.put(index_K, self._repeat_rows(fresh, len(slots)))
        self.beams = self.beams.put(index_K, init_beams(limit_K, self.plan.width, self.longest))
        self.token_N.view(len(self.is_free), -1)[index_K] = BOS
        for slot in slots:
            self.is_free[slot] = False

    def shrink(self) -> None:
        """Give up the free slots."""
        index_K = self._index([slot for slot, is_free in enumerate(self.is_free) if not is_free])
        self.state, self.beams = self.state.keep(index_K), self.beams.select(index_K)
        self.token_N = self.token_N.view(len(self.is_free), -1)[index_K].flatten()
        self.is_free = [False] * len(index_K)

    def _repeat_rows(self, fresh: F, sentences: int) -> F:
        """Return the state with one row per beam instead of one per sentence."""
        return fresh.select(
            torch.arange(sentences, device=self.plan.penalty_T.device).repeat_interleave(self.plan.width)
        )

    def _index(self, slots: list[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.long, device=self.plan.penalty_T.device)


class StaticSlots(Slots[Any]):
    """A fixed number of slots that are updated in place, all of them free at first."""

    def __init__(self, model: StepModel[Any], plan: BeamPlan, longest: int, fresh: Any, slots: int) -> None:
        """`fresh` is the state of as many empty sources as there are slots."""
        limit_B = torch.zeros(slots, dtype=torch.long, device=plan.penalty_T.device)
        super().__init__(model, plan, longest, fresh, limit_B)
        active = ActiveBeams(*(each.clone() for each in self.beams.active))  # no two may share memory
        finished = FinishedBeams(*(each.clone() for each in self.beams.finished))
        self.beams = self.beams._replace(active=active, finished=finished)
        self.state = self.state.make_indirect(longest + 1)
        self.cpu_plan = replace(plan, penalty_T=plan.penalty_T.cpu())

    def step(self) -> None:
        """Advance every sentence by one token, and write the new values over the old ones."""
        logp_NV, state = self.model.step(self.token_N, self.state)
        beams, rows_N, token_N = advance_beams(self.beams, logp_NV, self.plan)
        state = state.select(rows_N).rest(beams.done_B)
        old = (self.beams.done_B, self.token_N, self.state.length_B, self.state.beam_indices_NK)
        new = (beams.done_B, token_N, state.length_B, state.beam_indices_NK)
        for held, value in zip(
            (*self.beams.active, *self.beams.finished, *old), (*beams.active, *beams.finished, *new), strict=True
        ):
            held.copy_(value)

    def fetch(self, slots: list[int]) -> Callable[[], Results]:
        """Start to copy the results in these slots to the host; the function returned waits for them."""
        picked = self.beams.select(self._index(slots))
        parts = [*picked.active, *picked.finished]
        flat = torch.cat([part.double().reshape(len(slots), -1) for part in parts], 1)  # one copy; doubles lose nothing
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
        host.copy_(flat, non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if flat.is_cuda else None

        def wait() -> Results:
            if copied:
                copied.synchronize()
            each = torch.split(host, [part[0].numel() for part in parts], 1)
            made = [one.reshape(part.shape).to(part.dtype) for one, part in zip(each, parts, strict=True)]
            beams = picked._replace(active=ActiveBeams(*made[:3]), finished=FinishedBeams(*made[3:]))
            return beams.results(self.cpu_plan)

        return wait

    def fill(self, slots: list[int], fresh: Any, limit_K: Tensor) -> None:
        """Put new sentences, one row of `fresh` each, into free slots. Attention never reaches the old tokens."""
        index_K = self._index(slots)
        self.state.length_B.copy_(self.state.put(index_K, fresh).length_B)
        active, finished, limit_B, done_B = self.beams
        for held, value in ((active.logp_BW, NEVER), (active.logp_BW[:, 0], 0), (active.length_B, 0), (done_B, False)):
            held.index_fill_(0, index_K, value)
        finished.score_BW.index_fill_(0, index_K, NEVER)
        limit_B.index_copy_(0, index_K, limit_K)
        self.token_N.view(len(self.is_free), -1).index_fill_(0, index_K, BOS)
        for slot in slots:
            self.is_free[slot] = False


class CudaGraphSlots(StaticSlots):
    """Static slots whose step is a CUDA graph."""

    def __init__(self, model: StepModel[Any], plan: BeamPlan, longest: int, fresh: Any, slots: int) -> None:
        super().__init__(model, plan, longest, fresh, slots)
        self.graph = torch.cuda.CUDAGraph()
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(WARMUP_STEPS):
                super().step()
        torch.cuda.current_stream().wait_stream(side_stream)
        with torch.cuda.graph(self.graph):
            super().step()

    def step(self) -> None:
        self.graph.replay()


class JobQueue:
    """Jobs of one source width, the longest first, for any number of workers."""

    def __init__(self, jobs: Sequence[Job], numbers: Sequence[int]) -> None:
        self.jobs, self.lock = jobs, threading.Lock()
        self.waiting = sorted(numbers, key=lambda number: len(jobs[number].ids))
        self.width = round_to_bucket(max(len(jobs[number].ids) for number in numbers) + 1)
        self.longest = max(jobs[number].limit for number in numbers)  # target length

    def next(self, count: int) -> list[int]:
        """Remove and return the numbers of the next jobs."""
        with self.lock:
            some = self.waiting[-count:][::-1]
            del self.waiting[-count:]
            return some


class Scheduler:
    """Decode the jobs of a queue on a CPU; several workers may share it. `rows` of the model run in one step."""

    def __init__(self, model: StepModel[Any], device: torch.device, rows: int) -> None:
        self.model, self.device, self.rows = model, device, rows

    @torch.inference_mode()
    def run(self, queue: JobQueue, plan: BeamPlan, results: Results, cancelled: threading.Event) -> None:
        """Decode until the queue is empty, and store the results of each job under its number."""
        min_slots = -(-MIN_ROWS // plan.width)
        numbers = queue.next(max(self.rows // plan.width, min_slots))
        if not numbers:  # other workers have taken them all
            return
        fresh, limit_B = self.read_sources(queue, numbers, max(len(numbers), min_slots))
        slots = Slots(self.model, plan, queue.longest, fresh, limit_B)
        job_in_slot = numbers + [-1] * (min_slots - len(numbers))
        while not cancelled.is_set():
            free = slots.free
            if len(free) * REFILL_DIVISOR >= len(job_in_slot):
                if new := queue.next(len(free)):
                    slots.fill(free[: len(new)], *self.read_sources(queue, new, len(new)))
                    for slot, number in zip(free, new, strict=False):
                        job_in_slot[slot] = number
                elif len(free) == len(job_in_slot):
                    return
                elif (len(job_in_slot) - len(free)) * plan.width >= MIN_ROWS:
                    job_in_slot = [job_in_slot[slot] for slot, is_free in enumerate(slots.is_free) if not is_free]
                    slots.shrink()
            slots.step()
            for slot, found in slots.take_done():
                results[job_in_slot[slot]] = found

    def read_sources(self, queue: JobQueue, numbers: Sequence[int], rows: int) -> tuple[Any, Tensor]:
        """Return the state and the limits of these jobs. Rows beyond them are empty and have limit 0."""
        jobs = [queue.jobs[number] for number in numbers]
        batch = collate_sources(jobs, queue.width, rows).to(self.device)
        fresh = bind_features(self.model, batch).start(batch.source_BS, batch.source_segment_BS > 0)
        limits = [job.limit for job in jobs] + [0] * (rows - len(jobs))
        return fresh, torch.tensor(limits, device=self.device)


class GpuScheduler(Scheduler):
    """Decode the jobs of a queue on a GPU, in slots that are made once per shape and kept.

    Sources are read many at a time, while earlier steps run, so that the GPU never waits for the host.
    """

    STEPS_PER_CHECK = 4  # steps between two looks at which sentences are done
    GROUPS = 8  # of sentences that fill all slots
    SHARE, SHARES = 32, 4  # one pool may take 1/SHARE of the GPU's memory for keys and values; all pools SHARES of that

    def __init__(self, model: StepModel[Any], device: torch.device, rows: int) -> None:
        super().__init__(model, device, rows)
        self.pools: dict[tuple[Any, ...], StaticSlots] = {}
        self.share = total_memory(device) // self.SHARE

    @torch.inference_mode()
    def run(self, queue: JobQueue, plan: BeamPlan, results: Results, cancelled: threading.Event) -> None:  # noqa: ARG002
        """Decode until the queue is empty. There is one worker, so nobody cancels it."""
        slots = self.get_pool(queue, plan)
        job_in_slot = [-1] * len(slots.is_free)
        prefetcher = Prefetcher(self, queue, len(job_in_slot), max(len(job_in_slot) // self.GROUPS, 1))
        group = prefetcher.next()
        pending: list[int] = []  # jobs whose results are being copied to the host
        wait: Callable[[], Results] = list
        while group or not all(slots.is_free):
            while group and len(slots.free) >= len(group[0]):
                free = slots.free
                for slot, number in zip(free, group[0], strict=False):
                    job_in_slot[slot] = number
                slots.fill(free[: len(group[0])], *group[1:])
                group = prefetcher.next()
            for _ in range(self.STEPS_PER_CHECK):
                slots.step()
            for number, found in zip(pending, wait(), strict=True):  # while the GPU is busy
                results[number] = found
            prefetcher.read()
            done = slots.free_done()
            pending, wait = [job_in_slot[slot] for slot in done], slots.fetch(done) if done else list
        for number, found in zip(pending, wait(), strict=True):
            results[number] = found

    def get_pool(self, queue: JobQueue, plan: BeamPlan) -> StaticSlots:
        """Return the slots of this shape. New ones may replace others, so that all fit into memory.

        Pools of other settings go first, then the newest: widths come in turn, so the oldest are needed next.
        """
        longest, settings = round_up_length(queue.longest), plan.key[1:]  # without the longest of all queues
        shape = (queue.width, longest, settings)
        if shape not in self.pools:
            make = CudaGraphSlots if self.device.type == "cuda" else StaticSlots
            one = self.read_sources(queue, [], 1)[0].make_indirect(longest + 1).nbytes * plan.width
            count = max(min(self.rows // plan.width, self.share // one), 1)
            while self.pools and one * count + self.held > self.SHARES * self.share:
                others = [key for key in self.pools if key[-1] != settings]
                del self.pools[others[0] if others else next(reversed(self.pools))]
            empty = self.read_sources(queue, [], count)[0]
            self.pools[shape] = make(self.model, plan, longest, empty, count)
        return self.pools[shape]

    @property
    def held(self) -> int:
        """Return the bytes of the keys and values of all pools."""
        return sum(slots.state.nbytes for slots in self.pools.values())


class Prefetcher:
    """Read the sources of a queue `many` at a time, in batches of one shape, and hand them out `few` at a time."""

    def __init__(self, scheduler: Scheduler, queue: JobQueue, many: int, few: int) -> None:
        self.scheduler, self.queue, self.many, self.few = scheduler, queue, many, few
        self.numbers: list[int] = []  # jobs that were read and not handed out
        self.handed_out = 0  # of the current batch
        self.fresh: Any = None
        self.limit_K = torch.zeros(0)

    def read(self) -> None:
        """Read the next batch if the last one is used up."""
        if not self.numbers and (numbers := self.queue.next(self.many)):
            fresh, self.limit_K = self.scheduler.read_sources(self.queue, numbers, self.many)
            self.fresh, self.numbers, self.handed_out = fresh.make_indirect(0), numbers, 0

    def next(self) -> tuple[list[int], Any, Tensor] | None:
        """Return some jobs, the state of their sources, and their limits."""
        self.read()
        some, self.numbers = self.numbers[: self.few], self.numbers[self.few :]
        if not some:
            return None
        first, self.handed_out = self.handed_out, self.handed_out + len(some)
        return some, self.fresh.slice_sentences(first, len(some)), self.limit_K[first : self.handed_out]


def round_up_length(tokens: int) -> int:
    """Round up to a multiple of 64, so that there are few shapes to capture."""
    return -(-tokens // 64) * 64


def collate_sources(jobs: Sequence[Job], width: int, rows: int) -> Batch:
    """Return a batch of the sources, one per row, padded with empty rows."""
    nothing = np.zeros(0, dtype=np.int64)
    examples = [Example(np.array(job.ids, dtype=np.int64), nothing, i, job.features) for i, job in enumerate(jobs)]
    layout = [[row] for row in range(len(jobs))] + [[]] * (rows - len(jobs))
    return collate_pairs(BatchPlan(layout, Widths(width, 1)), examples)


@dataclass(frozen=True)
class FeatureModel:
    """A model whose `start` passes on the features of a batch beside its sources."""

    model: Any
    features: Mapping[str, Tensor]

    def start(self, source_BS: Tensor, keep_BS: Tensor) -> Any:
        return self.model.start(source_BS, keep_BS, self.features)

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]:
        logp_NV, state = self.model.step(token_N, state)
        return logp_NV, state


def bind_features(model: StepModel[Any], batch: Batch) -> StepModel[Any]:
    """Return the model with the features of a batch, if the batch has some."""
    return FeatureModel(model, batch.features) if batch.features else model
