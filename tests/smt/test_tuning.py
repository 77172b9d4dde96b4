"""Tuning: BLEU is sacreBLEU's, and weights move towards good translations."""

from __future__ import annotations

import numpy as np
import pytest
import sacrebleu

from dragoman.smt.tuning import Candidate, bleu_from_counts, count_overlaps, optimise_weights

REFERENCES = ["the small dog runs in the house", "a cat sleeps on the big house", "the man and the dog sleep"]
OUTPUTS = ["the small dog runs the house", "a cat sleeps on a big big house", "the man and the dog sleep"]


def test_bleu_is_sacrebleus() -> None:
    stats = np.sum(
        [count_overlaps(one.split(), [two.split()]) for one, two in zip(OUTPUTS, REFERENCES, strict=True)], 0
    )
    expected = sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES], tokenize="none", smooth_method="none").score
    assert 100 * bleu_from_counts(stats) == pytest.approx(expected)


def test_weights_learn_which_feature_means_quality() -> None:
    """Of two features, the first is high where a translation is right, the second where it is wrong."""
    lists = []
    for good, bad in zip(REFERENCES, OUTPUTS, strict=True):
        words = [tuple(good.split()), tuple(reversed(bad.split()))]
        stats = [count_overlaps(each, [good.split()]) for each in words]
        features = [np.array([1.0, 0.0]), np.array([0.0, 1.0])]
        lists.append([Candidate(*each) for each in zip(words, features, stats, strict=True)])
    weights = optimise_weights(lists, np.array([0.0, 1.0]), seed=1)
    assert weights[0] > weights[1]
    np.testing.assert_array_equal(weights, optimise_weights(lists, np.array([0.0, 1.0]), seed=1))
