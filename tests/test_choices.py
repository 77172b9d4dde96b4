"""What the machine decides is decided once, and kept."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from dragoman import door
from dragoman.config import TrainSettings
from dragoman.group import Group
from dragoman.train.choices import Choices, choose, rechosen
from dragoman.types import Mistake

BEFORE = Choices(device="cpu", precision="bf16", compile=True, threads=7, split=4)


def test_a_resumed_run_keeps_every_choice() -> None:
    """Whatever this machine would choose."""
    assert rechosen(BEFORE, TrainSettings()) == BEFORE
    assert rechosen(replace(BEFORE, precision="float32", compile=False), TrainSettings()).precision == "float32"


@pytest.mark.parametrize(
    ("name", "value"), [("precision", "float32"), ("compile", False), ("threads", 2), ("device", "cpu")]
)
def test_what_is_set_by_name_is_done(name: str, value: object) -> None:
    settings = TrainSettings(**{name: value})  # type: ignore[arg-type]
    assert getattr(choose(settings), name) == value
    assert rechosen(BEFORE, settings) == replace(BEFORE, **{name: value})  # type: ignore[arg-type]


def test_a_run_of_a_gpu_does_not_slip_onto_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = replace(BEFORE, device="cuda")
    with pytest.raises(Mistake, match=r"train\.device=cpu"):
        rechosen(before, TrainSettings())
    assert rechosen(before, TrainSettings(device="cpu")).device == "cpu"


def test_compile_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(Mistake, match=r"train\.compile"):
        choose(TrainSettings(compile=True, device="cpu"))
    assert not choose(TrainSettings(device="cpu")).compile


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_only_where_it_is_fast(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert choose(TrainSettings(device="cpu")).precision == ("bf16" if fast else "float32")


def test_autocast_is_what_was_chosen() -> None:
    for precision, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        with replace(BEFORE, precision=precision).autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_it_is_said_in_words() -> None:
    assert str(BEFORE) == "cpu, bf16, compiled, 7 threads, batches in 4 parts"
    assert str(Choices("cuda", "float32", False, 1)) == "cuda, float32, not compiled"


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "find_spec", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert door.choose_device("cpu").type == "cpu"
    for name in ("auto", "cuda"):
        with pytest.raises(Mistake, match="pip install triton"):
            door.choose_device(name)


def test_the_shapes_of_grids_stay_as_they_were_begun() -> None:
    """Which pairs share a batch hangs on them: neither more processes nor want of memory may change that."""
    begun = replace(BEFORE, few_shapes=True)
    assert rechosen(begun, TrainSettings(), world=2).few_shapes
    assert not rechosen(BEFORE, TrainSettings()).few_shapes
    assert begun.shared(Group(rank=0, world=2)).few_shapes
