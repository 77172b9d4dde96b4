"""Measure one run: quality, speed, size, learning curve, and how quality and gradients vary with distance.

Measurements are plain JSON, written beside the run. They hold all that the report shows of the run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dragoman.config.settings import CorpusSettings
from dragoman.data.batches import BatchPlan, Widths, collate_pairs
from dragoman.data.corpus import collect_references, phrasebook_direction, read_pairs
from dragoman.evaluation.predictions import predict_own_tests, score_phenomena
from dragoman.evaluation.scorer import Bounds
from dragoman.evaluation.tables import scores_of
from dragoman.inference.loading import load
from dragoman.inference.model_card import read_events
from dragoman.inference.predictor import eval_mode
from dragoman.inference.translator import Translator
from dragoman.inspection.gradient_flow import gradient_by_distance
from dragoman.metrics.metrics import compute_metrics
from dragoman.models.registry import parameters
from dragoman.phrasebook.generate import Phrase, generate_phrases, judge_phenomena
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder
from dragoman.types import Line, Pair

VERSION = 2  # of the measurements; those of another version are made again
TASK_METRICS = {  # by task, where data.metrics names none; the first one is plotted
    "translate": ("bleu", "chrf"),
    "classify": ("accuracy",),
    "generate": ("loss", "perplexity"),
}
TIMED_SENTENCES = 256  # translated greedily to measure speed
GRADIENT_SENTENCES = 64
SMALLEST_BIN = 0.02  # of all lines; a smaller bin is joined with another
LENGTH_BINS = (
    (1, 4),
    (5, 8),
    (9, 12),
    (13, 16),
    (17, 20),
    (21, 30),
    (31, 40),
    (41, 60),
    (61, None),
)  # words of a source
DISTANCES = ((1, 1), (2, 2), (3, 4), (5, 6), (7, 8), (9, None))  # words between the first and the last that must agree


def measure_run(run: Path, *, device: str) -> dict[str, Any]:
    predictor = load(run, device=device)
    measured = {"version": VERSION, "parameters": parameters(predictor.model), "training": read_training(run)}
    if isinstance(predictor, Translator):
        return measured | measure_translator(predictor)
    return measured | {"tests": score_tests(predictor)}


def score_tests(predictor: Any) -> dict[str, Any]:
    """Return the scores of a classifier or a language model on each test set, or on dev where the recipe has none."""
    data = predictor.recipe.data
    dev = tuple(corpus.model_copy(update={"split": corpus.split or "dev"}) for corpus in data.dev)
    data = data.model_copy(update={"test": data.test or dev})
    own = replace(predictor, recipe=predictor.recipe.model_copy(update={"data": data}))
    results = {}
    for name, output in zip(name_tests(predictor.recipe), predict_own_tests(own), strict=True):
        result = output.result()
        scores = scores_of(result)
        results[name] = {
            "lines": result["lines"],
            "scores": {metric: score["value"] for metric, score in scores.items()},
            "signatures": {metric: score["signature"] for metric, score in scores.items()},
        }
    return results


def measure_translator(translator: Translator) -> dict[str, Any]:
    """Return quality, speed and gradients of a model that turns one sentence into another."""
    held = read_tests(translator.recipe, trees=translator.reads_trees)
    pairs = [pair for some, _ in held.values() for pair in some]
    translate_pairs(translator, pairs[:8])  # the first call is slow
    names = choose_metrics(translator.recipe)
    results = {name: measure_test(translator, *test, names) for name, test in held.items()}
    timed, begun = pairs[:TIMED_SENTENCES], time.monotonic()
    translate_pairs(translator, timed, beam=1)
    greedy = len(timed) / (time.monotonic() - begun)
    return {
        "tests": results,
        "speed": {
            "greedy": greedy,
            "beam": len(pairs) / sum(result["seconds"] for result in results.values()),
            "width": translator.recipe.search.beam,
        },
        "gradient": measure_gradients(translator, pairs[:GRADIENT_SENTENCES]),
    }


def translate_pairs(translator: Translator, pairs: Sequence[Pair], *, beam: int | None = None) -> list[str]:
    trees = [pair.tree for pair in pairs] if translator.reads_trees else None
    lines = [Line(pair.source, tag=pair.tag) for pair in pairs]
    found = translator.translate(lines, beam=beam, trees=trees, align=False)
    return [one.text for one in found]


def read_training(run: Path) -> dict[str, Any]:
    """Return what the run's own log says.

    Its speed is the median of those in the log, so that the slow first steps and validations do not count.
    """
    state = RunFolder(run).state()
    events = list(read_events(RunFolder(run).metrics))
    trained = [event for event in events if event["event"] == "train"]
    return {
        "steps": state["step"],
        "seconds": state["seconds"],
        "tokens": state["tokens"],
        "flops": state["flops"],
        "peak_memory": state["peak_memory"],
        "device": state["choices"]["device"],
        "tokens_per_second": float(np.median([event["tokens_per_second"] for event in trained])) if trained else None,
        "skipped": state["skipped"],
        "curve": read_curve(events),
    }


def read_curve(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the loss at every validation, with the time and FLOPs spent by then."""
    points: list[dict[str, Any]] = []
    spent: dict[str, Any] = {"seconds": 0.0, "flops": 0.0}
    for event in events:
        if event["event"] == "train":
            spent = {name: event.get(name) for name in spent}
        else:
            points.append({"step": event["step"], **spent, "loss": event["loss"]})
    return points


