"""What becomes of one run, as numbers: quality, speed, size, learning curve, and how all that varies with distance.

A judgement is plain JSON, written whole beside the run. It holds all that the report shows of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from dragoman.card import read_events
from dragoman.config import CorpusSettings, Recipe
from dragoman.data.batch import Grid, Widths, lay
from dragoman.door import evaluating
from dragoman.evaluation.answers import on_own_tests, phenomena
from dragoman.lens.flow import gradient_by_distance
from dragoman.loading import load
from dragoman.models.build import kind_of, parameters
from dragoman.score.metrics import of_answers
from dragoman.store import RunFolder
from dragoman.text import phrasebook
from dragoman.text.corpus import all_references, read_pairs, way_of
from dragoman.text.phrasebook import Phrase
from dragoman.translator import Translator
from dragoman.types import Line, Pair

T = TypeVar("T")
VERSION = 2  # of what a judgement holds; one of another version is made again
METRICS = {  # by task, where data.metrics names none; the first one is drawn
    "translate": ("bleu", "chrf"),
    "classify": ("accuracy",),
    "generate": ("loss", "perplexity"),
}
TIMED = 256  # sentences translated greedily against the clock
ASKED = 64  # sentences that gradients are asked of
FEWEST = 0.02  # of all lines: a bin that holds less is joined with another
LENGTHS = ((1, 4), (5, 8), (9, 12), (13, 16), (17, 20), (21, 30), (31, 40), (41, 60), (61, None))  # words of a source
DISTANCES = ((1, 1), (2, 2), (3, 4), (5, 6), (7, 8), (9, None))  # words between the first and the last that must agree


def judge(run: Path, *, device: str) -> dict[str, Any]:
    door = load(run, device=device)
    judgement = {"version": VERSION, "parameters": parameters(door.model), "training": training(run)}
    if isinstance(door, Translator):
        return judgement | translating(door)
    return judgement | {"tests": dict(zip(named(door.recipe), map(plainly, scores_of(door)), strict=True))}


def scores_of(door: Any) -> Iterable[dict[str, Any]]:
    """On the test sets; on dev where the recipe has none."""
    data = door.recipe.data
    dev = tuple(corpus.model_copy(update={"split": corpus.split or "dev"}) for corpus in data.dev)
    data = data.model_copy(update={"test": data.test or dev})
    own = replace(door, recipe=door.recipe.model_copy(update={"data": data}))
    return (found.result() for found in on_own_tests(own))


def plainly(found: dict[str, Any]) -> dict[str, Any]:
    """What evaluation found on a test set, without what only some tasks have."""
    scores = {name: each for name, each in found.items() if isinstance(each, dict) and "signature" in each}
    return {
        "lines": found["lines"],
        "scores": {name: score["value"] for name, score in scores.items()},
        "signatures": {name: score["signature"] for name, score in scores.items()},
    }


def translating(translator: Translator) -> dict[str, Any]:
    """Quality, speed and gradients of a model that turns one sentence into another."""
    held = tests(translator.recipe, trees=translator.asks_for_trees)
    pairs = [pair for some, _ in held.values() for pair in some]
    translated(translator, pairs[:8])  # the first call is slow
    names = metrics(translator.recipe)
    results = {name: on_test(translator, *test, names) for name, test in held.items()}
    timed = pairs[:TIMED]
    return {
        "tests": results,
        "speed": {
            "greedy": len(timed) / seconds(lambda: translated(translator, timed, beam=1)),
            "beam": len(pairs) / sum(result["seconds"] for result in results.values()),
            "width": translator.recipe.search.beam,
        },
        "gradient": gradients(translator, pairs[:ASKED]),
    }


def translated(translator: Translator, pairs: Sequence[Pair], *, beam: int | None = None) -> list[str]:
    trees = [pair.tree for pair in pairs] if translator.asks_for_trees else None
    lines = [Line(pair.source, tag=pair.tag) for pair in pairs]
    found = translator.translate(lines, beam=beam, trees=trees, align=False)
    return [one.text for one in found]


def training(run: Path) -> dict[str, Any]:
    """What the run's own records say. Its speed is the median of those it wrote, so that the first slow steps and the
    time of validations count for nothing."""
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
        "curve": curve(events),
    }


def curve(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The loss at every validation, with what had been spent by then."""
    points: list[dict[str, Any]] = []
    spent: dict[str, Any] = {"seconds": 0.0, "flops": 0.0}
    for event in events:
        if event["event"] == "train":
            spent = {name: event.get(name) for name in spent}
        else:
            points.append({"step": event["step"], **spent, "loss": event["loss"]})
    return points


def metrics(recipe: Recipe) -> Sequence[str]:
    return recipe.data.metrics or METRICS[kind_of(recipe.model).task]


