"""Figures of a comparison, and questions that are answered from them.

FIGURES has the functions that plot a figure from the models in report.json. Each point contains the values of all
seeds, so that readers see how much the results vary by chance. Questions are in the file questions.yaml beside the
recipes: they state what the comparison is meant to show. Answers are computed from the numbers of a figure. Example:

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
from dragoman.config.settings import AsTuple, Settings, get_entry, parse_settings, parse_yaml, read_text
from dragoman.errors import UserError
from dragoman.evaluation.figures import Chart, Point, Series
from dragoman.evaluation.report import SCORE_TITLES, format_bounds
from dragoman.metrics.metrics import METRICS

ModelRecord = Mapping[str, Any]  # a model in report.json
MAX_GRADIENT_DISTANCE = 24  # tokens, in plots of gradients
# The x axis of learning curves: budget -> key in the points of a curve
CURVE_X_KEYS = {"steps": "step", "epochs": "step", "minutes": "seconds", "flops": "flops"}
CURVE_X_TITLES = {"step": "training steps", "seconds": "seconds of training", "flops": "FLOPs of training"}


class FigureOptions(NamedTuple):
    """What a figure needs to know apart from the models."""

    test: str
    metric: str
    budget: str  # what limits the training: steps, epochs, minutes or flops
    x_setting: str  # only for the figure "setting": the setting on the x axis, such as model.layers
    line_setting: str  # only for the figure "setting": models with the same value of this setting form a line


def plot_figure(question: Mapping[str, Any], models: Sequence[ModelRecord], about: Mapping[str, Any]) -> Chart:
    """Return the figure of a question in report.json, whose section `about` names test sets, metrics and budget.

    The default test set is the first one. Scores are those of the first metric. The x axis of learning curves shows
    what limits the training.
    """
    test, budget = question.get("test") or next(iter(about["tests"]), ""), next(iter(about["budget"]), "steps")
    options = FigureOptions(test, about["metrics"][0], budget, question.get("x", ""), question.get("lines", ""))
    return FIGURES[question["figure"]](models, options)


def make_series(models: Sequence[ModelRecord], find_points: Callable[[ModelRecord], list[Point]]) -> list[Series]:
    """Return a line for each model that has a finished run and at least one point."""
    lines = [Series(model["name"], find_points(model)) for model in models if model["runs"]]
    return [line for line in lines if line.points]


def plot_scores(
    series: list[Series], options: FigureOptions, *, x_title: str, ticks: Sequence[str], unit: str = ""
) -> Chart:
    """Return a chart of values on the test set: percentages if a `unit` is given, else scores of the metric."""
    metric = METRICS.get(options.metric)  # None for loss and perplexity of language models, where low is good
    low_is_good = not unit and not (metric and metric.higher_is_better)
    unit = unit or SCORE_TITLES.get(options.metric, options.metric)
    return Chart(series, x_title, f"{unit} on {options.test}", unit, tuple(ticks), low_is_good=low_is_good)


def plot_bins(
    models: Sequence[ModelRecord], options: FigureOptions, *, key: str, x_title: str, unit: str = "", suffix: str = ""
) -> Chart:
    """Plot values by bin. `key` is "lengths" or "distances": a table in the results of a test, with one row per bin."""

    def read_tables(model: ModelRecord) -> list[Any]:
        return [run["tests"].get(options.test, {}).get(key, []) for run in model["runs"]]

    def find_points(model: ModelRecord) -> list[Point]:
        bins = zip(labels, *read_tables(model))  # the label of a bin, and its row in the table of each seed
        return [Point(n, label, tuple(row["value"] for row in rows)) for n, (label, *rows) in enumerate(bins)]

    first_table: Sequence[Mapping[str, Any]] = next((read_tables(model)[0] for model in models if model["runs"]), [])
    labels = [f"{format_bounds(row)} word{'s' * (row['high'] != 1)}{suffix}" for row in first_table]
    ticks = [f"{format_bounds(row)}\n({row['lines']})" for row in first_table]  # "lines": number of cases in the bin
    return plot_scores(make_series(models, find_points), options, x_title=x_title, ticks=ticks, unit=unit)


def plot_gradient(models: Sequence[ModelRecord], _: FigureOptions, *, side: str, x_title: str) -> Chart:
    """Plot the gradient norm of the source or target embeddings by distance (inspection/gradient_flow.py)."""

    def find_points(model: ModelRecord) -> list[Point]:
        # Norms at distance 0, 1, ... for each seed; phrase-based systems have no gradients.
        seeds = [run["gradient"][side][: MAX_GRADIENT_DISTANCE + 1] for run in model["runs"] if "gradient" in run]
        return [Point(d, f"{d} tokens", tuple(100 * norm for norm in norms)) for d, norms in enumerate(zip(*seeds))]

    title = "gradient norm, % of the norm at distance 0"
    return Chart(make_series(models, find_points), x_title, title, "% of the gradient", logarithmic=True)


def plot_learning_curve(models: Sequence[ModelRecord], options: FigureOptions) -> Chart:
    x_key = CURVE_X_KEYS[options.budget]

    def find_points(model: ModelRecord) -> list[Point]:
        points = []
        for validations in zip(*(run["training"]["curve"] for run in model["runs"])):  # one of each seed
            losses = tuple(validation["loss"] for validation in validations)
            if None not in losses:
                x = sum(validation[x_key] for validation in validations) / len(validations)
                points.append(Point(x, f"{x_key} {validations[0][x_key]:,.0f}", losses))
        return points

    lines, title = make_series(models, find_points), "validation loss, nats per token"
    return Chart(lines, CURVE_X_TITLES[x_key], title, "nats", logarithmic=True, low_is_good=True)


def plot_setting(models: Sequence[ModelRecord], options: FigureOptions) -> Chart:
    """Plot scores by a setting, such as model.layers. Models with the same value of `line_setting` form a line."""
    scores_by_line: dict[str, dict[float, tuple[float, ...]]] = {}  # name of a line -> x -> scores of the seeds
    for model in models:
        x, name = find_x_and_line(model, options.x_setting, options.line_setting)
        scores = tuple(run["tests"][options.test]["scores"][options.metric] for run in model["runs"])
        if scores:
            scores_by_line.setdefault(name, {})[x] = scores
    xs = sorted({x for line in scores_by_line.values() for x in line})
    lines = [
        Series(name, [Point(xs.index(x), f"{options.x_setting} {x:g}", line[x]) for x in sorted(line)])
        for name, line in scores_by_line.items()
    ]
    return plot_scores(lines, options, x_title=options.x_setting, ticks=[f"{x:g}" for x in xs])


def find_x_and_line(model: ModelRecord, x_setting: str, line_setting: str) -> tuple[float, str]:
    """Return the value of `x_setting` of a model and the name of its line, for the figure "setting"."""

    def find_setting(path: str) -> Any:
        try:
            return reduce(lambda section, part: section[part], path.split("."), model["settings"])
        except (KeyError, TypeError):
            message = f"a question asks for the setting {path!r}, which {model['name']!r} does not have"
            raise UserError(message) from None

    value = find_setting(x_setting)
    if not isinstance(value, int | float):
        raise UserError(
            f"a question has {x_setting!r} on its x axis, but {value!r} of {model['name']!r} is not a number"
        )
    return float(value), f"{line_setting} {find_setting(line_setting)}".lower()  # "true" instead of "True", as in YAML


FIGURES: dict[str, Callable[[Sequence[ModelRecord], FigureOptions], Chart]] = {
    "curve": plot_learning_curve,
    "length": partial(plot_bins, key="lengths", x_title="words of the source (in brackets: how many sentences)"),
    "distance": partial(
        plot_bins,
        key="distances",
        x_title="distance between words that must agree (in brackets: how many cases)",
        unit="% right",
        suffix=" apart",
    ),
    "gradient": partial(plot_gradient, side="target", x_title="distance from the prediction, target tokens"),
    "source-gradient": partial(plot_gradient, side="source", x_title="distance from the end of the source, tokens"),
    "setting": plot_setting,
}


class Question(Settings):
    """A question about a figure, with the expected outcome, if there is one."""

    title: str
    figure: str
    text: str = ""  # an introduction for readers of the report
    models: Annotated[tuple[str, ...], AsTuple] = ("*",)  # names of recipes, or patterns such as rnn-*
    better: str = ""  # the line that is expected to be better than `worse` at the last point of the figure
    worse: str = ""  # required if there is a `better`; without both, the answer ranks all lines
    test: str = ""  # the name of a test set; by default the first one
    x: str = ""  # only for the figure "setting": the setting on the x axis, such as model.layers
    lines: str = ""  # only for the figure "setting": models with the same value of this setting form a line

    def match_models(self, names: Sequence[str]) -> list[str]:
        """Return the models that the question is about, in the order of `self.models`."""
        return list(dict.fromkeys(name for pattern in self.models for name in fnmatch.filter(names, pattern)))


class Questions(Settings):
    """The content of questions.yaml."""

    title: str = "Comparison"
    questions: Annotated[tuple[Question, ...], AsTuple] = ()


def read_questions(paths: Sequence[Path]) -> Questions:
    for file in (path / QUESTIONS_FILE for path in paths if path.is_dir()):
        if file.exists():
            content = parse_settings(Questions, parse_yaml(read_text(file, "questions"), str(file)), where=str(file))
            for question in content.questions:
                get_entry(FIGURES, question.figure, f"figure of {question.title!r}")  # raises an error if it is unknown
            return content
    return Questions()


def check_questions(questions: Questions, runs: Sequence[PlannedRun]) -> None:
    """Refuse questions that cannot be answered, before the runs start, which may take days."""
    models = {run.name: {"name": run.name, "settings": run.recipe.model_dump(mode="json")} for run in runs}
    for question in questions.questions:
        names = question.match_models(list(models))
        if not names:
            raise UserError(f"no recipe matches `models` of the question {question.title!r}; correct the names")
        if bool(question.better) != bool(question.worse):
            raise UserError(f"the question {question.title!r} needs both better and worse, or neither")
        lines = names  # other figures have a line for each model
        if question.figure == "setting":
            lines = [find_x_and_line(models[name], question.x, question.lines)[1] for name in names]
        for name in filter(None, (question.better, question.worse)):
            get_entry(dict.fromkeys(lines), name, f"line in the figure of {question.title!r}")


def answer_question(question: Question, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the question with its answer, as it is written to report.json.

    Only seeds that all models of the question have finished are used, so that models can be compared seed by seed.
    """
    records, about = {model["name"]: model for model in report["models"]}, report["about"]
    test = question.test or next(iter(about["tests"]), "")
    if test not in about["tests"]:
        problem = f"the question {question.title!r} asks about the test set {test!r}, which does not exist"
        raise UserError(f"{problem}; choose one of: {', '.join(about['tests'])}")
    names = question.match_models(list(records))
    seeds = [{run["seed"] for run in records[name]["runs"]} for name in names if records[name]["runs"]]
    common_seeds = set.intersection(*seeds) if seeds else set()
    models = [
        {**records[name], "runs": [run for run in records[name]["runs"] if run["seed"] in common_seeds]}
        for name in names
    ]
    resolved = {**question.model_dump(mode="json"), "models": names, "test": test}
    return {**resolved, "answer": describe_outcome(question, plot_figure(resolved, models, about))}


