"""Tuning of the weights of a log-linear model: batch MIRA over n-best lists (Cherry and Foster 2012).

Every round translates the dev set with the weights so far, adds the n-best lists to those of earlier rounds, and moves
the weights, sentence by sentence, so that a translation with a good BLEU (*hope*) scores better than one that the model
likes and BLEU does not (*fear*), by a margin of their difference in BLEU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dragoman.smt.compiled import Array

ORDER = 4
DECAY = 0.999  # of the statistics that stand for the rest of the corpus in the BLEU of one sentence


def count_overlaps(words: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
    """Return what BLEU is computed from: matched and all n-grams of every order, and the closest reference's length."""
    stats = np.zeros(2 * ORDER + 1)
    for n in range(1, ORDER + 1):
        found = list_ngrams(words, n)
        best: Counter[tuple[str, ...]] = Counter()
        for reference in references:
            best |= list_ngrams(reference, n)
        stats[2 * n - 2] = sum((found & best).values())
        stats[2 * n - 1] = max(len(words) - n + 1, 0)
    stats[-1] = min((abs(len(each) - len(words)), len(each)) for each in references)[1]
    return stats


def list_ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))


def bleu_from_counts(stats: Array) -> Any:
    """Return BLEU (0 to 1) of statistics, a row each."""
    matched, total = stats[..., 0:-1:2], stats[..., 1:-1:2]
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.log(np.where(total > 0, matched / total, 0.0)).mean(-1)
        brevity = np.minimum(0.0, 1.0 - stats[..., -1] / stats[..., 1])
    return np.nan_to_num(np.exp(precision + brevity))


class Candidate(NamedTuple):
    """A translation in an n-best list."""

    words: tuple[str, ...]
    features: Array
    stats: Array


def optimise_weights(
    lists: Sequence[Sequence[Candidate]], weights: Array, seed: int, *, epochs: int = 20, step: float = 0.01
) -> Array:
    """Return weights under which good translations score best, averaged over all updates (batch MIRA)."""
    rng = np.random.default_rng(seed)
    features = [np.array([one.features for one in some]) for some in lists]
    stats = [np.array([one.stats for one in some]) for some in lists]
    weights = weights.copy()
    background = np.full(2 * ORDER + 1, 1.0)
    best, best_bleu = weights.copy(), -1.0
    for _ in range(epochs):
        total = np.zeros_like(weights)
        for index in rng.permutation(len(lists)):
            matrix, counts = features[index], stats[index]
            model = matrix @ weights
            gain = bleu_from_counts(background + counts) * (
                background[1] + counts[:, 1]
            )  # in words, as corpora weigh sentences
            hope, fear = int(np.argmax(model + gain)), int(np.argmax(model - gain))
            difference = matrix[hope] - matrix[fear]
            loss = (gain[hope] - gain[fear]) - (model[hope] - model[fear])
            norm = float(difference @ difference)
            if loss > 0 and norm > 0:
                weights += min(step, loss / norm) * difference
            background = DECAY * (background + counts[hope])
            total += weights
        average = total / len(lists)
        chosen = [counts[int(np.argmax(matrix @ average))] for matrix, counts in zip(features, stats, strict=True)]
        if (bleu := float(bleu_from_counts(np.sum(chosen, 0)))) > best_bleu:
            best, best_bleu = average, bleu
    return best
