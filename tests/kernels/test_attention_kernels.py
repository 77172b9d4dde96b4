"""Attention kernels: all agree with the reference implementation, which agrees with the paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dragoman.kernels import attention as attention_module
from dragoman.kernels.attention import (
    KERNELS,
    AttentionMask,
    Kernel,
    attend_reference,
    compute_attention_weights,
    unmask_empty_queries,
)
from tolerance import DEVICES, assert_different, assert_same

ALL_KERNELS = pytest.mark.parametrize("name", KERNELS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
SHAPES = [(1, 1, 1, 1, 1), (2, 3, 5, 7, 4), (3, 2, 7, 5, 8), (2, 4, 33, 65, 16), (4, 2, 1, 9, 8)]  # B H Q K D


def make_inputs(
    shape: tuple[int, ...], *, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, AttentionMask]:
    B, H, Q, K, D = shape
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, H, n, D, dtype=torch.float64, device=device) for n in (Q, K, K))
    allowed = unmask_empty_queries(torch.rand(B, Q, K, device=device) < 0.4)[:, None]
    return q, k, v, AttentionMask(allowed)


def run_with_gradients(kernel: Kernel, tensors: list[Tensor], mask: AttentionMask, dtype: torch.dtype) -> list[Tensor]:
    """Return the output of the kernel, and the gradients of a weighted sum of the output."""
    q, k, v = leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    out = kernel(q, k, v, mask)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).view_as(out)
    (out * weight.to(dtype)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@ALL_KERNELS
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_agree_in_outputs_and_gradients(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], device: str
) -> None:
    *tensors, mask = make_inputs(shape, device=device)
    rounded = [tensor.to(dtype).double() for tensor in tensors]
    expected = run_with_gradients(attend_reference, rounded, mask, torch.float64)
    found = run_with_gradients(KERNELS[name], tensors, mask, dtype)
    for actual, reference in zip(found, expected, strict=True):
        assert actual.dtype == dtype
        assert_same(actual, reference)


def test_reference_matches_the_paper() -> None:
    """Vaswani 2017, section 3.2.1, one query at a time: softmax(q k / sqrt(d)) v over the allowed keys."""
    q, k, v, mask = make_inputs((2, 3, 5, 7, 4))
    out = attend_reference(q, k, v, mask)
    for b in range(2):
        for h in range(3):
            for i in range(5):
                keys = [j for j in range(7) if mask.allowed[b, 0, i, j]]
                score = torch.stack([(q[b, h, i] * k[b, h, j]).sum() / 4**0.5 for j in keys]).exp()
                expected = sum(s * v[b, h, j] for s, j in zip(score / score.sum(), keys))
                assert isinstance(expected, Tensor)
                assert_same(out[b, h, i], expected)


@ALL_KERNELS
def test_masked_keys_have_no_influence(name: str) -> None:
    q, k, v, mask = make_inputs((2, 3, 5, 7, 4))
    assert mask.allowed is not None
    mask.allowed[:, :, :, 2:4] = False
    mask.allowed[:, :, :, 0] = True
    before = KERNELS[name](q, k, v, mask)
    k[:, :, 2:4], v[:, :, 2:4] = 1e3, -1e3
    assert_same(KERNELS[name](q, k, v, mask), before)
    assert_different(KERNELS[name](q, k, v, AttentionMask()), before)


@ALL_KERNELS
def test_masks_broadcast(name: str) -> None:
    q, k, v, _ = make_inputs((2, 3, 5, 7, 4))
    allowed = torch.tensor([True, True, False, True, False, False, True])[None, None, None]
    assert_same(
        KERNELS[name](q, k, v, AttentionMask(allowed)),
        attend_reference(q, k, v, AttentionMask(allowed.expand(2, 1, 5, 7))),
    )


@ALL_KERNELS
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_causal_equals_a_triangular_mask(name: str, masked: bool, with_bias: bool) -> None:
    q, k, v, mask = make_inputs((2, 3, 6, 6, 4))
    assert mask.allowed is not None
    triangle_QK = torch.ones(6, 6, dtype=torch.bool).tril()
    allowed = mask.allowed | torch.eye(6, dtype=torch.bool) if masked else None
    bias = torch.randn(3, 6, 6, dtype=torch.float64) if with_bias else None
    expected = attend_reference(
        q, k, v, AttentionMask(triangle_QK if allowed is None else allowed & triangle_QK, bias=bias)
    )
    assert_same(KERNELS[name](q, k, v, AttentionMask(allowed, causal=True, bias=bias)), expected)
    assert_different(KERNELS[name](q, k, v, AttentionMask(allowed, bias=bias)), expected)


@ALL_KERNELS
def test_bias_is_added_to_the_scores(name: str) -> None:
    """A bias of log 2 doubles the unnormalized weight of a key."""
    q, k, v, mask = make_inputs((2, 3, 5, 7, 4))
    bias = torch.zeros(1, 1, 1, 7, dtype=torch.float64)
    bias[..., 3] = torch.tensor(2.0).log()
    weight = compute_attention_weights(q, k, mask)
    weight[..., 3] *= 2
    assert_same(KERNELS[name](q, k, v, replace(mask, bias=bias)), weight / weight.sum(-1, keepdim=True) @ v)


@ALL_KERNELS
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (3, 5, 7), (1, 3, 1, 7), (2, 1, 5, 1)], ids=str)
@pytest.mark.parametrize("masked", [True, False])
def test_gradient_of_the_bias_matches_the_reference(name: str, shape: tuple[int, ...], masked: bool) -> None:
    q, k, v, mask = make_inputs((2, 3, 5, 7, 4))
    mask = mask if masked else AttentionMask()
    bias_grads = []
    for kernel in (KERNELS[name], attend_reference):
        bias = torch.linspace(-1, 1, 210, dtype=torch.float64).sin()[: math.prod(shape)].view(shape).requires_grad_()
        out = kernel(q, k, v, replace(mask, bias=bias))
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        assert bias.grad is not None
        bias_grads.append(bias.grad)
    assert_same(bias_grads[0], bias_grads[1])


@ALL_KERNELS
def test_dimensions_between_heads_and_queries_are_independent(name: str) -> None:
    """Blocks of a long text are such a dimension; attention in each block is computed separately."""
    q, k, v, mask = make_inputs((2, 3, 8, 8, 4))
    q, k, v = (tensor.unflatten(2, (2, 4)) for tensor in (q, k, v))
    assert mask.allowed is not None
    allowed = unmask_empty_queries(torch.stack([mask.allowed[..., :4, :4], mask.allowed[..., 4:, 4:]], 2))
    found = KERNELS[name](q, k, v, AttentionMask(allowed))
    for n in range(2):
        expected = attend_reference(q[:, :, n], k[:, :, n], v[:, :, n], AttentionMask(allowed[:, :, n]))
        assert_same(found[:, :, n], expected)


@ALL_KERNELS
def test_values_may_have_another_width_than_keys(name: str) -> None:
    q, k, _, mask = make_inputs((2, 3, 5, 7, 4))
    v = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    assert_same(KERNELS[name](q, k, v, mask), compute_attention_weights(q, k, mask) @ v)


def test_auto_uses_the_fused_kernel_for_long_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the fused kernel grows linearly with the length."""
    called: list[str] = []

    def make_recorder(name: str) -> Callable[..., Tensor]:
        def run(*args: Tensor) -> Tensor:
            called.append(name)
            return args[0]

        return run

    for name in ("batched", "fused"):
        monkeypatch.setattr(attention_module, f"attend_{name}", make_recorder(name))
    for length in (64, 1023, 1024, 5000):
        q = torch.zeros(1, 1, length, 1)
        KERNELS["auto"](q, q, q, AttentionMask())
    assert called == ["batched", "batched", "fused", "fused"]


