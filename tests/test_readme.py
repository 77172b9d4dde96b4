"""Every block of the README and the tutorial runs, in order, in one folder, as a newcomer would type it.

Settings appended to the commands keep training short. Commands are processes of their own, forked from one that has
already imported PyTorch.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from fork_server import fast_python, write_fast_commands

ROOT = Path(__file__).parents[1]
SHORT = (
    "train.steps=12 train.threads=1 train.tokens=512 train.validate_lines=4 model.width=32 model.layers=1 "
    "search.beam=1 search.max_ratio=0.5"  # an untrained model rarely predicts EOS
)
DEMO = "dragoman demo data.train.phrasebook=3000 tokenizer.size=1000"  # the command behind `make demo`, on less data


def find_blocks(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(bash|console|python|yaml)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_every_block_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = find_blocks((ROOT / page).read_text(encoding="utf-8"))
    assert {kind for kind, _ in blocks} >= {"bash", "python", "yaml"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a GPU may be full of other tests
    commands = write_fast_commands(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON_EXEC", fast_python())  # for the processes of `compare`
    for kind, text in blocks:
        run_block(kind, text, tmp_path)
    assert len((tmp_path / "dev.out").read_text(encoding="utf-8").split("\n")) == 201


@pytest.mark.slow
def test_every_block_of_the_page_on_alignment_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = write_fast_commands(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    blocks = find_blocks((ROOT / "docs/alignment.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 6
    for kind, text in blocks:
        run_block(kind, text, tmp_path)


@pytest.mark.slow
def test_every_block_of_the_pages_on_inspection_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = write_fast_commands(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    run_block("bash", DEMO, tmp_path)
    for page, count in {"docs/inspection.md": 5, "docs/attention-heads.md": 2}.items():
        blocks = find_blocks((ROOT / page).read_text(encoding="utf-8"))
        assert len(blocks) >= count
        for kind, text in blocks:
            run_block(kind, text.replace("--count 300", "--count 5"), tmp_path)
    for name in ("page", "target", "prefix", "training", "heads"):
        assert (tmp_path / f"{name}.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.slow
def test_every_block_of_the_page_on_serving_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = write_fast_commands(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    run_block("bash", DEMO, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    blocks = find_blocks((ROOT / "docs/serving.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 4
    for kind, text in blocks:
        run_block(kind, text.replace("5000", port) if kind == "bash" else text, tmp_path)


def run_block(kind: str, text: str, folder: Path) -> None:
    if kind == "yaml":
        name = re.match(r"# (\S+)", text)
        assert name, "a YAML block begins with the name of its file"
        (folder / name[1]).write_text(text, encoding="utf-8")
        return
    if kind == "python":
        text = text.replace("train.steps=30", SHORT.replace(" ", '", "'))
        command = [fast_python(), "-c", text]
    else:
        if kind == "console":  # commands after a prompt, with their output
            text = "\n".join(re.findall(r"^\$ (.*)$", text, flags=re.MULTILINE)).replace("make demo", DEMO)
            assert text, "a console block has a command"
        text = re.sub(r"^(dragoman (?:train|compare|demo)\b.*)$", rf"\1 {SHORT}", text, flags=re.MULTILINE)
        command = ["bash", "-euc", text]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
