"""Triton kernels that work row by row: dropout masks, backward passes of ReLU and layer norm, and cross-entropy.

Sums over tokens are computed in parts that are added in a fixed order, so gradients are reproducible to the bit.
Everything is accumulated in float32. The reference implementations are PyTorch's own functions (modules/dropout.py,
modules/feedforward.py, modules/norms.py) and the plain loss (training/loss.py).

Shapes   N tokens   C model width   O outputs   V vocabulary   P parts that tokens are split into
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
    """Return the sum of the parts, out_C, always added in the same order."""
    P, C = parts_PC.shape
    out_C = parts_PC.new_empty(C)
    _add_up[(triton.cdiv(C, BLOCK_C),)](parts_PC, out_C, P, C, BLOCK_P=BLOCK_P, BLOCK_C=BLOCK_C, num_warps=4)
    return out_C


DROPOUT_BLOCK = 512  # samples of a program: each has four words of 32 bits, and a word serves two elements


@triton.jit  # type: ignore[untyped-decorator]
def _sample(seed, out, count, begin, skip, per_pass, threshold, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sample eight elements at a time. Each of the passes has a slice of the full batch's rows."""
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = begin + here + (here // per_pass) * skip
    a, b, c, d = tl.randint4x(tl.load(seed), index)
    eight = tl.zeros([BLOCK], tl.int64)
    for part in tl.static_range(8):
        word = a if part < 2 else (b if part < 4 else (c if part < 6 else d))
        bits = ((word >> (16 * (part % 2))) & 0xFFFF).to(tl.int32)
        eight |= (bits >= threshold).to(tl.int64) << (8 * part)
    tl.store(out + here, eight, mask=here < count)


@torch.library.custom_op("dragoman::sample_keep_mask", mutates_args=())
def sample_keep_mask(seed_1: Tensor, shape: list[int], rate: float, first: int, height: int, passes: int) -> Tensor:
    """Return a boolean mask that is True with probability 1 - rate, for the rows from `first` on, of `height`.

    The value of an element depends only on the seed and on its index in the full batch.
    """
    per_row = math.prod(shape[1:])
    rows, eights = shape[0] // passes, -(-per_row // 8)
    buffer = torch.empty(shape[0] * eights, dtype=torch.int64, device=seed_1.device)
    if len(buffer):
        _sample[(triton.cdiv(len(buffer), DROPOUT_BLOCK),)](
            seed_1, buffer, len(buffer), first * eights, (height - rows) * eights, rows * eights, round(rate * 65_536),
            BLOCK=DROPOUT_BLOCK, num_warps=4,
        )  # fmt: skip
    mask = buffer.view(torch.bool).view(shape[0], eights * 8)
    return (mask if per_row == eights * 8 else mask[:, :per_row].contiguous()).view(shape)


@sample_keep_mask.register_fake
def _(seed_1: Tensor, shape: list[int], *_: object) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=seed_1.device)


LINEAR_PARTS = 128  # that tokens are split into, for parallel sums
BLOCK_N, BLOCK_O = 16, 128


