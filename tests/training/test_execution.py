"""The execution plan is made once, and a resumed run keeps it."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from dragoman import hardware
from dragoman.config.settings import TrainSettings
from dragoman.errors import UserError
from dragoman.hardware import CpuFeatures
from dragoman.process_group import ProcessGroup
from dragoman.recipe import Recipe
from dragoman.training.execution import ExecutionPlan, plan_execution

BEFORE = ExecutionPlan(device="cpu", precision="bf16", compile=True, threads=7, batch_parts=4)


def resume_plan(before: ExecutionPlan, settings: TrainSettings | None = None, world: int = 1) -> ExecutionPlan:
    group = ProcessGroup(world_size=world)
    return plan_execution(Recipe(train=settings or TrainSettings()), resumed_plan=before, group=group)


def test_a_resumed_run_keeps_its_plan() -> None:
    """It does so even if another plan would be faster on this machine."""
    assert resume_plan(BEFORE) == BEFORE
    assert resume_plan(replace(BEFORE, precision="float32", compile=False)).precision == "float32"


@pytest.mark.parametrize(
    ("name", "value"), [("precision", "float32"), ("compile", False), ("threads", 2), ("device", "cpu")]
)
def test_explicit_settings_take_precedence(name: str, value: object) -> None:
    settings = TrainSettings(**{name: value})  # type: ignore[arg-type]
    assert getattr(plan_execution(Recipe(train=settings)), name) == value
    assert resume_plan(BEFORE, settings) == replace(BEFORE, **{name: value})  # type: ignore[arg-type]


def test_gpu_run_is_not_resumed_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = replace(BEFORE, device="cuda", batch_parts=1, bucketed_shapes=True, use_cuda_graphs=True)
    with pytest.raises(UserError, match=r"train\.device=cpu"):
        resume_plan(before)
    there = resume_plan(before, TrainSettings(device="cpu"))
    assert there == replace(before, device="cpu", compile=False, use_cuda_graphs=False)


@pytest.mark.parametrize(("there", "world", "goes_on"), [(1, 1, False), (2, 1, True), (1, 4, True), (0, 4, False)])
def test_run_on_a_second_gpu_needs_it_or_several_processes(
    monkeypatch: pytest.MonkeyPatch, there: int, world: int, goes_on: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    before = replace(BEFORE, device="cuda:1")
    if goes_on:
        assert resume_plan(before, world=world).device == ("cuda:1" if world == 1 else "cuda:0")
        return
    with pytest.raises(UserError, match="started on cuda:1"):
        resume_plan(before, world=world)


@pytest.mark.parametrize(("accumulate", "split", "captured"), [(1, 1, True), (2, 1, False), (1, 2, False)])
def test_steps_run_as_cuda_graphs_where_possible(
    monkeypatch: pytest.MonkeyPatch, accumulate: int, split: int, captured: bool
) -> None:
    """This includes a single process that resumes a run of several processes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    several = replace(BEFORE, device="cuda:0", batch_parts=split, bucketed_shapes=True, world_size=2)
    assert resume_plan(several, TrainSettings(accumulate=accumulate)).use_cuda_graphs == captured


def test_compile_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UserError, match=r"train\.compile"):
        plan_execution(Recipe(train=TrainSettings(compile=True, device="cpu")))
    assert not plan_execution(Recipe(train=TrainSettings(device="cpu"))).compile


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_only_where_it_is_fast(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(hardware, "cpu_features", lambda: CpuFeatures(avx512=True, bf16=fast))
    assert plan_execution(Recipe(train=TrainSettings(device="cpu"))).precision == ("bf16" if fast else "float32")


def test_autocast_has_the_planned_precision() -> None:
    for precision, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        with replace(BEFORE, precision=precision).autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_plan_is_described_in_words() -> None:
    assert str(BEFORE) == "cpu, bf16, compiled, 7 threads, batches in 4 parts"
    assert str(ExecutionPlan("cuda", "float32", False, 1)) == "cuda, float32, not compiled"


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "find_spec", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert hardware.choose_device("cpu").type == "cpu"
    for name in ("auto", "cuda"):
        with pytest.raises(UserError, match="pip install triton"):
            hardware.choose_device(name)


def test_resumed_run_keeps_bucketed_shapes() -> None:
    """Bucketing decides which pairs share a batch, which neither more processes nor less memory may change."""
    begun = replace(BEFORE, bucketed_shapes=True)
    assert resume_plan(begun, world=2).bucketed_shapes
    assert not resume_plan(BEFORE).bucketed_shapes
