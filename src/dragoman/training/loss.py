"""Training losses as sums over tokens, each in a plain (reference) and a chunked (fast) implementation.

The loss is the cross-entropy with label smoothing. R-Drop and SimCut run every batch through the model twice, with
different dropout masks, and add the divergence of the two predictions. Both implementations have one signature: they
take the states of all passes before the output projection, so that the chunked one never holds all logits at once,
and return the sums of loss, nll (negative log-likelihood of the first pass) and divergence.

A token whose target is below 0, such as padding, is ignored. All sums are over the tokens that are not ignored.

Shapes   B rows   T tokens of a row   P passes, 1 or 2   N tokens of a pass   M = P * N   C model width   V vocabulary
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
from dragoman.kernels.attention import make_segment_mask
from dragoman.models.base import Model
from dragoman.modules.dropout import sample_dropout_mask
from dragoman.modules.feedforward import compute_weight_gradient, fast_linear
from dragoman.types import BOS, EOS, SPECIALS, UNK, Batch

CHUNK = {"cpu": 512, "cuda": 8192}  # tokens whose logits are computed at a time; on a CPU, these fit into the cache
IGNORED_TARGET = -1  # stands for all targets below 0
Sums = tuple[Tensor, Tensor, Tensor]  # of loss, nll and divergence


class LossTerms(NamedTuple):
    """The terms of a loss, for passes with the predictions p and q. Gradients of a divergence flow into both passes."""

    cross_entropy_weights: tuple[float, ...] = (1.0,)  # weight of the cross-entropy of each pass
    kl_weights: tuple[float, ...] = ()  # of KL(p || q) and KL(q || p), whose weighted sum is the divergence
    hides_tokens: bool = False  # whether a fraction train.cut of all tokens is hidden from the second pass
    smoothing: float = 0.0
    consistency_weight: float = 0.0  # of the divergence

    @property
    def passes(self) -> int:
        return len(self.cross_entropy_weights)


CONSISTENCY: dict[str, LossTerms] = {
    "none": LossTerms(),
    "rdrop": LossTerms((0.5, 0.5), (0.5, 0.5)),  # Liang 2021, whose alpha is twice train.consistency_weight
    "simcut": LossTerms((1.0, 0.0), (1.0, 0.0), hides_tokens=True),  # Gao 2022
}
GradFunction = Callable[..., tuple[Tensor, Tensor]]  # logits_PNV, target_N, terms -> sums, grad_PNV


def compute_plain_loss(states_PNC: Tensor, weight_VC: Tensor, target_N: Tensor, terms: LossTerms) -> Sums:
    """Return the sums of loss, nll and divergence (reference implementation)."""
    return sum_losses(F.linear(states_PNC, weight_VC), target_N, terms)


def sum_losses(logits_PNV: Tensor, target_N: Tensor, terms: LossTerms) -> Sums:
    """Return the sums of loss, nll and divergence, given all logits."""
    logits_PNV, is_used_N1 = to_float32(logits_PNV), (target_N >= 0)[:, None]
    target_N = target_N.clamp(min=IGNORED_TARGET)
    cross_entropy = partial(F.cross_entropy, target=target_N, reduction="sum", ignore_index=IGNORED_TARGET)
    loss = divergence = logits_PNV.new_zeros(())
    for weight, logits_NV in zip(terms.cross_entropy_weights, logits_PNV, strict=True):
        loss = loss + weight * cross_entropy(logits_NV, label_smoothing=terms.smoothing)
    if terms.passes == 2:
        logp_NV, logq_NV = logits_PNV.log_softmax(-1)
        directions = (logp_NV, logq_NV), (logq_NV, logp_NV)
        for weight, (log_this_NV, log_other_NV) in zip(terms.kl_weights, directions, strict=True):
            divergence = divergence + weight * (log_this_NV.exp() * (log_this_NV - log_other_NV) * is_used_N1).sum()
    return loss + terms.consistency_weight * divergence, cross_entropy(logits_PNV[0]).detach(), divergence.detach()


def compute_cross_entropy_gradient(logits_1NV: Tensor, target_N: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Return the sums of loss and nll, and the gradient of the loss with respect to every logit.

    On a GPU the gradient overwrites the logits. The gradient at ignored tokens is arbitrary.
    """
    logits_NV, smoothing = logits_1NV[0], terms.smoothing
    if logits_NV.is_cuda and logits_NV.dtype != torch.float64:
        from dragoman.kernels.rowwise_triton import cross_entropy_in_place

        return cross_entropy_in_place(logits_NV, target_N, smoothing), logits_1NV
    N, V = logits_NV.shape
    logits_NV, is_used_N, target_N1 = to_float32(logits_NV), target_N >= 0, target_N.clamp(min=0)[:, None]
    p_NV = logits_NV.softmax(-1)
    # The log-sum-exp from the softmax, without a second exp: the largest probability is exp(largest logit - lse).
    lse_N = logits_NV.amax(-1) - p_NV.amax(-1).log()
    nll = ((lse_N - logits_NV.gather(1, target_N1)[:, 0]) * is_used_N).sum()
    # The cross-entropy of a uniform target distribution, for label smoothing.
    uniform = ((lse_N - logits_NV.sum(-1) / V) * is_used_N).sum() if smoothing else 0.0
    grad_NV = p_NV.sub_(smoothing / V) if smoothing else p_NV
    grad_NV.scatter_add_(1, target_N1, grad_NV.new_full((N, 1), smoothing - 1))
    return torch.stack([(1 - smoothing) * nll + smoothing * uniform, nll]), grad_NV[None].to(logits_1NV.dtype)


