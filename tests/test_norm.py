"""Norms: by their formulas, and what holds for every entry of the menu."""

from __future__ import annotations

import pytest
import torch

from dragoman.nn.norm import NORMS
from tolerance import same

EVERY = pytest.mark.parametrize("name", NORMS)
FORMULAS = {
    "layer": lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt(),
    "rms": lambda x: x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt(),
    "none": lambda x: x,
}


def test_every_norm_has_its_formula() -> None:
    assert FORMULAS.keys() == NORMS.keys()


@EVERY
@pytest.mark.parametrize("width", [2, 8, 33])
def test_a_norm_is_its_formula(name: str, width: int) -> None:
    x_BTC = torch.randn(3, 4, width, dtype=torch.float64) * 3 + 1
    same(NORMS[name](width).double()(x_BTC), FORMULAS[name](x_BTC))


@EVERY
def test_a_token_is_normed_alone(name: str) -> None:
    norm, x_BTC = NORMS[name](8), torch.randn(3, 4, 8)
    same(norm(x_BTC)[1:2, 2:3], norm(x_BTC[1:2, 2:3]))


@EVERY
def test_zeros_are_no_trouble(name: str) -> None:
    x_BTC = torch.zeros(1, 2, 8, requires_grad=True)
    NORMS[name](8)(x_BTC).sum().backward()
    assert x_BTC.grad is not None
    assert x_BTC.grad.isfinite().all()


@EVERY
def test_a_norm_can_learn_its_scale(name: str) -> None:
    shapes = {parameter.shape for parameter in NORMS[name](8).parameters()}
    assert shapes == (set() if name == "none" else {torch.Size([8])})
