"""Quick versions of the experiments in labs/agreement.py."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from dragoman.labs.agreement import EXPERIMENTS, VERBS, list_subjects, number_words, write_subject
from dragoman.labs.experiment import Experiment
from lab_runs import check_quick_run


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path)


@pytest.mark.parametrize("plural", [False, True])
@pytest.mark.parametrize("attracts", [False, True])
def test_only_attractors_differ_from_the_subject_in_number(plural: bool, attracts: bool) -> None:
    nouns = set(list_subjects()).union(*list_subjects().values())
    is_plural = {noun.forms[0][number][0]: bool(number) for noun in nouns for number in (0, 1)}
    words = write_subject(Random(1), plural=plural, attracts=attracts, depth=3, test=True)
    numbers = [is_plural[word] for word in words if word not in ("the", "of")]
    assert numbers == [plural] + [plural != attracts] * 3


def test_training_and_test_share_no_pair_of_nouns() -> None:
    def sample_pairs(*, test: bool) -> set[tuple[str, str]]:
        random = Random(1)
        samples = [write_subject(random, plural=False, attracts=False, depth=1, test=test) for _ in range(500)]
        return {(words[1], words[4]) for words in samples}

    assert sample_pairs(test=False).isdisjoint(sample_pairs(test=True))


def test_every_word_has_its_own_id() -> None:
    assert len(set(number_words().values())) == len(number_words())
    assert VERBS == ("is", "are")
