"""Results as text: a row for each score of each system, how differences were tested; tables of the breakdowns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.text import Text

from dragoman.score.confusion import drawn
from dragoman.score.metrics import METRICS
from dragoman.score.significance import BOOTSTRAP, CONFIDENCE, RANDOMISATION, SEED, Interval

Result = Mapping[str, Any]
HEAD = ("run", "test", "score", "value", "±", "difference", "p bootstrap", "p randomised", "how it is counted")
SHOWN = {**{name: metric.shown for name, metric in METRICS.items()}, "bits_per_character": "bits per character"}
DIGITS = {"loss": 4, "bits_per_character": 4}  # behind the point; others have 2


def table(results: Sequence[Result]) -> Text:
    """A row for each score. Signatures are not broken, however narrow the terminal: people copy them."""
    columns = list(zip(HEAD, *(row for result in results for row in rows(result)), strict=True))
    alike = [column for column in columns[:2] if len(set(column[1:])) == 1]  # tells nothing, as does an empty one
    shown = [column for column in columns if column not in alike and any(column[1:])]
    parts = [aligned(list(zip(*shown, strict=True)))]
    parts += [f"\n{drawn(result['confusion'])}" for result in results if "confusion" in result]
    parts += [f"\n{note}" for note in [method(results)] if note]
    return unbroken(parts)


def unbroken(parts: Sequence[str]) -> Text:
    return Text("\n".join(parts), no_wrap=True, overflow="ignore")


def rows(result: Result) -> Iterator[tuple[str, ...]]:
    where = (result["run"], result.get("test", ""))
    for name, held in scores(result).items():
        digits = DIGITS.get(name, 2)
        half = f"{Interval(*held['interval']).half:.2f}" if "interval" in held else ""
        cells = (SHOWN.get(name, name), f"{held['value']:.{digits}f}", half, *against(held), held["signature"])
        yield (*where, *cells)
    for name, c in result.get("phenomena", {}).items():
        yield (*where, name, f"{c['percent']:.1f} %", "", "", "", "", f"{c['right']} of {c['total']} right")


def scores(result: Result) -> dict[str, Any]:
    return {name: held for name, held in result.items() if isinstance(held, dict) and "signature" in held}


def against(held: Mapping[str, Any]) -> tuple[str, str, str]:
    if "against" not in held:
        return "", "", ""
    one = held["against"]
    return f"{one['difference']:+.2f}{' *' * one['significant']}", p(one["p_bootstrap"]), p(one["p_randomisation"])


def p(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def method(results: Sequence[Result]) -> str:
    """What ±, p and * mean."""
    found = [held for result in results for held in scores(result).values()]
    if not any("interval" in held for held in found):
        return ""
    said = f"± is half of the {CONFIDENCE:.0%} interval of {BOOTSTRAP:,} bootstrap resamples (seed {SEED})."
    if first := next((held["against"]["run"] for held in found if "against" in held), ""):
        said += (
            f"\nDifferences are from {first}; p says how often chance makes one as large: paired bootstrap with "
            f"{BOOTSTRAP:,} resamples,\napproximate randomisation with {RANDOMISATION:,} trials. "
            f"* marks those where both are below {1 - CONFIDENCE:.2f}."
        )
    if any("|tok:char|" in held["signature"] for held in found):
        said += (
            "\nBLEU counts single signs here; pip install 'dragoman[mecab]' has it count words of Japanese and Korean."
        )
    return said


def breakdowns(results: Sequence[Result]) -> Text:
    """For each test: every score by length, and F1 of words by rarity, with a column for each system."""
    return unbroken([f"\n{part}" for part in broken_down(results)])


def broken_down(results: Sequence[Result]) -> Iterator[str]:
    ordered = sorted(results, key=lambda result: str(result.get("test", "")))
    for test, group in groupby(ordered, key=lambda result: str(result.get("test", ""))):
        some = [result for result in group if "lengths" in result]
        where = f" on {test}" * bool(test)
        for name in scores(some[0]) if some else []:
            title = f"{SHOWN.get(name, name)}{where} by {some[0]['lengths']['unit']} of the source"
            yield f"{title}\n{bucketed(some, 'lengths', 'lines', name)}"
        if rare := [result for result in some if "rarity" in result]:
            title = f"F1 of words{where} by how often each occurs in {rare[0]['rarity']['counted_in']}"
            yield f"{title}\n{bucketed(rare, 'rarity', 'words', 'f1')}"


def bucketed(results: Sequence[Result], key: str, unit: str, name: str) -> str:
    tables = [result[key]["buckets"] for result in results]
    lines = [["", unit, *(result["run"] for result in results)]]
    lines += [
        [bounds(row[0]), str(row[0][unit]), *(f"{one[name]:.2f}" for one in row)] for row in zip(*tables, strict=True)
    ]
    return aligned(lines)


def bounds(row: Mapping[str, Any]) -> str:
    if row["high"] is None:
        return f"{row['low']} or more"
    return str(row["low"]) if row["low"] == row["high"] else f"{row['low']} to {row['high']}"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
