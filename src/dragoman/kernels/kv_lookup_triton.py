"""Triton kernel for attention of one token per row to a KV cache: one program per row and head.

A program reads the positions up to its row's length and nothing else, so neither the capacity of the cache nor other
rows can change its result. The reference implementations are `attend_to_cache` and `attend_to_source` in attention.py.

Shapes   N rows   H heads   D key width of a head   E value width of a head   K positions of the cache
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dragoman.kernels.attention import KeyValue

POSITIONS_PER_BLOCK = 16  # of the cache that are read at a time


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, new_key, new_value, key, value, beam_indices, lengths, out,
    query_stride, key_stride, value_stride, heads, capacity, rows, scale,
    WRITES: tl.constexpr, D: tl.constexpr, E: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Attend from one row and head, with an online softmax over blocks of positions."""
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
    q_NHD, k_NHD, v_NHD = (make_heads_contiguous(x) for x in (q_NHD, k_NHD, v_NHD))
    out_NHD = torch.empty(N, H, value.size(3), dtype=q_NHD.dtype, device=q_NHD.device)
    _attend[(N, H)](
        q_NHD, k_NHD, v_NHD, key, value, length if beam_indices_NK is None else beam_indices_NK, length, out_NHD,
        q_NHD.stride(0), k_NHD.stride(0), v_NHD.stride(0), H, key.size(2), N // len(length), D**-0.5,
        WRITES=new is not None, D=D, E=value.size(3), T=POSITIONS_PER_BLOCK, num_warps=1,
    )  # fmt: skip
    return out_NHD


def make_heads_contiguous(x_NHD: Tensor) -> Tensor:
    """Return a tensor in which the heads of a row are contiguous, as the kernel expects."""
    return x_NHD if x_NHD.stride(2) == 1 and x_NHD.stride(1) == x_NHD.size(2) else x_NHD.contiguous()
