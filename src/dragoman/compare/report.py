"""`dragoman compare`: train several recipes, and write report.json (all numbers) and report.html.

`summarise` collects the measurements of all runs in a record, which becomes report.json. The page and the table on the
terminal show what is in this record. Headings and texts are in report.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from rich.text import Text

from dragoman.compare.measure import choose_metrics
from dragoman.compare.questions import answer_question, check_questions, plot_figure, read_questions
from dragoman.compare.runs import PlannedRun, plan_runs, read_measurements, run_in_processes
from dragoman.config.settings import LIMITS, AsTuple, Settings, parse_settings, parse_yaml
from dragoman.data.corpus import CorpusSettings
from dragoman.errors import Stop, UserError
from dragoman.evaluation.figures import render_chart
from dragoman.evaluation.report import SCORE_TITLES, align_columns, render_report_template
from dragoman.io import write_text
from dragoman.progress import WARNING, Report
from dragoman.recipe import Recipe

Measurements = Mapping[str, Any]  # of a run (measure.py)
SAME_COST_RATIO = 1.05  # runs whose FLOPs per token differ by at most this factor should train equally fast
SAME_SPEED_RATIO = 1.2  # runs whose tokens per second differ by at most this factor count as equally fast
DATA_SPLITS = {"train": "training", "dev": "validation", "test": "test"}  # key in a recipe -> name in the report
MAX_SERIES = 6  # lines in one chart; if there are more, each family of models gets its own chart
# Columns in report.yaml that the table on the terminal shows after the scores
TERMINAL_COLUMNS = ("dev_loss", "parameters", "steps", "tokens_per_second", "greedy_per_second", "peak_memory")


class Column(Settings):
    """A column of the main table, as described in report.yaml."""

    heading: str
    title: str  # explains the heading
    path: Annotated[tuple[str, ...], AsTuple]  # keys that lead to the number in the measurements of a run
    format: str
    unit: float = 1.0  # by which the number is divided
    device_headings: dict[str, str] = Field(default_factory=dict)  # replace the heading if all runs used this device

    def read(self, run: Measurements) -> float | None:
        """Return the number that this column shows for a run; None if the run has none."""
        value: Any = reduce(lambda section, key: section.get(key, {}), self.path, run)
        if isinstance(value, list):  # a learning curve, of which the lowest loss is shown
            return min((point["loss"] for point in value if point["loss"] is not None), default=None)
        return None if value == {} else value

    def render(self, number: float) -> str:
        return self.format.format(number / self.unit)

    def choose_heading(self, devices: Sequence[str]) -> str:
        return self.device_headings.get(devices[0], self.heading) if len(devices) == 1 else self.heading


class ReportTexts(Settings):
    """The content of report.yaml."""

    columns: dict[str, Column]
    figures: Annotated[tuple[dict[str, str], ...], AsTuple]
    parts: dict[str, dict[str, str | bool]]  # setting -> name of a Transformer's part, value of the setting without it


TEXTS_FILE = Path(__file__).with_name("report.yaml")
TEXTS = parse_settings(ReportTexts, parse_yaml(TEXTS_FILE.read_text("utf-8"), TEXTS_FILE.name))


def run_comparison(
    paths: Sequence[Path], *, out: Path, overrides: Sequence[str] = (), seeds: int = 1, jobs: int = 1
) -> dict[str, Any]:
    """Train and measure all unfinished runs; write report.html and report.json into `out`; return report.json."""
    report = Report()
    runs = plan_runs(paths, out, overrides, seeds)
    questions = read_questions(paths)
    check_questions(questions, runs)
    try:
        failures = run_in_processes(runs, report, jobs=jobs)
    except KeyboardInterrupt:
        raise Stop("stopped, everything is saved; the same command resumes", 130) from None
    measurements = {run.folder: measured for run in runs if (measured := read_measurements(run)) is not None}
    if not measurements:
        raise UserError(f"none of the {len(runs)} runs finished; {next(iter(failures.values()))}")
    comparison = {"title": questions.title, **summarise(runs, measurements, failures, jobs=jobs)}
    for warning in comparison["warnings"]:
        report.log(warning, WARNING)
    comparison["questions"] = [answer_question(question, comparison) for question in questions.questions]
    write_text(out / "report.json", json.dumps(comparison, indent=1, ensure_ascii=False) + "\n")
    write_text(out / "report.html", render_comparison(comparison))
    report.log(f"the report is {out / 'report.html'}, its numbers are in {out / 'report.json'}")
    return comparison


def summarise(
    runs: Sequence[PlannedRun], measurements: Mapping[Path, Measurements], failures: Mapping[Path, str], *, jobs: int
) -> dict[str, Any]:
    """Return the record of a comparison: for each model its settings, its measurements, and their means over seeds."""
    first = runs[0].recipe
    neural = [run.recipe.train for run in runs if run.recipe.model.kind != "smt"]  # equal budgets; others have none
    training = {
        f"{run.name} (seed {run.seed})": measurements[run.folder]["training"]
        for run in runs
        if run.folder in measurements
    }
    about: dict[str, Any] = {
        "dragoman": version("dragoman"),
        "torch": torch.__version__,
        "devices": sorted({run["device"] for run in training.values()}),
        "budget": {name: getattr(train, name) for train in neural[:1] for name in LIMITS if getattr(train, name)},
        "seeds": sorted({run.seed for run in runs}),
        "jobs": jobs,
        "data": first.data.model_dump(mode="json", exclude={"cache"}, exclude_defaults=True),
        "tests": list(next(iter(measurements.values()))["tests"]),
        "metrics": list(choose_metrics(first)),
    }
    models = []
    for name in dict.fromkeys(run.name for run in runs):
        planned = [run for run in runs if run.name == name]
        finished = {run.seed: measurements[run.folder] for run in planned if run.folder in measurements}
        columns = TEXTS.columns | (make_score_columns(about) if finished else {})
        family, missing_parts = classify_model(planned[0].recipe)
        models.append({
            "name": name,
            "family": family,
            "missing": missing_parts,
            "settings": planned[0].recipe.model_dump(mode="json", include={"model", "tokenizer", "train", "search"}),
            "numbers": {key: summarise_values(map(column.read, finished.values())) for key, column in columns.items()},
            "runs": [{"seed": seed, **measured} for seed, measured in finished.items()],
            "failures": [{"seed": run.seed, "why": failures[run.folder]} for run in planned if run.folder in failures],
        })  # fmt: skip
    return {
        "about": about,
        "warnings": find_unfair_budgets(training) if about["budget"].get("minutes") else [],
        "models": models,
    }


def make_score_columns(about: Mapping[str, Any]) -> dict[str, Column]:
    """Return a column for each metric on each test set. The keys are also those of a model's "numbers"."""
    return {
        f"{metric} {test}": Column(
            heading=f"{SCORE_TITLES.get(metric, metric)} {test}",
            title=f"on the test set {test}",
            path=("tests", test, "scores", metric),
            format="{:.2f}",
        )
        for test in about["tests"]
        for metric in about["metrics"]
    }


