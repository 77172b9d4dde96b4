"""Residual connections and feed-forward networks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dragoman.modules.feedforward import FEEDFORWARDS, NORM_PLACES, FeedForward, FeedForwardSettings, Residual
from dragoman.modules.norms import NORMS, NormSettings
from tolerance import assert_same

ALL_NORM_PLACES = pytest.mark.parametrize("place", NORM_PLACES)
FORMULAS = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "swiglu": lambda x: x[..., :6] * x[..., :6].sigmoid() * x[..., 6:],
    "identity": lambda x: x,
}


class Double(nn.Module):
    """A sublayer without parameters: 2 x plus an argument; its `step` returns -x."""

    def forward(self, x_BTC: Tensor, more: float = 0.0) -> Tensor:
        return 2 * x_BTC + more

    def step(self, x_BTC: Tensor) -> Tensor:
        return -x_BTC


def make_residual(
    place: str, norm: str = "layer", dropout: float = 0.0, *, skip: bool = True
) -> tuple[Residual[Double], Tensor]:
    torch.manual_seed(1)
    return Residual(
        Double(), NORMS[norm](NormSettings(width=8)), norm_place=place, skip=skip, dropout=dropout
    ).eval(), torch.randn(2, 3, 8)


def test_norm_before_or_after_the_sublayer() -> None:
    layer = NORMS["layer"](NormSettings(width=8))
    pre, x = make_residual("pre")
    assert_same(pre(x, None, 3.0), x + 2 * layer(x) + 3.0)
    post, _ = make_residual("post")
    assert_same(post(x, None, 3.0), layer(x + 2 * x + 3.0))


def test_without_skip_the_input_is_not_added() -> None:
    layer = NORMS["layer"](NormSettings(width=8))
    pre, x = make_residual("pre", skip=False)
    assert_same(pre(x, None, 3.0), 2 * layer(x) + 3.0)
    post, _ = make_residual("post", skip=False)
    assert_same(post(x, None, 3.0), layer(2 * x + 3.0))


def test_norm_places() -> None:
    assert set(NORM_PLACES) == {"pre", "post"}


@ALL_NORM_PLACES
@pytest.mark.parametrize("norm", NORMS)
def test_normalize_input_is_the_input_of_the_sublayer(place: str, norm: str) -> None:
    residual, x = make_residual(place, norm)
    seen: list[Tensor] = []
    residual.sublayer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    residual(x, None)
    assert_same(residual.normalize_input(x, None), seen[0])


@ALL_NORM_PLACES
def test_function_replaces_the_sublayer(place: str) -> None:
    residual, x = make_residual(place)
    assert_same(residual(x, None, function=residual.sublayer), residual(x, None))
    norm, step = NORMS["layer"](NormSettings(width=8)), residual.sublayer.step
    assert_same(residual(x, None, function=step), x - norm(x) if place == "pre" else norm(x - x))


@ALL_NORM_PLACES
def test_dropout_applies_to_the_output_of_the_sublayer(place: str) -> None:
    """At rate 0.5 every element of the output is x, or x plus twice the output of the sublayer."""
    residual, x = make_residual(place, "none", 0.5)
    out = residual.train()(x, None)
    dropped, kept = torch.isclose(out, x), torch.isclose(out, x + 2 * 2 * x)
    assert (dropped | kept).all()
    assert dropped.any()
    assert kept.any()
    assert_same(residual.eval()(x, None), 3 * x)


@pytest.mark.parametrize("name", FORMULAS)
def test_feed_forward_equals_its_formula(name: str) -> None:
    """Vaswani 2017, section 3.3 (SwiGLU: Shazeer 2020, with activations a third narrower)."""
    kind = FEEDFORWARDS[name]
    assert kind is not None
    net = kind(FeedForwardSettings(width=6, feedforward_width=9)).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = FORMULAS[name](x @ net.wide.weight.T + net.wide.bias) @ net.narrow.weight.T + net.narrow.bias
    assert_same(net(x), expected)


@pytest.mark.parametrize("kind", [kind for kind in FEEDFORWARDS.values() if kind])
def test_feed_forward_computes_tokens_independently(kind: type[FeedForward]) -> None:
    net, x = kind(FeedForwardSettings(width=6, feedforward_width=9)).double(), torch.randn(2, 3, 6, dtype=torch.float64)
    assert_same(net(x)[1:, 2:], net(x[1:, 2:]))
