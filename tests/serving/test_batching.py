"""Requests share batches, and nothing of that can be seen in their results: texts, scores, order, errors."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock
from weakref import ref

import pytest
import torch

from dragoman.decoding.beam import BeamSearch
from dragoman.decoding.live_batching import MAX_BATCHES, LiveScheduler, Submission
from dragoman.decoding.methods import SearchSettings
from dragoman.decoding.protocol import IndexedResults, SearchJob
from dragoman.errors import UserError
from dragoman.inference.engines import torch as torch_engine
from dragoman.inference.engines.base import Engine
from dragoman.inference.loading import load_as
from dragoman.inference.translator import Translator
from dragoman.serving import service as service_module
from dragoman.serving.batching import SharedBatchEngine, SharedEngine, SharedTorchEngine, share_engine
from dragoman.serving.errors import RequestCancelled, RequestError
from dragoman.serving.model_pool import ModelPool, ServedModel, tune_garbage_collection
from dragoman.serving.service import UNITS_PER_STEP, Service, TranslationRequest
from dragoman.serving.settings import ServerSettings
from toy_clients import bind, finish, make_tasks, translate_together
from toy_engine import model_of
from toy_run import Toy, make_sentences

CLIENTS = 40
WAIT = 60.0  # seconds after which a test has hung


@pytest.fixture
def decoded_again(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Return the exceptions of batches whose sentences were decoded again one by one."""
    errors: list[Exception] = []
    decode_again = LiveScheduler.decode_again

    def record(scheduler: LiveScheduler, batches: Any, queue: Any, numbers: Sequence[int], error: Exception) -> None:
        errors.append(error)
        decode_again(scheduler, batches, queue, numbers, error)

    monkeypatch.setattr(LiveScheduler, "decode_again", record)
    return errors


@pytest.mark.parametrize("name", ["torch", "ctranslate2"])
def test_500_requests_at_once_get_what_a_translator_gives(
    name: str, toy: Toy, monkeypatch: pytest.MonkeyPatch, decoded_again: list[Exception]
) -> None:
    monkeypatch.setattr(torch_engine, "NARROW_WIDTH", 0)  # so that the toy model is decoded in two threads
    if name == "ctranslate2":
        pytest.importorskip("ctranslate2", reason="CTranslate2 has no wheel for every platform")
    plain = load_as(Translator, toy.run, device="cpu", engine=name)
    tasks = make_tasks(plain, constraints=name == "torch")
    expected = translate_together(plain, tasks)
    shared = share_engine(plain, 2)
    with ThreadPoolExecutor(CLIENTS) as clients:
        found = list(clients.map(lambda task: finish(bind(plain, shared), task), tasks))
    if isinstance(shared, SharedTorchEngine):
        assert len(shared.scheduler.threads) == 2
        assert found == expected  # scores and alignments included, to the bit
        assert not decoded_again
        assert not shared.scheduler.entries
        assert not shared.scheduler.jobs
        sentences = sum(len(lines) for lines, _, _ in tasks)
        assert shared.counts.steps < 5 * sentences  # a sentence alone takes more than 5
    else:
        assert [[one[0].text for one in lists] for lists in found] == [[one[0].text for one in l] for l in expected]
    shared.close()


@pytest.mark.parametrize("batching", [True, False])
def test_other_models_and_methods_share_batches_too(batching: bool, toy: Toy) -> None:
    plain = load_as(Translator, toy.run, device="cpu", engine="torch")
    texts = make_sentences(6, seed=8)
    shared = share_engine(plain, 2, batching=batching)
    if isinstance(shared, SharedTorchEngine):
        assert len(shared.scheduler.threads) == 1  # the model is narrow
    searches: list[dict[str, Any]] = [
        {"method": "mbr", "samples": 6},
        {"method": "diverse", "groups": 2, "beam": 4, "nbest": 2},
        {"method": "exhaustive", "max_expansions": 30},
        {"no_repeat": 2, "coverage": 0.2},
    ]
    options = [plain.make_options(search=search, count=None) for search in searches]
    with ThreadPoolExecutor(len(options)) as clients:
        found = list(clients.map(partial(bind(plain, shared).translate_nbest, texts), options))
    assert found == [plain.translate_nbest(texts, one) for one in options]
    shared.close()


