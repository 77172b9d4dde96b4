"""Figures of a comparison, and the questions about them: what a folder of recipes is meant to show.

A figure takes the models that it is about, as report.json has them, and returns a chart. Each point holds the value of
every seed, so that one sees how much of a difference is chance. Questions are asked in a file beside the recipes, and
answered from the numbers of a figure alone:

questions:
  - title: Does attention help with long sentences?
    figure: length
    models: [03-bottleneck-lstm, 06-lstm-dot]
    better: 06-lstm-dot
    worse: 03-bottleneck-lstm
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from dragoman.compare.plan import QUESTIONS_FILE, PlannedRun
from dragoman.config.settings import Listed, Settings, build, pick
from dragoman.config.yaml import parse_yaml, read_text
from dragoman.errors import UserError
from dragoman.evaluation.figures import LineChart, Point, Series
from dragoman.evaluation.tables import format_bounds
from dragoman.metrics.metrics import METRICS

ModelRecord = Mapping[str, Any]
FARTHEST = 24  # tokens back, in plots of gradients
SPENT = {"steps": "step", "epochs": "step", "minutes": "seconds", "flops": "flops"}  # what a curve runs along
SPENT_TITLES = {"step": "training steps", "seconds": "seconds of training", "flops": "FLOPs of training"}


class FigureOptions(NamedTuple):
    """What a figure needs beside its models."""

    test: str  # the name of a test set
    metric: str
    budget: str  # the limit that the runs were given
    x: str = ""  # settings, such as model.layers
    lines: str = ""


def metric_title(metric: str) -> str:
    """Return a metric's name in tables; a language model's loss and perplexity are not in the registry."""
    return METRICS[metric].shown if metric in METRICS else metric


def low_is_good(metric: str) -> bool:
    return metric not in METRICS or not METRICS[metric].higher


def plot_length(models: Sequence[ModelRecord], options: FigureOptions) -> LineChart:
    """Plot quality by the length of the source."""
    name = metric_title(options.metric)
    figure = plot_buckets(models, options, "lengths", "words of the source", f"{name} on {options.test}", name)
    return replace(figure, low_is_good=low_is_good(options.metric))


def plot_distance(models: Sequence[ModelRecord], options: FigureOptions) -> LineChart:
    """Plot the share of grammatical phenomena that are correct by the distance of the words that must agree."""
    title = f"% right on {options.test}"
    return plot_buckets(models, options, "distances", "distance between words that must agree", title, "% right")


def plot_buckets(
    models: Sequence[ModelRecord], options: FigureOptions, key: str, x_title: str, y_title: str, unit: str
) -> LineChart:
    tables = {
        m["name"]: [run["tests"].get(options.test, {}).get(key, []) for run in m["runs"]] for m in models if m["runs"]
    }
    first: Sequence[Mapping[str, Any]] = next((table[0] for table in tables.values()), [])
    apart, counted = ("", "sentences") if key == "lengths" else (" apart", "phenomena")
    lines = [
        Series(name, [
            Point(number, describe_bucket(row, apart), tuple(table[number]["value"] for table in seeds))
            for number, row in enumerate(first)
        ])
        for name, seeds in tables.items()
    ]  # fmt: skip
    ticks = tuple(f"{format_bounds(row)}\n({row['lines']})" for row in first)
    return LineChart(lines if first else [], f"{x_title} (in brackets: how many {counted})", y_title, unit, ticks)


def describe_bucket(row: Mapping[str, Any], more: str) -> str:
    return f"{format_bounds(row)} word{'s' * (row['high'] != 1)}{more}"


def plot_target_gradient(models: Sequence[ModelRecord], options: FigureOptions) -> LineChart:  # noqa: ARG001
    """Plot the gradient norm at the target inputs before a token, relative to the nearest."""
    return plot_gradient(models, "target", "target tokens back")


def plot_source_gradient(models: Sequence[ModelRecord], options: FigureOptions) -> LineChart:  # noqa: ARG001
    """Plot the gradient norm at the source tokens, counted from the end of the source."""
    return plot_gradient(models, "source", "source tokens before the end")


def plot_gradient(models: Sequence[ModelRecord], side: str, x_title: str) -> LineChart:
    lines = []
    for model in models:
        rows = [run["gradient"][side] for run in model["runs"] if "gradient" in run]
        rows = [[100 * share for share in row] for row in rows]
        shortest = min((len(row) for row in rows), default=0)
        points = [Point(d, f"{d} tokens", tuple(row[d] for row in rows)) for d in range(min(shortest, FARTHEST + 1))]
        lines.append(Series(model["name"], points))
    title = "gradient, % of that at distance 0"
    return LineChart([line for line in lines if line.points], x_title, title, "% of the gradient", logarithmic=True)


def plot_learning_curve(models: Sequence[ModelRecord], options: FigureOptions) -> LineChart:
    """Plot the validation loss during training."""
    along = SPENT[options.budget]
    lines = []
    for model in models:
        curves = [run["training"]["curve"] for run in model["runs"]]
        rows = [row for row in zip(*curves, strict=False) if all(p["loss"] is not None for p in row)]
        points = [
            Point(sum(p[along] for p in row) / len(row), f"{along} {row[0][along]:,.0f}", tuple(p["loss"] for p in row))
            for row in rows
        ]
        lines.append(Series(model["name"], points))
    lines, title = [line for line in lines if line.points], "validation loss, nats per token"
    return LineChart(lines, SPENT_TITLES[along], title, "nats", logarithmic=True, low_is_good=True)


def plot_setting(models: Sequence[ModelRecord], options: FigureOptions) -> LineChart:
    """Plot quality by a setting, such as the number of layers; models alike in another setting make a line."""
    found: dict[str, dict[float, tuple[float, ...]]] = {}
    for model in models:
        x, name = locate_model(model, options)
        scores = tuple(run["tests"][options.test]["scores"][options.metric] for run in model["runs"])
        if scores:
            found.setdefault(name, {})[x] = scores
    xs = sorted({x for line in found.values() for x in line})
    ticks = tuple(f"{x:g}" for x in xs)
    lines = [
        Series(name, [Point(xs.index(x), f"{options.x} {x:g}", line[x]) for x in sorted(line)])
        for name, line in found.items()
    ]
    name = metric_title(options.metric)
    return LineChart(
        lines, options.x, f"{name} on {options.test}", name, ticks, low_is_good=low_is_good(options.metric)
    )


def locate_model(model: ModelRecord, options: FigureOptions) -> tuple[float, str]:
    """Return the value of the setting `x` and the name of the line that a model is on, from the setting `lines`."""
    value = find_setting(model, options.x)
    if not isinstance(value, int | float):
        raise UserError(f"a question puts {options.x!r} along an axis, but {value!r} of {model['name']!r} is no number")
    return float(value), f"{options.lines} {find_setting(model, options.lines)}".lower()


def find_setting(model: ModelRecord, path: str) -> Any:
    value: Any = model["settings"]
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise UserError(f"a question asks for the setting {path!r}, which {model['name']!r} does not have")
        value = value[part]
    return value


class FigureKind(NamedTuple):
    plot: Callable[[Sequence[ModelRecord], FigureOptions], LineChart]
    title: str = ""  # on the page, over all models; a figure without one is plotted only where a question asks for it
    why: str = ""


FIGURES = {
    "curve": FigureKind(plot_learning_curve, "Learning curves", "Loss on the validation set during training."),
    "length": FigureKind(plot_length, "Quality by source length", "Scores on the test sentences of each length."),
    "distance": FigureKind(
        plot_distance,
        "Grammar by distance",
        "Share of grammatical phenomena that are correct, by the distance between the words that must agree.",
    ),
    "gradient": FigureKind(
        plot_target_gradient,
        "Gradient by distance",
        "Norm of the loss gradient at the target inputs before a token, in per cent of the nearest.",
    ),
    "source-gradient": FigureKind(
        plot_source_gradient,
        "Gradient in the source",
        "Norm of the loss gradient at the source tokens, by their distance from the end of the source, "
        "in per cent of the last token's.",
    ),
    "setting": FigureKind(plot_setting),
}


# Questions


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
    """Return the questions of the first folder that has any."""
    for path in paths:
        file = path / QUESTIONS_FILE
        if path.is_dir() and file.exists():
            found = build(Questions, parse_yaml(read_text(file, "questions"), str(file)), where=str(file))
            for question in found.questions:
                pick(FIGURES, question.figure, f"figure of {question.title!r}")
            return found
    return Questions()


def check_questions(questions: Questions, runs: Sequence[PlannedRun]) -> None:
    """Refuse questions that cannot be answered before the runs start, which may take days."""
    models = {run.name: {"name": run.name, "settings": run.recipe.model_dump(mode="json")} for run in runs}
    for question in questions.questions:
        names = match_models(question, list(models))
        if not names:
            raise UserError(f"the question {question.title!r} asks about models that the comparison does not have")
        if bool(question.better) != bool(question.worse):
            raise UserError(f"the question {question.title!r} needs both better and worse, or neither")
        lines = names
        if question.figure == "setting":
            options = FigureOptions("", "", "", question.x, question.lines)
            lines = [locate_model(models[name], options)[1] for name in names]
        for name in filter(None, (question.better, question.worse)):
            pick(dict.fromkeys(lines), name, f"line in the figure of {question.title!r}")


def match_models(question: Question, names: Sequence[str]) -> list[str]:
    """Return the models that a question is about, in the order in which it names them."""
    return list(dict.fromkeys(name for pattern in question.models for name in fnmatch.filter(names, pattern)))


def answer_question(question: Question, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the question with its answer, as report.json holds it."""
    about = report["about"]
    picked = match_models(question, [model["name"] for model in report["models"]])
    test = question.test or next(iter(about["tests"]), "")
    if test not in about["tests"]:
        raise UserError(
            f"the question {question.title!r} asks about a test {test!r}, but there are: {', '.join(about['tests'])}"
        )
    models = [model for name in picked for model in report["models"] if model["name"] == name]
    options = FigureOptions(test, about["metrics"][0], next(iter(about["budget"])), question.x, question.lines)
    figure = FIGURES[question.figure].plot(keep_common_seeds(models), options)
    answer = describe_outcome(question, figure)
    return {**question.model_dump(mode="json"), "models": picked, "test": test, "answer": answer}


