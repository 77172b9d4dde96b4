"""Results as text: a table per test set with a row for each score of each run, and tables of the breakdowns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from dragoman.evaluation.scorer import TRAINING_DATA
from dragoman.metrics.metrics import METRICS, render_confusion_matrix
from dragoman.metrics.significance import BOOTSTRAP, CONFIDENCE, RANDOMISATION, SEED, Interval

Result = Mapping[str, Any]
SCORE_COLUMNS = ("run", "score", "value", "±", "difference", "p (bootstrap)", "p (randomisation)", "signature")
SCORE_TITLES = {**{name: metric.shown for name, metric in METRICS.items()}, "bits_per_character": "bits per character"}
DIGITS = {"loss": 4, "bits_per_character": 4}  # after the decimal point; others have 2


def format_scores(results: Sequence[Result], *, parts: bool = False) -> Text:
    """Return one table per test set, with a row for each score of each run, and below them how all was tested.

    With `parts` each run also has a line with what its BLEU is made of. Signatures are not broken, however narrow the
    terminal: people copy them.
    """
    runs = dict(zip([r["run"] for r in results], shorten_names([r["run"] for r in results]), strict=True))
    blocks = []
    for heading, group in group_by_test(results):
        columns = list(zip(SCORE_COLUMNS, *(row for result in group for row in score_rows(result, runs)), strict=True))
        shown = [column for column in columns[len(runs) == 1 :] if any(column[1:])]
        block = [heading, align_columns(list(zip(*shown, strict=True)))]
        block += [line for result in group for line in bleu_lines(result, runs)] if parts else []
        for result in group:
            if "confusion" in result:
                block += [
                    "",
                    f"confusion matrix of {runs[result['run']]}",
                    render_confusion_matrix(result["confusion"]),
                ]
        blocks.append("\n".join(block))
    blocks += [note for note in [describe_method(results, runs)] if note]
    return unwrapped(["\n\n".join(blocks)])


def group_by_test(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Return the results of each test set with its heading: a short name, where it has one, and how many lines."""
    groups: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        groups.setdefault((str(result.get("test", "")), result["lines"]), []).append(result)
    names = shorten_names([name for name, _ in groups])
    headings = [
        f"test set{f' {name}' * bool(name)}: {format_count(lines, 'line')}"
        for name, (_, lines) in zip(names, groups, strict=True)
    ]
    return list(zip(headings, groups.values(), strict=True))


def format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def shorten_names(names: Sequence[str]) -> list[str]:
    """Return names with as few of the last components of their paths as tell them apart."""
    most = max((len(Path(name).parts) for name in names), default=0)
    for kept in range(1, most):
        short = [shorten_name(name, kept) for name in names]
        if len(set(short)) == len(set(names)) and ("" not in short or "" in names):
            return short
    return list(names)


def shorten_name(name: str, kept: int) -> str:
    """Keep the last components of each path in a name such as "corpus/test.en and corpus/test.de (tag de)"."""
    paths, bracket, rest = name.partition(" (")
    return " and ".join("/".join(Path(path).parts[-kept:]) for path in paths.split(" and ")) + bracket + rest


