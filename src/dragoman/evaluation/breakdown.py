"""Scores by the length of the source, and word F1 by word frequency.

Shapes   N lines   T buckets   K counts of a metric (score/totals.py)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dragoman.config import Recipe
from dragoman.evaluation.answered import Answered, Tick
from dragoman.score.metrics import METRICS
from dragoman.score.significance import Counts
from dragoman.score.words import SPACELESS, eastern, words
from dragoman.text.corpus import read_pairs

BUCKETS = 6  # of lengths
TRAINING_DATA = "the training data of "
RARITIES = ((0, 0), (1, 1), (2, 4), (5, 9), (10, 99), (100, 999), (1000, None))  # times that a word was seen

Bounds = tuple[int, int | None]


class Seen(NamedTuple):
    """How often words were seen, and where."""

    times: Mapping[str, int]
    where: str


def fitted(numbers: Sequence[int], most: int = BUCKETS) -> list[tuple[int, int]]:
    """Bounds that put about as many of these numbers into each bucket, none of them empty."""
    ends = np.unique(np.quantile(numbers, np.arange(1, most + 1) / most, method="inverted_cdf")).tolist()
    return list(zip([min(numbers), *(end + 1 for end in ends[:-1])], ends, strict=True))


def by_length(answered: Answered, counts: Counts) -> dict[str, Any]:
    """Return every metric on the lines of each length of the source or, where it is not known, of the reference.

    Scores come from sums of the counts of each line, so no line is counted again.
    """
    texts = answered.sources or answered.references[0]
    spaceless = eastern(texts) in SPACELESS
    lengths = [len(line) if spaceless else len(line.split()) for line in texts]
    rows = []
    for low, high in fitted(lengths):
        inside_N = np.array([low <= length <= high for length in lengths])
        values = {
            name: float(METRICS[name].values(counted.line_NK[inside_N].sum(0))) for name, counted in counts.items()
        }
        rows.append({"low": low, "high": high, "lines": int(inside_N.sum()), **values})
    side = "source" if answered.sources else "reference"
    return {"unit": "characters" if spaceless else "words", "side": side, "buckets": rows}


def by_rarity(answered: Answered, seen: Seen) -> dict[str, Any]:
    """Return precision, recall and F1 of words by their frequency. Of several references, the first counts."""
    given, wanted, both = Counter[Bounds](), Counter[Bounds](), Counter[Bounds]()
    for text, reference in zip(answered.texts, answered.references[0], strict=True):
        here, there = Counter(words(text)), Counter(words(reference))
        for tally, counted in ((given, here), (wanted, there), (both, here & there)):
            for word, times in counted.items():
                tally[rarity(seen.times.get(word, 0))] += times
    rows = []
    for bounds in RARITIES:
        if wanted[bounds]:
            precision, recall = 100 * both[bounds] / max(given[bounds], 1), 100 * both[bounds] / wanted[bounds]
            f1 = 200 * both[bounds] / (given[bounds] + wanted[bounds])
            about = {"low": bounds[0], "high": bounds[1], "words": wanted[bounds]}
            rows.append({**about, "precision": precision, "recall": recall, "f1": f1})
    return {"counted_in": seen.where, "buckets": rows}


def rarity(times: int) -> Bounds:
    return next((low, high) for low, high in RARITIES if low <= times and (high is None or times <= high))


def words_learnt(recipes: Mapping[str, Recipe], tick: Tick) -> Seen | None:
    """How often words occur in what the first of these runs learnt from whose training data is still there.

    One count serves all systems, so that they are asked about the same words.
    """
    for name, recipe in recipes.items():
        if recipe.data.train and all(Path(file).exists() for corpus in recipe.data.train for file in corpus.files):
            times = Counter(word for line in learnt(recipe, tick) for word in words(line))
            return Seen(times, f"{TRAINING_DATA}{name}")
    return None


def words_of(references: Sequence[Sequence[str]]) -> Seen:
    """How often words occur in the references themselves: what is left to go by."""
    return Seen(Counter(word for lines in references for line in lines for word in words(line)), "the references")


def learnt(recipe: Recipe, tick: Tick) -> Iterator[str]:
    """The targets of the training data."""
    done = 0
    for corpus in recipe.data.train:
        for pair in read_pairs(corpus, split="train", direction=recipe.data.direction):
            yield pair.target
            done += 1
            if done % 1000 == 0:
                tick(done)
