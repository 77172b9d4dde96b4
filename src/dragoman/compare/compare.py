"""`dragoman compare`: several recipes on the same data with the same budget; one table, figures, and their numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from dragoman.compare.page import page
from dragoman.compare.plan import planned
from dragoman.compare.questions import answered, check_questions, read_questions
from dragoman.compare.summary import summarised
from dragoman.compare.work import carry_out, judgement_of
from dragoman.store import write_text
from dragoman.train.report import Report
from dragoman.types import Mistake, Stop


def compare(
    paths: Sequence[Path], *, out: Path, overrides: Sequence[str] = (), seeds: int = 1, jobs: int = 1
) -> dict[str, Any]:
    """Train and judge what is not done yet, then write OUT/report.html and OUT/report.json, which comes back."""
    report = Report()
    runs = planned(paths, out, overrides, seeds)
    questions = read_questions(paths)
    check_questions(questions, runs)
    try:
        failures = carry_out(runs, report, jobs=jobs)
    except KeyboardInterrupt:
        raise Stop("stopped, all saved; the same command goes on", 130) from None
    found = {run.folder: judgement for run in runs if (judgement := judgement_of(run)) is not None}
    if not found:
        raise Mistake(f"none of the {len(runs)} runs came to an end; {next(iter(failures.values()))}")
    whole = {"title": questions.title, **summarised(runs, found, failures, jobs=jobs)}
    whole["questions"] = [answered(question, whole) for question in questions.questions]
    write_text(out / "report.json", json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    write_text(out / "report.html", page(whole))
    report.say(f"the report is {out / 'report.html'}, its numbers are in {out / 'report.json'}")
    return whole


def said(whole: dict[str, Any]) -> Text:
    """The table's most asked-for columns, and what came of the questions, for a terminal."""
    about = whole["about"]
    scores = [f"{metric} {test}" for test in about["tests"] for metric in about["metrics"][:1]]
    columns = [*scores, "dev_loss", "parameters", "tokens_per_second", "greedy_per_second", "peak_memory"]
    rows = [["model", *columns]]
    for model in whole["models"]:
        numbers = [model["numbers"].get(column) for column in columns]
        rows.append([model["name"], *(f"{n['mean']:,.4g}" if n else "-" for n in numbers)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"\n{question['title']}\n  {question['answer']}" for question in whole["questions"]]
    return Text("\n".join(lines), no_wrap=True, overflow="ignore")
