"""Figures of a comparison, and the questions about them: what a folder of recipes is meant to show.

A figure takes the models that it is about, as report.json has them, and returns a chart. Each point holds the value of
every seed, so that readers see how much of a difference is chance. Questions are in a file beside the recipes, and
are answered from the numbers of a figure alone:

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
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from dragoman.compare.runs import QUESTIONS_FILE, PlannedRun
from dragoman.config.settings import Listed, Settings, build, parse_yaml, pick, read_text
from dragoman.errors import UserError
from dragoman.evaluation.figures import LineChart, Point, Series
from dragoman.evaluation.report import SCORE_TITLES, format_bounds
from dragoman.metrics.metrics import METRICS

ModelRecord = Mapping[str, Any]  # a model in report.json
MAX_GRADIENT_DISTANCE = 24  # tokens back, in plots of gradients
CURVE_X_KEYS = {"steps": "step", "epochs": "step", "minutes": "seconds", "flops": "flops"}  # what a curve runs along
CURVE_X_TITLES = {"step": "training steps", "seconds": "seconds of training", "flops": "FLOPs of training"}


class FigureOptions(NamedTuple):
    """What a figure needs beside its models."""

    test: str  # the name of a test set
    metric: str
    budget: str  # the limit that the runs were given
    x: str  # settings, such as model.layers
    lines: str


def plot_figure(question: Mapping[str, Any], models: Sequence[ModelRecord], about: Mapping[str, Any]) -> LineChart:
    """Return the figure of a question, as report.json holds it, by default about the first test set.

    The figure shows the first metric, and learning curves run along what limits the training.
    """
    test, budget = question.get("test") or next(iter(about["tests"]), ""), next(iter(about["budget"]), "steps")
    options = FigureOptions(test, about["metrics"][0], budget, question.get("x", ""), question.get("lines", ""))
    return FIGURES[question["figure"]](models, options)


def make_series(models: Sequence[ModelRecord], find_points: Callable[[ModelRecord], list[Point]]) -> list[Series]:
    """Return the lines of the models that have a finished run and at least one point."""
    lines = [Series(model["name"], find_points(model)) for model in models if model["runs"]]
    return [line for line in lines if line.points]


def plot_scores(
    series: list[Series], options: FigureOptions, *, x_title: str, ticks: Sequence[str], unit: str = ""
) -> LineChart:
    """Return a chart of scores on the test set. Without a `unit` they are scores of the metric."""
    metric = METRICS.get(options.metric)  # none for the loss and the perplexity of language models: low is good
    low = not unit and not (metric and metric.higher_is_better)
    unit = unit or SCORE_TITLES.get(options.metric, options.metric)
    return LineChart(series, x_title, f"{unit} on {options.test}", unit, tuple(ticks), low_is_good=low)


def plot_buckets(
    models: Sequence[ModelRecord], options: FigureOptions, *, key: str, x_title: str, unit: str = "", more: str = ""
) -> LineChart:
    """Plot the table `key` of a test set by its buckets."""

    def read_tables(model: ModelRecord) -> list[Any]:
        return [run["tests"].get(options.test, {}).get(key, []) for run in model["runs"]]

    def find_points(model: ModelRecord) -> list[Point]:
        rows = zip(labels, *read_tables(model))
        return [Point(n, label, tuple(row["value"] for row in seeds)) for n, (label, *seeds) in enumerate(rows)]

    first: Sequence[Mapping[str, Any]] = next((read_tables(model)[0] for model in models if model["runs"]), [])
    labels = [f"{format_bounds(row)} word{'s' * (row['high'] != 1)}{more}" for row in first]
    ticks = [f"{format_bounds(row)}\n({row['lines']})" for row in first]
    return plot_scores(make_series(models, find_points), options, x_title=x_title, ticks=ticks, unit=unit)


def plot_gradient(models: Sequence[ModelRecord], _: FigureOptions, *, side: str, x_title: str) -> LineChart:
    """Plot the gradient norm at the tokens of one side by their distance, relative to that at distance 0."""

    def find_points(model: ModelRecord) -> list[Point]:
        rows = [run["gradient"][side][: MAX_GRADIENT_DISTANCE + 1] for run in model["runs"] if "gradient" in run]
        return [Point(d, f"{d} tokens", tuple(100 * n for n in norms)) for d, norms in enumerate(zip(*rows))]

    title = "gradient, % of that at distance 0"
    return LineChart(make_series(models, find_points), x_title, title, "% of the gradient", logarithmic=True)


def plot_learning_curve(models: Sequence[ModelRecord], options: FigureOptions) -> LineChart:
    """Plot the validation loss during training."""
    along = CURVE_X_KEYS[options.budget]

    def find_points(model: ModelRecord) -> list[Point]:
        points = []
        for row in zip(*(run["training"]["curve"] for run in model["runs"])):
            losses = tuple(point["loss"] for point in row)
            if None not in losses:
                x = sum(point[along] for point in row) / len(row)
                points.append(Point(x, f"{along} {row[0][along]:,.0f}", losses))
        return points

    lines, title = make_series(models, find_points), "validation loss, nats per token"
    return LineChart(lines, CURVE_X_TITLES[along], title, "nats", logarithmic=True, low_is_good=True)


def plot_setting(models: Sequence[ModelRecord], options: FigureOptions) -> LineChart:
    """Plot quality by a setting, such as the number of layers; models alike in another setting make a line."""
    found: dict[str, dict[float, tuple[float, ...]]] = {}
    for model in models:
        x, name = locate_model(model, options.x, options.lines)
        scores = tuple(run["tests"][options.test]["scores"][options.metric] for run in model["runs"])
        if scores:
            found.setdefault(name, {})[x] = scores
    xs = sorted({x for line in found.values() for x in line})
    lines = [
        Series(name, [Point(xs.index(x), f"{options.x} {x:g}", line[x]) for x in sorted(line)])
        for name, line in found.items()
    ]
    return plot_scores(lines, options, x_title=options.x, ticks=[f"{x:g}" for x in xs])


def locate_model(model: ModelRecord, x: str, lines: str) -> tuple[float, str]:
    """Return the value of the setting `x` and the name of the line that a model is on, from the setting `lines`."""

    def find_setting(path: str) -> Any:
        try:
            return reduce(lambda section, part: section[part], path.split("."), model["settings"])
        except (KeyError, TypeError):
            message = f"a question asks for the setting {path!r}, which {model['name']!r} does not have"
            raise UserError(message) from None

    value = find_setting(x)
    if not isinstance(value, int | float):
        raise UserError(f"a question puts {x!r} along an axis, but {value!r} of {model['name']!r} is no number")
    return float(value), f"{lines} {find_setting(lines)}".lower()


FIGURES: dict[str, Callable[[Sequence[ModelRecord], FigureOptions], LineChart]] = {
    "curve": plot_learning_curve,
    "length": partial(plot_buckets, key="lengths", x_title="words of the source (in brackets: how many sentences)"),
    "distance": partial(
        plot_buckets,
        key="distances",
        x_title="distance between words that must agree (in brackets: how many phenomena)",
        unit="% right",
        more=" apart",
    ),
    "gradient": partial(plot_gradient, side="target", x_title="target tokens back"),
    "source-gradient": partial(plot_gradient, side="source", x_title="source tokens before the end"),
    "setting": plot_setting,
}


# Questions


class Question(Settings):
    """A question about a figure, with the outcome that is expected, if any."""

    title: str
    figure: str
    text: str = ""  # why it is asked
    models: Annotated[tuple[str, ...], Listed] = ("*",)  # names of recipes, or patterns of them
    better: str = ""  # the line that is expected to be ahead ...
    worse: str = ""  # ... of this one, at the far end; without them all lines are ranked there
    test: str = ""  # by default the first test set
    x: str = ""  # of figure "setting": what runs along the axis, such as model.layers
    lines: str = ""  # ... and what makes a line of its own, such as model.residual

    def match_models(self, names: Sequence[str]) -> list[str]:
        """Return the models that the question is about, in the order in which it names them."""
        return list(dict.fromkeys(name for pattern in self.models for name in fnmatch.filter(names, pattern)))


class Questions(Settings):
    """What questions.yaml holds."""

    title: str = "Comparison"
    questions: Annotated[tuple[Question, ...], Listed] = ()


def read_questions(paths: Sequence[Path]) -> Questions:
    """Return the questions of the first folder that has any."""
    for file in (path / QUESTIONS_FILE for path in paths if path.is_dir()):
        if file.exists():
            found = build(Questions, parse_yaml(read_text(file, "questions"), str(file)), where=str(file))
            for question in found.questions:
                pick(FIGURES, question.figure, f"figure of {question.title!r}")
            return found
    return Questions()


def check_questions(questions: Questions, runs: Sequence[PlannedRun]) -> None:
    """Refuse questions that cannot be answered before the runs start, which may take days."""
    models = {run.name: {"name": run.name, "settings": run.recipe.model_dump(mode="json")} for run in runs}
    for question in questions.questions:
        lines = question.match_models(list(models))
        if not lines:
            raise UserError(f"the question {question.title!r} asks about models that the comparison does not have")
        if bool(question.better) != bool(question.worse):
            raise UserError(f"the question {question.title!r} needs both better and worse, or neither")
        if question.figure == "setting":
            lines = [locate_model(models[name], question.x, question.lines)[1] for name in lines]
        for name in filter(None, (question.better, question.worse)):
            pick(dict.fromkeys(lines), name, f"line in the figure of {question.title!r}")


def answer_question(question: Question, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the question with its answer, as report.json holds it.

    The answer counts the seeds that all of its models finished, so that seeds can be compared one by one.
    """
    records, about = {model["name"]: model for model in report["models"]}, report["about"]
    test = question.test or next(iter(about["tests"]), "")
    if test not in about["tests"]:
        asked = f"the question {question.title!r} asks about a test {test!r}"
        raise UserError(f"{asked}, but there are: {', '.join(about['tests'])}")
    names = question.match_models(list(records))
    seeds = [{run["seed"] for run in records[name]["runs"]} for name in names if records[name]["runs"]]
    common = set.intersection(*seeds) if seeds else set()
    models = [
        {**records[name], "runs": [run for run in records[name]["runs"] if run["seed"] in common]} for name in names
    ]
    found = {**question.model_dump(mode="json"), "models": names, "test": test}
    return {**found, "answer": describe_outcome(question, plot_figure(found, models, about))}


