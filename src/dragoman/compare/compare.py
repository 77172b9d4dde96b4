"""`dragoman compare`: train several recipes on the same data with the same budget; write one table and figures.

Each run has a process of its own, so that the memory it needs can be measured. A run that was stopped resumes, and one
that has been measured is left alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from dragoman.compare.measure import VERSION, measure_run
from dragoman.compare.plan import PlannedRun, plan_runs
from dragoman.compare.questions import answer_question, check_questions, metric_title, read_questions
from dragoman.compare.report import TABLE_COLUMNS, column_heading, render_comparison, summarise
from dragoman.config.settings import METRIC_ALIASES, to_yaml
from dragoman.errors import Stop, UserError
from dragoman.evaluation.tables import align_columns
from dragoman.hardware import thread_limited_environment
from dragoman.progress import WARNING, Report
from dragoman.recipe import read_recipe
from dragoman.run_dir import RunFolder, read_json, write_text
from dragoman.training.trainer import train

POLL_SECONDS = 0.05  # between two polls of the processes
SAVE_SECONDS = 60.0  # that a process gets to save and end


def run_comparison(
    paths: Sequence[Path], *, out: Path, overrides: Sequence[str] = (), seeds: int = 1, jobs: int = 1
) -> dict[str, Any]:
    """Train and measure what is not done yet; write OUT/report.html and OUT/report.json, and return the latter."""
    report = Report()
    runs = plan_runs(paths, out, overrides, seeds)
    refuse_other_runs(out, runs)
    questions = read_questions(paths)
    check_questions(questions, runs)
    try:
        failures = run_all(runs, report, jobs=jobs)
    except KeyboardInterrupt:
        raise Stop("stopped, all saved; the same command goes on", 130) from None
    found = {run.folder: measured for run in runs if (measured := read_measurements(run)) is not None}
    if not found:
        raise UserError(f"none of the {len(runs)} runs came to an end; {next(iter(failures.values()))}")
    whole = {"title": questions.title, **summarise(runs, found, failures, jobs=jobs)}
    for warning in whole["warnings"]:
        report.log(warning, WARNING)
    whole["questions"] = [answer_question(question, whole) for question in questions.questions]
    write_text(out / "report.json", json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    write_text(out / "report.html", render_comparison(whole))
    report.log(f"the report is {out / 'report.html'}, its numbers are in {out / 'report.json'}")
    return whole


def refuse_other_runs(out: Path, runs: Sequence[PlannedRun]) -> None:
    """Refuse a folder with runs of other recipes: its report, which has those too, would be overwritten."""
    there = {path.name.rpartition("-seed")[0] for path in (out / "runs").glob("*-seed*") if path.is_dir()}
    if others := sorted(there - {run.name for run in runs}):
        raise UserError(
            f"{str(out)!r} holds runs of other recipes ({', '.join(others)}); name them too, or choose another --out"
        )


def format_comparison(whole: dict[str, Any]) -> Text:
    """Return the main columns of the table and the answers to the questions, for a terminal."""
    about = whole["about"]
    metric = about["metrics"][0]
    chosen = ("dev_loss", "parameters", "steps", "tokens_per_second", "greedy_per_second", "peak_memory")
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        f"{metric} {test}": (f"{metric_title(metric)} {test}", "{:.2f}".format) for test in about["tests"]
    }
    columns |= {name: (column_heading(name, about), TABLE_COLUMNS[name].write) for name in chosen}
    rows = [["model", *(head for head, _ in columns.values())]]
    for model in whole["models"]:
        numbers = {name: model["numbers"].get(name) for name in columns}
        rows.append([model["name"], *(columns[name][1](n["mean"]) if n else "-" for name, n in numbers.items())])
    lines = [align_columns(rows)]
    lines += [f"\n{question['title']}\n  {question['answer']}" for question in whole["questions"]]
    return Text("\n".join(lines), no_wrap=True, overflow="ignore")


# Processes


def run_one(recipe_file: Path, folder: Path) -> None:
    """Train and measure one run, or resume it. Saves and ends when the process that started it ends."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    recipe = read_recipe(recipe_file)
    train(recipe, out=folder, resume=RunFolder(folder).format.exists())
    measured = measure_run(folder, device=recipe.train.device)
    write_text(folder.with_name(f"{folder.name}.json"), json.dumps(measured, indent=1) + "\n")


