"""Quick versions of the experiments in labs/features.py, and where properties are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from dragoman.labs.experiment import Trials
from dragoman.labs.features import (
    PART_BEFORE,
    PART_OF_SPEECH,
    PROBED_PROPERTIES,
    PROBING,
    SUBJECT_NUMBER,
    analyse_plan,
    find_layer,
)
from dragoman.phrasebook.english import English
from dragoman.phrasebook.generate import realize_plans
from dragoman.phrasebook.realization import BLOCK_SIZE
from lab_runs import check_quick_run


def test_quick_version(tmp_path: Path) -> None:
    def tell(trials: Trials) -> Mapping[str, bool]:
        numbers = trials["Transformer"]
        majority = dict(zip(PROBED_PROPERTIES, numbers["majority"], strict=True))
        return {
            "plural subjects are as frequent as others": majority[SUBJECT_NUMBER] == 0.5,
            "the number of the subject cannot be read from embeddings": abs(numbers[SUBJECT_NUMBER][0] - 0.5) < 0.15,
            "part of speech can be read from embeddings": numbers[PART_OF_SPEECH][0] > majority[PART_OF_SPEECH] + 0.02,
        }

    check_quick_run(PROBING, tmp_path, tell, decides=False)


def test_no_word_of_the_main_clause_tells_the_number_of_its_subject() -> None:
    """If the subject gets the other number, the words of the main clause stay the same."""
    count = 0
    for plan, source, target in islice(realize_plans("test", 300, seed=2), 300):
        kept = analyse_plan(plan, source, target)
        subject = plan.root.subject
        if kept is None or subject.noun is None or not subject.noun.forms[0][True][0]:  # such as water
            continue
        subject.plural = not subject.plural
        changed = English()
        changed.write(plan)
        nodes = range(plan.root.node, plan.root.node + BLOCK_SIZE)
        before, after = ([word for word, node, _ in one.tokens if node in nodes] for one in (source, changed))
        assert before == after
        assert source.words[kept.main_verb].lower() in before
        count += 1
    assert count > 50


def test_the_layer_of_a_property_needs_a_gain() -> None:
    majority = [0.5] * len(PROBED_PROPERTIES)
    numbers = {
        "majority": majority,
        SUBJECT_NUMBER: [0.5, 0.6, 0.89, 0.9, 0.7],
        PART_BEFORE: [0.5, 0.54, 0.51, 0.5, 0.5],
    }
    assert find_layer(numbers, SUBJECT_NUMBER) == 2
    assert math.isnan(find_layer(numbers, PART_BEFORE))
