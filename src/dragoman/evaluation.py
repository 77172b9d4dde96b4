"""A run against references: scores with signatures, and, on the phrasebook, phenomenon by phenomenon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from dragoman.score.metrics import evaluate
from dragoman.text import phrasebook
from dragoman.text.corpus import read_lines
from dragoman.text.phrasebook import Phrase
from dragoman.translator import Translator, kinds
from dragoman.types import Hypothesis, Mistake, Score


def read_texts(source: Path, references: Sequence[Path]) -> tuple[list[str], list[list[str]]]:
    """The lines of the source and of each reference, which must belong together line by line."""
    sources = list(read_lines(source))
    if not sources:
        raise Mistake(f"{source} is empty")
    texts = [list(read_lines(path)) for path in references]
    for path, lines in zip(references, texts, strict=True):
        if len(lines) != len(sources):
            raise Mistake(f"{source} has {len(sources)} lines but {path} has {len(lines)}; they must belong together")
    return sources, texts


def against_references(
    translator: Translator, sources: Sequence[str], references: Sequence[Sequence[str]], *, beam: int | None = None
) -> dict[str, Any]:
    return scored(translator.translate(sources, beam=beam), references)


def on_phrasebook(translator: Translator, split: str, count: int, *, beam: int | None = None) -> dict[str, Any]:
    """The ordinary scores on a split of the built-in corpus, and the share of right answers for each phenomenon."""
    direction = translator.recipe.data.direction
    phrases = list(phrasebook.phrases(split, count, direction=direction))
    found = translator.translate([phrase.source for phrase in phrases], beam=beam)
    scores = scored(found, [[phrase.target for phrase in phrases]])
    return {**scores, "phenomena": phenomena(phrases, [one.text for one in found])}


def scored(found: Sequence[Hypothesis], references: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Scores of the answers, and how many of these came with which warning."""
    warnings = Counter(kind for one in found for kind in kinds(one.warnings))
    scores = evaluate([one.text for one in found], references)
    return {"lines": len(found), **as_dict(scores), "warnings": dict(warnings)}


def phenomena(phrases: Sequence[Phrase], texts: Sequence[str]) -> dict[str, dict[str, float]]:
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for phrase, text in zip(phrases, texts, strict=True):
        for name, (good, all_of_it) in phrasebook.judged(phrase, text).items():
            right[name] += good
            total[name] += all_of_it
    return {
        name: {"right": right[name], "total": total[name], "percent": 100 * right[name] / total[name]}
        for name in sorted(total)
    }


def as_dict(scores: Sequence[Score]) -> dict[str, Any]:
    return {score.name: {"value": score.value, "signature": score.signature} for score in scores}


def table(results: Sequence[dict[str, Any]]) -> Text:
    """One row for each score of each run. Signatures are not broken, however narrow the terminal: people copy them."""
    rows = [["run", "score", "value", "how it is counted"]]
    for result in results:
        scores = [[NAMES[name], f"{result[name]['value']:.2f}", result[name]["signature"]] for name in NAMES]
        counts = result.get("phenomena", {}).items()
        scores += [[name, f"{c['percent']:.1f} %", f"{c['right']} of {c['total']} right"] for name, c in counts]
        rows += [[result["run"], *score] for score in scores]
    shown = rows if len(results) > 1 else [row[1:] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    return Text("\n".join(lines), no_wrap=True, overflow="ignore")


NAMES = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER"}
