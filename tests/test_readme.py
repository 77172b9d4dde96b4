"""Every block of the README runs, in order, in one folder, as a newcomer would type it.

Training is cut short by settings that are laid over the README's own; `make` lines are run by .ci/run itself. Commands
are processes of their own, forks of one that has imported PyTorch already.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toy_shell import fast_commands

ROOT = Path(__file__).parents[1]
SHORT = (
    "train.steps=12 train.threads=1 train.tokens=512 train.validate_lines=4 model.width=32 model.layers=1 "
    "search.beam=1 search.max_ratio=0.5"  # who has hardly learned knows no end
)


def blocks(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(bash|python|yaml)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {kind for kind, _ in found} == {"bash", "python", "yaml"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a GPU may be full of other tests
    with fast_commands(tmp_path / "bin") as commands:
        monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
        for kind, text in found:
            if not text.startswith("make "):
                run_block(kind, text, tmp_path)
    assert len((tmp_path / "dev.out").read_text(encoding="utf-8").split("\n")) == 201


def run_block(kind: str, text: str, folder: Path) -> None:
    if kind == "yaml":
        name = re.match(r"# (\S+)", text)
        assert name, "a YAML block begins with the name of its file"
        (folder / name[1]).write_text(text, encoding="utf-8")
        return
    if kind == "python":
        text = text.replace("train.steps=30", SHORT.replace(" ", '", "'))
        command = [sys.executable, "-c", text]
    else:
        text = re.sub(r"^(dragoman (?:train|compare) .*)$", rf"\1 {SHORT}", text, flags=re.MULTILINE)
        command = ["bash", "-euc", text]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
