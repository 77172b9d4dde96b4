"""report.html: the table, the questions with their answers, figures of all models. One file, no external resources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from dragoman.compare.figures import FIGURES, Asked, Kind, shown, small_multiples
from dragoman.config import CorpusSettings
from dragoman.pages.chart import render_chart
from dragoman.pages.shell import page_of

Report = Mapping[str, Any]
Column = tuple[str, str, Callable[[float], str]]
COLUMNS: dict[str, Column] = {  # of the table: heading, explanation, and how its numbers are written
    "parameters": ("parameters", "number of trained weights", lambda v: f"{v / 1e6:.2f} M"),
    "dev_loss": ("validation loss", "lowest, in nats per token", lambda v: f"{v:.3f}"),
    "steps": ("steps", "of training", lambda v: f"{v:,.0f}"),
    "tokens_per_second": ("train tokens/s", "median, source and target tokens", lambda v: f"{v:,.0f}"),
    "train_seconds": ("train s", "wall-clock time, validation included", lambda v: f"{v:,.0f}"),
    "flops": ("FLOPs", "of training, matrix products only", lambda v: f"{v:.2e}"),
    "peak_memory": ("peak memory", "of the process on a CPU, of tensors on a GPU", lambda v: f"{v / 2**20:,.0f} MiB"),
    "greedy_per_second": ("greedy sent./s", "translation speed with beam size 1", lambda v: f"{v:,.1f}"),
    "beam_per_second": ("beam sent./s", "translation speed with the recipe's beam size", lambda v: f"{v:,.1f}"),
}  # fmt: skip
MEMORY = {"cpu": "peak memory of the process", "cuda": "peak GPU memory"}  # headings, where all runs had one device
DATA_PARTS = {"train": "training", "dev": "validation", "test": "test"}
MOST_LINES = 6  # in one chart; more are split by family


def page(report: Report) -> str:
    """Return report.html: the table, the questions with their answers, the figures, and how all of it was made."""
    about = report["about"]
    body = [
        f"<h1>{escape(report['title'])}</h1>",
        f"<p>{escape(introduction(about, report['models']))}</p>",
        *(f'<p class="warning">{escape(warning)}</p>' for warning in report.get("warnings", [])),
        table(report),
        *(failures(report["models"])),
        *(section(question, report) for question in report["questions"]),
        *(overview(kind, report) for kind in FIGURES.values() if kind.title),
        phenomena(report),
        footnotes(about),
    ]
    return page_of(report["title"], body)


def introduction(about: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> str:
    budget = " or ".join(f"{value:g} {name}" for name, value in about["budget"].items())
    seeds, where = len(about["seeds"]), ", ".join(about["devices"])
    sentence = f"{len(models)} models on the same data, {budget} each, {seeds} seed{'s' * (seeds > 1)}, on {where}."
    return sentence + " Numbers are means over the seeds, ± half the range." * (seeds > 1)


def heading(key: str, about: Mapping[str, Any]) -> str:
    """Return a column's heading; what "memory" means depends on the device."""
    if key == "peak_memory" and len(about["devices"]) == 1:
        return MEMORY.get(about["devices"][0], COLUMNS[key][0])
    return COLUMNS[key][0]


def table(report: Report) -> str:
    about, models = report["about"], report["models"]
    scores: dict[str, Column] = {
        f"{metric} {test}": (f"{shown(metric)} {test}", f"on the test set {test}", lambda v: f"{v:.1f}")
        for test in about["tests"]
        for metric in about["metrics"]
    }
    columns = scores | {key: (heading(key, about), why, write) for key, (_, why, write) in COLUMNS.items()}
    columns = {key: column for key, column in columns.items() if any(m["numbers"].get(key) for m in models)}
    heads = "".join(f'<th title="{escape(why)}">{escape(name)}</th>' for name, why, _ in columns.values())
    rows = []
    for model in models:
        cells = [cell(model["numbers"].get(key), write, key in scores) for key, (_, _, write) in columns.items()]
        kind = f"Transformer without {', '.join(model['missing'])}" if model.get("missing") else model["family"]
        name = f'<th scope="row">{escape(model["name"])}</th><td class="family">{escape(kind)}</td>'
        rows.append(f"<tr>{name}{''.join(cells)}</tr>")
    return (
        '<div class="wide"><table class="sortable"><thead><tr><th>model</th><th class="family">family</th>'
        f"{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        '<p class="small">Click a column heading to sort.</p>'
    )


def cell(number: Mapping[str, float] | None, write: Any, bar: bool) -> str:
    if number is None:
        return '<td data-value="-1">-</td>'
    half = (number["high"] - number["low"]) / 2
    spread = f'<span class="spread"> ±{half:.1f}</span>' if bar and half else ""
    style = f' style="--share: {max(0.0, min(100.0, number["mean"])):.1f}%"' if bar else ""
    kind = ' class="bar"' if bar else ""
    return f'<td data-value="{number["mean"]:.10g}"{kind}{style}>{write(number["mean"])}{spread}</td>'


