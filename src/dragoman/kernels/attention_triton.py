"""Triton kernels for attention within packed rows, for training in half precision.

The mask follows from segment ids, so none is built. In rows of up to 128 tokens, one program per row and head keeps all
scores in registers, forward and backward. Longer rows are split into tiles: a tile of queries loops over tiles of keys
and skips those without a token of its own sentences, so the work grows with the sentences, not with the row. Backward,
queries loop over keys for their gradients, then keys over queries for theirs. kernels/attention.py has the reference
implementation and chooses.

Shapes   B rows   H heads   Q queries   K keys   D head width   C all heads   E, F projections that hold several of them
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST_SINGLE_TILE = 128  # tokens of a row whose scores one program can hold
LOG2E = 1.4426950408889634  # scores are in base 2, since the hardware computes exp2


@triton.jit  # type: ignore[untyped-decorator]
def _keep(query_segment, key_segment, b, Q, K, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the mask of row b: attend within the own sentence and, if causal, not to later keys."""
    m, n = tl.arange(0, M), tl.arange(0, N)
    own = tl.load(query_segment + b * Q + m, mask=m < Q, other=-1)
    other = tl.load(key_segment + b * K + n, mask=n < K, other=-2)
    keep = own[:, None] == other[None, :]
    if CAUSAL:
        keep = keep & (m[:, None] >= n[None, :])
    return keep


