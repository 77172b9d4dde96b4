"""Attention kernels: from queries, keys and values to outputs. All kernels compute the same function.

`attend_reference` is the readable implementation that the others are tested against. To add a kernel, write a function
with the signature of `Kernel` and a line in KERNELS. Two special cases at the end have Triton kernels of their own
(attention_triton.py): one new token that attends to a KV cache, and packed rows in training.

Shapes   B batch   H heads   Q queries   K keys   D head width   N leading dimensions flattened, or rows of a search
         W rows of one sentence   S source width   C all heads   E, F projections that hold several tensors side by side
Between H and Q there may be further dimensions, such as blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.kernels.masks import AttentionMask, make_additive_mask

Kernel = Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor]
KeyValue = tuple[Tensor, Tensor]  # keys_NHKD and values_NHKD
LONG_SCORES = 1 << 20  # pairs of a query and a key from which on the full score matrix is not materialized
PACKED_HEAD_WIDTHS = (16, 32, 64, 128)  # head widths that the kernel for packed rows supports


def combine_masks(mask: AttentionMask, q_BHQD: Tensor, k_BHKD: Tensor) -> Tensor | None:
    """Return `allowed` and `causal` as one boolean mask; None if everything is allowed."""
    if not mask.causal:
        return mask.allowed
    causal_QK = torch.ones(q_BHQD.size(-2), k_BHKD.size(-2), dtype=torch.bool, device=q_BHQD.device).tril()
    return causal_QK if mask.allowed is None else mask.allowed & causal_QK


def compute_attention_weights(q_BHQD: Tensor, k_BHKD: Tensor, mask: AttentionMask) -> Tensor:
    """Return the softmax of the scaled dot products over the allowed keys: weight_BHQK."""
    score_BHQK: Tensor = q_BHQD @ k_BHKD.mT * q_BHQD.size(-1) ** -0.5
    if mask.bias is not None:
        score_BHQK = score_BHQK + mask.bias
    allowed = combine_masks(mask, q_BHQD, k_BHKD)
    if allowed is not None:
        score_BHQK = score_BHQK.masked_fill(~allowed, -torch.inf)
    return score_BHQK.softmax(-1)


def attend_reference(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, mask: AttentionMask) -> Tensor:
    """Compute scaled dot-product attention (reference implementation)."""
    return compute_attention_weights(q_BHQD, k_BHKD, mask) @ v_BHKD


def attend_fused(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, mask: AttentionMask) -> Tensor:
    """Compute attention with PyTorch's fused kernel, which never materializes the full score matrix.

    The kernel needs one width for all three tensors. Padding with zeros changes neither scores nor values.
    """
    key_width, value_width = q_BHQD.size(-1), v_BHKD.size(-1)
    if key_width != value_width:
        width = max(key_width, value_width)
        q_BHQD = q_BHQD * (width / key_width) ** 0.5  # the kernel will divide by the root of the new width
        q_BHQD, k_BHKD, v_BHKD = (F.pad(x, (0, width - x.size(-1))) for x in (q_BHQD, k_BHKD, v_BHKD))
        return attend_fused(q_BHQD, k_BHKD, v_BHKD, mask)[..., :value_width]
    if mask.allowed is None and mask.bias is None:
        return F.scaled_dot_product_attention(q_BHQD, k_BHKD, v_BHKD, is_causal=mask.causal)
    allowed = combine_masks(mask, q_BHQD, k_BHKD)
    if mask.bias is not None:
        bias = mask.bias.to(q_BHQD.dtype)
        allowed = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
    if q_BHQD.dim() == 4 or allowed is None:
        return F.scaled_dot_product_attention(q_BHQD, k_BHKD, v_BHKD, attn_mask=allowed)
    # PyTorch's kernel needs four dimensions: those between H and Q join the batch
    allowed = allowed.expand(len(q_BHQD), *allowed.shape[1:])
    q_NHQD, k_NHKD, v_NHKD, allowed_NHQK = (x.movedim(1, -3).flatten(0, -4) for x in (q_BHQD, k_BHKD, v_BHKD, allowed))
    out_NHQD = F.scaled_dot_product_attention(q_NHQD, k_NHKD, v_NHKD, attn_mask=allowed_NHQK)
    return out_NHQD.view(len(q_BHQD), *q_BHQD.shape[2:-2], *out_NHQD.shape[1:]).movedim(-3, 1)


def attend_batched(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, mask: AttentionMask) -> Tensor:
    """Compute attention with batched matrix products in the autocast precision and a hand-written backward pass.

    On a CPU this beats PyTorch's fused kernel, which takes three times as long in bf16.
    """
    if torch.is_autocast_enabled(q_BHQD.device.type) and q_BHQD.dtype == torch.float32:
        q_BHQD = q_BHQD.to(torch.get_autocast_dtype(q_BHQD.device.type))  # if no projection has cast it yet
    q_NQD, k_NKD, v_NKD = (x.reshape(-1, *x.shape[-2:]).to(q_BHQD.dtype) for x in (q_BHQD, k_BHKD, v_BHKD))
    shape = (*q_BHQD.shape[:-1], k_BHKD.size(-2))
    allowed = combine_masks(mask, q_BHQD, k_BHKD)  # adding the mask as a bias is faster than filling
    bias = None if allowed is None else make_additive_mask(allowed, q_BHQD.dtype)
    if mask.bias is not None:
        bias = mask.bias.to(q_BHQD.dtype) if bias is None else mask.bias.to(q_BHQD.dtype) + bias
    if torch.is_grad_enabled():
        out_NQD: Tensor = _BatchedAttention.apply(q_NQD, k_NKD, v_NKD, bias, shape)  # type: ignore[no-untyped-call]
    else:
        out_NQD = torch.bmm(_compute_batched_weights(q_NQD, k_NKD, bias, shape), v_NKD)
    return out_NQD.view(*q_BHQD.shape[:-1], -1)


def _compute_batched_weights(q_NQD: Tensor, k_NKD: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Return the attention weights of N matrices. The bias is added to the scores viewed in this shape."""
    score_NQK = torch.bmm(q_NQD, k_NKD.mT).mul_(q_NQD.size(-1) ** -0.5)
    if bias is not None:
        score_NQK.view(shape).add_(bias)
    return score_NQK.softmax(-1, dtype=score_NQK.dtype)  # autocast on a GPU would widen it


