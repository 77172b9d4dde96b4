"""Drawing on a GPU: bits made 16 at a time from a counter, so that one costs an eighth of what PyTorch's own do.

What is drawn for a number hangs on the seed and on where the number stands in the whole grid, and on nothing else.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512  # draws of a program; each gives four words of 32 bits, and a word two numbers


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
def kept(seed_1: Tensor, shape: list[int], rate: float, first: int, height: int, passes: int) -> Tensor:
    """Which numbers of these rows stay, each with chance 1 - rate; rows from `first` on, of `height` in the grid."""
    per_row = math.prod(shape[1:])
    rows, eights = shape[0] // passes, -(-per_row // 8)
    room = torch.empty(shape[0] * eights, dtype=torch.int64, device=seed_1.device)
    if len(room):
        _draw[(triton.cdiv(len(room), BLOCK),)](
            seed_1, room, len(room), first * eights, (height - rows) * eights, rows * eights, round(rate * 65_536),
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    drawn = room.view(torch.bool).view(shape[0], eights * 8)
    return (drawn if per_row == eights * 8 else drawn[:, :per_row].contiguous()).view(shape)


@kept.register_fake
def _(seed_1: Tensor, shape: list[int], *_: object) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=seed_1.device)
