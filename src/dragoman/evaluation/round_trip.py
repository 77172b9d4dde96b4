"""Round trips: how much of the sources is left when their translations are translated back.

A source that comes back unchanged was probably translated completely; words that are lost on the way were perhaps not
translated. No reference is needed. The run that translates back makes errors too, and a system that copies its
sources has perfect round trips, so scores compare systems only if they have the same back-translation system.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.evaluation.report import align_columns, compute_line_chrf, group_by_test
from dragoman.evaluation.systems import (
    EvaluationOptions,
    EvaluationSet,
    read_parallel_files,
    read_test_sets,
    translate_test_set,
)
from dragoman.metrics.metrics import METRICS, Lines, compute_metrics
from dragoman.progress import Report

ROUND_TRIP_METRICS = ("chrf", "bleu")
WORST_LINES = 5  # lines shown, those with the lowest sentence-level chrF


@dataclass(frozen=True, slots=True)
class RoundTripLine:
    """A line of a test set, its translation, and what the translation becomes when translated back."""

    number: int  # counted from 1
    source: str
    translation: str
    back: str
    chrf: float  # of `back` against `source`


def score_round_trip(
    sources: Lines, translations: Lines, back_translations: Lines, metrics: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the scores of round trips against their sources, the number of mere copies, and the worst lines."""
    scores = compute_metrics(back_translations, [sources], metrics or ROUND_TRIP_METRICS)
    [chrf_N] = compute_line_chrf([back_translations], [sources])
    worst = [
        RoundTripLine(int(n) + 1, sources[n], translations[n], back_translations[n], float(chrf_N[n]))
        for n in np.argsort(chrf_N, kind="stable")[:WORST_LINES]
    ]
    return {
        "lines": len(sources),
        **{score.name: {"value": score.value, "signature": score.signature} for score in scores},
        "copies": sum(source == translation for source, translation in zip(sources, translations, strict=True)),
        "worst": [asdict(line) for line in worst],
    }


def evaluate_round_trips(
    runs: Sequence[Path], back_run: Path, options: EvaluationOptions, report: Report
) -> Iterator[dict[str, Any]]:
    """Yield the result of each run on each test set: the file of `options`, a split of the phrasebook, or data.test."""
    from dragoman.inference.loading import load_as
    from dragoman.inference.translator import Translator

    backward = load_as(Translator, back_run, device=options.device, engine=options.engine)
    for run in runs:
        forward = load_as(Translator, run, device=options.device, engine=options.engine)
        if options.source:
            [sources] = read_parallel_files([options.source])
            tests = iter([EvaluationSet(sources, [], str(options.source), tag=options.tag)])
        else:
            tests = read_test_sets(forward, options)
        for test in tests:
            translations = [hypothesis.text for hypothesis in translate_test_set(forward, test, options, report)]
            reverse = replace(test, sources=translations, trees=None, tag="", contexts=None)
            outputs = translate_test_set(backward, reverse, options, report)
            back_translations = [hypothesis.text for hypothesis in outputs]
            result = score_round_trip(test.sources, translations, back_translations, options.metrics)
            yield {"run": str(run), "back": str(back_run), **({"test": test.name} if test.name else {}), **result}


def format_round_trips(results: Sequence[dict[str, Any]]) -> str:
    """Return a table of scores for each test set, and the worst lines of each run."""
    texts = []
    for heading, group in group_by_test(results):
        metrics = [name for name in METRICS if name in group[0]]
        rows = [["run", *(METRICS[name].title for name in metrics), "copies"]]
        rows += [[r["run"], *(f"{r[name]['value']:.2f}" for name in metrics), f"{r['copies']:,}"] for r in group]
        texts += [f"{heading}, back by {group[0]['back']}", align_columns(rows), ""]
        for result in group:
            texts.append(f"lines of {result['run']} with the lowest chrF")
            for line in result["worst"]:
                texts += [f"  line {line['number']:,}: chrF {line['chrf']:.1f}"]
                texts += [f"    {name:<12} {line[name]}" for name in ("source", "translation", "back")]
    return "\n".join(texts)
