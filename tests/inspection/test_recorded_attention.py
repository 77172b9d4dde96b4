"""Recorded attention weights are those with which the model computes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dragoman.inspection.attention import record_attention
from dragoman.kernels.attention import KERNELS, AttentionMask, RowLayout
from dragoman.modules.attention import CrossAttention, SelfAttention
from dragoman.modules.patterns import PATTERNS, AttentionSettings, FullAttention, Linformer
from dragoman.modules.positions import POSITIONS
from toy_models import SMALL_TRANSFORMER, build_small_model, collate_rows, make_examples, make_model_sections
from toy_sections import settings_of

T = 23  # more than one block of every pattern
PAIRS = [  # patterns that are not causal cannot be used in a decoder
    (pattern, position, bidirectional)
    for pattern, position, bidirectional in product(PATTERNS, POSITIONS, (True, False))
    if POSITIONS[position].attention.needed_distance in PATTERNS[pattern].supported_distances
    and (bidirectional or PATTERNS[pattern].causal)
]
WITH_ATTENTION = {
    name: section
    for name, section in make_model_sections().items()
    if any(isinstance(module, SelfAttention | CrossAttention) for module in build_small_model(section).modules())
    or settings_of(section).aligns
}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def make_rows() -> RowLayout:
    """Return two rows with different amounts of padding, and a chain of words as the tree of each."""
    real_BT = torch.arange(T) < torch.tensor([[T], [T - 4]])
    offset_TT = torch.arange(T)[None, :] - torch.arange(T)[:, None]
    features = {"tree_distance": offset_TT.expand(2, -1, -1).to(torch.int8)}
    return RowLayout.from_padding_mask(real_BT, features)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("pattern", "position", "bidirectional"), PAIRS)
def test_weights_times_values_are_the_output(pattern: str, position: str, bidirectional: bool, kernel: str) -> None:
    torch.manual_seed(0)
    settings = AttentionSettings(
        width=8, heads=2, attention=pattern, decoder_attention=pattern, position=position, kernel=kernel,
        max_length=40, window=3, block=2, rank=4, reach=3,
    )  # fmt: skip
    attention = SelfAttention(settings, POSITIONS[position].attention, bidirectional=bidirectional)
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    rows, x_BTC = make_rows(), torch.randn(2, T, 8)
    mask = attention.make_mask(rows)
    weight_BHTK = attention.compute_weights(x_BTC, rows.position_BT, mask)
    real_BT = rows.real_BT  # queries of padding may attend to anything
    assert_near(weight_BHTK.sum(-1).transpose(1, 2)[real_BT], torch.ones(int(real_BT.sum()), 2))
    assert weight_BHTK.min() >= 0
    v_BHTD = attention.split_qkv(attention.query_key_value(x_BTC), rows.position_BT)[2]
    if isinstance(attention.pattern, Linformer):
        v_BHTD = attention.pattern.project(v_BHTD, attention.pattern.value_TR, mask)
    full = FullAttention(settings, bidirectional=bidirectional).make_mask(rows, attention.relate)
    expected = attention.project_output(attention.relate.apply_weights(weight_BHTK, v_BHTD, full))
    assert_near(attention(x_BTC, rows.position_BT, mask)[real_BT], expected[real_BT])


@pytest.mark.parametrize("kernel", KERNELS)
def test_cross_attention_weights_times_values_are_the_output(kernel: str) -> None:
    torch.manual_seed(0)
    attention = CrossAttention(AttentionSettings(width=8, heads=2, kernel=kernel))
    x_BTC, memory_BSC = torch.randn(2, 5, 8), torch.randn(2, 7, 8)
    mask = AttentionMask((torch.arange(7) < torch.tensor([[7], [4]]))[:, None, None])
    weight_BHTS = attention.compute_weights(x_BTC, memory_BSC, mask)
    expected = attention.project_output(weight_BHTS @ attention.project_memory(memory_BSC)[1])
    assert_near(attention(x_BTC, memory_BSC, mask), expected)
    assert not weight_BHTS[1, ..., 4:].any()


@pytest.mark.parametrize("section", WITH_ATTENTION.values(), ids=WITH_ATTENTION.keys())
def test_every_layer_is_recorded(section: dict[str, Any]) -> None:
    """There is one matrix per layer, its rows sum to one, and the model computes the same as without recording."""
    model, examples = build_small_model(section, dtype=torch.float32), make_examples(section)
    batch, settings = collate_rows(section, [[0], [1]], examples), settings_of(section)
    with torch.no_grad():
        before = model(batch)
        with record_attention(model) as recorded:
            assert torch.equal(model(batch), before)
    assert not any(module._forward_pre_hooks for module in model.modules())
    for part, weights in recorded.items():
        real_BQ = (batch.source_segment_BS if part == "encoder" else batch.target_segment_BT) > 0
        for weight_BHQK in weights:
            sum_NH = weight_BHQK.sum(-1).transpose(1, 2)[real_BQ]
            assert_near(sum_NH, torch.ones_like(sum_NH))
    if hasattr(model, "compute_alignment") and model.aligns:
        layers = [weight_BHTS.mean(1) for weight_BHTS in recorded["cross"]]
        assert len(layers) == model.attention_layers
        for number, weight_BTS in enumerate(layers):
            assert_near(weight_BTS, model.compute_alignment(batch, number))
    if settings.kind == "transformer":
        assert [len(recorded[part]) for part in ("encoder", "decoder")] == [
            settings.encoder_depth,
            settings.decoder_depth,
        ]


def test_other_threads_are_not_recorded() -> None:
    model, examples = build_small_model(SMALL_TRANSFORMER, dtype=torch.float32), make_examples(SMALL_TRANSFORMER)
    own, other = (collate_rows(SMALL_TRANSFORMER, [[row]], examples) for row in (0, 1))
    with torch.no_grad(), record_attention(model) as expected:
        model(own)
    with torch.no_grad(), record_attention(model) as recorded, ThreadPoolExecutor(1) as executor:
        executor.submit(torch.inference_mode()(model), other).result()
        model(own)
    assert recorded.keys() == expected.keys()
    for part, weights in expected.items():
        assert len(recorded[part]) == len(weights)
        for found, weight_BHQK in zip(recorded[part], weights, strict=True):
            assert_near(found, weight_BHQK)


def test_a_planted_head_attends_to_the_previous_token() -> None:
    """A relative position vector that matches every query pulls all weight to the key before it."""
    model = build_small_model({**SMALL_TRANSFORMER, "position": "relative"}, dtype=torch.float32)
    attention = model.encoder.layers[0].attention.sublayer
    with torch.no_grad():
        attention.query_key_value.weight.zero_()
        attention.query_key_value.bias.zero_()[:8] = 1.0  # every query is the same
        attention.relate.key_RD.zero_()[attention.settings.reach - 1] = 100.0  # the bucket of relative position -1
    section = {**SMALL_TRANSFORMER, "position": "relative"}
    with torch.no_grad(), record_attention(model) as recorded:
        model(collate_rows(section, [[0]], make_examples(section)))
    weight_HTT: Tensor = recorded["encoder"][0][0]
    assert float(weight_HTT.diagonal(-1, dim1=1, dim2=2).min()) > 0.99
