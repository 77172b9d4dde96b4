"""Position encodings agree with the formulas of the papers, and all entries of the registry have common properties."""

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
from tolerance import DEVICES, assert_different, assert_same

ALL_SCHEMES = pytest.mark.parametrize(
    "name", [name for name, scheme in POSITIONS.items() if not scheme.source_features]
)


def make_settings(**settings: Any) -> AttentionSettings:
    return AttentionSettings(**{"width": 8, "heads": 2, "reach": 3, "max_length": 600, **settings})


def make_rows(*positions: list[int]) -> RowLayout:
    position_BT = torch.tensor(positions)
    return RowLayout(torch.ones_like(position_BT), position_BT)


@pytest.mark.parametrize("width", [2, 3, 8, 64])
def test_sinusoids_match_the_paper(width: int) -> None:
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


def test_sinusoids_are_added_to_embeddings() -> None:
    x_BTC, rows = torch.randn(2, 3, 8), make_rows([0, 1, 2], [0, 0, 1])
    assert_same(
        POSITIONS["sinusoidal"].embedding(make_settings())(x_BTC, rows), x_BTC + make_sinusoids(rows.position_BT, 8)
    )


def test_scheme_none_returns_its_input() -> None:
    x_BTC = torch.randn(2, 3, 8)
    assert torch.equal(POSITIONS["none"].embedding(make_settings())(x_BTC, make_rows([0, 1, 2], [0, 0, 1])), x_BTC)


def test_learned_positions_are_limited_to_max_length() -> None:
    embedding: Any = POSITIONS["learned"].embedding(make_settings(max_length=4))
    found = embedding(torch.zeros(1, 4, 8), make_rows([0, 1, 2, 3]))
    assert_same(found[0], embedding.table.weight * 8**0.5)
    with pytest.raises(UserError, match=r"a sentence of 5 tokens .* model\.max_length is 4"):
        embedding(torch.zeros(1, 5, 8), make_rows([0, 1, 2, 3, 4]))


@ALL_SCHEMES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_schemes_keep_shape_and_dtype_and_stay_finite(name: str, dtype: torch.dtype, device: str) -> None:
    scheme, position_BT = POSITIONS[name], torch.arange(600, device=device).expand(2, -1)
    rows = RowLayout(torch.ones_like(position_BT), position_BT)
    x_BTC = torch.randn(2, 600, 8, dtype=dtype, device=device)
    found = scheme.embedding(make_settings()).to(device, dtype)(x_BTC, rows)
    position = scheme.attention(make_settings()).to(device, dtype)
    q = torch.randn(2, 2, 600, 4, dtype=dtype, device=device)
    out = position.attend(
        KERNELS["auto"],
        position.rotate(q, position_BT),
        q,
        q,
        AttentionMask(relative_position=position.compute_relative_in_rows(rows)),
    )
    for tensor, like in ((found, x_BTC), (out, q)):
        assert tensor.shape == like.shape
        assert tensor.dtype == dtype
        assert tensor.isfinite().all()


def attend_with_scheme(name: str, rows: RowLayout, x_BTC: Tensor, seed: int = 1) -> Tensor:
    """Apply both parts of a scheme, with attention without projections: out_BHTD."""
    torch.manual_seed(seed)
    scheme, settings = POSITIONS[name], make_settings()
    x_BTC, position = scheme.embedding(settings).double()(x_BTC, rows), scheme.attention(settings).double()
    x_BTC = position.add_positions(x_BTC, rows.position_BT)
    q = position.rotate(x_BTC.unflatten(-1, (2, 4)).transpose(1, 2), rows.position_BT)
    mask = AttentionMask(
        (rows.segment_BT[:, :, None] == rows.segment_BT[:, None])[:, None],
        relative_position=position.compute_relative_in_rows(rows),
    )
    return position.attend(KERNELS["reference"], q, q, x_BTC.unflatten(-1, (2, 4)).transpose(1, 2), mask)


