"""Norms: by their formulas, and what holds for every entry of the registry."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from dragoman.modules.norms import NORMS, BatchNorm, NormSettings
from tolerance import DEVICES, differ, same

EVERY = pytest.mark.parametrize("name", NORMS)


@EVERY
@pytest.mark.parametrize("width", [2, 8, 33])
def test_a_norm_is_its_formula(name: str, width: int) -> None:
    x_BTC = torch.randn(3, 4, width, dtype=torch.float64) * 3 + 1
    same(NORMS[name](NormSettings(width=width)).double()(x_BTC), NORMS[name].formula(x_BTC), torch.float32)


@pytest.mark.parametrize("name", ["layer", "layer_scalar"])
def test_the_example_of_the_lectures(name: str) -> None:
    """[100, 200, 100, 0] has mean 100 and variance 5000; with gain a and bias b the output is [b, 1.4 a + b, ...]."""
    norm, x = NORMS[name](NormSettings(width=4)), torch.tensor([[[100.0, 200.0, 100.0, 0.0]]])
    assert [round(value, 1) for value in norm(x)[0, 0].tolist()] == [0.0, 1.4, 0.0, -1.4]
    with torch.no_grad():
        norm.weight.fill_(3.0)
        norm.bias.fill_(7.0)
    assert norm(x)[0, 0].tolist() == pytest.approx([7, 7 + 3 * 2**0.5, 7, 7 - 3 * 2**0.5], abs=1e-4)


@EVERY
def test_a_token_is_normed_alone(name: str) -> None:
    """At use, whatever its neighbours are. At training batch norm looks at all of them, and it alone."""
    norm, x_BTC = NORMS[name](NormSettings(width=8)), torch.randn(3, 4, 8)
    norm(x_BTC)
    norm.eval()
    same(norm(x_BTC)[1:2, 2:3], norm(x_BTC[1:2, 2:3]))


def test_batch_norm_looks_at_real_tokens_only() -> None:
    x_BTC = torch.randn(2, 5, 8)
    real_BT = torch.tensor([[True] * 5, [True, True, False, False, False]])
    stirred = torch.where(real_BT[..., None], x_BTC, 1e3)
    one, other = NORMS["batch"](NormSettings(width=8)), NORMS["batch"](NormSettings(width=8))
    same(one(x_BTC, real_BT)[real_BT], other(stirred, real_BT)[real_BT])
    flat = BatchNorm.formula(x_BTC[real_BT][None])[0]
    same(NORMS["batch"](NormSettings(width=8))(x_BTC, real_BT)[real_BT], flat)
    for name, buffer in one.named_buffers():
        same(buffer, other.get_buffer(name))


def test_batch_norm_remembers_what_it_saw() -> None:
    """After many batches it treats one token as it treated them; a batch of NaN leaves its memory as it was."""
    norm = BatchNorm(NormSettings(width=8))
    for _ in range(200):
        norm(torch.randn(4, 16, 8) * 3 + 5)
    before = norm.mean.clone()
    differ(before, torch.zeros(8))
    norm(torch.full((1, 2, 8), torch.nan))
    assert torch.equal(norm.mean, before)
    found = norm.eval()(torch.randn(50, 100, 8) * 3 + 5)
    assert found.mean().item() == pytest.approx(0, abs=0.1)
    assert found.std().item() == pytest.approx(1, abs=0.1)


@EVERY
def test_zeros_are_no_trouble(name: str) -> None:
    x_BTC = torch.zeros(1, 2, 8, requires_grad=True)
    NORMS[name](NormSettings(width=8))(x_BTC).sum().backward()
    assert x_BTC.grad is not None
    assert x_BTC.grad.isfinite().all()


@EVERY
def test_a_norm_begins_as_its_formula_and_learns_a_scale(name: str) -> None:
    """Every parameter is one number for each feature or for all of them, and a gain of 2 doubles what comes out."""
    norm, x_BTC = NORMS[name](NormSettings(width=8)), torch.randn(3, 4, 8)
    assert all(parameter.shape in ((), (8,)) for parameter in norm.parameters())
    before = norm(x_BTC)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.mul_(2)  # a bias begins at 0
    same(norm(x_BTC), 2 * before if list(norm.parameters()) else before)


@EVERY
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tokens", "width"), [(3, 8), (7, 33), (1100, 64), (3, 512), (5, 1000)])
def test_a_fork_is_x_and_its_norm(name: str, tokens: int, width: int, device: str) -> None:
    """With the slopes of both, and of gain and bias; in half precision on a GPU one kernel makes them."""
    torch.manual_seed(1)
    norm = NORMS[name](NormSettings(width=width)).to(device)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, 1.0, 0.3)
    x_BTC = (torch.randn(width, 2, tokens, device=device) * 2 + 1).bfloat16().permute(1, 2, 0)  # not in a row
    slope, other = torch.randn_like(x_BTC), torch.randn_like(x_BTC)
    narrow, found = torch.bfloat16 if device == "cuda" else torch.float32, []
    for dtype, twin in ((narrow, norm), (torch.float64, deepcopy(norm).double())):
        leaf = x_BTC.to(dtype).requires_grad_()
        stream, out = twin.fork(leaf)
        assert stream.equal(leaf)
        assert out.dtype == dtype
        wanted = [leaf, *twin.parameters()]
        found.append([out, *torch.autograd.grad((stream * slope + out * other).sum(), wanted)])
        alone = twin(leaf)
        found[-1] += [alone, *torch.autograd.grad((alone * other).sum(), wanted)]
    for one, two in zip(*found, strict=True):
        same(one, two, narrow)
