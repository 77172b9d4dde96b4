"""Attention masks, and attention kernels that compute outputs from queries, keys, values and a mask.

All kernels in KERNELS compute the same function; `attend_reference` is the readable implementation with which the
others are compared in tests. To add a kernel, write a function with the signature of `Kernel` and add it to KERNELS.
Two special cases have Triton kernels (attention_triton.py): one new token that attends to a KV cache, and packed rows
in training. Masks are boolean, True = attend. They are built from segment and position ids, and combined with `&`.

Shapes   B rows of a batch, or sentences   H heads   T tokens   S source tokens   Q queries   K keys   D head width
         N hypotheses in a beam search; in `attend_fused` and `attend_batched`, all leading dimensions flattened
         W hypotheses per sentence   C heads x head width   E width of a fused QKV or Q projection
         F width of a fused KV projection
There may be further dimensions between H and Q, such as blocks of tokens. Masks broadcast over heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.types import Batch


@dataclass(frozen=True)
class RowLayout:
    """Where the sentences of a batch are: the segment id and the position of every token.

    The segment id is the number of the sentence in its row, from 1; 0 is padding. The position counts from 0 in each
    sentence. `is_unpacked` means that every row has one sentence, followed by padding; masks are then simpler.
    """

    segment_BT: Tensor
    position_BT: Tensor
    is_unpacked: bool = False
    features: Mapping[str, Tensor] = field(default_factory=dict)  # of source tokens, by name, such as "tree_depth"
    visible_BT: Tensor | None = None  # where False, the embedding is zeroed, but not the position; None: all True

    @classmethod
    def from_source(cls, batch: Batch) -> RowLayout:
        segment_BS, position_BS = batch.source_segment_BS, batch.source_position_BS
        return cls(segment_BS, position_BS, batch.is_unpacked, batch.features, batch.source_visible_BS)

    @classmethod
    def from_target(cls, batch: Batch) -> RowLayout:
        return cls(
            batch.target_segment_BT, batch.target_position_BT, batch.is_unpacked, visible_BT=batch.target_visible_BT
        )

    @classmethod
    def from_padding_mask(cls, real_BT: Tensor, features: Mapping[str, Tensor] | None = None) -> RowLayout:
        """Return the layout of one sentence per row. `real_BT` is False at padding, whose position is 0."""
        position_BT = torch.arange(real_BT.size(1), device=real_BT.device) * real_BT
        return cls(real_BT.long(), position_BT, True, features or {})

    @property
    def real_BT(self) -> Tensor:
        """Return a mask that is True at tokens and False at padding."""
        return self.segment_BT > 0

    @property
    def shared_position_BT(self) -> Tensor:
        """Return the positions, in the shape (1, T) if the rows are unpacked, since all rows then have the same."""
        if not self.is_unpacked:
            return self.position_BT
        return torch.arange(self.position_BT.size(1), device=self.position_BT.device)[None]


class SegmentIds(NamedTuple):
    """The segment ids of queries and keys, from which the kernel for packed rows derives the mask."""

    query_BQ: Tensor
    key_BK: Tensor
    causal: bool


@dataclass(frozen=True)
class AttentionMask:
    """Which queries attend to which keys, and other values that depend on a query and a key.

    `allowed` broadcasts to BHQK; None allows all keys. `causal` also hides the keys whose index is greater than that of
    the query, which kernels can do without a mask in memory. `relative_position` (BQK) is the signed distance between
    each query and key, in tokens or in a dependency tree, for relative position encodings. `bias` is added to scores.
    `length_B`, an alternative to `allowed` for unpacked rows, is the number of valid keys of each sentence. `segments`,
    if given, expresses the same mask as `allowed` and `causal` together, except for queries of padding, whose outputs
    do not matter.
    """

    allowed: Tensor | None = None
    causal: bool = False
    relative_position: Tensor | None = None
    bias: Tensor | None = None
    length_B: Tensor | None = None
    segments: SegmentIds | None = None


def make_additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias for the scores: 0 where attention is allowed, elsewhere the lowest number of the dtype."""
    return allowed.to(dtype).sub_(1).mul_(torch.finfo(dtype).max)


def make_segment_mask(segment_BQ: Tensor, segment_BK: Tensor) -> Tensor:
    """Allow attention within the sentence of the query.

    This rule also hides padding, which has segment id 0: a padded batch is a packed batch with one sentence per row.
    """
    return segment_BQ[..., :, None] == segment_BK[..., None, :]


def make_causal_mask(position_BQ: Tensor, position_BK: Tensor) -> Tensor:
    """Allow attention to the position of the query and to earlier positions. Positions restart in every sentence."""
    return position_BQ[..., :, None] >= position_BK[..., None, :]


def unmask_empty_queries(allowed_BQK: Tensor) -> Tensor:
    """Let queries without any allowed key attend to all keys, since a softmax over no keys is NaN.

    Such queries are padding. Neither the loss nor any sentence depends on their outputs.
    """
    return allowed_BQK | ~allowed_BQK.any(-1, keepdim=True)


