"""Quick versions of the experiments in labs/data_questions.py, and what their measures count."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.labs import data_questions
from dragoman.labs.data_questions import (
    COPYING,
    DOMAINS,
    WHOLE_WORDS,
    correlate_ranks,
    invent_names,
    measure_rare_words,
)
from dragoman.labs.experiment import Experiment
from dragoman.labs.registry import collect_experiments
from dragoman.phrasebook.generate import generate_pairs
from dragoman.types import Pair
from lab_runs import Facts, check_quick_run

EXPERIMENTS = collect_experiments(data_questions)
FACTS: dict[str, Facts] = {
    "rare-words": lambda trials: {
        "a vocabulary of words has no names": trials[WHOLE_WORDS]["names"] == 0,
        "a copying model writes them all the same": trials[COPYING]["names"] > 20,
    },
    "domain": lambda trials: {
        "other sentences of the domain are near": 0.7 < trials["in domain"]["ratio"] < 1.3,
        "questions are far": trials["questions"]["ratio"] > 4 * trials["in domain"]["ratio"],
    },
}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path, FACTS.get(experiment.name))


def test_only_laws_have_no_facts() -> None:
    assert set(FACTS) == {name for name, experiment in EXPERIMENTS.items() if not experiment.law}


def test_an_invented_name_is_the_same_in_both_languages_and_nothing_else_changes() -> None:
    pair = Pair("Anna sees Peter because Anna is old.", "Anna sieht Peter, weil Anna alt ist.")
    [renamed], [[first, second]] = invent_names([pair], seed=1)
    assert first != second
    assert renamed.source == f"{first} sees {second} because {first} is old."
    assert renamed.target == f"{first} sieht {second}, weil {first} alt ist."


def test_only_words_seen_at_most_once_are_rare() -> None:
    training = [Pair("", "der alte Hund"), Pair("", "der Hund"), Pair("", "die Katze")]
    test = [Pair("", "der alte Hund"), Pair("", "alten Katzen")]
    assert measure_rare_words(["der Hund", "alten Katze"], test, training) == pytest.approx(100 / 3)  # only "alten"


def test_a_pair_is_in_at_most_one_domain_and_every_domain_has_pairs() -> None:
    found = set()
    for pair in generate_pairs("test", 500):
        fitting = [name for name, topic in DOMAINS.items() if topic.fits(pair)]
        assert len(fitting) <= 1
        found.update(fitting)
    assert found == set(DOMAINS)


def test_rank_correlation() -> None:
    assert correlate_ranks([1, 3, 9], [5, 6, 7]) == 1
    assert correlate_ranks([1, 3, 9], [7, 6, 5]) == -1
    assert correlate_ranks([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)