def keep_common_seeds(models: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the models with the seeds that all of them finished, so that seeds can be compared one by one."""
    seeds = [{run["seed"] for run in model["runs"]} for model in models if model["runs"]]
    common = set.intersection(*seeds) if seeds else set()
    return [{**model, "runs": [run for run in model["runs"] if run["seed"] in common]} for model in models]


def describe_outcome(question: Question, figure: LineChart) -> str:
    """Return the outcome in a sentence that holds nothing but the numbers."""
    lines = {line.name: line for line in figure.series}
    if not lines:
        return "No answer: no run of these models has finished."
    if not question.better:
        return rank_models(figure)
    missing = [name for name in (question.better, question.worse) if name not in lines]
    if missing:
        return f"No answer: {missing[0]} has no finished run."
    return compare_models(lines[question.better], lines[question.worse], figure)


def rank_models(figure: LineChart) -> str:
    """Return all models at the last point of the x axis, best first."""
    far = max(line.points[-1].x for line in figure.series)
    last = [(line.points[-1], line.name) for line in figure.series if line.points[-1].x == far]
    ranked = sorted(last, key=lambda each: each[0].mean, reverse=not figure.low_is_good)
    values = ", ".join(f"{name} {format_number(point.mean)}" for point, name in ranked)
    return f"At {ranked[0][0].label}: {values} ({figure.unit})."


def compare_models(better: Series, worse: Series, figure: LineChart) -> str:
    """Return whether `better` beats `worse` at the last point, in how many seeds, and their difference at the first."""
    pairs = [(b, w) for b in better.points for w in worse.points if b.x == w.x]
    if not pairs:
        return f"No answer: {better.name} and {worse.name} have no point in common."
    b, w = pairs[-1]
    ahead = sum((one < other) if figure.low_is_good else (one > other) for one, other in zip(b.values, w.values))
    seeds = min(len(b.values), len(w.values))
    verdict = "As expected" if ahead == seeds else "Not as expected" if ahead == 0 else "Undecided"
    found = (
        f"{verdict}: at {b.label} {better.name} has {format_number(b.mean)} {figure.unit} and {worse.name} "
        f"{format_number(w.mean)}, {describe_gaps(b.values, w.values, figure.logarithmic)}; "
        f"it is ahead in {ahead} of {seeds} seed{'s' * (seeds > 1)}"
    )
    near_b, near_w = pairs[0]
    if figure.logarithmic or near_b.x == b.x:
        return found + "."
    return f"{found}. At {near_b.label}: {describe_gaps(near_b.values, near_w.values, False)}."


def describe_gaps(one: Sequence[float], other: Sequence[float], ratio: bool) -> str:
    """Return the differences seed by seed, or the ratios."""
    found = [a / b if ratio else a - b for a, b in zip(one, other)]
    mean = format_number(sum(found) / len(found), signed=not ratio)
    mean = f"{mean} times as much" if ratio else f"a difference of {mean}"
    if len(found) == 1:
        return mean
    low, high = (format_number(value, signed=not ratio) for value in (min(found), max(found)))
    return f"{mean} (by seed {low} to {high})"


def format_number(value: float, *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{value:{sign}.1f}" if abs(value) >= 1 or value == 0 else f"{value:{sign}.3g}"
