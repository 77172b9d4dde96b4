"""Threads that do the blocking work of requests, with a bounded queue before them.

A request that is not waited for any more, because its client has gone or its time is over, leaves the queue or, if its
thread is running already, sees its event set.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, Generic, TypeVar

import torch

from dragoman.serving.errors import RequestCancelled, RequestError, make_stopping_error
from dragoman.serving.request_context import CURRENT_REQUEST

ValueT = TypeVar("ValueT")
EndT = TypeVar("EndT")
UNWATCHED_SECONDS = 0.1  # after which a request sees that its client has gone: to watch costs more than most requests
LONGEST_WAIT = 60  # seconds that a refused client is told to wait at most
CLIENT_GONE = 499  # status in logs and metrics of a request that nobody waited for


@dataclass(frozen=True)
class StreamEnd(Generic[EndT]):
    """The last item of a stream: what its generator returned."""

    value: EndT


class WorkerPool:
    """Runs the work of requests in threads, at most `threads` at a time; at most `queue` more may wait."""

    def __init__(self, *, threads: int, queue: int, timeout: float) -> None:
        # Models compute in threads of their own (batching.py); what is left for these needs one core.
        self.executor = ThreadPoolExecutor(
            threads, thread_name_prefix="request", initializer=torch.set_num_threads, initargs=(1,)
        )
        self.threads, self.limit, self.timeout = threads, threads + queue, timeout
        self.lock = threading.Lock()  # for what follows
        self.admitted = 0  # requests that wait, or whose thread has not ended
        self.running = 0  # requests in threads
        self.events: set[Event] = set()  # of admitted requests
        self.mean_seconds = 1.0  # that a thread needed for a request recently, for Retry-After
        self.is_stopped = False

    async def run(self, work: Callable[[Event], ValueT]) -> ValueT:
        """Return the result of `work` in a thread. Its argument is set when the result is not needed any more."""
        cancelled = self.admit()
        # The executor keeps abandoned tasks queued; clearing the list frees what they hold.
        tasks: list[Callable[[], ValueT]] = [partial(copy_context().run, self._work, work, cancelled)]
        future = self.executor.submit(run_task, tasks)
        future.add_done_callback(lambda _: self.release(cancelled))
        try:
            return await wait_for_result(asyncio.wrap_future(future), self.timeout)
        except RequestCancelled:
            raise make_stopping_error() from None
        finally:
            cancelled.set()
            tasks.clear()

    async def stream(
        self, work: Callable[[Event], Generator[ValueT, None, EndT]]
    ) -> AsyncGenerator[ValueT | StreamEnd[EndT], None]:
        """Yield what a generator yields in a thread, and at the end what it returns.

        Errors before the first item, such as that of a full queue, are raised by the first `anext`: a handler that
        awaits it before it begins to answer can still answer with the status of the error.
        """
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[ValueT | None] = asyncio.Queue()  # None: the generator has ended

        def produce(cancelled: Event) -> EndT:
            generator = work(cancelled)
            try:
                while not cancelled.is_set():
                    loop.call_soon_threadsafe(items.put_nowait, next(generator))
            except StopIteration as end:
                result: EndT = end.value
                return result
            finally:
                generator.close()
            raise RequestCancelled

        task = asyncio.create_task(self.run(produce))
        task.add_done_callback(lambda _: items.put_nowait(None))
        try:
            while (item := await items.get()) is not None:
                yield item
            yield StreamEnd(task.result())
        finally:
            task.cancel()

    def stop(self) -> int:
        """Refuse further work and cancel what runs or waits; return how many requests were cancelled."""
        with self.lock:
            self.is_stopped = True
            count = len(self.events)
            for event in self.events:
                event.set()
        self.executor.shutdown(wait=False, cancel_futures=True)
        return count

    @property
    def waiting(self) -> int:
        return self.admitted - self.running

    @contextmanager
    def count_running(self, requests: int = 1) -> Iterator[None]:
        """Count requests as running in this thread, and update the mean time that a thread needs for one."""
        start = time.perf_counter()
        with self.lock:
            self.running += requests
        try:
            yield
        finally:
            with self.lock:
                self.running -= requests
                seconds = (time.perf_counter() - start) / max(requests, 1)
                self.mean_seconds += 0.1 * (seconds - self.mean_seconds)

    def admit(self) -> Event:
        """Count a request as admitted; return the event to set when its result is not needed any more.

        Raise a RequestError if there are too many. `release` must be called for the event in the end.
        """
        cancelled = Event()
        with self.lock:
            if self.is_stopped:
                raise make_stopping_error()
            if self.admitted >= self.limit:
                seconds = math.ceil(self.mean_seconds * self.admitted / self.threads)
                wait = min(max(seconds, 1), LONGEST_WAIT)
                message = f"the server has too many requests; try again in {wait} s"
                raise RequestError(429, "busy", message, retry_after=wait)
            self.admitted += 1
            self.events.add(cancelled)
        return cancelled

    def release(self, cancelled: Event) -> None:
        """Note that nothing is done for an admitted request any more."""
        with self.lock:
            self.admitted -= 1
            self.events.discard(cancelled)

    def _work(self, work: Callable[[Event], ValueT], cancelled: Event) -> ValueT:
        with self.count_running():
            if cancelled.is_set():
                raise RequestCancelled
            return work(cancelled)


def run_task(tasks: list[Callable[[], ValueT]]) -> ValueT:
    """Return the result of the only task, which is no longer there if it has been given up."""
    try:
        task = tasks.pop()
    except IndexError:
        raise RequestCancelled from None
    return task()


async def wait_for_result(result: asyncio.Future[ValueT], timeout: float) -> ValueT:
    """Return the result of what works for the current request; raise a RequestError if nobody waits for it any more.

    That is when the client has gone (which is noticed after UNWATCHED_SECONDS) or the time is over; the work is
    cancelled then. Raise RequestCancelled if others
    have cancelled it.
    """
    request, gone = CURRENT_REQUEST.get(), None
    try:
        done, _ = await asyncio.wait({result}, timeout=min(timeout, UNWATCHED_SECONDS))
        if not done and timeout > UNWATCHED_SECONDS:
            gone = asyncio.ensure_future(request.wait_for_disconnect()) if request and request.has_body else None
            awaited: set[asyncio.Future[Any]] = {result, gone} if gone else {result}
            left = timeout - UNWATCHED_SECONDS
            done, _ = await asyncio.wait(awaited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if result in done:
            if result.cancelled():
                raise RequestCancelled
            return result.result()
        if gone in done:
            raise RequestError(CLIENT_GONE, "client_gone", "the client has closed the connection")
        raise RequestError(504, "timeout", f"the request took more than {timeout:g} s")
    finally:
        result.cancel()  # takes the work out of the queue if no thread has begun it
        if gone:
            gone.cancel()
