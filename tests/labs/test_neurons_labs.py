"""The quick version of the experiment in labs/neurons.py, and which neurons count as dedicated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from dragoman.labs.experiment import Trials
from dragoman.labs.neurons import FEEDFORWARD_MEMORY, count_dedicated, replace_first_matrices
from dragoman.labs.small_models import build_small_model
from lab_runs import check_quick_run


def test_quick_version(tmp_path: Path) -> None:
    def tell(trials: Trials) -> Mapping[str, bool]:
        return {
            "shuffled features are hardly found": max(trial["shares"][1] for trial in trials.values()) < 0.03,
            "those of the lexicon are found": trials["trained"]["shares"][0] > trials["trained"]["shares"][1],
        }

    check_quick_run(FEEDFORWARD_MEMORY, tmp_path, tell)


def test_random_neurons_replace_the_first_matrices_only() -> None:
    settings = {"kind": "lm", "width": 16, "heads": 2, "layers": 2, "dropout": 0.0}
    model, other, kept = (build_small_model(settings, vocabulary=10, seed=seed) for seed in (1, 2, 1))
    replace_first_matrices(model, other)
    parts = zip(model.named_parameters(), other.parameters(), kept.parameters(), strict=True)
    for (name, weight), another, before in parts:
        assert torch.equal(weight, another if ".wide." in name else before), name


def test_a_neuron_is_dedicated_if_its_top_words_share_a_feature() -> None:
    feature_WG = torch.zeros(40, 1, dtype=torch.double)
    feature_WG[:10] = 1
    dedicated = torch.arange(40, 0, -1.0)  # highest for the words with the feature
    activation_WF = torch.stack([dedicated, dedicated.flip(0), torch.zeros(40)], 1)
    assert count_dedicated(activation_WF, feature_WG) == pytest.approx(1 / 3)
