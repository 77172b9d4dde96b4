"""Reports of evaluations: tables for the terminal, and the HTML page that `evaluate --page` writes.

Both show scores with significance, and scores by length and word frequency. The page also shows the lines on which
systems differ most. The page is one file without external resources. JavaScript adds sorting and search, but
the page is complete without it.

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
from dragoman.evaluation.figures import LINE_COLOURS, Chart, Point, Series, render_chart
from dragoman.evaluation.systems import TRAINING_DATA_PREFIX, ScoredSystem
from dragoman.metrics import significance
from dragoman.metrics.metrics import METRICS, WORD_OR_CHARACTER, FloatArray

Result = Mapping[str, Any]  # of one system on one test set, as `Scorer.score` returns it
SCORE_COLUMNS = ("run", "score", "value", "±", "difference", "p (bootstrap)", "p (randomisation)", "signature")
SCORE_TITLES = {**{name: metric.title for name, metric in METRICS.items()}, "bits_per_character": "bits per character"}
SCORE_DIGITS = {"loss": 4, "bits_per_character": 4}  # after the decimal point; 2 for all other scores
LABEL_SCORES = ("precision", "recall", "f1")  # columns beside a confusion matrix
LINES_SHOWN = 40  # lines that a system translates better than the first system, and as many that it translates worse
TOKEN = re.compile(rf"{WORD_OR_CHARACTER.pattern}|\s+|.", re.DOTALL)  # words, runs of spaces, single punctuation marks


def format_scores(results: Sequence[Result], *, parts: bool = False) -> Text:
    """Return a table for each test set, with a row for each score of each run, and notes on the significance tests.

    With `parts` there is also a line for each run with the parts of its BLEU score: n-gram precisions and brevity
    penalty. Signatures are not wrapped, however narrow the terminal, because users copy them.
    """
    short_names = shorten_names([result["run"] for result in results])
    tests = []
    for heading, group in group_by_test(results):
        rows = [SCORE_COLUMNS, *(row for result in group for row in list_score_rows(result, short_names))]
        columns = list(zip(*rows, strict=True))
        columns = columns[1:] if len(short_names) == 1 else columns  # without the column "run"
        filled = [column for column in columns if any(column[1:])]
        tests.append({"heading": heading, "table": align_columns(list(zip(*filled, strict=True))), "results": group})
    scores = [score for result in results for score in select_scores(result).values()]
    text = render_report_template("scores.txt", tests=tests, short_names=short_names, scores=scores, parts=parts)
    return Text(text.rstrip(), no_wrap=True, overflow="ignore")


def list_score_rows(result: Result, short_names: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield a row of SCORE_COLUMNS for each score and, on the phrasebook, for each grammatical phenomenon."""
    run = short_names[result["run"]]
    for name, score in select_scores(result).items():
        value = f"{score['value']:.{SCORE_DIGITS.get(name, 2)}f}"
        low, high = score.get("interval", (0.0, 0.0))
        half_width = f"{(high - low) / 2:.2f}" if "interval" in score else ""
        comparison = ("", "", "")
        if against := score.get("against"):
            difference = f"{against['difference']:+.2f}{' *' * against['significant']}"
            comparison = (difference, format_p(against["p_bootstrap"]), format_p(against["p_randomisation"]))
        yield (run, SCORE_TITLES.get(name, name), value, half_width, *comparison, score["signature"])
    for name, counts in result.get("phenomena", {}).items():
        right = f"{counts['right']} of {counts['total']} right"
        yield (run, name, f"{counts['percent']:.1f} %", "", "", "", "", right)


def select_scores(result: Result) -> dict[str, Any]:
    return {name: score for name, score in result.items() if isinstance(score, dict) and "signature" in score}


