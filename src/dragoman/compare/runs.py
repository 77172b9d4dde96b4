"""The runs of a comparison: each recipe with each seed, on the same data, with the same training budget.

`plan_runs` checks the recipes and lists the runs. `run_in_processes` trains and measures every run in a process of its
own, so that its memory use can be measured. An interrupted run resumes, and a measured run is not repeated.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.compare.measure import MEASUREMENT_VERSION, measure_run
from dragoman.config.settings import LIMITS, METRIC_ALIASES, format_settings
from dragoman.data.corpus import DataSettings
from dragoman.errors import UserError
from dragoman.hardware import thread_limited_environment
from dragoman.io import write_text
from dragoman.progress import Report
from dragoman.recipe import Recipe, read_recipe
from dragoman.run_dir import RunFolder, read_json
from dragoman.training.prepare import check_files
from dragoman.training.start import MAY_CHANGE, check_settings, find_changed_setting
from dragoman.training.trainer import train

QUESTIONS_FILE = "questions.yaml"  # beside the recipes: questions about the results (questions.py)
BATCH_SETTINGS = ("tokens", "accumulate")  # must be equal if the budget is a number of steps
# Settings without effect on results, by section: a finished run is reused although they have changed. These are the
# settings that a resumed run may change, except those that decide when training stops (LIMITS, patience) and `average`.
IGNORED_SETTINGS = {"train": MAY_CHANGE["train"] - {*LIMITS, "patience", "average"}, "data": {"cache"}}
POLL_SECONDS = 0.05  # between two checks of the processes
SAVE_SECONDS = 60.0  # for an interrupted process to save a checkpoint and exit


class PlannedRun(NamedTuple):
    """A run of a comparison. `name` is that of the recipe file; `recipe` contains this run's seed."""

    name: str
    seed: int
    recipe: Recipe
    folder: Path

    def file(self, suffix: str) -> Path:
        """Return a file beside the run folder: .yaml (recipe), .log (output) or .json (measurements)."""
        return self.folder.with_name(f"{self.folder.name}{suffix}")


def plan_runs(paths: Sequence[Path], out: Path, overrides: Sequence[str], seeds: int) -> list[PlannedRun]:
    """Return every recipe with the first seed, then every recipe with the second, so that each model has results early.

    Recipes that cannot be compared are refused. A folder `out` with runs of other recipes or settings is refused too.
    """
    recipes: dict[str, Recipe] = {}
    for path in find_recipes(paths):
        if path.stem in recipes:
            raise UserError(
                f"two recipes are called {path.stem!r}; rename {str(path)!r}, since runs have the names of recipes"
            )
        try:
            recipes[path.stem] = read_recipe(path, overrides)
            check_settings(recipes[path.stem])
            check_files(recipes[path.stem])
        except UserError as error:
            message = str(error)
            raise UserError(message if str(path) in message else f"{path}: {message}") from None
    check_comparable(recipes)
    runs = []
    for offset in range(seeds):
        for name, recipe in recipes.items():
            settings = recipe.train.model_copy(update={"seed": recipe.train.seed + offset})
            folder = out / "runs" / f"{name}-seed{settings.seed}"
            runs.append(PlannedRun(name, settings.seed, recipe.model_copy(update={"train": settings}), folder))
    for run in runs:
        old = RunFolder(run.folder)
        was_started = old.format_file.exists()
        if was_started and (change := find_changed_setting(old.load_recipe(), run.recipe, IGNORED_SETTINGS)):
            setting, before, now = change
            difference = f"was trained with {setting}={before!r}, but the recipe has {now!r}"
            raise UserError(f"{str(run.folder)!r} {difference}; remove the folder, or choose another --out")
    existing = {path.name.rpartition("-seed")[0] for path in (out / "runs").glob("*-seed*") if path.is_dir()}
    if others := sorted(existing - recipes.keys()):
        raise UserError(
            f"{str(out)!r} contains runs of other recipes ({', '.join(others)}); add these, or choose another --out"
        )
    return runs


def find_recipes(paths: Sequence[Path]) -> list[Path]:
    """Return the recipe files: each path that is a file, and the *.yaml files of each folder, sorted by name."""
    recipe_files: list[Path] = []
    for path in paths:
        files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
        files = [file for file in files if file.name != QUESTIONS_FILE]
        if not files:
            raise UserError(f"there is no recipe (*.yaml) in the folder {str(path)!r}")
        recipe_files += files
    if not recipe_files:
        raise UserError("compare needs recipes: name files, or folders that contain recipes, such as recipes/lectures")
    return recipe_files


def check_comparable(recipes: Mapping[str, Recipe]) -> None:
    """Refuse recipes that differ in task, data or budget, or that have nothing to be evaluated on.

    Phrase-based systems have no budget: their training ends after its last stage.
    """
    # Settings that must be equal -> what to do if they are not
    remedies = {"model.task": "only models of one task (model.kind) can be compared"}
    remedies |= {f"data.{key}": "a comparison needs the same data for all" for key in DataSettings.model_fields}
    del remedies["data.cache"]  # has no effect on results
    check_equal(recipes, remedies)
    neural = {name: recipe for name, recipe in recipes.items() if recipe.model.kind != "smt"}
    has_step_budget, budget_remedies = any(recipe.train.steps for recipe in neural.values()), dict[str, str]()
    for key in (*LIMITS, *(BATCH_SETTINGS if has_step_budget else ())) if neural else ():
        example = f"train.{key}={getattr(next(iter(neural.values())).train, key):g}"
        budget_remedies[f"train.{key}"] = f"give all the same budget, such as {example} on the command line"
    check_equal(neural, budget_remedies)
    for name, recipe in recipes.items():
        if not (recipe.data.test or recipe.data.dev):
            raise UserError(f"{name!r} has nothing to be evaluated on; name a corpus under data.test or data.dev")


