"""Attention kernels: from queries, keys and values to outputs. All kernels give the same numbers.

`attend_reference` is the readable implementation that the others are tested against. To add a kernel, write a function
with the signature of `Kernel` and a line in KERNELS. At the end stand two special cases with kernels of their own on a
GPU: attention of one new token to a KV cache, and attention within packed rows.

Shapes   B batch   H heads   Q queries   K keys   D head width   N all leading dimensions in one, or rows of a search
         S source width   C all heads   E, F widths of projections that hold several of them side by side
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
LONG_SCORES = 1 << 20  # pairs of a query and a key from which on the whole score matrix is not held


def combine_masks(look: AttentionMask, q_BHQD: Tensor, k_BHKD: Tensor) -> Tensor | None:
    """`keep` and `causal` as one mask; None where everyone may look everywhere."""
    if not look.causal:
        return look.keep
    order_QK = torch.ones(q_BHQD.size(-2), k_BHKD.size(-2), dtype=torch.bool, device=q_BHQD.device).tril()
    return order_QK if look.keep is None else look.keep & order_QK


def compute_attention_weights(q_BHQD: Tensor, k_BHKD: Tensor, look: AttentionMask) -> Tensor:
    """How much each query looks at each key: scaled dot products, softmax over what it may look at."""
    score_BHQK: Tensor = q_BHQD @ k_BHKD.mT * q_BHQD.size(-1) ** -0.5
    if look.bias is not None:
        score_BHQK = score_BHQK + look.bias
    keep = combine_masks(look, q_BHQD, k_BHKD)
    if keep is not None:
        score_BHQK = score_BHQK.masked_fill(~keep, -torch.inf)
    return score_BHQK.softmax(-1)


def attend_reference(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, look: AttentionMask) -> Tensor:
    """Scaled dot-product attention, written to be read."""
    return compute_attention_weights(q_BHQD, k_BHKD, look) @ v_BHKD


def attend_fused(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, look: AttentionMask) -> Tensor:
    """The same numbers from PyTorch's fused kernel, which never holds the whole score matrix.

    It wants one width for all three; columns of zeros change neither scores nor values.
    """
    key_width, value_width = q_BHQD.size(-1), v_BHKD.size(-1)
    if key_width != value_width:
        width = max(key_width, value_width)
        q_BHQD = q_BHQD * (width / key_width) ** 0.5  # the kernel will divide by the root of the new width
        q_BHQD, k_BHKD, v_BHKD = (F.pad(x, (0, width - x.size(-1))) for x in (q_BHQD, k_BHKD, v_BHKD))
        return attend_fused(q_BHQD, k_BHKD, v_BHKD, look)[..., :value_width]
    if look.keep is None and look.bias is None:
        return F.scaled_dot_product_attention(q_BHQD, k_BHKD, v_BHKD, is_causal=look.causal)
    keep = combine_masks(look, q_BHQD, k_BHKD)
    if look.bias is not None:
        bias = look.bias.to(q_BHQD.dtype)
        keep = bias if keep is None else bias.masked_fill(~keep, -torch.inf)
    if q_BHQD.dim() == 4 or keep is None:
        return F.scaled_dot_product_attention(q_BHQD, k_BHKD, v_BHKD, attn_mask=keep)
    keep = keep.expand(len(q_BHQD), *keep.shape[1:])
    q_NHQD, k_NHKD, v_NHKD, keep_NHQK = (x.movedim(1, -3).flatten(0, -4) for x in (q_BHQD, k_BHKD, v_BHKD, keep))
    out_NHQD = F.scaled_dot_product_attention(q_NHQD, k_NHKD, v_NHKD, attn_mask=keep_NHQK)
    return out_NHQD.view(len(q_BHQD), *q_BHQD.shape[2:-2], *out_NHQD.shape[1:]).movedim(-3, 1)


def attend_batched(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, look: AttentionMask) -> Tensor:
    """The same numbers from plain batched products in the working precision, with a backward pass of our own.

    On a CPU this beats PyTorch's fused kernel, which in bf16 takes three times as long.
    """
    if torch.is_autocast_enabled(q_BHQD.device.type) and q_BHQD.dtype == torch.float32:
        q_BHQD = q_BHQD.to(torch.get_autocast_dtype(q_BHQD.device.type))  # what no product has made is still wide
    q_NQD, k_NKD, v_NKD = (x.reshape(-1, *x.shape[-2:]).to(q_BHQD.dtype) for x in (q_BHQD, k_BHKD, v_BHKD))
    shape = (*q_BHQD.shape[:-1], k_BHKD.size(-2))
    added = make_score_bias(look, q_BHQD, k_BHKD)
    if torch.is_grad_enabled():
        out_NQD: Tensor = _Batched.apply(q_NQD, k_NKD, v_NKD, added, shape)  # type: ignore[no-untyped-call]
    else:
        out_NQD = torch.bmm(compute_batched_weights(q_NQD, k_NKD, added, shape), v_NKD)
    return out_NQD.view(*q_BHQD.shape[:-1], -1)


def compute_batched_weights(q_NQD: Tensor, k_NKD: Tensor, added: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """The weights of N matrices, whose scores have this shape when something is added to them."""
    score_NQK = torch.bmm(q_NQD, k_NKD.mT).mul_(q_NQD.size(-1) ** -0.5)
    if added is not None:
        score_NQK.view(shape).add_(added)
    return score_NQK.softmax(-1, dtype=score_NQK.dtype)  # autocast on a GPU would widen it


class _Batched(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_NQD: Tensor, k_NKD: Tensor, v_NKD: Tensor, added: Tensor | None, shape: tuple[int, ...]
    ) -> Tensor:
        weight_NQK = compute_batched_weights(q_NQD, k_NKD, added, shape)
        ctx.save_for_backward(q_NQD, k_NKD, v_NKD, weight_NQK)
        ctx.shape, ctx.added = shape, None if added is None else added.shape
        return torch.bmm(weight_NQK, v_NKD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_NQD, k_NKD, v_NKD, weight_NQK = ctx.saved_tensors
        grad_NQD = grads[0].contiguous()
        slope_NQK = torch._softmax_backward_data(torch.bmm(grad_NQD, v_NKD.mT), weight_NQK, -1, weight_NQK.dtype)
        added_grad = slope_NQK.view(ctx.shape).sum_to_size(ctx.added).clone() if ctx.needs_input_grad[3] else None
        slope_NQK.mul_(q_NQD.size(-1) ** -0.5)  # in place, so what was added has a copy of its own
        key_grad_NKD, value_grad_NKD = torch.bmm(slope_NQK.mT, q_NQD), torch.bmm(weight_NQK.mT, grad_NQD)
        return torch.bmm(slope_NQK, k_NKD), key_grad_NKD, value_grad_NKD, added_grad, None


def make_score_bias(look: AttentionMask, q_BHQD: Tensor, k_BHKD: Tensor) -> Tensor | None:
    """What is added to scores: the bias, and the lowest number where one may not look. Adding beats filling."""
    keep, dtype = combine_masks(look, q_BHQD, k_BHKD), q_BHQD.dtype
    lowest = None if keep is None else make_additive_mask(keep, dtype)
    if look.bias is None:
        return lowest
    return look.bias.to(dtype) if lowest is None else look.bias.to(dtype) + lowest


def attend_auto(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, look: AttentionMask) -> Tensor:
    """The fastest for the device that the tensors are on; what is long goes where memory grows in a line.

    At training, short rows on a GPU need not even come here (kernels/attention.py).
    """
    short = q_BHQD.size(-2) * k_BHKD.size(-2) < LONG_SCORES
    return (attend_batched if short and q_BHQD.device.type == "cpu" else attend_fused)(q_BHQD, k_BHKD, v_BHKD, look)


KERNELS: dict[str, Kernel] = {
    "auto": attend_auto,
    "reference": attend_reference,
    "fused": attend_fused,
    "batched": attend_batched,
}

KeyValue = tuple[Tensor, Tensor]  # keys_NHKD and values_NHKD


def attend_to_cache(q_NHD: Tensor, new: KeyValue, cache: KeyValue, place_N: Tensor, who_NK: Tensor) -> Tensor:
    """What each row reads of its past, out_NHD. `who_NK` is the row that holds what was said at each place; at the
    place of the new token, `place_N`, that is the row itself."""
    if supports_cached_kernel(q_NHD, new[1]):
        from dragoman.kernels.kv_lookup_triton import attend_cached

        return attend_cached(q_NHD, cache, place_N, who_NK=who_NK, new=new)
    row_N, place_K = torch.arange(len(q_NHD), device=q_NHD.device), torch.arange(who_NK.size(1), device=q_NHD.device)
    for held_NHKD, new_NHD in zip(cache, new, strict=True):
        held_NHKD[row_N, :, place_N] = new_NHD
    k_NHKD, v_NHKD = (held_NHKD[who_NK.long(), :, place_K].transpose(1, 2) for held_NHKD in cache)
    keep_N11K = (place_K <= place_N[:, None])[:, None, None]
    out_NH1D: Tensor = compute_attention_weights(q_NHD[:, :, None], k_NHKD, AttentionMask(keep_N11K)) @ v_NHKD
    return out_NH1D[:, :, 0]


def attend_to_source(q_NHD: Tensor, memory: KeyValue, stop_B: Tensor) -> Tensor:
    """What each row reads of its sentence's source, whose first `stop_B` places count; N / B rows to a sentence."""
    if supports_cached_kernel(q_NHD, memory[1]):
        from dragoman.kernels.kv_lookup_triton import attend_cached

        return attend_cached(q_NHD, memory, stop_B)
    k_BHSD, v_BHSD = memory
    q_BHWD = q_NHD.view(len(stop_B), -1, *q_NHD.shape[1:]).transpose(1, 2)
    keep_B11S = (torch.arange(k_BHSD.size(2), device=stop_B.device) < stop_B[:, None])[:, None, None]
    out_BHWD = compute_attention_weights(q_BHWD, k_BHSD, AttentionMask(keep_B11S)) @ v_BHSD
    return out_BHWD.transpose(1, 2).flatten(0, 1)


