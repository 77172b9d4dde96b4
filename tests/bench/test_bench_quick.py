"""Benches run from start to end in a few seconds with --quick, on a CPU without bf16 and VNNI too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toy_run import Toy

BENCH = Path(__file__).resolve().parents[2] / "bench"
OLD_CPU = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "CT2_FORCE_CPU_ISA": "AVX2"}


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **OLD_CPU, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCH / f"{name}.py"), *map(str, arguments), "--quick"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("name", ["translate_cpu", "engines"])
def test_benches_of_engines_leave_out_what_the_cpu_cannot_do(name: str, toy: Toy) -> None:
    pytest.importorskip("ctranslate2", reason="CTranslate2 has no wheel for every platform")
    pytest.importorskip("transformers", reason="the extra huggingface is not installed")
    files = ("--source", toy.folder / "dev.src", "--reference", toy.folder / "dev.trg")
    said = run(name, toy.run, *files)
    assert "Traceback" not in said.stderr, said.stderr
    assert "torch-bf16" in said.stderr
    assert "has no instructions for bf16" in said.stderr
    for engine in ("torch", "torch-int8", "ctranslate2", "ctranslate2-int8"):
        assert any(f"{engine} " in line.replace("`", " ") for line in said.stdout.splitlines()), said.stdout


def test_the_bench_of_training_trains() -> None:
    said = run("train_cpu", "--precisions", "float32")
    assert said.returncode == 0, said.stderr
    assert "| dragoman |" in said.stdout


def test_two_checkouts_are_compared_by_the_same_translations(toy: Toy) -> None:
    options = ("--rounds", 1, "--seconds", 0, BENCH.parent)
    command = [sys.executable, BENCH / "before_after.py", *options, "translate", toy.run]
    finished = subprocess.run(
        [*map(str, command), "--source", str(toy.folder / "dev.src"), "--beams", "2"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    [result] = json.loads(finished.stdout[finished.stdout.index("{\n") :])["results"].values()
    assert result["same_text"] == 1.0
    assert result["after / before"]["median"] == pytest.approx(result["after"] / result["before"], rel=0.1)
