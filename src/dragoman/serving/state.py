"""The state of a server: its models, its threads, its keys, and whether it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dragoman.errors import UserError
from dragoman.inference.language_detection import load_guesser
from dragoman.run_dir import RunFolder
from dragoman.serving.keys import KeyStore
from dragoman.serving.model_pool import ModelPool
from dragoman.serving.settings import ServerSettings
from dragoman.serving.workers import WorkerPool

Runs = str | Path | Sequence[str | Path] | Mapping[str, str | Path]


@dataclass
class ServerState:
    """Whether the server is ready, and what it is made of (`app.state.server`)."""

    runs: dict[str, Path]  # to be loaded, by the names of their models
    settings: ServerSettings
    pool: ModelPool
    workers: WorkerPool
    keys: KeyStore | None
    is_loaded: bool = False
    is_stopping: bool = False
    models_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one model at a time is loaded or removed

    def is_ready(self) -> bool:
        return self.is_loaded and not self.is_stopping

    def load_models(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Load all runs; the server is ready afterwards. `progress` gets the name of each."""
        load_guesser()
        for name, run in self.runs.items():
            progress(name)
            self.pool.load(name, run)
        self.is_loaded = True


def name_runs(runs: Runs) -> dict[str, Path]:
    """Return run folders by name of model: the names of the folders, unless given as `NAME=RUN` or in a mapping."""
    if isinstance(runs, Mapping):
        named = [(name, Path(run)) for name, run in runs.items()]
    else:
        named = []
        for run in [runs] if isinstance(runs, str | Path) else runs:
            given, separator, path = str(run).partition("=")
            is_named = separator and not Path(run).exists()
            named.append((given, Path(path)) if is_named else (Path(run).resolve().name, Path(run)))
    if not named:
        raise UserError("there is nothing to serve; name a run folder")
    result: dict[str, Path] = {}
    for name, folder in named:
        if not name or "/" in name:
            raise UserError(f"{name!r} cannot be the name of a model; write NAME=RUN with another name")
        if name in result:
            raise UserError(f"two models are called {name!r}; name them: NAME=RUN")
        RunFolder(folder).check_format()
        result[name] = folder
    return result
