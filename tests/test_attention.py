"""Attention: every kernel gives the numbers of the readable one, and that one does what the paper says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dragoman.nn.attention import (
    KERNELS,
    READABLE,
    CrossAttention,
    Kernel,
    SelfAttention,
    join_heads,
    reference,
    split_heads,
    weights,
)
from dragoman.nn.mask import never_empty
from tolerance import DEVICES, differ, same

EVERY = pytest.mark.parametrize("name", KERNELS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
SHAPES = [(1, 1, 1, 1, 1), (2, 3, 5, 7, 4), (3, 2, 7, 5, 8), (2, 4, 33, 65, 16), (4, 2, 1, 9, 8)]  # B H Q K D


def inputs(shape: tuple[int, ...], *, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, H, Q, K, D = shape
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, H, n, D, dtype=torch.float64, device=device) for n in (Q, K, K))
    keep = never_empty(torch.rand(B, Q, K, device=device) < 0.4)[:, None]
    return q, k, v, keep


def with_gradients(kernel: Kernel, tensors: list[Tensor], keep: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """What comes out, and the gradients of a weighted sum of it."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    out = kernel(*leaves, keep)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).view_as(out)
    (out * weight.to(dtype)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_every_fast_kernel_has_a_readable_twin() -> None:
    assert set(READABLE) | {"reference"} == set(KERNELS)
    assert set(READABLE.values()) == {"reference"}


@EVERY
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_agree_in_outputs_and_gradients(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], device: str
) -> None:
    *tensors, keep = inputs(shape, device=device)
    rounded = [tensor.to(dtype).double() for tensor in tensors]
    expected = with_gradients(reference, rounded, keep, torch.float64)
    found = with_gradients(KERNELS[name], tensors, keep, dtype)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        same(one, other)


def test_the_reference_is_what_the_paper_says() -> None:
    """Vaswani 2017, section 3.2.1, one query at a time: softmax(q k / sqrt(d)) v over the keys it may look at."""
    q, k, v, keep = inputs((2, 3, 5, 7, 4))
    out = reference(q, k, v, keep)
    for b in range(2):
        for h in range(3):
            for i in range(5):
                keys = [j for j in range(7) if keep[b, 0, i, j]]
                score = torch.stack([(q[b, h, i] * k[b, h, j]).sum() / 4**0.5 for j in keys]).exp()
                expected = sum(s * v[b, h, j] for s, j in zip(score / score.sum(), keys))
                assert isinstance(expected, Tensor)
                same(out[b, h, i], expected)


@EVERY
def test_what_is_not_kept_has_no_influence(name: str) -> None:
    q, k, v, keep = inputs((2, 3, 5, 7, 4))
    keep[:, :, :, 2:4] = False
    keep[:, :, :, 0] = True
    before = KERNELS[name](q, k, v, keep)
    k[:, :, 2:4], v[:, :, 2:4] = 1e3, -1e3
    same(KERNELS[name](q, k, v, keep), before)
    differ(KERNELS[name](q, k, v, torch.ones_like(keep)), before)


@EVERY
def test_a_mask_may_be_one_for_all(name: str) -> None:
    q, k, v, _ = inputs((2, 3, 5, 7, 4))
    keep = torch.tensor([True, True, False, True, False, False, True])[None, None, None]
    same(KERNELS[name](q, k, v, keep), reference(q, k, v, keep.expand(2, 1, 5, 7)))


@EVERY
def test_memory_may_lie_in_any_order(name: str) -> None:
    """Heads are split by turning axes, so what a kernel gets is seldom contiguous; nor is the gradient it gets."""
    q, k, v, keep = inputs((2, 3, 5, 7, 4))
    turned = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v)]

    def turning(*args: Tensor) -> Tensor:
        return KERNELS[name](*args).transpose(1, 2).contiguous().transpose(1, 2)

    found = with_gradients(turning, turned, keep, torch.float64)
    for one, other in zip(found, with_gradients(reference, [q, k, v], keep, torch.float64), strict=True):
        same(one, other)


