"""Servers with models of known languages: the toy model as English to German, and as German to English."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dragoman.run_dir import RunFolder
from dragoman.serving.settings import ServerSettings
from toy_run import Toy
from toy_server import ToyServer, serve_in_thread


def copy_run(run: Path, copy: Path, source: str, target: str) -> Path:
    """Copy a run folder and set its languages."""
    shutil.copytree(run, copy)
    folder = RunFolder(copy)
    recipe = folder.load_recipe()
    data = recipe.data.model_copy(update={"source_language": source, "target_language": target})
    folder.save_recipe(recipe.model_copy(update={"data": data}))
    return copy


@pytest.fixture(scope="session")
def language_runs(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("languages")
    return [copy_run(toy.run, folder / f"{pair[0]}-{pair[1]}", *pair) for pair in (("en", "de"), ("de", "en"))]


@pytest.fixture(scope="session")
def language_server(language_runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyServer]:
    """Return a server with two directions. Tests that share it leave no glossaries behind."""
    folder = tmp_path_factory.mktemp("glossaries")
    with serve_in_thread(language_runs, ServerSettings(log_requests=False, glossary_folder=folder)) as server:
        yield server
