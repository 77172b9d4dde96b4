"""The linear layer agrees with PyTorch's in outputs and gradients, with and without oneDNN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dragoman.modules import feedforward
from dragoman.modules.feedforward import (
    FeedForwardSettings,
    Linear,
    ReluFeedForward,
    compute_weight_gradient,
    fast_linear,
    uses_onednn,
)
from pairs import parametrize_pairwise
from tolerance import DEVICES, TOLERANCE, assert_different, assert_same

SIZES = [(6, 6), (4, 12), (12, 4), (5, 7), (1, 1), (3, 40)]  # inputs and outputs
SHAPES = [(1,), (9,), (2, 5), (2, 3, 4), (0, 3)]
DTYPES = [*TOLERANCE]
BACKENDS = ["onednn", "plain"]


def with_each_backend(test: Callable[..., None]) -> Callable[..., None]:
    parametrized = pytest.mark.parametrize("backend", BACKENDS, indirect=True)(test)
    return pytest.mark.usefixtures("backend")(parametrized)


def test_onednn_is_not_used_under_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile cannot trace the operator of oneDNN."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not uses_onednn(torch.ones(2, 2))


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with oneDNN, if PyTorch has it, and as on machines without it."""
    if request.param == "plain":
        monkeypatch.setattr(feedforward, "ONEDNN_AVAILABLE", False)


def run_with_gradients(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = layer(x)
    weight = torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out).to(out.dtype)
    (out * weight).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in (x, *layer.parameters()) if leaf.grad is not None)]


def make_layers(
    inputs: int, outputs: int, *, bias: bool = True, dtype: torch.dtype, device: str
) -> tuple[Linear, nn.Linear]:
    tested_layer = Linear(inputs, outputs, bias, device=device, dtype=dtype)
    torch_layer = nn.Linear(inputs, outputs, bias, device=device, dtype=dtype)
    torch_layer.load_state_dict(tested_layer.state_dict())
    return tested_layer, torch_layer