def describe_outcome(question: Question, figure: LineChart) -> str:
    """Return the outcome in a sentence that holds nothing but the numbers.

    It tells whether `better` beats `worse` at the last point, in how many seeds, and their difference at the first.
    Without an expectation it ranks all models at the last point, best first.
    """
    lines = {line.name: line.points for line in figure.series}
    if not lines:
        return "No answer: no run of these models has finished."
    if not question.better:
        far = max(points[-1].x for points in lines.values())
        last = {name: points[-1] for name, points in lines.items() if points[-1].x == far}
        ranked = sorted(last, key=lambda name: last[name].mean, reverse=not figure.low_is_good)
        values = ", ".join(f"{name} {format_number(last[name].mean)}" for name in ranked)
        return f"At {last[ranked[0]].label}: {values} ({figure.unit})."
    for name in (question.better, question.worse):
        if name not in lines:
            return f"No answer: {name} has no finished run."
    pairs = [(b, w) for b in lines[question.better] for w in lines[question.worse] if b.x == w.x]
    if not pairs:
        return f"No answer: {question.better} and {question.worse} have no point in common."
    b, w = pairs[-1]
    ahead = sum((one < other) if figure.low_is_good else (one > other) for one, other in zip(b.values, w.values))
    seeds = min(len(b.values), len(w.values))
    verdict = "As expected" if ahead == seeds else "Not as expected" if ahead == 0 else "Undecided"
    found = (
        f"{verdict}: at {b.label} {question.better} has {format_number(b.mean)} {figure.unit} and {question.worse} "
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
    mean, low, high = (
        format_number(value, sign="" if ratio else "+") for value in (sum(found) / len(found), min(found), max(found))
    )
    mean = f"{mean} times as much" if ratio else f"a difference of {mean}"
    return mean if len(found) == 1 else f"{mean} (by seed {low} to {high})"


def format_number(value: float, *, sign: str = "") -> str:
    """Return one digit after the point or, of small numbers, three significant digits."""
    return f"{value:{sign}.1f}" if abs(value) >= 1 or value == 0 else f"{value:{sign}.3g}"
