"""The runs of a comparison, each in a process of its own, so that the memory it needed is its own: train, judge, write.

What is done is not done again: a run that was stopped goes on where it was, and one that has been judged is left alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.compare.judge import VERSION, judge
from dragoman.compare.plan import Planned
from dragoman.config import METRIC_ALIASES, read_recipe, to_yaml
from dragoman.cores import shared_by
from dragoman.store import RunFolder, read_json, write_text
from dragoman.train.report import Report
from dragoman.train.trainer import train
from dragoman.types import UserError

LOOK_EVERY = 0.05  # seconds, for a process that has ended
PATIENCE = 60.0  # seconds that a process gets to save and end


def work(recipe_file: Path, folder: Path) -> None:
    """One run, from wherever it is to its judgement. Ends, all saved, with the process that started it."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    recipe = read_recipe(recipe_file)
    train(recipe, out=folder, resume=RunFolder(folder).format.exists())
    judgement = judge(folder, device=recipe.train.device)
    write_text(folder.with_name(f"{folder.name}.json"), json.dumps(judgement, indent=1) + "\n")


def end_with_parent() -> None:
    """Our standard input is a pipe that the parent holds; it closes when the parent is gone, however it went."""
    os.read(0, 1)  # the interpreter cannot end while a thread holds sys.stdin
    os.kill(os.getpid(), signal.SIGTERM)


def judgement_of(run: Planned) -> dict[str, Any] | None:
    """What an earlier start found, if it is whole and of this version."""
    with suppress(UserError):  # not there, or torn
        found = read_json(run.judgement)
        scored = {name for test in found.get("tests", {}).values() for name in test.get("scores", {})}  # type: ignore[attr-defined]
        return found if found.get("version") == VERSION and not scored & set(METRIC_ALIASES) else None
    return None


def carry_out(runs: Sequence[Planned], report: Report, *, jobs: int) -> dict[Path, str]:
    """Bring every run to its judgement, `jobs` at a time; the sentences of those that failed come back, by folder."""
    waiting = [run for run in runs if judgement_of(run) is None]
    if len(waiting) < len(runs):
        report.say(f"{len(runs) - len(waiting)} of {len(runs)} runs were done before")
    at_work: list[Worker] = []
    failures: dict[Path, str] = {}
    try:
        while waiting or at_work:
            while waiting and len(at_work) < jobs:
                run = waiting.pop(0)
                report.say(f"run {len(runs) - len(waiting)} of {len(runs)}: {run.name}, seed {run.seed}")
                at_work.append(started(run, jobs=jobs))
            time.sleep(LOOK_EVERY)
            for worker in [worker for worker in at_work if worker.process.poll() is not None]:
                at_work.remove(worker)
                run = worker.run
                if worker.ended():
                    failures[run.folder] = last_words(run)
                    report.say(f"{run.name}, seed {run.seed} failed: {failures[run.folder]}")
                elif jobs > 1:
                    report.say(f"done: {run.name}, seed {run.seed}")
    finally:
        for worker in at_work:
            worker.process.terminate()
        for worker in at_work:
            worker.last_chance()
    return failures


class Worker(NamedTuple):
    run: Planned
    process: subprocess.Popen[bytes]
    reader: threading.Thread | None

    def ended(self) -> int:
        """Its exit code, once all that it said has been read."""
        if self.reader:
            self.reader.join()
        with self.process:  # closes its pipes
            return self.process.wait()

    def last_chance(self) -> None:
        """Wait until it has saved and ended; if it does not, end it."""
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.ended()


def started(run: Planned, *, jobs: int) -> Worker:
    """The process of a run. What it says goes to its log, and, where it is the only one, is seen as it is said."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    seen = jobs == 1
    recipe_file = run.folder.with_name(f"{run.folder.name}.yaml")
    write_text(recipe_file, to_yaml(run.recipe))
    command = [sys.executable, "-m", "dragoman", "compare-one", str(recipe_file), str(run.folder)]
    with run.log.open("wb") as log:
        said = subprocess.PIPE if seen else log
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=said, start_new_session=True, env=shared_by(jobs)
        )
    reader = threading.Thread(target=pass_on, args=(process, run.log), daemon=True) if seen else None
    if reader:
        reader.start()
    return Worker(run, process, reader)


def pass_on(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.stderr
    with log.open("ab", buffering=0) as file:
        for line in process.stderr:
            file.write(line)
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()


def last_words(run: Planned) -> str:
    """The sentence that a failed process ended with."""
    lines = [line for line in run.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("dragoman: ") if lines else "it ended without a word"
