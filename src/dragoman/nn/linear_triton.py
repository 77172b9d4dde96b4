"""The slope of a relu on a GPU, and that of the bias before it, in one pass over what both are made of.

Shapes   N tokens   O outputs   P parts that tokens are split into
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dragoman.nn.sums_triton import added_up

PARTS = 128  # of the tokens, side by side
BLOCK_N, BLOCK_O = 16, 128


@triton.jit  # type: ignore[untyped-decorator]
def _slope(grad, out, slope, sums, N, O, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr):  # type: ignore[no-untyped-def]
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    part, parts = tl.program_id(1), tl.num_programs(1)
    total = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)  # summed at the end: a sum in the loop makes warps wait
    for block in range(part, tl.cdiv(N, BLOCK_N), parts):
        n = (block * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        at, there = n[:, None] * O + o[None, :], (n < N)[:, None] & (o < O)[None, :]
        alive = tl.load(out + at, mask=there, other=0.0) > 0
        own = tl.where(alive, tl.load(grad + at, mask=there, other=0.0), 0.0)
        tl.store(slope + at, own, mask=there)
        total += own.to(tl.float32)
    tl.store(sums + part * O + o, tl.sum(total, 0), mask=o < O)


@torch.library.custom_op("dragoman::relu_slope", mutates_args=())
def relu_slope(grad_NO: Tensor, out_NO: Tensor) -> tuple[Tensor, Tensor]:
    """The slope before the relu whose answer is out_NO, and its sum over the tokens, which is that of a bias."""
    N, O = out_NO.shape
    slope, sums = torch.empty_like(out_NO), out_NO.new_empty(PARTS, O, dtype=torch.float32)
    _slope[(triton.cdiv(O, BLOCK_O), PARTS)](
        grad_NO, out_NO, slope, sums, N, O, BLOCK_N=BLOCK_N, BLOCK_O=BLOCK_O, num_warps=2
    )
    return slope, added_up(sums)


@relu_slope.register_fake
def _(_: Tensor, out_NO: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out_NO), out_NO.new_empty(out_NO.size(1), dtype=torch.float32)
