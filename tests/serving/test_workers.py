"""Tests of the threads that do the work of requests: limits, time, and requests that nobody waits for."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Generator
from threading import Event
from typing import Any

import pytest
import torch

from dragoman.serving.errors import RequestCancelled, RequestError
from dragoman.serving.service import Service
from dragoman.serving.settings import ServerSettings
from dragoman.serving.workers import StreamEnd, WorkerPool
from toy_run import Toy
from toy_server import ToyServer, serve_in_thread

SECONDS = 30  # far longer than anything here takes


class SlowTranslate:
    """In place of `Service.translate`: waits until the request is cancelled."""

    def __init__(self) -> None:
        self.started, self.cancelled = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, cancelled: Event) -> list[Any]:
        self.started.release()
        assert cancelled.wait(SECONDS)
        self.cancelled.release()
        raise RequestCancelled


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowTranslate:
    slow = SlowTranslate()
    monkeypatch.setattr(Service, "translate", lambda _, __, cancelled: slow(cancelled))
    return slow


def run(make: Callable[[WorkerPool], Coroutine[Any, Any, object]], **limits: float) -> None:
    """Run a coroutine with a pool that has these limits."""
    pool = WorkerPool(**{"threads": 1, "queue": 0, "timeout": SECONDS, **limits})  # type: ignore[arg-type]
    asyncio.run(make(pool))
    pool.stop()


def wait_for(event: Event) -> None:
    assert event.wait(SECONDS)


def test_work_beyond_the_queue_is_refused() -> None:
    async def check(pool: WorkerPool) -> None:
        blocked = Event()
        tasks = [asyncio.create_task(pool.run(lambda _: wait_for(blocked))) for _ in range(3)]
        while pool.admitted < 3:
            await asyncio.sleep(0)
        with pytest.raises(RequestError) as refusal:
            await pool.run(lambda _: None)
        assert (refusal.value.status, refusal.value.code) == (429, "busy")
        assert refusal.value.retry_after >= 1
        blocked.set()
        await asyncio.gather(*tasks)
        assert await pool.run(lambda _: 5) == 5  # there is room again

    run(check, queue=2)


def test_work_that_takes_too_long_is_cancelled() -> None:
    ended = Event()

    def work(cancelled: Event) -> None:
        wait_for(cancelled)
        ended.set()

    async def check(pool: WorkerPool) -> None:
        with pytest.raises(RequestError) as refusal:
            await pool.run(work)
        assert refusal.value.status == 504
        assert await asyncio.to_thread(ended.wait, SECONDS)

    run(check, timeout=0.05)


def test_waiting_work_that_is_given_up_never_starts() -> None:
    async def check(pool: WorkerPool) -> None:
        blocked = Event()
        first = asyncio.create_task(pool.run(lambda _: wait_for(blocked)))
        waiting = asyncio.create_task(pool.run(lambda _: pytest.fail("this must not run")))
        while pool.admitted < 2:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert pool.admitted == 1
        blocked.set()
        await first

    run(check, queue=1)


def test_waiting_work_that_is_given_up_takes_no_memory() -> None:
    class Text:
        pass

    async def check(pool: WorkerPool) -> None:
        blocked, text = Event(), Text()
        reference = weakref.ref(text)
        first = asyncio.create_task(pool.run(lambda _: wait_for(blocked)))
        waiting = asyncio.create_task(pool.run(lambda _, text=text: print(text)))  # type: ignore[misc]
        del text
        while pool.admitted < 2:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        del waiting
        await asyncio.sleep(0.01)  # the event loop itself still has the result of gather
        gc.collect()
        assert reference() is None
        blocked.set()
        await first

    run(check, queue=1)


def test_work_that_waits_when_the_server_stops_is_answered() -> None:
    async def check(pool: WorkerPool) -> None:
        tasks = [asyncio.create_task(pool.run(wait_for)) for _ in range(2)]
        while pool.admitted < 2:
            await asyncio.sleep(0)
        assert pool.stop() == 2
        running, waiting = await asyncio.gather(*tasks, return_exceptions=True)
        assert running is None
        assert isinstance(waiting, RequestError)
        assert (waiting.status, waiting.code) == (503, "stopping")

    run(check, queue=1)


def test_request_threads_compute_with_one_core() -> None:
    async def check(pool: WorkerPool) -> None:
        assert await pool.run(lambda _: torch.get_num_threads()) == 1

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(check)
    finally:
        torch.set_num_threads(threads)


def test_a_stream_yields_parts_and_what_is_returned() -> None:
    def generate(_: Event) -> Generator[str, None, int]:
        yield "a"
        yield "b"
        return 2

    async def check(pool: WorkerPool) -> None:
        assert [item async for item in pool.stream(generate)] == ["a", "b", StreamEnd(2)]

    run(check)


def test_a_stream_that_is_closed_ends_its_generator() -> None:
    closed = Event()

    def generate(cancelled: Event) -> Generator[str, None, None]:
        try:
            while True:
                yield "part"
                cancelled.wait(0.001)
        finally:
            closed.set()

    async def check(pool: WorkerPool) -> None:
        stream = pool.stream(generate)
        assert await anext(stream) == "part"
        await stream.aclose()
        assert await asyncio.to_thread(closed.wait, SECONDS)

    run(check)


def test_a_full_server_says_when_to_try_again(toy: Toy, slow: SlowTranslate) -> None:
    with serve_in_thread([toy.run], ServerSettings(threads=1, queue=0, log_requests=False)) as server:
        with server.connect() as occupant:
            send_request(occupant)
            assert slow.started.acquire(timeout=SECONDS)
            answer = server.client.post("/api/translate", json={"text": "ba."})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "busy"


def send_request(connection: Any) -> None:
    body = b'{"text": "ba."}'
    head = "POST /api/translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


QUERY_REQUEST = b"POST /translate?q=ba.&source=en&target=de HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("send", [send_request, lambda connection: connection.sendall(QUERY_REQUEST)])
def test_a_request_whose_client_has_gone_is_cancelled(
    toy_server: ToyServer, slow: SlowTranslate, send: Callable[[Any], None]
) -> None:
    with toy_server.connect() as connection:
        send(connection)
        assert slow.started.acquire(timeout=SECONDS)
    assert slow.cancelled.acquire(timeout=SECONDS)
    deadline = time.monotonic() + SECONDS
    while 'status="499"' not in toy_server.client.get("/metrics").text:
        assert time.monotonic() < deadline
    assert toy_server.app.state.server.workers.admitted == 0


def test_a_request_that_takes_too_long_is_answered(toy: Toy, slow: SlowTranslate) -> None:
    with serve_in_thread([toy.run], ServerSettings(timeout=0.05, log_requests=False)) as server:
        answer = server.client.post("/api/translate", json={"text": "ba."})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert slow.cancelled.acquire(timeout=SECONDS)
