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

PLACES = 8192  # logits that are read at a time, at most


@triton.jit  # type: ignore[untyped-decorator]
def _soften(  # type: ignore[no-untyped-def]
    logits, target, losses, V, smoothing, P: tl.constexpr
):
    n = tl.program_id(0)
    row = logits + n.to(tl.int64) * V
    right = tl.load(target + n)
    p = tl.arange(0, P)
    most = tl.full([P], -float("inf"), tl.float32)
    total = tl.zeros([P], tl.float32)
    plain = tl.zeros([P], tl.float32)
    for begin in range(0, V, P):  # every lane keeps a greatest and a sum of its own
        real = begin + p < V
        x = tl.load(row + begin + p, mask=real, other=-float("inf")).to(tl.float32)
        peak = tl.maximum(most, x)
        total = tl.where(peak == -float("inf"), 0.0, total * tl.exp(most - peak) + tl.exp(x - peak))
        plain += tl.where(real, x, 0.0)
        most = peak
    top = tl.max(most, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(most - top), 0))
    chosen = tl.load(row + tl.maximum(right, 0)).to(tl.float32)
    counts = right >= 0
    nll = tl.where(counts, lse - chosen, 0.0)
    even = tl.where(counts, lse - tl.sum(plain, 0) / V, 0.0)
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
    _soften[(N,)](logits_NV, target_N, losses_N2, V, smoothing, P=block, num_warps=8)
    return losses_N2.sum(0)
