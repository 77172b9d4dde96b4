"""The additive score on a GPU: what is in the tanh is made in registers, forwards and backwards, and never leaves them.

Numbers are float32 there, whatever comes in. A program holds the keys of a few source tokens and walks over the
queries, or holds one query and walks over the keys; sums are made in one order, so the same slopes come out each time.
modules/attention_scores.py says when it is asked; the readable twin is `plain` there.

Shapes   B sentences   S source width   T queries   A attention width   N all queries (B x T)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

KEY_ELEMENTS = 4096  # numbers of the keys that a program holds at a time: 32 to a thread
SCORE_WARPS = 4


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit  # type: ignore[untyped-decorator]
def _vector(base, row, A, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row of A numbers."""
    a = tl.arange(0, WIDTH)
    return tl.load(base + row * A + a, mask=a < A, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(b, s, S, A, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the keys of these source tokens lie, and which of them there are."""
    a = tl.arange(0, WIDTH)
    return (b * S + s)[:, None] * A + a[None, :], (s < S)[:, None] & (a < A)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _own(S, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sentence of this program, and the source tokens whose keys it holds."""
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
def _query_slope(  # type: ignore[no-untyped-def]
    query, key, weight, grad, query_slope, key_slope, sums, T, S, A,
    ALONE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """For one query: its slope, its part of the weights' and, where no other query meets its keys, theirs."""
    n = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, WIDTH)
    q, w = _vector(query, n, A, WIDTH), _vector(weight, 0, A, WIDTH)
    slope, total = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for first in range(0, S, TOKENS):
        s = first + tl.arange(0, TOKENS)
        g = tl.load(grad + n * S + s, mask=s < S, other=0.0).to(tl.float32)
        at, there = _tile(n // T, s, S, A, WIDTH)
        y = _tanh(q[None, :] + tl.load(key + at, mask=there, other=0.0).to(tl.float32))
        bend = g[:, None] * (1 - y * y)
        slope += tl.sum(bend, 0)
        total += tl.sum(g[:, None] * y, 0)
        if ALONE:
            tl.store(key_slope + at, (bend * w[None, :]).to(key_slope.dtype.element_ty), mask=there)
    tl.store(query_slope + n * A + a, (slope * w).to(query_slope.dtype.element_ty), mask=a < A)
    tl.store(sums + n * A + a, total, mask=a < A)


@triton.jit(do_not_specialize=["T", "S"])  # type: ignore[untyped-decorator]
def _key_slope(  # type: ignore[no-untyped-def]
    query, key, weight, grad, key_slope, T, S, A, TOKENS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    b, s = _own(S, TOKENS)
    at, there = _tile(b, s, S, A, WIDTH)
    k = tl.load(key + at, mask=there, other=0.0).to(tl.float32)
    slope = tl.zeros([TOKENS, WIDTH], tl.float32)
    for t in range(T):
        g = tl.load(grad + (b * T + t) * S + s, mask=s < S, other=0.0).to(tl.float32)
        y = _tanh(_vector(query, b * T + t, A, WIDTH)[None, :] + k)
        slope += g[:, None] * (1 - y * y)
    w = _vector(weight, 0, A, WIDTH)
    tl.store(key_slope + at, (slope * w[None, :]).to(key_slope.dtype.element_ty), mask=there)


def _blocks(S: int, A: int) -> dict[str, int]:
    width = triton.next_power_of_2(A)
    tokens = min(max(1, KEY_ELEMENTS // width), triton.next_power_of_2(S))
    return {"TOKENS": tokens, "WIDTH": width, "num_warps": SCORE_WARPS}


@torch.library.custom_op("dragoman::additive_score", mutates_args=())
def additive_score(query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor) -> Tensor:
    """score_BTS, in the precision of the queries."""
    (B, T, A), S = query_BTA.shape, key_BSA.size(1)
    score_BTS = query_BTA.new_empty(B, T, S)
    if score_BTS.numel():
        how = _blocks(S, A)
        _score[(B * triton.cdiv(S, how["TOKENS"]),)](
            query_BTA.contiguous(), key_BSA.contiguous(), weight_A.contiguous(), score_BTS, T, S, A, **how
        )
    return score_BTS


@torch.library.custom_op("dragoman::additive_score_back", mutates_args=())
def additive_score_backward(
    grad_BTS: Tensor, query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The slopes of all three."""
    given = [x.contiguous() for x in (query_BTA, key_BSA, weight_A)]
    slopes = query_slope, key_slope, _ = _slopes(*given)
    if not grad_BTS.numel():
        return tuple(x.zero_() for x in slopes)  # type: ignore[return-value]
    grad, (B, T, A), S = grad_BTS.contiguous(), query_BTA.shape, key_BSA.size(1)
    sums_NA, how = query_slope.new_empty(B * T, A, dtype=torch.float32), _blocks(S, A)
    _query_slope[(B * T,)](*given, grad, query_slope, key_slope, sums_NA, T, S, A, ALONE=T == 1, **how)
    if T > 1:
        _key_slope[(B * triton.cdiv(S, how["TOKENS"]),)](*given, grad, key_slope, T, S, A, **how)
    return query_slope, key_slope, sums_NA.sum(0).to(weight_A.dtype)


def _slopes(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for them."""
    query, key, weight = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in given)
    return query, key, weight


@additive_score.register_fake
def _(query_BTA: Tensor, key_BSA: Tensor, _: Tensor) -> Tensor:
    return query_BTA.new_empty(*query_BTA.shape[:2], key_BSA.size(1))


@additive_score_backward.register_fake
def _(_: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _slopes(*given)


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001 - the shape it must have
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, grad_BTS: Tensor) -> tuple[Tensor, ...]:
    slopes: tuple[Tensor, ...] = additive_score_backward(grad_BTS, *ctx.saved_tensors)
    return slopes


additive_score.register_autograd(_back, setup_context=_remember)