@ALL_SCHEMES
def test_output_depends_on_positions_not_on_columns(name: str) -> None:
    """The positions of packed sentences restart at 0, so equal sentences in a row have equal outputs."""
    x_BTC = torch.randn(1, 3, 8, dtype=torch.float64).repeat(1, 2, 1)
    packed = RowLayout(torch.tensor([[1, 1, 1, 2, 2, 2]]), torch.tensor([[0, 1, 2, 0, 1, 2]]))
    found = attend_with_scheme(name, packed, x_BTC)
    assert_same(found[:, :, :3], found[:, :, 3:])
    unpacked_rows = RowLayout(torch.tensor([[1, 1, 1]]), torch.tensor([[0, 1, 2]]), is_unpacked=True)
    assert_same(attend_with_scheme(name, unpacked_rows, x_BTC[:, :3]), found[:, :, :3])


@ALL_SCHEMES
def test_order_matters_except_without_positions(name: str) -> None:
    x_BTC = torch.randn(1, 5, 8, dtype=torch.float64)
    order = torch.tensor([3, 0, 4, 1, 2])
    rows = make_rows([0, 1, 2, 3, 4])
    permuted, expected = (
        attend_with_scheme(name, rows, x_BTC[:, order]),
        attend_with_scheme(name, rows, x_BTC)[:, :, order],
    )
    if POSITIONS[name] == PositionScheme():
        assert_same(permuted, expected)
    else:
        assert_different(permuted, expected)


@pytest.mark.parametrize("name", ["relative", "rotary", "alibi"])
def test_relative_schemes_depend_only_on_distances(name: str) -> None:
    """Shifting all positions does not change the output."""
    x_BTC = torch.randn(1, 4, 8, dtype=torch.float64)
    assert_same(
        attend_with_scheme(name, make_rows([7, 8, 9, 10]), x_BTC),
        attend_with_scheme(name, make_rows([0, 1, 2, 3]), x_BTC),
        torch.float32,
    )


def test_rotary_matches_the_paper() -> None:
    """Su 2021, equation 15: features 2i and 2i+1 are rotated by m / 10000^(2i/d)."""
    x = torch.randn(1, 1, 3, 6, dtype=torch.float64)
    found = POSITIONS["rotary"].attention(make_settings()).rotate(x, torch.tensor([[0, 1, 5]]))
    for t, m in enumerate((0, 1, 5)):
        for i in range(3):
            angle = m / 10_000 ** (2 * i / 6)
            a, b = x[0, 0, t, 2 * i].item(), x[0, 0, t, 2 * i + 1].item()
            rotated = [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
            assert found[0, 0, t, 2 * i : 2 * i + 2].tolist() == pytest.approx(rotated, abs=1e-6)


def test_alibi_matches_the_paper() -> None:
    """Press 2022, section 3: slopes 2^(-8h/n); here for keys on both sides."""
    q, k, v = torch.randn(3, 1, 2, 4, 6, dtype=torch.float64)
    position = POSITIONS["alibi"].attention(make_settings())
    relative_position = position.compute_relative(torch.arange(4)[None], torch.arange(4)[None])
    slope = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)
    distance = (torch.arange(4)[:, None] - torch.arange(4)).abs()
    bias = -slope[:, None, None] * distance
    expected = compute_attention_weights(q, k, AttentionMask(bias=bias)) @ v
    for kernel in KERNELS.values():
        assert_same(position.attend(kernel, q, k, v, AttentionMask(relative_position=relative_position)), expected)


def test_relative_matches_the_paper() -> None:
    """Shaw 2018, equations 3 and 4, with a vector materialized for every pair."""
    torch.manual_seed(0)
    position = Relative(make_settings()).double()
    q, k, v = torch.randn(3, 2, 2, 9, 4, dtype=torch.float64)
    relative_position = position.compute_relative(torch.arange(9)[None], torch.arange(9)[None])
    assert relative_position is not None
    vectors = (torch.arange(9)[None] - torch.arange(9)[:, None]).clamp(-3, 3) + 3
    key_QKD, value_QKD = position.key_RD[vectors], position.value_RD[vectors]
    score = (q[..., :, None, :] * (k[..., None, :, :] + key_QKD)).sum(-1) / 4**0.5
    weight = score.softmax(-1)
    expected = (weight[..., None] * (v[..., None, :, :] + value_QKD)).sum(-2)
    assert_same(position.attend(KERNELS["auto"], q, k, v, AttentionMask(relative_position=relative_position)), expected)
