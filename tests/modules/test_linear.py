"""The linear layer: PyTorch's own numbers, in outputs and gradients, whichever way they are made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dragoman.modules import feedforward as linear
from dragoman.modules.feedforward import (
    FeedForwardSettings,
    Linear,
    ReluFeedForward,
    compute_weight_gradient,
    fast_linear,
    uses_onednn,
)
from pairs import in_pairs
from tolerance import DEVICES, TOLERANCE, differ, same

SIZES = [(6, 6), (4, 12), (12, 4), (5, 7), (1, 1), (3, 40)]  # inputs and outputs
SHAPES = [(1,), (9,), (2, 5), (2, 3, 4), (0, 3)]
DTYPES = [*TOLERANCE]
EACH_WAY = ["onednn", "plain"]


def each_way(test: Callable[..., None]) -> Callable[..., None]:
    marked = pytest.mark.parametrize("way", EACH_WAY, indirect=True)(test)
    return pytest.mark.usefixtures("way")(marked)


def test_the_compiler_is_left_to_its_own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no rule for ours, and gives up on a model that holds it."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not uses_onednn(torch.ones(2, 2))


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through oneDNN, where it is built in, and as on machines without it."""
    if request.param == "plain":
        monkeypatch.setattr(linear, "ONEDNN_AVAILABLE", False)


def with_gradients(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = layer(x)
    weight = torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out).to(out.dtype)
    (out * weight).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in (x, *layer.parameters()) if leaf.grad is not None)]


def twins(inputs: int, outputs: int, *, bias: bool = True, dtype: torch.dtype, device: str) -> tuple[Linear, nn.Linear]:
    ours = Linear(inputs, outputs, bias, device=device, dtype=dtype)
    theirs = nn.Linear(inputs, outputs, bias, device=device, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@in_pairs({"size": SIZES, "shape": SHAPES, "dtype": DTYPES, "way": EACH_WAY}, indirect=["way"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("way")
def test_it_is_pytorchs(size: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    inputs, outputs = size
    ours, theirs = twins(inputs, outputs, dtype=dtype, device=device)
    x = torch.randn(*shape, inputs, dtype=dtype, device=device)
    for one, other in zip(with_gradients(ours, x), with_gradients(theirs, x), strict=True):
        assert one.dtype == other.dtype
        same(one, other)


@each_way
@pytest.mark.parametrize("bias", [True, False])
def test_at_rest_and_without_gradients_too(bias: bool) -> None:
    ours, theirs = twins(4, 12, bias=bias, dtype=torch.float32, device="cpu")
    x = torch.randn(2, 5, 4)
    for one, other in zip(with_gradients(ours, x), with_gradients(theirs, x), strict=True):
        same(one, other)
    with torch.no_grad():
        same(ours(x), theirs(x))
        same(ours.eval()(x), theirs(x))


@each_way
def test_memory_may_lie_in_any_order() -> None:
    ours, theirs = twins(4, 12, dtype=torch.float32, device="cpu")
    x = torch.randn(4, 5, 2).permute(2, 1, 0)

    class Turned(nn.Linear):
        """Hands a strided gradient back."""

        def __init__(self, inner: nn.Linear) -> None:
            super().__init__(1, 1)
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x).transpose(0, 1).contiguous().transpose(0, 1)
            return out

    for one, other in zip(with_gradients(Turned(ours), x), with_gradients(Turned(theirs), x), strict=True):
        same(one, other)


@each_way
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    ours, theirs = twins(4, 12, dtype=torch.float32, device="cpu")
    for layer in (ours, theirs):
        getattr(layer, frozen).requires_grad_(False)
    x = torch.randn(5, 4)
    found, expected = with_gradients(ours, x), with_gradients(theirs, x)
    assert getattr(ours, frozen).grad is None
    for one, other in zip(found, expected, strict=True):
        same(one, other)


@each_way
def test_under_autocast_it_is_bf16() -> None:
    ours, theirs = twins(4, 12, dtype=torch.float32, device="cpu")
    x = torch.randn(2, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = with_gradients(ours, x), with_gradients(theirs, x)
    assert found[0].dtype == torch.bfloat16
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@in_pairs({"size": SIZES, "dtype": DTYPES, "N": [1, 9], "way": EACH_WAY}, indirect=["way"])
@pytest.mark.usefixtures("way")
def test_products_are_products(size: tuple[int, int], dtype: torch.dtype, N: int) -> None:
    inputs, outputs = size
    x, weight, bias, grad = (
        torch.randn(*shape, dtype=torch.float64).to(dtype)
        for shape in ((N, inputs), (outputs, inputs), (outputs,), (N, outputs))
    )
    same(fast_linear(x, weight, bias), x.double() @ weight.double().T + bias.double())
    same(fast_linear(x, weight), x.double() @ weight.double().T)
    same(fast_linear(grad, weight.T), grad.double() @ weight.double())
    same(compute_weight_gradient(grad, x), grad.double().T @ x.double())


def test_onednn_is_for_float32_on_a_cpu() -> None:
    assert uses_onednn(torch.zeros(1)) == linear.ONEDNN_AVAILABLE
    assert not uses_onednn(torch.zeros(0, 3))  # which oneDNN cannot do
    assert not uses_onednn(torch.zeros(1, dtype=torch.bfloat16))
    assert not uses_onednn(torch.zeros(1, dtype=torch.float64))
    assert not uses_onednn(torch.zeros(1, device="meta"))


@pytest.mark.skipif(not linear.ONEDNN_AVAILABLE, reason="oneDNN is not built in")
def test_the_fast_way_is_taken_when_training(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    plain = linear.fast_linear
    monkeypatch.setattr(linear, "fast_linear", lambda *args: taken.append(1) or plain(*args))
    layer = Linear(4, 12)
    layer(torch.randn(3, 4))
    assert len(taken) == 1
    layer.eval()(torch.randn(3, 4))
    layer.train().double()(torch.randn(3, 4, dtype=torch.float64))
    assert len(taken) == 1


def test_its_weights_are_those_of_a_linear_layer() -> None:
    assert isinstance(Linear(2, 3), nn.Linear)
    assert Linear(2, 3).state_dict().keys() == nn.Linear(2, 3).state_dict().keys()
    differ(Linear(2, 3).weight, Linear(2, 3).weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("tokens", "outputs"), [(5, 24), (700, 130)])
def test_a_relu_is_the_same_inside_the_product_and_after_it(
    device: str, narrow: bool, tokens: int, outputs: int
) -> None:
    """The larger case is more than the kernel for a GPU takes in one round, of tokens and of outputs."""
    torch.manual_seed(1)
    net = ReluFeedForward(FeedForwardSettings(width=16, feedforward_width=outputs)).to(device)
    layer = net.wide
    x, slope, found = torch.randn(3, tokens, 16, device=device), torch.randn(3, tokens, outputs, device=device), []
    for way in (net.inner, lambda x: torch.relu(layer(x))):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=narrow):
            out = way(leaf)
        (out * slope).sum().backward()
        found.append([out.detach(), leaf.grad, layer.weight.grad.clone(), layer.bias.grad.clone()])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        same(one, other, torch.bfloat16 if narrow else None)