def tests(recipe: Recipe, *, trees: bool) -> dict[str, tuple[list[Pair], list[Phrase]]]:
    """The test sets by name, with the analyses where they are known; dev where the recipe has no test set."""
    split = "test" if recipe.data.test else "dev"
    found: dict[str, tuple[list[Pair], list[Phrase]]] = {}
    for name, corpus in named(recipe).items():
        if corpus.phrasebook:
            part, direction = corpus.split or split, way_of(corpus, recipe.data.direction)
            phrases = list(phrasebook.phrases(part, corpus.phrasebook, seed=corpus.seed, direction=direction))
            found[name] = [Pair(p.source, p.target, p.tree, corpus.tag) for p in phrases], phrases
        else:
            found[name] = list(read_pairs(corpus, split=split, direction=recipe.data.direction, trees=trees)), []
    return found


def named(recipe: Recipe) -> dict[str, CorpusSettings]:
    """The corpora to be judged on, by names as short as a table wants them."""
    split = "test" if recipe.data.test else "dev"
    found: dict[str, CorpusSettings] = {}
    for corpus in getattr(recipe.data, split):
        name = (corpus.split or split) if corpus.phrasebook else Path(corpus.files[0]).name + corpus.chosen
        found[name if name not in found else f"{name} ({len(found) + 1})"] = corpus
    return found


def on_test(
    translator: Translator, pairs: Sequence[Pair], phrases: Sequence[Phrase], names: Sequence[str]
) -> dict[str, Any]:
    begun = time.monotonic()
    texts = translated(translator, pairs)
    spent = time.monotonic() - begun
    scores = of_answers(texts, all_references(pairs), names)
    result = {
        "lines": len(pairs),
        "seconds": spent,
        "scores": {score.name: score.value for score in scores},
        "signatures": {score.name: score.signature for score in scores},
        "lengths": by_length(pairs, texts, names[0]),
    }
    if phrases:
        result |= {"phenomena": phenomena(phrases, texts), "distances": by_distance(phrases, texts)}
    return result


def by_length(pairs: Sequence[Pair], texts: Sequence[str], metric: str) -> list[dict[str, Any]]:
    """The metric on the sentences of each length of source, in words."""
    rows = [(len(pair.source.split()), pair, text) for pair, text in zip(pairs, texts, strict=True)]
    found = []
    for (low, high), some in binned(rows, LENGTHS, lambda row: row[0]):
        [score] = of_answers([text for *_, text in some], all_references([pair for _, pair, _ in some]), [metric])
        found.append({"low": low, "high": high, "lines": len(some), "value": score.value})
    return found


def by_distance(phrases: Sequence[Phrase], texts: Sequence[str]) -> list[dict[str, Any]]:
    """The share of phenomena that came out right, by how far their first word stands from their last."""
    rows = [
        (max(phenomenon.words) - min(phenomenon.words), right)
        for phrase, text in zip(phrases, texts, strict=True)
        for phenomenon, right in phrasebook.verdicts(phrase, text)
    ]
    return [
        {"low": low, "high": high, "lines": len(some), "value": 100 * sum(right for _, right in some) / len(some)}
        for (low, high), some in binned(rows, DISTANCES, lambda row: row[0])
    ]


def binned(
    items: Sequence[T], bins: Sequence[tuple[int, int | None]], number: Callable[[T], int]
) -> list[tuple[tuple[int, int | None], list[T]]]:
    """The bins with what they hold. One that holds too little to say anything is joined with the one before it."""
    held: dict[tuple[int, int | None], list[T]] = {bounds: [] for bounds in bins}
    for item in items:
        for low, high in bins:
            if low <= number(item) <= (high if high is not None else number(item)):
                held[low, high].append(item)
    found: list[tuple[tuple[int, int | None], list[T]]] = []
    for bounds, some in held.items():
        if some and found and len(some) < FEWEST * len(items):
            (low, _), before = found.pop()
            found.append(((low, bounds[1]), before + some))
        elif some:
            found.append((bounds, some))
    return found


def seconds(action: Callable[[], object]) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def gradients(translator: Translator, pairs: Sequence[Pair]) -> dict[str, list[float]]:
    """How far the loss is felt (lens/flow.py), on some sentences, one to a row."""
    trees = [pair.tree for pair in pairs]
    examples = [
        piece.example(translator.tokenizers.target.encode(pair.target))
        for number, pair in enumerate(pairs)
        for piece in islice(translator.cut(number, pair.source, trees), 1)
    ]
    widths = Widths(*(max(len(getattr(e, side)) for e in examples) + 1 for side in ("source", "target")))
    batch = lay(Grid([[line] for line in range(len(examples))], widths), examples).to(translator.device)
    with evaluating(translator.model), torch.enable_grad():
        flow = gradient_by_distance(translator.model, batch)
    return {"target": flow.target, "source": flow.source}
