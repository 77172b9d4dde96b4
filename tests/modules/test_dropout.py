"""Dropout: rate and scale are correct, agree with PyTorch, and depend only on the seed."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from dragoman.modules.dropout import Dropout, sample_dropout_mask, use_dropout_rows
from tolerance import DEVICES, TOLERANCE, assert_same

RATES = pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.5, 0.9])
ALL_DEVICES = pytest.mark.parametrize("device", DEVICES)
ELEMENTS = 400_000


@RATES
@ALL_DEVICES
def test_rate_and_scale(rate: float, device: str) -> None:
    out = Dropout(rate)(torch.ones(ELEMENTS, device=device))
    dropped = (out == 0).double().mean().item()
    deviation = math.sqrt(rate * (1 - rate) / ELEMENTS)
    assert abs(dropped - rate) < 5 * deviation + 1 / 65_536
    assert out[out > 0].unique().tolist() == pytest.approx([1 / (1 - rate)], rel=2e-4)
    assert out.double().mean().item() == pytest.approx(1.0, abs=6 * deviation / (1 - rate))


@RATES
def test_sums_are_distributed_as_in_pytorch(rate: float) -> None:
    """Mean and standard deviation of sums are the same, since elements are dropped independently."""
    x = torch.ones(2000, 257)
    ours, theirs = (out.sum(1).double() for out in (Dropout(rate)(x), F.dropout(x, rate)))
    deviation = math.sqrt(257 * rate / (1 - rate))
    for sums in (ours, theirs):
        assert sums.mean().item() == pytest.approx(257, abs=5 * deviation / math.sqrt(2000))
        assert sums.std().item() == pytest.approx(deviation, rel=0.1)


def test_elements_are_independent() -> None:
    """Elements that are sampled from the same random integer are uncorrelated."""
    signs = (sample_dropout_mask((ELEMENTS,), 0.5, torch.ones(())) > 0).double() * 2 - 1
    for distance in (1, 2, 3, 4, 8):
        assert abs((signs[distance:] * signs[:-distance]).mean().item()) < 5 / math.sqrt(ELEMENTS)


@ALL_DEVICES
def test_mask_depends_on_the_seed(device: str) -> None:
    def apply_dropout(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return Dropout(0.3)(torch.ones(1000, device=device))

    assert torch.equal(apply_dropout(1), apply_dropout(1))
    assert not torch.equal(apply_dropout(1), apply_dropout(2))


def test_every_call_samples_a_new_mask() -> None:
    dropout, x = Dropout(0.3), torch.ones(1000)
    assert not torch.equal(dropout(x), dropout(x))


@ALL_DEVICES
def test_gradient_equals_the_mask(device: str) -> None:
    x = torch.randn(50, 7, device=device, requires_grad=True)
    out = Dropout(0.4)(x)
    out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x.detach(), out.detach())
    assert x.grad.unique().tolist() == pytest.approx([0.0, 1 / 0.6], rel=1e-4)


@ALL_DEVICES
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_add_equals_dropout_and_addition(device: str, training: bool, rate: float, dtype: torch.dtype) -> None:
    """Gradients are equal too. If autocast has rounded y, the sum has the precision of x."""
    dropout = Dropout(rate).train(training)
    x, y = (
        torch.randn(50, 7, device=device, dtype=input_dtype).requires_grad_() for input_dtype in (torch.float32, dtype)
    )
    results = []
    for compute in (lambda: dropout.add(x, y), lambda: x + dropout(y)):
        torch.manual_seed(1)
        out = compute()
        (out * torch.linspace(-1, 1, 7, device=device)).sum().backward()
        results.append([out, x.grad, y.grad])
        x.grad = y.grad = None
    for actual, expected in zip(*results, strict=True):
        assert actual is not None
        assert expected is not None
        assert actual.dtype == expected.dtype
        assert_same(actual, expected, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 5, 7), (0, 4)], ids=str)
def test_any_shape_and_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    out = Dropout(0.5)(torch.ones(shape, dtype=dtype))
    assert out.shape == shape
    assert out.dtype == dtype


def test_inputs_may_be_strided() -> None:
    x = torch.randn(30, 40).T
    out = Dropout(0.5)(x)
    assert ((out == 0) | torch.isclose(out, 2 * x)).all()


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_dropout_is_off_in_evaluation_and_at_rate_zero(rate: float) -> None:
    dropout, x = Dropout(rate), torch.randn(100)
    if rate:
        dropout.eval()
    state = torch.get_rng_state()
    assert dropout(x) is x
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("rate", [1e-9, 0.9999, 1 - 1e-9])
def test_extreme_rates_give_finite_outputs(rate: float) -> None:
    assert Dropout(rate)(torch.ones(1000)).isfinite().all()


@ALL_DEVICES
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 0, 6), (2, 2, 2, 1)], ids=str)
def test_masks_of_rows_do_not_depend_on_how_the_batch_is_split(
    device: str, passes: int, sizes: tuple[int, ...]
) -> None:
    x, dropout, total_rows = torch.randn(passes, 7, 5, 3, device=device), Dropout(0.4), 7

    def apply_dropout(first: int, rows: int) -> torch.Tensor:
        torch.manual_seed(5)
        with use_dropout_rows(first, total_rows, passes):
            dropout(x[:, :1].flatten(0, 1) if rows else x[:, :0].flatten(0, 1))  # earlier calls use the generator too
            return dropout(x[:, first : first + rows].flatten(0, 1)).view(passes, rows, 5, 3)

    full = apply_dropout(0, total_rows)
    first_rows = [sum(sizes[:n]) for n in range(len(sizes))]
    parts = [apply_dropout(first, rows) for first, rows in zip(first_rows, sizes, strict=True)]
    assert torch.equal(torch.cat(parts, 1), full)
    assert passes == 1 or not torch.equal(full[0] == 0, full[1] == 0)


def test_a_slice_of_all_rows_equals_no_slice() -> None:
    x, results = torch.randn(6, 5, 3), []
    for total_rows in (0, 6):
        torch.manual_seed(1)
        with use_dropout_rows(0, total_rows):
            results.append(Dropout(0.5)(x))
    assert torch.equal(*results)
