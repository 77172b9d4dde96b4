"""Continuous batching: the loops that run all searches.

A finished sentence leaves its slot and a waiting sentence takes the slot, so a batch never waits for its slowest
sentence. Results do not depend on which sentences are in the same batch. There are two schedulers:

    Scheduler      runs any search in `Slots`, which are refilled as soon as enough of them are free. When no job is
                   waiting, free slots are removed
    GpuScheduler   runs beam search in `StaticSlots`, whose number and shape are fixed. One step of model and search is
                   captured as a CUDA graph and replayed, because launching its few hundred small kernels takes longer
                   than running them. A graph always uses the same memory, so these slots are updated in place

`run_batch` decodes one batch without replacing finished sentences.

Shapes   B slots   K selected slots   W beams per slot   N = B * W rows of the model   M = K * W   S source length
         V vocabulary   (`beam_indices_NK`: K positions of the cache)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from dragoman.data.features import FEATURES
from dragoman.decoding.beam import BeamSearch, BeamState
from dragoman.decoding.protocol import Results, Search, SearchFactory, SearchJob, SearchState, StepModel, copy_to_device
from dragoman.hardware import total_memory
from dragoman.types import BOS, EOS, PAD

WARMUP_STEPS = 3  # steps before a CUDA graph is captured, in which libraries choose their algorithms
REFILL_DIVISOR = 16  # slots are refilled or removed once 1/16 of them are free
MIN_ROWS = 4  # minimum number of rows of the model, since matrix products with fewer rows round differently
FREE = -1  # the job number of a free slot; other job numbers are indices in the list of all jobs
EMPTY_JOB = SearchJob([], 0)  # the job of a free slot
Observer = Callable[[Any], None]  # called with the state of a search after every step


class SlotState(SearchState, Protocol):
    """A decoder state in which sentences can be replaced and removed. All sentences have the same number of rows."""

    def keep_sentences(self, sentences_K: Tensor) -> Self:
        """Return the state of these sentences, in this order."""
        ...

    def replace_sentences(self, sentences_K: Tensor, fresh: Self) -> Self:
        """Replace these sentences by those of `fresh`. The old state must not be used afterwards."""
        ...

    def reset_finished(self, done_B: Tensor) -> Self:
        """Set the length of finished sentences to 0, so that they do not make the cache grow."""
        ...


class Slots:
    """Sentences that are decoded together, one per slot. `job_numbers` has the index of each slot's job, or FREE."""

    def __init__(
        self, model: StepModel[Any], search: Search, numbers: Sequence[int], fresh: SlotState, jobs: Sequence[SearchJob]
    ) -> None:
        """Make a slot for each job. `fresh` is the decoder state before the first token, with one row per job."""
        self.model, self.search, self.job_numbers = model, search, list(numbers)
        search.start_jobs(jobs)
        self.state = fresh.select(torch.arange(len(jobs), device=search.device).repeat_interleave(search.width))
        self.token_N = torch.full((len(jobs) * search.width,), BOS, device=search.device)

    @property
    def free(self) -> list[int]:
        return [slot for slot, number in enumerate(self.job_numbers) if number == FREE]

    @property
    def done(self) -> list[int]:
        """The slots whose sentence is finished and has not been removed yet."""
        done = self.search.done_B.tolist()
        return [slot for slot, number in enumerate(self.job_numbers) if done[slot] and number != FREE]

    def step(self) -> None:
        logp_NV, state = self.model.step(self.token_N, self.state)
        rows_N, self.token_N = self.search.advance(logp_NV)
        self.state = state if rows_N is None else state.select(rows_N)

    def fill(self, slots: Sequence[int], numbers: Sequence[int], fresh: SlotState, jobs: Sequence[SearchJob]) -> None:
        """Start new jobs in free slots. `fresh` is their state before the first token, with one row per job."""
        index_K = copy_to_device(slots, self.search.device)
        fresh_row_M = torch.arange(len(slots), device=index_K.device).repeat_interleave(self.search.width)
        self.state = self.state.replace_sentences(index_K, fresh.select(fresh_row_M))
        self.search.replace_jobs(slots, jobs)
        self.token_N.view(len(self.job_numbers), -1)[index_K] = BOS
        for slot, number in zip(slots, numbers, strict=True):
            self.job_numbers[slot] = number

    def shrink(self) -> None:
        self.resize([slot for slot, number in enumerate(self.job_numbers) if number != FREE])

    def resize(self, slots: Sequence[int], free: int = 0) -> None:
        """Keep these slots, in this order, and add free ones. Until these are filled, they repeat the first slot."""
        rows = [*slots, *[slots[0]] * free]
        index_K = copy_to_device(rows, self.search.device)
        self.state = self.state.keep_sentences(index_K)
        self.search.keep_slots(rows)
        self.token_N = self.token_N.view(len(self.job_numbers), -1)[index_K].flatten()
        self.job_numbers = [*(self.job_numbers[slot] for slot in slots), *[FREE] * free]


