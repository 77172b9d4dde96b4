"""Cross-entropy with label smoothing, as sums over real tokens: the plain one and its fast twin.

Shapes   N tokens   C model width   V vocabulary
Both take states_NC before the projection, so that the fast one never holds all logits at once. Tokens whose target is
below 0 do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.modules.linear import compute_weight_gradient, fast_linear

CHUNK = {"cpu": 512, "cuda": 8192}  # tokens whose logits are held at a time: few enough for a CPU's cache
NOT_COUNTED = -1  # or any target below 0


def plain(states_NC: Tensor, weight_VC: Tensor, target_N: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The smoothed loss, summed, and the plain negative log-likelihood, summed. Written to be read."""
    logits_NV = F.linear(states_NC, weight_VC).float()
    target_N = target_N.clamp(min=NOT_COUNTED)
    summed = partial(F.cross_entropy, logits_NV, target_N, reduction="sum", ignore_index=NOT_COUNTED)
    return summed(label_smoothing=smoothing), summed().detach()


def chunked(states_NC: Tensor, weight_VC: Tensor, target_N: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The same numbers, a chunk of tokens at a time, gradients made on the way: no logits are kept or made twice."""
    loss, likelihood = _Chunked.apply(  # type: ignore[no-untyped-call]
        states_NC, weight_VC, target_N, smoothing, torch.is_grad_enabled()
    )
    return loss, likelihood


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states_NC: Tensor, weight_VC: Tensor, target_N: Tensor, smoothing: float, learning: bool
    ) -> tuple[Tensor, Tensor]:
        wants = learning and (states_NC.requires_grad or weight_VC.requires_grad)
        device = states_NC.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states_NC.dtype
        states, weight = states_NC.to(dtype), weight_VC.to(dtype)
        grad_states = torch.empty_like(states_NC) if wants else None
        grad_weight = torch.zeros_like(weight_VC) if wants else None
        sums = states_NC.new_zeros(2, dtype=torch.float32)
        chunk = CHUNK[device]
        for start in range(0, len(target_N), chunk):
            part = slice(start, start + chunk)
            losses, grad_NV = softened(fast_linear(states[part], weight), target_N[part], smoothing)
            sums += losses
            if grad_states is not None and grad_weight is not None:
                counts_N1 = (target_N[part, None] >= 0).to(dtype)
                grad_states[part] = fast_linear(grad_NV, weight.T) * counts_N1
                grad_weight = added(grad_weight, grad_NV, states[part] * counts_N1)
        if grad_states is not None and grad_weight is not None:
            ctx.save_for_backward(grad_states, grad_weight)
        loss, likelihood = sums.unbind()
        ctx.mark_non_differentiable(likelihood)
        return loss, likelihood

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states.mul_(grads[0]), grad_weight.mul_(grads[0]), None, None, None


def added(sum_VC: Tensor, grad_NV: Tensor, states_NC: Tensor) -> Tensor:
    """The sum, with what these tokens owe to the weights; on a GPU products in half precision are added up wide."""
    if grad_NV.is_cuda and grad_NV.dtype != sum_VC.dtype:
        return torch.addmm(sum_VC, grad_NV.T, states_NC, out_dtype=sum_VC.dtype)
    return sum_VC.add_(compute_weight_gradient(grad_NV, states_NC))


def softened(logits_NV: Tensor, target_N: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Loss and likelihood, summed, of the tokens that count, and the gradient of the loss at every logit.

    On a GPU the gradients overwrite the logits, which are read once (loss_triton.py).
    """
    if logits_NV.is_cuda and logits_NV.dtype != torch.float64:
        from dragoman.kernels.rowwise_triton import cross_entropy_in_place

        return cross_entropy_in_place(logits_NV, target_N, smoothing), logits_NV
    N, V = logits_NV.shape
    logits, real_N, target_N1 = logits_NV.float(), target_N >= 0, target_N.clamp(min=0)[:, None]
    share = logits.softmax(-1)
    lse = logits.amax(-1) - share.amax(-1).log()  # the softmax has been there: no second pass of exp
    nll = ((lse - logits.gather(1, target_N1)[:, 0]) * real_N).sum()
    even = ((lse - logits.sum(-1) / V) * real_N).sum() if smoothing else 0.0
    grad = share.sub_(smoothing / V) if smoothing else share
    grad.scatter_add_(1, target_N1, grad.new_full((N, 1), smoothing - 1))
    return torch.stack([(1 - smoothing) * nll + smoothing * even, nll]), grad.to(logits_NV.dtype)


Loss = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
LOSSES: dict[str, Loss] = {"chunked": chunked, "plain": plain}
