"""Multi-head attention: self-attention within a sentence and cross-attention from a target to its source.

The attention pattern (patterns.py) chooses the keys of each query, the position scheme (positions.py) adds positions,
and the kernel (kernels/attention.py) computes the output.

Shapes   B rows of a batch   H heads   T tokens   S source tokens   D head width   C model width
         E width of a projection   N hypotheses in a search, or hypotheses x heads where `step` flattens them
         K capacity of the KV cache, or source tokens of packed rows   M vectors in the flattened cache
         F width of keys and values   R keys of Linformer, its rank   1 the new token of a decoding step
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from dragoman.kernels.attention import (
    KERNELS,
    AttentionMask,
    KeyValue,
    RowLayout,
    attend_packed,
    attend_to_cache,
    attend_to_source,
    compute_attention_weights,
    make_additive_mask,
    make_causal_mask,
    supports_packed_kernel,
)
from dragoman.modules.dropout import HeadDropout
from dragoman.modules.feedforward import Linear
from dragoman.modules.patterns import PATTERNS, AttentionSettings, FullAttention
from dragoman.modules.positions import AttentionPosition


@dataclass(frozen=True)
class StepContext:
    """The inputs that all layers share in one decoding step.

    `beam_indices_NK[n, k]` is the cache row that holds position k of hypothesis n. None: row n holds them all.
    """

    position_N1: Tensor
    mask: AttentionMask
    beam_indices_NK: Tensor | None = None


def split_heads(x_BTC: Tensor, heads: int) -> Tensor:
    """Return a view with the features split into heads: x_BHTD."""
    return x_BTC.view(*x_BTC.shape[:2], heads, -1).transpose(1, 2)


class MultiHeadAttention(nn.Module):
    """The common part of self- and cross-attention: widths, kernel and output projection.

    `may_use_packed_kernel`: the settings permit `attend_packed`, the Triton kernel for rows with several sentences.
    """

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__()
        self.settings, self.heads, self.kernel = settings, settings.heads, KERNELS[settings.kernel]
        self.query_width = self.heads * settings.head_key_width
        self.value_width = self.heads * settings.head_value_width
        self.dropout = HeadDropout(settings.head_dropout)
        is_default = settings.kernel == "auto" and settings.projections and settings.scaled
        self.may_use_packed_kernel = is_default and settings.head_key_width == settings.head_value_width
        has_output = settings.projections and settings.output_projection
        self.out = self.make_projection(self.value_width, settings.width) if has_output else nn.Identity()

    def make_projection(self, inputs: int, outputs: int) -> Linear | nn.Identity:
        """Return a linear layer or, without the setting `projections`, the identity."""
        settings = self.settings
        return Linear(inputs, outputs, bias=settings.biases) if settings.projections else nn.Identity()

    def split_query(self, query_BTE: Tensor) -> Tensor:
        """Split queries into heads. Without the setting `scaled`, cancel the factor 1/sqrt(D) of the kernels."""
        q_BHTD = split_heads(query_BTE, self.heads)
        return q_BHTD if self.settings.scaled else q_BHTD * q_BHTD.size(-1) ** 0.5

    def project_output(self, out_BHTD: Tensor) -> Tensor:
        """Join the heads and apply the output projection: out_BTC."""
        out_BTC: Tensor = self.out(self.dropout(out_BHTD).transpose(1, 2).flatten(2))
        return out_BTC


class SelfAttention(MultiHeadAttention):
    """Attention of every token to the tokens of its sentence. One projection computes queries, keys and values.

    `relate`, a name in saved weights, is the part of the position encoding that acts in attention (positions.py).
    """

    def __init__(self, settings: AttentionSettings, position: type[AttentionPosition], *, bidirectional: bool) -> None:
        super().__init__(settings)
        self.query_key_value = self.make_projection(settings.width, 2 * self.query_width + self.value_width)
        self.relate = position(settings)
        pattern = PATTERNS[settings.attention if bidirectional else settings.decoder_attention]
        self.pattern = pattern(settings, bidirectional=bidirectional)
        is_plain = position is AttentionPosition and type(self.pattern) is FullAttention  # the base classes
        self.may_use_packed_kernel = self.may_use_packed_kernel and is_plain

    def split_qkv(self, qkv_BTE: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the projection into heads of queries, keys and values, with positions as the scheme encodes them.

        Without projections, the input itself serves as queries, keys and values.
        """
        widths = [self.query_width, self.query_width, self.value_width]
        parts = torch.split_with_sizes(qkv_BTE, widths, -1) if self.settings.projections else [qkv_BTE] * 3
        q, k, v = (split_heads(self.relate.add_positions(part, position_BT), self.heads) for part in parts)
        q, k = self.relate.rotate(q, position_BT), self.relate.rotate(k, position_BT)
        return q if self.settings.scaled else q * q.size(-1) ** 0.5, k, v  # as in `split_query`

    def make_mask(self, rows: RowLayout) -> AttentionMask:
        """Return the mask for `forward`, which all layers of a stack can share."""
        return self.pattern.make_mask(rows, self.relate)

    def forward(self, x_BTC: Tensor, position_BT: Tensor, mask: AttentionMask) -> Tensor:
        qkv_BTE = self.query_key_value(x_BTC)
        if self.may_use_packed_kernel and supports_packed_kernel(qkv_BTE, mask, self.settings.head_value_width):
            return self.project_output(split_heads(attend_packed(qkv_BTE, mask, self.heads), self.heads))
        q, k, v = self.split_qkv(qkv_BTE, position_BT)
        return self.project_output(self.pattern(q, k, v, mask, partial(self.relate.attend, self.kernel)))

    def compute_weights(self, x_BTC: Tensor, position_BT: Tensor, mask: AttentionMask) -> Tensor:
        """Return the attention weights that `forward` uses: weight_BHTT, or weight_BHTR for projected keys."""
        q_BHTD, k_BHTD, _ = self.split_qkv(self.query_key_value(x_BTC), position_BT)
        return self.pattern.compute_weights(q_BHTD, k_BHTD, mask, self.relate)

    def make_step_mask(self, position_N1: Tensor, capacity: int, dtype: torch.dtype) -> AttentionMask:
        """Return the mask for `step`: the new token at `position_N1` attends to the cache up to this position."""
        position_1K = torch.arange(capacity, device=position_N1.device)[None]
        allowed_N1K = make_causal_mask(position_N1, position_1K)
        pattern_N1K = self.pattern.make_pattern_mask(position_N1, position_1K)
        if pattern_N1K is not None:
            allowed_N1K = allowed_N1K & pattern_N1K
        relative_N1K = self.relate.compute_relative(position_N1, position_1K)
        if relative_N1K is None:  # all layers share this mask: make it additive once, rather than in every kernel
            return AttentionMask(bias=make_additive_mask(allowed_N1K[:, None], dtype))
        return AttentionMask(allowed_N1K[:, None], relative_position=relative_N1K)

    def step(self, x_N1C: Tensor, cache: KeyValue, context: StepContext) -> Tensor:
        """Store the key and value of the new token of each row in the cache; return the output of its attention."""
        position_N1 = context.position_N1
        q_NH1D, k_NH1D, v_NH1D = self.split_qkv(self.query_key_value(x_N1C), position_N1)
        if context.beam_indices_NK is not None:  # an indirect KVCache, used only with full attention
            new = (k_NH1D[:, :, 0], v_NH1D[:, :, 0])
            out_NHD = attend_to_cache(q_NH1D[:, :, 0], new, cache, position_N1[:, 0], context.beam_indices_NK)
            out_N1C: Tensor = self.out(out_NHD.flatten(1)[:, None])
            return out_N1C
        head_N = torch.arange(len(x_N1C) * self.heads, device=x_N1C.device)
        slot_N = head_N * cache[0].size(2) + position_N1.expand(-1, self.heads).flatten()  # indices in flat_MD
        for cached_NHKD, new_NH1D in zip(cache, (k_NH1D, v_NH1D), strict=True):
            flat_MD = cached_NHKD.view(-1, cached_NHKD.size(3))
            flat_MD.index_copy_(0, slot_N, new_NH1D.flatten(0, 2).to(cached_NHKD.dtype))
        return self.project_output(self.relate.attend(self.kernel, q_NH1D, *cache, context.mask))


