"""Tests of the dropout of tokens, heads and layers, with every kind of model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dragoman.errors import UserError
from dragoman.models.base import Model
from dragoman.models.registry import MODEL_KINDS
from dragoman.modules.dropout import HeadDropout, LayerDropout, WordDropout, use_dropout_rows
from dragoman.training.step import split_batch
from dragoman.types import Batch
from tolerance import DEVICES, assert_different, assert_same
from toy_models import KINDS, OF_TRANSFORMERS, RATES, SMALL_TRANSFORMER, build_small_model, compute_states, make_batch
from toy_sections import settings_of

ALL_DEVICES = pytest.mark.parametrize("device", DEVICES)
WITHOUT_EFFECT = {
    *((kind, rate) for kind in ("rnn", "lm rnn", "classifier rnn") for rate in OF_TRANSFORMERS),
    *((f"lm {backbone}", "source_word_dropout") for backbone in MODEL_KINDS["lm"]),
    *((f"classifier {backbone}", "target_word_dropout") for backbone in MODEL_KINDS["classifier"]),
}
WITH_EFFECT = [(kind, rate) for kind in KINDS for rate in RATES if (kind, rate) not in WITHOUT_EFFECT]
ALL_RATES = pytest.mark.parametrize(("kind", "rate"), WITH_EFFECT)


def build_with_dropout(kind: str, **rates: float) -> tuple[Model, Batch]:
    section = {**KINDS[kind], **rates}
    return build_small_model(section), make_batch(section)


def run_model(model: Model, batch: Batch, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.cat(compute_states(model, batch))


@ALL_RATES
def test_dropout_has_an_effect_only_in_training(kind: str, rate: str) -> None:
    model, batch = build_with_dropout(kind, **{rate: 0.4})
    plain, _ = build_with_dropout(kind)
    expected = run_model(plain.train(), batch)
    assert torch.equal(run_model(model.eval(), batch), run_model(plain.eval(), batch))
    assert_different(run_model(model.train(), batch), expected)
    assert_different(run_model(model, batch, seed=1), run_model(model, batch, seed=2))
    assert torch.equal(run_model(model, batch, seed=1), run_model(model, batch, seed=1))


@pytest.mark.parametrize("kind", KINDS)
def test_at_rate_zero_no_random_numbers_are_sampled(kind: str) -> None:
    model, batch = build_with_dropout(kind)
    before = torch.get_rng_state()
    model.train()(batch)
    assert torch.equal(torch.get_rng_state(), before)


@ALL_RATES
def test_parts_of_a_batch_have_the_same_dropout_masks_as_the_full_batch(kind: str, rate: str) -> None:
    """The mask of a row does not depend on the other rows that are computed with it."""
    model, batch = build_with_dropout(kind, **{rate: 0.4})
    full = run_model(model.train(), batch)
    found = []
    for part in split_batch(batch, 3):
        with use_dropout_rows(part.first_row, part.total_rows):
            found.append(run_model(model, part))
    assert_same(torch.cat(found), full)


@pytest.mark.parametrize(("kind", "rate"), sorted(WITHOUT_EFFECT))
def test_rates_without_effect_are_refused_by_name(kind: str, rate: str) -> None:
    with pytest.raises(UserError, match=rf"model\.{rate}"):
        settings_of({**KINDS[kind], rate: 0.1})


def test_activation_dropout_is_refused_without_a_feed_forward_network() -> None:
    with pytest.raises(UserError, match=r"model\.activation_dropout .*model\.activation=none"):
        settings_of({**SMALL_TRANSFORMER, "activation": "none", "activation_dropout": 0.1})


@ALL_DEVICES
@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize(("kind", "shape"), [(WordDropout, (80, 90, 3)), (HeadDropout, (90, 80, 5, 3))])
def test_tokens_and_heads_are_dropped_as_a_whole_and_the_mean_stays(
    kind: type[WordDropout], shape: tuple[int, ...], rate: float, device: str
) -> None:
    out = kind(rate)(torch.ones(shape, device=device)).flatten(2).double()
    assert torch.equal(out.amin(2), out.amax(2))
    factor = out[..., 0]
    assert factor.unique().tolist() == pytest.approx([0.0, 1 / (1 - rate)], rel=1e-4)
    spread = math.sqrt(rate / (1 - rate) / factor.numel())
    assert factor.mean().item() == pytest.approx(1.0, abs=5 * spread)


@ALL_DEVICES
def test_each_row_applies_or_skips_a_layer(device: str) -> None:
    before, after = torch.randn(2, 5000, 3, 2, device=device)
    out = LayerDropout(0.3)(before, after)
    skipped, applied = ((out == states).flatten(1).all(1) for states in (before, after))
    assert (skipped ^ applied).all()
    assert skipped.double().mean().item() == pytest.approx(0.3, abs=5 * math.sqrt(0.21 / 5000))
    assert LayerDropout(0.3).eval()(before, after) is after
    assert LayerDropout(0.0)(before, after) is after


def test_rows_that_skip_every_layer_are_their_embeddings() -> None:
    """At a rate of almost 1, an encoder is only its embeddings and its final normalization."""
    section = {**SMALL_TRANSFORMER, "layer_dropout": 1 - 1e-9}
    model, batch = build_small_model(section).train(), make_batch(section)
    inputs_seen: list[Tensor] = []
    model.encoder.norm.register_forward_hook(lambda _module, inputs, _output: inputs_seen.append(inputs[0]))
    model.encoder.layers[0].register_forward_pre_hook(lambda _module, inputs: inputs_seen.append(inputs[0]))
    model(batch)
    assert torch.equal(inputs_seen[0], inputs_seen[1])


@pytest.mark.parametrize("kind", KINDS)
def test_an_invisible_token_has_no_influence(kind: str) -> None:
    """This holds for source and target. A visible token has an influence."""
    model, batch = build_with_dropout(kind)
    sides = {"source_visible_BS": "source_BS", "target_visible_BT": "target_in_BT"}
    for visible, ids in sides.items():
        chosen = torch.zeros_like(getattr(batch, ids), dtype=torch.bool)
        chosen[0, 1] = True
        if not batch.source_tokens and ids == "source_BS":
            continue  # a language model has no source
        if "classifier" in kind and ids == "target_in_BT":
            continue  # a classifier reads no target
        changed: dict[str, Any] = {ids: torch.where(chosen, 7, getattr(batch, ids))}
        unseen: dict[str, Any] = {visible: ~chosen}
        other = replace(batch, **changed)
        hidden = [replace(version, **unseen) for version in (batch, other)]
        assert_same(run_model(model.eval(), hidden[0]), run_model(model.eval(), hidden[1]))
        assert_different(*(run_model(model.eval(), version) for version in (batch, other)))
        assert_different(run_model(model, batch), run_model(model, hidden[0]))
