"""Triton kernels that work row by row: dropout masks, backward passes of ReLU and layer norm, and cross-entropy.

To sum over all tokens, each of P programs sums a part of them, and a second kernel adds the partial sums in a fixed
order. Therefore gradients are reproducible to the bit. Everything is accumulated in float32. The reference
implementations are in modules/dropout.py, modules/feedforward.py, modules/norms.py and training/loss.py, which call
these kernels on a GPU.

Shapes   N tokens   C model width   O ReLU width   V vocabulary   P partial sums
In kernels, lower-case letters are the indices of a block: `n` the tokens, `c`, `o`, `p` and `v` likewise. `offsets` are
their addresses, and `valid` is False for indices beyond the end of the tensor.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_P, BLOCK_C = 64, 32  # partial sums and columns that a program of `_sum_parts` adds at a time


@triton.jit  # type: ignore[untyped-decorator]
def _sum_parts(parts, out, P, C, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for first in range(0, P, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        total += tl.load(parts + p[:, None] * C + c[None, :], mask=(p < P)[:, None] & (c < C)[None, :], other=0.0)
    tl.store(out + c, tl.sum(total, 0), mask=c < C)


def sum_parts(parts_PC: Tensor) -> Tensor:
    """Return the sum over P, out_C. The order of the additions is fixed."""
    P, C = parts_PC.shape
    out_C = parts_PC.new_empty(C)
    _sum_parts[(triton.cdiv(C, BLOCK_C),)](parts_PC, out_C, P, C, BLOCK_P=BLOCK_P, BLOCK_C=BLOCK_C, num_warps=4)
    return out_C


DROPOUT_BLOCK = 512  # samples per program; a sample has four 32-bit words, and each word decides two elements


@triton.jit  # type: ignore[untyped-decorator]
def _sample_keep_mask(seed, out, count, first, skip, per_pass, threshold, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write `count` groups of eight mask elements; a group is one 64-bit integer and one sample of the generator.

    The output has `per_pass` groups of each forward pass. In the mask of the full batch it begins at group `first`, and
    `skip` groups lie between two passes. An element is kept (True) if its 16 random bits are at least `threshold`.
    """
    output_index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sample_index = first + output_index + (output_index // per_pass) * skip
    w0, w1, w2, w3 = tl.randint4x(tl.load(seed), sample_index)
    packed = tl.zeros([BLOCK], tl.int64)
    for byte in tl.static_range(8):  # a boolean element is a byte; it gets half of one of the four random words
        word = w0 if byte < 2 else (w1 if byte < 4 else (w2 if byte < 6 else w3))
        bits = ((word >> (16 * (byte % 2))) & 0xFFFF).to(tl.int32)
        packed |= (bits >= threshold).to(tl.int64) << (8 * byte)
    tl.store(out + output_index, packed, mask=output_index < count)


@torch.library.custom_op("dragoman::sample_keep_mask", mutates_args=())
def sample_keep_mask(seed: Tensor, shape: list[int], rate: float, first: int, total_rows: int, passes: int) -> Tensor:
    """Return a boolean dropout mask whose elements are True with probability 1 - rate.

    The full mask is for `passes` forward passes over a batch of `total_rows` rows (R-Drop has 2 passes); the rows of
    pass k begin at k * total_rows. `shape` is a slice: in every pass the same rows, from row `first` on. An element
    depends only on the `seed`, a tensor with one element, and on its index in the full mask, not on the slice.
    """
    elements_per_row = math.prod(shape[1:])
    rows_per_pass, groups = shape[0] // passes, -(-elements_per_row // 8)  # groups of eight elements per row
    buffer = torch.empty(shape[0] * groups, dtype=torch.int64, device=seed.device)
    if len(buffer):
        _sample_keep_mask[(triton.cdiv(len(buffer), DROPOUT_BLOCK),)](
            seed, buffer, len(buffer), first * groups, (total_rows - rows_per_pass) * groups,
            rows_per_pass * groups, round(rate * 65_536), BLOCK=DROPOUT_BLOCK, num_warps=4,
        )  # fmt: skip
    mask = buffer.view(torch.bool).view(shape[0], groups * 8)
    return (mask if elements_per_row == groups * 8 else mask[:, :elements_per_row].contiguous()).view(shape)


@sample_keep_mask.register_fake
def _(seed: Tensor, shape: list[int], *_: object) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=seed.device)


