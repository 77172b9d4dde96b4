"""The page that `evaluate --page` writes: scores with significance, scores by length and word frequency, and the lines
on which systems differ most.

One file without external resources (pages/shell.py). It is complete without scripts; with them it can be searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from dragoman.evaluation.differing import marked, most_different, qualities
from dragoman.evaluation.panel import Sheet
from dragoman.evaluation.table import (
    bleu_lines,
    bounds,
    by_test,
    count,
    counted_in,
    method,
    p,
    scores,
    short_names,
)
from dragoman.pages.chart import COLOURS, Figure, Line, Point, render_chart
from dragoman.pages.shell import page_of
from dragoman.score.metrics import METRICS
from dragoman.score.significance import Interval
from dragoman.score.totals import Array
from dragoman.types import UserError

EACH = 40  # lines on which a system beats the first by most, and as many on which it falls behind by most


def page_of_differences(tests: Sequence[Sequence[Sheet]]) -> str:
    """Return a page of all systems, with a section for each test set."""
    judged = [sheets for sheets in tests if sheets and sheets[0].answered.texts]
    if not judged:
        raise UserError("--page shows translations, and a language model has none; leave it out")
    every = list(dict.fromkeys(sheet.name for sheets in judged for sheet in sheets))
    runs = dict(zip(every, short_names(every), strict=True))
    title = ", ".join(runs.values()) if len(runs) < 4 else f"{len(runs)} systems"
    headings = [heading for heading, _ in by_test([sheets[0].result for sheets in judged])]
    body = [f"<h1>{escape(title)}</h1>"]
    if len(judged) > 1:
        links = "".join(f'<li><a href="#test{n}">{escape(heading)}</a></li>' for n, heading in enumerate(headings))
        body.append(f"<p>{len(judged)} test sets:</p><ul>{links}</ul>")
    for number, (heading, sheets) in enumerate(zip(headings, judged, strict=True)):
        body.append(f'<h2 id="test{number}">{escape(heading[:1].upper() + heading[1:])}</h2>')
        body += section(sheets, runs)
    return page_of(title, body, style=STYLE, script=SCRIPT)


def section(sheets: Sequence[Sheet], runs: Mapping[str, str]) -> Iterator[str]:
    """Yield all about one test set. `runs` has the short names of all systems."""
    names = [runs[sheet.name] for sheet in sheets]
    value_SN = qualities([sheet.answered.texts for sheet in sheets], sheets[0].answered.references)
    yield summary(sheets, names)
    yield "".join(f'<p class="small">{escape(note)}</p>' for note in notes(sheets, runs))
    yield f'<div class="panels">{"".join(figures(sheets, runs))}</div>'
    yield sentences(sheets, names, value_SN)


def notes(sheets: Sequence[Sheet], runs: Mapping[str, str]) -> Iterator[str]:
    """Yield how scores were computed and differences tested."""
    results = [sheet.result for sheet in sheets]
    yield method(results, runs).replace("\n", " ") + " Click a column heading to sort."
    found = {name: held["signature"] for result in results for name, held in scores(result).items()}
    yield from (f"{METRICS[name].shown}: {signature}" for name, signature in found.items())
    yield from (line for result in results for line in bleu_lines(result, runs))


def summary(sheets: Sequence[Sheet], names: Sequence[str]) -> str:
    metrics = list(dict.fromkeys(metric for sheet in sheets for metric in sheet.counts))
    heads = "".join(f"<th>{METRICS[metric].shown}</th>" + PAIRED * (len(sheets) > 1) for metric in metrics)
    rows = []
    for number, (sheet, name) in enumerate(zip(sheets, names, strict=True)):
        found = scores(sheet.result)
        cells = "".join(cell(found.get(metric), len(sheets) > 1) for metric in metrics)
        rows.append(f'<tr><th scope="row" class="system" style="{colour(number)}">{escape(name)}</th>{cells}</tr>')
    return (
        f'<div class="wide"><table class="sortable"><thead><tr><th>system</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def cell(held: dict[str, Any] | None, paired: bool) -> str:
    if held is None:
        return '<td data-value="-1">-</td>' * (4 if paired else 1)
    low, high = held["interval"]
    spread = f'<span class="spread"> ±{Interval(low, high).half:.2f}</span>'
    style = f"--share: {min(100.0, held['value']):.1f}%"
    value = (
        f'<td class="bar" style="{style}" data-value="{held["value"]:.10g}" title="{low:.2f} to {high:.2f}">'
        f"{held['value']:.2f}{spread}</td>"
    )
    if not paired:
        return value
    if "against" not in held:
        return value + '<td data-value="0">-</td><td data-value="2">-</td><td data-value="2">-</td>'
    one = held["against"]
    sure = ' class="sure"' * one["significant"]
    tests = "".join(f'<td data-value="{one[key]:.6g}">{p(one[key])}</td>' for key in ("p_bootstrap", "p_randomisation"))
    difference = f"{one['difference']:+.2f}{'*' * one['significant']}"
    return f'{value}<td{sure} data-value="{one["difference"]:.6g}">{difference}</td>{tests}'


def figures(sheets: Sequence[Sheet], runs: Mapping[str, str]) -> Iterator[str]:
    """Yield charts of the first metric by length and, where words were counted, of word F1 by frequency."""
    first = sheets[0].result
    names = [runs[sheet.name] for sheet in sheets]
    metric = next(iter(sheets[0].counts))
    shown = METRICS[metric].shown
    if "lengths" in first:
        unit, side = first["lengths"]["unit"], first["lengths"]["side"]
        titles = (f"{shown} by {side} length", f"{side} length in {unit}", shown)
        yield figure(sheets, names, "lengths", metric, "lines", titles)
    if "rarity" in first:
        where = f"occurrences of a word in {counted_in(first, runs)}"
        yield figure(sheets, names, "rarity", "f1", "words", ("Word F1 by frequency", where, "F1 of words"))


def figure(
    sheets: Sequence[Sheet], names: Sequence[str], key: str, name: str, unit: str, titles: tuple[str, str, str]
) -> str:
    title, x_title, y_title = titles
    lines = [
        Line(system, [
            Point(at, f"{bounds(row)} ({row[unit]:,} {unit})", (row[name],))
            for at, row in enumerate(sheet.result[key]["buckets"])
        ])
        for system, sheet in zip(names, sheets, strict=True) if name in next(iter(sheet.result[key]["buckets"]), {})
    ]  # fmt: skip
    ticks = tuple(f"{bounds(row)}\n({row[unit]:,})" for row in sheets[0].result[key]["buckets"])
    x_title = f"{x_title} (in brackets: how many {unit})"
    drawing = render_chart(Figure(lines, x_title, y_title, y_title, ticks), width=680)
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawing}</figure>"


def sentences(sheets: Sequence[Sheet], names: Sequence[str], value_SN: Array) -> str:
    lines = most_different(value_SN, EACH)
    articles = "".join(article(sheets, names, value_SN[:, line], line) for line in lines)
    title = "Lines where the systems differ most" if len(sheets) > 1 else "Lines with the lowest scores"
    return (
        f'<section class="lines"><h3>{title}</h3>{tallies(names, value_SN)}{controls(names)}{LEGEND[len(names) > 1]}'
        f'<p class="small found" aria-live="polite"></p>{articles}</section>'
    )


def tallies(names: Sequence[str], value_SN: Array) -> str:
    """How often each system beats the first, line by line."""
    said = []
    for name, gap_N in zip(names[1:], value_SN[1:] - value_SN[0], strict=True):
        better, worse = int((gap_N > 0).sum()), int((gap_N < 0).sum())
        said.append(
            f"{name} is better than {names[0]} on {count(better, 'line')}, worse on {worse:,}, "
            f"equal on {len(gap_N) - better - worse:,}"
        )
    return f"<p>{escape('; '.join(said))} (by sentence-level chrF).</p>" if said else "<p>By sentence-level chrF.</p>"


def controls(names: Sequence[str]) -> str:
    search = '<input type="search" placeholder="search in all texts" aria-label="search in all texts">'
    if len(names) == 1:
        return f'<form class="controls">{search}</form>'
    options = "".join(f'<option value="{at}">{escape(name)}</option>' for at, name in enumerate(names[1:]))
    kinds = "".join(f'<option value="{value}">{said}</option>' for value, said in KINDS.items())
    return (
        f'<form class="controls">{search}<select name="system" aria-label="system">{options}</select>'
        f'<select name="kind" aria-label="kind">{kinds}</select><span>than {escape(names[0])}</span></form>'
    )


def article(sheets: Sequence[Sheet], names: Sequence[str], value_S: Array, line: int) -> str:
    """Return one line of the test set: the source, if known, the references and every system's output."""
    answered = sheets[0].answered
    references = [reference[line] for reference in answered.references]
    texts = [sheet.answered.texts[line] for sheet in sheets]
    rows = [row("source", "", escape(answered.sources[line]))] if answered.sources else []
    rows += [row("reference", "", marked(reference, texts, [])) for reference in references]
    for number, (name, text, value) in enumerate(zip(names, texts, value_S.tolist(), strict=True)):
        others = texts[1:] if number == 0 else texts[:1]
        html = marked(text, references, others) or '<span class="small">(empty)</span>'
        rows.append(row(name, f"{value:.1f}", html, colour(number)))
    gaps = value_S[1:] - value_S[0] if len(sheets) > 1 else np.zeros(0)
    told = f'<span class="gap">{gaps[np.abs(gaps).argmax()]:+.1f}</span>' if len(gaps) else ""
    data = " ".join(f"{gap:.2f}" for gap in gaps)
    return f'<article data-gaps="{data}"><header>line {line + 1:,}{told}</header><dl>{"".join(rows)}</dl></article>'