@parametrize_pairwise({"size": SIZES, "shape": SHAPES, "dtype": DTYPES, "backend": BACKENDS}, indirect=["backend"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("backend")
def test_linear_matches_pytorch(size: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    inputs, outputs = size
    tested_layer, torch_layer = make_layers(inputs, outputs, dtype=dtype, device=device)
    x = torch.randn(*shape, inputs, dtype=dtype, device=device)
    for actual, expected_tensor in zip(
        run_with_gradients(tested_layer, x), run_with_gradients(torch_layer, x), strict=True
    ):
        assert actual.dtype == expected_tensor.dtype
        assert_same(actual, expected_tensor)


@with_each_backend
@pytest.mark.parametrize("bias", [True, False])
def test_linear_matches_pytorch_in_evaluation_and_without_gradients(bias: bool) -> None:
    tested_layer, torch_layer = make_layers(4, 12, bias=bias, dtype=torch.float32, device="cpu")
    x = torch.randn(2, 5, 4)
    for actual, expected_tensor in zip(
        run_with_gradients(tested_layer, x), run_with_gradients(torch_layer, x), strict=True
    ):
        assert_same(actual, expected_tensor)
    with torch.no_grad():
        assert_same(tested_layer(x), torch_layer(x))
        assert_same(tested_layer.eval()(x), torch_layer(x))


@with_each_backend
def test_inputs_and_gradients_may_be_strided() -> None:
    tested_layer, torch_layer = make_layers(4, 12, dtype=torch.float32, device="cpu")
    x = torch.randn(4, 5, 2).permute(2, 1, 0)

    class StridedOutput(nn.Linear):
        """Pass a strided gradient to the inner layer."""

        def __init__(self, inner: nn.Linear) -> None:
            super().__init__(1, 1)
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x).transpose(0, 1).contiguous().transpose(0, 1)
            return out

    for actual, expected_tensor in zip(
        run_with_gradients(StridedOutput(tested_layer), x),
        run_with_gradients(StridedOutput(torch_layer), x),
        strict=True,
    ):
        assert_same(actual, expected_tensor)


@with_each_backend
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_get_no_gradient(frozen: str) -> None:
    tested_layer, torch_layer = make_layers(4, 12, dtype=torch.float32, device="cpu")
    for layer in (tested_layer, torch_layer):
        getattr(layer, frozen).requires_grad_(False)
    x = torch.randn(5, 4)
    results, expected = run_with_gradients(tested_layer, x), run_with_gradients(torch_layer, x)
    assert getattr(tested_layer, frozen).grad is None
    for actual, expected_tensor in zip(results, expected, strict=True):
        assert_same(actual, expected_tensor)


@with_each_backend
def test_output_under_autocast_is_bfloat16() -> None:
    tested_layer, torch_layer = make_layers(4, 12, dtype=torch.float32, device="cpu")
    x = torch.randn(2, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        results, expected = run_with_gradients(tested_layer, x), run_with_gradients(torch_layer, x)
    assert results[0].dtype == torch.bfloat16
    for actual, expected_tensor in zip(results, expected, strict=True):
        assert torch.equal(actual, expected_tensor)


@parametrize_pairwise({"size": SIZES, "dtype": DTYPES, "N": [1, 9], "backend": BACKENDS}, indirect=["backend"])
@pytest.mark.usefixtures("backend")
def test_fast_linear_and_weight_gradient_match_float64(size: tuple[int, int], dtype: torch.dtype, N: int) -> None:
    inputs, outputs = size
    x, weight, bias, grad = (
        torch.randn(*shape, dtype=torch.float64).to(dtype)
        for shape in ((N, inputs), (outputs, inputs), (outputs,), (N, outputs))
    )
    assert_same(fast_linear(x, weight, bias), x.double() @ weight.double().T + bias.double())
    assert_same(fast_linear(x, weight), x.double() @ weight.double().T)
    assert_same(fast_linear(grad, weight.T), grad.double() @ weight.double())
    assert_same(compute_weight_gradient(grad, x), grad.double().T @ x.double())


def test_onednn_is_used_for_float32_on_a_cpu() -> None:
    assert uses_onednn(torch.zeros(1)) == feedforward.ONEDNN_AVAILABLE
    assert not uses_onednn(torch.zeros(0, 3))  # not supported by oneDNN
    assert not uses_onednn(torch.zeros(1, dtype=torch.bfloat16))
    assert not uses_onednn(torch.zeros(1, dtype=torch.float64))
    assert not uses_onednn(torch.zeros(1, device="meta"))


@pytest.mark.skipif(not feedforward.ONEDNN_AVAILABLE, reason="oneDNN is not built in")
def test_fast_linear_is_used_only_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = feedforward.fast_linear
    monkeypatch.setattr(feedforward, "fast_linear", lambda *args: calls.append(1) or original(*args))
    layer = Linear(4, 12)
    layer(torch.randn(3, 4))
    assert len(calls) == 1
    layer.eval()(torch.randn(3, 4))
    layer.train().double()(torch.randn(3, 4, dtype=torch.float64))
    assert len(calls) == 1


def test_parameters_are_those_of_a_linear_layer() -> None:
    assert isinstance(Linear(2, 3), nn.Linear)
    assert Linear(2, 3).state_dict().keys() == nn.Linear(2, 3).state_dict().keys()
    assert_different(Linear(2, 3).weight, Linear(2, 3).weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("tokens", "outputs"), [(5, 24), (700, 130)])
def test_fused_relu_matches_separate_relu(device: str, autocast: bool, tokens: int, outputs: int) -> None:
    """The larger case needs several blocks of tokens and of outputs in the Triton kernel."""
    torch.manual_seed(1)
    net = ReluFeedForward(FeedForwardSettings(width=16, feedforward_width=outputs)).to(device)
    layer = net.wide
    x, output_grad, results = (
        torch.randn(3, tokens, 16, device=device),
        torch.randn(3, tokens, outputs, device=device),
        [],
    )
    for backend in (net.compute_hidden, lambda x: torch.relu(layer(x))):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            out = backend(leaf)
        (out * output_grad).sum().backward()
        results.append([out.detach(), leaf.grad, layer.weight.grad.clone(), layer.bias.grad.clone()])
    for actual, expected_tensor in zip(*results, strict=True):
        assert actual.dtype == expected_tensor.dtype
        assert_same(actual, expected_tensor, torch.bfloat16 if autocast else None)
