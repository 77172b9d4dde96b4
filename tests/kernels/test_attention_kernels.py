"""Kernels: every one gives the numbers of the readable one, and that one does what the paper says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dragoman.kernels import attention as kernel_room
from dragoman.kernels.attention import (
    KERNELS,
    AttentionMask,
    Kernel,
    attend_reference,
    compute_attention_weights,
    unmask_empty_queries,
)
from tolerance import DEVICES, differ, same

EVERY = pytest.mark.parametrize("name", KERNELS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
SHAPES = [(1, 1, 1, 1, 1), (2, 3, 5, 7, 4), (3, 2, 7, 5, 8), (2, 4, 33, 65, 16), (4, 2, 1, 9, 8)]  # B H Q K D


def inputs(
    shape: tuple[int, ...], *, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, AttentionMask]:
    B, H, Q, K, D = shape
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, H, n, D, dtype=torch.float64, device=device) for n in (Q, K, K))
    keep = unmask_empty_queries(torch.rand(B, Q, K, device=device) < 0.4)[:, None]
    return q, k, v, AttentionMask(keep)


def with_gradients(kernel: Kernel, tensors: list[Tensor], mask: AttentionMask, dtype: torch.dtype) -> list[Tensor]:
    """What comes out, and the gradients of a weighted sum of it."""
    q, k, v = leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    out = kernel(q, k, v, mask)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).view_as(out)
    (out * weight.to(dtype)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@EVERY
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_agree_in_outputs_and_gradients(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], device: str
) -> None:
    *tensors, mask = inputs(shape, device=device)
    rounded = [tensor.to(dtype).double() for tensor in tensors]
    expected = with_gradients(attend_reference, rounded, mask, torch.float64)
    found = with_gradients(KERNELS[name], tensors, mask, dtype)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        same(one, other)


def test_the_reference_is_what_the_paper_says() -> None:
    """Vaswani 2017, section 3.2.1, one query at a time: softmax(q k / sqrt(d)) v over the keys it may mask at."""
    q, k, v, mask = inputs((2, 3, 5, 7, 4))
    out = attend_reference(q, k, v, mask)
    for b in range(2):
        for h in range(3):
            for i in range(5):
                keys = [j for j in range(7) if mask.allowed[b, 0, i, j]]
                score = torch.stack([(q[b, h, i] * k[b, h, j]).sum() / 4**0.5 for j in keys]).exp()
                expected = sum(s * v[b, h, j] for s, j in zip(score / score.sum(), keys))
                assert isinstance(expected, Tensor)
                same(out[b, h, i], expected)


@EVERY
def test_what_is_not_kept_has_no_influence(name: str) -> None:
    q, k, v, mask = inputs((2, 3, 5, 7, 4))
    assert mask.allowed is not None
    mask.allowed[:, :, :, 2:4] = False
    mask.allowed[:, :, :, 0] = True
    before = KERNELS[name](q, k, v, mask)
    k[:, :, 2:4], v[:, :, 2:4] = 1e3, -1e3
    same(KERNELS[name](q, k, v, mask), before)
    differ(KERNELS[name](q, k, v, AttentionMask()), before)


@EVERY
def test_a_mask_may_be_one_for_all(name: str) -> None:
    q, k, v, _ = inputs((2, 3, 5, 7, 4))
    keep = torch.tensor([True, True, False, True, False, False, True])[None, None, None]
    same(KERNELS[name](q, k, v, AttentionMask(keep)), attend_reference(q, k, v, AttentionMask(keep.expand(2, 1, 5, 7))))


@EVERY
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_not_ahead_is_a_triangle_whatever_else_is_asked(name: str, kept: bool, biased: bool) -> None:
    q, k, v, mask = inputs((2, 3, 6, 6, 4))
    assert mask.allowed is not None
    order = torch.ones(6, 6, dtype=torch.bool).tril()
    keep = mask.allowed | torch.eye(6, dtype=torch.bool) if kept else None
    bias = torch.randn(3, 6, 6, dtype=torch.float64) if biased else None
    expected = attend_reference(q, k, v, AttentionMask(order if keep is None else keep & order, bias=bias))
    same(KERNELS[name](q, k, v, AttentionMask(keep, causal=True, bias=bias)), expected)
    differ(KERNELS[name](q, k, v, AttentionMask(keep, bias=bias)), expected)


@EVERY
def test_a_bias_is_added_to_the_scores(name: str) -> None:
    """Softmax of scores + log 2 doubles the share of a key against the others."""
    q, k, v, mask = inputs((2, 3, 5, 7, 4))
    bias = torch.zeros(1, 1, 1, 7, dtype=torch.float64)
    bias[..., 3] = torch.tensor(2.0).log()
    weight = compute_attention_weights(q, k, mask)
    weight[..., 3] *= 2
    same(KERNELS[name](q, k, v, replace(mask, bias=bias)), weight / weight.sum(-1, keepdim=True) @ v)


@EVERY
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (3, 5, 7), (1, 3, 1, 7), (2, 1, 5, 1)], ids=str)
@pytest.mark.parametrize("kept", [True, False])
def test_a_bias_can_be_learned(name: str, shape: tuple[int, ...], kept: bool) -> None:
    q, k, v, mask = inputs((2, 3, 5, 7, 4))
    mask = mask if kept else AttentionMask()
    slopes = []
    for kernel in (KERNELS[name], attend_reference):
        bias = torch.linspace(-1, 1, 210, dtype=torch.float64).sin()[: math.prod(shape)].view(shape).requires_grad_()
        out = kernel(q, k, v, replace(mask, bias=bias))
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        assert bias.grad is not None
        slopes.append(bias.grad)
    same(slopes[0], slopes[1])


@EVERY
def test_further_dimensions_stand_between_heads_and_queries(name: str) -> None:
    """Blocks of a long text are one more dimension; each is attended to as if it were alone."""
    q, k, v, mask = inputs((2, 3, 8, 8, 4))
    q, k, v = (tensor.unflatten(2, (2, 4)) for tensor in (q, k, v))
    assert mask.allowed is not None
    keep = unmask_empty_queries(torch.stack([mask.allowed[..., :4, :4], mask.allowed[..., 4:, 4:]], 2))
    found = KERNELS[name](q, k, v, AttentionMask(keep))
    for n in range(2):
        alone = attend_reference(q[:, :, n], k[:, :, n], v[:, :, n], AttentionMask(keep[:, :, n]))
        same(found[:, :, n], alone)


@EVERY
def test_values_may_have_a_width_of_their_own(name: str) -> None:
    q, k, _, mask = inputs((2, 3, 5, 7, 4))
    v = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    same(KERNELS[name](q, k, v, mask), compute_attention_weights(q, k, mask) @ v)


def test_what_is_long_never_meets_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` hands long texts to the kernel whose memory grows in a line."""
    taken: list[str] = []

    def noted(name: str) -> Callable[..., Tensor]:
        def run(*args: Tensor) -> Tensor:
            taken.append(name)
            return args[0]

        return run

    for name in ("batched", "fused"):
        monkeypatch.setattr(kernel_room, f"attend_{name}", noted(name))
    for length in (64, 1023, 1024, 5000):
        q = torch.zeros(1, 1, length, 1)
        KERNELS["auto"](q, q, q, AttentionMask())
    assert taken == ["batched", "batched", "fused", "fused"]