def row(name: str, value: str, html: str, style: str = "") -> str:
    kind = f' class="system" style="{style}"' if style else ""
    score = f' <span class="value">{value}</span>' if value else ""
    return f'<dt{kind}>{escape(name)}{score}</dt><dd dir="auto">{html}</dd>'


def colour(number: int) -> str:
    return f"--c: var(--line{number % COLOURS})"


KINDS = {"": "better or worse", "1": "better", "-1": "worse"}
PAIRED = (
    '<th>difference</th><th title="p-value of the paired bootstrap">p (bootstrap)</th>'
    '<th title="p-value of approximate randomisation">p (randomisation)</th>'
)
OFF = '<mark class="off">Underlined</mark>: words that are in no reference, and words of a reference in no output'
OWN = '; <mark class="own">shaded</mark>: words that another system does not have there'
LEGEND = {many: f'<p class="small">{OFF}{OWN * many}.</p>' for many in (False, True)}
STYLE = """
:root { --shade: #fff0c2; --off: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --shade: #4a3c10; --off: #ff8a80; } }
.system { color: var(--c); font-weight: 600; } .sure { font-weight: 700; }
.controls { display: flex; flex-wrap: wrap; gap: .5rem; align-items: center; margin: .8rem 0; }
.controls input { flex: 1 1 14rem; max-width: 28rem; }
.controls input, .controls select { font: inherit; padding: .3rem .5rem;
  color: inherit; background: var(--paper); border: 1px solid var(--faint); border-radius: 4px; }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .2rem; }
article { border-top: 1px solid var(--faint); padding: .6rem 0; } article[hidden] { display: none; }
article header { color: var(--soft); font-size: .85rem; }
.gap { margin-left: .6rem; font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: 12rem 1fr; gap: .1rem 1rem; margin: .2rem 0 0; }
dt { color: var(--soft); overflow-wrap: anywhere; } dt.system { color: var(--c); }
dd { margin: 0; overflow-wrap: anywhere; }
.value { color: var(--soft); font-weight: 400; font-size: .85rem; font-variant-numeric: tabular-nums; }
mark { background: none; color: inherit; } .own { background: var(--shade); border-radius: 2px; }
.off { text-decoration: underline 2px; text-decoration-color: var(--off); text-underline-offset: 3px; }
@media (max-width: 36rem) { dl { grid-template-columns: 1fr; gap: 0; } dt { margin-top: .35rem; } }
"""
SCRIPT = """
for (const part of document.querySelectorAll("section.lines")) {
  const form = part.querySelector("form"), articles = [...part.querySelectorAll("article")];
  const found = part.querySelector(".found"), text = new Map(articles.map(a => [a, a.textContent.toLowerCase()]));
  const gap = (a, at) => Number(a.dataset.gaps.split(" ")[at]);
  const show = () => {
    const words = form.querySelector("input").value.toLowerCase().split(/\\s+/).filter(Boolean);
    const at = Number(form.elements.system?.value ?? -1), kind = Number(form.elements.kind?.value ?? 0);
    const fits = a => words.every(word => text.get(a).includes(word))
      && (at < 0 || gap(a, at)) && (!kind || gap(a, at) * kind > 0);
    for (const a of articles) {
      a.hidden = !fits(a);
      if (at >= 0) a.querySelector(".gap").textContent = (gap(a, at) > 0 ? "+" : "") + gap(a, at).toFixed(1);
    }
    if (at >= 0) part.append(...articles.sort((a, b) => Math.abs(gap(b, at)) - Math.abs(gap(a, at))));
    found.textContent = articles.filter(a => !a.hidden).length + " of " + articles.length + " lines shown";
  };
  form.addEventListener("input", show);
  form.addEventListener("submit", event => event.preventDefault());
  show();
}
"""