class StepGate:
    """A model whose steps happen one at a time, when the test lets them, and fail for chosen sources."""

    def __init__(self, model: Any, broken: int = -1) -> None:
        self.model, self.broken = model, broken
        self.permits = threading.Semaphore(0)
        self.rows: list[int] = []  # of each step

    def start(self, source_BS: torch.Tensor, real_BS: torch.Tensor) -> Any:
        if (source_BS == self.broken).any():
            raise RuntimeError("this source breaks the model")
        return self.model.start(source_BS, real_BS)

    def step(self, token_N: torch.Tensor, state: Any) -> Any:
        assert self.permits.acquire(timeout=WAIT)
        self.rows.append(len(token_N))
        return self.model.step(token_N, state)

    def release(self, steps: int = 100_000) -> None:
        self.permits.release(steps)

    def run_first_step(self) -> None:
        self.release(1)
        while not self.rows:
            time.sleep(0.001)


class StartGate(StepGate):
    """A model whose first batch begins when the test lets it."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.begun, self.opened = threading.Event(), threading.Event()

    def start(self, source_BS: torch.Tensor, real_BS: torch.Tensor) -> Any:
        if not self.begun.is_set():
            self.begun.set()
            assert self.opened.wait(WAIT)
        return super().start(source_BS, real_BS)


def make_scheduler(**options: Any) -> tuple[LiveScheduler, StepGate]:
    gate = StepGate(model_of().eval(), **options)
    return LiveScheduler(gate, torch.device("cpu"), rows=64, threads=1), gate


def submit(scheduler: LiveScheduler, jobs: Sequence[SearchJob], beam: int = 4, **options: Any) -> Submission:
    cancelled = options.pop("cancelled", threading.Event())
    return scheduler.submit(jobs, partial(BeamSearch, SearchSettings(beam=beam)), cancelled, **options)


def make_jobs(count: int, tokens: int = 8, limit: int = 12) -> list[SearchJob]:
    random = Random(count)
    return [SearchJob([random.randrange(4, 38) for _ in range(tokens)], limit) for _ in range(count)]


def end(scheduler: LiveScheduler, gate: StepGate) -> None:
    gate.release()
    scheduler.close()
    assert not scheduler.entries
    assert not scheduler.jobs
    assert not scheduler.active
    assert not any(thread.is_alive() for thread in scheduler.threads)


def test_a_job_joins_at_the_next_step_of_a_batch_that_runs() -> None:
    scheduler, gate = make_scheduler()
    first = submit(scheduler, make_jobs(2))
    gate.run_first_step()
    second = submit(scheduler, make_jobs(3))
    gate.release(3)
    assert second.ended.wait(0) is False
    gate.release()
    first.wait(), second.wait()
    assert max(gate.rows) == 5 * 4
    end(scheduler, gate)
    counts = scheduler.counts
    assert (counts.sentences, counts.steps) == (5, len(gate.rows))
    assert 2 * counts.steps < counts.slots <= 5 * counts.steps


def test_a_cancelled_request_frees_its_slots_and_leaves_the_queue() -> None:
    scheduler, gate = make_scheduler()
    cancelled = threading.Event()
    running = submit(scheduler, make_jobs(40), cancelled=cancelled)  # 16 of them run, 24 wait
    gate.run_first_step()
    assert len(scheduler.entries) == 40
    cancelled.set()
    other = submit(scheduler, make_jobs(1))
    gate.release(2)
    with pytest.raises(CancelledError):
        running.wait()
    assert len(scheduler.entries) <= 1
    gate.release()
    assert len(other.wait()[0]) == 1
    end(scheduler, gate)


def test_a_cancelled_request_raises_in_its_thread(toy: Toy) -> None:
    plain = load_as(Translator, toy.run, device="cpu", engine="torch")
    for batching in (True, False):
        shared = share_engine(plain, 1, batching=batching)
        cancelled = threading.Event()
        cancelled.set()
        with pytest.raises(RequestCancelled):
            bind(plain, shared, cancelled).translate(["ba del fo."])
        assert bind(plain, shared).translate(["ba del fo!"])[0].text == "ol ebi ak!"
        shared.close()


def test_a_stream_that_nobody_reads_frees_its_slot(toy: Toy) -> None:
    plain = load_as(Translator, toy.run, device="cpu", engine="torch")
    shared = share_engine(plain, 1)
    assert isinstance(shared, SharedTorchEngine)
    stream = bind(plain, shared).stream("ba del fo gri mun ne pol ra ba del fo gri.")
    next(stream)
    stream.close()
    shared.close()
    assert not shared.scheduler.entries


def test_a_flood_of_one_kind_does_not_delay_another() -> None:
    """Bounded by steps: the few jobs of another kind begin one turn later, and have as many turns as the flood."""
    scheduler, gate = make_scheduler()
    flood = submit(scheduler, make_jobs(200))
    gate.run_first_step()
    begun = len(gate.rows)
    few = submit(scheduler, make_jobs(2, tokens=20), beam=2)
    steps = 0
    while not few.ended.is_set():
        gate.release(1)
        steps = wait_for_steps(gate, begun, steps)
        assert steps < 2 * 12 + 6  # two batches take turns; 12 is the maximum length
    assert not flood.ended.is_set()
    end(scheduler, gate)
    assert all(len(results) == 1 for results in flood.wait())


def wait_for_steps(gate: StepGate, begun: int, steps: int) -> int:
    """Return the number of steps since `begun` after the next one, or after a moment in which there was none."""
    for _ in range(200):
        if len(gate.rows) - begun > steps:
            break
        threading.Event().wait(0.001)
    return len(gate.rows) - begun


def test_more_kinds_than_batches_take_turns() -> None:
    scheduler, gate = make_scheduler()
    floods = [submit(scheduler, make_jobs(17), beam=beam) for beam in range(1, MAX_BATCHES + 1)]
    last = submit(scheduler, make_jobs(1), beam=MAX_BATCHES + 1)
    gate.release()
    last.wait()
    for flood in floods:
        flood.wait()
    end(scheduler, gate)


def test_a_batch_that_may_not_take_its_younger_jobs_makes_room_for_older_ones() -> None:
    """Bounded by steps: without an end, batches of empty slots step for ever, and the oldest job is never begun."""
    scheduler, gate = make_scheduler()
    kinds = range(1, MAX_BATCHES + 1)
    with scheduler.condition:  # the thread sees all of these at once
        running = [submit(scheduler, make_jobs(1), beam=beam) for beam in kinds]
    wait_until(lambda: not any(queue.waiting for queue in list(scheduler.queues.values())))
    with scheduler.condition:  # the thread is in a step
        oldest = submit(scheduler, make_jobs(1), beam=MAX_BATCHES + 1)
        younger = [submit(scheduler, make_jobs(1), beam=beam) for beam in kinds]
    submissions = (*running, oldest, *younger)
    steps = 0
    while not all(submission.ended.is_set() for submission in submissions):
        gate.release(1)
        steps = wait_for_steps(gate, 0, steps)
        assert steps < 3 * MAX_BATCHES * 14  # three generations of jobs, each with at most 12 tokens
    end(scheduler, gate)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_queue_of_a_batch_that_begins_is_kept() -> None:
    """Otherwise later jobs of the same kind get a queue and a batch of their own."""
    gate = StartGate(model_of().eval())
    gate.release()
    scheduler = LiveScheduler(gate, torch.device("cpu"), rows=64, threads=2)
    with scheduler.condition:
        first = submit(scheduler, make_jobs(1))
        [queue] = scheduler.queues.values()
    assert gate.begun.wait(WAIT)
    submit(scheduler, make_jobs(1), beam=2).wait()  # by the other thread, which drops queues that nobody uses
    submit(scheduler, make_jobs(1), beam=3).wait()
    with scheduler.condition:
        assert queue in scheduler.queues.values()
    gate.opened.set()
    first.wait()
    end(scheduler, gate)
    assert queue.users == 0


def test_a_step_that_raises_fails_only_the_request_that_causes_it(decoded_again: list[Exception]) -> None:
    scheduler, gate = make_scheduler(broken=39)
    gate.release()
    good = submit(scheduler, make_jobs(6))
    bad = submit(scheduler, [SearchJob([5, 39, 6], 8)])
    late = submit(scheduler, make_jobs(4))
    assert all(len(results) == 1 for results in (*good.wait(), *late.wait()))
    with pytest.raises(RuntimeError, match="this source breaks the model"):
        bad.wait()
    plain, open_gate = make_scheduler()
    open_gate.release()
    assert [r[0].tokens for r in submit(plain, make_jobs(6)).wait()] == [r[0].tokens for r in good.wait()]
    assert decoded_again
    end(plain, open_gate)
    end(scheduler, gate)


class PickyEngine(Engine):
    """An engine for whole batches that refuses a batch with one of these sources. It counts batches."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.batches = engine, list[int]()
        self.gate = threading.Event()

    def iter_results(self, jobs: Sequence[SearchJob], search: SearchSettings) -> IndexedResults:
        assert self.gate.wait(WAIT)
        self.batches.append(len(jobs))
        if search.beam == 3:
            raise UserError("no beam of 3")
        return self.engine.iter_results(jobs, search)