class _BatchedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_NQD: Tensor, k_NKD: Tensor, v_NKD: Tensor, bias: Tensor | None, shape: tuple[int, ...]
    ) -> Tensor:
        weight_NQK = _compute_batched_weights(q_NQD, k_NKD, bias, shape)
        ctx.save_for_backward(q_NQD, k_NKD, v_NKD, weight_NQK)
        ctx.shape, ctx.bias = shape, None if bias is None else bias.shape
        return torch.bmm(weight_NQK, v_NKD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_NQD, k_NKD, v_NKD, weight_NQK = ctx.saved_tensors
        grad_NQD = grads[0].contiguous()
        score_grad_NQK = torch._softmax_backward_data(torch.bmm(grad_NQD, v_NKD.mT), weight_NQK, -1, weight_NQK.dtype)
        bias_grad = score_grad_NQK.view(ctx.shape).sum_to_size(ctx.bias).clone() if ctx.needs_input_grad[3] else None
        score_grad_NQK.mul_(q_NQD.size(-1) ** -0.5)  # in place, which is why the bias has a copy
        key_grad_NKD, value_grad_NKD = torch.bmm(score_grad_NQK.mT, q_NQD), torch.bmm(weight_NQK.mT, grad_NQD)
        return torch.bmm(score_grad_NQK, k_NKD), key_grad_NKD, value_grad_NKD, bias_grad, None


def attend_auto(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, mask: AttentionMask) -> Tensor:
    """Use the fastest kernel of the device; for long sequences, one whose memory grows linearly."""
    short = q_BHQD.size(-2) * k_BHKD.size(-2) < LONG_SCORES
    attend = attend_batched if short and q_BHQD.device.type == "cpu" else attend_fused
    return attend(q_BHQD, k_BHKD, v_BHKD, mask)


KERNELS: dict[str, Kernel] = {
    "auto": attend_auto,
    "reference": attend_reference,
    "fused": attend_fused,
    "batched": attend_batched,
}


def attend_to_cache(
    q_NHD: Tensor, new: KeyValue, cache: KeyValue, position_N: Tensor, beam_indices_NK: Tensor
) -> Tensor:
    """Write one new key and value per row into the cache and attend to the past of each row: out_NHD.

    `beam_indices_NK[n, k]` is the cache row that holds position k of hypothesis n. When beams are reordered, only this
    table changes and the cache stays as it is. At `position_N`, that of the new token, it must be the row itself.
    """
    if supports_cached_kernel(q_NHD, new[1]):
        from dragoman.kernels.attention_triton import attend_cached

        return attend_cached(q_NHD, cache, position_N, beam_indices_NK=beam_indices_NK, new=new)
    row_N = torch.arange(len(q_NHD), device=q_NHD.device)
    position_K = torch.arange(beam_indices_NK.size(1), device=q_NHD.device)
    for cached_NHKD, new_NHD in zip(cache, new, strict=True):
        cached_NHKD[row_N, :, position_N] = new_NHD
    k_NHKD, v_NHKD = (cached_NHKD[beam_indices_NK.long(), :, position_K].transpose(1, 2) for cached_NHKD in cache)
    allowed_N11K = (position_K <= position_N[:, None])[:, None, None]
    out_NH1D: Tensor = compute_attention_weights(q_NHD[:, :, None], k_NHKD, AttentionMask(allowed_N11K)) @ v_NHKD
    return out_NH1D[:, :, 0]


def attend_to_source(q_NHD: Tensor, memory: KeyValue, length_B: Tensor) -> Tensor:
    """Attend to the first `length_B` positions of the own source: out_NHD. Each sentence has N / B rows."""
    if supports_cached_kernel(q_NHD, memory[1]):
        from dragoman.kernels.attention_triton import attend_cached

        return attend_cached(q_NHD, memory, length_B)
    k_BHSD, v_BHSD = memory
    q_BHWD = q_NHD.view(len(length_B), -1, *q_NHD.shape[1:]).transpose(1, 2)
    allowed_B11S = (torch.arange(k_BHSD.size(2), device=length_B.device) < length_B[:, None])[:, None, None]
    out_BHWD = compute_attention_weights(q_BHWD, k_BHSD, AttentionMask(allowed_B11S)) @ v_BHSD
    return out_BHWD.transpose(1, 2).flatten(0, 1)


def supports_cached_kernel(q_NHD: Tensor, v_NHD: Tensor) -> bool:
    """Return whether the Triton kernel can be used: head widths must be powers of two."""
    widths = (q_NHD.size(-1), v_NHD.size(-1))
    return q_NHD.is_cuda and all(width >= 16 and width & (width - 1) == 0 for width in widths)


def supports_packed_kernel(query_BQE: Tensor, mask: AttentionMask, head_width: int) -> bool:
    """Return whether `attend_packed` applies: half precision, and a mask that follows from the segments alone."""
    half = query_BQE.is_cuda and query_BQE.dtype in (torch.bfloat16, torch.float16)
    return half and mask.segments is not None and mask.bias is None and head_width in PACKED_HEAD_WIDTHS


def attend_packed(query_BQE: Tensor, key_value_BKF: Tensor | None, mask: AttentionMask, heads: int) -> Tensor:
    """Attend within packed rows, straight from the projections: out_BQC.

    The kernel reads queries, keys and values where the projections left them, writes gradients in the same layout and
    builds no mask. Without `key_value_BKF`, keys and values follow the queries in `query_BQE`.
    """
    from dragoman.kernels.attention_triton import attend_rows

    assert mask.segments is not None
    query_BQ, key_BK, causal = mask.segments
    out_BQC: Tensor = attend_rows(query_BQE, key_value_BKF, query_BQ, key_BK, heads, causal)[0]
    return out_BQC