RELU_PARTS = 128  # P in `relu_backward`
BLOCK_N, BLOCK_O = 16, 128  # tokens and columns per step of `_relu_backward`


@triton.jit  # type: ignore[untyped-decorator]
def _relu_backward(grad, out, x_grad, sums, N, O, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the gradient before the ReLU for a block of columns and every P-th block of tokens, and sum it."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    part, parts = tl.program_id(1), tl.num_programs(1)
    # Sum over the tokens of a block only after the loop, since a reduction in the loop would synchronize warps.
    total = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
    for block in range(part, tl.cdiv(N, BLOCK_N), parts):
        n = (block * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        offsets, valid = n[:, None] * O + o[None, :], (n < N)[:, None] & (o < O)[None, :]
        active = tl.load(out + offsets, mask=valid, other=0.0) > 0
        masked_grad = tl.where(active, tl.load(grad + offsets, mask=valid, other=0.0), 0.0)
        tl.store(x_grad + offsets, masked_grad, mask=valid)
        total += masked_grad.to(tl.float32)
    tl.store(sums + part * O + o, tl.sum(total, 0), mask=o < O)


@torch.library.custom_op("dragoman::relu_backward", mutates_args=())
def relu_backward(grad_NO: Tensor, out_NO: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the input of a ReLU with output out_NO, and its sum over tokens (for the bias)."""
    N, O = out_NO.shape
    x_grad, sums = torch.empty_like(out_NO), out_NO.new_empty(RELU_PARTS, O, dtype=torch.float32)
    _relu_backward[(triton.cdiv(O, BLOCK_O), RELU_PARTS)](
        grad_NO, out_NO, x_grad, sums, N, O, BLOCK_N=BLOCK_N, BLOCK_O=BLOCK_O, num_warps=2
    )
    return x_grad, sum_parts(sums)


@relu_backward.register_fake
def _(_: Tensor, out_NO: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out_NO), out_NO.new_empty(out_NO.size(1), dtype=torch.float32)


NORM_PARTS = 264  # P in `layer_norm_backward`: two per multiprocessor of an H100 or H200
NORM_ELEMENTS, NORM_ROWS, NORM_WARPS = 4096, 8, 4  # maximum elements and rows per block; warps per program


@triton.jit  # type: ignore[untyped-decorator]
def _layer_norm_backward(  # type: ignore[no-untyped-def]
    grad, residual_grad, x, mean, inv_std, weight, x_grad, sums, N, C,
    RESIDUAL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute the input gradients of every P-th block of tokens, and the sums for the gradients of gain and bias."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, WIDTH)
    gain = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    gain_grad, bias_grad = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for block in range(part, tl.cdiv(N, ROWS), parts):
        n = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        offsets, valid = n[:, None] * C + c[None, :], (n < N)[:, None] & (c < C)[None, :]
        grad_tile = tl.load(grad + offsets, mask=valid, other=0.0).to(tl.float32)
        x_tile = tl.load(x + offsets, mask=valid, other=0.0).to(tl.float32)
        row_mean, row_inv_std = tl.load(mean + n, mask=n < N, other=0.0), tl.load(inv_std + n, mask=n < N, other=0.0)
        normed = tl.where(valid, (x_tile - row_mean[:, None]) * row_inv_std[:, None], 0.0)
        gain_grad += grad_tile * normed
        bias_grad += grad_tile
        normed_grad = grad_tile * gain[None, :]
        product_mean, grad_mean = tl.sum(normed_grad * normed, 1) / C, tl.sum(normed_grad, 1) / C
        x_grad_tile = (normed_grad - grad_mean[:, None] - normed * product_mean[:, None]) * row_inv_std[:, None]
        if RESIDUAL:
            x_grad_tile += tl.load(residual_grad + offsets, mask=valid, other=0.0).to(tl.float32)
        tl.store(x_grad + offsets, x_grad_tile.to(x_grad.dtype.element_ty), mask=valid)
    tl.store(sums + part * 2 * C + c, tl.sum(gain_grad, 0), mask=c < C)
    tl.store(sums + (part * 2 + 1) * C + c, tl.sum(bias_grad, 0), mask=c < C)


@torch.library.custom_op("dragoman::layer_norm_backward", mutates_args=())
def layer_norm_backward(
    grad: Tensor, residual_grad: Tensor | None, x: Tensor, mean: Tensor, inv_std: Tensor, weight_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, plus that of x's residual connection if given, and those of gain and bias, (2, C).

    `mean` and `inv_std` are the mean and the inverse standard deviation of each token, from the forward pass.
    """
    C, width = len(weight_C), triton.next_power_of_2(len(weight_C))
    x_grad, sums = torch.empty_like(x), x.new_empty(NORM_PARTS, 2 * C, dtype=torch.float32)
    _layer_norm_backward[(NORM_PARTS,)](
        grad, residual_grad, x, mean, inv_std, weight_C, x_grad, sums, x.numel() // C, C,
        RESIDUAL=residual_grad is not None, ROWS=min(NORM_ROWS, max(NORM_ELEMENTS // width, 1)), WIDTH=width,
        num_warps=NORM_WARPS,
    )  # fmt: skip
    return x_grad, sum_parts(sums).view(2, C)


@layer_norm_backward.register_fake
def _(_: Tensor, __: Tensor | None, x: Tensor, ___: Tensor, ____: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(2, len(weight_C), dtype=torch.float32)


LOGITS_PER_BLOCK = 8192  # maximum; with larger blocks, fewer programs fit on a multiprocessor


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(logits, target, losses, V, smoothing, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the smoothed loss and the negative log-likelihood of one token, and overwrite its logits by gradients.

    The first loop computes the log-sum-exp online: if it finds a new maximum, it rescales the sum so far. A
    negative label is ignored in the losses, but not in the gradients, which the caller has to mask.
    """
    n = tl.program_id(0)
    row = logits + n.to(tl.int64) * V
    label = tl.load(target + n)
    # Load it here: the first loop synchronizes all warps before the second loop overwrites the logits.
    target_logit = tl.load(row + tl.maximum(label, 0)).to(tl.float32)
    v = tl.arange(0, BLOCK)
    max_logit, exp_sum, logit_sum = -float("inf"), 0.0, 0.0
    for begin in range(0, V, BLOCK):
        valid = begin + v < V
        logit = tl.load(row + begin + v, mask=valid, other=-float("inf")).to(tl.float32)
        new_max = tl.maximum(max_logit, tl.max(logit, 0))
        exp_sum = exp_sum * tl.exp(max_logit - new_max) + tl.sum(tl.exp(logit - new_max), 0)
        logit_sum += tl.sum(tl.where(valid, logit, 0.0), 0)
        max_logit = new_max
    lse = max_logit + tl.log(exp_sum)
    is_counted = label >= 0
    nll = tl.where(is_counted, lse - target_logit, 0.0)
    uniform_loss = tl.where(is_counted, lse - logit_sum / V, 0.0)  # cross-entropy with a uniform target
    tl.store(losses + 2 * n, (1 - smoothing) * nll + smoothing * uniform_loss)
    tl.store(losses + 2 * n + 1, nll)
    for begin in range(0, V, BLOCK):
        valid = begin + v < V
        logit = tl.load(row + begin + v, mask=valid, other=-float("inf")).to(tl.float32)
        grad = tl.exp(logit - lse) - smoothing / V - tl.where(begin + v == label, 1 - smoothing, 0.0)
        tl.store(row + begin + v, grad.to(logits.dtype.element_ty), mask=valid)


def cross_entropy_in_place(logits_NV: Tensor, target_N: Tensor, smoothing: float) -> Tensor:
    """Return the sums of the smoothed loss and of the negative log-likelihood; overwrite the logits by gradients.

    One program per token reads its logits twice: for the log-sum-exp, and then, from the cache, for the gradients.
    """
    N, V = logits_NV.shape
    losses_N2 = torch.empty(N, 2, dtype=torch.float32, device=logits_NV.device)
    block = min(triton.next_power_of_2(V), LOGITS_PER_BLOCK)
    warps = min(max(block // 1024, 1), 8)
    _cross_entropy[(N,)](logits_NV, target_N, losses_N2, V, smoothing, BLOCK=block, num_warps=warps)
    return losses_N2.sum(0)