def choose_metrics(recipe: Recipe) -> Sequence[str]:
    return recipe.data.metrics or TASK_METRICS[recipe.model.task]


def read_tests(recipe: Recipe, *, trees: bool) -> dict[str, tuple[list[Pair], list[Phrase]]]:
    """Return the test sets by name, with the phrases of the phrasebook; dev where the recipe has no test set."""
    split = "test" if recipe.data.test else "dev"
    found: dict[str, tuple[list[Pair], list[Phrase]]] = {}
    for name, corpus in name_tests(recipe).items():
        if corpus.phrasebook:
            part, direction = corpus.split or split, phrasebook_direction(corpus, recipe.data.direction)
            phrases = list(generate_phrases(part, corpus.phrasebook, seed=corpus.seed, direction=direction))
            found[name] = [Pair(p.source, p.target, p.tree, corpus.tag) for p in phrases], phrases
        else:
            found[name] = list(read_pairs(corpus, split=split, direction=recipe.data.direction, trees=trees)), []
    return found


def name_tests(recipe: Recipe) -> dict[str, CorpusSettings]:
    """Return the corpora to evaluate on, by names short enough for a table."""
    split = "test" if recipe.data.test else "dev"
    found: dict[str, CorpusSettings] = {}
    for corpus in getattr(recipe.data, split):
        name = (corpus.split or split) if corpus.phrasebook else Path(corpus.files[0]).name + corpus.chosen
        found[name if name not in found else f"{name} ({len(found) + 1})"] = corpus
    return found


def measure_test(
    translator: Translator, pairs: Sequence[Pair], phrases: Sequence[Phrase], names: Sequence[str]
) -> dict[str, Any]:
    begun = time.monotonic()
    texts = translate_pairs(translator, pairs)
    spent = time.monotonic() - begun
    scores = compute_metrics(texts, collect_references(pairs), names)
    result = {
        "lines": len(pairs),
        "seconds": spent,
        "scores": {score.name: score.value for score in scores},
        "signatures": {score.name: score.signature for score in scores},
        "lengths": measure_lengths(pairs, texts, names[0]),
    }
    if phrases:
        result |= {"phenomena": score_phenomena(phrases, texts), "distances": measure_distances(phrases, texts)}
    return result


def measure_lengths(pairs: Sequence[Pair], texts: Sequence[str], metric: str) -> list[dict[str, Any]]:
    """Return the metric on the sentences of each length of source, in words."""
    rows = []
    for (low, high), lines in fill_bins([len(pair.source.split()) for pair in pairs], LENGTH_BINS):
        references = collect_references([pairs[line] for line in lines])
        [score] = compute_metrics([texts[line] for line in lines], references, [metric])
        rows.append({"low": low, "high": high, "lines": len(lines), "value": score.value})
    return rows


def measure_distances(phrases: Sequence[Phrase], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the share of phenomena that are right, by the distance from their first word to their last."""
    verdicts = [
        (max(phenomenon.words) - min(phenomenon.words), right)
        for phrase, text in zip(phrases, texts, strict=True)
        for phenomenon, right in judge_phenomena(phrase, text)
    ]
    rows = []
    for (low, high), found in fill_bins([distance for distance, _ in verdicts], DISTANCES):
        percent = 100 * sum(verdicts[index][1] for index in found) / len(found)
        rows.append({"low": low, "high": high, "lines": len(found), "value": percent})
    return rows


def fill_bins(numbers: Sequence[int], bins: Sequence[Bounds]) -> list[tuple[Bounds, list[int]]]:
    """Return the bins with the indices of their numbers. A bin with too few is joined with the one before it."""
    filled: list[tuple[Bounds, list[int]]] = []
    for low, high in bins:
        inside = [i for i, number in enumerate(numbers) if low <= number and (high is None or number <= high)]
        if inside and filled and len(inside) < SMALLEST_BIN * len(numbers):
            (lower, _), before = filled.pop()
            filled.append(((lower, high), before + inside))
        elif inside:
            filled.append(((low, high), inside))
    return filled


def measure_gradients(translator: Translator, pairs: Sequence[Pair]) -> dict[str, list[float]]:
    """Return gradient norms by distance (inspection/gradient_flow.py) on some sentences, one to a row."""
    examples = [
        piece.example(translator.tokenizers.target.encode(pair.target))
        for number, pair in enumerate(pairs)
        for piece in islice(translator.split_line(Line(pair.source), tree=pair.tree, line_index=number), 1)
    ]
    widths = Widths(*(max(len(getattr(e, side)) for e in examples) + 1 for side in ("source", "target")))
    batch = collate_pairs(BatchPlan([[line] for line in range(len(examples))], widths), examples).to(translator.device)
    with eval_mode(translator.model), torch.enable_grad():
        flow = gradient_by_distance(translator.model, batch)
    return {"target": flow.target, "source": flow.source}
