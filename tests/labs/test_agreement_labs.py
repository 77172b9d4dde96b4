"""Quick versions of the experiments in labs/agreement.py."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from dragoman.labs import agreement
from dragoman.labs.agreement import (
    NOUN_PREPOSITIONS,
    VANILLA_RNN,
    VERBS,
    assign_word_ids,
    inflect,
    list_adjectives,
    list_nouns,
    write_subject,
)
from dragoman.labs.experiment import Experiment
from dragoman.labs.registry import collect_experiments
from lab_runs import check_quick_run

EXPERIMENTS = collect_experiments(agreement)
PREPOSITIONS = ("of", *NOUN_PREPOSITIONS)


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    trials = check_quick_run(experiment, tmp_path).table
    vanilla = trials[VANILLA_RNN][1]
    assert min(vanilla["plain"]) > 0.8  # where all nouns agree, the task is easy
    assert vanilla["drop"] > 40


def split_nouns(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the nouns before the subject, the subject and the nouns after it."""
    phrases = [phrase.split() for phrase in " ".join(words).replace("the ", "| ").split("|")]
    is_modifier = [bool(before) and before[-1] in PREPOSITIONS for before in phrases[:-1]]
    nouns = [next(word for word in phrase if word not in (*PREPOSITIONS, *list_adjectives())) for phrase in phrases[1:]]
    subject = is_modifier.index(False)
    assert all(is_modifier[:subject] + is_modifier[subject + 1 :])
    return nouns[:subject], [nouns[subject]], nouns[subject + 1 :]


@pytest.mark.parametrize("plural", [False, True])
@pytest.mark.parametrize("attracts", [False, True])
def test_only_attractors_differ_from_the_subject_in_number(plural: bool, attracts: bool) -> None:
    is_plural = {inflect(noun, number): number for noun in list_nouns() for number in (False, True)}
    positions, numbers_before = set(), set()
    for seed in range(50):
        words = write_subject(Random(seed), plural=plural, attracts=attracts, depth=3, test=True)
        before, subject, after = split_nouns(words)
        assert [is_plural[noun] for noun in subject + after] == [plural] + [plural != attracts] * 3
        positions.add(words.index(subject[0]))
        numbers_before |= {is_plural[noun] for noun in before}
    assert len(positions) > 3  # the position does not tell which noun is the subject
    assert numbers_before == {False, True}


def test_training_and_test_share_no_pair_of_nouns() -> None:
    def sample_pairs(*, test: bool) -> set[tuple[str, str]]:
        random = Random(1)
        samples = [write_subject(random, plural=False, attracts=False, depth=1, test=test) for _ in range(500)]
        return {(subject, second) for _, [subject], [second] in map(split_nouns, samples)}

    assert sample_pairs(test=False).isdisjoint(sample_pairs(test=True))


def test_every_word_has_its_own_id() -> None:
    assert len(set(assign_word_ids().values())) == len(assign_word_ids())
    assert VERBS == ("is", "are")
