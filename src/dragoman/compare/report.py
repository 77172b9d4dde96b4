"""The report of a comparison: report.json, one record of all numbers, and report.html, which shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dragoman.compare.measure import choose_metrics
from dragoman.compare.plan import PlannedRun
from dragoman.compare.questions import FIGURES, FigureKind, FigureOptions, metric_title
from dragoman.config.settings import LIMITS, CorpusSettings
from dragoman.evaluation.figures import render_chart
from dragoman.evaluation.report import MISSING, Heading, Row, TableCell, render_page
from dragoman.recipe import Recipe

Measurements = Mapping[str, Any]
SAME_COST = 1.05  # ratio of FLOPs per token up to which two runs should train equally fast
SAME_SPEED = 1.2  # ratio of tokens per second up to which two such runs had about the same share of the machine
NUMBERS: dict[str, Callable[[Measurements], float | None]] = {  # of a run, by column of the table
    "parameters": lambda m: m["parameters"],
    "steps": lambda m: m["training"]["steps"],
    "tokens_per_second": lambda m: m["training"]["tokens_per_second"],
    "greedy_per_second": lambda m: m["speed"]["greedy"] if "speed" in m else None,
    "beam_per_second": lambda m: m["speed"]["beam"] if "speed" in m else None,
    "peak_memory": lambda m: m["training"]["peak_memory"],
    "train_seconds": lambda m: m["training"]["seconds"],
    "flops": lambda m: m["training"]["flops"],
    "dev_loss": lambda m: min((p["loss"] for p in m["training"]["curve"] if p["loss"] is not None), default=None),
}

TRANSFORMER_PARTS: dict[
    str, tuple[object, str]
] = {  # of a Transformer, by the setting and its value that leaves them out
    "position": ("none", "positions"),
    "norm": ("none", "normalisation"),
    "residual": (False, "residual connections"),
    "projections": (False, "projections"),
    "scaled": (False, "score scaling"),
    "activation": ("none", "activation"),
}


def summarise(
    runs: Sequence[PlannedRun], measurements: Mapping[Path, Measurements], failures: Mapping[Path, str], *, jobs: int
) -> dict[str, Any]:
    """Return the record of a comparison: each model's numbers over its seeds. The page shows nothing else."""
    names = list(dict.fromkeys(run.name for run in runs))
    first = runs[0].recipe
    trained = {
        f"{run.name} (seed {run.seed})": measurements[run.folder]["training"]
        for run in runs
        if run.folder in measurements
    }
    return {
        "about": {
            "dragoman": version("dragoman"),
            "torch": torch.__version__,
            "devices": sorted({one["training"]["device"] for one in measurements.values()}),
            "budget": {name: getattr(first.train, name) for name in LIMITS if getattr(first.train, name)},
            "seeds": sorted({run.seed for run in runs}),
            "jobs": jobs,
            "data": first.data.model_dump(mode="json", exclude={"cache"}, exclude_defaults=True),
            "tests": list(next(iter(measurements.values()))["tests"]),
            "metrics": list(choose_metrics(first)),
        },
        "warnings": find_unfair_budgets(trained) if first.train.minutes else [],
        "models": [
            summarise_model(name, [run for run in runs if run.name == name], measurements, failures) for name in names
        ],
    }


