"""Fixtures around the toy language: commands within this process, and a model that is trained once."""

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
    """A command within this process: the same entry, without the second that a new Python takes."""

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
    """Fork the Python processes that a command starts from the server."""
    monkeypatch.setattr(sys, "executable", fast_python())


def train_toy(folder: Path) -> None:
    """Train by a command in a real process, not a fork of the server; keep its output in said.json."""
    write_corpus(folder, train=2000, dev=100)
    arguments = ("train", write_recipe(folder / "recipe.yaml"), "--out", folder / "run")
    said = run_process(*arguments, python=sys.executable)
    assert said.code == 0, said.err
    (folder / "said.json").write_text(json.dumps(said))


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    original, folder = make_once(tmp_path_factory, "toy", train_toy)
    said = CommandResult(*json.loads((folder / "said.json").read_text()))
    return Toy(folder, original / "recipe.yaml", folder / "run", said)  # a run is resumed with the paths it began with


@pytest.fixture(scope="module")
def translator(toy: Toy) -> Translator:
    return toy.translator


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The recipe of a run that takes half a second, in a folder of its own."""
    write_corpus(tmp_path)
    return write_recipe(tmp_path / "recipe.yaml", **SMALL)
