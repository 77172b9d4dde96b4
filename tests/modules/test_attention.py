"""Attention with several heads: PyTorch's own numbers, in every width, and the lectures' plainest form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dragoman.kernels.attention import KERNELS, AttentionMask, RowLayout, unmask_empty_queries
from dragoman.modules.attention import CrossAttention, SelfAttention, StepContext, split_heads
from dragoman.modules.patterns import AttentionSettings
from dragoman.modules.positions import POSITIONS
from tolerance import differ, same

EVERY = pytest.mark.parametrize("name", KERNELS)


def of(**given: Any) -> AttentionSettings:
    return AttentionSettings(**{"width": 8, "heads": 2, **given})


def self_attention(settings: AttentionSettings, *, bidirectional: bool = True) -> SelfAttention:
    return SelfAttention(settings, POSITIONS[settings.position].relate, bidirectional=bidirectional)


def places(B: int, T: int) -> Tensor:
    return torch.arange(T).expand(B, T)


def kept(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return unmask_empty_queries(torch.rand(*shape) < 0.4)[:, None]


def test_heads_are_split() -> None:
    x_BTC = torch.arange(2 * 3 * 8.0).view(2, 3, 8)
    split = split_heads(x_BTC, 4)
    assert split.shape == (2, 4, 3, 2)
    assert torch.equal(split[1, 2, 0], x_BTC[1, 0, 4:6])


def torch_attention(*parts: Any, out: Any, heads: int) -> nn.MultiheadAttention:
    """PyTorch's own multi-head attention with these weights."""
    twin = nn.MultiheadAttention(out.in_features, heads, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        twin.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        twin.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        twin.out_proj.load_state_dict(out.state_dict())
    return twin


def stirred(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


@EVERY
def test_self_attention_is_pytorchs(name: str) -> None:
    module = self_attention(of(kernel=name))
    stirred(module)
    x_BTC, keep = torch.randn(3, 5, 8, dtype=torch.float64), kept(3, 5, 5)
    twin = torch_attention(module.query_key_value, out=module.out, heads=2)
    expected, _ = twin(x_BTC, x_BTC, x_BTC, attn_mask=~keep.expand(3, 2, 5, 5).flatten(0, 1))
    same(module(x_BTC, places(3, 5), AttentionMask(keep)), expected)


@EVERY
def test_cross_attention_is_pytorchs(name: str) -> None:
    module = CrossAttention(of(kernel=name))
    stirred(module)
    x_BTC, memory_BSC = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(3, 7, 8, dtype=torch.float64)
    keep = kept(3, 5, 7)
    twin = torch_attention(module.query, module.key_value, out=module.out, heads=2)
    expected, looks = twin(
        x_BTC,
        memory_BSC,
        memory_BSC,
        attn_mask=~keep.expand(3, 2, 5, 7).flatten(0, 1),
        average_attn_weights=False,
    )
    memory = module.project_memory(memory_BSC)
    same(module(x_BTC, memory, AttentionMask(keep)), expected)
    same(module(x_BTC, memory_BSC, AttentionMask(keep)), expected)
    same(module.weights(x_BTC, memory_BSC, AttentionMask(keep)), looks)


@EVERY
@pytest.mark.parametrize("position", [name for name, each in POSITIONS.items() if not each.features])
@pytest.mark.parametrize("projections", [True, False])
def test_step_by_step_is_all_at_once(name: str, position: str, projections: bool) -> None:
    module = self_attention(of(kernel=name, position=position, projections=projections, reach=3), bidirectional=False)
    stirred(module)
    N, T, K = 3, 6, 9
    x_NTC = torch.randn(N, T, 8, dtype=torch.float64)
    rows = RowLayout(torch.ones(N, T, dtype=torch.long), places(N, T), unpacked=True)
    whole = module(x_NTC, rows.position_BT, module.make_mask(rows))
    cache = (torch.full((N, 2, K, 4), 7.0).double(), torch.full((N, 2, K, 4), 7.0).double())  # not written: anything
    for at in range(T):
        place = torch.full((N, 1), at)
        now = StepContext(place, module.make_step_mask(place, cache[0].size(2), torch.float64))
        same(module.step(x_NTC[:, at : at + 1], cache, now), whole[:, at : at + 1], torch.float32)


@pytest.mark.parametrize(("query_width", "value_width"), [(4, 12), (16, 2), (0, 6), (2, 0)])
def test_queries_and_values_have_widths_of_their_own(query_width: int, value_width: int) -> None:
    settings = of(query_width=query_width, value_width=value_width)
    both, cross = self_attention(settings), CrossAttention(settings)
    q, k, v = both.split_qkv(both.query_key_value(torch.randn(3, 5, 8)), places(3, 5))
    assert q.shape == k.shape == (3, 2, 5, (query_width or 8) // 2)
    assert v.shape == (3, 2, 5, (value_width or 8) // 2)
    x_BTC = torch.randn(3, 5, 8)
    assert both(x_BTC, places(3, 5), AttentionMask()).shape == x_BTC.shape
    assert cross(x_BTC, cross.project_memory(torch.randn(3, 7, 8)), AttentionMask()).shape == x_BTC.shape


@EVERY
def test_the_plainest_form_has_no_weights_at_all(name: str) -> None:
    """q = k = v = x (lecture 9): output_i = sum_j softmax_j(x_i . x_j) x_j, in each head's share of the features."""
    settings = of(kernel=name, projections=False, scaled=False, heads=1)
    module = self_attention(settings)
    assert not list(module.parameters())
    x_BTC = torch.randn(3, 5, 8, dtype=torch.float64)
    expected = (x_BTC @ x_BTC.mT).softmax(-1) @ x_BTC
    same(module(x_BTC, places(3, 5), AttentionMask()), expected)
    cross, memory_BSC = CrossAttention(settings), torch.randn(3, 7, 8, dtype=torch.float64)
    expected = (x_BTC @ memory_BSC.mT).softmax(-1) @ memory_BSC
    same(cross(x_BTC, cross.project_memory(memory_BSC), AttentionMask()), expected)


@EVERY
def test_scaling_divides_scores_by_the_root_of_a_heads_width(name: str) -> None:
    """With scaling off, queries half as long give what scaled ones give at a head width of 4."""
    on, off = self_attention(of(kernel=name)), self_attention(of(kernel=name, scaled=False))
    stirred(on)
    off.double().load_state_dict(on.state_dict())
    x_BTC = torch.randn(3, 5, 8, dtype=torch.float64)
    differ(off(x_BTC, places(3, 5), AttentionMask()), on(x_BTC, places(3, 5), AttentionMask()))
    with torch.no_grad():
        off.query_key_value.weight[:8] /= 2
        off.query_key_value.bias[:8] /= 2
    same(off(x_BTC, places(3, 5), AttentionMask()), on(x_BTC, places(3, 5), AttentionMask()))
