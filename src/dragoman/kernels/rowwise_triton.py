"""Sums of parts on a GPU, always made in the same order.

Shapes   P parts   C columns

Drawing on a GPU: bits made 16 at a time from a counter, so that one costs an eighth of what PyTorch's own do.

What is drawn for a number hangs on the seed and on where the number stands in the whole grid, and on nothing else.

The slope of a relu on a GPU, and that of the bias before it, in one pass over what both are made of.

Shapes   N tokens   O outputs   P parts that tokens are split into

The slopes of a layer norm on a GPU: of its input, its gain and its bias, in one pass over what they are made of.

A program takes rows far apart from each other, one after the other, and adds up its part of the gain's and the bias's
slopes on the way; the parts are added up in one order, so the same slopes come out each time.

Shapes   N tokens   C model width   P parts that tokens are split into

The kernel behind loss.py: one program for each token, which walks over its logits twice.

First it finds their greatest and the sum of their exponentials; then it puts the slope of the loss in their place. The
second walk finds them in the cache. What they are summed in is float32.

Shapes   N tokens   V vocabulary
"""

from __future__ import annotations

import math

import torch
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


def sum_parts(parts_PC: Tensor) -> Tensor:
    """The sum of the parts, out_C."""
    P, C = parts_PC.shape
    out_C = parts_PC.new_empty(C)
    _add_up[(triton.cdiv(C, BLOCK_C),)](parts_PC, out_C, P, C, BLOCK_P=BLOCK_P, BLOCK_C=BLOCK_C, num_warps=4)
    return out_C


DROPOUT_BLOCK = 512  # draws of a program; each gives four words of 32 bits, and a word two numbers


