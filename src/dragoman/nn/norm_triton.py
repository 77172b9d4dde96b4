"""The slopes of a layer norm on a GPU: of its input, its gain and its bias, in one pass over what they are made of.

A program takes rows far apart from each other, one after the other, and adds up its part of the gain's and the bias's
slopes on the way; the parts are added up in one order, so the same slopes come out each time.

Shapes   N tokens   C model width   P parts that tokens are split into
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dragoman.nn.sums_triton import added_up

PARTS = 264  # of the tokens, side by side: two for each processor of a large GPU
HELD, ROWS, WARPS = 4096, 8, 4  # numbers that a program looks at together, of so many tokens at most


@triton.jit  # type: ignore[untyped-decorator]
def _norm_slope(  # type: ignore[no-untyped-def]
    grad, beside, x, mean, scale, weight, slope, sums, N, C,
    BESIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    part, parts = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, WIDTH)
    w = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    gain, bias = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for block in range(part, tl.cdiv(N, ROWS), parts):
        n = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        at, there = n[:, None] * C + c[None, :], (n < N)[:, None] & (c < C)[None, :]
        g = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
        own = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        middle, per = tl.load(mean + n, mask=n < N, other=0.0), tl.load(scale + n, mask=n < N, other=0.0)
        normed = tl.where(there, (own - middle[:, None]) * per[:, None], 0.0)
        gain += g * normed
        bias += g
        inner = g * w[None, :]
        along, level = tl.sum(inner * normed, 1) / C, tl.sum(inner, 1) / C
        out = (inner - level[:, None] - normed * along[:, None]) * per[:, None]
        if BESIDE:
            out += tl.load(beside + at, mask=there, other=0.0).to(tl.float32)
        tl.store(slope + at, out.to(slope.dtype.element_ty), mask=there)
    tl.store(sums + part * 2 * C + c, tl.sum(gain, 0), mask=c < C)
    tl.store(sums + (part * 2 + 1) * C + c, tl.sum(bias, 0), mask=c < C)


@torch.library.custom_op("dragoman::norm_slope", mutates_args=())
def norm_slope(
    grad: Tensor, beside: Tensor | None, x: Tensor, mean: Tensor, scale: Tensor, weight_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the input, to which `beside` is added if it is there; and of gain and bias, slope_2C."""
    C, width = len(weight_C), triton.next_power_of_2(len(weight_C))
    slope, sums_PC = torch.empty_like(x), x.new_empty(PARTS, 2 * C, dtype=torch.float32)
    _norm_slope[(PARTS,)](
        grad, beside, x, mean, scale, weight_C, slope, sums_PC, x.numel() // C, C,
        BESIDE=beside is not None, ROWS=min(ROWS, max(HELD // width, 1)), WIDTH=width, num_warps=WARPS,
    )  # fmt: skip
    return slope, added_up(sums_PC).view(2, C)


@norm_slope.register_fake
def _(_: Tensor, __: Tensor | None, x: Tensor, ___: Tensor, ____: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(2, len(weight_C), dtype=torch.float32)
