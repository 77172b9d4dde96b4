"""Positions: the paper's sinusoids, number by number, and what holds for every entry of the menu."""

from __future__ import annotations

import math

import pytest
import torch

from dragoman.nn.position import POSITIONS, sinusoids
from tolerance import DEVICES, differ, same

EVERY = pytest.mark.parametrize("name", POSITIONS)


@pytest.mark.parametrize("width", [2, 3, 8, 64])
def test_sinusoids_are_those_of_the_paper(width: int) -> None:
    """Vaswani 2017, section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(the same)."""
    position_BT = torch.tensor([[0, 1, 2, 7], [100, 511, 3, 0]])
    found = sinusoids(position_BT, width)
    assert found.shape == (2, 4, width)
    for b in range(2):
        for t in range(4):
            for c in range(width):
                angle = int(position_BT[b, t]) / 10_000 ** ((c - c % 2) / width)
                expected = math.cos(angle) if c % 2 else math.sin(angle)
                assert found[b, t, c].item() == pytest.approx(expected, abs=1e-4 if angle > 50 else 1e-6)


def test_sinusoids_are_added() -> None:
    x_BTC = torch.randn(2, 3, 8)
    position_BT = torch.tensor([[0, 1, 2], [0, 0, 1]])
    found = POSITIONS["sinusoidal"](8).embed(x_BTC, position_BT)
    same(found, x_BTC + sinusoids(position_BT, 8))


def test_no_position_changes_nothing() -> None:
    x_BTC = torch.randn(2, 3, 8)
    assert torch.equal(POSITIONS["none"](8).embed(x_BTC, torch.tensor([[0, 1, 2], [0, 0, 1]])), x_BTC)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_a_position_keeps_shape_and_dtype_and_is_finite(name: str, dtype: torch.dtype, device: str) -> None:
    x_BTC = torch.randn(2, 600, 8, dtype=dtype, device=device)
    found = POSITIONS[name](8).to(device).embed(x_BTC, torch.arange(600, device=device).expand(2, -1))
    assert found.shape == x_BTC.shape
    assert found.dtype == dtype
    assert found.isfinite().all()


@EVERY
def test_a_position_is_a_function_of_the_number_not_of_the_place(name: str) -> None:
    """Packed sentences begin at 0 again, wherever in the row they lie."""
    position = POSITIONS[name](8)
    x_BTC = torch.randn(1, 1, 8).expand(1, 6, 8)
    found = position.embed(x_BTC, torch.tensor([[0, 1, 2, 0, 1, 2]]))
    same(found[:, :3], found[:, 3:])


@EVERY
def test_positions_differ_unless_there_are_none(name: str) -> None:
    found = POSITIONS[name](8).embed(torch.zeros(1, 3, 8), torch.tensor([[0, 1, 2]]))
    if name == "none":
        assert torch.equal(found[:, 0], found[:, 1])
    else:
        differ(found[:, 0], found[:, 1])
        differ(found[:, 1], found[:, 2])