def compute_consistency_gradient(logits_2NV: Tensor, target_N: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Return the sums of loss, nll and divergence, and the gradient of the loss with respect to every logit.

    The gradient of KL(p || q) is p (log p - log q - KL) at the logits of p, and q - p at those of q.
    """
    V, is_used_N1, target_N1 = logits_2NV.size(-1), (target_N >= 0)[:, None], target_N.clamp(min=0)[:, None]
    logp_2NV = to_float32(logits_2NV).log_softmax(-1)
    p_2NV = logp_2NV.exp()
    smoothing, consistency_weight = terms.smoothing, terms.consistency_weight
    loss, divergence, gradients = logp_2NV.new_zeros(()), logp_2NV.new_zeros(()), []
    for this, other in ((0, 1), (1, 0)):
        weight = terms.cross_entropy_weights[this]
        kl_weight = consistency_weight * terms.kl_weights[this]  # of KL(this || other)
        reverse_weight = consistency_weight * terms.kl_weights[other]  # of KL(other || this)
        p_NV, logp_NV = p_2NV[this], logp_2NV[this]
        grad_NV = (weight + reverse_weight) * p_NV - reverse_weight * p_2NV[other]
        if weight:
            nll_N1, uniform_N1 = -logp_NV.gather(1, target_N1), -logp_NV.mean(-1, keepdim=True)
            loss = loss + weight * (((1 - smoothing) * nll_N1 + smoothing * uniform_N1) * is_used_N1).sum()
            grad_NV = grad_NV - weight * smoothing / V
            grad_NV = grad_NV.scatter_add(1, target_N1, torch.full_like(nll_N1, weight * (smoothing - 1)))
        if kl_weight:
            log_ratio_NV = logp_NV - logp_2NV[other]
            kl_N1 = (p_NV * log_ratio_NV).sum(-1, keepdim=True)
            divergence = divergence + terms.kl_weights[this] * (kl_N1 * is_used_N1).sum()
            grad_NV = grad_NV + kl_weight * p_NV * (log_ratio_NV - kl_N1)
        gradients.append(grad_NV * is_used_N1)
    nll = -(logp_2NV[0].gather(1, target_N1) * is_used_N1).sum()
    return torch.stack([loss + consistency_weight * divergence, nll, divergence]), torch.stack(gradients)


def compute_chunked_loss(
    states_PNC: Tensor, weight_VC: Tensor, target_N: Tensor, terms: LossTerms, compute_grad: GradFunction | None = None
) -> Sums:
    """Return the sums of loss, nll and divergence, computed chunk by chunk. Only the loss is differentiable.

    Gradients are computed in the forward pass, so logits are neither kept nor computed twice. The function that
    computes them can be replaced by `compute_grad`, for example a compiled one.
    """
    default = compute_cross_entropy_gradient if terms.passes == 1 else compute_consistency_gradient
    compute_grad = partial(compute_grad or default, terms=terms)
    needs_grad = torch.is_grad_enabled() and (states_PNC.requires_grad or weight_VC.requires_grad)
    sums: Sums = _ChunkedLoss.apply(states_PNC, weight_VC, target_N, compute_grad, needs_grad)  # type: ignore[no-untyped-call]
    return sums


class _ChunkedLoss(torch.autograd.Function):
    """The sums and gradients of all chunks; the function `compute_grad` computes those of one chunk."""

    @staticmethod
    def forward(
        ctx: Any, states_PNC: Tensor, weight_VC: Tensor, target_N: Tensor, compute_grad: GradFunction, needs_grad: bool
    ) -> Sums:
        device, (P, _, C) = states_PNC.device.type, states_PNC.shape
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states_PNC.dtype
        states, weight = states_PNC.to(dtype), weight_VC.to(dtype)
        if needs_grad:
            grad_states, grad_weight = torch.empty_like(states_PNC), torch.zeros_like(weight_VC)
        sums_3 = to_float32(states_PNC.new_zeros(3))
        chunk = max(CHUNK[device] // P, 1)
        for start in range(0, len(target_N), chunk):
            part = slice(start, start + chunk)
            states_MC = states[:, part].flatten(0, 1)
            logits_PNV = fast_linear(states_MC, weight).view(P, -1, len(weight))
            sums, grad_PNV = compute_grad(logits_PNV, target_N[part])
            sums_3[: len(sums)] += sums  # one pass has no divergence
            if needs_grad:
                is_used_N1, grad_MV = (target_N[part, None] >= 0).to(dtype), grad_PNV.to(dtype).flatten(0, 1)
                grad_states[:, part] = fast_linear(grad_MV, weight.T).view(P, -1, C) * is_used_N1
                grad_weight = add_weight_gradient(grad_weight, grad_MV, states_MC * is_used_N1.repeat(P, 1))
        if needs_grad:
            ctx.save_for_backward(grad_states, grad_weight)
        loss, nll, divergence = sums_3.unbind()
        ctx.mark_non_differentiable(nll, divergence)
        return loss, nll, divergence

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states.mul_(grad_loss), grad_weight.mul_(grad_loss), None, None, None


def add_weight_gradient(sum_VC: Tensor, grad_MV: Tensor, states_MC: Tensor) -> Tensor:
    """Add the weight gradient of a chunk to the sum. On a GPU, half-precision products are accumulated in float32."""
    if grad_MV.is_cuda and grad_MV.dtype != sum_VC.dtype:
        return torch.addmm(sum_VC, grad_MV.T, states_MC, out_dtype=sum_VC.dtype)
    return sum_VC.add_(compute_weight_gradient(grad_MV, states_MC))


def to_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


Loss = Callable[[Tensor, Tensor, Tensor, LossTerms], Sums]
LOSSES: dict[str, Loss] = {"chunked": compute_chunked_loss, "plain": compute_plain_loss}


def compute_model_loss(model: Model, states_PNC: Tensor, target_N: Tensor, terms: LossTerms, loss: Loss) -> Sums:
    """Return the sums of loss, nll and divergence of the states that a model returned.

    `loss` is for models whose logits are a matrix product. A copying model mixes two distributions (modules/copying.py)
    and has one implementation, which holds all logits at once.
    """
    if model.copy_gate:
        return sum_losses(model.compute_logits(states_PNC), target_N, terms)
    weight_VC, bias_V = model.project.weight, model.project.bias
    if bias_V is not None:  # the weights of a state that is always 1
        states_PNC = torch.cat([states_PNC, torch.ones_like(states_PNC[..., :1])], -1)
        weight_VC = torch.cat([weight_VC, bias_V[:, None]], 1)
    return loss(states_PNC, weight_VC, target_N, terms)


def compile_consistency_loss(loss: Loss) -> Loss:
    """Compile the gradient of a loss of two passes: a chunk on a GPU then takes two or three kernels, not a dozen."""
    compiled = partial(compute_chunked_loss, compute_grad=torch.compile(compute_consistency_gradient))
    return compiled if loss is compute_chunked_loss else loss


def repeat_rows(batch: Batch, terms: LossTerms, hidden_fraction: float) -> Batch:
    """Return the batch with its rows once for each pass: first all rows of the first pass, then those of the second.

    If the loss hides tokens, this fraction of the tokens is hidden from the second pass.
    """
    if terms.passes == 1:
        return batch
    repeated = batch.map_tensors(lambda tensor: torch.cat([tensor, tensor]))
    if not terms.hides_tokens:
        return repeated
    return replace(
        repeated,
        source_visible_BS=sample_visibility_mask(repeated.source_BS, hidden_fraction),
        target_visible_BT=sample_visibility_mask(repeated.target_in_BT, hidden_fraction),
    )


def mask_copied_words(batch: Batch, size: int, rate: float) -> Batch:
    """Replace each word that occurs in both source and target of a pair by <unk>, on both sides, at this rate.

    All occurrences of a word in a row are replaced or none. Thus a copying model learns to copy words that it does not
    know. `size` is the size of the vocabulary.
    """
    source_BS, target_BT = batch.source_BS, batch.target_out_BT
    same_BTS = make_segment_mask(batch.target_segment_BT, batch.source_segment_BS)
    same_BTS = same_BTS & (target_BT[:, :, None] == source_BS[:, None]) & (source_BS >= len(SPECIALS))[:, None]
    like = torch.ones((), device=source_BS.device)
    masked_BV = sample_dropout_mask((len(source_BS), size), rate, like) == 0
    masked_BS = same_BTS.any(1) & masked_BV.gather(1, source_BS)
    masked_BT = same_BTS.any(2) & masked_BV.gather(1, target_BT)
    # The decoder reads each target token in the next step.
    masked_in_BT = masked_BT.roll(1, 1) & (batch.target_in_BT != BOS)
    return replace(
        batch,
        source_BS=source_BS.masked_fill(masked_BS, UNK),
        target_in_BT=batch.target_in_BT.masked_fill(masked_in_BT, UNK),
        target_out_BT=target_BT.masked_fill(masked_BT, UNK),
    )


def sample_visibility_mask(ids_BT: Tensor, hidden_fraction: float) -> Tensor:
    """Return a mask that is False for hidden tokens: this fraction of the tokens in the rows of the second pass.

    BOS and EOS are never hidden.
    """
    like = torch.ones((), device=ids_BT.device)
    visible_BT = sample_dropout_mask(tuple(ids_BT.shape), hidden_fraction, like) > 0
    visible_BT = visible_BT | (ids_BT == BOS) | (ids_BT == EOS)
    visible_BT[: len(ids_BT) // 2] = True  # the first pass
    return visible_BT


def check_consistency(settings: TrainSettings, model: Settings) -> None:
    """Refuse settings of consistency losses that would have no effect."""
    terms, fields = CONSISTENCY[settings.consistency], type(settings).model_fields
    if terms.passes == 1 and settings.consistency_weight != fields["consistency_weight"].default:
        raise UserError("train.consistency_weight has no effect without train.consistency; set that to rdrop or simcut")
    if not terms.hides_tokens and settings.cut != fields["cut"].default:
        raise UserError(f"train.cut has no effect with train.consistency={settings.consistency}, only with simcut")
    rates = [getattr(model, name) for name in type(model).model_fields if name.endswith("dropout")]
    if terms.passes == 2 and not (any(rates) or (terms.hides_tokens and settings.cut)):
        raise UserError(
            f"train.consistency={settings.consistency} compares two passes, which are equal without dropout; "
            "set model.dropout"
        )