def make_self_attention_mask(rows: RowLayout, *, bidirectional: bool) -> AttentionMask:
    """Hide the tokens of other sentences and, unless `bidirectional`, later tokens.

    In unpacked rows only the padding on the right has to be hidden, and a causal mask hides it already.
    """
    if rows.is_unpacked:
        allowed = unmask_empty_queries(rows.real_BT[:, None, None]) if bidirectional else None
        return AttentionMask(allowed, causal=not bidirectional)
    allowed_BTT = make_segment_mask(rows.segment_BT, rows.segment_BT)
    if not bidirectional:
        allowed_BTT = allowed_BTT & make_causal_mask(rows.position_BT, rows.position_BT)
    segments = SegmentIds(rows.segment_BT, rows.segment_BT, causal=not bidirectional)
    return AttentionMask(allowed_BTT[:, None], segments=segments)


def make_cross_attention_mask(target: RowLayout, source: RowLayout) -> AttentionMask:
    """Allow attention from each target sentence to its source sentence."""
    if source.is_unpacked:
        return AttentionMask(unmask_empty_queries(source.real_BT[:, None, None]))
    allowed_BTS = unmask_empty_queries(make_segment_mask(target.segment_BT, source.segment_BT))
    segments = SegmentIds(target.segment_BT, source.segment_BT, causal=False)
    return AttentionMask(allowed_BTS[:, None], segments=segments)


Kernel = Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor]
# Keys and values of new tokens (N, H, D), of a cache (N, H, K, D) or of a source (B, H, S, D).
KeyValue = tuple[Tensor, Tensor]
LONG_SCORES = 1 << 20  # from this number of query-key pairs on, "auto" does not materialize the score matrix
PACKED_HEAD_WIDTHS = (16, 32, 64, 128)  # head widths that the kernel for packed rows supports


def combine_masks(mask: AttentionMask, q_BHQD: Tensor, k_BHKD: Tensor) -> Tensor | None:
    """Return `allowed` and `causal` as one boolean mask, or None if all keys are allowed."""
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
    return compute_attention_weights(q_BHQD, k_BHKD, mask) @ v_BHKD


def attend_fused(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, mask: AttentionMask) -> Tensor:
    """Compute attention with PyTorch's fused kernel, which never materializes the full score matrix.

    The fused kernel requires the same head width of queries, keys and values; narrower ones are padded with zeros,
    which changes neither the dot products nor the values.
    """
    key_width, value_width = q_BHQD.size(-1), v_BHKD.size(-1)
    if key_width != value_width:
        width = max(key_width, value_width)
        q_BHQD = q_BHQD * (width / key_width) ** 0.5  # the kernel divides by the root of the new width
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
    # PyTorch's kernel needs four dimensions: move those between H and Q to the batch dimension.
    allowed = allowed.expand(len(q_BHQD), *allowed.shape[1:])
    q_NHQD, k_NHKD, v_NHKD, allowed_NHQK = (x.movedim(1, -3).flatten(0, -4) for x in (q_BHQD, k_BHKD, v_BHKD, allowed))
    out_NHQD = F.scaled_dot_product_attention(q_NHQD, k_NHKD, v_NHKD, attn_mask=allowed_NHQK)
    return out_NHQD.view(len(q_BHQD), *q_BHQD.shape[2:-2], *out_NHQD.shape[1:]).movedim(-3, 1)


def attend_batched(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, mask: AttentionMask) -> Tensor:
    """Compute attention with batched matrix products in the autocast precision and a hand-written backward pass.

    On a CPU it is faster than PyTorch's fused kernel, which takes three times as long in bfloat16.
    """
    if torch.is_autocast_enabled(q_BHQD.device.type) and q_BHQD.dtype == torch.float32:
        q_BHQD = q_BHQD.to(torch.get_autocast_dtype(q_BHQD.device.type))  # float32 if no projection computed it
    q_NQD, k_NKD, v_NKD = (x.reshape(-1, *x.shape[-2:]).to(q_BHQD.dtype) for x in (q_BHQD, k_BHKD, v_BHKD))
    shape = (*q_BHQD.shape[:-1], k_BHKD.size(-2))
    allowed = combine_masks(mask, q_BHQD, k_BHKD)
    # Adding the mask as a bias is faster than `masked_fill`.
    bias = None if allowed is None else make_additive_mask(allowed, q_BHQD.dtype)
    if mask.bias is not None:
        bias = mask.bias.to(q_BHQD.dtype) if bias is None else mask.bias.to(q_BHQD.dtype) + bias
    if torch.is_grad_enabled():
        out_NQD: Tensor = _BatchedAttention.apply(q_NQD, k_NKD, v_NKD, bias, shape)  # type: ignore[no-untyped-call]
    else:
        out_NQD = torch.bmm(_compute_batched_weights(q_NQD, k_NKD, bias, shape), v_NKD)
    return out_NQD.view(*q_BHQD.shape[:-1], -1)