def describe_outcome(question: Question, figure: Chart) -> str:
    """Return the outcome as a sentence with the numbers of the figure.

    The sentence states whether `better` beats `worse` at the last point, for how many seeds, and the difference at the
    first point. Logarithmic figures omit this difference: the first point is 100 % for every model (gradients) or early
    in training (curves). Without an expectation, the sentence ranks all lines at the last point, best first.
    """
    lines = {line.name: line.points for line in figure.series}
    if not lines:
        return "No answer: no run of these models has finished."
    if not question.better:
        last_x = max(points[-1].x for points in lines.values())
        last = {name: points[-1] for name, points in lines.items() if points[-1].x == last_x}
        ranked = sorted(last, key=lambda name: last[name].mean, reverse=not figure.low_is_good)
        values = ", ".join(f"{name} {format_number(last[name].mean)}" for name in ranked)
        return f"At {last[ranked[0]].label}: {values} ({figure.unit})."
    for name in (question.better, question.worse):
        if name not in lines:
            return f"No answer: {name} has no finished run."
    pairs = [(b, w) for b in lines[question.better] for w in lines[question.worse] if b.x == w.x]
    if not pairs:
        return f"No answer: {question.better} and {question.worse} have no point in common."
    better, worse = pairs[-1]
    by_seed = list(zip(better.values, worse.values))
    wins, seeds = sum((b < w) if figure.low_is_good else (b > w) for b, w in by_seed), len(by_seed)
    verdict = "As expected" if wins == seeds else "Not as expected" if wins == 0 else "Undecided"
    outcome = (
        f"{verdict}: at {better.label} {question.better} has {format_number(better.mean)} {figure.unit} and "
        f"{question.worse} {format_number(worse.mean)}, {describe_difference(better, worse, figure.logarithmic)}; "
        f"it is ahead in {wins} of {seeds} seed{'s' * (seeds > 1)}"
    )
    first_better, first_worse = pairs[0]
    if figure.logarithmic or first_better.x == better.x:
        return outcome + "."
    return f"{outcome}. At {first_better.label}: {describe_difference(first_better, first_worse, False)}."


def describe_difference(point: Point, other: Point, ratio: bool) -> str:
    """Return the mean difference (or ratio) of two points as text and, for several seeds, its range."""
    values = [a / b if ratio else a - b for a, b in zip(point.values, other.values)]
    numbers = (sum(values) / len(values), min(values), max(values))
    mean, low, high = (format_number(number, sign="" if ratio else "+") for number in numbers)
    mean = f"{mean} times as much" if ratio else f"a difference of {mean}"
    return mean if len(values) == 1 else f"{mean} (by seed {low} to {high})"


def format_number(value: float, *, sign: str = "") -> str:
    """Return a number with one decimal or, if its absolute value is below 1, three significant digits."""
    return f"{value:{sign}.1f}" if abs(value) >= 1 or value == 0 else f"{value:{sign}.3g}"
