"""Laws of pointer copying (modules/copying.py), for every kind of model that can copy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dragoman.errors import UserError
from dragoman.models.base import Model, Seq2Seq
from dragoman.models.registry import build_model
from dragoman.recipe import Recipe, check_model
from dragoman.types import Batch
from tolerance import assert_different, assert_same
from toy_batch import VOCABULARY
from toy_models import (
    SMALL_HYBRID,
    SMALL_RNN,
    SMALL_TRANSFORMER,
    Section,
    build_small_model,
    collate_rows,
    make_examples,
)

SECTIONS: dict[str, Section] = {
    "transformer": SMALL_TRANSFORMER,
    "untied transformer": {**SMALL_TRANSFORMER, "tied": False},
    "rnn": SMALL_RNN,
    "input feeding": {**SMALL_RNN, "input_feeding": True},
    "context as an input": {**SMALL_RNN, "context_place": "input"},
    "hybrid": SMALL_HYBRID,
}
ALL_KINDS = pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS.keys())


def build(section: Section) -> tuple[Any, Batch]:
    """Return a copying model and a batch whose targets share words with their sources."""
    section = {**section, "copying": True}
    examples = make_examples(section, 4)
    examples = [example._replace(target=example.source[::-1].copy()) for example in examples]
    return build_small_model(section).eval(), collate_rows(section, [[i] for i in range(4)], examples, spare=2)


def compute_reference(model: Any, batch: Batch) -> Tensor:
    """Return the probabilities by the formula, in loops over positions and source tokens."""
    states_BTX, weight_BTS = model(batch), model.compute_alignment(batch).double()
    width = model.copy_gate.width
    p_BTV = torch.zeros(*batch.target_out_BT.shape, VOCABULARY, dtype=torch.float64)
    for row, (states_TX, weight_TS) in enumerate(zip(states_BTX, weight_BTS, strict=True)):
        for t, (state_X, weight_S) in enumerate(zip(states_TX, weight_TS, strict=True)):
            state_C = state_X[:width]
            gate = 1 / (1 + math.exp(-float(model.copy_gate.out(state_C))))
            p_BTV[row, t] = gate * model.project(state_C).softmax(-1)
            for weight, token in zip(weight_S.tolist(), batch.source_BS[row].tolist(), strict=True):
                p_BTV[row, t, token] += (1 - gate) * weight
    return p_BTV


@torch.no_grad()
@ALL_KINDS
def test_probabilities_equal_the_formula_and_sum_to_one(section: Section) -> None:
    model, batch = build(section)
    real_BT = batch.target_segment_BT > 0
    p_NV = model.compute_logits(model(batch)[real_BT]).exp()
    assert_same(p_NV.sum(-1), torch.ones(len(p_NV), dtype=torch.float64))
    assert_same(p_NV, compute_reference(model, batch)[real_BT], torch.float32)  # alignments are in float32


@torch.no_grad()
@ALL_KINDS
def test_with_an_open_gate_the_model_generates_as_without_copying(section: Section) -> None:
    model, batch = build(section)
    plain: Model = build_small_model(section).eval()
    weights = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        parameter.copy_(weights[name])
    expected = plain.compute_logits(plain(batch)).log_softmax(-1)
    assert_different(model.compute_logits(model(batch)), expected)
    model.copy_gate.out.weight.zero_()
    for bias, may_generate in ((1e4, True), (-1e4, False)):
        model.copy_gate.out.bias.fill_(bias)
        found = model.compute_logits(model(batch))
        assert found.isfinite().all()
        if may_generate:
            assert_same(found, expected)
        else:  # only tokens of the source can follow
            for found_TV, source_S in zip(found, batch.source_BS, strict=True):
                assert_same(found_TV[:, source_S.unique()].exp().sum(-1), torch.ones(len(found_TV)).double())


@torch.no_grad()
def test_tags_of_sources_are_never_generated() -> None:
    """Their ids follow those of the vocabulary, also if source and target have two embedding tables."""
    for tied in (True, False):
        recipe = Recipe.model_validate({"model": {**SMALL_RNN, "copying": True, "tied": tied}})
        model: Any = build_model(recipe.neural_model, source_size=12, target_size=10, joint=True).eval()
        assert isinstance(model, Seq2Seq)
        state = model.start(torch.tensor([[11, 5, 3]]), torch.ones(1, 3, dtype=torch.bool))
        logp_NV, _ = model.step(torch.tensor([2]), state)
        assert logp_NV.shape == (1, 10)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"copying": True}, "tokenizer": {"joint": False}}, "set tokenizer.joint=true"),
        (
            {"model": {"kind": "rnn", "copying": True, "attention": "mean"}},
            "distinguishes source tokens",
        ),
        ({"model": {"kind": "hybrid", "copying": True, "score": "none"}}, "distinguishes source tokens"),
        ({"model": {"kind": "lm", "copying": True}}, "model.copying has no use in a language model"),
        ({"model": {"kind": "classifier", "copying": True}}, "model.copying has no use in a classifier"),
    ],
)
def test_what_cannot_copy_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_model(Recipe.model_validate(sections))
