"""`dragoman compare`: several recipes on the same data with the same budget; one table, figures, and their numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from dragoman.compare.figures import shown
from dragoman.compare.page import COLUMNS, heading, page
from dragoman.compare.plan import Planned, planned
from dragoman.compare.questions import answered, check_questions, read_questions
from dragoman.compare.summary import summarised
from dragoman.compare.work import carry_out, judgement_of
from dragoman.console import WARNING
from dragoman.store import write_text
from dragoman.train.report import Report
from dragoman.types import Stop, UserError


def compare(
    paths: Sequence[Path], *, out: Path, overrides: Sequence[str] = (), seeds: int = 1, jobs: int = 1
) -> dict[str, Any]:
    """Train and judge what is not done yet, then write OUT/report.html and OUT/report.json, which comes back."""
    report = Report()
    runs = planned(paths, out, overrides, seeds)
    refuse_others(out, runs)
    questions = read_questions(paths)
    check_questions(questions, runs)
    try:
        failures = carry_out(runs, report, jobs=jobs)
    except KeyboardInterrupt:
        raise Stop("stopped, all saved; the same command goes on", 130) from None
    found = {run.folder: judgement for run in runs if (judgement := judgement_of(run)) is not None}
    if not found:
        raise UserError(f"none of the {len(runs)} runs came to an end; {next(iter(failures.values()))}")
    whole = {"title": questions.title, **summarised(runs, found, failures, jobs=jobs)}
    for warning in whole["warnings"]:
        report.say(warning, WARNING)
    whole["questions"] = [answered(question, whole) for question in questions.questions]
    write_text(out / "report.json", json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    write_text(out / "report.html", page(whole))
    report.say(f"the report is {out / 'report.html'}, its numbers are in {out / 'report.json'}")
    return whole


def refuse_others(out: Path, runs: Sequence[Planned]) -> None:
    """A report of these recipes alone would take the place of one that also has those that lie there."""
    there = {path.name.rpartition("-seed")[0] for path in (out / "runs").glob("*-seed*") if path.is_dir()}
    if others := sorted(there - {run.name for run in runs}):
        raise UserError(
            f"{str(out)!r} holds runs of other recipes ({', '.join(others)}); name them too, or choose another --out"
        )


def said(whole: dict[str, Any]) -> Text:
    """Return the main columns of the table and the answers to the questions, for a terminal."""
    about = whole["about"]
    metric = about["metrics"][0]
    chosen = ("dev_loss", "parameters", "steps", "tokens_per_second", "greedy_per_second", "peak_memory")
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        f"{metric} {test}": (f"{shown(metric)} {test}", "{:.2f}".format) for test in about["tests"]
    }
    columns |= {name: (heading(name, about), COLUMNS[name][2]) for name in chosen}
    rows = [["model", *(head for head, _ in columns.values())]]
    for model in whole["models"]:
        numbers = {name: model["numbers"].get(name) for name in columns}
        rows.append([model["name"], *(columns[name][1](n["mean"]) if n else "-" for name, n in numbers.items())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"\n{question['title']}\n  {question['answer']}" for question in whole["questions"]]
    return Text("\n".join(lines), no_wrap=True, overflow="ignore")
