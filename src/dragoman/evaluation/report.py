"""HTML pages, and the one that `evaluate --page` writes: scores with significance, scores by length and word frequency,
and the lines on which systems differ most.

A page is one file without external resources. It is complete without scripts; with them it can be sorted and searched.

Shapes   N lines   S systems
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from dragoman.errors import UserError
from dragoman.evaluation.figures import LINE_COLOURS, LineChart, Point, Series, render_chart
from dragoman.evaluation.scorer import ScoredSystem
from dragoman.evaluation.tables import (
    bleu_lines,
    describe_method,
    format_bounds,
    format_count,
    format_p,
    group_by_test,
    scores_of,
    shorten_names,
    word_count_source,
)
from dragoman.metrics.metrics import METRICS, WORD_OR_SIGN, Array
from dragoman.metrics.significance import Interval

LINES_SHOWN = 40  # on which a system beats the first by most, and as many on which it falls behind by most
PIECE = re.compile(rf"{WORD_OR_SIGN.pattern}|\s+|.", re.DOTALL)  # words, spaces, and each punctuation mark by itself


class Heading(NamedTuple):
    text: str
    title: str = ""  # shown when the mouse is over it
    kind: str = ""  # CSS class


class TableCell(NamedTuple):
    text: str
    value: float | None = None  # to sort by
    kind: str = ""
    share: float | None = None  # length of a bar or depth of a colour, in per cent
    spread: str = ""
    title: str = ""


MISSING = TableCell("-", -1)


class Row(NamedTuple):
    name: str
    cells: Sequence[TableCell]
    colour: str = ""  # CSS variable


class Span(NamedTuple):
    text: str
    kind: str  # "off" if no reference has these words, "own" if some other system does not, both, or neither


class ShownText(NamedTuple):
    name: str
    spans: Sequence[Span]
    score: str = ""
    colour: str = ""


def render_page(template: str, **context: Any) -> str:
    """Return the page of a template in templates/. Everything but the charts is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("dragoman.evaluation")
    pages = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return pages.get_template(template).render(context)


def render_evaluation(tests: Sequence[Sequence[ScoredSystem]]) -> str:
    """Return a page of all systems, with a section for each test set."""
    tests = [systems for systems in tests if systems and systems[0].output.texts]
    if not tests:
        raise UserError("--page shows translations, and a language model has none; leave it out")
    every = list(dict.fromkeys(system.name for systems in tests for system in systems))
    names = dict(zip(every, shorten_names(every), strict=True))
    title = ", ".join(names.values()) if len(names) < 4 else f"{len(names)} systems"
    headings = [heading for heading, _ in group_by_test([systems[0].result for systems in tests])]
    sections = [describe_test(heading, systems, names) for heading, systems in zip(headings, tests, strict=True)]
    return render_page("evaluation.html", title=title, tests=sections)


def describe_test(heading: str, systems: Sequence[ScoredSystem], names: Mapping[str, str]) -> dict[str, Any]:
    """Return what the page shows of one test set. `names` has the short names of all systems."""
    shown = [names[system.name] for system in systems]
    metrics = list(dict.fromkeys(metric for system in systems for metric in system.counts))
    paired = len(systems) > 1
    headings = [Heading("system")]
    for metric in metrics:
        headings += [Heading(METRICS[metric].shown), *(PAIRED_HEADINGS if paired else [])]
    rows = []
    for number, system in enumerate(systems):
        scores = scores_of(system.result)
        cells = [cell for metric in metrics for cell in score_cells(scores.get(metric), paired=paired)]
        rows.append(Row(shown[number], cells, line_colour(number)))
    value_SN = score_lines([system.output.texts for system in systems], systems[0].output.references)
    return {
        "heading": heading,
        "systems": shown,
        "headings": headings,
        "rows": rows,
        "notes": list(describe_scores([system.result for system in systems], names)),
        "charts": list(render_breakdowns(systems, names)),
        "tally": tally_lines(shown, value_SN),
        "lines": [show_line(systems, shown, value_SN[:, line], line) for line in find_different(value_SN, LINES_SHOWN)],
    }


