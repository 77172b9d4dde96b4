"""Position schemes: the papers' formulas, number by number, and what holds for every entry of the registry."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dragoman.errors import UserError
from dragoman.kernels.attention import KERNELS, AttentionMask, RowLayout, compute_attention_weights
from dragoman.modules.patterns import AttentionSettings
from dragoman.modules.positions import POSITIONS, PositionScheme, Relative, make_sinusoids
from tolerance import DEVICES, differ, same

EVERY = pytest.mark.parametrize("name", [name for name, each in POSITIONS.items() if not each.features])


def of(**given: Any) -> AttentionSettings:
    return AttentionSettings(**{"width": 8, "heads": 2, "reach": 3, "max_length": 600, **given})


def rows(*positions: list[int]) -> RowLayout:
    position_BT = torch.tensor(positions)
    return RowLayout(torch.ones_like(position_BT), position_BT)


@pytest.mark.parametrize("width", [2, 3, 8, 64])
def test_sinusoids_are_those_of_the_paper(width: int) -> None:
    """Vaswani 2017, section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(the same)."""
    position_BT = torch.tensor([[0, 1, 2, 7], [100, 511, 3, 0]])
    found = make_sinusoids(position_BT, width)
    assert found.shape == (2, 4, width)
    for b in range(2):
        for t in range(4):
            for c in range(width):
                angle = int(position_BT[b, t]) / 10_000 ** ((c - c % 2) / width)
                expected = math.cos(angle) if c % 2 else math.sin(angle)
                assert found[b, t, c].item() == pytest.approx(expected, abs=1e-4 if angle > 50 else 1e-6)


def test_sinusoids_are_added() -> None:
    x_BTC, some = torch.randn(2, 3, 8), rows([0, 1, 2], [0, 0, 1])
    same(POSITIONS["sinusoidal"].embed(of())(x_BTC, some), x_BTC + make_sinusoids(some.position_BT, 8))


def test_no_position_changes_nothing() -> None:
    x_BTC = torch.randn(2, 3, 8)
    assert torch.equal(POSITIONS["none"].embed(of())(x_BTC, rows([0, 1, 2], [0, 0, 1])), x_BTC)


def test_a_learned_position_has_a_vector_of_its_own_and_an_end() -> None:
    embed: Any = POSITIONS["learned"].embed(of(max_length=4))
    found = embed(torch.zeros(1, 4, 8), rows([0, 1, 2, 3]))
    same(found[0], embed.table.weight * 8**0.5)
    with pytest.raises(UserError, match=r"a sentence of 5 tokens .* model\.max_length is 4"):
        embed(torch.zeros(1, 5, 8), rows([0, 1, 2, 3, 4]))


@EVERY
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_a_scheme_keeps_shape_and_dtype_and_is_finite(name: str, dtype: torch.dtype, device: str) -> None:
    scheme, position_BT = POSITIONS[name], torch.arange(600, device=device).expand(2, -1)
    some = RowLayout(torch.ones_like(position_BT), position_BT)
    x_BTC = torch.randn(2, 600, 8, dtype=dtype, device=device)
    found = scheme.embed(of()).to(device, dtype)(x_BTC, some)
    relate = scheme.relate(of()).to(device, dtype)
    q = torch.randn(2, 2, 600, 4, dtype=dtype, device=device)
    out = relate.attend(
        KERNELS["auto"],
        relate.rotate(q, position_BT),
        q,
        q,
        AttentionMask(relative_position=relate.compute_relative_in_rows(some)),
    )
    for tensor, like in ((found, x_BTC), (out, q)):
        assert tensor.shape == like.shape
        assert tensor.dtype == dtype
        assert tensor.isfinite().all()


def attended(name: str, some: RowLayout, x_BTC: Tensor, seed: int = 1) -> Tensor:
    """Both halves of a scheme around an attention without weights."""
    torch.manual_seed(seed)
    scheme = POSITIONS[name]
    x_BTC, relate = scheme.embed(of()).double()(x_BTC, some), scheme.relate(of()).double()
    q = relate.rotate(x_BTC.unflatten(-1, (2, 4)).transpose(1, 2), some.position_BT)
    mask = AttentionMask(
        (some.segment_BT[:, :, None] == some.segment_BT[:, None])[:, None],
        relative_position=relate.compute_relative_in_rows(some),
    )
    return relate.attend(KERNELS["reference"], q, q, x_BTC.unflatten(-1, (2, 4)).transpose(1, 2), mask)


@EVERY
def test_a_place_is_a_function_of_the_number_not_of_where_in_the_row(name: str) -> None:
    """Packed sentences begin at 0 again, wherever in the row they lie."""
    x_BTC = torch.randn(1, 3, 8, dtype=torch.float64).repeat(1, 2, 1)
    twice = RowLayout(torch.tensor([[1, 1, 1, 2, 2, 2]]), torch.tensor([[0, 1, 2, 0, 1, 2]]))
    found = attended(name, twice, x_BTC)
    same(found[:, :, :3], found[:, :, 3:])
    alone = RowLayout(torch.tensor([[1, 1, 1]]), torch.tensor([[0, 1, 2]]), unpacked=True)
    same(attended(name, alone, x_BTC[:, :3]), found[:, :, :3])


@EVERY
def test_without_a_scheme_order_does_not_matter_and_with_one_it_does(name: str) -> None:
    x_BTC = torch.randn(1, 5, 8, dtype=torch.float64)
    order = torch.tensor([3, 0, 4, 1, 2])
    some = rows([0, 1, 2, 3, 4])
    turned, straight = attended(name, some, x_BTC[:, order]), attended(name, some, x_BTC)[:, :, order]
    if POSITIONS[name] == PositionScheme():
        same(turned, straight)
    else:
        differ(turned, straight)


@pytest.mark.parametrize("name", ["relative", "rotary", "alibi"])
def test_relative_schemes_know_distances_alone(name: str) -> None:
    """The same sentence further to the right is the same sentence."""
    x_BTC = torch.randn(1, 4, 8, dtype=torch.float64)
    same(attended(name, rows([7, 8, 9, 10]), x_BTC), attended(name, rows([0, 1, 2, 3]), x_BTC), torch.float32)


def test_rotary_turns_pairs_of_features_by_the_papers_angles() -> None:
    """Su 2021, equation 15: features 2i and 2i+1 are turned by m / 10000^(2i/d)."""
    x = torch.randn(1, 1, 3, 6, dtype=torch.float64)
    found = POSITIONS["rotary"].relate(of()).rotate(x, torch.tensor([[0, 1, 5]]))
    for t, m in enumerate((0, 1, 5)):
        for i in range(3):
            angle = m / 10_000 ** (2 * i / 6)
            a, b = x[0, 0, t, 2 * i].item(), x[0, 0, t, 2 * i + 1].item()
            turned = [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
            assert found[0, 0, t, 2 * i : 2 * i + 2].tolist() == pytest.approx(turned, abs=1e-6)


def test_alibi_lowers_scores_with_the_distance() -> None:
    """Press 2022, section 3: slopes 2^(-8h/n); here for keys on both sides."""
    q, k, v = torch.randn(3, 1, 2, 4, 6, dtype=torch.float64)
    relate = POSITIONS["alibi"].relate(of())
    gap = relate.compute_relative(torch.arange(4)[None], torch.arange(4)[None])
    slope = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)
    distance = (torch.arange(4)[:, None] - torch.arange(4)).abs()
    bias = -slope[:, None, None] * distance
    expected = compute_attention_weights(q, k, AttentionMask(bias=bias)) @ v
    for kernel in KERNELS.values():
        same(relate.attend(kernel, q, k, v, AttentionMask(relative_position=gap)), expected)


def test_relative_is_its_formula_pair_by_pair() -> None:
    """Shaw 2018, equations 3 and 4, with the vectors of every pair written out."""
    torch.manual_seed(0)
    relate = Relative(of()).double()
    q, k, v = torch.randn(3, 2, 2, 9, 4, dtype=torch.float64)
    gap = relate.compute_relative(torch.arange(9)[None], torch.arange(9)[None])
    assert gap is not None
    vectors = (torch.arange(9)[None] - torch.arange(9)[:, None]).clamp(-3, 3) + 3
    key_QKD, value_QKD = relate.key_RD[vectors], relate.value_RD[vectors]
    score = (q[..., :, None, :] * (k[..., None, :, :] + key_QKD)).sum(-1) / 4**0.5
    weight = score.softmax(-1)
    expected = (weight[..., None] * (v[..., None, :, :] + value_QKD)).sum(-2)
    same(relate.attend(KERNELS["auto"], q, k, v, AttentionMask(relative_position=gap)), expected)
