"""Sums of parts on a GPU, always made in the same order.

Shapes   P parts   C columns
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_P, BLOCK_C = 64, 32


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(parts, out, P, C, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for first in range(0, P, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        total += tl.load(parts + p[:, None] * C + c[None, :], mask=(p < P)[:, None] & (c < C)[None, :], other=0.0)
    tl.store(out + c, tl.sum(total, 0), mask=c < C)


def added_up(parts_PC: Tensor) -> Tensor:
    """The sum of the parts, out_C."""
    P, C = parts_PC.shape
    out_C = parts_PC.new_empty(C)
    _add_up[(triton.cdiv(C, BLOCK_C),)](parts_PC, out_C, P, C, BLOCK_P=BLOCK_P, BLOCK_C=BLOCK_C, num_warps=4)
    return out_C
