"""Small requests share calls of the pipeline, and nothing of that can be seen in their answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from dragoman.errors import UserError
from dragoman.inference.translator import Translator
from dragoman.serving.batching import SharedBatchEngine
from dragoman.serving.errors import RequestCancelled, RequestError
from dragoman.serving.model_pool import ModelPool
from dragoman.serving.service import Service, Translation, TranslationRequest
from dragoman.serving.settings import ServerSettings
from dragoman.serving.text_batches import MAX_CHARACTERS, SMALL_BEAM, SMALL_CHARACTERS, SMALL_LINES, TextBatches
from dragoman.serving.workers import WorkerPool
from toy_run import make_sentences
from toy_server import ToyServer, serve_in_thread

WAIT = 30.0  # seconds after which a test has hung
REQUESTS = 500
WRONG_REQUESTS = [
    TranslationRequest(texts=["ba"], target="fr"),
    TranslationRequest(texts=["ba"], model="unknown"),
    TranslationRequest(texts=["ba"], context=("a",)),
    TranslationRequest(texts=["ba"], source="?", target="de"),
]


@pytest.fixture(scope="module")
def ctranslate2_server(language_runs: list[Path]) -> Iterator[ToyServer]:
    pytest.importorskip("ctranslate2", reason="CTranslate2 has no wheel for every platform")
    settings = ServerSettings(log_requests=False, engine="ctranslate2")
    with serve_in_thread(language_runs, settings) as server:
        yield server


def make_requests() -> list[TranslationRequest]:
    """Return requests for all manners of translating, in both directions, and some that are refused."""
    random, sentences = Random(7), make_sentences(300, seed=11)
    requests = []
    for number in range(60):
        texts = ["\n".join(random.sample(sentences, random.choice((1, 1, 2)))) for _ in range(random.choice((1, 1, 3)))]
        source, target = random.choice((("en", "de"), ("de", "en"), ("auto", "de"), ("de", "de")))
        request = TranslationRequest(texts=texts, source=source, target=target, nbest=random.choice((1, 1, 3)))
        change: dict[str, Any] = random.choice(
            [{}, {"beam": 2}, {"align": True}, {"prefix": "tun"}, {"split_sentences": True}]
        )
        requests.append(replace(request, **change))
        if number % 10 == 0:
            requests.append(random.choice(WRONG_REQUESTS))
    return requests


def translate_alone(service: Service, request: TranslationRequest) -> list[Translation] | str:
    """Return the translations of a request, or the error."""
    try:
        return service.translate(request, threading.Event())
    except (RequestError, UserError) as error:
        return repr(error)


def test_requests_together_get_what_each_gets_alone(language_runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and alignments included, to the bit."""
    pool = ModelPool(engine="torch", device="cpu")
    service, requests = Service(pool, ServerSettings()), make_requests()
    for number, run in enumerate(language_runs):
        pool.load(f"model-{number}", run)
    expected = [translate_alone(service, request) for request in requests]
    calls, translate_nbest = list[int](), Translator.translate_nbest

    def count_lines(translator: Translator, lines: Any, *arguments: Any) -> Any:
        calls.append(len(lines))
        return translate_nbest(translator, lines, *arguments)

    monkeypatch.setattr(Translator, "translate_nbest", count_lines)
    found = service.translate_together(requests, threading.Event())
    assert [repr(each) if isinstance(each, Exception) else each for each in found] == expected
    assert any(isinstance(each, Exception) for each in found)
    assert sum(calls) > 3 * len(calls)  # lines share calls
    assert not any(model.leases for model in pool.models.values())
    pool.close()


def test_a_request_that_cannot_be_searched_fails_alone(ctranslate2_server: ToyServer) -> None:
    """CTranslate2 takes no required terms, and refuses the whole call."""
    service = Service(ctranslate2_server.app.state.server.pool, ServerSettings())
    good = TranslationRequest(texts=["ba del fo!"], source="en", target="de")
    bad = replace(good, terms=("wex",))
    first, second, third = service.translate_together([good, bad, good], threading.Event())
    assert isinstance(second, UserError)
    assert first == third == service.translate(good, threading.Event())


