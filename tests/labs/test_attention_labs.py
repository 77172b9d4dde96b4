"""Quick versions of the experiments in labs/attention.py, and the removal of the causal mask."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dragoman.labs.attention import EXPERIMENTS, remove_causal_mask
from dragoman.labs.experiment import Experiment
from dragoman.labs.small_models import build_small_model, make_batch
from lab_runs import check_quick_run


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path)


@torch.no_grad()
def test_without_the_mask_first_states_depend_on_the_last_token() -> None:
    model = build_small_model({"kind": "lm", "width": 16, "heads": 2, "layers": 2, "dropout": 0.0}, vocabulary=10)
    batch, changed = (make_batch([()], [[5, 6, last, 9]], example_format="lines") for last in (7, 8))

    def differ() -> bool:
        return not torch.equal(model(batch)[:, 0], model(changed)[:, 0])

    assert not differ()
    with remove_causal_mask(model):
        assert differ()
    assert not differ()
