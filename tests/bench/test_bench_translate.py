"""The benches of translation read files as the library does: a line for every newline, and none after the last."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
LINES = ["one\u2028line", "", "three"]


@pytest.mark.parametrize(
    ("name", "given", "times"), [("translate_cpu", ["--lines", "9"], 1), ("translate_gpu", ["--repeat", "2"], 2)]
)
def test_lines_are_those_of_the_library(
    name: str, given: list[str], times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # which the script would set for good
    bench: Any = importlib.import_module(name)
    seen = []

    def compare(_: object, __: object, lines: list[str], references: list[str], *rounds: float) -> dict[str, Any]:  # noqa: ARG001
        seen.extend([lines, references])
        return {}

    for each in ("load_as", "open_huggingface", "open_dragoman"):
        monkeypatch.setattr(bench, each, lambda *_, **__: None)
    monkeypatch.setattr(bench, "compare", compare)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    file = tmp_path / "lines.txt"
    file.write_bytes("\n".join([*LINES, ""]).encode())
    monkeypatch.setattr(sys, "argv", [name, "run", "--source", str(file), "--reference", str(file), *given])
    bench.main()
    assert seen == [LINES * times] * 4  # two beams
