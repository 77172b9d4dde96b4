"""Run experiments: measure their trials, each once, and judge the results.

The numbers of a trial are written to OUT/NAME/quick|full/CONDITION-SEED.json as soon as it is finished. A second call
skips finished trials, so an interrupted experiment resumes. Several jobs are processes that share the trials and the
GPU.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch

from dragoman.errors import Stop, UserError
from dragoman.hardware import cpu_name, thread_limited_environment
from dragoman.io import digest_bytes, format_json, write_text
from dragoman.labs.experiment import CheckResult, Experiment, Numbers, Setup, Table
from dragoman.labs.registry import EXPERIMENTS
from dragoman.progress import WARNING, Report

RESULT_DIGITS = 6  # significant digits of the numbers that are kept
UNSAFE = re.compile(r"[^a-z0-9.]+")  # characters that file names of trials do not have


@dataclass(frozen=True)
class LabResult:
    """All trials of an experiment, and how they were obtained."""

    experiment: Experiment
    quick: bool
    table: Table
    machine: str  # device and version of PyTorch; several, if trials were measured on several machines
    seconds: float  # of all trials together
    # The machine of each trial, as in `table`; empty if all are the same, or in results that did not keep it.
    machines: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return self.experiment.judge(self.table)[0]

    @property
    def checks(self) -> list[CheckResult]:
        return self.experiment.judge(self.table)[1]

    @property
    def seeds(self) -> list[int]:
        return sorted(next(iter(self.table.values())))

    def to_json(self) -> dict[str, Any]:
        """Return the result as nested dictionaries; numbers that are not finite become strings."""
        checks = [
            {
                "text": c.check.text,
                "at_least" if c.check.at_least is not None else "at_most": c.check.at_least or c.check.at_most or 0.0,
                "control": c.check.control,
                "aside": c.check.aside,
                "verdict": c.verdict,
                "values": list(c.values),
                "interval": [c.low, c.high],
            }
            for c in self.checks
        ]
        record: dict[str, Any] = replace_infinite(
            {
                "name": self.experiment.name,
                "quick": self.quick,
                "verdict": self.verdict,
                "checks": checks,
                "machine": self.machine,
                "seconds": self.seconds,
                **({"machines": self.machines} if self.machines else {}),
                "trials": self.table,
            }
        )
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> LabResult:
        """Return the result in a record that `to_json` made. It is judged anew by the checks of the present code."""
        table = {
            name: {int(seed): restore_infinite(numbers) for seed, numbers in trials.items()}
            for name, trials in record["trials"].items()
        }
        machines = {
            name: {int(seed): machine for seed, machine in by_seed.items()}
            for name, by_seed in record.get("machines", {}).items()
        }
        experiment = EXPERIMENTS[record["name"]]
        return cls(experiment, record["quick"], table, record["machine"], record["seconds"], machines)


def replace_infinite(value: Any) -> Any:
    """Return nested data with rounded numbers, and strings such as "inf" for numbers that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.{RESULT_DIGITS}g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): replace_infinite(item) for key, item in value.items()}
    return [replace_infinite(item) for item in value] if isinstance(value, list | tuple) else value


def restore_infinite(value: Any) -> Any:
    """Return nested data with the numbers that `replace_infinite` turned into strings."""
    if isinstance(value, Mapping):
        return {key: restore_infinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restore_infinite(item) for item in value]
    return float(value) if value in ("inf", "-inf", "nan") else value


class TrialsFailed(UserError):
    """Raised if trials have failed; `results` are those of the other experiments."""

    def __init__(self, message: str, results: list[LabResult]) -> None:
        super().__init__(message)
        self.results = results


@dataclass(frozen=True)
class Trial:
    """One condition of an experiment with one seed, and the file of its numbers."""

    name: str  # of the experiment
    condition: str
    seed: int
    setup: Setup

    @property
    def title(self) -> str:
        return f"{self.name}, {self.condition!r}, seed {self.seed}"

    @property
    def file(self) -> Path:
        condition = UNSAFE.sub("-", self.condition.lower()).strip("-")
        return self.setup.folder / f"{condition}-{self.seed}.json"

    @property
    def machine(self) -> str:
        device = torch.cuda.get_device_name() if self.setup.device.startswith("cuda") else cpu_name()
        return f"{device}, PyTorch {version('torch')}"

    @property
    def code(self) -> str:
        """A digest of the file that defines the experiment."""
        return digest_bytes(Path(inspect.getfile(EXPERIMENTS[self.name].measure)).read_bytes())[:16]

    def read(self) -> dict[str, Any] | None:
        """Return what an earlier run measured; None if the trial is not finished."""
        if not self.file.exists():
            return None
        try:
            record: dict[str, Any] = restore_infinite(json.loads(self.file.read_text(encoding="utf-8")))
            return {"code": "", **{name: record[name] for name in ("seconds", "machine", "numbers")}, **record}
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{str(self.file)!r} is not a measurement; remove it, and it will be repeated") from None

    def run(self) -> None:
        """Measure the trial and write its numbers."""
        start = time.monotonic()
        torch.manual_seed(self.seed)
        numbers: Numbers = EXPERIMENTS[self.name].measure(self.condition, self.seed, self.setup)
        seconds = time.monotonic() - start
        record = {"seconds": seconds, "machine": self.machine, "code": self.code, "numbers": numbers}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.file, format_json(replace_infinite(record)) + "\n")


