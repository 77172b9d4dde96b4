"""What a folder of recipes is meant to show, asked in a file beside them, and answered from the numbers alone.

questions:
  - title: Does attention help with long sentences?
    figure: length
    models: [03-bottleneck-lstm, 06-lstm-dot]
    better: 06-lstm-dot
    worse: 03-bottleneck-lstm
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from dragoman.compare.figures import FIGURES, Asked, place_and_line
from dragoman.compare.plan import QUESTIONS, Planned
from dragoman.config import Listed, Settings, build, pick
from dragoman.pages.chart import Figure, Line
from dragoman.types import UserError
from dragoman.yaml_text import parse_yaml, read_text


class Question(Settings):
    title: str
    figure: str
    text: str = ""  # why it is asked
    models: Annotated[tuple[str, ...], Listed] = ("*",)  # names of recipes, or patterns of them
    better: str = ""  # the line that is expected to be ahead ...
    worse: str = ""  # ... of this one, at the far end; without them all lines are ranked there
    test: str = ""  # by default the first test set
    x: str = ""  # of figure "setting": what runs along the axis, such as model.layers
    lines: str = ""  # ... and what makes a line of its own, such as model.residual


class Questions(Settings):
    title: str = "Comparison"
    questions: Annotated[tuple[Question, ...], Listed] = ()


def read_questions(paths: Sequence[Path]) -> Questions:
    """The questions of the first folder that has any."""
    for path in paths:
        file = path / QUESTIONS
        if path.is_dir() and file.exists():
            found = build(Questions, parse_yaml(read_text(file, "questions"), str(file)), where=str(file))
            for question in found.questions:
                pick(FIGURES, question.figure, f"figure of {question.title!r}")
            return found
    return Questions()


def check_questions(questions: Questions, runs: Sequence[Planned]) -> None:
    """What cannot be answered is said before the runs, which may take days."""
    models = {run.name: {"name": run.name, "settings": run.recipe.model_dump(mode="json")} for run in runs}
    for question in questions.questions:
        names = chosen(question, list(models))
        if not names:
            raise UserError(f"the question {question.title!r} asks about models that the comparison does not have")
        if bool(question.better) != bool(question.worse):
            raise UserError(f"the question {question.title!r} needs both better and worse, or neither")
        lines = names
        if question.figure == "setting":
            asked = Asked("", "", "", question.x, question.lines)
            lines = [place_and_line(models[name], asked)[1] for name in names]
        for name in filter(None, (question.better, question.worse)):
            pick(dict.fromkeys(lines), name, f"line in the figure of {question.title!r}")


def chosen(question: Question, names: Sequence[str]) -> list[str]:
    """The models that a question is about, in the order in which it names them."""
    return list(dict.fromkeys(name for pattern in question.models for name in fnmatch.filter(names, pattern)))


def answered(question: Question, report: Mapping[str, Any]) -> dict[str, Any]:
    """The question with its figure and with what came out, as report.json holds it."""
    about = report["about"]
    picked = chosen(question, [model["name"] for model in report["models"]])
    test = question.test or next(iter(about["tests"]), "")
    if test not in about["tests"]:
        raise UserError(
            f"the question {question.title!r} asks about a test {test!r}, but there are: {', '.join(about['tests'])}"
        )
    models = [model for name in picked for model in report["models"] if model["name"] == name]
    asked = Asked(test, about["metrics"][0], next(iter(about["budget"])), question.x, question.lines)
    figure = FIGURES[question.figure].draw(in_common(models), asked)
    return {**question.model_dump(mode="json"), "models": picked, "test": test, "answer": answer(question, figure)}


def in_common(models: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The models with the seeds that all of them finished, so that seeds can be set against each other."""
    seeds = [{run["seed"] for run in model["runs"]} for model in models if model["runs"]]
    common = set.intersection(*seeds) if seeds else set()
    return [{**model, "runs": [run for run in model["runs"] if run["seed"] in common]} for model in models]


def answer(question: Question, figure: Figure) -> str:
    """What came out, in a sentence that holds nothing but the numbers."""
    lines = {line.name: line for line in figure.lines}
    if not lines:
        return "No answer: no run of these models has finished."
    if not question.better:
        return ranking(figure)
    missing = [name for name in (question.better, question.worse) if name not in lines]
    if missing:
        return f"No answer: {missing[0]} has no finished run."
    return contest(lines[question.better], lines[question.worse], figure)


def ranking(figure: Figure) -> str:
    """Everyone at the far end, best first."""
    far = max(line.points[-1].x for line in figure.lines)
    last = [(line.points[-1], line.name) for line in figure.lines if line.points[-1].x == far]
    ranked = sorted(last, key=lambda each: each[0].mean, reverse=not figure.low_is_good)
    return f"At {ranked[0][0].label}: " + ", ".join(f"{n} {number(p.mean)}" for p, n in ranked) + f" ({figure.unit})."


def contest(better: Line, worse: Line, figure: Figure) -> str:
    """Whether the one is above the other at the far end, in how many seeds, and how it is at the near end."""
    pairs = [(b, w) for b in better.points for w in worse.points if b.x == w.x]
    if not pairs:
        return f"No answer: {better.name} and {worse.name} have no point in common."
    b, w = pairs[-1]
    ahead = sum((one < other) if figure.low_is_good else (one > other) for one, other in zip(b.values, w.values))
    seeds = min(len(b.values), len(w.values))
    verdict = "As expected" if ahead == seeds else "Not as expected" if ahead == 0 else "Undecided"
    found = (
        f"{verdict}: at {b.label} {better.name} has {number(b.mean)} {figure.unit} and {worse.name} {number(w.mean)}, "
        f"{gaps(b.values, w.values, figure.logarithmic)}; it is ahead in {ahead} of {seeds} seed{'s' * (seeds > 1)}"
    )
    near_b, near_w = pairs[0]
    if figure.logarithmic or near_b.x == b.x:
        return found + "."
    return f"{found}. At {near_b.label}: {gaps(near_b.values, near_w.values, False)}."


def gaps(one: Sequence[float], other: Sequence[float], ratio: bool) -> str:
    """Seed by seed: the difference, or how many times as much."""
    found = [a / b if ratio else a - b for a, b in zip(one, other)]
    mean = number(sum(found) / len(found), signed=not ratio)
    mean = f"{mean} times as much" if ratio else f"a difference of {mean}"
    if len(found) == 1:
        return mean
    low, high = (number(value, signed=not ratio) for value in (min(found), max(found)))
    return f"{mean} (by seed {low} to {high})"


def number(value: float, *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{value:{sign}.1f}" if abs(value) >= 1 or value == 0 else f"{value:{sign}.3g}"