def check_equal(recipes: Mapping[str, Recipe], remedies: Mapping[str, str]) -> None:
    """Refuse recipes that differ in one of the settings; `remedies` are the settings and what to do then."""
    for name, recipe in recipes.items():
        first_name, first = next(iter(recipes.items()))
        for key, remedy in remedies.items():
            first_value, value = attrgetter(key)(first), attrgetter(key)(recipe)
            if value != first_value:
                raise UserError(
                    f"{key} is not the same in {first_name!r} and {name!r} "
                    f"({format_value(first_value)}, {format_value(value)}); {remedy}"
                )


def format_value(value: object) -> str:
    """Return a setting's value as text for a message. Of a corpus, only the non-default settings are shown."""
    if isinstance(value, tuple):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    return str(value.model_dump(exclude_defaults=True)) if hasattr(value, "model_dump") else repr(value)


def read_measurements(run: PlannedRun) -> dict[str, Any] | None:
    """Return the measurements of a finished run; None if the run has to be measured (again).

    This is the case if the file is missing or damaged, of another MEASUREMENT_VERSION, or has old names of metrics.
    """
    with suppress(UserError):
        saved = read_json(run.file(".json"))
        metrics = {name for test in saved.get("tests", {}).values() for name in test.get("scores", {})}  # type: ignore[attr-defined]
        return saved if saved.get("version") == MEASUREMENT_VERSION and not metrics & set(METRIC_ALIASES) else None
    return None


def train_and_measure(recipe_file: Path, folder: Path) -> None:
    """Train a run, or resume it, and measure it. If the parent process ends, save a checkpoint and exit."""

    def end_with_parent() -> None:
        os.read(0, 1)  # stdin is a pipe that closes when the parent ends; sys.stdin would block the exit
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    recipe = read_recipe(recipe_file)
    train(recipe, out=folder, resume=RunFolder(folder).format_file.exists())
    measurements = measure_run(folder, device=recipe.train.device)
    write_text(folder.with_name(f"{folder.name}.json"), json.dumps(measurements, indent=1) + "\n")


def run_in_processes(runs: Sequence[PlannedRun], report: Report, *, jobs: int) -> dict[Path, str]:
    """Train and measure all runs, `jobs` at a time. Return the error messages of failed runs, by folder.

    A failed run does not stop the others. On Ctrl-C, all processes get time to save a checkpoint.
    """
    waiting = [run for run in runs if read_measurements(run) is None]
    if len(waiting) < len(runs):
        report.log(f"{len(runs) - len(waiting)} of {len(runs)} runs were finished before")
    active: list[Worker] = []
    failures: dict[Path, str] = {}
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                run = waiting.pop(0)
                report.log(f"run {len(runs) - len(waiting)} of {len(runs)}: {run.name}, seed {run.seed}")
                active.append(Worker(run, jobs=jobs))
            time.sleep(POLL_SECONDS)
            for worker in [worker for worker in active if worker.poll() is not None]:
                active.remove(worker)
                run = worker.run
                if worker.close():
                    output = run.file(".log").read_text(encoding="utf-8", errors="replace")
                    lines = [line for line in output.splitlines() if line.strip()] or [
                        "the process ended without a message"
                    ]
                    failures[run.folder] = lines[-1].removeprefix("dragoman: ")
                    report.log(f"{run.name}, seed {run.seed} failed: {failures[run.folder]}")
                elif jobs > 1:
                    report.log(f"finished: {run.name}, seed {run.seed}")
    finally:
        for worker in active:
            worker.process.terminate()
        for worker in active:
            worker.close()
    return failures


class Worker:
    """A process that trains and measures a run. Its output goes to a log file and, if `jobs` is 1, also to stderr."""

    def __init__(self, run: PlannedRun, *, jobs: int) -> None:
        self.run, self.copies_to_stderr = run, jobs == 1
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        write_text(run.file(".yaml"), format_settings(run.recipe))
        command = [sys.executable, "-m", "dragoman", "compare-one", str(run.file(".yaml")), str(run.folder)]
        environment = thread_limited_environment(jobs)
        with run.file(".log").open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env=environment
            )
        self.log = run.file(".log").open(encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        """Copy new output to stderr; return the exit code, or None while the process runs."""
        code = self.process.poll()
        if self.copies_to_stderr:
            print(self.log.read(), end="", file=sys.stderr, flush=True)
        return code

    def close(self) -> int:
        """Wait up to SAVE_SECONDS for the process to end, then kill it; return its exit code."""
        with self.process, self.log:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(SAVE_SECONDS)
            self.process.kill()  # without effect if the process has ended
            self.process.wait()
            self.poll()
        return self.process.returncode
