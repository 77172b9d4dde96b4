"""The figures of a comparison: what is plotted against what, each kind one entry of a registry.

A figure takes the models that it is about, as report.json has them, and gives lines of points. Each point holds the
value of every seed, so that one sees how much of a difference is chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dragoman.pages.chart import Figure, Line, Point
from dragoman.score.metrics import METRICS
from dragoman.types import UserError

Model = Mapping[str, Any]
Run = Mapping[str, Any]
FARTHEST = 24  # tokens back that gradients are drawn to
SPENT = {"steps": "step", "epochs": "step", "minutes": "seconds", "flops": "flops"}  # what a curve runs along
SPENT_TITLES = {"step": "training steps", "seconds": "seconds of training", "flops": "FLOPs of training"}


class Asked(NamedTuple):
    """What a figure may want to know beside its models."""

    test: str  # the name of a test set
    metric: str
    budget: str  # the limit that the runs were given
    x: str = ""  # settings, such as model.layers
    lines: str = ""


def shown(metric: str) -> str:
    """Return a metric's name in tables; a language model's loss and perplexity are not in the registry."""
    return METRICS[metric].shown if metric in METRICS else metric


def low_is_good(metric: str) -> bool:
    return metric not in METRICS or not METRICS[metric].higher


def by_length(models: Sequence[Model], asked: Asked) -> Figure:
    """Quality by the length of the source."""
    name = shown(asked.metric)
    figure = binned(models, asked, "lengths", "words of the source", f"{name} on {asked.test}", name)
    return replace(figure, low_is_good=low_is_good(asked.metric))


def by_distance(models: Sequence[Model], asked: Asked) -> Figure:
    """Share of grammatical phenomena that are correct, by how far apart the words are that must agree."""
    title = f"% right on {asked.test}"
    return binned(models, asked, "distances", "distance between words that must agree", title, "% right")


def binned(models: Sequence[Model], asked: Asked, key: str, x_title: str, y_title: str, unit: str) -> Figure:
    tables = {
        m["name"]: [run["tests"].get(asked.test, {}).get(key, []) for run in m["runs"]] for m in models if m["runs"]
    }
    first: Sequence[Mapping[str, Any]] = next((table[0] for table in tables.values()), [])
    apart, counted = ("", "sentences") if key == "lengths" else (" apart", "phenomena")
    lines = [
        Line(name, [
            Point(number, words(row, apart), tuple(table[number]["value"] for table in seeds))
            for number, row in enumerate(first)
        ])
        for name, seeds in tables.items()
    ]  # fmt: skip
    ticks = tuple(f"{bounds(row)}\n({row['lines']})" for row in first)
    return Figure(lines if first else [], f"{x_title} (in brackets: how many {counted})", y_title, unit, ticks)


def words(row: Mapping[str, Any], more: str) -> str:
    return f"{bounds(row)} word{'s' * (row['high'] != 1)}{more}"


def bounds(row: Mapping[str, Any]) -> str:
    if row["high"] is None:
        return f"{row['low']} or more"
    return str(row["low"]) if row["low"] == row["high"] else f"{row['low']} to {row['high']}"


def by_gradient(models: Sequence[Model], asked: Asked) -> Figure:  # noqa: ARG001 - the menu's shape
    """Gradient norm at the target inputs before a token, relative to the nearest."""
    return gradient(models, "target", "target tokens back")


def by_source_gradient(models: Sequence[Model], asked: Asked) -> Figure:  # noqa: ARG001
    """Gradient norm at the source tokens, counted from the end of the source."""
    return gradient(models, "source", "source tokens before the end")


def gradient(models: Sequence[Model], side: str, x_title: str) -> Figure:
    lines = []
    for model in models:
        rows = [run["gradient"][side] for run in model["runs"] if "gradient" in run]
        rows = [[100 * share for share in row] for row in rows]
        shortest = min((len(row) for row in rows), default=0)
        points = [Point(d, f"{d} tokens", tuple(row[d] for row in rows)) for d in range(min(shortest, FARTHEST + 1))]
        lines.append(Line(model["name"], points))
    title = "gradient, % of that at distance 0"
    return Figure([line for line in lines if line.points], x_title, title, "% of the gradient", logarithmic=True)


def by_curve(models: Sequence[Model], asked: Asked) -> Figure:
    """Validation loss as training goes on."""
    along = SPENT[asked.budget]
    lines = []
    for model in models:
        curves = [run["training"]["curve"] for run in model["runs"]]
        rows = [row for row in zip(*curves, strict=False) if all(p["loss"] is not None for p in row)]
        points = [
            Point(sum(p[along] for p in row) / len(row), f"{along} {row[0][along]:,.0f}", tuple(p["loss"] for p in row))
            for row in rows
        ]
        lines.append(Line(model["name"], points))
    lines, title = [line for line in lines if line.points], "validation loss, nats per token"
    return Figure(lines, SPENT_TITLES[along], title, "nats", logarithmic=True, low_is_good=True)


def by_setting(models: Sequence[Model], asked: Asked) -> Figure:
    """Quality by a setting, such as the number of layers; models alike in another setting make a line."""
    found: dict[str, dict[float, tuple[float, ...]]] = {}
    for model in models:
        place, name = place_and_line(model, asked)
        scores = tuple(run["tests"][asked.test]["scores"][asked.metric] for run in model["runs"])
        if scores:
            found.setdefault(name, {})[place] = scores
    places = sorted({x for line in found.values() for x in line})
    ticks = tuple(f"{x:g}" for x in places)
    lines = [
        Line(name, [Point(places.index(x), f"{asked.x} {x:g}", line[x]) for x in sorted(line)])
        for name, line in found.items()
    ]
    name = shown(asked.metric)
    return Figure(lines, asked.x, f"{name} on {asked.test}", name, ticks, low_is_good=low_is_good(asked.metric))


def place_and_line(model: Model, asked: Asked) -> tuple[float, str]:
    """Where a model stands along the setting `x`, and the line that it is on, named after the setting `lines`."""
    place = setting(model, asked.x)
    if not isinstance(place, int | float):
        raise UserError(f"a question puts {asked.x!r} along an axis, but {place!r} of {model['name']!r} is no number")
    return float(place), f"{asked.lines} {setting(model, asked.lines)}".lower()


def setting(model: Model, path: str) -> Any:
    value: Any = model["settings"]
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise UserError(f"a question asks for the setting {path!r}, which {model['name']!r} does not have")
        value = value[part]
    return value


def small_multiples(models: Sequence[Model]) -> Iterator[tuple[str, list[Model]]]:
    """Yield the models of each family, in the order in which families appear."""
    for family in dict.fromkeys(model["family"] for model in models):
        yield family, [model for model in models if model["family"] == family]


class Kind(NamedTuple):
    draw: Callable[[Sequence[Model], Asked], Figure]
    title: str = ""  # on the page, over all models; those without one are drawn where a question asks for them
    why: str = ""


FIGURES = {
    "curve": Kind(by_curve, "Learning curves", "Loss on the validation set during training."),
    "length": Kind(by_length, "Quality by source length", "Scores on the test sentences of each length."),
    "distance": Kind(
        by_distance,
        "Grammar by distance",
        "Share of grammatical phenomena that are correct, by the distance between the words that must agree.",
    ),
    "gradient": Kind(
        by_gradient,
        "Gradient by distance",
        "Norm of the loss gradient at the target inputs before a token, in per cent of the nearest.",
    ),
    "source-gradient": Kind(
        by_source_gradient,
        "Gradient in the source",
        "Norm of the loss gradient at the source tokens, by their distance from the end of the source, "
        "in per cent of the last token's.",
    ),
    "setting": Kind(by_setting),
}