def find_unfair_budgets(trained: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a warning if runs that cost the same per token got unequal training in equal time.

    Their speeds differ because of the machine, not because of the models, so their scores cannot be compared.
    """
    runs = {name: run for name, run in trained.items() if run["tokens"] and run["seconds"]}
    cost = {name: run["flops"] / run["tokens"] for name, run in runs.items()}
    speed = {name: run["tokens_per_second"] or run["tokens"] / run["seconds"] for name, run in runs.items()}
    steps = {name: run["steps"] for name, run in runs.items()}
    groups: list[list[str]] = []
    for name in sorted(cost, key=lambda name: cost[name]):
        if not groups or cost[name] > SAME_COST * cost[groups[-1][0]]:
            groups.append([])
        groups[-1].append(name)
    ends = [(min(group, key=speed.__getitem__), max(group, key=speed.__getitem__)) for group in groups]
    unfair = [(a, b) for a, b in ends if speed[b] > SAME_SPEED * speed[a] and steps[a] != steps[b]]
    if not unfair:
        return []
    slow, fast = max(unfair, key=lambda pair: speed[pair[1]] / speed[pair[0]])
    others = f" So do the speeds in {len(unfair) - 1} more groups of runs." if len(unfair) > 1 else ""
    return [
        f"The budget in minutes is unfair: {slow} trained at {speed[slow]:,.0f} tokens/s ({steps[slow]:,} steps) and "
        f"{fast} at {speed[fast]:,.0f} ({steps[fast]:,} steps). Both need as many FLOPs per token, so these speeds "
        f"differ because of other work on the machine.{others} Set the budget in steps or FLOPs, such as "
        f"train.minutes=0 train.steps={steps[fast]}."
    ]


def summarise_model(
    name: str, runs: Sequence[PlannedRun], measurements: Mapping[Path, Measurements], failures: Mapping[Path, str]
) -> dict[str, Any]:
    mine = [measurements[run.folder] for run in runs if run.folder in measurements]
    recipe = runs[0].recipe
    return {
        "name": name,
        "family": model_family(recipe),
        "missing": find_missing_parts(recipe),
        "settings": recipe.model_dump(mode="json", include={"model", "tokenizer", "train", "search"}),
        "numbers": {column: summarise_values([number(one) for one in mine]) for column, number in NUMBERS.items()}
        | {
            f"{metric} {test}": summarise_values([one["tests"][test]["scores"][metric] for one in mine])
            for test in (mine[0]["tests"] if mine else {})
            for metric in choose_metrics(recipe)
        },
        "runs": [{"seed": run.seed, **measurements[run.folder]} for run in runs if run.folder in measurements],
        "failures": [{"seed": run.seed, "why": failures[run.folder]} for run in runs if run.folder in failures],
    }


def model_family(recipe: Recipe) -> str:
    """Return the group that a model is shown in: recurrent models and Transformers by their attention."""
    model = recipe.model
    if model.kind == "rnn":
        return "recurrent, one vector" if model.attention in ("none", "mean") else "recurrent, attention"
    if model.kind != "transformer":
        return model.kind
    if find_missing_parts(recipe):
        return "Transformer, ablated"
    return "Transformer" if model.attention == "full" else "Transformer, efficient attention"


def find_missing_parts(recipe: Recipe) -> list[str]:
    """Return what a Transformer was built without."""
    if recipe.model.kind != "transformer":
        return []
    return [part for setting, (without, part) in TRANSFORMER_PARTS.items() if getattr(recipe.model, setting) == without]


def summarise_values(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return mean, lowest and highest over the seeds; None where a seed has no number."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return {"mean": sum(known) / len(known), "low": min(known), "high": max(known)}


# The page


class Column(NamedTuple):
    heading: str
    title: str  # explains the heading
    write: Callable[[float], str]


TABLE_COLUMNS: dict[str, Column] = {  # of the table
    "parameters": Column("parameters", "number of trained weights", lambda v: f"{v / 1e6:.2f} M"),
    "dev_loss": Column("validation loss", "lowest, in nats per token", lambda v: f"{v:.3f}"),
    "steps": Column("steps", "of training", lambda v: f"{v:,.0f}"),
    "tokens_per_second": Column("train tokens/s", "median, source and target tokens", lambda v: f"{v:,.0f}"),
    "train_seconds": Column("train s", "wall-clock time, validation included", lambda v: f"{v:,.0f}"),
    "flops": Column("FLOPs", "of training, matrix products only", lambda v: f"{v:.2e}"),
    "peak_memory": Column(
        "peak memory", "of the process on a CPU, of tensors on a GPU", lambda v: f"{v / 2**20:,.0f} MiB"
    ),
    "greedy_per_second": Column("greedy sent./s", "translation speed with beam size 1", lambda v: f"{v:,.1f}"),
    "beam_per_second": Column("beam sent./s", "translation speed with the recipe's beam size", lambda v: f"{v:,.1f}"),
}  # fmt: skip
MEMORY = {"cpu": "peak memory of the process", "cuda": "peak GPU memory"}  # headings, where all runs had one device
DATA_PARTS = {"train": "training", "dev": "validation", "test": "test"}
MOST_SERIES = 6  # in one chart; more are split by family


def render_comparison(report: Mapping[str, Any]) -> str:
    """Return report.html: the table, the questions with their answers, the figures, and how all of it was made."""
    about, models = report["about"], report["models"]
    headings, rows = table_of_models(report)
    sections = [describe_question(question, report) for question in report["questions"]]
    sections += [section for kind in FIGURES.values() if kind.title for section in describe_figure(kind, report)]
    return render_page(
        "comparison.html",
        title=report["title"],
        introduction=introduce(about, models),
        warnings=report.get("warnings", []),
        headings=headings,
        rows=rows,
        failures=[
            f"{m['name']}, seed {failure['seed']}: {failure['why']}" for m in models for failure in m["failures"]
        ],
        sections=sections,
        phenomena=table_of_phenomena(models),
        footnotes=list(describe_conditions(about)),
    )


def introduce(about: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> str:
    """Return one sentence on models, budget, seeds and devices."""
    budget = " or ".join(f"{value:g} {name}" for name, value in about["budget"].items())
    seeds, where = len(about["seeds"]), ", ".join(about["devices"])
    sentence = f"{len(models)} models on the same data, {budget} each, {seeds} seed{'s' * (seeds > 1)}, on {where}."
    return sentence + " Numbers are means over the seeds, ± half the range." * (seeds > 1)


def column_heading(key: str, about: Mapping[str, Any]) -> str:
    """Return a column's heading; what "memory" means depends on the device."""
    if key == "peak_memory" and len(about["devices"]) == 1:
        return MEMORY.get(about["devices"][0], TABLE_COLUMNS[key][0])
    return TABLE_COLUMNS[key][0]


def table_of_models(report: Mapping[str, Any]) -> tuple[list[Heading], list[Row]]:
    """Return headings and rows of the main table. Columns without any number are left out."""
    about, models = report["about"], report["models"]
    scores = {
        f"{metric} {test}": Column(f"{metric_title(metric)} {test}", f"on the test set {test}", "{:.1f}".format)
        for test in about["tests"]
        for metric in about["metrics"]
    }
    columns = scores | {key: one._replace(heading=column_heading(key, about)) for key, one in TABLE_COLUMNS.items()}
    columns = {key: column for key, column in columns.items() if any(m["numbers"].get(key) for m in models)}
    headings = [Heading("model"), Heading("family", kind="family")]
    headings += [Heading(column.heading, column.title) for column in columns.values()]
    rows = []
    for model in models:
        family = f"Transformer without {', '.join(model['missing'])}" if model.get("missing") else model["family"]
        cells = [TableCell(family, kind="family")]
        for key, column in columns.items():
            if (number := model["numbers"].get(key)) is None:
                cells.append(MISSING)
                continue
            mean, half = number["mean"], (number["high"] - number["low"]) / 2
            cell = TableCell(column.write(mean), mean)
            if key in scores:
                share = max(0.0, min(100.0, mean))
                cell = cell._replace(kind="bar", share=share, spread=f"{half:.1f}" if half else "")
            cells.append(cell)
        rows.append(Row(model["name"], cells))
    return headings, rows


class Section(NamedTuple):
    title: str
    text: str
    charts: Sequence[tuple[str, str]]  # caption and SVG
    legend: str
    answer: str = ""


def figure_options(report: Mapping[str, Any], **more: str) -> FigureOptions:
    about = report["about"]
    given = {"test": next(iter(about["tests"]), ""), "metric": about["metrics"][0], **more}
    return FigureOptions(budget=next(iter(about["budget"]), "steps"), **given)


def describe_question(question: Mapping[str, Any], report: Mapping[str, Any]) -> Section:
    models = [model for name in question["models"] for model in report["models"] if model["name"] == name]
    options = figure_options(report, **{key: question[key] for key in ("test", "x", "lines")})
    svg = render_chart(FIGURES[question["figure"]].plot(models, options), width=860)
    return Section(question["title"], question["text"], [("", svg)], describe_legend(report), question["answer"])


def describe_figure(kind: FigureKind, report: Mapping[str, Any]) -> Iterator[Section]:
    """Yield one chart of all models or, where they are many, one per family with the others in grey behind it."""
    models = report["models"]
    whole = kind.plot(models, figure_options(report))
    if not whole.series:
        return
    if len(whole.series) <= MOST_SERIES:
        yield Section(kind.title, kind.why, [("", render_chart(whole, width=860))], describe_legend(report))
        return
    families = {model["name"]: model["family"] for model in models}
    charts = []
    for family in dict.fromkeys(families.values()):
        own = [series for series in whole.series if families.get(series.name) == family]
        others = [series for series in whole.series if families.get(series.name) != family]
        if own:
            chart = replace(whole, series=own)
            charts.append((family, render_chart(chart, width=620, height=300, behind=others)))
    yield Section(kind.title, kind.why, charts, describe_legend(report, grey=len(charts) > 1))


def describe_legend(report: Mapping[str, Any], *, grey: bool = False) -> str:
    """Return what bands and grey lines mean, where there are any."""
    notes = []
    if len(report["about"]["seeds"]) > 1:
        notes.append("Lines are means over the seeds; bands reach from the lowest seed to the highest.")
    if grey:
        notes.append("Grey: the models of the other families; hover over a line for its name.")
    return " ".join(notes)


def table_of_phenomena(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the table of grammatical phenomena, in per cent correct, over all test sets that have them."""
    percents: dict[str, dict[str, list[float]]] = {}
    for model in models:
        for run in model["runs"]:
            for test, result in run.get("tests", {}).items():
                for name, count in result.get("phenomena", {}).items():
                    percents.setdefault(model["name"], {}).setdefault(f"{name} ({test})", []).append(count["percent"])
    columns = list(dict.fromkeys(name for row in percents.values() for name in row))
    rows = []
    for name, row in percents.items():
        means = {column: sum(values) / len(values) for column, values in row.items()}
        cells = [TableCell(f"{means[c]:.1f}", means[c], "heat", means[c]) if c in means else MISSING for c in columns]
        rows.append(Row(name, cells))
    return {"headings": [Heading("model"), *map(Heading, columns)], "rows": rows}


def describe_conditions(about: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on versions, data and how speed and memory were measured."""
    yield f"Dragoman {about['dragoman']}, PyTorch {about['torch']}."
    yield f"Data: {describe_data(about['data'])}."
    if about["jobs"] > 1:
        yield f"{about['jobs']} runs shared the machine at a time: speeds are lower than those of a run by itself."
    if "cpu" in about["devices"]:
        yield "On a CPU, memory is that of the whole process, libraries and data included."


def describe_data(data: Mapping[str, Any]) -> str:
    """Return the data section in words, with the names of files but not the folders of the machine it ran on."""
    parts = []
    for key, name in DATA_PARTS.items():
        corpora = [CorpusSettings.model_validate(corpus) for corpus in data.get(key, [])]
        if corpora:
            parts.append(f"{name}: {', '.join(describe_corpus(corpus) for corpus in corpora)}")
    others = {key: value for key, value in data.items() if key not in DATA_PARTS}
    for key, value in others.items():
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        parts.append(f"{key.replace('_', ' ')} {text}")
    return "; ".join(parts) or "none"


def describe_corpus(corpus: CorpusSettings) -> str:
    if corpus.phrasebook:
        split = f", split {corpus.split}" if corpus.split else ""
        return f"phrasebook ({corpus.phrasebook:,} pairs{split}){corpus.chosen}"
    return " and ".join(Path(file).name for file in corpus.files) + corpus.chosen
