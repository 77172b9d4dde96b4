"""Small requests for translations of texts, which a free thread prepares, translates and describes together.

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
from dataclasses import dataclass, field
from threading import Event

from dragoman.serving.batching import SharedBatchEngine
from dragoman.serving.errors import RequestCancelled, make_stopping_error
from dragoman.serving.service import Service, Translation, TranslationRequest
from dragoman.serving.workers import WorkerPool, wait_for_result

SMALL_TEXTS, SMALL_CHARACTERS = 8, 2000  # of a request; larger ones have a thread of their own
MAX_REQUESTS, MAX_CHARACTERS = 16, 4000  # of a batch; larger ones are hardly faster, and all wait for the last text
Describe = Callable[[list[Translation]], bytes]  # makes the body of an answer


@dataclass(eq=False)
class PendingRequest:
    """A request that waits to be translated."""

    request: TranslationRequest
    describe: Describe
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
    """Is set when all requests of a batch are cancelled."""

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
        self.lock = threading.Lock()  # for what follows
        self.waiting: OrderedDict[PendingRequest, None] = OrderedDict()  # oldest first
        self.threads = 0  # that translate batches, or are about to begin

    async def translate(self, request: TranslationRequest, describe: Describe) -> bytes:
        """Return the body of the answer to a request that was checked; `describe` makes it in a thread."""
        if not self.shares_batches(request):
            return await self.workers.run(lambda cancelled: describe(self.service.translate(request, cancelled)))
        with self.workers.admit() as cancelled:
            pending = PendingRequest(request, describe, cancelled)
            self.add(pending)
            try:
                return await wait_for_result(pending.result, self.workers.timeout)
            except RequestCancelled:
                raise make_stopping_error() from None
            finally:
                with self.lock:
                    self.waiting.pop(pending, None)

    def shares_batches(self, request: TranslationRequest) -> bool:
        """Return whether a request is small, and all engines decode whole batches. Texts with tags take longer."""
        is_small = len(request.texts) <= SMALL_TEXTS and request.characters <= SMALL_CHARACTERS
        engines = (model.engine for model in list(self.service.pool.models.values()))
        return is_small and request.markup == "text" and all(isinstance(each, SharedBatchEngine) for each in engines)

    def add(self, pending: PendingRequest) -> None:
        """Let a request wait for a thread, and begin one unless there are enough."""
        with self.lock:
            self.waiting[pending] = None
            needs_thread = self.threads < self.max_threads
            self.threads += needs_thread
        if needs_thread:
            self.workers.executor.submit(self.translate_batches).add_done_callback(self.end_waiting)

    def translate_batches(self) -> None:
        """Translate what waits until nothing does."""
        while batch := self.take_batch():
            with self.workers.count_running(len(batch)):
                found = self.service.translate_together([each.request for each in batch], AllCancelled(batch))
                results = [describe_result(*pair) for pair in zip(batch, found, strict=True)]
            finish_requests(batch, results)

    def take_batch(self) -> list[PendingRequest]:
        """Remove and return the oldest requests; leave their part to idle threads of the engine.

        If there are none, this thread ends.
        """
        batch: list[PendingRequest] = []
        characters = 0
        with self.lock:
            idle = max(self.engine_threads - self.threads, 0)
            count = min(math.ceil(len(self.waiting) / (1 + idle)), MAX_REQUESTS)
            while len(batch) < count and characters < MAX_CHARACTERS:
                pending, _ = self.waiting.popitem(last=False)
                batch.append(pending)
                characters += pending.request.characters
            self.threads -= not batch
        return batch

    def end_waiting(self, thread: Future[None]) -> None:
        """End the requests that wait if a thread for them never began, since the server stops."""
        if thread.cancelled():
            with self.lock:
                abandoned, self.waiting = list(self.waiting), OrderedDict()
            finish_requests(abandoned, [RequestCancelled() for _ in abandoned])


def describe_result(pending: PendingRequest, result: list[Translation] | Exception) -> bytes | Exception:
    """Return the body of the answer, or the exception that prevents it."""
    if isinstance(result, Exception):
        return result
    try:
        return pending.describe(result)
    except Exception as error:
        return error


def finish_requests(batch: Sequence[PendingRequest], results: Sequence[bytes | Exception]) -> None:
    """Let the event loop set the results of requests: of all at once, since each call wakes it up."""

    def finish_all() -> None:
        for pending, result in zip(batch, results, strict=True):
            pending.finish(result)

    if batch:
        batch[0].loop.call_soon_threadsafe(finish_all)
