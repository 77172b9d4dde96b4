"""Tests of language models and text classifiers with every backbone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.data.batches import EXAMPLE_FORMATS, BatchPlan, Widths
from dragoman.errors import UserError
from dragoman.kernels.attention import RowLayout
from dragoman.models.base import Model, collect_weights
from dragoman.models.registry import MODEL_KINDS, build_model
from dragoman.models.single_sequence import POOLS, LanguageModel
from dragoman.types import Example
from tolerance import assert_different, assert_same
from toy_batch import examples
from toy_sections import settings_of

BACKBONE = pytest.mark.parametrize("backbone", MODEL_KINDS["lm"])
SIZES: dict[str, dict[str, Any]] = {"transformer": {"heads": 2, "layers": 2}, "rnn": {"layers": 2}}
collate_labels, collate_lines = EXAMPLE_FORMATS["labels"].collate, EXAMPLE_FORMATS["lines"].collate
SMALL: dict[str, Any] = {"source_size": 40, "target_size": 40, "joint": True}


def build(kind: str, backbone: str, **given: Any) -> Model:
    torch.manual_seed(0)
    model = {"kind": kind, "backbone": backbone, "width": 16, "dropout": 0.0, **SIZES[backbone], **given}
    return build_model(settings_of(model), **SMALL).double().eval()


def make_labelled_examples(count: int = 9) -> list[Example]:
    return [Example(example.source, np.array([i % 3]), i) for i, example in enumerate(examples(count))]


def test_language_models_and_classifiers_have_the_same_backbones() -> None:
    assert list(MODEL_KINDS["lm"]) == list(MODEL_KINDS["classifier"]) == list(SIZES)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_last_state_of_a_recurrent_classifier_is_its_encoders_final_state(bidirectional: bool) -> None:
    """Each direction has then read the whole text: no component is equal for texts without common tokens."""
    model = build("classifier", "rnn", pool="last", bidirectional=bidirectional)
    texts = [Example(np.array(ids), np.array([0]), i) for i, ids in enumerate(([4, 5, 6], [7, 8, 9, 10], [11]))]
    batch = collate_labels(BatchPlan([[0], [1], [2]], Widths(8, 1)), texts)
    states_BTC = model(batch)
    _, final = model.encoder.encode(batch.source_BS, RowLayout.from_source(batch))
    assert_same(states_BTC[:, 0], final[-1][0])
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert (states_BTC[first, 0] != states_BTC[second, 0]).all()


@pytest.mark.parametrize("pool", POOLS)
@BACKBONE
def test_a_label_depends_only_on_its_text(backbone: str, pool: str) -> None:
    """The text is alone in a row, packed with others if the layout allows it, or followed by padding."""
    model, texts = build("classifier", backbone, pool=pool), make_labelled_examples()
    single = [model(collate_labels(BatchPlan([[i]], Widths(16, 1)), texts))[0, 0] for i in range(9)]
    rows = [[4], [0], [], [8]] if backbone == "rnn" else [[4, 1, 7], [0, 2], [], [8, 3, 5, 6]]
    batch = collate_labels(BatchPlan(rows, Widths(48, 5)), texts)
    states_BTC = model(batch)
    for row, items in enumerate(rows):
        for index, item in enumerate(items):
            assert_same(states_BTC[row, index], single[item])
            assert batch.target_out_BT[row, index] == item % 3
    noise = torch.where(batch.source_segment_BS > 0, batch.source_BS, 33)
    assert_same(
        model(replace(batch, source_BS=noise))[batch.target_segment_BT > 0], states_BTC[batch.target_segment_BT > 0]
    )
    other = batch.source_BS.clone()
    other[0, 0] = 39 if other[0, 0] != 39 else 38
    assert_different(model(replace(batch, source_BS=other))[0, 0], states_BTC[0, 0])


@BACKBONE
def test_decoding_step_by_step_equals_the_forward_pass(backbone: str) -> None:
    model, texts = build("lm", backbone), examples(5, longest=40)
    assert isinstance(model, LanguageModel)
    for position in ("sinusoidal", "rotary", "learned") if backbone == "transformer" else ("",):
        model = build("lm", backbone, **({"position": position} if position else {}))
        batch = collate_lines(BatchPlan([[i] for i in range(5)], Widths(0, 48)), texts)
        full_BTV = model.project(model(batch)).log_softmax(-1)
        state = model.start(batch.target_in_BT[:, :0], batch.target_in_BT[:, :0] > 0)
        for t in range(41):
            logp_NV, state = model.step(batch.target_in_BT[:, t], state)
            real_B = batch.target_segment_BT[:, t] > 0
            assert_same(logp_NV[real_B], full_BTV[real_B, t], torch.float32)
        flipped, state = model.step(batch.target_in_BT[:, 41], state.select(torch.tensor([1, 0, 2, 3, 4])))
        assert flipped.exp().sum(-1).allclose(torch.ones(5, dtype=flipped.dtype), atol=1e-5)


def test_lines_can_be_packed() -> None:
    """Only a Transformer supports packed rows; the recurrent backbone needs one line per row."""
    model, texts = build("lm", "transformer"), examples(6)
    rows = [[0, 1, 2], [3], [5, 4]]
    states_BTC = model(batch := collate_lines(BatchPlan(rows, Widths(0, 40)), texts))
    for row, items in enumerate(rows):
        for number, item in enumerate(items, 1):
            line = collate_lines(BatchPlan([[item]], Widths(0, 12)), texts)
            assert_same(states_BTC[row][batch.target_segment_BT[row] == number], model(line)[0, : line.target_tokens])


@BACKBONE
def test_states_do_not_depend_on_later_tokens(backbone: str) -> None:
    model = build("lm", backbone)
    batch = collate_lines(BatchPlan([[0]], Widths(0, 16)), examples(1, longest=15, seed=4))
    length = batch.target_tokens
    before = model(batch)
    for t in range(1, length):
        other = batch.target_in_BT.clone()
        other[0, t] = 4 + (other[0, t] + 1) % 30
        after = model(replace(batch, target_in_BT=other))
        assert_same(after[0, :t], before[0, :t])
        assert_different(after[0, t:length], before[0, t:length])


@BACKBONE
@pytest.mark.parametrize("kind", ["lm", "classifier"])
def test_parameter_names_start_with_encoder_or_decoder(kind: str, backbone: str) -> None:
    names = [name.partition(".")[0] for name in collect_weights(build(kind, backbone))]
    assert set(names) == ({"decoder"} if kind == "lm" else {"encoder", "project"})  # an lm has tied embeddings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "lm", "attention": "local"}, "model.attention has no use in a language model"),
        ({"kind": "lm", "encoder_layers": 2}, "model.encoder_layers has no use"),
        ({"kind": "lm", "decoder_attention": "linformer"}, "attends to later tokens"),
        ({"kind": "lm", "position": "learned", "max_length": 8}, "model.max_length, which is 8"),
        ({"kind": "lm", "position": "tree"}, "model.position=tree"),
        ({"kind": "lm", "pool": "mean"}, "no setting 'model.pool'"),
        ({"kind": "lm", "backbone": "rnn", "input_feeding": True}, "model.input_feeding has no use"),
        ({"kind": "lm", "backbone": "rnn", "bidirectional": True}, "model.bidirectional has no use"),
        ({"kind": "lm", "backbone": "run"}, "no model.backbone called 'run'; did you mean 'rnn'?"),
        ({"kind": "classifier", "pool": "min"}, "no model.pool called 'min'"),
        ({"kind": "classifier", "decoder_layers": 1}, "a classifier, which has no decoder"),
        ({"kind": "classifier", "backbone": "rnn", "attention": "dot"}, "model.attention has no use"),
        ({"kind": "classifier", "backbone": "rnn", "pool": "min"}, "no model.pool called 'min'"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        settings_of(given)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("kind", ["lm", "classifier", "hybrid", "transformer"])
def test_relative_positions_are_accepted_with_any_kernel(kind: str, kernel: str) -> None:
    """Relative positions do not restrict the setting `kernel`, in any kind of model."""
    assert settings_of({"kind": kind, "position": "relative", "kernel": kernel}).kernel == kernel
    assert settings_of({"position": "relative", "kernel": "fused"}).kernel == "fused"