@ALL_KERNELS
def test_inputs_and_gradients_may_be_strided(name: str) -> None:
    """Splitting heads transposes axes, so inputs of a kernel are rarely contiguous, and neither are gradients."""
    q, k, v, mask = make_inputs((2, 3, 5, 7, 4))
    strided = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v)]

    def attend_strided(*args: Any) -> Tensor:
        return KERNELS[name](*args).transpose(1, 2).contiguous().transpose(1, 2)

    found = run_with_gradients(attend_strided, strided, mask, torch.float64)
    for actual, reference in zip(
        found, run_with_gradients(attend_reference, [q, k, v], mask, torch.float64), strict=True
    ):
        assert_same(actual, reference)


@ALL_KERNELS
def test_large_scores_stay_finite(name: str) -> None:
    q, k, v, mask = make_inputs((2, 3, 5, 7, 4))
    for tensor in run_with_gradients(KERNELS[name], [q * 1e3, k * 1e3, v], mask, torch.float32):
        assert tensor.isfinite().all()


@ALL_KERNELS
def test_gradients_match_finite_differences(name: str) -> None:
    q, k, v, mask = make_inputs((1, 2, 3, 4, 2))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    assert torch.autograd.gradcheck(lambda q, k, v: KERNELS[name](q, k, v, mask), leaves)


@ALL_KERNELS
def test_inputs_are_not_modified(name: str) -> None:
    q, k, v, mask = make_inputs((2, 3, 5, 7, 4))
    before = [tensor.clone() for tensor in (q, k, v)]
    KERNELS[name](q, k, v, mask)
    assert all(torch.equal(actual, reference) for actual, reference in zip((q, k, v), before, strict=True))


def test_weights_sum_to_one_over_allowed_keys() -> None:
    q, k, _, mask = make_inputs((2, 3, 5, 7, 4))
    weight = compute_attention_weights(q, k, mask)
    assert_same(weight.sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))
    assert (weight >= 0).all()
    assert mask.allowed is not None
    assert (weight.masked_select(~mask.allowed) == 0).all()