@triton.jit  # type: ignore[untyped-decorator]
def _draw(seed, out, count, begin, skip, per_pass, threshold, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Eight numbers at a time, which share a draw. Those at hand are parts of the whole grid, one in every pass."""
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    whole = begin + here + (here // per_pass) * skip
    a, b, c, d = tl.randint4x(tl.load(seed), whole)
    eight = tl.zeros([BLOCK], tl.int64)
    for part in tl.static_range(8):
        word = a if part < 2 else (b if part < 4 else (c if part < 6 else d))
        bits = ((word >> (16 * (part % 2))) & 0xFFFF).to(tl.int32)
        eight |= (bits >= threshold).to(tl.int64) << (8 * part)
    tl.store(out + here, eight, mask=here < count)


@torch.library.custom_op("dragoman::kept", mutates_args=())
def sample_keep_mask(seed_1: Tensor, shape: list[int], rate: float, first: int, height: int, passes: int) -> Tensor:
    """Which numbers of these rows stay, each with chance 1 - rate; rows from `first` on, of `height` in the grid."""
    per_row = math.prod(shape[1:])
    rows, eights = shape[0] // passes, -(-per_row // 8)
    room = torch.empty(shape[0] * eights, dtype=torch.int64, device=seed_1.device)
    if len(room):
        _draw[(triton.cdiv(len(room), DROPOUT_BLOCK),)](
            seed_1, room, len(room), first * eights, (height - rows) * eights, rows * eights, round(rate * 65_536),
            BLOCK=DROPOUT_BLOCK, num_warps=4,
        )  # fmt: skip
    drawn = room.view(torch.bool).view(shape[0], eights * 8)
    return (drawn if per_row == eights * 8 else drawn[:, :per_row].contiguous()).view(shape)


@sample_keep_mask.register_fake
def _(seed_1: Tensor, shape: list[int], *_: object) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=seed_1.device)


LINEAR_PARTS = 128  # of the tokens, side by side
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
def relu_backward(grad_NO: Tensor, out_NO: Tensor) -> tuple[Tensor, Tensor]:
    """The slope before the relu whose answer is out_NO, and its sum over the tokens, which is that of a bias."""
    N, O = out_NO.shape
    slope, sums = torch.empty_like(out_NO), out_NO.new_empty(LINEAR_PARTS, O, dtype=torch.float32)
    _slope[(triton.cdiv(O, BLOCK_O), LINEAR_PARTS)](
        grad_NO, out_NO, slope, sums, N, O, BLOCK_N=BLOCK_N, BLOCK_O=BLOCK_O, num_warps=2
    )
    return slope, sum_parts(sums)


@relu_backward.register_fake
def _(_: Tensor, out_NO: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out_NO), out_NO.new_empty(out_NO.size(1), dtype=torch.float32)


NORM_PARTS = 264  # of the tokens, side by side: two for each processor of a large GPU
NORM_ELEMENTS, NORM_ROWS, NORM_WARPS = 4096, 8, 4  # numbers that a program looks at together, of so many tokens at most


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
def layer_norm_backward(
    grad: Tensor, beside: Tensor | None, x: Tensor, mean: Tensor, scale: Tensor, weight_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the input, to which `beside` is added if it is there; and of gain and bias, slope_2C."""
    C, width = len(weight_C), triton.next_power_of_2(len(weight_C))
    slope, sums_PC = torch.empty_like(x), x.new_empty(NORM_PARTS, 2 * C, dtype=torch.float32)
    _norm_slope[(NORM_PARTS,)](
        grad, beside, x, mean, scale, weight_C, slope, sums_PC, x.numel() // C, C,
        BESIDE=beside is not None, ROWS=min(NORM_ROWS, max(NORM_ELEMENTS // width, 1)), WIDTH=width,
        num_warps=NORM_WARPS,
    )  # fmt: skip
    return slope, sum_parts(sums_PC).view(2, C)


@layer_norm_backward.register_fake
def _(_: Tensor, __: Tensor | None, x: Tensor, ___: Tensor, ____: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(2, len(weight_C), dtype=torch.float32)


LOGITS_PER_BLOCK = 8192  # logits that are read at a time, at most: of more, fewer programs find room beside each other


@triton.jit  # type: ignore[untyped-decorator]
def _soften(  # type: ignore[no-untyped-def]
    logits, target, losses, V, smoothing, P: tl.constexpr
):
    n = tl.program_id(0)
    row = logits + n.to(tl.int64) * V
    right = tl.load(target + n)
    chosen = tl.load(row + tl.maximum(right, 0)).to(tl.float32)  # before a walk whose sums wait for all warps
    p = tl.arange(0, P)
    most, total, plain = -float("inf"), 0.0, 0.0
    for begin in range(0, V, P):
        real = begin + p < V
        x = tl.load(row + begin + p, mask=real, other=-float("inf")).to(tl.float32)
        peak = tl.maximum(most, tl.max(x, 0))
        total = total * tl.exp(most - peak) + tl.sum(tl.exp(x - peak), 0)
        plain += tl.sum(tl.where(real, x, 0.0), 0)
        most = peak
    lse = most + tl.log(total)
    counts = right >= 0
    nll = tl.where(counts, lse - chosen, 0.0)
    even = tl.where(counts, lse - plain / V, 0.0)
    tl.store(losses + 2 * n, (1 - smoothing) * nll + smoothing * even)
    tl.store(losses + 2 * n + 1, nll)
    for begin in range(0, V, P):
        real = begin + p < V
        x = tl.load(row + begin + p, mask=real, other=-float("inf")).to(tl.float32)
        slope = tl.exp(x - lse) - smoothing / V - tl.where(begin + p == right, 1 - smoothing, 0.0)
        tl.store(row + begin + p, slope.to(logits.dtype.element_ty), mask=real)


def cross_entropy_in_place(logits_NV: Tensor, target_N: Tensor, smoothing: float) -> Tensor:
    """Loss and likelihood, summed. The logits become slopes."""
    N, V = logits_NV.shape
    losses_N2 = torch.empty(N, 2, dtype=torch.float32, device=logits_NV.device)
    block = min(triton.next_power_of_2(V), LOGITS_PER_BLOCK)
    warps = min(max(block // 1024, 1), 8)
    _soften[(N,)](logits_NV, target_N, losses_N2, V, smoothing, P=block, num_warps=warps)
    return losses_N2.sum(0)
