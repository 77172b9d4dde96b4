"""Continuous batching of the jobs of many callers, which come at any time: what a server needs.

`LiveScheduler` has one long-lived thread per core, or one for a GPU. Callers submit jobs and wait. A job joins a
running batch at the next step; nothing waits for a batch to become full. Jobs share a batch if their sources have the
same padded width and they are searched in the same way (`LiveQueue`). So the rounding of a result does not depend on
the other jobs, as in `Scheduler`, whose results are the same to the bit.

Every thread advances all of its batches by one step per turn. Each has an equal share of the rows, so a kind of job
with few sentences is never behind one with many. If there are more kinds than MAX_BATCHES, the batches whose waiting
jobs are younger take no more of them, and end once their jobs are done, so that others can begin.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import torch

from dragoman.decoding.continuous_batching import (
    FREE,
    MIN_ROWS,
    JobQueue,
    Observer,
    Scheduler,
    Slots,
    round_to_bucket,
)
from dragoman.decoding.protocol import Results, SearchFactory, SearchJob, SearchResult, StepModel
from dragoman.hardware import release_memory, set_current_gpu

MAX_BATCHES = 8  # batches of a thread
MIN_LENGTH_LIMIT = 128  # length limits are rounded up to this or a greater power of two, so that few kinds occur


class DecodingCounts:
    """What an engine has decoded since it was made, for metrics: the mean size of a batch is `slots / steps`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sentences = 0  # decoded to their end
        self.steps = 0  # of all batches; an engine for whole batches has one per batch
        self.slots = 0  # with a sentence, in all of these steps

    def add(self, *, steps: int = 0, slots: int = 0, sentences: int = 0) -> None:
        """Count steps, their used slots, and finished sentences; these before they are delivered."""
        with self.lock:
            self.steps += steps
            self.slots += slots
            self.sentences += sentences


class Submission:
    """The jobs of one call, and their results as far as they are found."""

    def __init__(self, jobs: Sequence[SearchJob], cancelled: threading.Event, observe: Observer | None = None) -> None:
        self.jobs, self.cancelled, self.observe = jobs, cancelled, observe
        self.results: Results = [[] for _ in jobs]
        self.missing = sum(job.max_tokens > 0 for job in jobs)
        self.error: BaseException | None = None
        self.lock, self.ended = threading.Lock(), threading.Event()
        if not self.missing:
            self.ended.set()

    def deliver(self, index: int, results: list[SearchResult]) -> None:
        with self.lock:
            self.results[index] = results
            self.missing -= 1
            if not self.missing:
                self.ended.set()

    def fail(self, error: BaseException) -> None:
        """End the submission with an error; results that are missing will not come."""
        with self.lock:
            if not self.ended.is_set():
                self.error = error
                self.ended.set()

    def wait(self) -> Results:
        """Return the results of all jobs. Raise CancelledError if `cancelled` is set before they are found."""
        self.ended.wait()
        if self.error:
            raise self.error
        return self.results


LiveEntry = tuple[Submission, int]  # a job that waits or runs: its submission, and its index there


class LiveQueue(JobQueue):
    """The waiting jobs of one kind, oldest first: they may share a batch. `jobs` has those of all kinds by number."""

    def __init__(
        self, jobs: dict[int, SearchJob], key: Hashable, make_search: SearchFactory, width: int, max_length: int
    ) -> None:
        self.jobs, self.key, self.make_search, self.width, self.max_length = jobs, key, make_search, width, max_length
        self.rows = make_search(max_length, torch.device("cpu")).width  # rows of the model per sentence
        self.waiting: deque[int] = deque()  # type: ignore[assignment]
        self.users = 0  # number of threads that have a batch of this kind, or are about to begin one


JoiningJobs = tuple[LiveQueue, list[int]]  # jobs that join the batch of a queue


