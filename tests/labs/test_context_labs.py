"""Quick versions of the experiments in labs/context.py."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from dragoman.labs import context
from dragoman.labs.context import (
    CLUES,
    COPY_SOURCE,
    DROPPED,
    FOREIGN,
    GOOD_BACK,
    NO_CONTEXT,
    PRONOUNS,
    WITH_PRONOUNS,
    compute_auc,
    drop_words,
    exchange_first_sentences,
    list_documents,
    list_dropped_pronouns,
)
from dragoman.labs.experiment import Experiment, Setup
from dragoman.labs.registry import collect_experiments
from dragoman.labs.small_translators import LSTM_ATTENTION, TRANSFORMER
from lab_runs import Facts, check_quick_run

EXPERIMENTS = collect_experiments(context)
FACTS: dict[str, Facts] = {
    "context": lambda trials: {
        "pronouns are guessed without the noun": max(trials[name]["pronouns"] for name in (NO_CONTEXT, FOREIGN)) < 60,
        "something is learned": min(numbers["bleu"] for numbers in trials.values()) > 10,
    },
    "pronouns": lambda trials: {
        "what nothing determines cannot be restored": trials[DROPPED]["accuracy"][CLUES.index("nothing")]
        < trials[WITH_PRONOUNS]["accuracy"][CLUES.index("nothing")] - 20,
    },
    "simplification": lambda trials: {
        "a copy has most of the words": trials[COPY_SOURCE]["bleu"] > 30,
        "a copy simplifies nothing": trials[COPY_SOURCE]["exact"] == 0,
        "both models simplify": min(trials[name]["exact"] for name in (LSTM_ATTENTION, TRANSFORMER)) > 2,
    },
    "round-trip": lambda trials: {
        "each lost word lowers chrF": trials[GOOD_BACK]["reference_chrf"]
        == sorted(trials[GOOD_BACK]["reference_chrf"], reverse=True),
        "the reference tells three lost words": trials[GOOD_BACK]["reference"][-1] > 0.65,
        "the round trip does as well": trials[GOOD_BACK]["round_trip"][-1] > 0.6,
    },
}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path, FACTS.get(experiment.name))


def test_only_laws_have_no_facts() -> None:
    assert set(FACTS) == {name for name, experiment in EXPERIMENTS.items() if not experiment.law}


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
