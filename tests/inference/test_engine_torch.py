"""The engine's laws: what flows through slots is what a lone search finds, whatever the company and the precision."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.decoding import continuous_batching as flow
from dragoman.decoding.methods import SEARCH_METHODS, SearchSettings, apply_method_settings
from dragoman.decoding.protocol import DecodingConstraints, Ensemble, SearchJob, SearchResult
from dragoman.errors import UserError
from dragoman.hardware import CpuFeatures, cpu_features
from dragoman.inference.engines import torch as torch_engine
from dragoman.inference.engines.torch import PRECISIONS, Int8Linear, TorchEngine, prepare_model
from dragoman.types import EOS
from tolerance import DEVICES
from toy_engine import MODELS, model_of, random_jobs
from toy_requests import beam_search

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
SUPPORTED = [name for name in PRECISIONS if name != "bf16" or cpu_features().bf16]  # others are refused, see below
COMPANY = 9  # sentences side by side


def engine(model: Any, device: torch.device = CPU) -> TorchEngine:
    return TorchEngine(model, device, lambda tokens: " ".join(map(str, tokens)))


@contextmanager
def workers(count: int) -> Iterator[None]:
    """So many cores to work on."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def alone(model: Any, job: SearchJob, search: SearchSettings, device: torch.device = CPU) -> list[SearchResult]:
    source_BS = torch.tensor([[*job.ids, EOS]], device=device)
    options: Any = {"width": search.beam, "nbest": search.nbest, "stop": search.stop, "norm": search.length_norm}
    return beam_search(model, source_BS, source_BS > 0, torch.tensor([job.max_tokens]), **options)[0]


def close(found: list[SearchResult], wanted: list[SearchResult], limit: float = 1e-4) -> None:
    assert [(one.tokens, one.finished) for one in found] == [(one.tokens, one.finished) for one in wanted]
    assert [one.score for one in found] == pytest.approx([one.score for one in wanted], abs=limit)


@pytest.mark.parametrize("section", MODELS, ids=str)
@pytest.mark.parametrize("beam", [1, 3])
def test_slots_find_what_a_lone_search_finds(section: dict[str, Any], beam: int, monkeypatch: Any) -> None:
    """Few slots, so that sentences come and go; every model kind."""
    monkeypatch.setattr(torch_engine, "choose_rows", lambda *_: 4 * beam)
    model, search = model_of(**section), SearchSettings(beam=beam, nbest=beam)
    jobs = random_jobs(9, longest=24)
    for job, found in zip(jobs, engine(model).search(jobs, search), strict=True):
        close(found, alone(model, job, search))


def test_an_ensemble_flows_too(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch_engine, "choose_rows", lambda *_: 12)
    model, search, jobs = Ensemble([model_of(), model_of(kind="rnn")]), SearchSettings(beam=3), random_jobs(20)
    for job, found in zip(jobs, engine(model).search(jobs, search), strict=True):
        close(found, alone(model, job, search))


@pytest.mark.parametrize("method", SEARCH_METHODS)
def test_every_method_and_constraint_flows(method: str, monkeypatch: Any) -> None:
    """Sentences that come and go, some with a prefix or a least length: as one at a time, to the bit."""
    model = prepare_model(model_of(width=64), CPU, "float32")
    search = apply_method_settings(SearchSettings(method=method, samples=4, no_repeat=3, max_expansions=200))
    wishes: list[dict[str, Any]] = [{}, {"prefix": (7, 8)}, {"min_tokens": 6}]
    jobs = [
        job._replace(constraints=DecodingConstraints(seed_text=str(i), **wishes[i % 3]))
        for i, job in enumerate(random_jobs(12, longest=12))
    ]
    expected = [found for job in jobs for found in engine(model).search([job], search)]
    monkeypatch.setattr(torch_engine, "choose_rows", lambda *_: 12)
    assert engine(model).search(jobs, search) == expected