class CrossAttention(MultiHeadAttention):
    """Attention of every target token to its source sentence."""

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__(settings)
        self.query = self.make_projection(settings.width, self.query_width)
        self.key_value = self.make_projection(settings.width, self.query_width + self.value_width)

    def project_memory(self, memory_BSC: Tensor) -> KeyValue:
        """Return the keys and values of the source. Decoding computes them once and uses them in every step."""
        if not self.settings.projections:
            return (split_heads(memory_BSC, self.heads),) * 2
        k, v = self.key_value(memory_BSC).split([self.query_width, self.value_width], -1)
        return split_heads(k, self.heads), split_heads(v, self.heads)

    def forward(self, x_BTC: Tensor, memory: Tensor | KeyValue, mask: AttentionMask) -> Tensor:
        """Attend to the source. `memory` is the encoder output, memory_BSC, or the result of `project_memory`.

        In decoding, the T axis holds the hypotheses of a sentence, and the mask may be given as `mask.length_B`.
        """
        query_BTE = self.query(x_BTC)
        if isinstance(memory, Tensor):
            if self.may_use_packed_kernel and supports_packed_kernel(query_BTE, mask, self.settings.head_value_width):
                out_BTE = attend_packed(query_BTE, mask, self.heads, key_value_BKF=self.key_value(memory))
                return self.project_output(split_heads(out_BTE, self.heads))
            memory = self.project_memory(memory)
        q_BHTD = self.split_query(query_BTE)
        if mask.length_B is None:
            return self.project_output(self.kernel(q_BHTD, *memory, mask))
        q_NHD = q_BHTD.transpose(1, 2).flatten(0, 1)
        out_BTC: Tensor = self.out(attend_to_source(q_NHD, memory, mask.length_B).flatten(1)).view_as(x_BTC)
        return out_BTC

    def compute_weights(self, x_BTC: Tensor, memory_BSC: Tensor, mask: AttentionMask) -> Tensor:
        """Return the attention weights that `forward` uses: weight_BHTS."""
        key_BHSD, _ = self.project_memory(memory_BSC)
        return compute_attention_weights(self.split_query(self.query(x_BTC)), key_BHSD, mask)
