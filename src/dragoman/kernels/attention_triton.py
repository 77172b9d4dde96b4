"""Triton kernels for attention within packed rows, for attention to a KV cache, and for additive scores.

The reference implementations are in kernels/attention.py and modules/attention_scores.py. These modules also decide
whether a kernel of this file is used.

Packed rows (training): the kernels derive the mask from segment ids. In rows of up to 128 tokens, one program per row
and head keeps all scores in registers, forward and backward. Longer rows are split into tiles, as in FlashAttention:
a program has a tile of queries and loops over tiles of keys. It skips tiles of keys that belong only to other
sentences, so the work grows with the length of the sentences, not with the length of the row. Backward, one kernel
computes the gradients of the queries, looping over keys, and another those of keys and values, looping over queries.

KV cache (decoding): one program per row and head attends from the new token to the past of its row, or to the source.

Additive scores: activations of tanh stay in registers, forward and backward, and everything is computed in float32. A
program holds the keys of a few source tokens and loops over the queries, or holds one query and loops over the keys.
Sums are added in a fixed order, so gradients are reproducible to the bit.

Shapes   B rows   H heads   Q queries   K keys   D head width   C heads x head width
         E width of a fused QKV or Q projection   F width of a fused KV projection
         N hypotheses of a search, or all queries of a batch (B x T)   S source tokens   T queries   A attention width
In kernels, `b` and `h` are the row and the head of the program, `m` and `n` the indices of its queries and keys in the
row, and `query_b`, `query_h` and `query_q` the strides of the tensor `query` along B, H and Q; the same holds for other
tensors. `lse` is the log-sum-exp of the scores, in base 2. QUERIES and KEYS are Q and K, rounded up to powers of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dragoman.kernels.attention import KeyValue

LONGEST_SINGLE_TILE = 128  # maximum number of tokens in a row for which one program computes all scores
LOG2E = 1.4426950408889634  # log2(e): scores are multiplied by it, since exp2(x * log2(e)) = exp(x) and exp2 is faster
TILE = 64
POSITIONS_PER_BLOCK = 16  # positions of a KV cache that are read at a time


@triton.jit
def _load_segments(segment, b, length, p, missing):  # type: ignore[no-untyped-def]
    """Load segment ids of the tokens p of row b; beyond its end, `missing`: -1 or, for keys, -2, which never match."""
    return tl.load(segment + b * length + p, mask=p < length, other=missing)


@triton.jit  # type: ignore[untyped-decorator]
def _make_pointers(tensor, b, h, p, row_stride, head_stride, token_stride, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return pointers to the vectors of the tokens p of a row and head."""
    d = tl.arange(0, D)
    return tensor + b.to(tl.int64) * row_stride + h * head_stride + p[:, None] * token_stride + d[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _load(tensor, b, h, p, length, row_stride, head_stride, token_stride, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the vectors of the tokens p of a row and head; 0 for tokens beyond the end of the row."""
    pointers = _make_pointers(tensor, b, h, p, row_stride, head_stride, token_stride, D)
    return tl.load(pointers, mask=(p < length)[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _store(tensor, b, h, p, length, row_stride, head_stride, token_stride, x, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store x as the vectors of the tokens p of a row and head, except for tokens beyond the end of the row."""
    tl.store(_make_pointers(tensor, b, h, p, row_stride, head_stride, token_stride, D), x, mask=(p < length)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _make_mask(query_segments, key_segments, m, n, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the mask, which allows keys in the sentence of the query and, if causal, not after the query."""
    allowed = query_segments[:, None] == key_segments[None, :]
    if CAUSAL:
        allowed = allowed & (m[:, None] >= n[None, :])
    return allowed


@triton.jit  # type: ignore[untyped-decorator]
def _forward_single_tile(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, out, lse,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k,
    H, Q, K, scale_log2e, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute the output and the log-sum-exp of all queries of a row and head."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    m, n = tl.arange(0, QUERIES), tl.arange(0, KEYS)
    q = _load(query, b, h, m, Q, query_b, query_h, query_q, D)
    k = _load(key, b, h, n, K, key_b, key_h, key_k, D)
    score = tl.dot(q, tl.trans(k)) * scale_log2e
    query_segments, key_segments = _load_segments(query_segment, b, Q, m, -1), _load_segments(key_segment, b, K, n, -2)
    score = tl.where(_make_mask(query_segments, key_segments, m, n, CAUSAL), score, -1e30)
    # A query has no allowed key if it is beyond the end of its row, or padding (segment id 0) where no key is padding.
    # Its maximum is -1e29: since its scores are -1e30, its weights are 0.
    max_score = tl.maximum(tl.max(score, 1), -1e29)
    weight = tl.exp2(score - max_score[:, None])
    weight_sum = tl.maximum(tl.sum(weight, 1), 1e-30)  # is a divisor, so it must not be 0
    v = _load(value, b, h, n, K, value_b, value_h, value_k, D)
    out_tile = tl.dot(weight.to(v.dtype), v) / weight_sum[:, None]
    _store(out, b, h, m, Q, Q * H * D, D, H * D, out_tile.to(v.dtype), D)
    tl.store(lse + tl.program_id(0) * Q + m, max_score + tl.log2(weight_sum), mask=m < Q)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_single_tile(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, out, lse, grad, query_grad, key_grad, value_grad,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k, grad_b, grad_h, grad_q,
    query_grad_q, key_grad_k, value_grad_k, H, Q, K, scale_log2e, scale,
    CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of all queries, keys and values of a row and head; the weights are computed again."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    m, n = tl.arange(0, QUERIES), tl.arange(0, KEYS)
    q = _load(query, b, h, m, Q, query_b, query_h, query_q, D)
    k = _load(key, b, h, n, K, key_b, key_h, key_k, D)
    query_lse = tl.load(lse + tl.program_id(0) * Q + m, mask=m < Q, other=0.0)
    score = tl.dot(q, tl.trans(k)) * scale_log2e
    query_segments, key_segments = _load_segments(query_segment, b, Q, m, -1), _load_segments(key_segment, b, K, n, -2)
    weight = tl.where(_make_mask(query_segments, key_segments, m, n, CAUSAL), tl.exp2(score - query_lse[:, None]), 0.0)
    grad_tile = _load(grad, b, h, m, Q, grad_b, grad_h, grad_q, D)
    v = _load(value, b, h, n, K, value_b, value_h, value_k, D)
    value_grad_tile = tl.dot(tl.trans(weight.to(grad_tile.dtype)), grad_tile).to(v.dtype)
    _store(value_grad, b, h, n, K, K * value_grad_k, D, value_grad_k, value_grad_tile, D)
    out_tile = _load(out, b, h, m, Q, Q * H * D, D, H * D, D)
    out_dot_grad = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    score_grad = (weight * (tl.dot(grad_tile, tl.trans(v)) - out_dot_grad[:, None]) * scale).to(q.dtype)
    _store(query_grad, b, h, m, Q, Q * query_grad_q, D, query_grad_q, tl.dot(score_grad, k).to(q.dtype), D)
    _store(key_grad, b, h, n, K, K * key_grad_k, D, key_grad_k, tl.dot(tl.trans(score_grad), q).to(k.dtype), D)


@triton.jit  # type: ignore[untyped-decorator]
def _forward_tiled(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, out, lse,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k,
    H, Q, K, scale_log2e, CAUSAL: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute the output and the log-sum-exp of a tile of queries, with an online softmax over tiles of keys."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    m = tl.program_id(1) * TILE + tl.arange(0, TILE)
    query_segments = _load_segments(query_segment, b, Q, m, -1)
    q = _load(query, b, h, m, Q, query_b, query_h, query_q, D)
    max_score, weight_sum = tl.zeros([TILE], tl.float32) - 1e29, tl.zeros([TILE], tl.float32)
    out_tile = tl.zeros([TILE, D], tl.float32)
    end = tl.minimum((tl.program_id(1) + 1) * TILE, K) if CAUSAL else K
    for start in range(0, end, TILE):
        n = start + tl.arange(0, TILE)
        allowed = _make_mask(query_segments, _load_segments(key_segment, b, K, n, -2), m, n, CAUSAL)
        if tl.max(allowed.to(tl.int32)) > 0:
            k = _load(key, b, h, n, K, key_b, key_h, key_k, D)
            score = tl.where(allowed, tl.dot(q, tl.trans(k)) * scale_log2e, -1e30)
            new_max = tl.maximum(max_score, tl.max(score, 1))
            weight, rescale = tl.exp2(score - new_max[:, None]), tl.exp2(max_score - new_max)
            v = _load(value, b, h, n, K, value_b, value_h, value_k, D)
            weight_sum = weight_sum * rescale + tl.sum(weight, 1)
            out_tile = out_tile * rescale[:, None] + tl.dot(weight.to(v.dtype), v)
            max_score = new_max
    weight_sum = tl.maximum(weight_sum, 1e-30)  # 0 for a query without any allowed key (see above)
    _store(out, b, h, m, Q, Q * H * D, D, H * D, (out_tile / weight_sum[:, None]).to(q.dtype), D)
    tl.store(lse + tl.program_id(0) * Q + m, max_score + tl.log2(weight_sum), mask=m < Q)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_queries_tiled(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, out, lse, grad, out_dot_grads, query_grad,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k, grad_b, grad_h, grad_q, query_grad_q,
    H, Q, K, scale_log2e, scale, CAUSAL: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of queries, and `out_dot_grads`, which `_backward_keys_tiled` needs."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    m = tl.program_id(1) * TILE + tl.arange(0, TILE)
    query_segments = _load_segments(query_segment, b, Q, m, -1)
    q = _load(query, b, h, m, Q, query_b, query_h, query_q, D)
    grad_tile = _load(grad, b, h, m, Q, grad_b, grad_h, grad_q, D)
    out_tile = _load(out, b, h, m, Q, Q * H * D, D, H * D, D)
    out_dot_grad = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    tl.store(out_dot_grads + tl.program_id(0) * Q + m, out_dot_grad, mask=m < Q)
    query_lse = tl.load(lse + tl.program_id(0) * Q + m, mask=m < Q, other=0.0)
    query_grad_tile = tl.zeros([TILE, D], tl.float32)
    end = tl.minimum((tl.program_id(1) + 1) * TILE, K) if CAUSAL else K
    for start in range(0, end, TILE):
        n = start + tl.arange(0, TILE)
        allowed = _make_mask(query_segments, _load_segments(key_segment, b, K, n, -2), m, n, CAUSAL)
        if tl.max(allowed.to(tl.int32)) > 0:
            k = _load(key, b, h, n, K, key_b, key_h, key_k, D)
            v = _load(value, b, h, n, K, value_b, value_h, value_k, D)
            weight = tl.where(allowed, tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2e - query_lse[:, None]), 0.0)
            score_grad = weight * (tl.dot(grad_tile, tl.trans(v)) - out_dot_grad[:, None]) * scale
            query_grad_tile += tl.dot(score_grad.to(k.dtype), k)
    _store(query_grad, b, h, m, Q, Q * query_grad_q, D, query_grad_q, query_grad_tile.to(q.dtype), D)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_keys_tiled(  # type: ignore[no-untyped-def]
    query, key, value, query_segment, key_segment, lse, grad, out_dot_grads, key_grad, value_grad,
    query_b, query_h, query_q, key_b, key_h, key_k, value_b, value_h, value_k, grad_b, grad_h, grad_q,
    key_grad_k, value_grad_k, H, Q, K, scale_log2e, scale, CAUSAL: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and values."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    key_segments = _load_segments(key_segment, b, K, n, -2)
    k = _load(key, b, h, n, K, key_b, key_h, key_k, D)
    v = _load(value, b, h, n, K, value_b, value_h, value_k, D)
    key_grad_tile, value_grad_tile = tl.zeros([TILE, D], tl.float32), tl.zeros([TILE, D], tl.float32)
    for start in range(tl.program_id(1) * TILE if CAUSAL else 0, Q, TILE):
        m = start + tl.arange(0, TILE)
        allowed = _make_mask(_load_segments(query_segment, b, Q, m, -1), key_segments, m, n, CAUSAL)
        if tl.max(allowed.to(tl.int32)) > 0:
            q = _load(query, b, h, m, Q, query_b, query_h, query_q, D)
            grad_tile = _load(grad, b, h, m, Q, grad_b, grad_h, grad_q, D)
            query_lse = tl.load(lse + tl.program_id(0) * Q + m, mask=m < Q, other=0.0)
            out_dot_grad = tl.load(out_dot_grads + tl.program_id(0) * Q + m, mask=m < Q, other=0.0)
            weight = tl.where(allowed, tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2e - query_lse[:, None]), 0.0)
            value_grad_tile += tl.dot(tl.trans(weight.to(grad_tile.dtype)), grad_tile)
            score_grad = (weight * (tl.dot(grad_tile, tl.trans(v)) - out_dot_grad[:, None]) * scale).to(q.dtype)
            key_grad_tile += tl.dot(tl.trans(score_grad), q)
    _store(key_grad, b, h, n, K, K * key_grad_k, D, key_grad_k, key_grad_tile.to(k.dtype), D)
    _store(value_grad, b, h, n, K, K * value_grad_k, D, value_grad_k, value_grad_tile.to(v.dtype), D)


def _choose_single_tile_options(q_BHQD: Tensor, k_BHKD: Tensor, causal: bool) -> dict[str, Any]:
    """Return the launch options for rows of a single tile; one stage, since there is no loop to pipeline."""
    # tl.dot needs at least 16 queries and keys. The scores of larger tiles need the registers of more warps.
    Q, K = (max(16, triton.next_power_of_2(x.size(2))) for x in (q_BHQD, k_BHKD))
    warps = 8 if Q * K > 128 * 64 else 4
    return {"CAUSAL": causal, "QUERIES": Q, "KEYS": K, "D": q_BHQD.size(3), "num_warps": warps, "num_stages": 1}


def _list_strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _split_projections(query_BQE: Tensor, key_value_BKF: Tensor | None, heads: int) -> tuple[Tensor, ...]:
    """Return views of queries, keys and values, each as x_BHTD, of a QKV projection, or of a Q and a KV projection."""
    projections = (query_BQE,) if key_value_BKF is None else (query_BQE, key_value_BKF)
    counts = (3,) if key_value_BKF is None else (1, 2)  # tensors in each projection
    return tuple(
        part_BHTD
        for x_BTE, count in zip(projections, counts, strict=True)
        for part_BHTD in x_BTE.view(*x_BTE.shape[:2], count, heads, -1).permute(2, 0, 3, 1, 4).unbind()
    )


@torch.library.custom_op("dragoman::attend_rows", mutates_args=())
def attend_rows(
    query_BQE: Tensor, key_value_BKF: Tensor | None, query_segment_BQ: Tensor, key_segment_BK: Tensor, heads: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the outputs, out_BQC, and the log-sum-exp of the scores of each query in base 2, lse_BHQ.

    `key_value_BKF` has the keys, then the values. If it is None, they follow the queries in `query_BQE`.
    """
    q, k, v = _split_projections(query_BQE, key_value_BKF, heads)
    (B, H, Q, D), K = q.shape, k.size(2)
    out, lse = q.new_empty(B, Q, H * D), q.new_empty(B, H, Q, dtype=torch.float32)
    tensors = (q, k, v, query_segment_BQ, key_segment_BK, out, lse)
    scalars = (*_list_strides(q, k, v), H, Q, K, D**-0.5 * LOG2E)
    if max(Q, K) <= LONGEST_SINGLE_TILE:
        _forward_single_tile[(B * H,)](*tensors, *scalars, **_choose_single_tile_options(q, k, causal))
    else:
        grid = (B * H, triton.cdiv(Q, TILE))
        _forward_tiled[grid](*tensors, *scalars, CAUSAL=causal, TILE=TILE, D=D, num_warps=4, num_stages=1)
    return out, lse


@torch.library.custom_op("dragoman::attend_rows_backward", mutates_args=())
def attend_rows_backward(
    grad_BQC: Tensor, query_BQE: Tensor, key_value_BKF: Tensor | None, query_segment_BQ: Tensor,
    key_segment_BK: Tensor, out_BQC: Tensor, lse_BHQ: Tensor, heads: int, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of both projections; that of a missing `key_value_BKF` is an empty tensor."""
    q, k, v = _split_projections(query_BQE, key_value_BKF, heads)
    grad = grad_BQC.view(*grad_BQC.shape[:2], heads, -1).transpose(1, 2)
    projection_grads = _allocate_projection_gradients(query_BQE, key_value_BKF)
    grads = _split_projections(projection_grads[0], None if key_value_BKF is None else projection_grads[1], heads)
    query_grad_q, key_grad_k, value_grad_k = (x.stride(2) for x in grads)
    (B, H, Q, D), K = q.shape, k.size(2)
    inputs, strides = (q, k, v, query_segment_BQ, key_segment_BK), _list_strides(q, k, v, grad)
    scalars = (H, Q, K, D**-0.5 * LOG2E, D**-0.5)
    if max(Q, K) <= LONGEST_SINGLE_TILE:
        _backward_single_tile[(B * H,)](
            *inputs, out_BQC, lse_BHQ, grad, *grads, *strides, query_grad_q, key_grad_k, value_grad_k, *scalars,
            **_choose_single_tile_options(q, k, causal),
        )  # fmt: skip
        return projection_grads
    out_dot_grads = torch.empty_like(lse_BHQ)
    options: dict[str, Any] = {"CAUSAL": causal, "TILE": TILE, "D": D, "num_warps": 4, "num_stages": 1}
    _backward_queries_tiled[(B * H, triton.cdiv(Q, TILE))](
        *inputs, out_BQC, lse_BHQ, grad, out_dot_grads, grads[0], *strides, query_grad_q, *scalars, **options
    )
    _backward_keys_tiled[(B * H, triton.cdiv(K, TILE))](
        *inputs, lse_BHQ, grad, out_dot_grads, *grads[1:], *strides, key_grad_k, value_grad_k, *scalars, **options
    )
    return projection_grads


def _allocate_projection_gradients(query_BQE: Tensor, key_value_BKF: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return uninitialized gradients of the projections; that of a missing `key_value_BKF` is an empty tensor."""
    key_value_grad = query_BQE.new_empty(0) if key_value_BKF is None else torch.empty_like(key_value_BKF)
    return torch.empty_like(query_BQE), key_value_grad


@attend_rows.register_fake
def _(query_BQE: Tensor, key_value_BKF: Tensor | None, _: Tensor, __: Tensor, heads: int, ___: bool) -> Any:
    B, Q, E = query_BQE.shape
    width = E // 3 if key_value_BKF is None else E
    return query_BQE.new_empty(B, Q, width), query_BQE.new_empty(B, heads, Q, dtype=torch.float32)


@attend_rows_backward.register_fake
def _(_: Tensor, query_BQE: Tensor, key_value_BKF: Tensor | None, *__: Any) -> tuple[Tensor, Tensor]:
    return _allocate_projection_gradients(query_BQE, key_value_BKF)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.heads, ctx.causal = inputs
    ctx.save_for_backward(*tensors, *output)


def _run_rows_backward(ctx: Any, grad_BQC: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    _, key_value_BKF, *_ = ctx.saved_tensors
    query_grad, key_value_grad = attend_rows_backward(grad_BQC.contiguous(), *ctx.saved_tensors, ctx.heads, ctx.causal)
    return query_grad, None if key_value_BKF is None else key_value_grad, None, None, None, None


attend_rows.register_autograd(_run_rows_backward, setup_context=_save_for_backward)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_cached(  # type: ignore[no-untyped-def]
    query, new_key, new_value, key, value, beam_indices, lengths, out,
    query_stride, key_stride, value_stride, heads, capacity, rows_per_length, scale,
    HAS_NEW: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend from the new token of one row and head, with an online softmax over blocks of positions.

    D is the head width of queries and keys, DV that of values. `rows_per_length` rows share an entry of `lengths`. The
    program reads only positions below that length, so neither the capacity of the cache nor other rows can change its
    result. `max_score * 0.0 + 1.0` is the constant 1 with the type that the variable has after the loop's first step.
    """
    n, h = tl.program_id(0), tl.program_id(1)
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    q = tl.load(query + n * query_stride + h * D + d).to(tl.float32) * scale
    length = tl.load(lengths + n // rows_per_length)
    if HAS_NEW:  # store the new token in the cache, and start the softmax with it
        k = tl.load(new_key + n * key_stride + h * D + d)
        v = tl.load(new_value + n * value_stride + h * DV + dv)
        slot = ((n * heads + h) * capacity + length).to(tl.int64)
        tl.store(key + slot * D + d, k)
        tl.store(value + slot * DV + dv, v)
        max_score = tl.sum(q * k.to(tl.float32), 0)
        weight_sum = max_score * 0.0 + 1.0
        out_sum = v.to(tl.float32)
    else:
        max_score = tl.sum(q, 0) * 0.0 - 1e30
        weight_sum = max_score * 0.0
        out_sum = tl.zeros([DV], tl.float32)
    for begin in range(0, length, BLOCK):
        t = begin + tl.arange(0, BLOCK)
        valid = t < length
        sentence = t * 0 + n // rows_per_length  # the same for all positions, in the shape of `t`
        row = tl.load(beam_indices + n * capacity + t, mask=valid, other=0) if HAS_NEW else sentence
        slots = ((row * heads + h) * capacity + t).to(tl.int64)
        k_tile = tl.load(key + slots[:, None] * D + d[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        score = tl.where(valid, tl.sum(k_tile * q[None, :], 1), -1e30)
        new_max = tl.maximum(max_score, tl.max(score, 0))
        weight = tl.where(valid, tl.exp(score - new_max), 0.0)
        rescale = tl.exp(max_score - new_max)
        v_tile = tl.load(value + slots[:, None] * DV + dv[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        out_sum = out_sum * rescale + tl.sum(weight[:, None] * v_tile, 0)
        weight_sum = weight_sum * rescale + tl.sum(weight, 0)
        max_score = new_max
    tl.store(out + (n * heads + h) * DV + dv, (out_sum / tl.maximum(weight_sum, 1e-30)).to(out.dtype.element_ty))


def attend_cached(
    q_NHD: Tensor,
    cache: KeyValue,
    length: Tensor,
    *,
    beam_indices_NK: Tensor | None = None,
    new: KeyValue | None = None,
) -> Tensor:
    """Return the output of attention to a KV cache or to the source, out_NHD.

    With `new`, the keys and values of one token per row are first written to the cache at position `length`, and each
    row attends to this token and to the earlier ones, which `beam_indices_NK` locates (see `attend_to_cache`). Without
    `new`, `cache` has the keys and values of the source of each sentence, `length` is its number of tokens, and the
    rows of the same sentence follow each other.
    """
    N, H, D = q_NHD.shape
    key, value = cache
    # Without `new`, the kernel reads neither these nor the beam indices, but needs some tensors as arguments.
    k_NHD, v_NHD = new or (q_NHD, q_NHD)
    q_NHD, k_NHD, v_NHD = (
        x if x.stride(2) == 1 and x.stride(1) == x.size(2) else x.contiguous() for x in (q_NHD, k_NHD, v_NHD)
    )  # the kernel expects the heads of a row to be contiguous
    out_NHD = torch.empty(N, H, value.size(3), dtype=q_NHD.dtype, device=q_NHD.device)
    _attend_cached[(N, H)](
        q_NHD, k_NHD, v_NHD, key, value, length if beam_indices_NK is None else beam_indices_NK, length, out_NHD,
        q_NHD.stride(0), k_NHD.stride(0), v_NHD.stride(0), H, key.size(2), N // len(length), D**-0.5,
        HAS_NEW=new is not None, D=D, DV=value.size(3), BLOCK=POSITIONS_PER_BLOCK, num_warps=1,
    )  # fmt: skip
    return out_NHD


KEY_ELEMENTS = 4096  # elements of the keys that a program of additive scores loads at a time: 32 per thread
SCORE_WARPS = 4


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """Compute tanh, which the Triton language lacks."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit  # type: ignore[untyped-decorator]
def _load_vector(tensor, row, A, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a row of A elements as float32; elements beyond A are 0."""
    a = tl.arange(0, WIDTH)
    return tl.load(tensor + row * A + a, mask=a < A, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _locate_keys(b, s, S, A, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offsets of the keys of the source tokens s, and a mask of those within bounds."""
    a = tl.arange(0, WIDTH)
    return (b * S + s)[:, None] * A + a[None, :], (s < S)[:, None] & (a < A)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _locate_program(S, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sentence of this program and the source tokens whose keys it loads."""
    blocks = tl.cdiv(S, TOKENS)
    b, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    return b.to(tl.int64), block * TOKENS + tl.arange(0, TOKENS)


# T and S vary from batch to batch. Kernels that are specialized to them would have to be compiled again and again.
@triton.jit(do_not_specialize=["T", "S"])  # type: ignore[untyped-decorator]
def _score_additive(query, key, weight, score, T, S, A, TOKENS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the scores of a few source tokens for all queries: weight . tanh(query + key)."""
    b, s = _locate_program(S, TOKENS)
    offsets, valid = _locate_keys(b, s, S, A, WIDTH)
    k = tl.load(key + offsets, mask=valid, other=0.0).to(tl.float32)
    w = _load_vector(weight, 0, A, WIDTH)
    for t in range(T):
        q = _load_vector(query, b * T + t, A, WIDTH)
        scores = tl.sum(_tanh(q[None, :] + k) * w[None, :], 1)
        tl.store(score + (b * T + t) * S + s, scores.to(score.dtype.element_ty), mask=s < S)


@triton.jit(do_not_specialize=["T", "S"])  # type: ignore[untyped-decorator]
def _additive_query_backward(  # type: ignore[no-untyped-def]
    query, key, weight, grad, query_grad, key_grad, weight_grads, T, S, A,
    SINGLE_QUERY: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one query and its share of the weight's gradient.

    With SINGLE_QUERY, each sentence has one query, so that this kernel can also compute the gradients of the keys.
    """
    n = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, WIDTH)
    q, w = _load_vector(query, n, A, WIDTH), _load_vector(weight, 0, A, WIDTH)
    query_tanh_grad, weight_grad = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for first in range(0, S, TOKENS):
        s = first + tl.arange(0, TOKENS)
        score_grad = tl.load(grad + n * S + s, mask=s < S, other=0.0).to(tl.float32)
        offsets, valid = _locate_keys(n // T, s, S, A, WIDTH)
        activation = _tanh(q[None, :] + tl.load(key + offsets, mask=valid, other=0.0).to(tl.float32))
        tanh_grad = score_grad[:, None] * (1 - activation * activation)  # the factor `w` is applied after the sum
        query_tanh_grad += tl.sum(tanh_grad, 0)
        weight_grad += tl.sum(score_grad[:, None] * activation, 0)
        if SINGLE_QUERY:
            tl.store(key_grad + offsets, (tanh_grad * w[None, :]).to(key_grad.dtype.element_ty), mask=valid)
    tl.store(query_grad + n * A + a, (query_tanh_grad * w).to(query_grad.dtype.element_ty), mask=a < A)
    tl.store(weight_grads + n * A + a, weight_grad, mask=a < A)


@triton.jit(do_not_specialize=["T", "S"])  # type: ignore[untyped-decorator]
def _additive_key_backward(  # type: ignore[no-untyped-def]
    query, key, weight, grad, key_grad, T, S, A, TOKENS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Compute the gradients of the keys of a few source tokens, summed over all queries."""
    b, s = _locate_program(S, TOKENS)
    offsets, valid = _locate_keys(b, s, S, A, WIDTH)
    k = tl.load(key + offsets, mask=valid, other=0.0).to(tl.float32)
    key_tanh_grad = tl.zeros([TOKENS, WIDTH], tl.float32)
    for t in range(T):
        score_grad = tl.load(grad + (b * T + t) * S + s, mask=s < S, other=0.0).to(tl.float32)
        activation = _tanh(_load_vector(query, b * T + t, A, WIDTH)[None, :] + k)
        key_tanh_grad += score_grad[:, None] * (1 - activation * activation)
    w = _load_vector(weight, 0, A, WIDTH)
    tl.store(key_grad + offsets, (key_tanh_grad * w[None, :]).to(key_grad.dtype.element_ty), mask=valid)


def _choose_additive_options(S: int, A: int) -> dict[str, int]:
    width = triton.next_power_of_2(A)
    tokens = min(max(1, KEY_ELEMENTS // width), triton.next_power_of_2(S))
    return {"TOKENS": tokens, "WIDTH": width, "num_warps": SCORE_WARPS}


@torch.library.custom_op("dragoman::additive_score", mutates_args=())
def additive_score(query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor) -> Tensor:
    """Return the additive attention scores, score_BTS, in the dtype of the queries."""
    (B, T, A), S = query_BTA.shape, key_BSA.size(1)
    score_BTS = query_BTA.new_empty(B, T, S)
    if score_BTS.numel():
        options = _choose_additive_options(S, A)
        _score_additive[(B * triton.cdiv(S, options["TOKENS"]),)](
            query_BTA.contiguous(), key_BSA.contiguous(), weight_A.contiguous(), score_BTS, T, S, A, **options
        )
    return score_BTS


@torch.library.custom_op("dragoman::additive_score_backward", mutates_args=())
def additive_score_backward(
    grad_BTS: Tensor, query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and weight."""
    inputs = [x.contiguous() for x in (query_BTA, key_BSA, weight_A)]
    grads = query_grad, key_grad, _ = _allocate_additive_gradients(*inputs)
    if not grad_BTS.numel():
        return tuple(x.zero_() for x in grads)  # type: ignore[return-value]
    score_grad, (B, T, A), S = grad_BTS.contiguous(), query_BTA.shape, key_BSA.size(1)
    weight_grads_NA, options = query_grad.new_empty(B * T, A, dtype=torch.float32), _choose_additive_options(S, A)
    _additive_query_backward[(B * T,)](
        *inputs, score_grad, query_grad, key_grad, weight_grads_NA, T, S, A, SINGLE_QUERY=T == 1, **options
    )
    if T > 1:
        _additive_key_backward[(B * triton.cdiv(S, options["TOKENS"]),)](
            *inputs, score_grad, key_grad, T, S, A, **options
        )
    return query_grad, key_grad, weight_grads_NA.sum(0).to(weight_A.dtype)


def _allocate_additive_gradients(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, weight = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)
    return query, key, weight


@additive_score.register_fake
def _(query_BTA: Tensor, key_BSA: Tensor, _: Tensor) -> Tensor:
    return query_BTA.new_empty(*query_BTA.shape[:2], key_BSA.size(1))


@additive_score_backward.register_fake
def _(_: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _allocate_additive_gradients(*inputs)


def _save_additive_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001 - the signature that PyTorch calls
    ctx.save_for_backward(*inputs)


def _run_additive_backward(ctx: Any, grad_BTS: Tensor) -> tuple[Tensor, ...]:
    grads: tuple[Tensor, ...] = additive_score_backward(grad_BTS, *ctx.saved_tensors)
    return grads


additive_score.register_autograd(_run_additive_backward, setup_context=_save_additive_for_backward)
