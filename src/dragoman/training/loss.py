"""Losses as sums over real tokens, each in a plain and a fast implementation.

Cross-entropy with label smoothing takes states_NC before the projection, so that the fast one never holds all logits at
once. Tokens whose target is below 0 do not count.

R-Drop and SimCut compare two passes: a batch goes through the model with every row twice, with new dropout the second
time, and how far the two predictions are apart is added to the loss.

Shapes   B rows   T tokens of a row   N tokens   C model width   V vocabulary   2 passes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.config.settings import Settings, TrainSettings
from dragoman.errors import UserError
from dragoman.modules.dropout import sample_dropout_mask
from dragoman.modules.feedforward import compute_weight_gradient, fast_linear
from dragoman.types import BOS, EOS, Batch

CHUNK = {"cpu": 512, "cuda": 8192}  # rows of logits computed at a time; on a CPU they fit into the cache
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
    prob = logits.softmax(-1)
    lse = logits.amax(-1) - prob.amax(-1).log()  # from the softmax, without a second exp
    nll = ((lse - logits.gather(1, target_N1)[:, 0]) * real_N).sum()
    even = ((lse - logits.sum(-1) / V) * real_N).sum() if smoothing else 0.0
    grad = prob.sub_(smoothing / V) if smoothing else prob
    grad.scatter_add_(1, target_N1, grad.new_full((N, 1), smoothing - 1))
    return torch.stack([(1 - smoothing) * nll + smoothing * even, nll]), grad.to(logits_NV.dtype)


Loss = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
LOSSES: dict[str, Loss] = {"chunked": chunked_loss, "plain": plain_loss}


class Consistency(NamedTuple):
    """Weights of the terms of a loss. The gradient of a divergence goes to both of its sides."""

    right: tuple[float, float]  # of the losses of p and q
    same: tuple[float, float]  # of KL(p || q) and KL(q || p), times train.consistency_weight
    cuts: bool  # whether tokens are hidden from the second pass


def count_passes(settings: TrainSettings) -> int:
    """Return how often every batch goes through the model."""
    return 2 if CONSISTENCY[settings.consistency] else 1


def repeat_rows(batch: Batch, method: Consistency, cut: float) -> Batch:
    """Return a batch with all rows twice. If the method cuts, a fraction `cut` of tokens is hidden in the copies."""
    both = batch.map_tensors(lambda tensor: torch.cat([tensor, tensor]))
    if not method.cuts:
        return both
    return replace(
        both,
        source_visible_BS=sample_visibility_mask(both.source_BS, cut),
        target_visible_BT=sample_visibility_mask(both.target_in_BT, cut),
    )


def sample_visibility_mask(ids_BT: Tensor, rate: float) -> Tensor:
    """Return False for tokens of the second half that are hidden, except their positions: never BOS or EOS."""
    keep_BT = sample_dropout_mask(tuple(ids_BT.shape), rate, torch.ones((), device=ids_BT.device)) > 0
    keep_BT = keep_BT | (ids_BT == BOS) | (ids_BT == EOS)
    keep_BT[: len(ids_BT) // 2] = True
    return keep_BT


def plain_consistency_loss(
    states_2NC: Tensor, weight_VC: Tensor, target_N: Tensor, smoothing: float, method: Consistency, weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of the loss, of the nll of the first pass and of the divergence (reference implementation)."""
    counts_N = target_N >= 0
    target_N, logits_2NV = target_N[counts_N], widen(F.linear(states_2NC[:, counts_N], weight_VC))
    logp_NV, logq_NV = logits_2NV.log_softmax(-1)
    right = [F.cross_entropy(x_NV, target_N, label_smoothing=smoothing, reduction="sum") for x_NV in logits_2NV]
    same = [(x.exp() * (x - y)).sum() for x, y in ((logp_NV, logq_NV), (logq_NV, logp_NV))]
    divergence = method.same[0] * same[0] + method.same[1] * same[1]
    total = method.right[0] * right[0] + method.right[1] * right[1] + weight * divergence
    return total, F.nll_loss(logp_NV, target_N, reduction="sum").detach(), divergence.detach()


