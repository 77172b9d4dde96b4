"""Triton kernels for attention: within packed rows in training, to a KV cache in decoding, and additive scores.

The reference implementations are in kernels/attention.py and modules/attention_scores.py, which also choose.

Training: the mask follows from segment ids, so none is built. In rows of up to 128 tokens, one program per row and head
keeps all scores in registers, forward and backward. Longer rows are split into tiles: a tile of queries loops over
tiles of keys and skips those without a token of its own sentences, so the work grows with the sentences, not with the
row. Backward, queries loop over keys for their gradients, then keys over queries for theirs.

Decoding: one program per row and head attends from the new token to the row's past, or to its source.

Additive scores: the tanh never leaves the registers, forward and backward, and everything is computed in float32. A
program holds the keys of a few source tokens and loops over the queries, or holds one query and loops over the keys.
Sums are added in a fixed order, so gradients are reproducible to the bit.

Shapes   B rows   H heads   Q queries   K keys   D head width   C all heads   E, F projections that hold several of them
         N rows of a search, or all queries (B x T)   S source width   T queries   A attention width
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dragoman.kernels.attention import KeyValue

LONGEST_SINGLE_TILE = 128  # maximum number of tokens of a row whose scores one program computes at once
LOG2E = 1.4426950408889634  # scores are in base 2, since the hardware computes exp2
TILE = 64  # queries, and keys, of a tile of longer rows
POSITIONS_PER_BLOCK = 16  # of a KV cache that are read at a time


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
def _store(base, b, h, p, length, row_stride, head_stride, token_stride, x, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store x at these tokens of a row and head, as far as they exist."""
    tl.store(_at(base, b, h, p, row_stride, head_stride, token_stride, D), x, mask=(p < length)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _keep(own, other, m, n, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the mask: attend within the query's own sentence and, if causal, not to later keys."""
    keep = own[:, None] == other[None, :]
    if CAUSAL:
        keep = keep & (m[:, None] >= n[None, :])
    return keep


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, out, sums,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k,
    H, Q, K, scale, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    m, n = tl.arange(0, M), tl.arange(0, N)
    q = _load(query, b, h, m, Q, query_b, query_h, query_q, D)
    k = _load(key, b, h, n, K, key_b, key_h, key_k, D)
    score = tl.dot(q, tl.trans(k)) * scale
    own, other = _load_segments(query_segment, b, Q, m, -1), _load_segments(key_segment, b, K, n, -2)
    score = tl.where(_keep(own, other, m, n, CAUSAL), score, -1e30)
    highest = tl.maximum(tl.max(score, 1), -1e29)  # padding may have no key: then all its weights are 0
    weight = tl.exp2(score - highest[:, None])
    total = tl.maximum(tl.sum(weight, 1), 1e-30)
    v = _load(value, b, h, n, K, value_b, value_h, value_k, D)
    read = tl.dot(weight.to(v.dtype), v) / total[:, None]
    _store(out, b, h, m, Q, Q * H * D, D, H * D, read.to(v.dtype), D)
    tl.store(sums + tl.program_id(0) * Q + m, highest + tl.log2(total), mask=m < Q)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, out, sums, grad, query_grad, key_grad, value_grad,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k, grad_b, grad_h, grad_q,
    query_grad_q, key_grad_k, value_grad_k, H, Q, K, scale, root,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    m, n = tl.arange(0, M), tl.arange(0, N)
    q = _load(query, b, h, m, Q, query_b, query_h, query_q, D)
    k = _load(key, b, h, n, K, key_b, key_h, key_k, D)
    total = tl.load(sums + tl.program_id(0) * Q + m, mask=m < Q, other=0.0)
    score = tl.dot(q, tl.trans(k)) * scale
    own, other = _load_segments(query_segment, b, Q, m, -1), _load_segments(key_segment, b, K, n, -2)
    weight = tl.where(_keep(own, other, m, n, CAUSAL), tl.exp2(score - total[:, None]), 0.0)
    g = _load(grad, b, h, m, Q, grad_b, grad_h, grad_q, D)
    v = _load(value, b, h, n, K, value_b, value_h, value_k, D)
    value_grads = tl.dot(tl.trans(weight.to(g.dtype)), g).to(v.dtype)
    _store(value_grad, b, h, n, K, K * value_grad_k, D, value_grad_k, value_grads, D)
    read = _load(out, b, h, m, Q, Q * H * D, D, H * D, D)
    mean = tl.sum(read.to(tl.float32) * g.to(tl.float32), 1)
    score_grad = (weight * (tl.dot(g, tl.trans(v)) - mean[:, None]) * root).to(q.dtype)
    _store(query_grad, b, h, m, Q, Q * query_grad_q, D, query_grad_q, tl.dot(score_grad, k).to(q.dtype), D)
    _store(key_grad, b, h, n, K, K * key_grad_k, D, key_grad_k, tl.dot(tl.trans(score_grad), q).to(k.dtype), D)


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
        keep = _keep(own, _load_segments(key_segment, b, K, n, -2), m, n, CAUSAL)
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
    _store(out, b, h, m, Q, Q * H * D, D, H * D, (read / total[:, None]).to(q.dtype), D)
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
        keep = _keep(own, _load_segments(key_segment, b, K, n, -2), m, n, CAUSAL)
        if tl.max(keep.to(tl.int32)) > 0:
            k = _load(key, b, h, n, K, key_b, key_h, key_k, D)
            v = _load(value, b, h, n, K, value_b, value_h, value_k, D)
            weight = tl.where(keep, tl.exp2(tl.dot(q, tl.trans(k)) * scale - total[:, None]), 0.0)
            score_grad = weight * (tl.dot(g, tl.trans(v)) - mean[:, None]) * root
            grad_total += tl.dot(score_grad.to(k.dtype), k)
    _store(query_grad, b, h, m, Q, Q * query_grad_q, D, query_grad_q, grad_total.to(q.dtype), D)


@triton.jit  # type: ignore[untyped-decorator]
def _keys_back(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, sums, grad, means, key_grad, value_grad,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k, grad_b, grad_h, grad_q,
    key_grad_k, value_grad_k, H, Q, K, scale, root, CAUSAL: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and values."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    other = _load_segments(key_segment, b, K, n, -2)
    k = _load(key, b, h, n, K, key_b, key_h, key_k, D)
    v = _load(value, b, h, n, K, value_b, value_h, value_k, D)
    key_total, value_total = tl.zeros([TILE, D], tl.float32), tl.zeros([TILE, D], tl.float32)
    for start in range(tl.program_id(1) * TILE if CAUSAL else 0, Q, TILE):
        m = start + tl.arange(0, TILE)
        keep = _keep(_load_segments(query_segment, b, Q, m, -1), other, m, n, CAUSAL)
        if tl.max(keep.to(tl.int32)) > 0:
            q = _load(query, b, h, m, Q, query_b, query_h, query_q, D)
            g = _load(grad, b, h, m, Q, grad_b, grad_h, grad_q, D)
            total = tl.load(sums + tl.program_id(0) * Q + m, mask=m < Q, other=0.0)
            mean = tl.load(means + tl.program_id(0) * Q + m, mask=m < Q, other=0.0)
            weight = tl.where(keep, tl.exp2(tl.dot(q, tl.trans(k)) * scale - total[:, None]), 0.0)
            value_total += tl.dot(tl.trans(weight.to(g.dtype)), g)
            score_grad = (weight * (tl.dot(g, tl.trans(v)) - mean[:, None]) * root).to(q.dtype)
            key_total += tl.dot(tl.trans(score_grad), q)
    _store(key_grad, b, h, n, K, K * key_grad_k, D, key_grad_k, key_total.to(k.dtype), D)
    _store(value_grad, b, h, n, K, K * value_grad_k, D, value_grad_k, value_total.to(v.dtype), D)


def _single_tile(q_BHQD: Tensor, k_BHKD: Tensor, causal: bool) -> dict[str, Any]:
    """Return the launch options for rows of a single tile. There is no loop to pipeline."""
    M, N = (max(16, triton.next_power_of_2(x.size(2))) for x in (q_BHQD, k_BHKD))
    warps = 8 if M * N > 128 * 64 else 4
    return {"CAUSAL": causal, "M": M, "N": N, "D": q_BHQD.size(3), "num_warps": warps, "num_stages": 1}


def _strides(*some: Tensor) -> list[int]:
    return [stride for x in some for stride in x.stride()[:3]]


def _split(query_BQE: Tensor, key_value_BKF: Tensor | None, heads: int) -> tuple[Tensor, ...]:
    """Return views of queries, keys and values in one projection or two, each as x_BHTD."""
    both = (query_BQE,) if key_value_BKF is None else (query_BQE, key_value_BKF)
    parts = (3,) if key_value_BKF is None else (1, 2)
    return tuple(
        part_BHTD
        for x_BTE, count in zip(both, parts, strict=True)
        for part_BHTD in x_BTE.view(*x_BTE.shape[:2], count, heads, -1).permute(2, 0, 3, 1, 4).unbind()
    )


@torch.library.custom_op("dragoman::attend_rows", mutates_args=())
def attend_rows(
    query_BQE: Tensor, key_value_BKF: Tensor | None, query_segment_BQ: Tensor, key_segment_BK: Tensor, heads: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the outputs, out_BQC, and the log-sum-exp of the scores of each query, sums_BHQ.

    Keys and values are side by side in a projection of their own, or follow the queries in the same one.
    """
    q, k, v = _split(query_BQE, key_value_BKF, heads)
    (B, H, Q, D), K = q.shape, k.size(2)
    out, sums = q.new_empty(B, Q, H * D), q.new_empty(B, H, Q, dtype=torch.float32)
    tensors = (q, k, v, query_segment_BQ, key_segment_BK, out, sums)
    numbers = (*_strides(q, k, v), H, Q, K, D**-0.5 * LOG2E)
    if max(Q, K) <= LONGEST_SINGLE_TILE:
        _forward[(B * H,)](*tensors, *numbers, **_single_tile(q, k, causal))
    else:
        grid = (B * H, triton.cdiv(Q, TILE))
        _forward_tiled[grid](*tensors, *numbers, CAUSAL=causal, TILE=TILE, D=D, num_warps=4, num_stages=1)
    return out, sums


@torch.library.custom_op("dragoman::attend_rows_backward", mutates_args=())
def attend_rows_backward(
    grad_BQC: Tensor, query_BQE: Tensor, key_value_BKF: Tensor | None, query_segment_BQ: Tensor,
    key_segment_BK: Tensor, out_BQC: Tensor, sums_BHQ: Tensor, heads: int, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of both projections; an empty tensor if there is only one."""
    q, k, v = _split(query_BQE, key_value_BKF, heads)
    grad = grad_BQC.view(*grad_BQC.shape[:2], heads, -1).transpose(1, 2)
    projections = _like_projections(query_BQE, key_value_BKF)
    grads = _split(projections[0], None if key_value_BKF is None else projections[1], heads)
    query_grad_q, key_grad_k, value_grad_k = (x.stride(2) for x in grads)
    (B, H, Q, D), K = q.shape, k.size(2)
    inputs, strides = (q, k, v, query_segment_BQ, key_segment_BK), _strides(q, k, v, grad)
    sizes = (H, Q, K, D**-0.5 * LOG2E, D**-0.5)
    if max(Q, K) <= LONGEST_SINGLE_TILE:
        _backward[(B * H,)](
            *inputs, out_BQC, sums_BHQ, grad, *grads, *strides, query_grad_q, key_grad_k, value_grad_k, *sizes,
            **_single_tile(q, k, causal),
        )  # fmt: skip
        return projections
    means = torch.empty_like(sums_BHQ)
    options: dict[str, Any] = {"CAUSAL": causal, "TILE": TILE, "D": D, "num_warps": 4, "num_stages": 1}
    _queries_back[(B * H, triton.cdiv(Q, TILE))](
        *inputs, out_BQC, sums_BHQ, grad, means, grads[0], *strides, query_grad_q, *sizes, **options
    )
    _keys_back[(B * H, triton.cdiv(K, TILE))](
        *inputs, sums_BHQ, grad, means, *grads[1:], *strides, key_grad_k, value_grad_k, *sizes, **options
    )
    return projections


def _like_projections(query_BQE: Tensor, key_value_BKF: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return uninitialized gradients of the projections; the gradient of a missing projection is empty."""
    key_value_grad = query_BQE.new_empty(0) if key_value_BKF is None else torch.empty_like(key_value_BKF)
    return torch.empty_like(query_BQE), key_value_grad


@attend_rows.register_fake
def _(query_BQE: Tensor, key_value_BKF: Tensor | None, _: Tensor, __: Tensor, heads: int, ___: bool) -> Any:
    B, Q, E = query_BQE.shape
    width = E // 3 if key_value_BKF is None else E
    return query_BQE.new_empty(B, Q, width), query_BQE.new_empty(B, heads, Q, dtype=torch.float32)


@attend_rows_backward.register_fake
def _(_: Tensor, query_BQE: Tensor, key_value_BKF: Tensor | None, *__: Any) -> tuple[Tensor, Tensor]:
    return _like_projections(query_BQE, key_value_BKF)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.heads, ctx.causal = inputs
    ctx.save_for_backward(*tensors, *output)


def _run_backward(ctx: Any, grad_BQC: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    _, key_value_BKF, *_ = ctx.saved_tensors
    query_grad, key_value_grad = attend_rows_backward(grad_BQC.contiguous(), *ctx.saved_tensors, ctx.heads, ctx.causal)
    return query_grad, None if key_value_BKF is None else key_value_grad, None, None, None, None


attend_rows.register_autograd(_run_backward, setup_context=_save)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, new_key, new_value, key, value, beam_indices, lengths, out,
    query_stride, key_stride, value_stride, heads, capacity, rows, scale,
    WRITES: tl.constexpr, D: tl.constexpr, E: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Attend from one row and head, with an online softmax over blocks of positions.

    The program reads the positions up to its row's length and nothing else, so neither the capacity of the cache nor
    other rows can change its result.
    """
    n, h = tl.program_id(0), tl.program_id(1)
    d, e = tl.arange(0, D), tl.arange(0, E)
    q = tl.load(query + n * query_stride + h * D + d).to(tl.float32) * scale
    length = tl.load(lengths + n // rows)
    if WRITES:  # the new token: store it in the cache, and start the softmax with it
        k = tl.load(new_key + n * key_stride + h * D + d)
        v = tl.load(new_value + n * value_stride + h * E + e)
        slot = ((n * heads + h) * capacity + length).to(tl.int64)
        tl.store(key + slot * D + d, k)
        tl.store(value + slot * E + e, v)
        highest = tl.sum(q * k.to(tl.float32), 0)
        total = highest * 0.0 + 1.0
        out_sum = v.to(tl.float32)
    else:
        highest = tl.sum(q, 0) * 0.0 - 1e30
        total = highest * 0.0
        out_sum = tl.zeros([E], tl.float32)
    for begin in range(0, length, T):
        t = begin + tl.arange(0, T)
        real = t < length
        row = tl.load(beam_indices + n * capacity + t, mask=real, other=0) if WRITES else t * 0 + n // rows
        slots = ((row * heads + h) * capacity + t).to(tl.int64)
        ks = tl.load(key + slots[:, None] * D + d[None, :], mask=real[:, None], other=0.0).to(tl.float32)
        score = tl.where(real, tl.sum(ks * q[None, :], 1), -1e30)
        now = tl.maximum(highest, tl.max(score, 0))
        weight = tl.where(real, tl.exp(score - now), 0.0)
        rescale = tl.exp(highest - now)
        vs = tl.load(value + slots[:, None] * E + e[None, :], mask=real[:, None], other=0.0).to(tl.float32)
        out_sum = out_sum * rescale + tl.sum(weight[:, None] * vs, 0)
        total = total * rescale + tl.sum(weight, 0)
        highest = now
    tl.store(out + (n * heads + h) * E + e, (out_sum / tl.maximum(total, 1e-30)).to(out.dtype.element_ty))


def attend_cached(
    q_NHD: Tensor,
    cache: KeyValue,
    length: Tensor,
    *,
    beam_indices_NK: Tensor | None = None,
    new: KeyValue | None = None,
) -> Tensor:
    """Attend to the first `length` positions of the own cache, through the table, or of the sentence's source: out_NHD.

    `length` has one entry per row or per sentence. `new` is written to the cache at that position.
    """
    N, H, D = q_NHD.shape
    key, value = cache
    k_NHD, v_NHD = new or (q_NHD, q_NHD)
    q_NHD, k_NHD, v_NHD = (
        x if x.stride(2) == 1 and x.stride(1) == x.size(2) else x.contiguous() for x in (q_NHD, k_NHD, v_NHD)
    )  # the kernel expects the heads of a row in one piece
    out_NHD = torch.empty(N, H, value.size(3), dtype=q_NHD.dtype, device=q_NHD.device)
    _attend[(N, H)](
        q_NHD, k_NHD, v_NHD, key, value, length if beam_indices_NK is None else beam_indices_NK, length, out_NHD,
        q_NHD.stride(0), k_NHD.stride(0), v_NHD.stride(0), H, key.size(2), N // len(length), D**-0.5,
        WRITES=new is not None, D=D, E=value.size(3), T=POSITIONS_PER_BLOCK, num_warps=1,
    )  # fmt: skip
    return out_NHD


KEY_ELEMENTS = 4096  # elements of the keys that a program loads at a time: 32 per thread
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
def _additive_tile(b, s, S, A, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offsets of these source tokens' keys, and which of them exist."""
    a = tl.arange(0, WIDTH)
    return (b * S + s)[:, None] * A + a[None, :], (s < S)[:, None] & (a < A)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _own(S, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sentence of this program and the source tokens whose keys it loads."""
    blocks = tl.cdiv(S, TOKENS)
    b, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    return b.to(tl.int64), block * TOKENS + tl.arange(0, TOKENS)


@triton.jit(do_not_specialize=["T", "S"])  # type: ignore[untyped-decorator]
def _score(query, key, weight, score, T, S, A, TOKENS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    b, s = _own(S, TOKENS)
    at, there = _additive_tile(b, s, S, A, WIDTH)
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
        at, there = _additive_tile(n // T, s, S, A, WIDTH)
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
    at, there = _additive_tile(b, s, S, A, WIDTH)
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


def _save_additive(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001 - the signature that PyTorch calls
    ctx.save_for_backward(*inputs)


def _additive_backward(ctx: Any, grad_BTS: Tensor) -> tuple[Tensor, ...]:
    grads: tuple[Tensor, ...] = additive_score_backward(grad_BTS, *ctx.saved_tensors)
    return grads


additive_score.register_autograd(_additive_backward, setup_context=_save_additive)
