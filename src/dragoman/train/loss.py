"""Cross-entropy with label smoothing, as sums over real tokens: the plain one and its fast twin.

Shapes   N tokens   C model width   V vocabulary
Both take states_NC before the projection, so that the fast one never holds all logits at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.nn.linear import outer, product

CHUNK = {"cpu": 512, "cuda": 8192}  # tokens whose logits are held at a time: few enough for a CPU's cache


def plain(states_NC: Tensor, weight_VC: Tensor, target_N: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The smoothed loss, summed, and the plain negative log-likelihood, summed. Written to be read."""
    logits_NV = F.linear(states_NC, weight_VC).float()
    loss = F.cross_entropy(logits_NV, target_N, label_smoothing=smoothing, reduction="sum")
    return loss, F.cross_entropy(logits_NV, target_N, reduction="sum").detach()


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
        V = len(weight_VC)
        wants = learning and (states_NC.requires_grad or weight_VC.requires_grad)
        device = states_NC.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states_NC.dtype
        states, weight = states_NC.to(dtype), weight_VC.to(dtype)
        grad_states = torch.empty_like(states_NC) if wants else None
        grad_weight = torch.zeros_like(weight_VC) if wants else None
        total = states_NC.new_zeros((), dtype=torch.float32)
        likelihood = torch.zeros_like(total)
        chunk = CHUNK[device]
        for start in range(0, len(target_N), chunk):
            part = slice(start, start + chunk)
            logits = product(states[part], weight).float()
            target = target_N[part, None]
            share = logits.softmax(-1)
            lse = logits.amax(-1) - share.amax(-1).log()  # the softmax has been there: no second pass of exp
            nll = (lse - logits.gather(1, target)[:, 0]).sum()
            likelihood += nll
            total += (1 - smoothing) * nll + (smoothing * (lse.sum() - logits.sum() / V) if smoothing else 0.0)
            if grad_states is not None and grad_weight is not None:
                grad = share.sub_(smoothing / V) if smoothing else share
                grad.scatter_add_(1, target, grad.new_full((len(grad), 1), smoothing - 1))
                grad = grad.to(dtype)
                grad_states[part] = product(grad, weight.T)
                grad_weight += outer(grad, states[part])
        if grad_states is not None and grad_weight is not None:
            ctx.save_for_backward(grad_states, grad_weight)
        ctx.mark_non_differentiable(likelihood)
        return total, likelihood

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states.mul_(grads[0]), grad_weight.mul_(grads[0]), None, None, None


Loss = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
LOSSES: dict[str, Loss] = {"plain": plain, "chunked": chunked}
