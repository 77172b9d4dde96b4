"""Quick versions of the experiments in labs/context.py."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from dragoman.labs.context import (
    CLUES,
    EXPERIMENTS,
    PRONOUNS,
    compute_auc,
    drop_words,
    exchange_first_sentences,
    list_documents,
    list_dropped_pronouns,
)
from dragoman.labs.experiment import Experiment, Setup
from lab_runs import check_quick_run


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path)


def test_exchanged_documents_have_the_same_sentences_but_another_first_one(tmp_path: Path) -> None:
    documents = list_documents("test", 50, Setup(True, tmp_path))
    exchanged = exchange_first_sentences(documents)
    assert all(before[0].document == before[1].document for before in documents)
    assert all(after[0].document != after[1].document for after in exchanged)
    assert [after[1] for after in exchanged] == [before[1] for before in documents]
    assert sorted(after[0].document for after in exchanged) == [before[0].document for before in documents]


def test_only_the_dropped_pronouns_are_judged(tmp_path: Path) -> None:
    phrases = list_dropped_pronouns("test", 50, Setup(True, tmp_path))
    for phrase, source in phrases:
        assert len(source.split()) > len(phrase.pair.source.split())
        for phenomenon in phrase.phenomena:
            assert phenomenon.name in CLUES
            [position] = phenomenon.words
            assert phrase.target_words[position] in PRONOUNS


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_dropped_words_are_neighbours_and_the_last_word_stays(count: int) -> None:
    words = [f"{number}" for number in range(6)]
    for seed in range(20):
        left = drop_words(" ".join(words), count, Random(seed)).split()
        start = next((n for n, (word, kept) in enumerate(zip(words, left, strict=False)) if word != kept), len(left))
        assert left == words[:start] + words[start + min(count, len(words) - 1) :]
        assert left[-1] == words[-1]


def test_auc_of_perfect_opposite_and_equal_scores() -> None:
    low_N, high_N = np.array([1.0, 2.0]), np.array([3.0, 4.0, 5.0])
    assert compute_auc(low_N, high_N) == 1.0
    assert compute_auc(high_N, low_N) == 0.0
    assert compute_auc(low_N, low_N) == 0.5
