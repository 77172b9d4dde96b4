"""The kernel behind loss.py: one program for each token, which walks over its logits twice.

First it finds their greatest and the sum of their exponentials; then it puts the slope of the loss in their place. The
second walk finds them in the cache. What they are summed in is float32.

Shapes   N tokens   V vocabulary
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PLACES = 8192  # logits that are read at a time, at most: of more, fewer programs find room beside each other


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


def soften(logits_NV: Tensor, target_N: Tensor, smoothing: float) -> Tensor:
    """Loss and likelihood, summed. The logits become slopes."""
    N, V = logits_NV.shape
    losses_N2 = torch.empty(N, 2, dtype=torch.float32, device=logits_NV.device)
    block = min(triton.next_power_of_2(V), PLACES)
    warps = min(max(block // 1024, 1), 8)
    _soften[(N,)](logits_NV, target_N, losses_N2, V, smoothing, P=block, num_warps=warps)
    return losses_N2.sum(0)