def test_cancelled_batches_end_all_their_requests(ctranslate2_server: ToyServer) -> None:
    service = Service(ctranslate2_server.app.state.server.pool, ServerSettings())
    cancelled = threading.Event()
    cancelled.set()
    request = TranslationRequest(texts=["ba"], source="en", target="de")
    found = service.translate_together([request, request], cancelled)
    assert [type(each) for each in found] == [RequestCancelled, RequestCancelled]


def test_500_requests_at_once_get_their_answers(ctranslate2_server: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    random, sentences = Random(5), make_sentences(200, seed=12)
    bodies: list[dict[str, Any]] = []
    for _ in range(REQUESTS):
        kind: dict[str, Any] = random.choice([{}, {}, {}, {"nbest": 3}, {"beam": 1}, {"align": True}, {"target": "fr"}])
        text = random.choice([random.choice(sentences), random.sample(sentences, 3), "\n".join(sentences[:5])])
        bodies.append({"text": text, "source": "en", "target": "de", **kind})
    sizes, translate_together = list[int](), Service.translate_together

    def count_requests(service: Service, requests: Any, cancelled: threading.Event) -> Any:
        sizes.append(len(requests))
        return translate_together(service, requests, cancelled)

    async def send(send_all: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=ctranslate2_server.url, timeout=WAIT, limits=limits) as client:
            return await send_all(client)

    async def send_one_by_one(client: httpx.AsyncClient) -> list[Any]:
        return [read_answer(await client.post("/api/translate", json=body)) for body in bodies]

    async def send_together(client: httpx.AsyncClient) -> list[Any]:
        answers = await asyncio.gather(*(client.post("/api/translate", json=body) for body in bodies))
        return [read_answer(answer) for answer in answers]

    expected = asyncio.run(send(send_one_by_one))
    monkeypatch.setattr(Service, "translate_together", count_requests)
    assert asyncio.run(send(send_together)) == expected
    assert max(sizes) > 1


def read_answer(answer: httpx.Response) -> Any:
    """Return the status with the texts or the error; the last bits of scores depend on the batch."""
    content = answer.json()
    if answer.status_code == 200:
        listed = [
            [each["text"], *(other["text"] for other in each["alternatives"])] for each in content["translations"]
        ]
        return answer.status_code, listed
    return answer.status_code, content


class GatedService:
    """In place of a service: translates a batch when the test lets it."""

    def __init__(self, threads: int = 1) -> None:
        self.pool, self.threads = SimpleNamespace(threads=threads, models={}), threads
        self.begun, self.permits = threading.Semaphore(0), threading.Semaphore(0)
        self.batches: list[list[str]] = []

    def translate_together(self, requests: list[TranslationRequest], cancelled: threading.Event) -> list[Any]:
        self.batches.append([request.texts[0] for request in requests])
        self.begun.release()
        assert self.permits.acquire(timeout=WAIT)
        if cancelled.is_set():
            return [RequestCancelled() for _ in requests]
        return [ValueError("a defect") if request.texts[0] == "bad" else request.texts for request in requests]


def run(
    check: Callable[[TextBatches, GatedService], Awaitable[None]], service: GatedService, **limits: float
) -> WorkerPool:
    """Run a test with batches of a service that the test controls."""
    workers = WorkerPool(**{"threads": 4, "queue": 100, "timeout": WAIT, **limits})  # type: ignore[arg-type]
    batches = TextBatches(service, workers)  # type: ignore[arg-type]
    batches.max_threads = service.threads

    async def check_all() -> None:
        await check(batches, service)

    asyncio.run(check_all())
    workers.stop()
    assert (batches.waiting, workers.admitted, workers.running) == ({}, 0, 0)
    return workers


def start(batches: TextBatches, text: str) -> asyncio.Task[bytes]:
    def describe(found: Any) -> bytes:
        return bytes(found[0], "ascii")

    return asyncio.create_task(batches.translate(TranslationRequest(texts=[text]), describe))


async def wait_for_batch(service: GatedService) -> None:
    assert await asyncio.to_thread(service.begun.acquire, timeout=WAIT)


def test_a_free_thread_takes_all_that_waits() -> None:
    async def check(batches: TextBatches, service: GatedService) -> None:
        first = start(batches, "first")
        await wait_for_batch(service)
        others = [start(batches, text) for text in ("one", "bad", "not ascii: é", "two")]
        while len(batches.waiting) < 4:
            await asyncio.sleep(0)
        assert batches.workers.waiting == 4
        service.permits.release(2)
        found = await asyncio.gather(first, *others, return_exceptions=True)
        assert [each if isinstance(each, bytes) else type(each) for each in found] == [
            b"first", b"one", ValueError, UnicodeEncodeError, b"two",
        ]  # fmt: skip
        assert service.batches == [["first"], ["one", "bad", "not ascii: é", "two"]]

    run(check, GatedService())


def test_idle_threads_get_their_part() -> None:
    async def check(batches: TextBatches, service: GatedService) -> None:
        tasks = [start(batches, str(number)) for number in range(12)]
        for _ in range(3):
            await wait_for_batch(service)
        assert sum(map(len, service.batches)) + len(batches.waiting) == 12
        service.permits.release(100)
        assert await asyncio.gather(*tasks) == [b"%d" % number for number in range(12)]

    run(check, GatedService(threads=3))


def test_a_batch_has_a_limit() -> None:
    async def check(batches: TextBatches, service: GatedService) -> None:
        first = start(batches, "first")
        await wait_for_batch(service)
        texts = [str(number) * SMALL_CHARACTERS for number in range(6)]
        others = [start(batches, text) for text in texts]
        service.permits.release(100)
        await asyncio.gather(first, *others)
        assert [len(batch) for batch in service.batches] == [1, *[MAX_CHARACTERS // SMALL_CHARACTERS] * 3]

    run(check, GatedService())


def test_requests_that_are_given_up_leave_the_queue() -> None:
    async def check(batches: TextBatches, service: GatedService) -> None:
        first = start(batches, "first")
        await wait_for_batch(service)
        waiting = start(batches, "waiting")
        while not batches.waiting:
            await asyncio.sleep(0)
        waiting.cancel(), first.cancel()
        await asyncio.gather(waiting, first, return_exceptions=True)
        assert not batches.waiting
        service.permits.release()
        while batches.threads:
            await asyncio.sleep(0.001)
        assert service.batches == [["first"]]

    run(check, GatedService())


def test_requests_have_a_time_limit() -> None:
    async def check(batches: TextBatches, service: GatedService) -> None:
        found = await asyncio.gather(start(batches, "a"), start(batches, "b"), return_exceptions=True)
        assert [getattr(each, "status", 0) for each in found] == [504, 504]
        service.permits.release(100)
        while batches.threads:
            await asyncio.sleep(0.001)

    run(check, GatedService(), timeout=0.05)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_stop_ends_requests_that_wait(threads: int) -> None:
    """With one thread in all, which is occupied, batches never begin; with two, one is being translated."""

    async def check(batches: TextBatches, service: GatedService) -> None:
        occupied = threading.Event()
        other = asyncio.create_task(batches.workers.run(lambda _: occupied.wait(WAIT)))
        tasks = [start(batches, "a"), start(batches, "b")]
        while batches.workers.running < threads:
            await asyncio.sleep(0)
        batches.workers.stop()
        service.permits.release(100)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [getattr(each, "code", "") for each in found] == ["stopping", "stopping"]
        with pytest.raises(RequestError, match="stopping"):
            await start(batches, "c")
        occupied.set()
        await asyncio.gather(other, return_exceptions=True)

    run(check, GatedService(), threads=threads)


def test_which_requests_share_batches(ctranslate2_server: ToyServer, toy_server: ToyServer) -> None:
    batches = [
        TextBatches(Service(server.app.state.server.pool, ServerSettings()), server.app.state.server.workers)
        for server in (ctranslate2_server, toy_server)
    ]
    small = TranslationRequest(texts=["a"])
    assert batches[0].shares_batches(small)
    assert not batches[1].shares_batches(small)  # PyTorch batches continuously
    others: list[dict[str, Any]] = [
        {"texts": ["a"] * (SMALL_LINES + 1)},
        {"texts": ["a" * 3000]},
        {"markup": "html"},
        {"texts": ["a\n" * SMALL_LINES]},
        {"beam": SMALL_BEAM + 1},
        {"context": ("a" * 3000,)},
    ]
    for other in others:
        assert not batches[0].shares_batches(replace(small, **other))
    assert all(isinstance(each.engine, SharedBatchEngine) for each in batches[0].service.pool.models.values())


def test_other_work_gets_its_turn_between_batches() -> None:
    order = list[str]()

    async def check(batches: TextBatches, service: GatedService) -> None:
        first = start(batches, "first")
        await wait_for_batch(service)
        other = asyncio.create_task(batches.workers.run(lambda _: order.extend([*service.batches[-1], "other"])))
        while batches.workers.admitted < 2:
            await asyncio.sleep(0)
        second = start(batches, "second")
        while not batches.waiting:
            await asyncio.sleep(0)
        service.permits.release(2)
        await asyncio.gather(first, other, second)
        assert order == ["first", "other"]

    run(check, GatedService(), threads=1)


def test_a_defect_fails_its_batch_only() -> None:
    async def check(batches: TextBatches, service: GatedService) -> None:
        service.permits.release(2)
        translate_together = service.translate_together
        service.translate_together = None  # type: ignore[assignment, method-assign]
        with pytest.raises(TypeError):
            await start(batches, "first")
        service.translate_together = translate_together  # type: ignore[method-assign]
        assert await start(batches, "second") == b"second"

    run(check, GatedService())


def test_a_request_that_is_given_up_counts_until_its_batch_ends() -> None:
    async def check(batches: TextBatches, service: GatedService) -> None:
        first = start(batches, "first")
        await wait_for_batch(service)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert (batches.workers.admitted, batches.workers.waiting) == (1, 0)
        service.permits.release()
        while batches.threads:
            await asyncio.sleep(0.001)

    run(check, GatedService())


def test_a_batch_translates_no_cancelled_requests() -> None:
    async def check(batches: TextBatches, service: GatedService) -> None:
        first = start(batches, "first")
        await wait_for_batch(service)
        others = [start(batches, text) for text in ("second", "third")]
        while len(batches.waiting) < 2:
            await asyncio.sleep(0)
        next(iter(batches.waiting)).cancelled.set()  # as a server does that stops
        service.permits.release(2)
        found = await asyncio.gather(first, *others, return_exceptions=True)
        assert [each if isinstance(each, bytes) else getattr(each, "code", each) for each in found] == [
            b"first", "stopping", b"third",
        ]  # fmt: skip
        assert service.batches == [["first"], ["third"]]

    run(check, GatedService())


def test_refused_requests_leave_their_neighbours_together(
    ctranslate2_server: ToyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, calls = Service(ctranslate2_server.app.state.server.pool, ServerSettings()), list[int]()
    translate_nbest = Translator.translate_nbest

    def count_lines(translator: Translator, lines: Any, *arguments: Any) -> Any:
        calls.append(len(lines))
        return translate_nbest(translator, lines, *arguments)

    monkeypatch.setattr(Translator, "translate_nbest", count_lines)
    good = TranslationRequest(texts=["ba del fo!"], source="en", target="de")
    refused = [replace(good, terms=("wex",)), replace(good, context=("a",)), replace(good, avoid=("wex",))]
    found = service.translate_together([good, good, *refused, good], threading.Event())
    assert [isinstance(each, UserError) for each in found] == [False, False, True, True, True, False]
    assert calls == [3, 3, 1, 1, 1]


def test_an_application_may_be_called_in_several_event_loops(ctranslate2_server: ToyServer) -> None:
    async def send(number: int) -> str:
        transport = httpx.ASGITransport(ctranslate2_server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"text": "ba del fo!", "source": "en", "target": "de", "nbest": 1 + number % 2}
            answer = await asyncio.wait_for(client.post("/api/translate", json=body), WAIT)
            return str(answer.json()["translations"][0]["text"])

    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda number: asyncio.run(send(number)), range(60)))
    assert found == ["ol ebi ak!"] * 60
