"""Results for people: tables for the terminal, and the page that `evaluate --page` writes.

Both show scores with significance, and scores by length and word frequency. The page also shows the lines on which
systems differ most. It is one file without external resources, complete without scripts; with them it can be sorted
and searched.

Shapes   N lines   S systems
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from dragoman.errors import UserError
from dragoman.evaluation.figures import LINE_COLOURS, LineChart, Point, Series, render_chart
from dragoman.evaluation.systems import TRAINING_DATA, ScoredSystem
from dragoman.metrics import significance
from dragoman.metrics.metrics import METRICS, WORD_OR_CHARACTER, Array

Result = Mapping[str, Any]  # of a system on a test set (systems.py)
SCORE_COLUMNS = ("run", "score", "value", "±", "difference", "p (bootstrap)", "p (randomisation)", "signature")
SCORE_TITLES = {**{name: metric.title for name, metric in METRICS.items()}, "bits_per_character": "bits per character"}
SCORE_DIGITS = {"loss": 4, "bits_per_character": 4}  # after the decimal point; others have 2
LABEL_SCORES = ("precision", "recall", "f1")  # columns of a confusion matrix
LINES_SHOWN = 40  # on which a system beats the first by most, and as many on which it falls behind by most
TOKEN = re.compile(
    rf"{WORD_OR_CHARACTER.pattern}|\s+|.", re.DOTALL
)  # words, spaces, and each punctuation mark by itself


# Tables for the terminal


def format_scores(results: Sequence[Result], *, parts: bool = False) -> Text:
    """Return one table per test set, with a row for each score of each run, and below them how all was tested.

    With `parts` each run also has a line with what its BLEU is made of. Signatures are not broken, however narrow the
    terminal: people copy them.
    """
    runs = shorten_names([result["run"] for result in results])
    tests = []
    for heading, group in group_by_test(results):
        columns = list(
            zip(SCORE_COLUMNS, *(row for result in group for row in list_score_rows(result, runs)), strict=True)
        )
        shown = [column for column in columns[len(runs) == 1 :] if any(column[1:])]
        tests.append({"heading": heading, "table": align_columns(list(zip(*shown, strict=True))), "results": group})
    scores = [score for result in results for score in select_scores(result).values()]
    text = render_page("scores.txt", tests=tests, runs=runs, scores=scores, parts=parts)
    return Text(text.rstrip(), no_wrap=True, overflow="ignore")


def list_score_rows(result: Result, runs: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield a row of SCORE_COLUMNS for each score and each grammatical phenomenon."""
    run = runs[result["run"]]
    for name, score in select_scores(result).items():
        value = f"{score['value']:.{SCORE_DIGITS.get(name, 2)}f}"
        low, high = score.get("interval", (0.0, 0.0))
        half = f"{(high - low) / 2:.2f}" if "interval" in score else ""
        tests = ("", "", "")
        if against := score.get("against"):
            difference = f"{against['difference']:+.2f}{' *' * against['significant']}"
            tests = (difference, format_p(against["p_bootstrap"]), format_p(against["p_randomisation"]))
        yield (run, SCORE_TITLES.get(name, name), value, half, *tests, score["signature"])
    for name, c in result.get("phenomena", {}).items():
        yield (run, name, f"{c['percent']:.1f} %", "", "", "", "", f"{c['right']} of {c['total']} right")


def select_scores(result: Result) -> dict[str, Any]:
    """Return the scores of a result by the name of the metric."""
    return {name: score for name, score in result.items() if isinstance(score, dict) and "signature" in score}