def bleu_lines(result: Result, runs: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each BLEU of a result: its precisions and its brevity penalty."""
    for name, held in scores_of(result).items():
        if "precisions" in held:
            yield f"{runs[result['run']]}: {SCORE_TITLES.get(name, name)} {held['value']:.2f} = {describe_parts(held)}"


def describe_parts(held: Mapping[str, Any]) -> str:
    precisions = "/".join(f"{precision:.1f}" for precision in held["precisions"])
    return (
        f"n-gram precisions {precisions}, brevity penalty {held['brevity_penalty']:.3f} "
        f"(hypothesis {held['hypothesis_length']:,} tokens, reference {held['reference_length']:,})"
    )


def unwrapped(parts: Sequence[str]) -> Text:
    return Text("\n".join(parts), no_wrap=True, overflow="ignore")


def score_rows(result: Result, runs: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    run = runs[result["run"]]
    for name, held in scores_of(result).items():
        value = f"{held['value']:.{DIGITS.get(name, 2)}f}"
        half = f"{Interval(*held['interval']).half:.2f}" if "interval" in held else ""
        tests = ("", "", "")
        if one := held.get("against"):
            difference = f"{one['difference']:+.2f}{' *' * one['significant']}"
            tests = (difference, format_p(one["p_bootstrap"]), format_p(one["p_randomisation"]))
        yield (run, SCORE_TITLES.get(name, name), value, half, *tests, held["signature"])
    for name, c in result.get("phenomena", {}).items():
        yield (run, name, f"{c['percent']:.1f} %", "", "", "", "", f"{c['right']} of {c['total']} right")


def scores_of(result: Result) -> dict[str, Any]:
    return {name: held for name, held in result.items() if isinstance(held, dict) and "signature" in held}


def format_p(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def describe_method(results: Sequence[Result], runs: Mapping[str, str]) -> str:
    """Return what ±, p and * mean. `runs` has the short names of runs."""
    found = [held for result in results for held in scores_of(result).values()]
    if not any("interval" in held for held in found):
        return ""
    note = (
        f"± is half the width of the {CONFIDENCE:.0%} confidence interval from {BOOTSTRAP:,} bootstrap resamples "
        f"(seed {SEED})."
    )
    firsts = list(dict.fromkeys(held["against"]["run"] for held in found if "against" in held))
    if firsts:
        note += (
            f"\nDifferences are from {', '.join(runs[first] for first in firsts)}. p-values: paired bootstrap with "
            f"{BOOTSTRAP:,} resamples, approximate randomisation with {RANDOMISATION:,} trials;\n"
            f"* marks differences where both are below {1 - CONFIDENCE:.2f}."
        )
    if any("|tok:char|" in held["signature"] for held in found):
        note += "\nBLEU counts characters here; for words of Japanese and Korean: pip install 'dragoman[mecab]'."
    return note


def format_breakdowns(results: Sequence[Result]) -> Text:
    """Return, for each test set, every score by length and word F1 by frequency, with a column for each run."""
    runs = dict(zip([r["run"] for r in results], shorten_names([r["run"] for r in results]), strict=True))
    groups = group_by_test(results)
    blocks = []
    for heading, group in groups:
        some = [result for result in group if "lengths" in result]
        where = f", {heading}" * (len(groups) > 1)
        for name in scores_of(some[0]) if some else []:
            side, unit = some[0]["lengths"]["side"], some[0]["lengths"]["unit"]
            title = f"{SCORE_TITLES.get(name, name)} by {side} length in {unit}{where}"
            blocks.append(f"\n{title}\n{format_buckets(some, runs, 'lengths', 'lines', name)}")
        if rare := [result for result in some if "rarity" in result]:
            title = f"word F1 by frequency in {word_count_source(rare[0], runs)}{where}"
            blocks.append(f"\n{title}\n{format_buckets(rare, runs, 'rarity', 'words', 'f1')}")
    return unwrapped(blocks)


def word_count_source(result: Result, runs: Mapping[str, str]) -> str:
    """Return where words were counted, with the short name of the run whose training data it is."""
    where: str = result["rarity"]["counted_in"]
    run = where.removeprefix(TRAINING_DATA)
    return f"{TRAINING_DATA}{runs[run]}" if run in runs else where


def format_buckets(results: Sequence[Result], runs: Mapping[str, str], key: str, unit: str, name: str) -> str:
    tables = [result[key]["buckets"] for result in results]
    lines = [["", unit, *(runs[result["run"]] for result in results)]]
    lines += [
        [format_bounds(row[0]), str(row[0][unit]), *(f"{one[name]:.2f}" for one in row)]
        for row in zip(*tables, strict=True)
    ]
    return align_columns(lines)


def format_bounds(row: Mapping[str, Any]) -> str:
    if row["high"] is None:
        return f"{row['low']} or more"
    return str(row["low"]) if row["low"] == row["high"] else f"{row['low']} to {row['high']}"


def align_columns(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