def supports_cached_kernel(q_NHD: Tensor, v_NHD: Tensor) -> bool:
    """The kernel wants widths that are powers of two."""
    widths = (q_NHD.size(-1), v_NHD.size(-1))
    return q_NHD.is_cuda and all(width >= 16 and width & (width - 1) == 0 for width in widths)


PACKED_HEAD_WIDTHS = (16, 32, 64, 128)  # widths that it can multiply


def supports_packed_kernel(query_BQE: Tensor, look: AttentionMask, head_width: int) -> bool:
    """Half precision, and nothing to be known of two tokens but whether they are of one sentence."""
    half = query_BQE.is_cuda and query_BQE.dtype in (torch.bfloat16, torch.float16)
    plain = look.segments is not None and look.bias is None
    return half and plain and head_width in PACKED_HEAD_WIDTHS


def attend_packed(query_BQE: Tensor, key_value_BKF: Tensor | None, look: AttentionMask, heads: int) -> Tensor:
    """What each query reads: out_BQC. Without `key_value_BKF` keys and values lie behind the queries in one product."""
    from dragoman.kernels.attention_triton import attend_rows

    assert look.segments is not None
    query_BQ, key_BK, causal = look.segments
    out_BQC: Tensor = attend_rows(query_BQE, key_value_BKF, query_BQ, key_BK, heads, causal)[0]
    return out_BQC
