"""report.html: the table, the questions with what came out, every model's figures. One file, nothing from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from dragoman.compare.figures import FIGURES, Asked, Kind, shown, small_multiples
from dragoman.pages.chart import chart
from dragoman.pages.shell import page_of

Report = Mapping[str, Any]
COLUMNS = {  # of the table: what it is called, what it means, and how its numbers are written
    "parameters": ("parameters", "all that is learned", lambda v: f"{v / 1e6:.2f} M"),
    "dev_loss": ("dev loss", "the best, nats a token", lambda v: f"{v:.3f}"),
    "tokens_per_second": ("train tokens/s", "median, both sides", lambda v: f"{v:,.0f}"),
    "train_seconds": ("train s", "validations included", lambda v: f"{v:,.0f}"),
    "flops": ("FLOPs", "of training, matrix products alone", lambda v: f"{v:.2e}"),
    "peak_memory": ("memory", "peak while training", lambda v: f"{v / 2**20:,.0f} MiB"),
    "greedy_per_second": ("greedy sent./s", "translation without a beam", lambda v: f"{v:,.1f}"),
    "beam_per_second": ("beam sent./s", "the same with the recipe's beam", lambda v: f"{v:,.1f}"),
}  # fmt: skip


def page(report: Report) -> str:
    about = report["about"]
    body = [
        f"<h1>{escape(report['title'])}</h1>",
        f"<p>{escape(introduction(about, report['models']))}</p>",
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
    seeds = len(about["seeds"])
    said = f"{len(models)} models on the same data, {budget} each, {seeds} seed{'s' * (seeds > 1)}"
    where = ", ".join(about["devices"])
    return (
        f"{said}, on {where}. Numbers are means over the seeds; what follows ± is half the way from lowest to highest."
    )


def table(report: Report) -> str:
    about, models = report["about"], report["models"]
    scores = {
        f"{metric} {test}": (f"{shown(metric)} {test}", f"on the test set {test}", lambda v: f"{v:.1f}")
        for test in about["tests"]
        for metric in about["metrics"]
    }
    columns = scores | COLUMNS
    columns = {key: column for key, column in columns.items() if any(m["numbers"].get(key) for m in models)}
    heads = "".join(f'<th title="{escape(why)}">{escape(name)}</th>' for name, why, _ in columns.values())
    rows = []
    for model in models:
        cells = [cell(model["numbers"].get(key), write, key in scores) for key, (_, _, write) in columns.items()]
        name = f'<th scope="row">{escape(model["name"])}</th><td class="family">{escape(model["family"])}</td>'
        rows.append(f"<tr>{name}{''.join(cells)}</tr>")
    return (
        '<div class="wide"><table class="sortable"><thead><tr><th>model</th><th class="family">family</th>'
        f'{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div><p class="small">A click on a head sorts.</p>'
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
    return [f"<p>Runs that failed, and are not in the figures:</p><ul>{items}</ul>"] if found else []


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
        f'<p class="answer">{escape(question["answer"])}</p><figure>{chart(figure, width=860)}</figure></section>'
    )


def overview(kind: Kind, report: Report) -> str:
    """Small multiples: each family in colour, all others behind it in grey, on the same axes."""
    models = report["models"]
    whole = kind.draw(models, asked(report))
    if not whole.lines:
        return ""
    panels = []
    for family, members in small_multiples(models):
        names = {model["name"] for model in members}
        mine = [line for line in whole.lines if line.name in names]
        if mine:
            figure = replace(whole, lines=mine)
            others = [line for line in whole.lines if line.name not in names]
            height = max(300, 70 + 14 * len(mine))
            panels.append(
                f"<figure><figcaption>{escape(family)}</figcaption>"
                f"{chart(figure, width=620, height=height, behind=others)}</figure>"
            )
    return f'<section><h2>{kind.title}</h2><p>{kind.why}</p><div class="panels">{"".join(panels)}</div></section>'


def phenomena(report: Report) -> str:
    """Points of grammar, in per cent, over all test sets that know them."""
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
        "<section><h2>Points of grammar</h2><p>Per cent of the cases that came out right.</p>"
        f'<div class="wide"><table class="sortable"><thead><tr><th>model</th>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></section>"
    )


def heat(values: Sequence[float] | None) -> str:
    if not values:
        return '<td data-value="-1">-</td>'
    mean = sum(values) / len(values)
    return f'<td class="heat" style="--share: {mean:.1f}%" data-value="{mean:.6g}">{mean:.1f}</td>'


def footnotes(about: Mapping[str, Any]) -> str:
    notes = [f"Dragoman {about['dragoman']}, PyTorch {about['torch']}. Data: {about['data']}."]
    if about["jobs"] > 1:
        notes.append(
            f"{about['jobs']} runs shared the machine at a time: speeds are lower than a run alone would have."
        )
    if "cpu" in about["devices"]:
        notes.append("On a CPU, memory is that of the whole process, libraries and data included.")
    return "".join(f'<p class="small">{escape(note)}</p>' for note in notes)