def end_with_parent() -> None:
    """Wait until standard input, a pipe that the parent holds, closes, which it does however the parent ends."""
    os.read(0, 1)  # the interpreter cannot end while a thread holds sys.stdin
    os.kill(os.getpid(), signal.SIGTERM)


def read_measurements(run: PlannedRun) -> dict[str, Any] | None:
    """Return what an earlier call measured, if the file is complete and of this version."""
    with suppress(UserError):  # not there, or torn
        found = read_json(run.measurements)
        scored = {name for test in found.get("tests", {}).values() for name in test.get("scores", {})}  # type: ignore[attr-defined]
        return found if found.get("version") == VERSION and not scored & set(METRIC_ALIASES) else None
    return None


def run_all(runs: Sequence[PlannedRun], report: Report, *, jobs: int) -> dict[Path, str]:
    """Train and measure all runs, `jobs` at a time; return the messages of those that failed, by folder."""
    waiting = [run for run in runs if read_measurements(run) is None]
    if len(waiting) < len(runs):
        report.log(f"{len(runs) - len(waiting)} of {len(runs)} runs were done before")
    active: list[Worker] = []
    failures: dict[Path, str] = {}
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                run = waiting.pop(0)
                report.log(f"run {len(runs) - len(waiting)} of {len(runs)}: {run.name}, seed {run.seed}")
                active.append(start_worker(run, jobs=jobs))
            time.sleep(POLL_SECONDS)
            for worker in [worker for worker in active if worker.process.poll() is not None]:
                active.remove(worker)
                run = worker.run
                if worker.wait():
                    failures[run.folder] = read_last_line(run)
                    report.log(f"{run.name}, seed {run.seed} failed: {failures[run.folder]}")
                elif jobs > 1:
                    report.log(f"done: {run.name}, seed {run.seed}")
    finally:
        for worker in active:
            worker.process.terminate()
        for worker in active:
            worker.stop()
    return failures


class Worker(NamedTuple):
    run: PlannedRun
    process: subprocess.Popen[bytes]
    reader: threading.Thread | None

    def wait(self) -> int:
        """Return the exit code, once all output has been read."""
        if self.reader:
            self.reader.join()
        with self.process:  # closes its pipes
            return self.process.wait()

    def stop(self) -> None:
        """Wait until the process has saved and ended; kill it if it does not."""
        try:
            self.process.wait(SAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.wait()


def start_worker(run: PlannedRun, *, jobs: int) -> Worker:
    """Start the process of a run. Its output goes to its log and, if it is the only process, to standard error."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    visible = jobs == 1
    recipe_file = run.folder.with_name(f"{run.folder.name}.yaml")
    write_text(recipe_file, to_yaml(run.recipe))
    command = [sys.executable, "-m", "dragoman", "compare-one", str(recipe_file), str(run.folder)]
    with run.log.open("wb") as log:
        errors = subprocess.PIPE if visible else log
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=errors,
            start_new_session=True,
            env=thread_limited_environment(jobs),
        )
    reader = threading.Thread(target=copy_output, args=(process, run.log), daemon=True) if visible else None
    if reader:
        reader.start()
    return Worker(run, process, reader)


def copy_output(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.stderr
    with log.open("ab", buffering=0) as file:
        for line in process.stderr:
            file.write(line)
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()


def read_last_line(run: PlannedRun) -> str:
    """Return the message that a failed process ended with."""
    lines = [line for line in run.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("dragoman: ") if lines else "it ended without a message"