class StaticSlots(Slots):
    """A fixed number of beam-search slots whose tensors are updated in place. On a GPU, `step` replays a CUDA graph."""

    search: BeamSearch
    state: Any  # an indirect KVCache: reordering beams changes `beam_indices_NK`, not the rows of keys and values

    def __init__(
        self, model: StepModel[Any], search: BeamSearch, numbers: Sequence[int], fresh: Any, jobs: Sequence[SearchJob]
    ) -> None:
        super().__init__(model, search, numbers, fresh, jobs)
        search.state = BeamState(*[tensor.clone() for tensor in search.state])  # no two tensors may share memory
        self.initial = search.make_state([SearchJob([], 1)])  # the state of a new sentence; `fill` sets `limit_B`
        self.state = self.state.make_indirect(capacity=search.max_length + 1)
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
        """Advance every sentence by one token and copy the new values into the old tensors.

        Keys and values are not copied: the model writes them into the cache in place.
        """
        if self.graph:
            self.graph.replay()
            return
        static_search, static_token_N, static_cache = self.search.state, self.token_N, self.state
        super().step()
        cache = self.state.reset_finished(self.search.done_B)
        old = (*static_search, static_token_N, static_cache.length_B, static_cache.beam_indices_NK)
        new = (*self.search.state, self.token_N, cache.length_B, cache.beam_indices_NK)
        for tensor, value in zip(old, new, strict=True):
            tensor.copy_(value)
        self.search.state, self.token_N, self.state = static_search, static_token_N, static_cache

    def fetch(self, slots: Sequence[int]) -> Callable[[], Results]:
        """Start copying the results of these slots to the host; return a function that waits for and returns them."""
        state = self.search.select(slots)
        # All tensors are joined to one and copied at once. float64 represents ids and float32 values exactly.
        joined = torch.cat([field.double().reshape(len(slots), -1) for field in state], 1)
        on_host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=joined.is_cuda)
        on_host.copy_(joined, non_blocking=True)
        end_of_copy = torch.cuda.current_stream().record_event() if joined.is_cuda else None

        def wait() -> Results:
            if end_of_copy:
                end_of_copy.synchronize()
            parts = torch.split(on_host, [field[0].numel() for field in state], 1)
            fields = [part.reshape(field.shape).to(field.dtype) for part, field in zip(parts, state, strict=True)]
            return self.search.results(BeamState(*fields))

        return wait

    def fill(self, slots: Sequence[int], numbers: Sequence[int], fresh: Any, jobs: Sequence[SearchJob]) -> None:
        """Start new jobs in free slots. `fresh` is their state before the first token, with one row per job.

        `replace_sentences` replaces the encoded sources, which beams share, in place. Only `length_B` is a new tensor.
        """
        index_K, limit_K = copy_to_device([slots, [job.max_tokens for job in jobs]], self.search.device)
        self.state.length_B.copy_(self.state.replace_sentences(index_K, fresh).length_B)
        for tensor, initial in zip(self.search.state, self.initial, strict=True):
            tensor.index_copy_(0, index_K, initial.expand(len(slots), *initial.shape[1:]))
        self.search.state.limit_B.index_copy_(0, index_K, limit_K)
        self.token_N.view(len(self.job_numbers), -1).index_fill_(0, index_K, BOS)
        for slot, number in zip(slots, numbers, strict=True):
            self.job_numbers[slot] = number