class LiveScheduler(Scheduler):
    """Decode the jobs of all callers in `threads` threads, with about `rows` rows of the model per step and thread.

    If a step raises an exception, the sentences of its batch are decoded again one by one, so that only the callers
    whose sentences cannot be decoded get the exception.
    """

    def __init__(
        self, model: StepModel[Any], device: torch.device, rows: int, threads: int, fixed_slots: int = 0
    ) -> None:
        super().__init__(model, device, rows, fixed_slots)
        self.condition = threading.Condition()  # guards the fields below
        self.queues: dict[Hashable, LiveQueue] = {}
        self.jobs: dict[int, SearchJob] = {}
        self.entries: dict[int, LiveEntry] = {}
        self.active: set[Submission] = set()
        self.numbers = itertools.count()
        self.closed = False
        self.counts = DecodingCounts()
        self.threads = [
            threading.Thread(target=self.work, name=f"decoding-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self.threads:
            thread.start()

    def submit(
        self,
        jobs: Sequence[SearchJob],
        make_search: SearchFactory,
        cancelled: threading.Event,
        *,
        is_plain_beam: bool = False,
        observe: Observer | None = None,
    ) -> Submission:
        """Queue jobs and return at once.

        `is_plain_beam`: jobs without constraints are searched by their own kind of beam search, in their own batches.

        `observe` is called, in a thread of the scheduler, with the state of each sentence after each of its steps.
        """
        submission = Submission(jobs, cancelled, observe)
        search_key: Hashable = make_search
        if isinstance(make_search, partial):
            search_key = (make_search.func, make_search.args, tuple(sorted(make_search.keywords.items())))
        with self.condition:
            if self.closed:
                raise RuntimeError("the scheduler is closed")
            for index, job in enumerate(jobs):
                if not job.max_tokens:
                    continue
                width, limit = round_to_bucket(len(job.ids) + 1), MIN_LENGTH_LIMIT
                while limit < job.max_tokens:
                    limit *= 2
                # What jobs must have in common to share a batch.
                key = (width, limit, is_plain_beam and not job.constraints.is_constrained, search_key)
                if key not in self.queues:
                    self.queues[key] = LiveQueue(self.jobs, key, make_search, width, limit)
                number = next(self.numbers)
                self.jobs[number], self.entries[number] = job, (submission, index)
                self.queues[key].waiting.append(number)
            if submission.missing:
                self.active.add(submission)
                self.condition.notify_all()
        return submission

    def close(self) -> None:
        """End the threads as soon as all submitted jobs are decoded, and wait for them."""
        with self.condition:
            self.closed = True
            self.condition.notify_all()
        for thread in self.threads:
            thread.join()

    @torch.inference_mode()
    def work(self) -> None:
        """Decode until the scheduler is closed. Each turn starts new jobs and advances each batch by one step."""
        if self.device.type == "cuda":
            set_current_gpu(self.device)
        else:
            torch.set_num_threads(1)
        batches: dict[LiveQueue, Slots] = {}
        while True:
            with self.condition:
                self.drop_ended(batches)
                while not batches and not any(queue.waiting for queue in self.queues.values()):
                    if self.closed:
                        return
                    self.condition.wait()
                joining = self.choose_jobs(batches)
            for queue, numbers in joining:
                try:
                    self.start(batches, queue, numbers)
                except Exception as error:
                    self.decode_again(batches, queue, numbers, error)
            for queue in list(batches):
                try:
                    self.advance(batches, queue)
                except Exception as error:
                    self.decode_again(batches, queue, (), error)
            if not batches and self.device.type == "cpu":
                release_memory()

    def drop_ended(self, batches: dict[LiveQueue, Slots]) -> None:
        """End the submissions that are cancelled, and free what submissions that have ended still hold."""
        for submission in self.active:
            if submission.cancelled.is_set():
                submission.fail(CancelledError())
        ended_early = any(submission.error for submission in self.active)
        self.active = {submission for submission in self.active if not submission.ended.is_set()}
        if ended_early:
            for queue in self.queues.values():
                ended = {number for number in queue.waiting if self.entries[number][0].ended.is_set()}
                queue.waiting = deque(number for number in queue.waiting if number not in ended)
                self.forget(ended)
        for queue, slots in list(batches.items()):
            for slot, number in enumerate(slots.job_numbers):
                if number != FREE and self.entries[number][0].ended.is_set():
                    slots.job_numbers[slot] = FREE
                    self.forget([number])
            if len(slots.free) == len(slots.job_numbers) and not queue.waiting:
                self.end_batch(batches, queue)
        for queue in [queue for queue in self.queues.values() if not queue.waiting and not queue.users]:
            del self.queues[queue.key]

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            del self.jobs[number], self.entries[number]

    def end_batch(self, batches: dict[LiveQueue, Slots], queue: LiveQueue) -> None:
        """End the batch of a queue, which this thread has or was about to begin."""
        batches.pop(queue, None)
        queue.users -= 1

    def choose_jobs(self, batches: dict[LiveQueue, Slots]) -> list[JoiningJobs]:
        """Take the waiting jobs that join the batches of this thread, or begin new ones.

        A row is one hypothesis in the batch of the model, a slot holds one sentence, which has `queue.rows`
        rows. A thread takes its part of the waiting jobs of a queue, so that the other threads get some as well. A
        batch that may not take the jobs that wait for it ends once it has none, or older jobs would never get a batch.
        """
        waiting = sorted((q for q in self.queues.values() if q.waiting), key=lambda queue: queue.waiting[0])
        new = [queue for queue in waiting if queue not in batches]
        free_batches = max(MAX_BATCHES - len(batches), 0)
        oldest_left_out = new[free_batches].waiting[0] if len(new) > free_batches else math.inf
        share = self.rows // max(len(batches) + min(len(new), free_batches), 1)
        joining: list[JoiningJobs] = []
        for queue in waiting:
            slots = batches.get(queue)
            used = len(slots.job_numbers) - len(slots.free) if slots else 0
            if (queue in new[free_batches:]) if slots is None else queue.waiting[0] > oldest_left_out:
                if slots and not used:
                    self.end_batch(batches, queue)
                continue
            maximum = self.fixed_slots or max(share // queue.rows, math.ceil(MIN_ROWS / queue.rows))
            count = min(maximum - used, math.ceil(len(queue.waiting) / len(self.threads)))
            if count > 0:
                joining.append((queue, [queue.waiting.popleft() for _ in range(count)]))
                if slots is None:
                    queue.users += 1  # before the lock is released: without waiting jobs and users, it would be dropped
        return joining

    def start(self, batches: dict[LiveQueue, Slots], queue: LiveQueue, numbers: list[int]) -> None:
        """Start jobs in free slots of the batch of their queue, or in added ones, or in a new batch."""
        slots = batches.get(queue)
        if slots is None:
            batches[queue] = self.make_slots(queue, numbers)
            return
        if (missing := len(numbers) - len(slots.free)) > 0:
            slots.resize(range(len(slots.job_numbers)), missing)
        rows = max(self.fixed_slots, len(numbers))
        fresh, jobs = self.encode_sources(queue, [*numbers, *[FREE] * (rows - len(numbers))])
        if rows > len(numbers):
            fresh = fresh.keep_sentences(torch.arange(len(numbers), device=self.device))
        slots.fill(slots.free[: len(numbers)], numbers, fresh, jobs[: len(numbers)])

    def make_slots(self, queue: LiveQueue, numbers: Sequence[int]) -> Slots:
        search = queue.make_search(queue.max_length, self.device)
        count = max(self.fixed_slots, math.ceil(MIN_ROWS / queue.rows), len(numbers))
        padded = [*numbers, *[FREE] * (count - len(numbers))]
        return Slots(self.model, search, padded, *self.encode_sources(queue, padded))

    def advance(self, batches: dict[LiveQueue, Slots], queue: LiveQueue) -> None:
        """Advance a batch by one step, deliver what is finished, and remove free slots once they are a third."""
        slots = batches[queue]
        slots.step()
        slots.state = slots.state.reset_finished(slots.search.done_B)
        for slot, number in enumerate(slots.job_numbers):
            if number != FREE and (submission := self.entries[number][0]).observe:
                try:
                    submission.observe(slots.search.select([slot]))
                except Exception as error:  # such as StreamClosed: the caller has stopped reading
                    submission.fail(error)
        done = slots.done
        self.counts.add(steps=1, slots=len(slots.job_numbers) - len(slots.free), sentences=len(done))
        if done:
            for slot, results in zip(done, slots.search.results(slots.search.select(done)), strict=True):
                submission, index = self.entries[slots.job_numbers[slot]]
                submission.deliver(index, results)
                self.forget([slots.job_numbers[slot]])
                slots.job_numbers[slot] = FREE
        count, free = len(slots.job_numbers), len(slots.free)
        used, minimum = count - free, math.ceil(MIN_ROWS / queue.rows)
        if not queue.waiting and used == 0:
            with self.condition:
                self.end_batch(batches, queue)
        elif not self.fixed_slots and not queue.waiting and 3 * free >= count and used >= minimum:
            slots.shrink()

    def decode_again(
        self, batches: dict[LiveQueue, Slots], queue: LiveQueue, numbers: Sequence[int], error: Exception
    ) -> None:
        """Decode the sentences of a batch that failed one by one; those that fail again end their submission.

        `numbers` are jobs that were to join the batch.
        """
        slots = batches.get(queue)
        running = {number for number in slots.job_numbers if number != FREE} if slots else set()
        with self.condition:
            self.end_batch(batches, queue)
        del slots
        all_numbers = sorted({*running, *numbers} & self.entries.keys())
        for number in all_numbers:
            submission, index = self.entries[number]
            if not submission.ended.is_set() and not submission.cancelled.is_set():
                try:
                    if len(all_numbers) == 1:
                        raise error
                    submission.deliver(index, self.decode_singly(queue, number))
                except Exception as failure:
                    submission.fail(failure.with_traceback(None))  # a traceback would keep the tensors of its frames
        with self.condition:
            self.forget(all_numbers)

    def decode_singly(self, queue: LiveQueue, number: int) -> list[SearchResult]:
        slots = self.make_slots(queue, [number])
        while not slots.done:
            slots.step()
            self.counts.add(steps=1, slots=1)
        self.counts.add(sentences=1)
        return slots.search.results(slots.search.select([0]))[0]
