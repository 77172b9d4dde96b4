"""Cross-entropy with label smoothing, summed over real tokens: a reference implementation and a fast one.

Shapes   P passes over a batch (training/consistency.py has two)   N tokens   C model width   V vocabulary
         M = P * N of a chunk   K sums
Both take states before the projection, so that the fast one never holds all logits. Tokens with a negative target do
not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.modules.linear import compute_weight_gradient, fast_linear

CHUNK = {"cpu": 512, "cuda": 8192}  # rows of logits held at a time: few enough for a CPU's cache
NOT_COUNTED = -1  # or any target below 0
ComputeGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # logits_PNV, target_N -> sums_K, grad_PNV


def plain_loss(states_NC: Tensor, weight_VC: Tensor, target_N: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the sums of the smoothed loss and of the negative log-likelihood (reference implementation)."""
    logits_NV = F.linear(states_NC, weight_VC).float()
    target_N = target_N.clamp(min=NOT_COUNTED)
    summed = partial(F.cross_entropy, logits_NV, target_N, reduction="sum", ignore_index=NOT_COUNTED)
    return summed(label_smoothing=smoothing), summed().detach()


def chunked_loss(states_NC: Tensor, weight_VC: Tensor, target_N: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the same sums, computed chunk by chunk together with their gradients."""

    def compute(logits_1NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        sums_2, grad_NV = cross_entropy_gradient(logits_1NV[0], target_N, smoothing)
        return sums_2, grad_NV[None]

    sums_2 = states_NC.new_zeros(2, dtype=torch.float32)
    loss, nll = sum_chunks(states_NC[None], weight_VC, target_N, compute, sums_2)
    return loss, nll


def sum_chunks(
    states_PNC: Tensor, weight_VC: Tensor, target_N: Tensor, compute: ComputeGradient, sums_K: Tensor
) -> tuple[Tensor, ...]:
    """Return the sums that `compute` gives for chunks of tokens, added to `sums_K`. The first is differentiable.

    Gradients are computed in the forward pass, so logits are neither kept nor computed twice.
    """
    sums: tuple[Tensor, ...] = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        states_PNC, weight_VC, target_N, compute, sums_K, torch.is_grad_enabled()
    )
    return sums


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states_PNC: Tensor,
        weight_VC: Tensor,
        target_N: Tensor,
        compute: ComputeGradient,
        sums_K: Tensor,
        grad_enabled: bool,
    ) -> tuple[Tensor, ...]:
        needs_grad = grad_enabled and (states_PNC.requires_grad or weight_VC.requires_grad)
        device, (P, _, C) = states_PNC.device.type, states_PNC.shape
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states_PNC.dtype
        states, weight = states_PNC.to(dtype), weight_VC.to(dtype)
        if needs_grad:
            grad_states, grad_weight = torch.empty_like(states_PNC), torch.zeros_like(weight_VC)
        chunk = max(CHUNK[device] // P, 1)
        for start in range(0, len(target_N), chunk):
            part = slice(start, start + chunk)
            rows_MC = states[:, part].flatten(0, 1)
            sums, grad_PNV = compute(fast_linear(rows_MC, weight).view(P, -1, len(weight)), target_N[part])
            sums_K = sums_K + sums
            if needs_grad:
                counts_N1, grad_MV = (target_N[part, None] >= 0).to(dtype), grad_PNV.to(dtype).flatten(0, 1)
                grad_states[:, part] = fast_linear(grad_MV, weight.T).view(P, -1, C) * counts_N1
                grad_weight = add_weight_gradient(grad_weight, grad_MV, rows_MC * counts_N1.repeat(P, 1))
        if needs_grad:
            ctx.save_for_backward(grad_states, grad_weight)
        sums_of_all = sums_K.unbind()
        ctx.mark_non_differentiable(*sums_of_all[1:])
        return sums_of_all

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states.mul_(grads[0]), grad_weight.mul_(grads[0]), None, None, None, None


def add_weight_gradient(sum_VC: Tensor, grad_NV: Tensor, states_NC: Tensor) -> Tensor:
    """Add the gradient of the weights of some tokens. On a GPU half-precision products are summed in float32."""
    if grad_NV.is_cuda and grad_NV.dtype != sum_VC.dtype:
        return torch.addmm(sum_VC, grad_NV.T, states_NC, out_dtype=sum_VC.dtype)
    return sum_VC.add_(compute_weight_gradient(grad_NV, states_NC))


def cross_entropy_gradient(logits_NV: Tensor, target_N: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the sums of loss and nll over the tokens that count, and the gradient of the loss for every logit.

    On a GPU the gradients overwrite the logits.
    """
    if logits_NV.is_cuda and logits_NV.dtype != torch.float64:
        from dragoman.kernels.rowwise_triton import cross_entropy_in_place

        return cross_entropy_in_place(logits_NV, target_N, smoothing), logits_NV
    N, V = logits_NV.shape
    logits, real_N, target_N1 = logits_NV.float(), target_N >= 0, target_N.clamp(min=0)[:, None]
    share = logits.softmax(-1)
    lse = logits.amax(-1) - share.amax(-1).log()  # from the softmax, without a second exp
    nll = ((lse - logits.gather(1, target_N1)[:, 0]) * real_N).sum()
    even = ((lse - logits.sum(-1) / V) * real_N).sum() if smoothing else 0.0
    grad = share.sub_(smoothing / V) if smoothing else share
    grad.scatter_add_(1, target_N1, grad.new_full((N, 1), smoothing - 1))
    return torch.stack([(1 - smoothing) * nll + smoothing * even, nll]), grad.to(logits_NV.dtype)


Loss = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
LOSSES: dict[str, Loss] = {"chunked": chunked_loss, "plain": plain_loss}
