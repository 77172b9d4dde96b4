"""The kernel behind lookup.py: one program for each row and head, which walks over the row's past and no further.

It reads what it needs and nothing else, so neither the capacity of the cache nor the neighbours change an answer.

Shapes   N rows   H heads   D head width   K places of the cache   B sentences   S source width
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dragoman.kernels.attention import KeyValue

POSITIONS_PER_BLOCK = 16  # of the past that are read at a time


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, new_key, new_value, key, value, who, stop, out,
    query_stride, key_stride, value_stride, heads, capacity, rows, scale,
    WRITES: tl.constexpr, D: tl.constexpr, E: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    n, h = tl.program_id(0), tl.program_id(1)
    d, e = tl.arange(0, D), tl.arange(0, E)
    q = tl.load(query + n * query_stride + h * D + d).to(tl.float32) * scale
    last = tl.load(stop + n // rows)
    if WRITES:  # the new token: it goes into the cache, and is the first thing that the row looks at
        k = tl.load(new_key + n * key_stride + h * D + d)
        v = tl.load(new_value + n * value_stride + h * E + e)
        own = ((n * heads + h) * capacity + last).to(tl.int64)
        tl.store(key + own * D + d, k)
        tl.store(value + own * E + e, v)
        most = tl.sum(q * k.to(tl.float32), 0)
        total = most * 0.0 + 1.0
        read = v.to(tl.float32)
    else:
        most = tl.sum(q, 0) * 0.0 - 1e30
        total = most * 0.0
        read = tl.zeros([E], tl.float32)
    for begin in range(0, last, T):
        t = begin + tl.arange(0, T)
        real = t < last
        row = tl.load(who + n * capacity + t, mask=real, other=0) if WRITES else t * 0 + n // rows
        place = ((row * heads + h) * capacity + t).to(tl.int64)
        ks = tl.load(key + place[:, None] * D + d[None, :], mask=real[:, None], other=0.0).to(tl.float32)
        score = tl.where(real, tl.sum(ks * q[None, :], 1), -1e30)
        peak = tl.maximum(most, tl.max(score, 0))
        share = tl.where(real, tl.exp(score - peak), 0.0)
        fade = tl.exp(most - peak)
        vs = tl.load(value + place[:, None] * E + e[None, :], mask=real[:, None], other=0.0).to(tl.float32)
        read = read * fade + tl.sum(share[:, None] * vs, 0)
        total = total * fade + tl.sum(share, 0)
        most = peak
    tl.store(out + (n * heads + h) * E + e, (read / tl.maximum(total, 1e-30)).to(out.dtype.element_ty))


def attend_cached(
    q_NHD: Tensor, cache: KeyValue, stop: Tensor, *, who_NK: Tensor | None = None, new: KeyValue | None = None
) -> Tensor:
    """Every row looks at the places before its `stop`: its own past, through the table, or its sentence's source."""
    N, H, D = q_NHD.shape
    key, value = cache
    k_NHD, v_NHD = new or (q_NHD, q_NHD)
    q_NHD, k_NHD, v_NHD = (make_heads_contiguous(each) for each in (q_NHD, k_NHD, v_NHD))
    out_NHD = torch.empty(N, H, value.size(3), dtype=q_NHD.dtype, device=q_NHD.device)
    _attend[(N, H)](
        q_NHD, k_NHD, v_NHD, key, value, stop if who_NK is None else who_NK, stop, out_NHD,
        q_NHD.stride(0), k_NHD.stride(0), v_NHD.stride(0), H, key.size(2), N // len(stop), D**-0.5,
        WRITES=new is not None, D=D, E=value.size(3), T=POSITIONS_PER_BLOCK, num_warps=1,
    )  # fmt: skip
    return out_NHD


def make_heads_contiguous(x_NHD: Tensor) -> Tensor:
    """The heads of a row side by side, as the kernel reads them."""
    return x_NHD if x_NHD.stride(2) == 1 and x_NHD.stride(1) == x_NHD.size(2) else x_NHD.contiguous()
