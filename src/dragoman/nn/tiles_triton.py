"""Attention within long packed rows on a GPU: what rows_triton.py does where a row's scores fit into no program.

Queries are taken a tile at a time and walk over tiles of keys; of tiles that hold nobody of their own sentences nothing
but that is read, so that products grow with the sentences and not with the row. Backwards, queries walk over keys for
their own slopes, then keys over queries for theirs.

Shapes   B rows   H heads   Q queries   K keys   D head width
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # places of a tile, of queries and of keys


@triton.jit
def _who(segment, b, places, p, nobody):  # type: ignore[no-untyped-def]
    """Whose sentence these places of row b are of."""
    return tl.load(segment + b * places + p, mask=p < places, other=nobody)


@triton.jit  # type: ignore[untyped-decorator]
def _at(base, b, h, p, row_stride, head_stride, place_stride, D: tl.constexpr):  # type: ignore[no-untyped-def]
    d = tl.arange(0, D)
    return base + b.to(tl.int64) * row_stride + h * head_stride + p[:, None] * place_stride + d[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _load(base, b, h, p, places, row_stride, head_stride, place_stride, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of these places of a row and head; 0 for those that are not there."""
    at = _at(base, b, h, p, row_stride, head_stride, place_stride, D)
    return tl.load(at, mask=(p < places)[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _keep(own, other, m, n, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    keep = own[:, None] == other[None, :]
    if CAUSAL:
        keep = keep & (m[:, None] >= n[None, :])
    return keep


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, out, sums,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k,
    H, Q, K, scale, CAUSAL: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    m = tl.program_id(1) * TILE + tl.arange(0, TILE)
    own = _who(query_segment, b, Q, m, -1)
    q = _load(query, b, h, m, Q, query_b, query_h, query_q, D)
    most, total = tl.zeros([TILE], tl.float32) - 1e29, tl.zeros([TILE], tl.float32)
    read = tl.zeros([TILE, D], tl.float32)
    end = tl.minimum((tl.program_id(1) + 1) * TILE, K) if CAUSAL else K
    for start in range(0, end, TILE):
        n = start + tl.arange(0, TILE)
        keep = _keep(own, _who(key_segment, b, K, n, -2), m, n, CAUSAL)
        if tl.max(keep.to(tl.int32)) > 0:
            k = _load(key, b, h, n, K, key_b, key_h, key_k, D)
            score = tl.where(keep, tl.dot(q, tl.trans(k)) * scale, -1e30)
            now = tl.maximum(most, tl.max(score, 1))
            weight, fade = tl.exp2(score - now[:, None]), tl.exp2(most - now)
            v = _load(value, b, h, n, K, value_b, value_h, value_k, D)
            total = total * fade + tl.sum(weight, 1)
            read = read * fade[:, None] + tl.dot(weight.to(v.dtype), v)
            most = now
    total = tl.maximum(total, 1e-30)  # padding may have nobody to look at
    at = _at(out, b, h, m, Q * H * D, D, H * D, D)
    tl.store(at, (read / total[:, None]).to(q.dtype), mask=(m < Q)[:, None])
    tl.store(sums + tl.program_id(0) * Q + m, most + tl.log2(total), mask=m < Q)


@triton.jit  # type: ignore[untyped-decorator]
def _queries_back(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, out, sums, grad, means, query_grad,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k, grad_b, grad_h, grad_q, query_grad_q,
    H, Q, K, scale, root, CAUSAL: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The slopes of a tile of queries; and what the keys' slopes will need of it, the mean slope of what it read."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    m = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = (m < Q)[:, None]
    own = _who(query_segment, b, Q, m, -1)
    q = _load(query, b, h, m, Q, query_b, query_h, query_q, D)
    g = _load(grad, b, h, m, Q, grad_b, grad_h, grad_q, D)
    read = _load(out, b, h, m, Q, Q * H * D, D, H * D, D)
    mean = tl.sum(read.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(means + tl.program_id(0) * Q + m, mean, mask=m < Q)
    total = tl.load(sums + tl.program_id(0) * Q + m, mask=m < Q, other=0.0)
    slope = tl.zeros([TILE, D], tl.float32)
    end = tl.minimum((tl.program_id(1) + 1) * TILE, K) if CAUSAL else K
    for start in range(0, end, TILE):
        n = start + tl.arange(0, TILE)
        keep = _keep(own, _who(key_segment, b, K, n, -2), m, n, CAUSAL)
        if tl.max(keep.to(tl.int32)) > 0:
            k = _load(key, b, h, n, K, key_b, key_h, key_k, D)
            v = _load(value, b, h, n, K, value_b, value_h, value_k, D)
            weight = tl.where(keep, tl.exp2(tl.dot(q, tl.trans(k)) * scale - total[:, None]), 0.0)
            bend = weight * (tl.dot(g, tl.trans(v)) - mean[:, None]) * root
            slope += tl.dot(bend.to(k.dtype), k)
    at = _at(query_grad, b, h, m, Q * query_grad_q, D, query_grad_q, D)
    tl.store(at, slope.to(q.dtype), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _keys_back(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, sums, grad, means, key_grad, value_grad,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k, grad_b, grad_h, grad_q,
    key_grad_k, value_grad_k, H, Q, K, scale, root, CAUSAL: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = (n < K)[:, None]
    other = _who(key_segment, b, K, n, -2)
    k = _load(key, b, h, n, K, key_b, key_h, key_k, D)
    v = _load(value, b, h, n, K, value_b, value_h, value_k, D)
    key_slope, value_slope = tl.zeros([TILE, D], tl.float32), tl.zeros([TILE, D], tl.float32)
    for start in range(tl.program_id(1) * TILE if CAUSAL else 0, Q, TILE):
        m = start + tl.arange(0, TILE)
        keep = _keep(_who(query_segment, b, Q, m, -1), other, m, n, CAUSAL)
        if tl.max(keep.to(tl.int32)) > 0:
            q = _load(query, b, h, m, Q, query_b, query_h, query_q, D)
            g = _load(grad, b, h, m, Q, grad_b, grad_h, grad_q, D)
            total = tl.load(sums + tl.program_id(0) * Q + m, mask=m < Q, other=0.0)
            mean = tl.load(means + tl.program_id(0) * Q + m, mask=m < Q, other=0.0)
            weight = tl.where(keep, tl.exp2(tl.dot(q, tl.trans(k)) * scale - total[:, None]), 0.0)
            value_slope += tl.dot(tl.trans(weight.to(g.dtype)), g)
            bend = (weight * (tl.dot(g, tl.trans(v)) - mean[:, None]) * root).to(q.dtype)
            key_slope += tl.dot(tl.trans(bend), q)
    at = _at(key_grad, b, h, n, K * key_grad_k, D, key_grad_k, D)
    tl.store(at, key_slope.to(k.dtype), mask=there)
    at = _at(value_grad, b, h, n, K * value_grad_k, D, value_grad_k, D)
    tl.store(at, value_slope.to(v.dtype), mask=there)


def forward(
    parts: tuple[Tensor, ...], strides: list[int], segments: tuple[Tensor, Tensor], out: Tensor, sums: Tensor,
    scale: float, causal: bool,
) -> None:  # fmt: skip
    """Fill `out` and `sums` from queries, keys and values, each as x_BHTD."""
    (B, H, Q, D), K = parts[0].shape, parts[1].size(2)
    _forward[(B * H, triton.cdiv(Q, TILE))](*parts, *segments, out, sums, *strides, H, Q, K, scale, **_how(D, causal))


def backward(
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