class JobQueue:
    """A queue of the jobs at the indices `numbers` of the list `jobs`, longest source first.

    All sources are padded to `width`. Several workers may take jobs from a queue.
    """

    def __init__(self, jobs: Sequence[SearchJob], numbers: Sequence[int]) -> None:
        self.jobs: Sequence[SearchJob] | Mapping[int, SearchJob] = jobs
        self.lock = threading.Lock()
        self.waiting = sorted(numbers, key=lambda number: len(jobs[number].ids))  # the next job is the last
        self.width = round_to_bucket(max(len(jobs[number].ids) for number in numbers) + 1)  # 1: EOS
        self.max_length = max(jobs[number].max_tokens for number in numbers)  # maximum target length

    def next(self, count: int) -> list[int]:
        """Remove and return the numbers of the next jobs."""
        with self.lock:
            numbers = self.waiting[-count:][::-1]
            del self.waiting[-count:]
            return numbers


class Scheduler:
    """Decode the jobs of a queue, with about `rows` rows of the model per step.

    If `fixed_slots` is above 0, the number of slots never changes. Then the result of a sentence does not depend on the
    other sentences, even on devices whose rounding depends on the shape of a batch.
    """

    def __init__(self, model: StepModel[Any], device: torch.device, rows: int, fixed_slots: int = 0) -> None:
        self.model: Any = model  # Any: `start` of models with source features has one more argument
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
        """Decode until the queue is empty or `cancelled` is set; store the results of job n in `results[n]`."""
        search = make_search(queue.max_length, self.device)
        min_slots = self.fixed_slots or math.ceil(MIN_ROWS / search.width)
        numbers = queue.next(self.fixed_slots or max(self.rows // search.width, min_slots))
        if not numbers:  # other workers have taken all jobs
            return
        numbers += [FREE] * (min_slots - len(numbers))
        slots = Slots(self.model, search, numbers, *self.encode_sources(queue, numbers))
        while not cancelled.is_set():
            free, used = slots.free, len(slots.job_numbers) - len(slots.free)
            if len(free) * REFILL_DIVISOR >= len(slots.job_numbers):
                if new := queue.next(len(free)):
                    slots.fill(free[: len(new)], new, *self.encode_sources(queue, new))
                elif not used:
                    return
                elif used >= min_slots:
                    slots.shrink()
            slots.step()
            slots.state = slots.state.reset_finished(search.done_B)
            if observe:
                observe(search.state)
            if done := slots.done:
                for slot, slot_results in zip(done, search.results(search.select(done)), strict=True):
                    results[slots.job_numbers[slot]] = slot_results
                    slots.job_numbers[slot] = FREE

    def encode_sources(self, queue: JobQueue, numbers: Sequence[int]) -> tuple[Any, list[SearchJob]]:
        """Encode the sources of these jobs; return the state before the first token, and the jobs.

        FREE numbers must come last. Their job is EMPTY_JOB, and their source is empty.
        """
        jobs = [queue.jobs[number] for number in numbers if number != FREE]
        source_BS, real_BS, features = collate_sources(jobs, queue.width, len(numbers))
        on_device = {name: tensor.to(self.device, non_blocking=True) for name, tensor in features.items()}
        sources = [tensor.to(self.device, non_blocking=True) for tensor in (source_BS, real_BS)]
        fresh = self.model.start(*sources, *([on_device] if features else []))
        return fresh, [*jobs, *[EMPTY_JOB] * (len(numbers) - len(jobs))]


class GpuScheduler(Scheduler):
    """Run beam search without decoding constraints on a GPU.

    There is a pool of slots, with a CUDA graph, for each combination of shapes and search settings. Pools are reused.
    Sources are encoded in large batches while earlier steps run, so that the GPU does not wait for the host.
    """

    STEPS_PER_CHECK = 4  # steps between two checks for finished sentences
    GROUPS = 8  # slots are refilled in groups: once 1/8 of all slots are free
    POOL_DIVISOR, MAX_POOLS = 32, 4  # a pool may use 1/32 of the GPU's memory for keys and values, all pools 4/32

    def __init__(self, model: StepModel[Any], device: torch.device, rows: int) -> None:
        super().__init__(model, device, rows)
        self.pools: dict[tuple[Any, ...], StaticSlots] = {}
        self.pool_bytes = total_memory(device) // self.POOL_DIVISOR

    @torch.inference_mode()
    def run(
        self,
        queue: JobQueue,
        make_search: SearchFactory,
        results: Results,
        cancelled: threading.Event,  # noqa: ARG002 - there is only one worker, which is never cancelled
        observe: Observer | None = None,  # noqa: ARG002 - only single sentences are observed, by Scheduler
    ) -> None:
        """Decode until the queue is empty; store the results of job n in `results[n]`."""
        slots = self.get_pool(queue, make_search)
        prefetcher = Prefetcher(self, queue, len(slots.job_numbers), max(len(slots.job_numbers) // self.GROUPS, 1))
        group = prefetcher.next()
        pending: list[int] = []  # jobs whose results are being copied to the host
        wait: Callable[[], Results] = list  # waits for and returns these results; `list` returns none
        while group or len(slots.free) < len(slots.job_numbers):
            while group and len(free := slots.free) >= len(group[0]):
                slots.fill(free[: len(group[0])], *group)
                group = prefetcher.next()
            for _ in range(self.STEPS_PER_CHECK):
                slots.step()
            for number, job_results in zip(pending, wait(), strict=True):  # while the GPU runs the steps launched above
                results[number] = job_results
            prefetcher.encode_batch()
            done = slots.done
            pending, wait = [slots.job_numbers[slot] for slot in done], slots.fetch(done) if done else list
            for slot in done:
                slots.job_numbers[slot] = FREE
        for number, job_results in zip(pending, wait(), strict=True):
            results[number] = job_results

    def get_pool(self, queue: JobQueue, make_search: SearchFactory) -> StaticSlots:
        """Return the pool of slots for the shapes and settings of a search. If memory is short, other pools are freed.

        Pools with other settings are freed first, then the newest: source widths are decoded one by one, always in the
        same order, so the oldest pool is needed next.
        """
        max_length = math.ceil(queue.max_length / 64) * 64  # rounded up, so that few shapes occur
        search = make_search(max_length, self.device)
        assert isinstance(search, BeamSearch)
        options = search.settings
        names = ("beam", "nbest", "length_penalty", "length_norm", "stop", "finish")
        settings = tuple(getattr(options, name) for name in names)
        key = (queue.width, max_length, settings)
        if key not in self.pools:
            cache = self.encode_sources(queue, [FREE])[0].make_indirect(capacity=max_length + 1)  # of one row
            slot_bytes = cache.nbytes * search.width
            count = max(min(self.rows // search.width, self.pool_bytes // slot_bytes), 1)
            while self.pools and slot_bytes * count + self.used_bytes > self.MAX_POOLS * self.pool_bytes:
                others = [other for other in self.pools if other[-1] != settings]
                del self.pools[others[0] if others else next(reversed(self.pools))]
            free = [FREE] * count
            self.pools[key] = StaticSlots(self.model, search, free, *self.encode_sources(queue, free))
        return self.pools[key]

    @property
    def used_bytes(self) -> int:
        return sum(slots.state.nbytes for slots in self.pools.values())


class Prefetcher:
    """Encode the sources of a queue in batches of `batch_size`, and return them in groups of `group_size`."""

    def __init__(self, scheduler: Scheduler, queue: JobQueue, batch_size: int, group_size: int) -> None:
        self.scheduler, self.queue, self.batch_size, self.group_size = scheduler, queue, batch_size, group_size
        self.numbers: list[int] = []  # jobs that are encoded and not yet returned
        self.returned = 0  # number of sentences of the current batch that were returned
        self.fresh: Any = None  # the decoder state of the current batch before the first token

    def encode_batch(self) -> None:
        """Encode the next batch if all sentences of the current one were returned."""
        if not self.numbers and (numbers := self.queue.next(self.batch_size)):
            padded = [*numbers, *[FREE] * (self.batch_size - len(numbers))]
            fresh, _ = self.scheduler.encode_sources(self.queue, padded)
            self.fresh = fresh.make_indirect(capacity=0)  # `fill` copies only the encoded sources
            self.numbers, self.returned = numbers, 0

    def next(self) -> tuple[list[int], Any, list[SearchJob]] | None:
        """Return the job numbers of the next group, their initial state, and the jobs, or None at the end."""
        self.encode_batch()
        group, self.numbers = self.numbers[: self.group_size], self.numbers[self.group_size :]
        if not group:
            return None
        first, self.returned = self.returned, self.returned + len(group)
        return group, self.fresh.slice_sentences(first, len(group)), [self.queue.jobs[number] for number in group]


@torch.inference_mode()
def run_batch(
    model: StepModel[Any],
    source_BS: Tensor,
    real_BS: Tensor,
    jobs: Sequence[SearchJob],
    make_search: SearchFactory,
    observe: Observer = lambda _: None,
) -> Results:
    """Decode all jobs in one batch. Finished sentences keep their slots, so `SearchState` suffices, not `SlotState`."""
    if not any(job.max_tokens for job in jobs):
        return [[] for _ in jobs]
    search = make_search(max(job.max_tokens for job in jobs), source_BS.device)
    slots = Slots(model, search, range(len(jobs)), model.start(source_BS, real_BS), jobs)
    while not bool(search.done_B.all()):  # the only synchronization with the device
        slots.step()
        observe(search.state)
    return search.results(search.state)


def round_to_bucket(length: int) -> int:
    """Return the smallest of 16, 32, 64, 128, ... that is at least `length`.

    Sources of the same bucket are padded to this width. So the padded width of a sentence, and thus the rounding of its
    scores, does not depend on the other sentences.
    """
    width = 16
    while width < length:
        width *= 2
    return width


def collate_sources(jobs: Sequence[SearchJob], width: int, rows: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Collate sources, each followed by EOS, one per row, and add empty rows until there are `rows`.

    Return source_BS, real_BS, which is False at padding, and the features of the source tokens by name.
    """
    length_B = np.array([len(job.ids) + 1 for job in jobs] + [0] * (rows - len(jobs)))
    real_BS = np.arange(width) < length_B[:, None]
    source_BS = np.full(real_BS.shape, PAD, dtype=np.int64)
    source_BS[real_BS] = [token for job in jobs for token in (*job.ids, EOS)]
    features: dict[str, Tensor] = {}
    for name in jobs[0].features if jobs else ():
        values, row_N, slot_N = [job.features[name] for job in jobs], np.arange(len(jobs)), np.flatnonzero(real_BS)
        features |= FEATURES[name].collate(values, example_rows=row_N, slot_N=slot_N, shape=real_BS.shape)
    return torch.from_numpy(source_BS), torch.from_numpy(real_BS), features
