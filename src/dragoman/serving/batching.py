"""Engines that many requests share: they decode sentences of different requests together.

A request translates with the ordinary pipeline in a thread of its own, by a translator whose engine is bound to the
request (`SharedEngine.bind`). So its text equals that of `dragoman translate`. The engine hands the sentences to
threads that all requests share, and blocks until they are decoded, or until the request is cancelled.

    SharedTorchEngine  continuous batching in PyTorch (decoding/live_batching.py)
    SharedBatchEngine  for engines that decode whole batches, such as CTranslate2: as soon as a batch is decoded, the
                       next one has all sentences that wait, up to a limit
    SharedEngine       no batching: each request decodes its own sentences, one request per thread at a time

There is no waiting for a batch to become full in any of them. With SharedBatchEngine, small requests have no threads of
their own: one thread translates all that wait (text_batches.py). What requests compute apart from searches, such as
alignments, also runs for as many requests at a time as there are threads that decode, each with one thread of PyTorch.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from dragoman.decoding.continuous_batching import Observer
from dragoman.decoding.live_batching import DecodingCounts, LiveScheduler, Submission
from dragoman.decoding.methods import SearchSettings
from dragoman.decoding.protocol import IndexedResults, Results, SearchFactory, SearchJob
from dragoman.hardware import BATCH_ROWS
from dragoman.inference.engines.base import Engine
from dragoman.inference.engines.torch import TorchEngine, choose_rows, choose_threads
from dragoman.inference.translator import Translator
from dragoman.serving.errors import RequestCancelled

ResultT = TypeVar("ResultT")
MAX_BATCH_ROWS = 64  # sentences of a batch of SharedBatchEngine
MIN_OWN_ROWS = 8  # sentences of a call that gets batches of its own, since larger ones are hardly faster
MAX_BATCH_TOKENS = 2048  # of its sources, padding included


class SharedEngine:
    """An engine without batching. `engine` is None if the translator has a decoder of its own."""

    scheduler: LiveScheduler | None = None  # batches the sentences of PyTorch engines

    def __init__(self, engine: Engine | None, threads: int) -> None:
        self.engine = engine
        self.counts = DecodingCounts()
        self.pool = ThreadPoolExecutor(
            threads, thread_name_prefix="model", initializer=torch.set_num_threads, initargs=(1,)
        )

    def bind(self, cancelled: threading.Event) -> Engine:
        """Return the engine for one request, which raises RequestCancelled once `cancelled` is set."""
        if isinstance(self.engine, TorchEngine):
            return BoundTorchEngine(self, self.engine, cancelled)
        return BoundEngine(self, cancelled)

    def call(self, work: Callable[[], ResultT], cancelled: threading.Event) -> ResultT:
        """Return the result of work that uses the model, once one of the threads is free."""

        def run() -> ResultT:
            if cancelled.is_set():
                raise RequestCancelled
            return work()

        return self.pool.submit(run).result()

    def decode(self, jobs: Sequence[SearchJob], search: SearchSettings, cancelled: threading.Event) -> Results:
        """Return the results of the jobs of a request; BoundTorchEngine does that for PyTorch engines."""
        assert self.engine
        engine = self.engine
        results = self.call(lambda: engine.search(jobs, search), cancelled)
        self.counts.add(steps=1, slots=len(jobs), sentences=len(jobs))
        return results

    def close(self) -> None:
        """End the threads. No request may use the engine any more."""
        self.pool.shutdown()


class SharedTorchEngine(SharedEngine):
    """A PyTorch engine that batches the sentences of all requests continuously.

    On a GPU the number of slots is fixed, because rounding depends on the shape of a batch.
    """

    engine: TorchEngine
    scheduler: LiveScheduler

    def __init__(self, engine: TorchEngine, threads: int) -> None:
        super().__init__(engine, threads)
        rows, on_cpu = choose_rows(engine.model, engine.device), engine.device.type == "cpu"
        slots = 0 if on_cpu else BATCH_ROWS[engine.device.type]
        self.scheduler = LiveScheduler(engine.model, engine.device, rows, threads, slots)
        self.counts = self.scheduler.counts

    def close(self) -> None:
        self.scheduler.close()
        super().close()


class SharedBatchEngine(SharedEngine):
    """An engine for whole batches that has threads of its own, such as CTranslate2.

    Decoding threads each take what waits whenever their last batch is decoded. Calls with enough jobs for batches of
    their own go to the engine at once.
    """

    engine: Engine

    def __init__(self, engine: Engine, threads: int) -> None:
        super().__init__(engine, threads)
        self.condition = threading.Condition()  # guards the fields below
        self.waiting: dict[Hashable, deque[tuple[Submission, int]]] = {}  # oldest first, by what may share a batch
        self.submissions: set[Submission] = set()  # of those that wait for their results
        self.idle, self.closed = 0, False
        # One more than the workers of the engine, which have its batch while another thread delivers results.
        self.threads = [
            threading.Thread(target=self.decode_batches, name=f"decoding-{number}", daemon=True)
            for number in range(threads + 1)
        ]
        for thread in self.threads:
            thread.start()

    def decode(self, jobs: Sequence[SearchJob], search: SearchSettings, cancelled: threading.Event) -> Results:
        if len(jobs) >= MIN_OWN_ROWS:
            return self.decode_alone(jobs, search, cancelled)
        submission = Submission(jobs, cancelled)
        with self.condition:
            if self.closed:
                raise RuntimeError("the engine is closed")
            for index, job in enumerate(jobs):
                if job.max_tokens > 0:
                    key = (search, job.constraints.is_constrained)  # engines may refuse constraints
                    self.waiting.setdefault(key, deque()).append((submission, index))
            self.submissions.add(submission)
            self.condition.notify(len(jobs))
        try:
            return submission.wait()
        finally:
            with self.condition:
                self.submissions.discard(submission)

    def decode_alone(self, jobs: Sequence[SearchJob], search: SearchSettings, cancelled: threading.Event) -> Results:
        """Decode jobs in batches that no other request shares."""
        found: Results = [[] for _ in jobs]
        self.counts.add(steps=math.ceil(len(jobs) / MAX_BATCH_ROWS), slots=len(jobs))
        for index, results in self.engine.iter_results(jobs, search):
            if cancelled.is_set():
                raise RequestCancelled
            found[index] = results
        self.counts.add(sentences=len(jobs))
        return found

    def decode_batches(self) -> None:
        """Decode batches until the engine is closed."""
        while True:
            with self.condition:
                self.idle += 1
                while not self.waiting:
                    if self.closed:
                        return
                    self.condition.wait()
                self.idle -= 1
                search, batch = self.take_batch()
            self.decode_batch(search, batch)

    def take_batch(self) -> tuple[SearchSettings, list[tuple[Submission, int]]]:
        """Remove and return the oldest job and others with the same settings; leave their part to idle threads.

        The queue that is left goes to the end, so that every kind of job gets its turn. Cancelled requests end; their
        jobs stay in the queues until they are the oldest, since looking at all jobs would take longer than a batch. So
        there may be no job left.
        """
        for submission in self.submissions:
            if submission.cancelled.is_set():
                submission.fail(CancelledError())
        key = next(iter(self.waiting))
        queue = self.waiting.pop(key)
        assert isinstance(key, tuple)
        limit, longest = min(math.ceil(len(queue) / (1 + self.idle)), MAX_BATCH_ROWS), 0
        batch: list[tuple[Submission, int]] = []
        while queue and len(batch) < limit:
            submission, index = queue[0]
            if submission.ended.is_set():
                queue.popleft()
                continue
            length = max(longest, len(submission.jobs[index].ids) + 1)
            if batch and length * (len(batch) + 1) > MAX_BATCH_TOKENS:
                break
            batch.append(queue.popleft())
            longest = length
        if queue:
            self.waiting[key] = queue
        return key[0], batch

    def decode_batch(self, search: SearchSettings, batch: list[tuple[Submission, int]]) -> None:
        """Decode a batch and deliver each result as it comes. If that fails, decode the sentences one by one."""
        missing = dict(enumerate(batch))
        self.counts.add(steps=1, slots=len(batch))
        try:
            for number, results in self.engine.iter_results([s.jobs[index] for s, index in batch], search):
                submission, index = missing.pop(number)
                self.counts.add(sentences=1)
                submission.deliver(index, results)
        except Exception as error:
            if len(batch) == 1:
                batch[0][0].fail(error.with_traceback(None))
                return
            for entry in missing.values():
                self.decode_batch(search, [entry])

    def close(self) -> None:
        with self.condition:
            self.closed = True
            self.condition.notify_all()
        for thread in self.threads:
            thread.join()
        super().close()


class RequestBound:
    """What the engines of one request have in common: threads that are shared, and an event that cancels their work."""

    shared: SharedEngine
    cancelled: threading.Event

    def run_model(self, work: Callable[[], ResultT]) -> ResultT:
        return self.shared.call(work, self.cancelled)

    @contextmanager
    def end_if_cancelled(self) -> Iterator[None]:
        """Raise RequestCancelled where a search was cancelled."""
        try:
            yield
        except CancelledError:
            raise RequestCancelled from None


class BoundEngine(RequestBound, Engine):
    """A shared engine, as the engine of one request."""

    def __init__(self, shared: SharedEngine, cancelled: threading.Event) -> None:
        self.shared, self.cancelled = shared, cancelled
        self.supports_terms = shared.engine is not None and shared.engine.supports_terms

    def iter_results(self, jobs: Sequence[SearchJob], search: SearchSettings) -> IndexedResults:
        with self.end_if_cancelled():
            return enumerate(self.shared.decode(jobs, search, self.cancelled))


class BoundTorchEngine(RequestBound, TorchEngine):
    """A shared PyTorch engine, as the engine of one request. All decoding methods use its `run`."""

    def __init__(self, shared: SharedEngine, engine: TorchEngine, cancelled: threading.Event) -> None:
        # Without super().__init__(), which has set the memory allocator of the process for this model before.
        self.model, self.device, self.detokenize = engine.model, engine.device, engine.detokenize
        self.shared, self.engine, self.cancelled = shared, engine, cancelled

    def run(
        self, jobs: Sequence[SearchJob], make_search: SearchFactory, *, is_plain_beam: bool, observe: Observer | None
    ) -> Results:
        with self.end_if_cancelled():
            if scheduler := self.shared.scheduler:
                submission = scheduler.submit(
                    jobs, make_search, self.cancelled, is_plain_beam=is_plain_beam, observe=observe
                )
                return submission.wait()
            results = self.run_model(
                lambda: self.engine.run(jobs, make_search, is_plain_beam=is_plain_beam, observe=observe)
            )
            self.shared.counts.add(steps=1, slots=len(jobs), sentences=len(jobs))
            return results


def share_engine(translator: Translator, threads: int, *, batching: bool = True) -> SharedEngine:
    """Return the engine of a translator in a form that requests share. `threads` is the number of cores."""
    engine: Engine | None = translator.engine
    if engine is None:
        return SharedEngine(None, 1)  # decoders of other systems are not meant for several threads
    if isinstance(engine, TorchEngine):
        threads = choose_threads(engine.model, engine.device, threads)
    if not batching:
        return SharedEngine(engine, threads)
    return SharedTorchEngine(engine, threads) if isinstance(engine, TorchEngine) else SharedBatchEngine(engine, threads)