def _compute_batched_weights(q_NQD: Tensor, k_NKD: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Return the attention weights, weight_NQK. `shape` is that of the scores before flattening, which `bias` fits."""
    score_NQK = torch.bmm(q_NQD, k_NKD.mT).mul_(q_NQD.size(-1) ** -0.5)
    if bias is not None:
        score_NQK.view(shape).add_(bias)
    return score_NQK.softmax(-1, dtype=score_NQK.dtype)  # without dtype, autocast on a GPU would return float32


class _BatchedAttention(torch.autograd.Function):
    """The differentiable form of `attend_batched`, which saves the weights for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q_NQD: Tensor, k_NKD: Tensor, v_NKD: Tensor, bias: Tensor | None, shape: tuple[int, ...]
    ) -> Tensor:
        weight_NQK = _compute_batched_weights(q_NQD, k_NKD, bias, shape)
        ctx.save_for_backward(q_NQD, k_NKD, v_NKD, weight_NQK)
        ctx.shape, ctx.bias_shape = shape, None if bias is None else bias.shape
        return torch.bmm(weight_NQK, v_NKD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_NQD, k_NKD, v_NKD, weight_NQK = ctx.saved_tensors
        grad_NQD = grads[0].contiguous()
        score_grad_NQK = torch._softmax_backward_data(torch.bmm(grad_NQD, v_NKD.mT), weight_NQK, -1, weight_NQK.dtype)
        *_, needs_bias_grad, _ = ctx.needs_input_grad
        bias_grad = score_grad_NQK.view(ctx.shape).sum_to_size(ctx.bias_shape).clone() if needs_bias_grad else None
        score_grad_NQK.mul_(q_NQD.size(-1) ** -0.5)  # in place, so `bias_grad` had to be cloned
        key_grad_NKD, value_grad_NKD = torch.bmm(score_grad_NQK.mT, q_NQD), torch.bmm(weight_NQK.mT, grad_NQD)
        return torch.bmm(score_grad_NQK, k_NKD), key_grad_NKD, value_grad_NKD, bias_grad, None


def attend_auto(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, mask: AttentionMask) -> Tensor:
    """Use the fastest kernel for the device; for long sequences, the fused one, whose memory grows linearly."""
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
    """Store one new key and value per hypothesis in the cache; return the output of attention to all tokens: out_NHD.

    `beam_indices_NK[n, k]` is the cache row that holds position k of hypothesis n. When beams are reordered, only this
    table changes, not the cache. `beam_indices_NK[n, position_N[n]]` must be n, since the new token is stored in row n.
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
    """Attend from each hypothesis to the first `length_B` positions of its source: out_NHD.

    N is a multiple of B; the N / B hypotheses of a sentence follow each other.
    """
    if supports_cached_kernel(q_NHD, memory[1]):
        from dragoman.kernels.attention_triton import attend_cached

        return attend_cached(q_NHD, memory, length_B)
    k_BHSD, v_BHSD = memory
    q_BHWD = q_NHD.view(len(length_B), -1, *q_NHD.shape[1:]).transpose(1, 2)
    allowed_B11S = (torch.arange(k_BHSD.size(2), device=length_B.device) < length_B[:, None])[:, None, None]
    out_BHWD = compute_attention_weights(q_BHWD, k_BHSD, AttentionMask(allowed_B11S)) @ v_BHSD
    return out_BHWD.transpose(1, 2).flatten(0, 1)


def supports_cached_kernel(q_NHD: Tensor, value: Tensor) -> bool:
    """Return whether `attend_cached` can be used: on a GPU, if both head widths are powers of two from 16 on."""
    widths = (q_NHD.size(-1), value.size(-1))
    return q_NHD.is_cuda and all(width >= 16 and width & (width - 1) == 0 for width in widths)


def supports_packed_kernel(query_BQE: Tensor, mask: AttentionMask, head_width: int) -> bool:
    """Return whether `attend_packed` can be used: on a GPU in half precision, if segment ids express the full mask."""
    is_half = query_BQE.is_cuda and query_BQE.dtype in (torch.bfloat16, torch.float16)
    return is_half and mask.segments is not None and mask.bias is None and head_width in PACKED_HEAD_WIDTHS


def attend_packed(query_BQE: Tensor, mask: AttentionMask, heads: int, key_value_BKF: Tensor | None = None) -> Tensor:
    """Return the output of attention within packed rows, out_BQC, given the outputs of the fused projections.

    If `key_value_BKF` is None, keys and values follow the queries in `query_BQE`. The Triton kernel reads its inputs
    from the projections without copying them, writes gradients in the same layout and builds no mask.
    """
    from dragoman.kernels.attention_triton import attend_rows

    assert mask.segments is not None
    query_BQ, key_BK, causal = mask.segments
    outputs: tuple[Tensor, Tensor] = attend_rows(query_BQE, key_value_BKF, query_BQ, key_BK, heads, causal)
    return outputs[0]  # the other one is for the backward pass