def plan_trials(experiment: Experiment, setup: Setup, seeds: int) -> list[Trial]:
    """Return the trials in an order in which all conditions of a seed come before those of the next."""
    return [
        Trial(experiment.name, condition, seed, setup)
        for seed in range(1, seeds + 1)
        for condition in experiment.conditions
    ]


def run_experiments(
    names: Sequence[str], *, out: Path, quick: bool = False, seeds: int = 0, jobs: int = 1, device: str = "cpu"
) -> list[LabResult]:
    """Run experiments and return their results in the order of `names`. Finished trials are not repeated.

    A failed trial stops no other; all are done when TrialsFailed is raised. `seeds` is the number of trials per
    condition; 0: that of the experiment, or 1 in a quick run.
    """
    report = Report()
    plans = {}
    for name in names:
        experiment = EXPERIMENTS[name]
        setup = Setup(quick, out / name / ("quick" if quick else "full"), device)
        plans[name] = plan_trials(experiment, setup, seeds or (1 if quick else experiment.seeds))
    waiting = [trial for trials in plans.values() for trial in trials if not trial.file.exists()]
    finished = [trial for trials in plans.values() for trial in trials if trial.file.exists()]
    if finished:
        report.log(f"finished before: {len(finished)} trial{'s' * (len(finished) != 1)}")
    warn_of_changes(finished, report)
    failures = []
    try:
        with report.progress("measuring", total=len(waiting), unit="trials") as progress:
            for count, (trial, error) in enumerate(run_trials(waiting, jobs), 1):
                progress.set_done(count)
                if error is not None:
                    report.log(f"{trial.title} failed: {error}", level=WARNING)
                    failures.append((trial, error))
    except KeyboardInterrupt:
        raise Stop("stopped; finished trials are saved, and the same command resumes", 130) from None
    failed = {trial.name for trial, _ in failures}
    results = [collect_result(EXPERIMENTS[name], trials) for name, trials in plans.items() if name not in failed]
    if failures:
        trial, error = failures[0]
        message = (
            f"{len(failures)} of {len(waiting)} trials failed, first {trial.title}: {error}; "
            "the others are saved, and the same command repeats those that failed"
        )
        raise TrialsFailed(message, results) from error
    return results


def warn_of_changes(trials: Iterable[Trial], report: Report) -> None:
    """Warn of finished trials that were measured by other code or on another device, which are used all the same."""
    counts = Counter[tuple[str, Path, str]]()
    for trial in trials:
        record = trial.read() or {}
        if record["code"] != trial.code:
            counts[trial.name, trial.setup.folder, "an earlier version of the experiment"] += 1
        elif record["machine"] != trial.machine:
            counts[trial.name, trial.setup.folder, record["machine"]] += 1
    for (name, folder, other), count in counts.items():
        report.log(f"{name}: trials measured by {other}: {count}; to repeat them, remove {folder}", level=WARNING)


def run_trials(trials: Sequence[Trial], jobs: int) -> Iterator[tuple[Trial, Exception | None]]:
    """Run trials here or in `jobs` processes, and yield each when it has ended, with its error if it failed."""
    if jobs <= 1:
        for trial in trials:
            try:
                trial.run()
            except Exception as error:
                yield trial, error
            else:
                yield trial, None
        return
    os.environ.update(thread_limited_environment(jobs))  # inherited by the processes
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures: dict[Future[None], Trial] = {pool.submit(trial.run): trial for trial in trials}
        try:
            for future in as_completed(futures):
                failure = future.exception()
                if failure is not None and not isinstance(failure, Exception):
                    raise failure
                yield futures[future], failure
        except BaseException:
            # Leaving the `with` block alone would wait for all trials: ended processes take no more of them.
            for process in active_children():
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def collect_result(experiment: Experiment, trials: Iterable[Trial]) -> LabResult:
    """Return the result of an experiment whose trials are all finished."""
    table: dict[str, dict[int, Numbers]] = {}
    machines: dict[str, dict[int, str]] = {}
    seconds = 0.0
    for trial in trials:
        record = trial.read()
        assert record is not None
        table.setdefault(trial.condition, {})[trial.seed] = record["numbers"]
        seconds += record["seconds"]
        machines.setdefault(trial.condition, {})[trial.seed] = record["machine"]
    try:
        experiment.judge(table)
    except (LookupError, TypeError):
        raise UserError(
            f"trials in {str(trial.setup.folder)!r} are those of another version of the experiment; remove the folder"
        ) from None
    names = sorted({machine for by_seed in machines.values() for machine in by_seed.values()})
    kept = machines if len(names) > 1 else {}
    return LabResult(experiment, trial.setup.quick, table, " and ".join(names), seconds, kept)


def read_results(folder: Path) -> dict[str, LabResult]:
    """Return the results in the JSON files of a folder, by name, in the order of the registry.

    Each is judged, so that a result whose trials do not fit the present checks is found here.
    """
    results = {}
    for name in EXPERIMENTS:
        file = folder / f"{name}.json"
        if file.exists():
            try:
                results[name] = LabResult.from_json(json.loads(file.read_text(encoding="utf-8")))
                results[name].experiment.judge(results[name].table)
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
                message = f"{str(file)!r} is not the result of this version of the experiment; remove it"
                raise UserError(message) from None
    return results
