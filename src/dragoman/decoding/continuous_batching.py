"""Continuous batching: the loop that drives every search.

A sentence that is done leaves its slot, and a waiting one takes it, so a search never waits for its slowest sentence.
Which sentences share a batch changes no result. There are two schedulers:

    Scheduler      any search; on a CPU, slots are refilled as soon as enough of them are free, and given up at the end
    GpuScheduler   beam search in a fixed number of slots per shape; one step of model and search is captured as a CUDA
                   graph and replayed, because launching its few hundred small kernels takes longer than running them. A
                   graph reads and writes the same memory every time, so these slots are updated in place

Shapes   B slots   K sentences that enter or leave   W beams   N = B * W rows of the model   S source width
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from dragoman.data.batches import BatchPlan, Widths, collate_pairs, round_to_bucket
from dragoman.decoding.beam import BeamSearch, BeamState
from dragoman.decoding.protocol import Job, Search, SearchFactory, SearchResult, SearchState, StepModel
from dragoman.hardware import total_memory
from dragoman.types import BOS, Batch, Example

WARMUP_STEPS = 3  # before a capture, in which libraries choose their algorithms
REFILL_DIVISOR = 16  # one slot in so many must be free before others are let in, or slots given up
MIN_ROWS = 4  # of the model: products of fewer rows round differently
FREE = -1  # the job number of a free slot
EMPTY_JOB = Job([], 0)  # in a free slot
Results = list[list[SearchResult]]
Observer = Callable[[Any], None]  # called with the state of a search after every step


class SlotState(SearchState, Protocol):
    """A state whose sentences may come and go. All sentences have the same number of rows."""

    def keep(self, sentences_K: Tensor) -> Self:
        """Return the state of these sentences, in this order."""
        ...

    def put(self, sentences_K: Tensor, fresh: Self) -> Self:
        """Replace these sentences by those of a fresh state. The old state must not be used any more."""
        ...

    def reset_finished(self, done_B: Tensor) -> Self:
        """Let sentences that are done wait to be replaced; they need no room for more tokens."""
        ...


class Slots:
    """Sentences that are decoded side by side, one per slot. `numbers` are the numbers of their jobs, or FREE."""

    def __init__(
        self, model: StepModel[Any], search: Search, numbers: Sequence[int], fresh: SlotState, jobs: Sequence[Job]
    ) -> None:
        """Open a slot for each job. `fresh` is the state of their sources and has one row for each."""
        self.model, self.search, self.numbers = model, search, list(numbers)
        search.open(jobs)
        self.state = fresh.select(torch.arange(len(jobs), device=search.device).repeat_interleave(search.width))
        self.token_N = torch.full((len(jobs) * search.width,), BOS, device=search.device)

    @property
    def free(self) -> list[int]:
        return [slot for slot, number in enumerate(self.numbers) if number == FREE]

    @property
    def done(self) -> list[int]:
        """Return the slots whose sentence is done and was not taken out yet."""
        done = self.search.done_B.tolist()
        return [slot for slot, number in enumerate(self.numbers) if done[slot] and number != FREE]

    def step(self) -> None:
        """Advance every sentence by one token."""
        logp_NV, state = self.model.step(self.token_N, self.state)
        rows_N, self.token_N = self.search.advance(logp_NV)
        self.state = state if rows_N is None else state.select(rows_N)

    def fill(self, slots: Sequence[int], numbers: Sequence[int], fresh: SlotState, jobs: Sequence[Job]) -> None:
        """Put new sentences into free slots."""
        index_K = torch.tensor(slots, device=self.search.device)
        rows_N = torch.arange(len(slots), device=index_K.device).repeat_interleave(self.search.width)
        self.state = self.state.put(index_K, fresh.select(rows_N))
        self.search.put(slots, jobs)
        self.token_N.view(len(self.numbers), -1)[index_K] = BOS
        for slot, number in zip(slots, numbers, strict=True):
            self.numbers[slot] = number

    def shrink(self) -> None:
        """Give up the free slots."""
        slots = [slot for slot, number in enumerate(self.numbers) if number != FREE]
        index_K = torch.tensor(slots, device=self.search.device)
        self.state = self.state.keep(index_K)
        self.search.keep(slots)
        self.token_N = self.token_N.view(len(self.numbers), -1)[index_K].flatten()
        self.numbers = [self.numbers[slot] for slot in slots]


class StaticSlots(Slots):
    """A fixed number of slots of beam search that are updated in place, all of them free at first.

    On a GPU their step is a CUDA graph.
    """

    search: BeamSearch
    state: Any  # a KVCache, or another state with an indirect cache

    def __init__(
        self, model: StepModel[Any], search: BeamSearch, numbers: Sequence[int], fresh: Any, jobs: Sequence[Job]
    ) -> None:
        super().__init__(model, search, numbers, fresh, jobs)
        search.state = BeamState(*[each.clone() for each in search.state])  # no two may share memory
        self.state = self.state.make_indirect(search.longest + 1)
        self.graph: torch.cuda.CUDAGraph | None = None
        if search.device.type == "cuda":
            side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side_stream):
                for _ in range(WARMUP_STEPS):
                    self.step()
            torch.cuda.current_stream().wait_stream(side_stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()
            self.graph = graph

    def step(self) -> None:
        """Advance every sentence by one token, and write the new values over the old ones."""
        if self.graph:
            self.graph.replay()
            return
        held, held_token_N, held_state = self.search.state, self.token_N, self.state
        super().step()
        state = self.state.reset_finished(self.search.done_B)
        old = (*held, held_token_N, held_state.length_B, held_state.beam_indices_NK)
        new = (*self.search.state, self.token_N, state.length_B, state.beam_indices_NK)
        for tensor, value in zip(old, new, strict=True):
            tensor.copy_(value)
        self.search.state, self.token_N, self.state = held, held_token_N, held_state

    def fetch(self, slots: Sequence[int]) -> Callable[[], Results]:
        """Start to copy the results in these slots to the host; the function returned waits for them."""
        parts = self.search.select(slots)
        flat = torch.cat([part.double().reshape(len(slots), -1) for part in parts], 1)  # one copy; doubles lose nothing
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
        host.copy_(flat, non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if flat.is_cuda else None

        def wait() -> Results:
            if copied:
                copied.synchronize()
            each = torch.split(host, [part[0].numel() for part in parts], 1)
            made = [one.reshape(part.shape).to(part.dtype) for one, part in zip(each, parts, strict=True)]
            return self.search.results(BeamState(*made))

        return wait

    def fill(self, slots: Sequence[int], numbers: Sequence[int], fresh: Any, jobs: Sequence[Job]) -> None:
        """Put new sentences, one row of `fresh` each, into free slots. Attention never reaches the old tokens."""
        index_K = torch.tensor(slots, device=self.search.device)
        self.state.length_B.copy_(self.state.put(index_K, fresh).length_B)
        for held, new in zip(self.search.state, self.search.make_state(jobs), strict=True):
            held.index_copy_(0, index_K, new)
        self.token_N.view(len(self.numbers), -1).index_fill_(0, index_K, BOS)
        for slot, number in zip(slots, numbers, strict=True):
            self.numbers[slot] = number


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
    """Decode the jobs of a queue; several workers may share it. About `rows` of the model run in one step.

    With `fixed_slots`, there are always so many, free or not. Rows are then computed alike in any company on devices
    that round by the shape of a batch.
    """

    def __init__(self, model: StepModel[Any], device: torch.device, rows: int, fixed_slots: int = 0) -> None:
        self.model: Any = model  # `start` of models with source features takes them too
        self.device, self.rows, self.fixed_slots = device, rows, fixed_slots

    @torch.inference_mode()
    def run(
        self,
        queue: JobQueue,
        make_search: SearchFactory,
        results: Results,
        cancelled: threading.Event,
        observe: Observer | None = None,
    ) -> None:
        """Decode until the queue is empty, and store the results of each job under its number."""
        search = make_search(queue.longest, self.device)
        min_slots = self.fixed_slots or -(-MIN_ROWS // search.width)
        numbers = queue.next(self.fixed_slots or max(self.rows // search.width, min_slots))
        if not numbers:  # other workers have taken them all
            return
        numbers += [FREE] * (min_slots - len(numbers))
        slots = Slots(self.model, search, numbers, *self.read_sources(queue, numbers))
        while not cancelled.is_set():
            free, used = slots.free, len(slots.numbers) - len(slots.free)
            if len(free) * REFILL_DIVISOR >= len(slots.numbers):
                if new := queue.next(len(free)):
                    slots.fill(free[: len(new)], new, *self.read_sources(queue, new))
                elif not used:
                    return
                elif used >= min_slots:
                    slots.shrink()
            slots.step()
            slots.state = slots.state.reset_finished(search.done_B)
            if observe:
                observe(search.state)
            if done := slots.done:
                for slot, found in zip(done, search.results(search.select(done)), strict=True):
                    results[slots.numbers[slot]] = found
                    slots.numbers[slot] = FREE

    def read_sources(self, queue: JobQueue, numbers: Sequence[int]) -> tuple[Any, list[Job]]:
        """Return the state of the sources of these jobs, and the jobs; empty ones for free slots, which come last."""
        jobs = [queue.jobs[number] for number in numbers if number != FREE]
        batch = collate_sources(jobs, queue.width, len(numbers)).to(self.device)
        features = [batch.features] if batch.features else []
        fresh = self.model.start(batch.source_BS, batch.source_segment_BS > 0, *features)
        return fresh, [*jobs, *[EMPTY_JOB] * (len(numbers) - len(jobs))]


class GpuScheduler(Scheduler):
    """Run beam search without rules on a GPU, in slots that are made once per shape and kept.

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
    def run(
        self,
        queue: JobQueue,
        make_search: SearchFactory,
        results: Results,
        cancelled: threading.Event,  # noqa: ARG002 - there is one worker, so nobody cancels it
        observe: Observer | None = None,  # noqa: ARG002 - one sentence is observed, and these are many
    ) -> None:
        """Decode until the queue is empty."""
        slots = self.get_pool(queue, make_search)
        prefetcher = Prefetcher(self, queue, len(slots.numbers), max(len(slots.numbers) // self.GROUPS, 1))
        group = prefetcher.next()
        pending: list[int] = []  # jobs whose results are being copied to the host
        wait: Callable[[], Results] = list
        while group or len(slots.free) < len(slots.numbers):
            while group and len(free := slots.free) >= len(group[0]):
                slots.fill(free[: len(group[0])], *group)
                group = prefetcher.next()
            for _ in range(self.STEPS_PER_CHECK):
                slots.step()
            for number, found in zip(pending, wait(), strict=True):  # while the GPU is busy
                results[number] = found
            prefetcher.read()
            done = slots.done
            pending, wait = [slots.numbers[slot] for slot in done], slots.fetch(done) if done else list
            for slot in done:
                slots.numbers[slot] = FREE
        for number, found in zip(pending, wait(), strict=True):
            results[number] = found

    def get_pool(self, queue: JobQueue, make_search: SearchFactory) -> StaticSlots:
        """Return the slots of this shape. New ones may replace others, so that all fit into memory.

        Pools of other settings go first, then the newest: widths come in turn, so the oldest are needed next.
        """
        longest = -(-queue.longest // 64) * 64  # so that there are few shapes to capture
        search = make_search(longest, self.device)
        assert isinstance(search, BeamSearch)
        own = search.settings
        settings = (own.beam, own.nbest, own.length_penalty, own.length_norm, own.stop)
        shape = (queue.width, longest, settings)
        if shape not in self.pools:
            one = self.read_sources(queue, [FREE])[0].make_indirect(longest + 1).nbytes * search.width
            count = max(min(self.rows // search.width, self.share // one), 1)
            while self.pools and one * count + self.held > self.SHARES * self.share:
                others = [key for key in self.pools if key[-1] != settings]
                del self.pools[others[0] if others else next(reversed(self.pools))]
            free = [FREE] * count
            self.pools[shape] = StaticSlots(self.model, search, free, *self.read_sources(queue, free))
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

    def read(self) -> None:
        """Read the next batch if the last one is used up."""
        if not self.numbers and (numbers := self.queue.next(self.many)):
            padded = [*numbers, *[FREE] * (self.many - len(numbers))]
            fresh, _ = self.scheduler.read_sources(self.queue, padded)
            self.fresh, self.numbers, self.handed_out = fresh.make_indirect(0), numbers, 0

    def next(self) -> tuple[list[int], Any, list[Job]] | None:
        """Return the numbers of some jobs, the state of their sources, and the jobs."""
        self.read()
        some, self.numbers = self.numbers[: self.few], self.numbers[self.few :]
        if not some:
            return None
        first, self.handed_out = self.handed_out, self.handed_out + len(some)
        return some, self.fresh.slice_sentences(first, len(some)), [self.queue.jobs[number] for number in some]


@torch.inference_mode()
def run_batch(
    model: StepModel[Any],
    source_BS: Tensor,
    real_BS: Tensor,
    jobs: Sequence[Job],
    make_search: SearchFactory,
    observe: Observer = lambda _: None,
) -> Results:
    """Decode the jobs in one batch from which no sentence is taken: for states that can only be selected."""
    if not any(job.limit for job in jobs):
        return [[] for _ in jobs]
    search = make_search(max(job.limit for job in jobs), source_BS.device)
    slots = Slots(model, search, range(len(jobs)), model.start(source_BS, real_BS), jobs)
    while not bool(search.done_B.all()):  # the only value that the host waits for
        slots.step()
        observe(search.state)
    return search.results(search.state)


def collate_sources(jobs: Sequence[Job], width: int, rows: int) -> Batch:
    """Return a batch of the sources, one per row, padded with empty rows."""
    nothing = np.zeros(0, dtype=np.int64)
    examples = [Example(np.array(job.ids, dtype=np.int64), nothing, i, job.features) for i, job in enumerate(jobs)]
    layout = [[row] for row in range(len(jobs))] + [[]] * (rows - len(jobs))
    return collate_pairs(BatchPlan(layout, Widths(width, 1)), examples)
