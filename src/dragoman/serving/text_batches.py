"""Translate small requests together: a thread prepares several, translates their lines in one call, writes the answers.

With an engine that decodes whole batches, such as CTranslate2, a sentence takes so little time that a thread for each
request would spend more on waiting for Python's global lock than on its work.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event

from dragoman.serving.batching import SharedBatchEngine
from dragoman.serving.errors import RequestCancelled, make_stopping_error
from dragoman.serving.service import Service, Translation, TranslationRequest
from dragoman.serving.workers import WorkerPool, wait_for_result

# Limits of a request that shares a batch; larger ones have a thread of their own.
SMALL_LINES, SMALL_CHARACTERS, SMALL_BEAM = 8, 2000, 5
# A batch with so many takes no further request: larger ones are hardly faster, and all requests wait for the last line.
MAX_REQUESTS, MAX_CHARACTERS = 16, 4000
WriteAnswer = Callable[[list[Translation]], bytes]


@dataclass(eq=False)
class PendingRequest:
    """A request that waits to be translated."""

    request: TranslationRequest
    write_answer: WriteAnswer
    cancelled: Event  # set when nobody waits for the result any more
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    result: asyncio.Future[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.result = self.loop.create_future()

    def finish(self, result: bytes | Exception) -> None:
        """Set the result or the exception, in the thread of the event loop."""
        if self.result.done():  # nobody waits for it
            return
        if isinstance(result, Exception):
            self.result.set_exception(result)
        else:
            self.result.set_result(result)


class AllCancelled(Event):
    """An event that is set once all requests of a batch are cancelled. Only `is_set` works."""

    def __init__(self, pending: Sequence[PendingRequest]) -> None:
        super().__init__()
        self.pending = pending

    def is_set(self) -> bool:
        return all(each.cancelled.is_set() for each in self.pending)


class TextBatches:
    """Translates the texts of requests: small ones together if the engines decode whole batches."""

    def __init__(self, service: Service, workers: WorkerPool) -> None:
        self.service, self.workers = service, workers
        self.engine_threads = service.pool.threads
        self.max_threads = self.engine_threads + 1  # one prepares a batch while the others wait for the engine
        self.lock = threading.Lock()  # guards the fields below
        self.waiting: OrderedDict[PendingRequest, None] = OrderedDict()  # oldest first
        self.threads = 0  # that translate a batch, or are about to

    async def translate(self, request: TranslationRequest, write_answer: WriteAnswer) -> bytes:
        """Return the answer to a request that was checked; `write_answer` makes it, in a thread."""
        if not self.shares_batches(request):
            return await self.workers.run(lambda cancelled: write_answer(self.service.translate(request, cancelled)))
        pending = PendingRequest(request, write_answer, self.workers.admit())
        try:
            self.add(pending)
            return await wait_for_result(pending.result, self.workers.timeout)
        except RequestCancelled:
            raise make_stopping_error() from None
        finally:
            pending.cancelled.set()
            with self.lock:
                never_began = self.waiting.pop(pending, self) is None
            if never_began:
                self.workers.release(pending.cancelled)

    def shares_batches(self, request: TranslationRequest) -> bool:
        """Return whether a request is small, and all engines decode whole batches. Texts with tags take longer."""
        lines = len(request.texts) + sum(text.count("\n") for text in request.texts)
        characters = request.characters + sum(map(len, request.entries))
        is_small = lines <= SMALL_LINES and characters <= SMALL_CHARACTERS and request.markup == "text"
        engines = (model.engine for model in list(self.service.pool.models.values()))
        return (
            is_small
            and max(request.nbest, request.beam or 1) <= SMALL_BEAM
            and all(isinstance(engine, SharedBatchEngine) for engine in engines)
        )

    def add(self, pending: PendingRequest) -> None:
        """Let a request wait for a thread, and begin one unless there are enough."""
        with self.lock:
            self.waiting[pending] = None
            needs_thread = self.threads < self.max_threads
            self.threads += needs_thread
        if needs_thread:
            self.begin_thread()

    def begin_thread(self) -> None:
        """Let the executor translate a batch as soon as it has a thread for that."""
        try:
            self.workers.executor.submit(self.translate_batch).add_done_callback(self.end_thread)
        except RuntimeError:  # the server stops
            self.fail_waiting()

    def end_thread(self, ended: Future[None]) -> None:
        """Begin the next thread, after all that the executor has to do by now, if requests wait."""
        if ended.cancelled():  # before it began, since the server stops
            self.fail_waiting()
            return
        with self.lock:
            is_needed = bool(self.waiting)
            self.threads -= not is_needed
        if is_needed:
            self.begin_thread()

    def translate_batch(self) -> None:
        """Translate the requests that wait, or as many as a batch may have, but none that is cancelled."""
        batch = self.take_batch()
        needed = [each for each in batch if not each.cancelled.is_set()]
        results: dict[PendingRequest, bytes | Exception] = {}
        try:
            with self.workers.count_running(len(needed)):
                found = self.service.translate_together([each.request for each in needed], AllCancelled(needed))
                results = {each: write_result(each, one) for each, one in zip(needed, found, strict=True)}
        except Exception as error:  # a defect: exceptions of single requests are results
            results = dict.fromkeys(needed, error)
        for each in batch:
            self.workers.release(each.cancelled)
        finish_requests(batch, [results.get(each, RequestCancelled()) for each in batch])

    def take_batch(self) -> list[PendingRequest]:
        """Remove and return the oldest requests; leave their share to idle threads of the engine."""
        batch: list[PendingRequest] = []
        characters = 0
        with self.lock:
            idle = max(self.engine_threads - self.threads, 0)
            count = min(math.ceil(len(self.waiting) / (1 + idle)), MAX_REQUESTS)
            while len(batch) < count and characters < MAX_CHARACTERS:
                pending, _ = self.waiting.popitem(last=False)
                batch.append(pending)
                characters += pending.request.characters
        return batch

    def fail_waiting(self) -> None:
        """End the requests that wait and the thread that was to translate them, since the server stops."""
        with self.lock:
            self.threads -= 1
            abandoned, self.waiting = list(self.waiting), OrderedDict()
        for each in abandoned:
            self.workers.release(each.cancelled)
        finish_requests(abandoned, [RequestCancelled() for _ in abandoned])


def write_result(pending: PendingRequest, result: list[Translation] | Exception) -> bytes | Exception:
    """Return the answer to a request, or the exception that prevents it."""
    if isinstance(result, Exception):
        return result
    try:
        return pending.write_answer(result)
    except Exception as error:
        return error


def finish_requests(batch: Sequence[PendingRequest], results: Sequence[bytes | Exception]) -> None:
    """Let the event loop set the results of requests, in one callback, since each callback wakes the loop up."""
    pairs = list(zip(batch, results, strict=True))
    for loop in {each.loop for each in batch}:  # an application may be called in several

        def finish_all(loop: asyncio.AbstractEventLoop = loop) -> None:
            for pending, result in pairs:
                if pending.loop is loop:
                    pending.finish(result)

        with suppress(RuntimeError):  # the loop is closed, so that nobody waits
            loop.call_soon_threadsafe(finish_all)
