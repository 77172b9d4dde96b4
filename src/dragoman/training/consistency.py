"""Two passes over a batch that are to say the same: R-Drop and SimCut, the plain loss and its fast twin.

A batch goes through the model with every row twice, and what dropout draws for the second time is drawn anew. How far
the two answers to the same question are apart is added to the loss.

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
from dragoman.modules.linear import fast_linear
from dragoman.training import loss
from dragoman.types import BOS, EOS, Batch


class Consistency(NamedTuple):
    """What is asked of two passes that say p and q of a token: to be right, and to say the same.

    The gradient of a divergence goes to both of its sides.
    """

    right: tuple[float, float]  # weights of the losses of p and q
    same: tuple[float, float]  # of KL(p || q) and KL(q || p), times train.consistency_weight
    cuts: bool  # whether tokens are hidden from the second pass


def passes(settings: TrainSettings) -> int:
    """How often every batch goes through the model."""
    return 2 if CONSISTENCY[settings.consistency] else 1


def twice(batch: Batch, method: Consistency, cut: float) -> Batch:
    """Every row twice: all of them, then all of them again, a share `cut` of whose tokens is hidden from the model."""
    both = batch.map_tensors(lambda tensor: torch.cat([tensor, tensor]))
    if not method.cuts:
        return both
    return replace(both, source_seen_BS=seen(both.source_BS, cut), target_seen_BT=seen(both.target_in_BT, cut))


def seen(ids_BT: Tensor, rate: float) -> Tensor:
    """False for tokens of the second half that are hidden, all but their places: never <s> or </s>, perhaps a tag."""
    keep_BT = sample_dropout_mask(tuple(ids_BT.shape), rate, torch.ones((), device=ids_BT.device)) > 0
    keep_BT = keep_BT | (ids_BT == BOS) | (ids_BT == EOS)
    keep_BT[: len(ids_BT) // 2] = True
    return keep_BT


def plain(
    states_2NC: Tensor, weight_VC: Tensor, target_N: Tensor, smoothing: float, method: Consistency, weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Written to be read. The loss of both passes, the negative log-likelihood of the first, how far they are apart."""
    counts_N = target_N >= 0
    target_N, logits_2NV = target_N[counts_N], widened(F.linear(states_2NC[:, counts_N], weight_VC))
    logp_NV, logq_NV = logits_2NV.log_softmax(-1)
    right = [F.cross_entropy(x_NV, target_N, label_smoothing=smoothing, reduction="sum") for x_NV in logits_2NV]
    same = [(x.exp() * (x - y)).sum() for x, y in ((logp_NV, logq_NV), (logq_NV, logp_NV))]
    divergence = method.same[0] * same[0] + method.same[1] * same[1]
    total = method.right[0] * right[0] + method.right[1] * right[1] + weight * divergence
    return total, F.nll_loss(logp_NV, target_N, reduction="sum").detach(), divergence.detach()


def apart(
    logits_2NV: Tensor, target_N: Tensor, smoothing: float, method: Consistency, weight: float
) -> tuple[Tensor, Tensor]:
    """Loss, likelihood and divergence, summed, of the tokens that count, and the gradient of the loss at every logit.

    The gradient of KL(p || q) is p (log p - log q - KL) at the logits of p, and q - p at those of q.
    """
    V, counts_N1, target_N1 = logits_2NV.size(-1), (target_N >= 0)[:, None], target_N.clamp(min=0)[:, None]
    logp_2NV = widened(logits_2NV).log_softmax(-1)
    p_2NV = logp_2NV.exp()
    total, divergence, slopes = logp_2NV.new_zeros(()), logp_2NV.new_zeros(()), []
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
        slopes.append(grad_NV * counts_N1)
    likelihood = -(logp_2NV[0].gather(1, target_N1) * counts_N1).sum()
    return torch.stack([total + weight * divergence, likelihood, divergence]), torch.stack(slopes)


def widened(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def chunked(
    states_2NC: Tensor,
    weight_VC: Tensor,
    target_N: Tensor,
    smoothing: float,
    method: Consistency,
    weight: float,
    slopes: Callable[..., tuple[Tensor, Tensor]] = apart,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same numbers, a chunk of tokens at a time, gradients made on the way: no logits are kept or made twice."""
    sums: tuple[Tensor, Tensor, Tensor] = _Chunked.apply(  # type: ignore[no-untyped-call]
        states_2NC, weight_VC, target_N, partial(slopes, smoothing=smoothing, method=method, weight=weight)
    )
    return sums


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states_2NC: Tensor, weight_VC: Tensor, target_N: Tensor, slopes: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = states_2NC.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states_2NC.dtype
        states, table_VC = states_2NC.to(dtype), weight_VC.to(dtype)
        grad_states, grad_weight = torch.empty_like(states_2NC), torch.zeros_like(weight_VC)
        sums_3 = widened(states_2NC.new_zeros(3))
        chunk = max(loss.CHUNK[device] // 2, 1)
        for start in range(0, len(target_N), chunk):
            part = slice(start, start + chunk)
            rows_MC = states[:, part].flatten(0, 1)
            logits_2NV = fast_linear(rows_MC, table_VC).view(2, -1, len(table_VC))
            losses, grad_2NV = slopes(logits_2NV, target_N[part])
            sums_3 += losses
            grad_MV = grad_2NV.to(dtype).flatten(0, 1)
            grad_states[:, part] = fast_linear(grad_MV, table_VC.T).view(2, -1, states.size(-1))
            grad_weight = loss.added(grad_weight, grad_MV, rows_MC)
        ctx.save_for_backward(grad_states, grad_weight)
        total, likelihood, divergence = sums_3.unbind()
        ctx.mark_non_differentiable(likelihood, divergence)
        return total, likelihood, divergence

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states.mul_(grads[0]), grad_weight.mul_(grads[0]), None, None


def compiled(way: TwoPasses) -> TwoPasses:
    """On a GPU a chunk is a dozen kernels, or two or three compiled ones."""
    return partial(chunked, slopes=torch.compile(apart)) if way is chunked else way


def check(settings: TrainSettings, model: Settings) -> None:
    """Refuse what would be of no use."""
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


TwoPasses = Callable[[Tensor, Tensor, Tensor, float, Consistency, float], tuple[Tensor, Tensor, Tensor]]
LOSSES: dict[str, TwoPasses] = {"chunked": chunked, "plain": plain}  # by the names of training/loss.py
CONSISTENCY: dict[str, Consistency | None] = {
    "none": None,
    "rdrop": Consistency(right=(0.5, 0.5), same=(0.5, 0.5), cuts=False),  # Liang 2021, whose alpha is twice the weight
    "simcut": Consistency(right=(1.0, 0.0), same=(1.0, 0.0), cuts=True),  # Gao 2022
}