@triton.jit  # type: ignore[untyped-decorator]
def _tile(base, b, h, rows, row_stride, head_stride, token_stride, P: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return pointers to the tokens of a row and head, and which of them exist."""
    p, d = tl.arange(0, P), tl.arange(0, D)
    at = base + b.to(tl.int64) * row_stride + h * head_stride
    return at + p[:, None] * token_stride + d[None, :], (p < rows)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, out, sums,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k,
    H, Q, K, scale, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    at, real = _tile(query, b, h, Q, query_b, query_h, query_q, M, D)
    q = tl.load(at, mask=real, other=0.0)
    at, there = _tile(key, b, h, K, key_b, key_h, key_k, N, D)
    k = tl.load(at, mask=there, other=0.0)
    score = tl.dot(q, tl.trans(k)) * scale
    score = tl.where(_keep(query_segment, key_segment, b, Q, K, CAUSAL, M, N), score, -1e30)
    highest = tl.maximum(tl.max(score, 1), -1e29)  # padding may have no key: then all its weights are 0
    weight = tl.exp2(score - highest[:, None])
    total = tl.maximum(tl.sum(weight, 1), 1e-30)
    at, there = _tile(value, b, h, K, value_b, value_h, value_k, N, D)
    v = tl.load(at, mask=there, other=0.0)
    read = tl.dot(weight.to(v.dtype), v) / total[:, None]
    at, real = _tile(out, b, h, Q, Q * H * D, D, H * D, M, D)
    tl.store(at, read.to(v.dtype), mask=real)
    m = tl.arange(0, M)
    tl.store(sums + tl.program_id(0) * Q + m, highest + tl.log2(total), mask=m < Q)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, out, sums, grad, query_grad, key_grad, value_grad,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k, grad_b, grad_h, grad_q,
    query_grad_q, key_grad_k, value_grad_k, H, Q, K, scale, root,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    m = tl.arange(0, M)
    at, real = _tile(query, b, h, Q, query_b, query_h, query_q, M, D)
    q = tl.load(at, mask=real, other=0.0)
    at, there = _tile(key, b, h, K, key_b, key_h, key_k, N, D)
    k = tl.load(at, mask=there, other=0.0)
    total = tl.load(sums + tl.program_id(0) * Q + m, mask=m < Q, other=0.0)
    score = tl.dot(q, tl.trans(k)) * scale
    keep = _keep(query_segment, key_segment, b, Q, K, CAUSAL, M, N)
    weight = tl.where(keep, tl.exp2(score - total[:, None]), 0.0)
    at, real = _tile(grad, b, h, Q, grad_b, grad_h, grad_q, M, D)
    g = tl.load(at, mask=real, other=0.0)
    at, there = _tile(value, b, h, K, value_b, value_h, value_k, N, D)
    v = tl.load(at, mask=there, other=0.0)
    at, there = _tile(value_grad, b, h, K, K * value_grad_k, D, value_grad_k, N, D)
    tl.store(at, tl.dot(tl.trans(weight.to(g.dtype)), g).to(v.dtype), mask=there)
    at, real = _tile(out, b, h, Q, Q * H * D, D, H * D, M, D)
    read = tl.load(at, mask=real, other=0.0)
    mean = tl.sum(read.to(tl.float32) * g.to(tl.float32), 1)
    score_grad = (weight * (tl.dot(g, tl.trans(v)) - mean[:, None]) * root).to(q.dtype)
    at, real = _tile(query_grad, b, h, Q, Q * query_grad_q, D, query_grad_q, M, D)
    tl.store(at, tl.dot(score_grad, k).to(q.dtype), mask=real)
    at, there = _tile(key_grad, b, h, K, K * key_grad_k, D, key_grad_k, N, D)
    tl.store(at, tl.dot(tl.trans(score_grad), q).to(k.dtype), mask=there)


def _blocks(q_BHQD: Tensor, k_BHKD: Tensor, causal: bool) -> dict[str, Any]:
    sides = [max(16, triton.next_power_of_2(x.size(2))) for x in (q_BHQD, k_BHKD)]
    warps = 8 if sides[0] * sides[1] > 128 * 64 else 4
    how = {"num_warps": warps, "num_stages": 1}  # there is no loop to pipeline
    return {"CAUSAL": causal, "M": sides[0], "N": sides[1], "D": q_BHQD.size(3), **how}


def _strides(*some: Tensor) -> list[int]:
    return [stride for x in some for stride in x.stride()[:3]]


def _heads(x_BTE: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
    """Split a projection into its parts, each as x_BHTD."""
    return x_BTE.view(*x_BTE.shape[:2], parts, heads, -1).permute(2, 0, 3, 1, 4).unbind()


@torch.library.custom_op("dragoman::attend_rows", mutates_args=())
def attend_rows(
    query_BQE: Tensor, key_value_BKF: Tensor | None, query_segment_BQ: Tensor, key_segment_BK: Tensor, heads: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the outputs, out_BQC, and the log-sum-exp of the scores of each query, sums_BHQ.

    Keys and values are side by side in a projection of their own, or follow the queries in the same one.
    """
    q, k, v = _split(query_BQE, key_value_BKF, heads)
    B, H, Q, D = q.shape
    out, sums = q.new_empty(B, Q, H * D), q.new_empty(B, H, Q, dtype=torch.float32)
    if max(Q, k.size(2)) > LONGEST_SINGLE_TILE:
        segments = query_segment_BQ, key_segment_BK
        attend_tiled((q, k, v), _strides(q, k, v), segments, out, sums, D**-0.5 * LOG2E, causal)
        return out, sums
    _forward[(B * H,)](
        q, k, v, query_segment_BQ, key_segment_BK, out, sums, *_strides(q, k, v),
        H, Q, k.size(2), D**-0.5 * LOG2E, **_blocks(q, k, causal),
    )  # fmt: skip
    return out, sums


@torch.library.custom_op("dragoman::attend_rows_backward", mutates_args=())
def attend_rows_backward(
    grad_BQC: Tensor, query_BQE: Tensor, key_value_BKF: Tensor | None, query_segment_BQ: Tensor,
    key_segment_BK: Tensor, out_BQC: Tensor, sums_BHQ: Tensor, heads: int, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of both projections; an empty tensor if there is only one."""
    q, k, v = _split(query_BQE, key_value_BKF, heads)
    (grad,) = _heads(grad_BQC, heads, 1)
    query_grad, key_value_grad = torch.empty_like(query_BQE), _like(key_value_BKF, query_BQE)
    grads = _split(query_grad, None if key_value_BKF is None else key_value_grad, heads)
    B, H, Q, D = q.shape
    if max(Q, k.size(2)) > LONGEST_SINGLE_TILE:
        segments, strides = (query_segment_BQ, key_segment_BK), _strides(q, k, v, grad)
        scales = D**-0.5 * LOG2E, D**-0.5
        attend_tiled_backward((q, k, v), strides, segments, out_BQC, sums_BHQ, grad, grads, *scales, causal)
        return query_grad, key_value_grad
    _backward[(B * H,)](
        q, k, v, query_segment_BQ, key_segment_BK, out_BQC, sums_BHQ, grad, *grads, *_strides(q, k, v, grad),
        *(x.stride(2) for x in grads), H, Q, k.size(2), D**-0.5 * LOG2E, D**-0.5, **_blocks(q, k, causal),
    )  # fmt: skip
    return query_grad, key_value_grad


def _split(query_BQE: Tensor, key_value_BKF: Tensor | None, heads: int) -> tuple[Tensor, ...]:
    if key_value_BKF is None:
        return _heads(query_BQE, heads, 3)
    return (*_heads(query_BQE, heads, 1), *_heads(key_value_BKF, heads, 2))


def _like(key_value_BKF: Tensor | None, other: Tensor) -> Tensor:
    return other.new_empty(0) if key_value_BKF is None else torch.empty_like(key_value_BKF)


@attend_rows.register_fake
def _(query_BQE: Tensor, key_value_BKF: Tensor | None, _: Tensor, __: Tensor, heads: int, ___: bool) -> Any:
    B, Q, E = query_BQE.shape
    width = E // 3 if key_value_BKF is None else E
    return query_BQE.new_empty(B, Q, width), query_BQE.new_empty(B, heads, Q, dtype=torch.float32)


@attend_rows_backward.register_fake
def _(_: Tensor, query_BQE: Tensor, key_value_BKF: Tensor | None, *__: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query_BQE), _like(key_value_BKF, query_BQE)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.heads, ctx.causal = inputs
    ctx.save_for_backward(*tensors, *output)


def _run_backward(ctx: Any, grad_BQC: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    _, key_value_BKF, *_ = ctx.saved_tensors
    query_grad, key_value_grad = attend_rows_backward(grad_BQC.contiguous(), *ctx.saved_tensors, ctx.heads, ctx.causal)
    return query_grad, None if key_value_BKF is None else key_value_grad, None, None, None, None


attend_rows.register_autograd(_run_backward, setup_context=_save)

TILE = 64  # queries, and keys, of a tile


@triton.jit
def _load_segments(segment, b, length, p, missing):  # type: ignore[no-untyped-def]
    """Load the segment ids of these tokens of row b."""
    return tl.load(segment + b * length + p, mask=p < length, other=missing)


@triton.jit  # type: ignore[untyped-decorator]
def _at(base, b, h, p, row_stride, head_stride, token_stride, D: tl.constexpr):  # type: ignore[no-untyped-def]
    d = tl.arange(0, D)
    return base + b.to(tl.int64) * row_stride + h * head_stride + p[:, None] * token_stride + d[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _load(base, b, h, p, length, row_stride, head_stride, token_stride, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load these tokens of a row and head; 0 for those that do not exist."""
    at = _at(base, b, h, p, row_stride, head_stride, token_stride, D)
    return tl.load(at, mask=(p < length)[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _keep_tile(own, other, m, n, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    keep = own[:, None] == other[None, :]
    if CAUSAL:
        keep = keep & (m[:, None] >= n[None, :])
    return keep


@triton.jit  # type: ignore[untyped-decorator]
def _forward_tiled(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, out, sums,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k,
    H, Q, K, scale, CAUSAL: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    m = tl.program_id(1) * TILE + tl.arange(0, TILE)
    own = _load_segments(query_segment, b, Q, m, -1)
    q = _load(query, b, h, m, Q, query_b, query_h, query_q, D)
    highest, total = tl.zeros([TILE], tl.float32) - 1e29, tl.zeros([TILE], tl.float32)
    read = tl.zeros([TILE, D], tl.float32)
    end = tl.minimum((tl.program_id(1) + 1) * TILE, K) if CAUSAL else K
    for start in range(0, end, TILE):
        n = start + tl.arange(0, TILE)
        keep = _keep_tile(own, _load_segments(key_segment, b, K, n, -2), m, n, CAUSAL)
        if tl.max(keep.to(tl.int32)) > 0:
            k = _load(key, b, h, n, K, key_b, key_h, key_k, D)
            score = tl.where(keep, tl.dot(q, tl.trans(k)) * scale, -1e30)
            now = tl.maximum(highest, tl.max(score, 1))
            weight, rescale = tl.exp2(score - now[:, None]), tl.exp2(highest - now)
            v = _load(value, b, h, n, K, value_b, value_h, value_k, D)
            total = total * rescale + tl.sum(weight, 1)
            read = read * rescale[:, None] + tl.dot(weight.to(v.dtype), v)
            highest = now
    total = tl.maximum(total, 1e-30)  # padding may have no key
    at = _at(out, b, h, m, Q * H * D, D, H * D, D)
    tl.store(at, (read / total[:, None]).to(q.dtype), mask=(m < Q)[:, None])
    tl.store(sums + tl.program_id(0) * Q + m, highest + tl.log2(total), mask=m < Q)


@triton.jit  # type: ignore[untyped-decorator]
def _queries_back(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, out, sums, grad, means, query_grad,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k, grad_b, grad_h, grad_q, query_grad_q,
    H, Q, K, scale, root, CAUSAL: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of queries, and `means` (out . grad), which the keys' gradients need."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    m = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = (m < Q)[:, None]
    own = _load_segments(query_segment, b, Q, m, -1)
    q = _load(query, b, h, m, Q, query_b, query_h, query_q, D)
    g = _load(grad, b, h, m, Q, grad_b, grad_h, grad_q, D)
    read = _load(out, b, h, m, Q, Q * H * D, D, H * D, D)
    mean = tl.sum(read.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(means + tl.program_id(0) * Q + m, mean, mask=m < Q)
    total = tl.load(sums + tl.program_id(0) * Q + m, mask=m < Q, other=0.0)
    grad_total = tl.zeros([TILE, D], tl.float32)
    end = tl.minimum((tl.program_id(1) + 1) * TILE, K) if CAUSAL else K
    for start in range(0, end, TILE):
        n = start + tl.arange(0, TILE)
        keep = _keep_tile(own, _load_segments(key_segment, b, K, n, -2), m, n, CAUSAL)
        if tl.max(keep.to(tl.int32)) > 0:
            k = _load(key, b, h, n, K, key_b, key_h, key_k, D)
            v = _load(value, b, h, n, K, value_b, value_h, value_k, D)
            weight = tl.where(keep, tl.exp2(tl.dot(q, tl.trans(k)) * scale - total[:, None]), 0.0)
            score_grad = weight * (tl.dot(g, tl.trans(v)) - mean[:, None]) * root
            grad_total += tl.dot(score_grad.to(k.dtype), k)
    at = _at(query_grad, b, h, m, Q * query_grad_q, D, query_grad_q, D)
    tl.store(at, grad_total.to(q.dtype), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _keys_back(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, sums, grad, means, key_grad, value_grad,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k, grad_b, grad_h, grad_q,
    key_grad_k, value_grad_k, H, Q, K, scale, root, CAUSAL: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and values."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = (n < K)[:, None]
    other = _load_segments(key_segment, b, K, n, -2)
    k = _load(key, b, h, n, K, key_b, key_h, key_k, D)
    v = _load(value, b, h, n, K, value_b, value_h, value_k, D)
    key_total, value_total = tl.zeros([TILE, D], tl.float32), tl.zeros([TILE, D], tl.float32)
    for start in range(tl.program_id(1) * TILE if CAUSAL else 0, Q, TILE):
        m = start + tl.arange(0, TILE)
        keep = _keep_tile(_load_segments(query_segment, b, Q, m, -1), other, m, n, CAUSAL)
        if tl.max(keep.to(tl.int32)) > 0:
            q = _load(query, b, h, m, Q, query_b, query_h, query_q, D)
            g = _load(grad, b, h, m, Q, grad_b, grad_h, grad_q, D)
            total = tl.load(sums + tl.program_id(0) * Q + m, mask=m < Q, other=0.0)
            mean = tl.load(means + tl.program_id(0) * Q + m, mask=m < Q, other=0.0)
            weight = tl.where(keep, tl.exp2(tl.dot(q, tl.trans(k)) * scale - total[:, None]), 0.0)
            value_total += tl.dot(tl.trans(weight.to(g.dtype)), g)
            score_grad = (weight * (tl.dot(g, tl.trans(v)) - mean[:, None]) * root).to(q.dtype)
            key_total += tl.dot(tl.trans(score_grad), q)
    at = _at(key_grad, b, h, n, K * key_grad_k, D, key_grad_k, D)
    tl.store(at, key_total.to(k.dtype), mask=there)
    at = _at(value_grad, b, h, n, K * value_grad_k, D, value_grad_k, D)
    tl.store(at, value_total.to(v.dtype), mask=there)


def attend_tiled(
    parts: tuple[Tensor, ...], strides: list[int], segments: tuple[Tensor, Tensor], out: Tensor, sums: Tensor,
    scale: float, causal: bool,
) -> None:  # fmt: skip
    """Fill `out` and `sums` from queries, keys and values, each as x_BHTD."""
    (B, H, Q, D), K = parts[0].shape, parts[1].size(2)
    _forward_tiled[(B * H, triton.cdiv(Q, TILE))](
        *parts, *segments, out, sums, *strides, H, Q, K, scale, **_how(D, causal)
    )


def attend_tiled_backward(
    parts: tuple[Tensor, ...], strides: list[int], segments: tuple[Tensor, Tensor], out: Tensor, sums: Tensor,
    grad: Tensor, grads: tuple[Tensor, ...], scale: float, root: float, causal: bool,
) -> None:  # fmt: skip
    """Fill `grads`; `strides` are those of the parts and of `grad`."""
    (B, H, Q, D), K = parts[0].shape, parts[1].size(2)
    query_grad, key_grad, value_grad = grads
    means, sizes = sums.new_empty(sums.shape), (H, Q, K, scale, root)
    _queries_back[(B * H, triton.cdiv(Q, TILE))](
        *parts, *segments, out, sums, grad, means, query_grad, *strides, query_grad.stride(2), *sizes, **_how(D, causal)
    )
    _keys_back[(B * H, triton.cdiv(K, TILE))](
        *parts, *segments, sums, grad, means, key_grad, value_grad, *strides, key_grad.stride(2), value_grad.stride(2),
        *sizes, **_how(D, causal),
    )  # fmt: skip


def _how(D: int, causal: bool) -> dict[str, Any]:
    return {"CAUSAL": causal, "TILE": TILE, "D": D, "num_warps": 4, "num_stages": 1}