@pytest.mark.parametrize("precision", SUPPORTED)
@pytest.mark.parametrize("section", [{}, {"kind": "rnn", "cell": "lstm"}], ids=str)
def test_company_changes_nothing_to_the_bit(precision: str, section: dict[str, Any], monkeypatch: Any) -> None:
    """One at a time, a few, all; in any order; with one worker and with two: every precision."""
    model, search = prepare_model(model_of(width=64, **section), CPU, precision), SearchSettings(beam=4)
    jobs = random_jobs(COMPANY)
    expected = engine(model).search(jobs, search)
    assert [found for job in jobs for found in engine(model).search([job], search)] == expected
    order = sorted(range(COMPANY), key=lambda i: i * 7 % COMPANY)
    for rows in (8, 512):
        monkeypatch.setattr(torch_engine, "choose_rows", lambda *_, rows=rows: rows)
        found = engine(model).search([jobs[i] for i in order], search)
        assert [found[order.index(i)] for i in range(COMPANY)] == expected
    with workers(2):
        assert engine(model).search(jobs, search) == expected


@pytest.mark.parametrize("precision", SUPPORTED)
@pytest.mark.parametrize("section", MODELS, ids=str)
def test_a_model_made_ready_is_the_model(section: dict[str, Any], precision: str) -> None:
    """On average: a model of random weights blows single errors up."""
    limit = {"float32": 1e-6, "bf16": 0.1, "int8": 0.1}[precision]
    model = model_of(width=64, **section)
    made = prepare_model(model, CPU, precision)
    source_BS = torch.randint(4, 40, (5, 9))
    with torch.inference_mode():
        logps = [one.step(torch.full((5,), 2), one.start(source_BS, source_BS > 0))[0] for one in (model, made)]
    assert (logps[0] - logps[1]).abs().mean() < limit * logps[0].abs().mean()
    assert precision == "float32" or not logps[0].equal(logps[1])  # it has indeed less precision


