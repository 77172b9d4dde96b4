"""Quick versions of the experiments in labs/bleu.py."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from dragoman.labs import bleu
from dragoman.labs.bleu import NEGATION, NUMBER, generate_paraphrased_pairs, make_error
from dragoman.labs.experiment import Experiment
from dragoman.labs.registry import collect_experiments
from dragoman.phrasebook.generate import split_words
from lab_runs import Facts, check_quick_run

EXPERIMENTS = collect_experiments(bleu)
FACTS: dict[str, Facts] = {
    "paraphrases": lambda trials: {
        "a wrong word costs less than another order": all(t["bleu_wrong"] > t["bleu_right"] for t in trials.values()),
        "a wrong translation usually wins": all(t["bleu_wrong_wins"] > 0.7 for t in trials.values()),
        "references help": all(t["bleu_all_references"] > t["bleu_one_reference"] for t in trials.values()),
    }
}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path, FACTS.get(experiment.name))


def test_only_laws_have_no_facts() -> None:
    assert set(FACTS) == {name for name, experiment in EXPERIMENTS.items() if not experiment.law}


def test_errors_change_one_word() -> None:
    assert make_error("Im Sommer stirbt sein Kind nicht.", NEGATION) == "Im Sommer stirbt sein Kind."
    assert make_error("Zehn Hunde sehen zwei Katzen.", NUMBER) == "Zehn Hunde sehen drei Katzen."
    assert make_error("Er schläft.", NEGATION) is None


def test_paraphrases_have_the_words_of_the_reference() -> None:
    for pair in islice(generate_paraphrased_pairs(seed=1), 50):
        words = sorted(split_words(pair.target.lower()))
        for text in pair.alternatives:
            assert sorted(split_words(text.lower())) == words
            assert text != pair.target