@triton.jit  # type: ignore[untyped-decorator]
def _relu_backward(grad, out, in_grad, sums, N, O, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr):  # type: ignore[no-untyped-def]
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    part, parts = tl.program_id(1), tl.num_programs(1)
    # reduced after the loop: a reduction inside it would synchronize warps
    total = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
    for block in range(part, tl.cdiv(N, BLOCK_N), parts):
        n = (block * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        at, there = n[:, None] * O + o[None, :], (n < N)[:, None] & (o < O)[None, :]
        active = tl.load(out + at, mask=there, other=0.0) > 0
        own = tl.where(active, tl.load(grad + at, mask=there, other=0.0), 0.0)
        tl.store(in_grad + at, own, mask=there)
        total += own.to(tl.float32)
    tl.store(sums + part * O + o, tl.sum(total, 0), mask=o < O)


@torch.library.custom_op("dragoman::relu_backward", mutates_args=())
def relu_backward(grad_NO: Tensor, out_NO: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient before the ReLU whose output is out_NO, and its sum over tokens, the bias gradient."""
    N, O = out_NO.shape
    in_grad, sums = torch.empty_like(out_NO), out_NO.new_empty(LINEAR_PARTS, O, dtype=torch.float32)
    _relu_backward[(triton.cdiv(O, BLOCK_O), LINEAR_PARTS)](
        grad_NO, out_NO, in_grad, sums, N, O, BLOCK_N=BLOCK_N, BLOCK_O=BLOCK_O, num_warps=2
    )
    return in_grad, sum_parts(sums)


@relu_backward.register_fake
def _(_: Tensor, out_NO: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out_NO), out_NO.new_empty(out_NO.size(1), dtype=torch.float32)


NORM_PARTS = 264  # that tokens are split into: two per multiprocessor of a large GPU
NORM_ELEMENTS, NORM_ROWS, NORM_WARPS = 4096, 8, 4  # elements and rows of a block at most, and warps


@triton.jit  # type: ignore[untyped-decorator]
def _layer_norm_backward(  # type: ignore[no-untyped-def]
    grad, residual_grad, x, mean, scale, weight, in_grad, sums, N, C,
    RESIDUAL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
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
        center, inv_std = tl.load(mean + n, mask=n < N, other=0.0), tl.load(scale + n, mask=n < N, other=0.0)
        normed = tl.where(there, (own - center[:, None]) * inv_std[:, None], 0.0)
        gain += g * normed
        bias += g
        inner = g * w[None, :]
        along, level = tl.sum(inner * normed, 1) / C, tl.sum(inner, 1) / C
        out = (inner - level[:, None] - normed * along[:, None]) * inv_std[:, None]
        if RESIDUAL:
            out += tl.load(residual_grad + at, mask=there, other=0.0).to(tl.float32)
        tl.store(in_grad + at, out.to(in_grad.dtype.element_ty), mask=there)
    tl.store(sums + part * 2 * C + c, tl.sum(gain, 0), mask=c < C)
    tl.store(sums + (part * 2 + 1) * C + c, tl.sum(bias, 0), mask=c < C)


@torch.library.custom_op("dragoman::layer_norm_backward", mutates_args=())
def layer_norm_backward(
    grad: Tensor, residual_grad: Tensor | None, x: Tensor, mean: Tensor, scale: Tensor, weight_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the input, plus `residual_grad` if given, and those of gain and bias, grad_2C."""
    C, width = len(weight_C), triton.next_power_of_2(len(weight_C))
    in_grad, sums_PC = torch.empty_like(x), x.new_empty(NORM_PARTS, 2 * C, dtype=torch.float32)
    _layer_norm_backward[(NORM_PARTS,)](
        grad, residual_grad, x, mean, scale, weight_C, in_grad, sums_PC, x.numel() // C, C,
        RESIDUAL=residual_grad is not None, ROWS=min(NORM_ROWS, max(NORM_ELEMENTS // width, 1)), WIDTH=width,
        num_warps=NORM_WARPS,
    )  # fmt: skip
    return in_grad, sum_parts(sums_PC).view(2, C)


@layer_norm_backward.register_fake
def _(_: Tensor, __: Tensor | None, x: Tensor, ___: Tensor, ____: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(2, len(weight_C), dtype=torch.float32)


LOGITS_PER_BLOCK = 8192  # at most: with more, fewer programs fit on a multiprocessor


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits, target, losses, V, smoothing, P: tl.constexpr
):
    n = tl.program_id(0)
    row = logits + n.to(tl.int64) * V
    label = tl.load(target + n)
    # loaded before the loop, whose reductions synchronize all warps
    chosen = tl.load(row + tl.maximum(label, 0)).to(tl.float32)
    p = tl.arange(0, P)
    highest, total, logit_sum = -float("inf"), 0.0, 0.0
    for begin in range(0, V, P):
        real = begin + p < V
        x = tl.load(row + begin + p, mask=real, other=-float("inf")).to(tl.float32)
        now = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - now) + tl.sum(tl.exp(x - now), 0)
        logit_sum += tl.sum(tl.where(real, x, 0.0), 0)
        highest = now
    lse = highest + tl.log(total)
    counts = label >= 0
    nll = tl.where(counts, lse - chosen, 0.0)
    even = tl.where(counts, lse - logit_sum / V, 0.0)
    tl.store(losses + 2 * n, (1 - smoothing) * nll + smoothing * even)
    tl.store(losses + 2 * n + 1, nll)
    for begin in range(0, V, P):
        real = begin + p < V
        x = tl.load(row + begin + p, mask=real, other=-float("inf")).to(tl.float32)
        grad = tl.exp(x - lse) - smoothing / V - tl.where(begin + p == label, 1 - smoothing, 0.0)
        tl.store(row + begin + p, grad.to(logits.dtype.element_ty), mask=real)


def cross_entropy_in_place(logits_NV: Tensor, target_N: Tensor, smoothing: float) -> Tensor:
    """Return the smoothed loss and the negative log-likelihood, summed. The logits are overwritten by gradients.

    One program per token reads its logits twice: for the log-sum-exp, and, from the cache, for the gradients.
    """
    N, V = logits_NV.shape
    losses_N2 = torch.empty(N, 2, dtype=torch.float32, device=logits_NV.device)
    block = min(triton.next_power_of_2(V), LOGITS_PER_BLOCK)
    warps = min(max(block // 1024, 1), 8)
    _cross_entropy[(N,)](logits_NV, target_N, losses_N2, V, smoothing, P=block, num_warps=warps)
    return losses_N2.sum(0)