def group_by_test(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Return the results of each test set with its heading: a short name, where it has one, and how many lines."""
    groups: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        groups.setdefault((str(result.get("test", "")), result["lines"]), []).append(result)
    short = shorten_names([name for name, _ in groups])
    return [
        (f"test set{f' {short[name]}' * bool(name)}: {lines:,} line{'s' * (lines != 1)}", group)
        for (name, lines), group in groups.items()
    ]


def shorten_names(names: Sequence[str]) -> dict[str, str]:
    """Return names with as few of the last components of their paths as tell them apart.

    A name may hold several paths, such as "corpus/test.en and corpus/test.de (tag de)".
    """

    def keep_last(name: str, kept: int) -> str:
        paths, bracket, rest = name.partition(" (")
        return " and ".join("/".join(Path(path).parts[-kept:]) for path in paths.split(" and ")) + bracket + rest

    for kept in range(1, max((len(Path(name).parts) for name in names), default=0)):
        short = {name: keep_last(name, kept) for name in names}
        if len(set(short.values())) == len(short) and ("" not in short.values() or "" in names):
            return short
    return {name: name for name in names}


def format_p(value: float) -> str:
    """Return a p-value with more digits where it is small."""
    return f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def format_confusion(table: Mapping[str, Any]) -> str:
    """Return a confusion matrix: a row for each reference label, a column for each predicted label."""
    labels = table["labels"]
    rows = [["reference", *(f"as {label}" for label in labels), *LABEL_SCORES]]
    for label, row in zip(labels, table["counts"], strict=True):
        rows.append([label, *map(str, row), *(f"{table['each'][label][name]:.2f}" for name in LABEL_SCORES)])
    return align_columns(rows, numbers=True)


def format_breakdowns(results: Sequence[Result]) -> Text:
    """Return, for each test set, every score by length and word F1 by frequency, with a column for each run."""
    runs = shorten_names([result["run"] for result in results])
    groups = group_by_test(results)
    blocks = []

    def add_table(title: str, group: Sequence[Result], key: str, unit: str, name: str) -> None:
        rows = [["", unit, *(runs[result["run"]] for result in group)]]
        rows += [
            [format_bounds(row[0]), str(row[0][unit]), *(f"{one[name]:.2f}" for one in row)]
            for row in zip(*(result[key]["buckets"] for result in group), strict=True)
        ]
        blocks.append(f"\n{title}\n{align_columns(rows)}")

    for heading, group in groups:
        some = [result for result in group if "lengths" in result]
        where = f", {heading}" * (len(groups) > 1)
        for name in select_scores(some[0]) if some else []:
            length = f"{some[0]['lengths']['side']} length in {some[0]['lengths']['unit']}"
            add_table(f"{SCORE_TITLES.get(name, name)} by {length}{where}", some, "lengths", "lines", name)
        if rare := [result for result in some if "rarity" in result]:
            title = f"word F1 by frequency in {describe_word_count_source(rare[0], runs)}{where}"
            add_table(title, rare, "rarity", "words", "f1")
    return Text("\n".join(blocks), no_wrap=True, overflow="ignore")


def describe_word_count_source(result: Result, runs: Mapping[str, str]) -> str:
    """Return where words were counted, with the short name of the run whose training data it is."""
    where: str = result["rarity"]["counted_in"]
    run = where.removeprefix(TRAINING_DATA)
    return f"{TRAINING_DATA}{runs[run]}" if run in runs else where


def format_bounds(row: Mapping[str, Any]) -> str:
    """Return the bounds of a bucket in words."""
    if row["high"] is None:
        return f"{row['low']} or more"
    return str(row["low"]) if row["low"] == row["high"] else f"{row['low']} to {row['high']}"


def align_columns(lines: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """Return a table as text; with `numbers` all columns but the first are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = [str.ljust, *[str.rjust if numbers else str.ljust] * (len(widths) - 1)]
    rows = ([put(cell, width) for put, cell, width in zip(align, line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(row).rstrip() for row in rows)


# The page


class Span(NamedTuple):
    """Words of a line that are marked alike."""

    text: str
    kind: str  # "off" if no reference has these words, "own" if some other system does not, both, or neither


def render_page(template: str, **context: Any) -> str:
    """Return the text of a template in templates/. Everything on pages but the charts is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    pages.loader, pages.autoescape = PackageLoader("dragoman.evaluation"), template.endswith(".html")
    pages.globals |= {"significance": significance, "titles": SCORE_TITLES, "colours": len(LINE_COLOURS)}
    pages.globals |= {"select_scores": select_scores, "format_p": format_p, "format_confusion": format_confusion}
    return pages.get_template(template).render(context)


def render_evaluation(tests: Sequence[Sequence[ScoredSystem]]) -> str:
    """Return a page of all systems, with a section for each test set."""
    tests = [systems for systems in tests if systems and systems[0].output.texts]
    if not tests:
        raise UserError("--page shows translations, and a language model has none; leave it out")
    names = shorten_names([system.name for systems in tests for system in systems])
    title = ", ".join(names.values()) if len(names) < 4 else f"{len(names)} systems"
    headings = [heading for heading, _ in group_by_test([systems[0].result for systems in tests])]
    sections = [
        {"heading": heading, **describe_test(systems, names)} for heading, systems in zip(headings, tests, strict=True)
    ]
    return render_page("evaluation.html", title=title, tests=sections, runs=names)


def describe_test(systems: Sequence[ScoredSystem], names: Mapping[str, str]) -> dict[str, Any]:
    """Return what the page shows of one test set. `names` has the short names of all systems."""
    results = [system.result for system in systems]
    value_SN = compute_line_chrf([system.output.texts for system in systems], systems[0].output.test.references)
    return {
        "systems": [names[system.name] for system in systems],
        "results": results,
        "metrics": list(dict.fromkeys(metric for system in systems for metric in system.counts)),
        "scores": [score for result in results for score in select_scores(result).values()],
        "signatures": {name: score["signature"] for result in results for name, score in select_scores(result).items()},
        "charts": list(render_breakdowns(systems, names)),
        "tallies": [((gap_N > 0).sum(), (gap_N < 0).sum(), (gap_N == 0).sum()) for gap_N in value_SN[1:] - value_SN[0]],
        "lines": [
            compare_line(systems, value_SN[:, line], line) for line in find_differing_lines(value_SN, LINES_SHOWN)
        ],
    }


def render_breakdowns(systems: Sequence[ScoredSystem], names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield titles and charts: the first metric by length and, where words were counted, word F1 by frequency."""
    first, metric = systems[0].result, next(iter(systems[0].counts))
    kinds = []  # title of the chart, titles of its axes, and the keys of the breakdown, of its values and bucket sizes
    if "lengths" in first:
        shown, side = METRICS[metric].title, first["lengths"]["side"]
        x_title = f"{side} length in {first['lengths']['unit']}"
        kinds.append((f"{shown} by {side} length", x_title, shown, "lengths", metric, "lines"))
    if "rarity" in first:
        x_title = f"occurrences of a word in {describe_word_count_source(first, names)}"
        kinds.append(("Word F1 by frequency", x_title, "F1 of words", "rarity", "f1", "words"))
    for title, x_title, y_title, key, value, unit in kinds:
        series = []
        for system in systems:
            rows = [row for row in system.result[key]["buckets"] if value in row]
            labels = [f"{format_bounds(row)} ({row[unit]:,} {unit})" for row in rows]
            points = [Point(n, labels[n], (row[value],)) for n, row in enumerate(rows)]
            series += [Series(names[system.name], points)] if points else []
        ticks = tuple(f"{format_bounds(row)}\n({row[unit]:,})" for row in first[key]["buckets"])
        chart = LineChart(series, f"{x_title} (in brackets: how many {unit})", y_title, y_title, ticks)
        yield title, render_chart(chart, width=680)


# Lines on which systems differ, and the words that make the difference


def compute_line_chrf(texts: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Array:
    """Return the chrF of every line by itself, for each system: value_SN."""
    chrf = METRICS["chrf"]
    return np.stack([chrf.compute_scores(chrf.check_and_count(lines, references).line_NK) for lines in texts])


def find_differing_lines(value_SN: Array, each: int) -> list[int]:
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


def compare_line(systems: Sequence[ScoredSystem], value_S: Array, line: int) -> dict[str, Any]:
    """Return one line of the test set: the source, if known, the references and every system's output."""
    test = systems[0].output.test
    references = [reference[line] for reference in test.references]
    texts = [system.output.texts[line] for system in systems]
    spans = [mark_differences(text, references, texts[:1] if n else texts[1:]) for n, text in enumerate(texts)]
    gaps = (value_S[1:] - value_S[0]).tolist()
    return {
        "number": line + 1,
        "source": test.sources[line] if test.sources else None,
        "references": [mark_differences(reference, texts, []) for reference in references],
        "outputs": list(zip(spans, value_S.tolist(), strict=True)),
        "gaps": gaps,
        "largest_gap": max(gaps, key=abs, default=0.0),
    }


def mark_differences(text: str, references: Sequence[str], others: Sequence[str]) -> list[Span]:
    """Split a text into spans: words in no reference are `off`, those that some other system lacks are `own`."""
    pieces = TOKEN.findall(text)
    right = set[int]().union(*(find_common_tokens(pieces, TOKEN.findall(reference)) for reference in references))
    shared = set(range(len(pieces))).intersection(
        *(find_common_tokens(pieces, TOKEN.findall(other)) for other in others)
    )
    kinds = [
        None if piece.isspace() else " ".join(["off"] * (at not in right) + ["own"] * (at not in shared))
        for at, piece in enumerate(pieces)
    ]
    for at in range(1, len(kinds) - 1):  # a space between two words of one kind belongs to them
        if kinds[at] is None and kinds[at - 1] == kinds[at + 1]:
            kinds[at] = kinds[at - 1]
    runs = groupby(zip(kinds, pieces, strict=True), key=lambda pair: pair[0] or "")
    return [Span("".join(piece for _, piece in run), kind) for kind, run in runs]


def find_common_tokens(pieces: Sequence[str], other: Sequence[str]) -> set[int]:
    """Return the numbers of the pieces that are in the other text too, in the same order; spaces do not count."""
    mine, theirs = ([i for i, piece in enumerate(text) if not piece.isspace()] for text in (pieces, other))
    matcher = SequenceMatcher(None, [pieces[i] for i in mine], [other[i] for i in theirs], autojunk=False)
    return {mine[at] for block in matcher.get_matching_blocks() for at in range(block.a, block.a + block.size)}
