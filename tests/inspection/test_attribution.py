"""Attributions are derivatives, integrals and differences of log-probabilities, computed here in other ways."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dragoman.inference.predictor import eval_mode
from dragoman.inference.translator import Translator
from dragoman.inspection import attribution
from dragoman.inspection.attention_maps import merge_into_words
from dragoman.inspection.attribution import ATTRIBUTIONS, compute_attributions, make_quadrature
from dragoman.inspection.gradient_flow import capture_embeddings, find_embedders
from dragoman.inspection.sentence import SentenceBatch, inspect, make_translation_batch
from dragoman.models.base import Model
from dragoman.types import Batch, Hypothesis, Line
from tolerance import DEVICES, assert_same
from toy_batch import VOCABULARY
from toy_models import KINDS, LABELS, build_small_model, collate_rows, make_examples, make_model_sections
from toy_run import WORDS, make_sentences, translate_toy
from toy_sections import settings_of

SECTIONS = make_model_sections()
EVERY_SECTION = pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS.keys())
EVERY_KIND = pytest.mark.parametrize("section", KINDS.values(), ids=KINDS.keys())
FIELDS = {"source": "source_BS", "target": "target_in_BT"}


def make_sentence(section: dict[str, Any], dtype: torch.dtype = torch.float64) -> SentenceBatch:
    model = build_small_model(section, dtype=dtype).eval()
    batch = collate_rows(section, [[0]], make_examples(section, longest=6))
    size = LABELS if settings_of(section).task == "classify" else VOCABULARY
    return SentenceBatch(model, batch, {}, size, str)


def make_toy_sentence(translator: Translator, source: str) -> SentenceBatch:
    [segment] = translator.make_segments(Line(source), translator.make_options())
    return make_translation_batch(translator, segment, translator.tokenizers.target.encode(translate_toy(source)))


def compute_logp(model: Model, batch: Batch, size: int) -> Tensor:
    """Return the log-probability of each target token: logp_BT."""
    with torch.no_grad():
        logp_BTV = model.compute_logits(model(batch))[..., :size].log_softmax(-1)
    return logp_BTV.gather(-1, batch.target_out_BT[..., None])[..., 0]


def scale_each_token(sentence: SentenceBatch, side: str, factor: float) -> Tensor:
    """Return logp_NT: row n with the embedding of token n of one side multiplied by a factor."""
    count = getattr(sentence.batch, FIELDS[side]).size(1)
    factor_NN1 = 1 + (factor - 1) * torch.eye(count, dtype=torch.float64)[..., None]
    hook = find_embedders(sentence.model)[side].word_dropout.register_forward_pre_hook(
        lambda _, inputs: (inputs[0] * factor_NN1, *inputs[1:])
    )
    try:
        rows = attribution.repeat_row(sentence.batch, count)
        return compute_logp(sentence.model, rows, sentence.output_size)
    finally:
        hook.remove()


def assert_derivatives(sentence: SentenceBatch) -> None:
    contributions, notes = ATTRIBUTIONS["gradient x input"].compute(sentence)
    assert contributions.keys() == find_embedders(sentence.model).keys()
    assert not notes
    for side, value_TN in contributions.items():
        up_NT, down_NT = (scale_each_token(sentence, side, factor) for factor in (1 + 1e-5, 1 - 1e-5))
        torch.testing.assert_close(value_TN, (up_NT - down_NT).T / 2e-5, rtol=1e-4, atol=1e-6)


@EVERY_SECTION
def test_gradient_times_input_is_the_derivative_by_a_factor_of_the_embedding(section: dict[str, Any]) -> None:
    assert_derivatives(make_sentence(section))


@pytest.mark.parametrize("section", [s for s in KINDS.values() if settings_of(s).task == "translate"])
def test_sides_with_the_same_ids_are_told_apart(section: dict[str, Any]) -> None:
    """Also if source and target share their embeddings."""
    sentence = make_sentence(section)
    batch = sentence.batch
    same = replace(
        batch,
        source_BS=batch.target_in_BT.clone(),
        source_segment_BS=batch.target_segment_BT,
        source_position_BS=batch.target_position_BT,
    )
    assert_derivatives(replace(sentence, batch=same))


@EVERY_SECTION
def test_leave_one_out_is_the_drop_with_a_zero_embedding(section: dict[str, Any]) -> None:
    sentence = make_sentence(section)
    logp_T = compute_logp(sentence.model, sentence.batch, sentence.output_size)[0]
    contributions, notes = ATTRIBUTIONS["leave-one-out"].compute(sentence)
    assert contributions.keys() == find_embedders(sentence.model).keys()
    assert not notes
    for side, value_TN in contributions.items():
        torch.testing.assert_close(value_TN, (logp_T - scale_each_token(sentence, side, 0.0)).T, rtol=0, atol=1e-9)


def compute_change(sentence: SentenceBatch) -> Tensor:
    """Return the log-probability minus that of a model in whose embedding tables all rows are the same, the mean."""
    baseline = deepcopy(sentence.model)
    for part in find_embedders(baseline).values():
        table_VC = part.embedding.weight.detach()
        part.embedding = nn.Embedding.from_pretrained(table_VC.mean(0).expand_as(table_VC).clone())
    full, empty = (compute_logp(model, sentence.batch, sentence.output_size)[0] for model in (sentence.model, baseline))
    return full - empty


def assert_complete(sentence: SentenceBatch) -> None:
    contributions, notes = ATTRIBUTIONS["integrated gradients"].compute(sentence)
    sum_T = torch.stack([value_TN.sum(1) for value_TN in contributions.values()]).sum(0)
    change_T = compute_change(sentence)
    assert not notes
    assert bool(((sum_T - change_T).abs() <= 0.02 * change_T.abs().clamp(min=0.5) + 1e-5).all())


@pytest.mark.parametrize("device", DEVICES)
@EVERY_KIND
def test_integrated_gradients_sum_to_the_change_from_the_baseline(section: dict[str, Any], device: str) -> None:
    sentence = make_sentence(section, torch.float32)
    moved = replace(sentence, model=sentence.model.to(device), batch=sentence.batch.to(torch.device(device)))
    assert_complete(moved)


@pytest.mark.parametrize("source", make_sentences(3, seed=5, longest=6))
def test_integrated_gradients_of_a_trained_model_sum_to_the_change(translator: Translator, source: str) -> None:
    with eval_mode(translator.model):
        assert_complete(make_toy_sentence(translator, source))


def test_inexact_integrals_are_noted(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution, "FIRST_INTERVALS", 2)
    monkeypatch.setattr(attribution, "MAX_INTERVALS", 4)
    with eval_mode(translator.model):
        sentence = make_toy_sentence(translator, "ba del fo gri mun!")
        contributions, [note] = ATTRIBUTIONS["integrated gradients"].compute(sentence)
    change_T = compute_change(sentence)
    error_T = sum(value_TN.sum(1) for value_TN in contributions.values()) - change_T
    wrong = int((error_T.abs() > 0.02 * change_T.abs().clamp(min=0.5)).sum())
    assert f"for {wrong} of {len(change_T)} predicted tokens" in note
    assert "with 5 points" in note


@pytest.mark.parametrize("intervals", [2, 8, 32])
def test_quadrature_is_exact_for_polynomials(intervals: int) -> None:
    points, weights = make_quadrature(intervals)
    for degree in range(intervals + 1):
        assert np.dot(weights, np.power(points, degree)) == pytest.approx(1 / (degree + 1))
    assert make_quadrature(2 * intervals)[0][::2] == pytest.approx(points)


@pytest.mark.parametrize("method", ATTRIBUTIONS)
@EVERY_KIND
def test_batch_sizes_do_not_matter(section: dict[str, Any], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = make_sentence(section)
    expected, _ = ATTRIBUTIONS[method].compute(sentence)
    monkeypatch.setattr(attribution, "BATCH_TOKENS", 30)
    monkeypatch.setattr(attribution, "POSITION_BLOCK", 2)
    actual, _ = ATTRIBUTIONS[method].compute(sentence)
    for side, value_TN in expected.items():
        assert_same(actual[side], value_TN)
        assert side == "source" or not value_TN.triu(1).any()  # later tokens have no influence


@pytest.mark.parametrize("method", ATTRIBUTIONS)
def test_words_rest_on_their_counterparts(translator: Translator, method: str) -> None:
    """Words of the toy language come out in reverse order; their contributions show that."""
    found = right = 0
    with eval_mode(translator.model):
        for line in make_sentences(12, seed=12):
            sentence = make_toy_sentence(translator, line)
            contributions, _ = ATTRIBUTIONS[method].compute(sentence)
            tokens, value_TS = sentence.tokens, contributions["source"][:-1, :-1]  # without EOS
            rows = Hypothesis("", 0.0, [*tokens["target"][:-1]], value_TS.tolist(), [*tokens["source"][:-1]], 0.0)
            source, target, word_TS = merge_into_words(rows)
            for word, value_S in zip(target, word_TS, strict=True):
                if word in WORDS.values():
                    found += 1
                    right += WORDS.get(source[int(value_S.argmax())]) == word
    assert right > 0.6 * found > 10


def test_a_page_has_every_method(translator: Translator) -> None:
    inspection = inspect(translator, "ba del fo!")
    lengths = {name: len(tokens) for name, tokens in inspection.tokens.items()}
    assert [one.method for one in inspection.attributions] == [*ATTRIBUTIONS]
    for one in inspection.attributions:
        assert one.value_TS is not None
        assert one.prefix_TT is not None
        assert one.value_TS.shape == (lengths["target"], lengths["source"])
        assert one.prefix_TT.shape == (lengths["target"], lengths["input"])
        assert one.value_TS.dtype == one.prefix_TT.dtype == np.float32


@EVERY_KIND
def test_sides_that_a_model_lacks_are_none(section: dict[str, Any]) -> None:
    attributions, notes = compute_attributions(make_sentence(section))
    task = settings_of(section).task
    assert len(attributions) == len(ATTRIBUTIONS)
    assert not notes
    for one in attributions:
        assert (one.value_TS is None) == (task == "generate")
        assert (one.prefix_TT is None) == (task == "classify")


def test_a_method_that_takes_too_long_is_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = make_sentence(KINDS["transformer"])
    T = sentence.batch.target_out_BT.size(1)
    limit = 1.5 * T * attribution.count_operations(sentence)  # enough for one backward pass per target token
    monkeypatch.setitem(attribution.MAX_OPERATIONS, "cpu", limit)
    attributions, notes = compute_attributions(sentence)
    assert [one.method for one in attributions] == ["gradient x input"]
    for note, name in zip(notes, ["Integrated gradients", "Leave-one-out"], strict=True):
        assert f"'{name}' was left out" in note


@EVERY_KIND
def test_nothing_stays_behind_in_the_model(section: dict[str, Any]) -> None:
    sentence = make_sentence(section)
    before = sentence.model(sentence.batch)
    compute_attributions(sentence)
    assert not any(module._forward_pre_hooks for module in sentence.model.modules())
    assert all(weight.grad is None for weight in sentence.model.parameters())
    assert torch.equal(sentence.model(sentence.batch), before)


def test_captured_embeddings_are_those_of_their_side() -> None:
    sentence = make_sentence(KINDS["transformer"])
    with capture_embeddings(sentence.model) as embeddings:
        sentence.model(sentence.batch)
    for side, part in find_embedders(sentence.model).items():
        ids_BN = getattr(sentence.batch, FIELDS[side])
        assert_same(embeddings[side], part.embedding(ids_BN) * part.embedding.embedding_dim**0.5)