def consistency_gradient(
    logits_2NV: Tensor, target_N: Tensor, smoothing: float, method: Consistency, weight: float
) -> tuple[Tensor, Tensor]:
    """Return the sums of loss, nll and divergence over tokens that count, and the loss's gradient for every logit.

    The gradient of KL(p || q) is p (log p - log q - KL) at the logits of p, and q - p at those of q.
    """
    V, counts_N1, target_N1 = logits_2NV.size(-1), (target_N >= 0)[:, None], target_N.clamp(min=0)[:, None]
    logp_2NV = widen(logits_2NV).log_softmax(-1)
    p_2NV = logp_2NV.exp()
    total, divergence, gradients = logp_2NV.new_zeros(()), logp_2NV.new_zeros(()), []
    for this, other in ((0, 1), (1, 0)):
        right, there, back = method.right[this], weight * method.same[this], weight * method.same[other]
        p_NV, logp_NV = p_2NV[this], logp_2NV[this]
        grad_NV = (right + back) * p_NV - back * p_2NV[other]
        if right:
            nll_N1, even_N1 = -logp_NV.gather(1, target_N1), -logp_NV.mean(-1, keepdim=True)
            total = total + right * (((1 - smoothing) * nll_N1 + smoothing * even_N1) * counts_N1).sum()
            grad_NV = grad_NV - right * smoothing / V
            grad_NV = grad_NV.scatter_add(1, target_N1, torch.full_like(nll_N1, right * (smoothing - 1)))
        if there:
            gap_NV = logp_NV - logp_2NV[other]
            kl_N1 = (p_NV * gap_NV).sum(-1, keepdim=True)
            divergence = divergence + method.same[this] * (kl_N1 * counts_N1).sum()
            grad_NV = grad_NV + there * p_NV * (gap_NV - kl_N1)
        gradients.append(grad_NV * counts_N1)
    nll = -(logp_2NV[0].gather(1, target_N1) * counts_N1).sum()
    return torch.stack([total + weight * divergence, nll, divergence]), torch.stack(gradients)


def widen(x: Tensor) -> Tensor:
    """Return the tensor in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def chunked_consistency_loss(
    states_2NC: Tensor,
    weight_VC: Tensor,
    target_N: Tensor,
    smoothing: float,
    method: Consistency,
    weight: float,
    compute: Callable[..., tuple[Tensor, Tensor]] = consistency_gradient,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same sums, computed chunk by chunk together with their gradients."""
    gradient = partial(compute, smoothing=smoothing, method=method, weight=weight)
    sums_3 = widen(states_2NC.new_zeros(3))
    total, nll, divergence = sum_chunks(states_2NC, weight_VC, target_N, gradient, sums_3)
    return total, nll, divergence


def compile_loss(loss: TwoPassLoss) -> TwoPassLoss:
    """Return the loss for a GPU, where a chunk is a dozen kernels or two or three compiled ones."""
    compute = torch.compile(consistency_gradient)
    return partial(chunked_consistency_loss, compute=compute) if loss is chunked_consistency_loss else loss


def check_consistency(settings: TrainSettings, model: Settings) -> None:
    """Refuse settings that would have no effect."""
    method = CONSISTENCY[settings.consistency]
    usual = type(settings).model_fields
    if not method and settings.consistency_weight != usual["consistency_weight"].default:
        raise UserError("train.consistency_weight has no use without train.consistency; set that to rdrop or simcut")
    if not (method and method.cuts) and settings.cut != usual["cut"].default:
        raise UserError(f"train.cut has no use with train.consistency={settings.consistency}; set that to simcut")
    rates = [getattr(model, name) for name in type(model).model_fields if name.endswith("dropout")]
    if method and not (any(rates) or (method.cuts and settings.cut)):
        raise UserError(
            f"train.consistency={settings.consistency} compares two passes, which are the same without any dropout; "
            "set model.dropout"
        )


TwoPassLoss = Callable[[Tensor, Tensor, Tensor, float, Consistency, float], tuple[Tensor, Tensor, Tensor]]
CONSISTENCY_LOSSES: dict[str, TwoPassLoss] = {"chunked": chunked_consistency_loss, "plain": plain_consistency_loss}
CONSISTENCY: dict[str, Consistency | None] = {
    "none": None,
    "rdrop": Consistency(right=(0.5, 0.5), same=(0.5, 0.5), cuts=False),  # Liang 2021, whose alpha is twice the weight
    "simcut": Consistency(right=(1.0, 0.0), same=(1.0, 0.0), cuts=True),  # Gao 2022
}