@EVERY
def test_memory_may_lie_in_any_order(name: str) -> None:
    """Heads are split by turning axes, so what a kernel gets is seldom contiguous; nor is the gradient it gets."""
    q, k, v, mask = inputs((2, 3, 5, 7, 4))
    turned = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v)]

    def turning(*args: Any) -> Tensor:
        return KERNELS[name](*args).transpose(1, 2).contiguous().transpose(1, 2)

    found = with_gradients(turning, turned, mask, torch.float64)
    for one, other in zip(found, with_gradients(attend_reference, [q, k, v], mask, torch.float64), strict=True):
        same(one, other)


@EVERY
def test_large_scores_stay_finite(name: str) -> None:
    q, k, v, mask = inputs((2, 3, 5, 7, 4))
    for tensor in with_gradients(KERNELS[name], [q * 1e3, k * 1e3, v], mask, torch.float32):
        assert tensor.isfinite().all()


@EVERY
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    q, k, v, mask = inputs((1, 2, 3, 4, 2))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    assert torch.autograd.gradcheck(lambda q, k, v: KERNELS[name](q, k, v, mask), leaves)


@EVERY
def test_inputs_are_left_as_they_are(name: str) -> None:
    q, k, v, mask = inputs((2, 3, 5, 7, 4))
    before = [tensor.clone() for tensor in (q, k, v)]
    KERNELS[name](q, k, v, mask)
    assert all(torch.equal(one, other) for one, other in zip((q, k, v), before, strict=True))


def test_weights_sum_to_one_over_what_is_kept() -> None:
    q, k, _, mask = inputs((2, 3, 5, 7, 4))
    weight = compute_attention_weights(q, k, mask)
    same(weight.sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))
    assert (weight >= 0).all()
    assert mask.allowed is not None
    assert (weight.masked_select(~mask.allowed) == 0).all()
