"""The chapter on statistical MT shows the real output of its blocks: all of them run, in order, in one folder.

`python tests/test_statistical_page.py` writes the output into the page again, after a change of the code or the page.
Numbers may differ by the rounding errors of other processors.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fork_server import fast_python, write_fast_commands

PAGE = Path(__file__).parents[1] / "docs/statistical-mt.md"
BLOCK = re.compile(r"^```(bash|console|python|yaml)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# `compare` is only run, on few pairs and for few steps; its scores in the page come from a file of results.
SHORT = (
    "'data.train={source: corpus/dev.en, target: corpus/dev.de}' 'data.test={phrasebook: 5}' train.steps=4 "
    "train.threads=1 train.validate_lines=2 tokenizer.size=400 search.beam=1"
)


def run_command(command: str) -> str:
    done = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_block(kind: str, text: str, names: dict[str, Any]) -> tuple[str, str | None]:
    """Run a block; return it as the page should show it, and the output that should stand below it, if any."""
    if kind == "yaml":
        name = re.match(r"# (\S+)", text)
        assert name, "a YAML block begins with the name of its file"
        Path(name[1]).write_text(text, encoding="utf-8")
    elif kind == "python":
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(text, "a block of the page", "exec"), names)
        return text, output.getvalue() or None
    elif kind == "console":
        commands = re.findall(r"^\$ (.*)$", text, flags=re.MULTILINE)
        return "".join(f"$ {command}\n{run_command(command)}" for command in commands), None
    else:
        run_command(re.sub(r"^(dragoman compare .*)$", rf"\1 {SHORT}", text, flags=re.MULTILINE))
    return text, None


def run_page(page: str) -> str:
    """Run all blocks of a page in the current folder; return the page with their output."""
    names: dict[str, Any] = {"__name__": "page"}

    def render(block: re.Match[str]) -> str:
        kind, text, _ = block.groups()
        shown, output = run_block(kind, text, names)
        return f"```{kind}\n{shown}```\n" + (f"\n```text\n{output}```\n" if output is not None else "")

    return BLOCK.sub(render, page)


def list_differences(shown: str, found: str) -> Iterator[str]:
    """Yield the lines that differ by more than spaces and the last digits of numbers."""
    lines = [[" ".join(line.split()) for line in text.splitlines()] for text in (shown, found)]
    for one, two in zip(*lines, strict=False):
        numbers = zip(NUMBER.findall(one), NUMBER.findall(two), strict=False)
        if NUMBER.sub("0", one) != NUMBER.sub("0", two) or not all(are_close(*pair) for pair in numbers):
            yield f"the page shows: {one}\nthe output is:  {two}"
    if len(lines[0]) != len(lines[1]):
        yield f"the page has {len(lines[0])} lines, and with the output of its blocks {len(lines[1])}"


def are_close(shown: str, found: str) -> bool:
    """Return whether two numbers differ by at most 5 % or one unit of the last digit."""
    one, two = (float(number.replace(",", "")) for number in (shown, found))
    unit = 10.0 ** -len(shown.partition(".")[2])
    return abs(one - two) <= max(0.05 * abs(one), 1.01 * unit)


@contextlib.contextmanager
def prepare_folder(folder: Path) -> Iterator[None]:
    """Work in a folder, with commands that start without delay."""
    commands = write_fast_commands(folder / "bin")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(commands), prepend=os.pathsep)
        patch.setenv("PYTHON_EXEC", fast_python())  # for the processes of `compare`
        yield


@pytest.mark.slow
def test_page_shows_the_output_of_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a GPU may be full of other tests
    page = PAGE.read_text(encoding="utf-8")
    with prepare_folder(tmp_path):
        found = run_page(page)
    assert list(list_differences(page, found)) == []


def test_scores_of_the_page_are_measured() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Beside a neural model")[1].split("\n## ")[0]
    [name] = re.findall(r"`(bench/results/.*?\.json)`", section)
    rows = re.findall(r"^\| (?:phrase-based|LSTM with attention) \|.*$", section, re.MULTILINE)
    models = json.loads((PAGE.parents[1] / name).read_text(encoding="utf-8"))["models"]
    for row, model in zip(rows, (models["smt"], models["lstm"]), strict=True):
        bleu, chrf, seconds = (float(number) for number in NUMBER.findall(row))
        assert bleu == round(model["bleu test"], 1)
        assert chrf == round(model["chrf test"], 1)
        assert seconds == round(model["train_seconds"])


def test_scores_by_data_size_are_measured() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## How much data each needs")[1].split("\n## ")[0]
    scores: dict[tuple[str, int], list[float]] = {}
    for file in (PAGE.parents[1] / "bench" / "results").glob("2026-11-18-data-sizes-*.json"):
        for result in json.loads(file.read_text(encoding="utf-8")):
            scores.setdefault((result["system"], result["size"]), []).append(result["scores"]["bleu_moses_de"])
    sizes = sorted({size for _, size in scores})
    names = {"transformer": "Transformer", "lstm": "LSTM with attention", "smt": "phrase-based SMT"}
    for system, name in names.items():
        [row] = re.findall(rf"^\| {name} \|(.*)\|$", section, re.MULTILINE)
        means = [sum(scores[system, size]) / 3 for size in sizes]
        assert [float(cell.split("±")[0]) for cell in row.split("|")] == [round(mean, 1) for mean in means]


def test_differences_are_seen() -> None:
    """More than rounding, other words, and missing lines are differences; spaces are not."""
    assert not list(list_differences("score -12.34  a\n", "score -12.35 a\n"))
    for other in ("score -13.34 a\n", "score -12.34 b\n", "score -12.34 a\nb\n", ""):
        assert list(list_differences("score -12.34 a\n", other)), other


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary, prepare_folder(Path(temporary)):
        PAGE.write_text(run_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
