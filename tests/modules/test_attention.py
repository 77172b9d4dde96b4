"""Multi-head attention agrees with PyTorch's module, for all kernels and widths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dragoman.kernels.attention import KERNELS, AttentionMask, RowLayout, unmask_empty_queries
from dragoman.modules.attention import CrossAttention, SelfAttention, StepContext, split_heads
from dragoman.modules.patterns import AttentionSettings
from dragoman.modules.positions import POSITIONS
from tolerance import assert_different, assert_same

ALL_KERNELS = pytest.mark.parametrize("name", KERNELS)


def make_settings(**settings: Any) -> AttentionSettings:
    return AttentionSettings(**{"width": 8, "heads": 2, **settings})


def make_self_attention(settings: AttentionSettings, *, bidirectional: bool = True) -> SelfAttention:
    return SelfAttention(settings, POSITIONS[settings.position].attention, bidirectional=bidirectional)


def make_positions(B: int, T: int) -> Tensor:
    return torch.arange(T).expand(B, T)


def make_random_mask(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return unmask_empty_queries(torch.rand(*shape) < 0.4)[:, None]


def test_split_heads() -> None:
    x_BTC = torch.arange(2 * 3 * 8.0).view(2, 3, 8)
    split = split_heads(x_BTC, 4)
    assert split.shape == (2, 4, 3, 2)
    assert torch.equal(split[1, 2, 0], x_BTC[1, 0, 4:6])


def make_torch_attention(*parts: Any, out: Any, heads: int) -> nn.MultiheadAttention:
    """Return PyTorch's multi-head attention with these weights."""
    reference = nn.MultiheadAttention(out.in_features, heads, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        reference.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        reference.out_proj.load_state_dict(out.state_dict())
    return reference


def randomize_parameters(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


@ALL_KERNELS
def test_self_attention_matches_pytorch(name: str) -> None:
    module = make_self_attention(make_settings(kernel=name))
    randomize_parameters(module)
    x_BTC, allowed = torch.randn(3, 5, 8, dtype=torch.float64), make_random_mask(3, 5, 5)
    reference = make_torch_attention(module.query_key_value, out=module.out, heads=2)
    expected, _ = reference(x_BTC, x_BTC, x_BTC, attn_mask=~allowed.expand(3, 2, 5, 5).flatten(0, 1))
    assert_same(module(x_BTC, make_positions(3, 5), AttentionMask(allowed)), expected)


@ALL_KERNELS
def test_cross_attention_matches_pytorch(name: str) -> None:
    module = CrossAttention(make_settings(kernel=name))
    randomize_parameters(module)
    x_BTC, memory_BSC = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(3, 7, 8, dtype=torch.float64)
    allowed = make_random_mask(3, 5, 7)
    reference = make_torch_attention(module.query, module.key_value, out=module.out, heads=2)
    expected, expected_weights = reference(
        x_BTC,
        memory_BSC,
        memory_BSC,
        attn_mask=~allowed.expand(3, 2, 5, 7).flatten(0, 1),
        average_attn_weights=False,
    )
    memory = module.project_memory(memory_BSC)
    assert_same(module(x_BTC, memory, AttentionMask(allowed)), expected)
    assert_same(module(x_BTC, memory_BSC, AttentionMask(allowed)), expected)
    assert_same(module.compute_weights(x_BTC, memory_BSC, AttentionMask(allowed)), expected_weights)


@ALL_KERNELS
@pytest.mark.parametrize("position", [name for name, scheme in POSITIONS.items() if not scheme.source_features])
@pytest.mark.parametrize("projections", [True, False])
def test_decoding_steps_equal_one_forward_pass(name: str, position: str, projections: bool) -> None:
    module = make_self_attention(
        make_settings(kernel=name, position=position, projections=projections, reach=3), bidirectional=False
    )
    randomize_parameters(module)
    N, T, K = 3, 6, 9
    x_NTC = torch.randn(N, T, 8, dtype=torch.float64)
    rows = RowLayout(torch.ones(N, T, dtype=torch.long), make_positions(N, T), is_unpacked=True)
    expected = module(x_NTC, rows.position_BT, module.make_mask(rows))
    unwritten = torch.full((N, 2, K, 4), 7.0, dtype=torch.float64)  # arbitrary values at unused positions
    cache = (unwritten, unwritten.clone())
    for t in range(T):
        position_N1 = torch.full((N, 1), t)
        context = StepContext(position_N1, module.make_step_mask(position_N1, cache[0].size(2), torch.float64))
        assert_same(module.step(x_NTC[:, t : t + 1], cache, context), expected[:, t : t + 1], torch.float32)


@pytest.mark.parametrize(("query_width", "value_width"), [(4, 12), (16, 2), (0, 6), (2, 0)])
def test_widths_of_queries_and_values_are_independent(query_width: int, value_width: int) -> None:
    settings = make_settings(query_width=query_width, value_width=value_width)
    module, cross = make_self_attention(settings), CrossAttention(settings)
    q, k, v = module.split_qkv(module.query_key_value(torch.randn(3, 5, 8)), make_positions(3, 5))
    assert q.shape == k.shape == (3, 2, 5, (query_width or 8) // 2)
    assert v.shape == (3, 2, 5, (value_width or 8) // 2)
    x_BTC = torch.randn(3, 5, 8)
    assert module(x_BTC, make_positions(3, 5), AttentionMask()).shape == x_BTC.shape
    assert cross(x_BTC, cross.project_memory(torch.randn(3, 7, 8)), AttentionMask()).shape == x_BTC.shape


@ALL_KERNELS
def test_attention_without_projections_has_no_parameters(name: str) -> None:
    """The input serves as queries, keys and values: output_i = sum_j softmax_j(x_i . x_j) x_j."""
    settings = make_settings(kernel=name, projections=False, scaled=False, heads=1)
    module = make_self_attention(settings)
    assert not list(module.parameters())
    x_BTC = torch.randn(3, 5, 8, dtype=torch.float64)
    expected = (x_BTC @ x_BTC.mT).softmax(-1) @ x_BTC
    assert_same(module(x_BTC, make_positions(3, 5), AttentionMask()), expected)
    cross, memory_BSC = CrossAttention(settings), torch.randn(3, 7, 8, dtype=torch.float64)
    expected = (x_BTC @ memory_BSC.mT).softmax(-1) @ memory_BSC
    assert_same(cross(x_BTC, cross.project_memory(memory_BSC), AttentionMask()), expected)


@ALL_KERNELS
def test_scaling_divides_scores_by_the_root_of_the_head_width(name: str) -> None:
    """At head width 4, attention without scaling, but with queries of half the length, equals scaled attention."""
    scaled, unscaled = (
        make_self_attention(make_settings(kernel=name)),
        make_self_attention(make_settings(kernel=name, scaled=False)),
    )
    randomize_parameters(scaled)
    unscaled.double().load_state_dict(scaled.state_dict())
    x_BTC = torch.randn(3, 5, 8, dtype=torch.float64)
    assert_different(
        unscaled(x_BTC, make_positions(3, 5), AttentionMask()), scaled(x_BTC, make_positions(3, 5), AttentionMask())
    )
    with torch.no_grad():
        unscaled.query_key_value.weight[:8] /= 2
        unscaled.query_key_value.bias[:8] /= 2
    assert_same(
        unscaled(x_BTC, make_positions(3, 5), AttentionMask()), scaled(x_BTC, make_positions(3, 5), AttentionMask())
    )
