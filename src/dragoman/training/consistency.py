"""Consistency regularization (R-Drop, SimCut): train two passes over a batch, with different dropout, to agree.

Every row of a batch goes through the model twice, and the divergence of the two predictions p and q is added to the
loss. There is a reference implementation and a fast one, as in training/loss.py.

Shapes   B rows   T tokens of a row   N tokens   C model width   V vocabulary   2 passes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.config.settings import Settings, TrainSettings
from dragoman.errors import UserError
from dragoman.modules.dropout import sample_dropout_mask
from dragoman.training.loss import sum_chunks
from dragoman.types import BOS, EOS, Batch


class Consistency(NamedTuple):
    """Weights of the terms of a loss. The gradient of a divergence goes to both of its sides."""

    right: tuple[float, float]  # of the losses of p and q
    same: tuple[float, float]  # of KL(p || q) and KL(q || p), times train.consistency_weight
    cuts: bool  # whether tokens are hidden from the second pass


def count_passes(settings: TrainSettings) -> int:
    """Return how often every batch goes through the model."""
    return 2 if CONSISTENCY[settings.consistency] else 1


def repeat_rows(batch: Batch, method: Consistency, cut: float) -> Batch:
    """Return a batch with all rows twice. If the method cuts, a share `cut` of the second half's tokens is hidden."""
    both = batch.map_tensors(lambda tensor: torch.cat([tensor, tensor]))
    if not method.cuts:
        return both
    return replace(
        both,
        source_seen_BS=sample_seen_mask(both.source_BS, cut),
        target_seen_BT=sample_seen_mask(both.target_in_BT, cut),
    )


def sample_seen_mask(ids_BT: Tensor, rate: float) -> Tensor:
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
    return (
        partial(chunked_consistency_loss, compute=torch.compile(consistency_gradient))
        if loss is chunked_consistency_loss
        else loss
    )


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
CONSISTENCY_LOSSES: dict[str, TwoPassLoss] = {
    "chunked": chunked_consistency_loss,
    "plain": plain_consistency_loss,
}  # by the names of training/loss.py
CONSISTENCY: dict[str, Consistency | None] = {
    "none": None,
    "rdrop": Consistency(right=(0.5, 0.5), same=(0.5, 0.5), cuts=False),  # Liang 2021, whose alpha is twice the weight
    "simcut": Consistency(right=(1.0, 0.0), same=(1.0, 0.0), cuts=True),  # Gao 2022
}