PAIRED_HEADINGS = (
    Heading("difference"),
    Heading("p (bootstrap)", "p-value of the paired bootstrap"),
    Heading("p (randomisation)", "p-value of approximate randomisation"),
)


def line_colour(number: int) -> str:
    return f"--line{number % len(LINE_COLOURS)}"


def score_cells(score: Mapping[str, Any] | None, *, paired: bool) -> list[TableCell]:
    """Return a score and, where several systems are compared, its difference from the first with both p-values."""
    if score is None:
        return [MISSING] * (4 if paired else 1)
    value, interval = score["value"], Interval(*score["interval"])
    title = f"{interval.low:.2f} to {interval.high:.2f}"
    cells = [TableCell(f"{value:.2f}", value, "bar", min(100.0, value), f"{interval.half:.2f}", title)]
    if paired and "against" in score:
        against = score["against"]
        marked = f"{against['difference']:+.2f}{'*' * against['significant']}"
        cells.append(TableCell(marked, against["difference"], "sure" * against["significant"]))
        cells += [TableCell(format_p(against[key]), against[key]) for key in ("p_bootstrap", "p_randomisation")]
    elif paired:
        cells += [TableCell("-", 0), TableCell("-", 2), TableCell("-", 2)]
    return cells


def describe_scores(results: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Iterator[str]:
    """Yield how scores were computed and differences tested."""
    yield describe_method(results, names).replace("\n", " ") + " Click a column heading to sort."
    signatures = {name: score["signature"] for result in results for name, score in scores_of(result).items()}
    yield from (f"{METRICS[name].shown}: {signature}" for name, signature in signatures.items())
    yield from (line for result in results for line in bleu_lines(result, names))


def render_breakdowns(systems: Sequence[ScoredSystem], names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield titles and charts: the first metric by length and, where words were counted, word F1 by frequency."""
    first, metric = systems[0].result, next(iter(systems[0].counts))
    shown = METRICS[metric].shown
    if "lengths" in first:
        unit, side = first["lengths"]["unit"], first["lengths"]["side"]
        x_title = f"{side} length in {unit}"
        yield f"{shown} by {side} length", render_buckets(systems, names, ("lengths", metric, "lines"), x_title, shown)
    if "rarity" in first:
        x_title = f"occurrences of a word in {word_count_source(first, names)}"
        svg = render_buckets(systems, names, ("rarity", "f1", "words"), x_title, "F1 of words")
        yield "Word F1 by frequency", svg


def render_buckets(
    systems: Sequence[ScoredSystem], names: Mapping[str, str], keys: tuple[str, str, str], x_title: str, y_title: str
) -> str:
    """Return a chart of a breakdown; `keys` are those of the breakdown, of the value and of the size of a bucket."""
    breakdown, value, unit = keys
    tables = {names[system.name]: system.result[breakdown]["buckets"] for system in systems}
    series = [
        Series(name, [
            Point(number, f"{format_bounds(row)} ({row[unit]:,} {unit})", (row[value],))
            for number, row in enumerate(rows)
        ])
        for name, rows in tables.items() if rows and value in rows[0]
    ]  # fmt: skip
    ticks = tuple(f"{format_bounds(row)}\n({row[unit]:,})" for row in systems[0].result[breakdown]["buckets"])
    chart = LineChart(series, f"{x_title} (in brackets: how many {unit})", y_title, y_title, ticks)
    return render_chart(chart, width=680)


# Lines on which systems differ, and the words that make the difference


def score_lines(texts: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Array:
    """Return the chrF of every line by itself, for each system: value_SN."""
    chrf = METRICS["chrf"]
    return np.stack([chrf.values(chrf.counted(lines, references).line_NK) for lines in texts])


def find_different(value_SN: Array, each: int) -> list[int]:
    """Return the lines that each system does much better or much worse than the first, largest difference first.

    There are up to `each` of either kind. For a single system: the lines that it does worst.
    """
    if len(value_SN) == 1:
        return [int(line) for line in np.argsort(value_SN[0], kind="stable")[: 2 * each]]
    gap_SN = value_SN[1:] - value_SN[0]
    chosen: dict[int, None] = {}
    for gap_N in gap_SN:
        order = np.argsort(gap_N, kind="stable")
        ends = np.concatenate([order[:each], order[::-1][:each]])
        chosen.update(dict.fromkeys(int(line) for line in ends if gap_N[line]))
    return sorted(chosen, key=lambda line: -np.abs(gap_SN[:, line]).max())


def tally_lines(names: Sequence[str], value_SN: Array) -> str:
    """Return how often each system beats the first, line by line."""
    tallies = []
    for name, gap_N in zip(names[1:], value_SN[1:] - value_SN[0], strict=True):
        better, worse = int((gap_N > 0).sum()), int((gap_N < 0).sum())
        tallies.append(
            f"{name} is better than {names[0]} on {format_count(better, 'line')}, worse on {worse:,}, "
            f"equal on {len(gap_N) - better - worse:,}"
        )
    return f"{'; '.join(tallies)} (by sentence-level chrF)." if tallies else "By sentence-level chrF."


def show_line(systems: Sequence[ScoredSystem], names: Sequence[str], value_S: Array, line: int) -> dict[str, Any]:
    """Return one line of the test set: the source, if known, the references and every system's output."""
    output = systems[0].output
    references = [reference[line] for reference in output.references]
    texts = [system.output.texts[line] for system in systems]
    shown = [ShownText("source", [Span(output.sources[line], "")])] if output.sources else []
    shown += [ShownText("reference", mark_differences(reference, texts, [])) for reference in references]
    for number, (name, text) in enumerate(zip(names, texts, strict=True)):
        spans = mark_differences(text, references, texts[1:] if number == 0 else texts[:1])
        shown.append(ShownText(name, spans, f"{value_S[number]:.1f}", line_colour(number)))
    gap_S = value_S[1:] - value_S[0]
    largest = f"{gap_S[np.abs(gap_S).argmax()]:+.1f}" if len(gap_S) else ""
    gaps = " ".join(f"{gap:.2f}" for gap in gap_S)
    return {"number": f"{line + 1:,}", "gaps": gaps, "largest_gap": largest, "texts": shown}


def mark_differences(text: str, references: Sequence[str], others: Sequence[str]) -> list[Span]:
    """Split a text into spans: words in no reference are `off`, those that some other system lacks are `own`."""
    pieces = PIECE.findall(text)
    right = set[int]().union(*(find_common(pieces, PIECE.findall(reference)) for reference in references))
    shared = set(range(len(pieces))).intersection(*(find_common(pieces, PIECE.findall(other)) for other in others))
    kinds = [
        None if piece.isspace() else " ".join(["off"] * (at not in right) + ["own"] * (at not in shared))
        for at, piece in enumerate(pieces)
    ]
    for at in range(1, len(kinds) - 1):  # a space between two words of one kind belongs to them
        if kinds[at] is None and kinds[at - 1] == kinds[at + 1]:
            kinds[at] = kinds[at - 1]
    runs = groupby(zip(kinds, pieces, strict=True), key=lambda pair: pair[0] or "")
    return [Span("".join(piece for _, piece in run), kind) for kind, run in runs]


def find_common(pieces: Sequence[str], other: Sequence[str]) -> set[int]:
    """Return the numbers of the pieces that are in the other text too, in the same order; spaces do not count."""
    mine, theirs = ([i for i, piece in enumerate(text) if not piece.isspace()] for text in (pieces, other))
    matcher = SequenceMatcher(None, [pieces[i] for i in mine], [other[i] for i in theirs], autojunk=False)
    return {mine[at] for block in matcher.get_matching_blocks() for at in range(block.a, block.a + block.size)}