def failures(models: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [(model["name"], failure) for model in models for failure in model["failures"]]
    items = "".join(
        f"<li>{escape(name)}, seed {failure['seed']}: {escape(failure['why'])}</li>" for name, failure in found
    )
    return [f"<p>These runs failed and are not in the figures:</p><ul>{items}</ul>"] if found else []


def asked(report: Report, **more: str) -> Asked:
    about = report["about"]
    given = {"test": next(iter(about["tests"]), ""), "metric": about["metrics"][0], **more}
    return Asked(budget=next(iter(about["budget"]), "steps"), **given)


def section(question: Mapping[str, Any], report: Report) -> str:
    chosen = [model for name in question["models"] for model in report["models"] if model["name"] == name]
    about = {key: question[key] for key in ("test", "x", "lines")}
    figure = FIGURES[question["figure"]].draw(chosen, asked(report, **about))
    return (
        f"<section><h2>{escape(question['title'])}</h2><p>{escape(question['text'])}</p>"
        f'<p class="answer">{escape(question["answer"])}</p><figure>{render_chart(figure, width=860)}</figure>'
        f"{legend(report)}</section>"
    )


def overview(kind: Kind, report: Report) -> str:
    """Return one chart of all models or, where they are many, one per family with the others in grey behind it."""
    models = report["models"]
    whole = kind.draw(models, asked(report))
    if not whole.lines:
        return ""
    start = f"<section><h2>{escape(kind.title)}</h2><p>{escape(kind.why)}</p>"
    if len(whole.lines) <= MOST_LINES:
        return f"{start}<figure>{render_chart(whole, width=860)}</figure>{legend(report)}</section>"
    panels = []
    for family, members in small_multiples(models):
        names = {model["name"] for model in members}
        mine = [line for line in whole.lines if line.name in names]
        others = [line for line in whole.lines if line.name not in names]
        if mine:
            drawing = render_chart(replace(whole, lines=mine), width=620, height=300, behind=others)
            panels.append(f"<figure><figcaption>{escape(family)}</figcaption>{drawing}</figure>")
    return f'{start}<div class="panels">{"".join(panels)}</div>{legend(report, grey=len(panels) > 1)}</section>'


def legend(report: Report, *, grey: bool = False) -> str:
    """Return what bands and grey lines mean, where there are any."""
    notes = []
    if len(report["about"]["seeds"]) > 1:
        notes.append("Lines are means over the seeds; bands reach from the lowest seed to the highest.")
    if grey:
        notes.append("Grey: the models of the other families; hover over a line for its name.")
    return f'<p class="small">{" ".join(notes)}</p>' if notes else ""


def phenomena(report: Report) -> str:
    """Return the table of grammatical phenomena, in per cent correct, over all test sets that have them."""
    rows: dict[str, dict[str, list[float]]] = {}
    for model in report["models"]:
        for run in model["runs"]:
            for test, result in run.get("tests", {}).items():
                for name, count in result.get("phenomena", {}).items():
                    rows.setdefault(model["name"], {}).setdefault(f"{name} ({test})", []).append(count["percent"])
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    heads = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(heat(row.get(column)) for column in columns)}</tr>'
        for name, row in rows.items()
    )
    return (
        "<section><h2>Grammatical phenomena</h2><p>Per cent correct.</p>"
        f'<div class="wide"><table class="sortable"><thead><tr><th>model</th>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></section>"
    )


def heat(values: Sequence[float] | None) -> str:
    if not values:
        return '<td data-value="-1">-</td>'
    mean = sum(values) / len(values)
    return f'<td class="heat" style="--share: {mean:.1f}%" data-value="{mean:.6g}">{mean:.1f}</td>'


def footnotes(about: Mapping[str, Any]) -> str:
    notes = [f"Dragoman {about['dragoman']}, PyTorch {about['torch']}.", f"Data: {describe_data(about['data'])}."]
    if about["jobs"] > 1:
        notes.append(
            f"{about['jobs']} runs shared the machine at a time: speeds are lower than those of a run by itself."
        )
    if "cpu" in about["devices"]:
        notes.append("On a CPU, memory is that of the whole process, libraries and data included.")
    return "".join(f'<p class="small">{escape(note)}</p>' for note in notes)


def describe_data(data: Mapping[str, Any]) -> str:
    """Return the data section in words, with the names of files but not the folders of the machine it ran on."""
    parts = []
    for key, name in DATA_PARTS.items():
        corpora = [CorpusSettings.model_validate(corpus) for corpus in data.get(key, [])]
        if corpora:
            parts.append(f"{name}: {', '.join(describe_corpus(corpus) for corpus in corpora)}")
    others = {key: value for key, value in data.items() if key not in DATA_PARTS}
    for key, value in others.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        parts.append(f"{key.replace('_', ' ')} {shown}")
    return "; ".join(parts) or "none"


def describe_corpus(corpus: CorpusSettings) -> str:
    if corpus.phrasebook:
        split = f", split {corpus.split}" if corpus.split else ""
        return f"phrasebook ({corpus.phrasebook:,} pairs{split}){corpus.chosen}"
    return " and ".join(Path(file).name for file in corpus.files) + corpus.chosen
