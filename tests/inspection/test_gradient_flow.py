"""Gradients by distance: a known recurrence has a known answer."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dragoman.data.batches import Widths
from dragoman.inspection.gradient_flow import average_columns, capture_embeddings, measure_gradient_flow
from dragoman.models.base import Seq2Seq
from dragoman.models.registry import build_model
from dragoman.recipe import Recipe
from toy_batch import VOCABULARY, examples, in_rows

RNN = {"kind": "rnn", "width": 8, "dropout": 0.0, "cell": "vanilla", "nonlinearity": "identity", "attention": "none"}


def model_of(**settings: object) -> Seq2Seq:
    model = build_model(
        Recipe.model_validate({"model": settings}).neural_model,
        source_size=VOCABULARY,
        target_size=VOCABULARY,
        joint=True,
    )
    assert isinstance(model, Seq2Seq)
    return model.double().eval()


def turned(model: Seq2Seq, factor: float) -> Seq2Seq:
    """Recurrences that turn a state and multiply it, and inputs that they only turn."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("hidden_weight", "input_weight")):
                rotation, _ = torch.linalg.qr(torch.randn_like(weight))
                weight.copy_(rotation * (factor if name.endswith("hidden_weight") else 1.0))
    return model


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.2])
def test_a_linear_recurrence_shrinks_or_grows_by_its_factor(factor: float) -> None:
    """h = W h + U x with W a rotation times a factor: the slope d steps back is factor ** d times the one at 0."""
    model = turned(model_of(**RNN, bidirectional=False), factor)
    some = examples(4, seed=4, longest=9)
    flow = measure_gradient_flow(model, in_rows([[0], [1], [2], [3]], some))
    assert len(flow.target) > 6
    assert flow.target == pytest.approx([factor**d for d in range(len(flow.target))], rel=1e-6)


@pytest.mark.parametrize("factor", [0.5, 1.2])
def test_through_one_vector_the_source_is_felt_by_its_distance_from_the_end(factor: float) -> None:
    model = turned(model_of(**RNN, bidirectional=False), factor)
    flow = measure_gradient_flow(model, in_rows([[0], [1]], examples(2, seed=5)))
    assert flow.source == pytest.approx([factor**d for d in range(len(flow.source))], rel=1e-6)


def test_nothing_changes_for_other_threads() -> None:
    model, batch = model_of(kind="transformer", layers=1, width=8, heads=2), in_rows([[0]], examples(1, seed=2))
    expected = model(batch)[0]
    with capture_embeddings(model, lambda _, x_BTC: torch.zeros_like(x_BTC)), ThreadPoolExecutor(1) as executor:
        assert torch.equal(executor.submit(model, batch).result()[0], expected)
        assert not torch.equal(model(batch)[0], expected)


def test_a_row_with_padding_is_as_one_without() -> None:
    model, some = model_of(kind="transformer", layers=1, width=8, heads=2), examples(1, seed=2)
    narrow, wide = (measure_gradient_flow(model, in_rows([[0]], some, w)) for w in (None, Widths(16, 16)))
    assert narrow.target == pytest.approx(wide.target, rel=1e-9)
    assert narrow.source == pytest.approx(wide.source, rel=1e-9)


def test_nothing_stays_behind_in_the_model() -> None:
    model, batch = model_of(kind="transformer", layers=1, width=8, heads=2), in_rows([[0]], examples(1))
    before = model(batch)
    measure_gradient_flow(model, batch)
    assert not any(module._forward_hooks for module in model.modules())
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(model(batch), before)


def test_every_distance_has_its_share() -> None:
    """Distances reach as far as the sentence does, and no farther."""
    [one], model = examples(1, seed=2), model_of(kind="transformer", layers=1, width=8, heads=2)
    flow = measure_gradient_flow(model, in_rows([[0]], [one]))
    assert len(flow.target) == len(one.target) + 1
    assert len(flow.source) == len(one.source) + 1
    assert all(share > 0 for share in flow.target + flow.source)


def test_a_distance_that_hardly_anyone_reaches_is_left_out() -> None:
    short, long = torch.zeros(99, 2), torch.full((1, 5), -1.0)
    assert average_columns([short, long]) == pytest.approx([math.exp(-1 / 100)] * 2)
    assert len(average_columns([short[:9], long])) == 5
