"""Dropout: the right share, the right scale, the same from the same seed; and its twin in PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from dragoman.modules.dropout import Dropout, sample_dropout_mask, use_row_slice
from tolerance import DEVICES, TOLERANCE, same

RATES = pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.5, 0.9])
EVERYWHERE = pytest.mark.parametrize("device", DEVICES)
MANY = 400_000


@RATES
@EVERYWHERE
def test_the_share_and_the_scale_are_right(rate: float, device: str) -> None:
    out = Dropout(rate)(torch.ones(MANY, device=device))
    dropped = (out == 0).double().mean().item()
    spread = math.sqrt(rate * (1 - rate) / MANY)
    assert abs(dropped - rate) < 5 * spread + 1 / 65_536
    assert out[out > 0].unique().tolist() == pytest.approx([1 / (1 - rate)], rel=2e-4)
    assert out.double().mean().item() == pytest.approx(1.0, abs=6 * spread / (1 - rate))


@RATES
def test_it_is_like_pytorchs(rate: float) -> None:
    """The same mean and the same spread of sums: dropping is independent from number to number."""
    x = torch.ones(2000, 257)
    ours, theirs = (out.sum(1).double() for out in (Dropout(rate)(x), F.dropout(x, rate)))
    spread = math.sqrt(257 * rate / (1 - rate))
    for sums in (ours, theirs):
        assert sums.mean().item() == pytest.approx(257, abs=5 * spread / math.sqrt(2000))
        assert sums.std().item() == pytest.approx(spread, rel=0.1)


def test_neighbours_are_independent() -> None:
    """Four numbers share a random integer, and yet no two of them share a fate."""
    fate = (sample_dropout_mask((MANY,), 0.5, torch.ones(())) > 0).double() * 2 - 1
    for distance in (1, 2, 3, 4, 8):
        assert abs((fate[distance:] * fate[:-distance]).mean().item()) < 5 / math.sqrt(MANY)


@EVERYWHERE
def test_it_is_a_function_of_the_seed(device: str) -> None:
    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return Dropout(0.3)(torch.ones(1000, device=device))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_every_call_draws_anew() -> None:
    dropout, x = Dropout(0.3), torch.ones(1000)
    assert not torch.equal(dropout(x), dropout(x))


@EVERYWHERE
def test_the_gradient_is_the_mask(device: str) -> None:
    x = torch.randn(50, 7, device=device, requires_grad=True)
    out = Dropout(0.4)(x)
    out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x.detach(), out.detach())
    assert x.grad.unique().tolist() == pytest.approx([0.0, 1 / 0.6], rel=1e-4)


@EVERYWHERE
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_adding_in_one_go_is_dropping_and_adding(device: str, training: bool, rate: float, dtype: torch.dtype) -> None:
    """Gradients too; and where autocast has rounded one of the two, the sum has the other's precision."""
    dropout = Dropout(rate).train(training)
    x, y = (torch.randn(50, 7, device=device, dtype=kind).requires_grad_() for kind in (torch.float32, dtype))
    found = []
    for way in (lambda: dropout.add(x, y), lambda: x + dropout(y)):
        torch.manual_seed(1)
        out = way()
        (out * torch.linspace(-1, 1, 7, device=device)).sum().backward()
        found.append([out, x.grad, y.grad])
        x.grad = y.grad = None
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert one.dtype == other.dtype
        same(one, other, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 5, 7), (0, 4)], ids=str)
def test_any_shape_and_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    out = Dropout(0.5)(torch.ones(shape, dtype=dtype))
    assert out.shape == shape
    assert out.dtype == dtype


def test_memory_may_lie_in_any_order() -> None:
    x = torch.randn(30, 40).T
    out = Dropout(0.5)(x)
    assert ((out == 0) | torch.isclose(out, 2 * x)).all()


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_it_is_off_when_not_training_and_at_rate_zero(rate: float) -> None:
    dropout, x = Dropout(rate), torch.randn(100)
    if rate:
        dropout.eval()
    state = torch.get_rng_state()
    assert dropout(x) is x
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("rate", [1e-9, 0.9999, 1 - 1e-9])
def test_rates_at_the_edge_are_no_trouble(rate: float) -> None:
    assert Dropout(rate)(torch.ones(1000)).isfinite().all()


@EVERYWHERE
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 0, 6), (2, 2, 2, 1)], ids=str)
def test_a_row_draws_the_same_however_its_grid_is_cut(device: str, passes: int, sizes: tuple[int, ...]) -> None:
    x, dropout, height = torch.randn(passes, 7, 5, 3, device=device), Dropout(0.4), 7

    def dropped(first: int, rows: int) -> torch.Tensor:
        torch.manual_seed(5)
        with use_row_slice(first, height, passes):
            dropout(x[:, :1].flatten(0, 1) if rows else x[:, :0].flatten(0, 1))  # what came before is drawn alike too
            return dropout(x[:, first : first + rows].flatten(0, 1)).view(passes, rows, 5, 3)

    whole = dropped(0, height)
    firsts = [sum(sizes[:n]) for n in range(len(sizes))]
    parts = [dropped(first, rows) for first, rows in zip(firsts, sizes, strict=True)]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert passes == 1 or not torch.equal(whole[0] == 0, whole[1] == 0)


def test_a_whole_grid_draws_as_if_nothing_were_said_of_it() -> None:
    x, found = torch.randn(6, 5, 3), []
    for height in (0, 6):
        torch.manual_seed(1)
        with use_row_slice(0, height):
            found.append(Dropout(0.5)(x))
    assert torch.equal(*found)
