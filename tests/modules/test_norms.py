"""Norms agree with their formulas, and all entries of the registry have common properties."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from dragoman.modules.norms import NORMS, BatchNorm, NormSettings
from tolerance import DEVICES, assert_different, assert_same

ALL_NORMS = pytest.mark.parametrize("name", NORMS)


@ALL_NORMS
@pytest.mark.parametrize("width", [2, 8, 33])
def test_norm_equals_its_formula(name: str, width: int) -> None:
    x_BTC = torch.randn(3, 4, width, dtype=torch.float64) * 3 + 1
    assert_same(NORMS[name](NormSettings(width=width)).double()(x_BTC), NORMS[name].formula(x_BTC), torch.float32)


EPSILON_FORMULAS: dict[str, Callable[[Tensor, float], Tensor]] = {  # of the tokens x_NC, with the initial parameters
    "layer": lambda x, e: (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + e) ** 0.5,
    "layer_scalar": lambda x, e: (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + e) ** 0.5,
    "rms": lambda x, e: x / ((x**2).mean(1, keepdim=True) + e) ** 0.5,
    "scale": lambda x, e: x * x.size(1) ** 0.5 / (x**2).sum(1, keepdim=True).sqrt().clamp(min=e),
    "batch": lambda x, e: (x - x.mean(0)) / (x.var(0, correction=0) + e) ** 0.5,
}


@pytest.mark.parametrize("name", [name for name, norm in NORMS.items() if "norm_epsilon" in norm.uses])
@pytest.mark.parametrize("given", [0.0, 0.3])
def test_epsilon_is_a_setting(name: str, given: float) -> None:
    """The tokens are small, so that epsilon matters; 0 stands for the default of the norm."""
    x_BTC = torch.randn(2, 5, 8, dtype=torch.float64) * 3e-3
    norm = NORMS[name](NormSettings(width=8, norm_epsilon=given)).double()
    expected_NC = EPSILON_FORMULAS[name](x_BTC.flatten(0, 1), given or {"rms": 1e-6}.get(name, 1e-5))
    assert_same(norm(x_BTC).flatten(0, 1), expected_NC, torch.float32)
    assert_same(norm.normalize_with_residual(x_BTC)[1].flatten(0, 1), expected_NC, torch.float32)


@pytest.mark.parametrize("name", ["layer", "layer_scalar"])
def test_worked_example(name: str) -> None:
    """[100, 200, 100, 0] has mean 100 and variance 5000; with gain a and bias b the output is [b, 1.4 a + b, ...]."""
    norm, x = NORMS[name](NormSettings(width=4)), torch.tensor([[[100.0, 200.0, 100.0, 0.0]]])
    assert [round(value, 1) for value in norm(x)[0, 0].tolist()] == [0.0, 1.4, 0.0, -1.4]
    with torch.no_grad():
        norm.weight.fill_(3.0)
        norm.bias.fill_(7.0)
    assert norm(x)[0, 0].tolist() == pytest.approx([7, 7 + 3 * 2**0.5, 7, 7 - 3 * 2**0.5], abs=1e-4)


@ALL_NORMS
def test_tokens_are_normalized_independently(name: str) -> None:
    """In evaluation no norm depends on other tokens. In training only batch norm does."""
    norm, x_BTC = NORMS[name](NormSettings(width=8)), torch.randn(3, 4, 8)
    norm(x_BTC)
    norm.eval()
    assert_same(norm(x_BTC)[1:2, 2:3], norm(x_BTC[1:2, 2:3]))


def test_batch_norm_ignores_padding() -> None:
    x_BTC = torch.randn(2, 5, 8)
    real_BT = torch.tensor([[True] * 5, [True, True, False, False, False]])
    other_padding_BTC = torch.where(real_BT[..., None], x_BTC, 1e3)
    norm, other_norm = NORMS["batch"](NormSettings(width=8)), NORMS["batch"](NormSettings(width=8))
    assert_same(norm(x_BTC, real_BT)[real_BT], other_norm(other_padding_BTC, real_BT)[real_BT])
    flat = BatchNorm.formula(x_BTC[real_BT][None])[0]
    assert_same(NORMS["batch"](NormSettings(width=8))(x_BTC, real_BT)[real_BT], flat)
    for name, buffer in norm.named_buffers():
        assert_same(buffer, other_norm.get_buffer(name))


def test_batch_norm_uses_running_statistics_in_evaluation() -> None:
    """After many batches, evaluation normalizes like training. A batch of NaN does not change the statistics."""
    norm = BatchNorm(NormSettings(width=8))
    for _ in range(200):
        norm(torch.randn(4, 16, 8) * 3 + 5)
    before = norm.mean.clone()
    assert_different(before, torch.zeros(8))
    norm(torch.full((1, 2, 8), torch.nan))
    assert torch.equal(norm.mean, before)
    found = norm.eval()(torch.randn(50, 100, 8) * 3 + 5)
    assert found.mean().item() == pytest.approx(0, abs=0.1)
    assert found.std().item() == pytest.approx(1, abs=0.1)


@ALL_NORMS
def test_gradients_of_zeros_are_finite(name: str) -> None:
    x_BTC = torch.zeros(1, 2, 8, requires_grad=True)
    NORMS[name](NormSettings(width=8))(x_BTC).sum().backward()
    assert x_BTC.grad is not None
    assert x_BTC.grad.isfinite().all()


@ALL_NORMS
def test_gain_scales_the_output(name: str) -> None:
    """Parameters are scalars or vectors of the model width, and a gain of 2 doubles the output."""
    norm, x_BTC = NORMS[name](NormSettings(width=8)), torch.randn(3, 4, 8)
    assert all(parameter.shape in ((), (8,)) for parameter in norm.parameters())
    before = norm(x_BTC)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.mul_(2)  # the initial bias is 0
    assert_same(norm(x_BTC), 2 * before if list(norm.parameters()) else before)


@ALL_NORMS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tokens", "width"), [(3, 8), (7, 33), (1100, 64), (3, 512), (5, 1000)])
def test_normalize_with_residual_returns_input_and_norm(name: str, tokens: int, width: int, device: str) -> None:
    """Gradients of both outputs, gain and bias agree with float64; on a GPU the Triton kernel computes them."""
    torch.manual_seed(1)
    norm = NORMS[name](NormSettings(width=width)).to(device)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, 1.0, 0.3)
    x_BTC = (torch.randn(width, 2, tokens, device=device) * 2 + 1).bfloat16().permute(1, 2, 0)  # not contiguous
    stream_grad, out_grad = torch.randn_like(x_BTC), torch.randn_like(x_BTC)
    tested_dtype, found = torch.bfloat16 if device == "cuda" else torch.float32, []
    for dtype, copy in ((tested_dtype, norm), (torch.float64, deepcopy(norm).double())):
        leaf = x_BTC.to(dtype).requires_grad_()
        stream, out = copy.normalize_with_residual(leaf)
        assert stream.equal(leaf)
        assert out.dtype == dtype
        leaves = [leaf, *copy.parameters()]
        found.append([out, *torch.autograd.grad((stream * stream_grad + out * out_grad).sum(), leaves)])
        normed = copy(leaf)
        found[-1] += [normed, *torch.autograd.grad((normed * out_grad).sum(), leaves)]
    for actual, expected in zip(*found, strict=True):
        assert_same(actual, expected, tested_dtype)