def group_by_test(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Return the heading and the results of each test set. The heading has its short name, if any, and line count."""
    groups: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        groups.setdefault((str(result.get("test", "")), result["lines"]), []).append(result)
    short = shorten_names([name for name, _ in groups])
    return [
        (f"test set{f' {short[name]}' * bool(name)}: {lines:,} line{'s' * (lines != 1)}", group)
        for (name, lines), group in groups.items()
    ]


def shorten_names(names: Sequence[str]) -> dict[str, str]:
    """Map each name, usually a path, to its last components: as few as keep all names different.

    A name may contain several paths, such as "corpus/test.en and corpus/test.de (tag de)".
    """

    def keep_last(name: str, count: int) -> str:
        paths, bracket, rest = name.partition(" (")
        return " and ".join("/".join(Path(path).parts[-count:]) for path in paths.split(" and ")) + bracket + rest

    for count in range(1, max((len(Path(name).parts) for name in names), default=0)):
        short = {name: keep_last(name, count) for name in names}
        if len(set(short.values())) == len(short) and all(short[name] for name in names if name):
            return short
    return {name: name for name in names}


def format_p(value: float) -> str:
    """Return a p-value as text, with more digits if it is small."""
    return f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def format_confusion(table: Mapping[str, Any]) -> str:
    """Return a confusion matrix as text: a row for each reference label, a column for each predicted label."""
    labels = table["labels"]
    rows = [["reference", *(f"as {label}" for label in labels), *LABEL_SCORES]]
    for label, row in zip(labels, table["counts"], strict=True):
        rows.append([label, *map(str, row), *(f"{table['each'][label][name]:.2f}" for name in LABEL_SCORES)])
    return align_columns(rows, numbers=True)


def format_breakdowns(results: Sequence[Result]) -> Text:
    """Return tables of every score by length and of word F1 by frequency, with a column for each run."""
    short_names = shorten_names([result["run"] for result in results])
    groups = group_by_test(results)
    tables = []

    def add_table(title: str, group: Sequence[Result], breakdown: str, size: str, value: str) -> None:
        # `breakdown` is a key of the results, `size` and `value` are keys of its buckets.
        rows = [["", size, *(short_names[result["run"]] for result in group)]]
        for buckets in zip(*(result[breakdown]["buckets"] for result in group), strict=True):
            values = [f"{bucket[value]:.2f}" for bucket in buckets]
            rows.append([format_bounds(buckets[0]), str(buckets[0][size]), *values])
        tables.append(f"\n{title}\n{align_columns(rows)}")

    for heading, group in groups:
        with_lengths = [result for result in group if "lengths" in result]
        test = f", {heading}" * (len(groups) > 1)
        for name in select_scores(with_lengths[0]) if with_lengths else []:
            lengths = with_lengths[0]["lengths"]
            title = f"{SCORE_TITLES.get(name, name)} by {lengths['side']} length in {lengths['unit']}{test}"
            add_table(title, with_lengths, breakdown="lengths", size="lines", value=name)
        if with_words := [result for result in with_lengths if "rarity" in result]:
            title = f"word F1 by frequency in {describe_word_count_source(with_words[0], short_names)}{test}"
            add_table(title, with_words, breakdown="rarity", size="words", value="f1")
    return Text("\n".join(tables), no_wrap=True, overflow="ignore")


def describe_word_count_source(result: Result, short_names: Mapping[str, str]) -> str:
    """Return where words were counted: "the training data of <short name of a run>", or "the references"."""
    text: str = result["rarity"]["counted_in"]
    run = text.removeprefix(TRAINING_DATA_PREFIX)
    return f"{TRAINING_DATA_PREFIX}{short_names[run]}" if run in short_names else text


def format_bounds(bucket: Mapping[str, Any]) -> str:
    if bucket["high"] is None:
        return f"{bucket['low']} or more"
    return str(bucket["low"]) if bucket["low"] == bucket["high"] else f"{bucket['low']} to {bucket['high']}"


def align_columns(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """Return a table as text. With `numbers` all columns but the first are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify = [str.ljust, *[str.rjust if numbers else str.ljust] * (len(widths) - 1)]
    padded = ([pad(cell, width) for pad, cell, width in zip(justify, row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)


class Span(NamedTuple):
    """Consecutive tokens of a text that are marked in the same way."""

    text: str
    kind: str  # CSS classes: "off" if in no reference, "own" if some other system's output lacks it; both, or ""


def render_report_template(template: str, **context: Any) -> str:
    """Render a file of templates/. In HTML pages, all values except the charts are escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.loader, environment.autoescape = PackageLoader("dragoman.evaluation"), template.endswith(".html")
    environment.globals |= {"significance": significance, "titles": SCORE_TITLES, "colours": len(LINE_COLOURS)}
    environment.globals |= {"select_scores": select_scores, "format_p": format_p, "format_confusion": format_confusion}
    return environment.get_template(template).render(context)


def render_evaluation(tests: Sequence[Sequence[ScoredSystem]]) -> str:
    tests = [systems for systems in tests if systems and systems[0].output.texts]
    if not tests:
        raise UserError("--page shows translations, and a language model has none; leave it out")
    short_names = shorten_names([system.name for systems in tests for system in systems])
    title = ", ".join(short_names.values()) if len(short_names) < 4 else f"{len(short_names)} systems"
    headings = [heading for heading, _ in group_by_test([systems[0].result for systems in tests])]
    pairs = zip(headings, tests, strict=True)
    sections = [{"heading": heading, **describe_test(systems, short_names)} for heading, systems in pairs]
    return render_report_template("evaluation.html", title=title, tests=sections, short_names=short_names)


def describe_test(systems: Sequence[ScoredSystem], short_names: Mapping[str, str]) -> dict[str, Any]:
    """Return what evaluation.html shows for one test set. `short_names` has the short name of each system."""
    results = [system.result for system in systems]
    value_SN = compute_line_chrf([system.output.texts for system in systems], systems[0].output.test.references)
    return {
        "systems": [short_names[system.name] for system in systems],
        "results": results,
        "metrics": list(dict.fromkeys(metric for system in systems for metric in system.counts_by_metric)),
        "scores": [score for result in results for score in select_scores(result).values()],
        "signatures": {name: score["signature"] for result in results for name, score in select_scores(result).items()},
        "charts": list(render_breakdowns(systems, short_names)),
        # For each further system: the number of lines that are better, worse and equal in comparison with the first
        "tallies": [((gap_N > 0).sum(), (gap_N < 0).sum(), (gap_N == 0).sum()) for gap_N in value_SN[1:] - value_SN[0]],
        "lines": [compare_line(systems, value_SN[:, n], n) for n in find_differing_lines(value_SN, LINES_SHOWN)],
    }


def render_breakdowns(systems: Sequence[ScoredSystem], short_names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the title and SVG of charts: the first metric by length and word F1 by frequency, if computed."""
    first, metric = systems[0].result, next(iter(systems[0].counts_by_metric))
    charts = []  # title of the chart, titles of its axes, and keys in the result: breakdown, value, size of a bucket
    if "lengths" in first:
        metric_title, side = METRICS[metric].title, first["lengths"]["side"]
        x_title = f"{side} length in {first['lengths']['unit']}"
        charts.append((f"{metric_title} by {side} length", x_title, metric_title, "lengths", metric, "lines"))
    if "rarity" in first:
        x_title = f"occurrences of a word in {describe_word_count_source(first, short_names)}"
        charts.append(("Word F1 by frequency", x_title, "F1 of words", "rarity", "f1", "words"))
    for title, x_title, y_title, breakdown, value, size in charts:
        series = []
        for system in systems:
            rows = [row for row in system.result[breakdown]["buckets"] if value in row]
            labels = [f"{format_bounds(row)} ({row[size]:,} {size})" for row in rows]
            points = [Point(x=n, label=labels[n], values=(row[value],)) for n, row in enumerate(rows)]
            series += [Series(short_names[system.name], points)] if points else []
        ticks = tuple(f"{format_bounds(row)}\n({row[size]:,})" for row in first[breakdown]["buckets"])
        x_title += f" (in brackets: how many {size})"
        chart = Chart(series, x_title=x_title, y_title=y_title, unit=y_title, ticks=ticks)
        yield title, render_chart(chart, width=680)


# Lines on which systems differ, and the words in which they differ


def compute_line_chrf(texts: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> FloatArray:
    """Return value_SN: the sentence-level chrF of every line, for each system."""
    chrf = METRICS["chrf"]
    return np.stack([chrf.compute_scores(chrf.check_and_count(lines, references).count_NK) for lines in texts])


def find_differing_lines(value_SN: FloatArray, count: int) -> list[int]:
    """Return the lines with the largest differences between each system and the first one, largest difference first.

    For each system there are up to `count` lines with a better score and as many with a worse one. For a single system,
    return the lines with the lowest scores.
    """
    if len(value_SN) == 1:
        return [int(line) for line in np.argsort(value_SN[0], kind="stable")[: 2 * count]]
    gap_SN = value_SN[1:] - value_SN[0]
    chosen: dict[int, None] = {}
    for gap_N in gap_SN:
        order = np.argsort(gap_N, kind="stable")
        extremes = np.concatenate([order[:count], order[::-1][:count]])
        chosen.update(dict.fromkeys(int(line) for line in extremes if gap_N[line]))
    return sorted(chosen, key=lambda line: -np.abs(gap_SN[:, line]).max())


def compare_line(systems: Sequence[ScoredSystem], value_S: FloatArray, line: int) -> dict[str, Any]:
    """Return what the page shows for one line: source (if known), references, and output and chrF of every system."""
    test = systems[0].output.test
    references = [reference[line] for reference in test.references]
    texts = [system.output.texts[line] for system in systems]
    # The first system is compared with all others, and each of the others with the first
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


def mark_differences(text: str, expected: Sequence[str], others: Sequence[str]) -> list[Span]:
    """Split a text into spans: "off" are words in no `expected` text, "own" those that some text of `others` lacks."""
    tokens = TOKEN.findall(text)
    in_expected, in_others = (
        [find_common_tokens(tokens, TOKEN.findall(other)) for other in texts] for texts in (expected, others)
    )
    correct, shared = set[int]().union(*in_expected), set(range(len(tokens))).intersection(*in_others)
    kinds = [
        None if token.isspace() else " ".join(["off"] * (index not in correct) + ["own"] * (index not in shared))
        for index, token in enumerate(tokens)
    ]
    for index in range(1, len(kinds) - 1):  # a space between two words of the same kind is marked like them
        if kinds[index] is None and kinds[index - 1] == kinds[index + 1]:
            kinds[index] = kinds[index - 1]
    groups = groupby(zip(kinds, tokens, strict=True), key=lambda pair: pair[0] or "")
    return [Span("".join(token for _, token in group), kind) for kind, group in groups]


def find_common_tokens(tokens: Sequence[str], other: Sequence[str]) -> set[int]:
    """Return the indices of the tokens that both texts have in the same order, without spaces (as diff does)."""
    words, other_words = ([i for i, token in enumerate(text) if not token.isspace()] for text in (tokens, other))
    matcher = SequenceMatcher(None, [tokens[i] for i in words], [other[i] for i in other_words], autojunk=False)
    return {words[n] for block in matcher.get_matching_blocks() for n in range(block.a, block.a + block.size)}