FEATURES = [cpu_features(), CpuFeatures(), CpuFeatures(avx2=True), CpuFeatures(avx2=True, avx512=True)]


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 128, 256), (4, 64, 64), (256, 192, 70), (7, 30, 13)])
def test_int8_products_are_exact_sums_of_integers(features: CpuFeatures, rows: int, inputs: int, outputs: int) -> None:
    """The largest inputs on the largest weights: what saturates in 16 bits if there is no VNNI."""
    linear = torch.nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        linear.weight[:, : inputs // 2] = 1.0
    x_NI = torch.rand(rows, inputs) * 2 - 1
    x_NI[:, : inputs // 2] = 1.0
    made = Int8Linear(linear, features)
    largest = Int8Linear.MAX_WEIGHT if features.exact_int8 else Int8Linear.MAX_WEIGHT_WITHOUT_VNNI
    assert features.exact_int8 or 2 * 255 * largest < 2**15
    weight_OI = (linear.weight.detach() / made.scale_O[:, None]).round().long()
    assert weight_OI.abs().max() == largest
    scale_N1 = x_NI.abs().amax(1, keepdim=True) / 127
    whole_NI = ((x_NI / scale_N1) + Int8Linear.ZERO_POINT + 0.5).to(torch.uint8).long() - Int8Linear.ZERO_POINT
    exact_NO = (whole_NI @ weight_OI.T).double() * made.scale_O.double() * scale_N1.double()
    assert (made(x_NI) - exact_NO).abs().max() < 1e-6 * exact_NO.abs().max()


@pytest.mark.parametrize("features", [CpuFeatures(), CpuFeatures(avx2=True)], ids=str)
def test_bf16_without_instructions_is_refused(features: CpuFeatures) -> None:
    with pytest.raises(UserError, match=r"no instructions for bf16; use float32 \(--engine torch\)"):
        prepare_model(model_of(), CPU, "bf16", features)


def test_int8_on_a_gpu_is_refused() -> None:
    with pytest.raises(UserError, match="int8 needs a CPU and a PyTorch with oneDNN"):
        prepare_model(model_of(), torch.device("meta"), "int8")


def test_a_worker_that_fails_speaks_for_all() -> None:
    class Broken:
        def start(self, *_: Any) -> Any:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        engine(Broken()).search(random_jobs(9), SearchSettings())


INTERRUPTED = """
import signal
import sys

import torch

from test_engine_torch import SearchSettings, engine, model_of, random_jobs

signal.signal(signal.SIGALRM, lambda *_: sys.exit(143))
torch.set_num_threads(2)
signal.setitimer(signal.ITIMER_REAL, 0.5)
while True:
    engine(model_of()).search(random_jobs(500), SearchSettings())
"""


def test_who_is_interrupted_ends_in_peace() -> None:
    """Workers give up and are waited for: one that computes while the program ends makes it abort."""
    support = Path(__file__).parents[1] / "support"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143, "")


def test_answers_of_one_step_are_all_told() -> None:
    """Fewer jobs than the rows that a step has at least, all done at once."""
    model, search, jobs = (
        model_of(),
        SearchSettings(beam=1),
        [SearchJob([5, 6], 1), SearchJob([7], 1), SearchJob([8, 9, 4], 1)],
    )
    for job, found in zip(jobs, engine(model).search(jobs, search), strict=True):
        close(found, alone(model, job, search))


def test_every_job_is_handed_out_once_the_longest_first() -> None:
    jobs = [SearchJob([5] * length, 9) for length in (3, 9, 1, 9, 4)]
    queue = flow.JobQueue(jobs, range(5))
    handed = [number for count in (2, 2, 2, 2) for number in queue.next(count)]
    assert sorted(handed) == list(range(5))
    assert [len(jobs[number].ids) for number in handed] == [9, 9, 4, 3, 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("section", [{}, {"norm_place": "post"}, {"position": "rotary"}], ids=str)
def test_slots_in_place_find_what_a_lone_search_finds(
    section: dict[str, Any], beam: int, device: str, monkeypatch: Any
) -> None:
    """As they run on a GPU, where a step is captured besides."""
    where = torch.device(device)
    model, search, jobs = model_of(**section).to(where), SearchSettings(beam=beam, nbest=beam), random_jobs(12)
    expected = [alone(model, job, search, where) for job in jobs]
    monkeypatch.setattr(torch_engine, "choose_rows", lambda *_: 4 * beam)
    monkeypatch.setattr(torch_engine, "use_cuda_graph", lambda *_: True)
    ours = engine(model, where)
    with workers(1):
        for _ in range(2):  # the second time in the same slots
            found = ours.search(jobs, search)
            assert ours.gpu_scheduler.pools
            for answers, wanted in zip(found, expected, strict=True):
                close(answers, wanted, 1e-3)


def test_with_little_memory_few_are_answered_at_a_time(monkeypatch: Any) -> None:
    """And slots of other shapes are given up for new ones."""
    model, search, jobs = model_of(), SearchSettings(beam=2), random_jobs(40)
    monkeypatch.setattr(torch_engine, "choose_rows", lambda *_: 64)
    monkeypatch.setattr(torch_engine, "use_cuda_graph", lambda *_: True)
    found = []
    for memory in (1 << 40, 1 << 21):
        monkeypatch.setattr(flow, "total_memory", lambda _, memory=memory: memory)
        ours = engine(model)
        with workers(1):
            found.append(ours.search([*jobs, SearchJob([5] * 40, 100)], search))
        gpu = ours.gpu_scheduler
        few = memory == 1 << 21
        assert gpu.used_bytes <= 4 * gpu.pool_bytes if few else len(gpu.pools) > 1
        assert (max(len(slots.job_numbers) for slots in gpu.pools.values()) < 32) is few
    for one, other in zip(*found, strict=True):
        close(one, other)