def summarise_values(numbers: Iterable[float | None]) -> dict[str, float] | None:
    """Return mean, minimum and maximum over the seeds; None if a seed has no number."""
    values = list(numbers)
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return {"mean": sum(known) / len(known), "low": min(known), "high": max(known)}


def classify_model(recipe: Recipe) -> tuple[str, list[str]]:
    """Return the family of a model, which groups models in charts, and the parts that an ablated Transformer lacks."""
    model = recipe.model
    if model.kind == "rnn":
        return ("recurrent, one vector" if model.attention in ("none", "mean") else "recurrent, attention"), []
    if model.kind != "transformer":
        return model.kind, []
    missing = [str(part["name"]) for key, part in TEXTS.parts.items() if getattr(model, key) == part["without"]]
    if missing:
        return "Transformer, ablated", missing
    return ("Transformer" if model.attention == "full" else "Transformer, efficient attention"), []


def find_unfair_budgets(training: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a warning if runs with the same FLOPs per token made different numbers of steps in the same time.

    The speeds of these runs differ because of the machine, not because of the models, so scores cannot be compared.
    """
    runs = {name: run for name, run in training.items() if run["flops"] and run["seconds"]}
    cost = {name: run["flops"] / run["tokens"] for name, run in runs.items()}
    speed = {name: run["tokens_per_second"] or run["tokens"] / run["seconds"] for name, run in runs.items()}
    groups: list[list[str]] = []  # of runs with about the same cost per token
    for name in sorted(cost, key=cost.__getitem__):
        if not groups or cost[name] > SAME_COST_RATIO * cost[groups[-1][0]]:
            groups.append([])
        groups[-1].append(name)
    unfair = []  # slowest and fastest run of each group whose speeds differ too much
    for group in groups:
        slow, fast = min(group, key=speed.__getitem__), max(group, key=speed.__getitem__)
        if speed[fast] > SAME_SPEED_RATIO * speed[slow] and runs[slow]["steps"] != runs[fast]["steps"]:
            unfair.append((slow, fast))
    if not unfair:
        return []
    slow, fast = max(unfair, key=lambda pair: speed[pair[1]] / speed[pair[0]])
    slow_steps, fast_steps = runs[slow]["steps"], runs[fast]["steps"]
    others = f" So do the speeds in {len(unfair) - 1} more groups of runs." if len(unfair) > 1 else ""
    return [
        f"The budget in minutes is unfair: {slow} trained at {speed[slow]:,.0f} tokens/s ({slow_steps:,} steps) and "
        f"{fast} at {speed[fast]:,.0f} ({fast_steps:,} steps). Both need the same FLOPs per token, so these speeds "
        f"differ because of other work on the machine.{others} Set the budget in steps or FLOPs, such as "
        f"train.minutes=0 train.steps={fast_steps}."
    ]


def format_comparison(report: Mapping[str, Any]) -> Text:
    """Return the main columns of the table, and the answers to the questions, for the terminal."""
    about = report["about"]
    columns = make_score_columns({**about, "metrics": about["metrics"][:1]})
    columns |= {key: TEXTS.columns[key] for key in TERMINAL_COLUMNS}
    rows = [["model", *(column.choose_heading(about["devices"]) for column in columns.values())]]
    for model in report["models"]:
        numbers = [(column, model["numbers"].get(key)) for key, column in columns.items()]
        rows.append([model["name"], *(column.render(number["mean"]) if number else "-" for column, number in numbers)])
    lines = [align_columns(rows)]
    lines += [f"\n{question['title']}\n  {question['answer']}" for question in report["questions"]]
    return Text("\n".join(lines), no_wrap=True, overflow="ignore")


def render_comparison(report: Mapping[str, Any]) -> str:
    """Return report.html: the table, the questions with answers, the figures, versions and data."""
    about, models = report["about"], {model["name"]: model for model in report["models"]}
    sections = []
    for section in [*report["questions"], *TEXTS.figures]:  # only questions have an "answer"
        chart = plot_figure(section, [models[name] for name in section.get("models", models)], about)
        charts = [("", render_chart(chart, width=860))]
        if "answer" not in section and len(chart.series) > MAX_SERIES:
            charts = []  # one per family, with the other families in grey in the background
            for family in dict.fromkeys(models[series.name]["family"] for series in chart.series):
                members = [series for series in chart.series if models[series.name]["family"] == family]
                others = [series for series in chart.series if series not in members]
                svg = render_chart(replace(chart, series=members), width=620, height=300, behind=others)
                charts.append((family, svg))
        sections += [{**section, "charts": charts}] if chart.series or "answer" in section else []
    phenomena: dict[str, dict[str, list[float]]] = {}  # per cent correct of all seeds, by phenomenon and model
    for model in report["models"]:
        results = [(test, result) for run in model["runs"] for test, result in run.get("tests", {}).items()]
        for test, result in results:
            for name, count in result.get("phenomena", {}).items():
                phenomena.setdefault(f"{name} ({test})", {}).setdefault(model["name"], []).append(count["percent"])
    columns = make_score_columns(about) | TEXTS.columns
    used = {key for model in report["models"] for key, number in model["numbers"].items() if number}
    return render_report_template(
        "comparison.html",
        title=report["title"],
        report=report,
        columns={key: column for key, column in columns.items() if key in used},
        formats=TEXTS.columns,
        sections=sections,
        phenomena=phenomena,
        data=describe_data(about["data"]),
    )


def describe_data(data: Mapping[str, Any]) -> str:
    """Return the data section of a recipe in words.

    Files are shown without their folders, which mean nothing to readers on other machines.
    """
    parts = []
    for key, name in DATA_SPLITS.items():
        corpora = []
        for corpus in map(CorpusSettings.model_validate, data.get(key, [])):
            split = f", split {corpus.split}" if corpus.split else ""
            files = " and ".join(Path(file).name for file in corpus.files)
            corpora.append((files or f"phrasebook ({corpus.phrasebook:,} pairs{split})") + corpus.selection_text)
        parts += [f"{name}: {', '.join(corpora)}"] if corpora else []
    for key, value in data.items():
        if key not in DATA_SPLITS:
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            parts.append(f"{key.replace('_', ' ')} {text}")
    return "; ".join(parts) or "none"
