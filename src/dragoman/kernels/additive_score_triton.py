"""Triton kernels for the additive attention score, whose tanh never leaves the registers, forward and backward.

Everything is computed in float32. A program holds the keys of a few source tokens and loops over the queries, or holds
one query and loops over the keys. Sums are added in a fixed order, so gradients are reproducible to the bit. The
reference implementation is `score_additive_reference` in modules/attention_scores.py, which also chooses.

Shapes   B sentences   S source width   T queries   A attention width   N all queries (B x T)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

KEY_ELEMENTS = 4096  # of the keys that a program holds at a time: 32 per thread
SCORE_WARPS = 4


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit  # type: ignore[untyped-decorator]
def _vector(base, row, A, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a row of A elements."""
    a = tl.arange(0, WIDTH)
    return tl.load(base + row * A + a, mask=a < A, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(b, s, S, A, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offsets of these source tokens' keys, and which of them exist."""
    a = tl.arange(0, WIDTH)
    return (b * S + s)[:, None] * A + a[None, :], (s < S)[:, None] & (a < A)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _own(S, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sentence of this program and the source tokens whose keys it holds."""
    blocks = tl.cdiv(S, TOKENS)
    b, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    return b.to(tl.int64), block * TOKENS + tl.arange(0, TOKENS)


@triton.jit(do_not_specialize=["T", "S"])  # type: ignore[untyped-decorator]
def _score(query, key, weight, score, T, S, A, TOKENS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    b, s = _own(S, TOKENS)
    at, there = _tile(b, s, S, A, WIDTH)
    k = tl.load(key + at, mask=there, other=0.0).to(tl.float32)
    w = _vector(weight, 0, A, WIDTH)  # 0 beyond the width
    for t in range(T):
        q = _vector(query, b * T + t, A, WIDTH)
        e = tl.sum(_tanh(q[None, :] + k) * w[None, :], 1)
        tl.store(score + (b * T + t) * S + s, e.to(score.dtype.element_ty), mask=s < S)


@triton.jit(do_not_specialize=["T", "S"])  # type: ignore[untyped-decorator]
def _query_backward(  # type: ignore[no-untyped-def]
    query, key, weight, grad, query_grad, key_grad, sums, T, S, A,
    SINGLE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one query, its part of the weights' and, if it is the only query, those of the keys."""
    n = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, WIDTH)
    q, w = _vector(query, n, A, WIDTH), _vector(weight, 0, A, WIDTH)
    total_grad, total = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for first in range(0, S, TOKENS):
        s = first + tl.arange(0, TOKENS)
        g = tl.load(grad + n * S + s, mask=s < S, other=0.0).to(tl.float32)
        at, there = _tile(n // T, s, S, A, WIDTH)
        y = _tanh(q[None, :] + tl.load(key + at, mask=there, other=0.0).to(tl.float32))
        score_grad = g[:, None] * (1 - y * y)
        total_grad += tl.sum(score_grad, 0)
        total += tl.sum(g[:, None] * y, 0)
        if SINGLE:
            tl.store(key_grad + at, (score_grad * w[None, :]).to(key_grad.dtype.element_ty), mask=there)
    tl.store(query_grad + n * A + a, (total_grad * w).to(query_grad.dtype.element_ty), mask=a < A)
    tl.store(sums + n * A + a, total, mask=a < A)


@triton.jit(do_not_specialize=["T", "S"])  # type: ignore[untyped-decorator]
def _key_backward(  # type: ignore[no-untyped-def]
    query, key, weight, grad, key_grad, T, S, A, TOKENS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    b, s = _own(S, TOKENS)
    at, there = _tile(b, s, S, A, WIDTH)
    k = tl.load(key + at, mask=there, other=0.0).to(tl.float32)
    total_grad = tl.zeros([TOKENS, WIDTH], tl.float32)
    for t in range(T):
        g = tl.load(grad + (b * T + t) * S + s, mask=s < S, other=0.0).to(tl.float32)
        y = _tanh(_vector(query, b * T + t, A, WIDTH)[None, :] + k)
        total_grad += g[:, None] * (1 - y * y)
    w = _vector(weight, 0, A, WIDTH)
    tl.store(key_grad + at, (total_grad * w[None, :]).to(key_grad.dtype.element_ty), mask=there)


def _blocks(S: int, A: int) -> dict[str, int]:
    width = triton.next_power_of_2(A)
    tokens = min(max(1, KEY_ELEMENTS // width), triton.next_power_of_2(S))
    return {"TOKENS": tokens, "WIDTH": width, "num_warps": SCORE_WARPS}


@torch.library.custom_op("dragoman::additive_score", mutates_args=())
def additive_score(query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor) -> Tensor:
    """Return score_BTS in the dtype of the queries."""
    (B, T, A), S = query_BTA.shape, key_BSA.size(1)
    score_BTS = query_BTA.new_empty(B, T, S)
    if score_BTS.numel():
        how = _blocks(S, A)
        _score[(B * triton.cdiv(S, how["TOKENS"]),)](
            query_BTA.contiguous(), key_BSA.contiguous(), weight_A.contiguous(), score_BTS, T, S, A, **how
        )
    return score_BTS


@torch.library.custom_op("dragoman::additive_score_backward", mutates_args=())
def additive_score_backward(
    grad_BTS: Tensor, query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and weight."""
    given = [x.contiguous() for x in (query_BTA, key_BSA, weight_A)]
    grads = query_grad, key_grad, _ = _allocate_gradients(*given)
    if not grad_BTS.numel():
        return tuple(x.zero_() for x in grads)  # type: ignore[return-value]
    grad, (B, T, A), S = grad_BTS.contiguous(), query_BTA.shape, key_BSA.size(1)
    sums_NA, how = query_grad.new_empty(B * T, A, dtype=torch.float32), _blocks(S, A)
    _query_backward[(B * T,)](*given, grad, query_grad, key_grad, sums_NA, T, S, A, SINGLE=T == 1, **how)
    if T > 1:
        _key_backward[(B * triton.cdiv(S, how["TOKENS"]),)](*given, grad, key_grad, T, S, A, **how)
    return query_grad, key_grad, sums_NA.sum(0).to(weight_A.dtype)


def _allocate_gradients(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized gradients of these tensors."""
    query, key, weight = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in given)
    return query, key, weight


@additive_score.register_fake
def _(query_BTA: Tensor, key_BSA: Tensor, _: Tensor) -> Tensor:
    return query_BTA.new_empty(*query_BTA.shape[:2], key_BSA.size(1))


@additive_score_backward.register_fake
def _(_: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _allocate_gradients(*given)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001 - the signature that PyTorch calls
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_BTS: Tensor) -> tuple[Tensor, ...]:
    grads: tuple[Tensor, ...] = additive_score_backward(grad_BTS, *ctx.saved_tensors)
    return grads


additive_score.register_autograd(_backward, setup_context=_save)
