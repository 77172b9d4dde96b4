"""The quick version of the experiment in labs/head_roles.py, and how heads get roles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dragoman.inspection.heads import HeadReport, ScoredHeads
from dragoman.labs.experiment import Trials
from dragoman.labs.head_roles import HEAD_ROLES, ROLE_MODELS, ROLE_SCORES, UNTRAINED, find_role
from dragoman.labs.small_translators import LSTM_ATTENTION
from lab_runs import check_quick_run


def test_quick_version(tmp_path: Path) -> None:
    def tell(trials: Trials) -> Mapping[str, bool]:
        return {
            "an LSTM has no heads of self-attention": trials[LSTM_ATTENTION]["percent"][1:]
            == [0.0] * (len(ROLE_SCORES) - 1),
            "the rule for alignment depends on the sentences alone": len({trials[m]["rules"][0] for m in ROLE_MODELS})
            == 1,
            "an untrained model does not align": trials[UNTRAINED]["aligned word"] < trials[UNTRAINED]["rules"][0],
        }

    check_quick_run(HEAD_ROLES, tmp_path, tell)


def make_report(*scores: tuple[str, str, float, list[float]]) -> HeadReport:
    """Return a report with the name, part, best rule and heads of each score."""
    tables = [
        ScoredHeads(name, name, part, 10, 5.0, rule, "chance", {"chance": rule}, np.array([heads]), np.array([heads]))
        for name, part, rule, heads in scores
    ]
    return HeadReport("run", "corpus", 10, tables)


def test_a_role_is_given_on_one_set_and_scored_on_the_other() -> None:
    choosing = make_report(("previous", "encoder", 40.0, [45.0, 50.0]), ("previous", "decoder", 10.0, [35.0, 20.0]))
    testing = make_report(("previous", "encoder", 42.0, [90.0, 51.0]), ("previous", "decoder", 12.0, [33.0, 95.0]))
    assert find_role(choosing, testing, "previous word") == (33.0, 12.0)  # the head with the largest lead over its rule
    assert find_role(choosing, testing, "antecedent") == (0.0, 0.0)