@EVERY
def test_large_scores_stay_finite(name: str) -> None:
    q, k, v, keep = inputs((2, 3, 5, 7, 4))
    for tensor in with_gradients(KERNELS[name], [q * 1e3, k * 1e3, v], keep, torch.float32):
        assert tensor.isfinite().all()


@EVERY
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    q, k, v, keep = inputs((1, 2, 3, 4, 2))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *args: KERNELS[name](*args, keep), leaves)


@EVERY
def test_inputs_are_left_as_they_are(name: str) -> None:
    tensors = inputs((2, 3, 5, 7, 4))
    before = [tensor.clone() for tensor in tensors]
    KERNELS[name](*tensors)
    assert all(torch.equal(one, other) for one, other in zip(tensors, before))


def test_weights_sum_to_one_over_what_is_kept() -> None:
    q, k, _, keep = inputs((2, 3, 5, 7, 4))
    weight = weights(q, k, keep)
    same(weight.sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))
    assert (weight >= 0).all()
    assert (weight.masked_select(~keep) == 0).all()


def test_heads_are_split_and_joined() -> None:
    x_BTC = torch.arange(2 * 3 * 8.0).view(2, 3, 8)
    split = split_heads(x_BTC, 4)
    assert split.shape == (2, 4, 3, 2)
    assert torch.equal(split[1, 2, 0], x_BTC[1, 0, 4:6])
    assert torch.equal(join_heads(split), x_BTC)


def torch_attention(*parts: nn.Linear, out: nn.Linear, heads: int) -> nn.MultiheadAttention:
    """PyTorch's own multi-head attention with these weights."""
    twin = nn.MultiheadAttention(out.in_features, heads, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        twin.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        twin.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        twin.out_proj.load_state_dict(out.state_dict())
    return twin


def stirred(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


@EVERY
def test_self_attention_is_pytorchs(name: str) -> None:
    module = SelfAttention(8, 2, KERNELS[name])
    stirred(module)
    x_BTC, keep = torch.randn(3, 5, 8, dtype=torch.float64), inputs((3, 1, 5, 5, 1))[3]
    twin = torch_attention(module.query_key_value, out=module.out, heads=2)
    expected, _ = twin(x_BTC, x_BTC, x_BTC, attn_mask=~keep.expand(3, 2, 5, 5).flatten(0, 1))
    same(module(x_BTC, keep), expected)


@EVERY
def test_cross_attention_is_pytorchs(name: str) -> None:
    module = CrossAttention(8, 2, KERNELS[name])
    stirred(module)
    x_BTC, memory_BSC = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(3, 7, 8, dtype=torch.float64)
    keep = inputs((3, 1, 5, 7, 1))[3]
    twin = torch_attention(module.query, module.key_value, out=module.out, heads=2)
    expected, looks = twin(
        x_BTC,
        memory_BSC,
        memory_BSC,
        attn_mask=~keep.expand(3, 2, 5, 7).flatten(0, 1),
        average_attn_weights=False,
    )
    memory = module.look_up(memory_BSC)
    same(module(x_BTC, memory, keep), expected)
    same(module.weights(x_BTC, memory, keep), looks)


@EVERY
def test_step_by_step_is_all_at_once(name: str) -> None:
    module = SelfAttention(8, 2, KERNELS[name])
    stirred(module)
    N, T, K = 3, 6, 9
    x_NTC = torch.randn(N, T, 8, dtype=torch.float64)
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    whole = module(x_NTC, causal[None, None])
    cache = torch.full((2, N, 2, K, 4), 7.0, dtype=torch.float64)  # places not written yet hold anything
    for at in range(T):
        keep = (torch.arange(K) <= at)[None, None, None]
        same(module.step(x_NTC[:, at : at + 1], cache, at, keep), whole[:, at : at + 1])
