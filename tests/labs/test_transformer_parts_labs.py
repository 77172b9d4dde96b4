"""Quick versions of the experiments in labs/transformer_parts.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.labs import transformer_parts
from dragoman.labs.experiment import Experiment
from dragoman.labs.registry import collect_experiments
from dragoman.labs.small_models import FIRST_ID, build_small_model, make_batch
from dragoman.labs.transformer_parts import (
    ABLATIONS,
    DEFAULT,
    HEADS,
    WITH_GAIN,
    WITHOUT_NORM,
    PartlyDetachedNorm,
    compute_unigram_entropy,
    make_attention_uniform,
    replace_norms,
)
from dragoman.modules.norms import LayerNorm, NormSettings
from lab_runs import Facts, check_quick_run

LEARNED = 1.0  # by how many nats the loss of a translator falls at least
EXPERIMENTS = collect_experiments(transformer_parts)
FACTS: dict[str, Facts] = {
    "feedforward": lambda trials: {
        "a nonlinear network learns the task": trials["attention, ReLU network"]["accuracy"] > 0.9,
        "a linear map of the values does not": trials["uniform attention alone"]["accuracy"] <= 0.75,
    },
    "heads": lambda trials: {
        "all heads cost the same": len({(trials[name]["flops"], trials[name]["parameters"]) for name in HEADS}) == 1,
        "all models learn": all(trials[name]["curve"][-1] < trials[name]["curve"][0] - LEARNED for name in HEADS),
    },
    "ablations": lambda trials: {
        "all models learn": all(trials[name]["curve"][-1] < trials[name]["curve"][0] - LEARNED for name in ABLATIONS),
        "the decoder needs residual connections": trials["residuals of the encoder only"]["loss"]
        > trials[DEFAULT]["loss"] + 0.1,
    },
    "norm-gradients": lambda trials: {
        "norms with all gradients learn": max(trials[name]["loss"] for name in ("all gradients", WITH_GAIN)) < 0.8,
        "norms without gradients learn more slowly": trials["both detached"]["loss"]
        > trials["all gradients"]["loss"] + 0.4,
        "even models without norms learn": trials[WITHOUT_NORM]["loss"] < 1,
    },
}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path, FACTS.get(experiment.name))


def test_only_laws_have_no_facts() -> None:
    assert set(FACTS) == {name for name, experiment in EXPERIMENTS.items() if not experiment.law}


def test_uniform_attention_is_linear_in_the_embeddings() -> None:
    settings = {"kind": "classifier", "layers": 2, "width": 8, "heads": 2, "activation": "none", "norm": "none"}
    model: Any = build_small_model({**settings, "biases": False, "position": "none"}, vocabulary=20, labels=2).eval()
    make_attention_uniform(model)
    batch = make_batch([[FIRST_ID, FIRST_ID + 1, FIRST_ID + 2]], [[0]], example_format="labels")
    before = model(batch)
    with torch.no_grad():
        model.encoder.embedding.weight.mul_(3)
    torch.testing.assert_close(model(batch), 3 * before)


def test_partly_detached_norm_is_layer_norm_with_other_gradients() -> None:
    norm = LayerNorm(NormSettings(width=6))
    x_BTC = torch.randn(2, 3, 6, requires_grad=True)
    gradients = {}
    for detach in (False, True):
        out_BTC = PartlyDetachedNorm(norm, detach_mean=detach, detach_deviation=detach)(x_BTC)
        torch.testing.assert_close(out_BTC, norm(x_BTC))
        [gradients[detach]] = torch.autograd.grad(out_BTC[..., 0].sum(), x_BTC)
    [expected] = torch.autograd.grad(norm(x_BTC)[..., 0].sum(), x_BTC)
    torch.testing.assert_close(gradients[False], expected)
    assert not torch.allclose(gradients[True], expected)


def test_unigram_entropy_is_that_of_the_shares_of_tokens() -> None:
    batch = make_batch([[], []], [[FIRST_ID], [FIRST_ID + 1]])  # two tokens, and EOS twice
    assert compute_unigram_entropy(batch) == pytest.approx(1.5 * math.log(2))


def test_norms_of_all_layers_are_replaced() -> None:
    model = build_small_model({"kind": "transformer", "layers": 1, "width": 8, "heads": 2}, vocabulary=20)
    count = sum(isinstance(module, LayerNorm) for module in model.modules())
    replace_norms(model, detach_mean=True, detach_deviation=False)
    assert not any(isinstance(module, LayerNorm) for module in model.modules())
    assert sum(isinstance(module, PartlyDetachedNorm) for module in model.modules()) == count > 0
