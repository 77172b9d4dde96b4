"""Tuning: BLEU is sacreBLEU's, weights move towards good translations, a resumed run gives the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sacrebleu

from dragoman.errors import UserError
from dragoman.smt.compiled import Array
from dragoman.smt.decoder import Derivation, PhrasePair
from dragoman.smt.tuning import TuningState, add_candidates, bleu_from_counts, count_overlaps, tune_weights

REFERENCES = ["the small dog runs in the house", "a cat sleeps on the big house", "the man and the dog sleep"]
OUTPUTS = ["the small dog runs the house", "a cat sleeps on a big big house", "the man and the dog sleep"]
SPLIT = [reference.split() for reference in REFERENCES]
DEV = SPLIT * 20


def test_bleu_is_sacrebleus() -> None:
    stats = np.sum([count_overlaps(one.split(), [two]) for one, two in zip(OUTPUTS, SPLIT, strict=True)], 0)
    expected = sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES], tokenize="none", smooth_method="none").score
    assert 100 * bleu_from_counts(stats) == pytest.approx(expected)


def rank(weights: Array) -> list[list[Derivation]]:
    """Translate by a toy model: the first feature is high where a translation is right, the second where it is short.

    The third is constant and does not change with tuning.
    """
    lists = []
    for reference in DEV:
        options = [(reference, [1.0, 0.0, 1.0]), (reference[:4], [0.8, 0.5, 1.0]), (reference[::-1], [0.0, 0.6, 1.0])]
        derivations = [
            Derivation([PhrasePair(0, 1, words, [])], np.array(values), float(np.dot(values, weights)))
            for words, values in options
        ]
        lists.append(sorted(derivations, key=lambda each: -each.score))
    return lists


START = np.array([0.1, 0.9, -10.0])


def test_weights_learn_which_feature_means_quality() -> None:
    tuned = tune_weights(rank, DEV, START, rounds=4)
    first, best = tuned.curve[0], tuned.best
    assert best.bleu == pytest.approx(1.0)
    assert first.bleu < best.bleu
    assert best.weights[0] > best.weights[1]
    assert best.weights[2] == -10.0
    assert np.abs(best.weights[:2]).sum() == pytest.approx(1.0)  # tuning keeps the scale
    assert len(tuned.curve) == 2  # and ends when a round finds nothing new


def test_features_without_weight_stay_without() -> None:
    tuned = tune_weights(rank, DEV, np.array([0.0, 1.0, 0.0]), rounds=1)
    np.testing.assert_array_equal(tuned.tried[:, [0, 2]], 0.0)


def test_the_expected_length_decides_how_long_translations_are() -> None:
    """With references that count as half as long, the short translation is as precise and not too short."""
    tuned = tune_weights(rank, DEV, START, rounds=4, length_factor=0.5)
    assert all(round_.objective >= round_.bleu for round_ in tuned.curve)
    assert tuned.best.objective == pytest.approx(1.0)


def test_a_resumed_run_gives_the_same_bytes(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    tune_weights(rank, DEV, START, rounds=3, seed=7).save(whole)
    tune_weights(rank, DEV, START, rounds=0, seed=7).save(resumed)
    tune_weights(rank, DEV, START, rounds=3, seed=7, state=TuningState.load(resumed)).save(resumed)
    assert whole.read_bytes() == resumed.read_bytes()


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    tune_weights(rank, DEV, START, rounds=0).save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="delete it to start tuning again"):
        TuningState.load(path)


def test_only_equal_candidates_are_left_out() -> None:
    """The same features and statistics are one candidate, in one round or in two; the same features alone are not."""
    texts = [SPLIT[0], SPLIT[0], SPLIT[0][:4]]
    derivations = [Derivation([PhrasePair(0, 1, words, [])], np.ones(3), 0.0) for words in texts]
    state = TuningState.start(3)
    for _ in range(2):
        state = add_candidates(state, START, [derivations], SPLIT[:1], 1.0)
        assert state.scores[-1, 2] == len(state.features) == 2
