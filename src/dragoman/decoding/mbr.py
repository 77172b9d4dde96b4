"""Minimum Bayes risk decoding: of many hypotheses, choose the one that is most similar to all the others.

The likeliest hypothesis can be an outlier; one that the others agree with seldom is. Similarity is a metric between two
sentences, computed for all pairs at once from n-gram counts.

Shapes   H hypotheses   F different n-grams   n an order
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dragoman.config.settings import pick
from dragoman.decoding.protocol import SearchResult

Floats = NDArray[np.float64]
CHRF_ORDER, BLEU_ORDER = 6, 4  # orders of n-grams
CHRF_BETA = 2.0  # weight of recall against precision


def rank_by_agreement(
    found: Sequence[SearchResult], texts: Sequence[str], weights: Sequence[float], metric: str
) -> list[SearchResult]:
    """Rank hypotheses by their weighted mean similarity to all others; of equal texts only the first stays.

    The similarity, from 0 to 1, becomes the score.
    """
    if not found:
        return []
    similarity_HH = pick(MBR_METRICS, metric, "metric of mbr")(texts)
    weight_H = np.array(weights, dtype=np.float64)
    gain_H = (similarity_HH @ (weight_H / weight_H.sum())).tolist()
    first: dict[str, SearchResult] = {}
    for text, one, gain in zip(texts, found, gain_H, strict=True):
        first.setdefault(text, replace(one, score=gain))
    return sorted(first.values(), key=lambda one: -one.score)


def count_ngrams(items: Sequence[Sequence[str]]) -> Floats:
    """Return how often each hypothesis has each n-gram: count_HF."""
    number: dict[str, int] = {}
    indices = [[number.setdefault(item, len(number)) for item in some] for some in items]
    count_HF = np.zeros((len(items), len(number)))
    for row, some in enumerate(indices):
        np.add.at(count_HF[row], some, 1)
    return count_HF


def count_shared_ngrams(count_HF: Floats) -> Floats:
    """Return how many n-grams each pair of hypotheses shares, with multiplicity: match_HH."""
    match_HH = np.empty((len(count_HF), len(count_HF)))
    for row, count_F in enumerate(count_HF):
        there_F = count_F > 0
        match_HH[row] = np.minimum(count_HF[:, there_F], count_F[there_F]).sum(1)
    return match_HH


def pairwise_chrf(texts: Sequence[str]) -> Floats:
    """Return chrF of each hypothesis (row) against each other as its reference (column), as in sacreBLEU, from 0 to 1.

    Precision and recall are means over the orders that both have.
    """
    bare = ["".join(text.split()) for text in texts]
    precision_HH = recall_HH = orders_HH = np.zeros((len(texts), len(texts)))
    for n in range(1, CHRF_ORDER + 1):
        count_HF = count_ngrams([[text[i : i + n] for i in range(len(text) - n + 1)] for text in bare])
        total_H, match_HH = count_HF.sum(1), count_shared_ngrams(count_HF)
        both_HH = (total_H[:, None] > 0) & (total_H > 0)
        safe_H = np.maximum(total_H, 1)
        precision_HH = precision_HH + match_HH / safe_H[:, None]
        recall_HH = recall_HH + match_HH / safe_H
        orders_HH = orders_HH + both_HH
    orders_HH = np.maximum(orders_HH, 1)
    precision_HH, recall_HH = precision_HH / orders_HH, recall_HH / orders_HH
    below_HH = CHRF_BETA**2 * precision_HH + recall_HH
    return (1 + CHRF_BETA**2) * precision_HH * recall_HH / np.where(below_HH > 0, below_HH, 1)


def pairwise_bleu(texts: Sequence[str]) -> Floats:
    """Return sentence BLEU likewise, as in sacreBLEU: 13a tokens, exponential smoothing of orders without a match."""
    from sacrebleu.metrics.bleu import BLEU

    tokenize = BLEU(tokenize="13a").tokenizer
    words = [tokenize(text.rstrip()).split() for text in texts]
    length_H = np.array([len(some) for some in words], dtype=np.float64)
    H = len(texts)
    logs_HH, orders_HH, smooth_HH, any_HH = np.zeros((H, H)), np.zeros((H, H)), np.ones((H, H)), np.zeros((H, H))
    for n in range(1, BLEU_ORDER + 1):
        count_HF = count_ngrams([["\0".join(some[i : i + n]) for i in range(len(some) - n + 1)] for some in words])
        total_H1, match_HH = count_HF.sum(1)[:, None], count_shared_ngrams(count_HF)
        there_HH = np.broadcast_to(total_H1 > 0, (H, H))
        smooth_HH = np.where(match_HH > 0, smooth_HH, smooth_HH / 2)
        precision_HH = np.where(match_HH > 0, match_HH, smooth_HH) / np.maximum(total_H1, 1)
        logs_HH = logs_HH + np.where(there_HH, np.log(precision_HH), 0)
        orders_HH = orders_HH + there_HH
        any_HH = any_HH + match_HH
    brevity_HH = np.minimum(0, 1 - length_H / np.maximum(length_H, 1)[:, None])
    return np.where(any_HH > 0, np.exp(brevity_HH + logs_HH / np.maximum(orders_HH, 1)), 0)


MBR_METRICS: dict[str, Callable[[Sequence[str]], Floats]] = {"chrf": pairwise_chrf, "bleu": pairwise_bleu}
