"""Fixtures for the toy language: commands that run in this process, and a model that is trained once."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from dragoman.cli import main as cli
from dragoman.inference.translator import Translator
from fork_server import fast_python
from shared_folders import make_once
from toy_run import SMALL, Call, CommandResult, Toy, run_process, write_corpus, write_recipe


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return a function that runs a command in this process, which is faster than a new Python."""

    def run(*arguments: object, stdin: bytes = b"") -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["dragoman", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert isinstance(end.value.code, int)
        return CommandResult(end.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def fast_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the Python processes of a command as forks of the server."""
    monkeypatch.setattr(sys, "executable", fast_python())


def train_toy(folder: Path) -> None:
    """Train by a command in a real process, not a fork of the server; keep its output in output.json."""
    write_corpus(folder, train=2000, dev=100)
    arguments = ("train", write_recipe(folder / "recipe.yaml"), "--out", folder / "run")
    output = run_process(*arguments, python=sys.executable)
    assert output.code == 0, output.err
    (folder / "output.json").write_text(json.dumps(output))


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    original, folder = make_once(tmp_path_factory, "toy", train_toy)
    output = CommandResult(*json.loads((folder / "output.json").read_text()))
    return Toy(folder, original / "recipe.yaml", folder / "run", output)  # a run is resumed with the same paths


@pytest.fixture(scope="module")
def translator(toy: Toy) -> Translator:
    return toy.translator


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return the recipe of a run that takes half a second, in a separate folder."""
    write_corpus(tmp_path)
    return write_recipe(tmp_path / "recipe.yaml", **SMALL)