def test_batches_fall_free_and_fail_alone(toy: Toy) -> None:
    plain = load_as(Translator, toy.run, device="cpu", engine="torch")
    engine = PickyEngine(plain.engine)
    shared = share_engine(replace(plain, engine=engine), 1)
    texts, cancelled = make_sentences(30, seed=2), threading.Event()
    expected = [one.text for one in plain.translate(texts)]

    def translate(text: str, beam: int = 4, event: threading.Event | None = None) -> str:
        return bind(plain, shared, event).translate([text], beam=beam)[0].text

    with ThreadPoolExecutor(32) as clients:
        found = [clients.submit(translate, text) for text in texts]
        bad = clients.submit(translate, texts[0], 3)
        gone = clients.submit(translate, texts[0], 4, cancelled)
        cancelled.set()
        engine.gate.set()
        assert [one.result() for one in found] == expected
        with pytest.raises(UserError, match="no beam of 3"):
            bad.result()
        with pytest.raises(RequestCancelled):
            gone.result()
    assert len(engine.batches) < 30
    shared.close()


def test_a_model_is_replaced_under_load_without_losing_a_request(toy: Toy) -> None:
    pool = ModelPool(engine="torch", device="cpu")
    first = pool.load("toy", toy.run)
    texts = make_sentences(40, seed=4)
    expected = [one.text for one in first.translator.translate(texts)]
    used: set[ServedModel] = set()
    stop = threading.Event()

    def translate(number: int) -> list[str]:
        found: list[str] = []
        while not stop.is_set() or not found:
            with pool.lease("toy") as model:
                used.add(model)
                found += [one.text for one in model.bind(threading.Event()).translate(texts[number::8])]
        return found

    with ThreadPoolExecutor(8) as clients:
        running = [clients.submit(translate, number) for number in range(8)]
        second = pool.load("toy", toy.run)
        stop.set()
        for number, future in enumerate(running):
            found, own = future.result(), expected[number::8]
            assert found == own * (len(found) // len(own))
    assert first in used
    assert pool.models == {"toy": second}
    assert first.leases == 0
    assert isinstance(first.engine, SharedTorchEngine)
    assert not any(thread.is_alive() for thread in first.engine.scheduler.threads)
    with pool.lease("toy") as model:
        pool.remove("toy")
        assert model.translator.translate(["ba del fo!"])[0].text == "ol ebi ak!"
    with pytest.raises(RequestError, match="there is no model"), pool.lease("toy"):
        pass


def test_a_model_that_is_removed_fails_no_request_that_may_use_another(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ModelPool(engine="torch", device="cpu")
    service, choose_route = Service(pool, ServerSettings()), Service.choose_route

    def choose_and_remove(service: Service, *arguments: Any) -> Any:
        found = choose_route(service, *arguments)
        if "first" in pool.models:
            pool.remove("first")
        return found

    monkeypatch.setattr(Service, "choose_route", choose_and_remove)
    for name in ("", "first"):
        for model in ("first", "second"):
            pool.load(model, toy.run)
        request = TranslationRequest(texts=["ba del fo!"], model=name)
        if name:
            with pytest.raises(RequestError, match="there is no model"):
                service.translate(request, threading.Event())
        else:
            [translation] = service.translate(request, threading.Event())
            assert (translation.text, translation.model) == ("ol ebi ak!", "second")
    pool.close()


def test_a_model_that_is_replaced_translates_in_no_other_direction(
    language_runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ModelPool(engine="torch", device="cpu")
    service, choose_route, runs = Service(pool, ServerSettings()), Service.choose_route, iter(language_runs)
    pool.load("model", next(runs))

    def choose_and_replace(service: Service, *arguments: Any) -> Any:
        found = choose_route(service, *arguments)
        for run in runs:
            pool.load("model", run)
        return found

    monkeypatch.setattr(Service, "choose_route", choose_and_replace)
    request = TranslationRequest(texts=["ba del fo!"], source="en", target="de", model="model")
    with pytest.raises(RequestError, match="no model translates to de"):
        service.translate(request, threading.Event())
    pool.close()


def test_documents_of_models_with_context_report_their_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    def translate_units(_: object, documents: list[list[Any]], *__: object, progress: Any, **___: object) -> list[Any]:
        units = documents[0]
        for done in range(1, len(units) + 1):
            progress(done, len(units))
        return units

    monkeypatch.setattr(service_module, "translate_units", translate_units)
    for context, texts in ((1, 3), (0, UNITS_PER_STEP + 2)):
        reports, units = list[int](), [Mock() for _ in range(texts)]
        model = Mock()
        model.bind().make_options().context = context
        service, request = Service(Mock(), ServerSettings()), TranslationRequest(texts=[])
        done = service.translate_units(units, model, Mock(), request, threading.Event(), reports.append)
        assert done == units
        assert reports == [*range(1, texts + 1)]


def test_a_batch_is_taken_without_a_look_at_all_jobs_that_wait(toy: Toy) -> None:
    shared, requests, jobs = SharedBatchEngine(toy.translator.engine, 1), 4, 10_000
    shared.close()
    submissions = [Submission([SearchJob([5], 9)] * jobs, threading.Event()) for _ in range(requests)]
    shared.submissions = set(submissions)
    entries = [(submission, index) for submission in submissions for index in range(jobs)]
    shared.waiting = {(SearchSettings(), False): deque(entries)}
    submissions[0].cancelled.set()
    looked = Mock(wraps=submissions[-1].ended.is_set)
    submissions[-1].ended.is_set = looked  # type: ignore[method-assign]
    _, batch = shared.take_batch()
    assert [index for _, index in batch] == [*range(len(batch))]
    assert {submission for submission, _ in batch} == {submissions[1]}
    assert submissions[0].ended.is_set()
    assert looked.call_count <= 1


def test_a_closed_engine_for_batches_refuses_work(toy: Toy) -> None:
    shared = SharedBatchEngine(toy.translator.engine, 1)
    shared.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        shared.decode([SearchJob([5], 9)], SearchSettings(), threading.Event())


def test_a_model_that_cannot_translate_does_not_replace_one_that_can(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ModelPool(engine="torch", device="cpu")
    first = pool.load("toy", toy.run)

    def fail(_: ServedModel) -> None:
        raise UserError("it does not work")

    monkeypatch.setattr(ServedModel, "warm_up", fail)
    with pytest.raises(UserError, match="it does not work"):
        pool.load("toy", toy.run)
    assert pool.models == {"toy": first}
    assert first.translator.translate(["ba del fo!"])[0].text == "ol ebi ak!"
    pool.close()


def test_phrase_based_systems_are_served_one_request_at_a_time() -> None:
    shared, active = SharedEngine(None, 1), []

    def work(number: int) -> Callable[[], int]:
        def run() -> int:
            active.append(number)
            assert len(active) == 1
            return active.pop()

        return run

    with ThreadPoolExecutor(8) as clients:
        found = clients.map(lambda number: shared.bind(threading.Event()).run_model(work(number)), range(50))
        assert list(found) == list(range(50))
    shared.close()


def test_a_server_of_its_own_keeps_nothing_of_replaced_models(toy: Toy) -> None:
    """What is loaded is exempt from garbage collection, also in cycles, but not when it has been replaced."""
    pool, thresholds = ModelPool(), gc.get_threshold()
    with tune_garbage_collection(pool):
        replaced = pool.load("toy", toy.run)
        replaced.itself = replaced  # type: ignore[attr-defined]  # a cycle
        reference = ref(replaced)
        del replaced
        assert gc.get_freeze_count() > 0
        pool.load("toy", toy.run)
        assert reference() is None
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, thresholds)
    pool.close()


@pytest.mark.gpu
def test_500_requests_on_a_gpu_get_what_a_translator_gives(toy: Toy) -> None:
    """But for rounding, since a translator chooses other shapes of batches."""
    plain = load_as(Translator, toy.run, device="cuda")
    tasks, shared = make_tasks(plain, constraints=False), share_engine(plain, 1)
    with ThreadPoolExecutor(CLIENTS) as clients:
        found = list(clients.map(lambda task: finish(bind(plain, shared), task), tasks))
    shared.close()
    ours, theirs = (
        [one for lists in each for nbest in lists for one in nbest]
        for each in (found, translate_together(plain, tasks))
    )
    assert [one.text for one in ours] == [one.text for one in theirs]
    assert [one.score for one in ours] == pytest.approx([one.score for one in theirs], abs=1e-4)
