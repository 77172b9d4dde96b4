"""Attention with several heads: of a sentence to itself, and of a target to its source.

Shapes   B batch   H heads   T tokens   S source tokens   D head width   C model width   N rows of a search   K cache
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dragoman.kernels import attention as rows
from dragoman.kernels.attention import KERNELS, KeyValue, attend_to_cache, attend_to_source, compute_attention_weights
from dragoman.kernels.masks import AttentionMask, RowLayout, make_additive_mask, make_causal_mask
from dragoman.modules.dropout import HeadDropout
from dragoman.modules.linear import Linear
from dragoman.modules.patterns import PATTERNS, FullAttention
from dragoman.modules.positions import AttentionPosition
from dragoman.modules.settings import AttentionSettings


@dataclass(frozen=True)
class StepContext:
    """Where the tokens of a step stand and what they see of the cache; `who_NK` where its rows stay in their places."""

    place_N1: Tensor
    look: AttentionMask
    who_NK: Tensor | None = None


def split_heads(x_BTC: Tensor, heads: int) -> Tensor:
    return x_BTC.view(*x_BTC.shape[:2], heads, -1).transpose(1, 2)


def join_heads(x_BHTD: Tensor) -> Tensor:
    return x_BHTD.transpose(1, 2).flatten(2)


class MultiHeadAttention(nn.Module):
    """What both kinds share: how wide queries, keys and values are, and what becomes of the answer."""

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__()
        self.settings, self.heads, self.kernel = settings, settings.heads, KERNELS[settings.kernel]
        self.query_width, self.value_width = settings.key_width * self.heads, settings.head_width * self.heads
        self.dropout = HeadDropout(settings.head_dropout)
        same_width = settings.key_width == settings.head_width
        self.plain = settings.kernel == "auto" and settings.projections and settings.scaled and same_width
        self.out = Linear(self.value_width, settings.width) if settings.projections else nn.Identity()

    def scaled(self, q_BHTD: Tensor) -> Tensor:
        """Kernels divide scores by the root of the width; where that is not wanted, queries make up for it."""
        return q_BHTD if self.settings.scaled else q_BHTD * q_BHTD.size(-1) ** 0.5

    def joined(self, read_BHTD: Tensor) -> Tensor:
        """What all heads have read, as one."""
        out_BTC: Tensor = self.out(join_heads(self.dropout(read_BHTD)))
        return out_BTC


class SelfAttention(MultiHeadAttention):
    """Every token asks the tokens of its own sentence. One product makes queries, keys and values."""

    def __init__(
        self, settings: AttentionSettings, relate: Callable[[AttentionSettings], AttentionPosition], *, ahead: bool
    ):
        super().__init__(settings)
        if settings.projections:
            self.query_key_value = Linear(settings.width, 2 * self.query_width + self.value_width)
        self.relate = relate(settings)
        self.pattern = PATTERNS[settings.attention if ahead else settings.decoder_attention](settings, ahead=ahead)
        self.plain = self.plain and type(self.relate) is AttentionPosition and type(self.pattern) is FullAttention

    def made(self, x_BTC: Tensor) -> Tensor:
        """Queries, keys and values side by side; all three in one, where there are no projections."""
        out: Tensor = self.query_key_value(x_BTC) if self.settings.projections else x_BTC
        return out

    def split(self, made_BTE: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        widths = [self.query_width, self.query_width, self.value_width]
        parts = torch.split_with_sizes(made_BTE, widths, -1) if self.settings.projections else [made_BTE] * 3
        q, k, v = (split_heads(each, self.heads) for each in parts)
        return self.scaled(self.relate.turn(q, position_BT)), self.relate.turn(k, position_BT), v

    def look(self, rows: RowLayout) -> AttentionMask:
        """What `forward` must know of the rows. All layers of a stack can share it."""
        return self.pattern.look(rows, self.relate)

    def forward(self, x_BTC: Tensor, position_BT: Tensor, look: AttentionMask) -> Tensor:
        made = self.made(x_BTC)
        if self.plain and rows.supports_packed_kernel(made, look, self.settings.head_width):
            return self.joined(split_heads(rows.attend_packed(made, None, look, self.heads), self.heads))
        q, k, v = self.split(made, position_BT)
        return self.joined(self.pattern(q, k, v, look, self.relate, self.kernel))

    def glance(self, place_N1: Tensor, capacity: int, dtype: torch.dtype) -> AttentionMask:
        """What `step` must know of tokens at these places: they see the cache up to their own. All layers share it."""
        place_1K = torch.arange(capacity, device=place_N1.device)[None]
        keep_N1K, visible = make_causal_mask(place_N1, place_1K), self.pattern.visible(place_N1, place_1K)
        keep_N1K = keep_N1K if visible is None else keep_N1K & visible
        if self.relate.needs == "nothing":
            return AttentionMask(
                bias=make_additive_mask(keep_N1K[:, None], dtype)
            )  # made once here, not once in every layer
        return AttentionMask(keep_N1K[:, None], gap=self.relate.gap(place_N1, place_1K))

    def step(self, x_N1C: Tensor, cache: KeyValue, now: StepContext) -> Tensor:
        """One more token: its key and value go to their place in the cache, then it looks at what is there."""
        place_N1, look = now.place_N1, now.look
        q_NH1D, k_NH1D, v_NH1D = self.split(self.made(x_N1C), place_N1)
        if now.who_NK is not None:
            new = (k_NH1D[:, :, 0], v_NH1D[:, :, 0])
            read_NHD = attend_to_cache(q_NH1D[:, :, 0], new, cache, place_N1[:, 0], now.who_NK)
            read_N1C: Tensor = self.out(read_NHD.flatten(1)[:, None])
            return read_N1C
        head_N = torch.arange(len(x_N1C) * self.heads, device=x_N1C.device)
        where_N = head_N * cache[0].size(2) + place_N1.expand(-1, self.heads).flatten()
        for held_NHKD, new_NH1D in zip(cache, (k_NH1D, v_NH1D), strict=True):
            held_NHKD.view(-1, held_NHKD.size(3)).index_copy_(0, where_N, new_NH1D.flatten(0, 2).to(held_NHKD.dtype))
        return self.joined(self.relate.attend(self.kernel, q_NH1D, *cache, look))

    def empty(self, rows: int, like: Tensor) -> KeyValue:
        return (
            like.new_zeros(rows, self.heads, 0, self.settings.key_width),
            like.new_zeros(rows, self.heads, 0, self.settings.head_width),
        )


class CrossAttention(MultiHeadAttention):
    """Every target token asks the tokens of its source sentence."""

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__(settings)
        if settings.projections:
            self.query = Linear(settings.width, self.query_width)
            self.key_value = Linear(settings.width, self.query_width + self.value_width)

    def look_up(self, memory_BSC: Tensor) -> KeyValue:
        """Keys and values of the source: made once, asked at every step."""
        if not self.settings.projections:
            both = split_heads(memory_BSC, self.heads)
            return both, both
        k, v = self.key_value(memory_BSC).split([self.query_width, self.value_width], -1)
        return split_heads(k, self.heads), split_heads(v, self.heads)

    def ask(self, x_BTC: Tensor) -> Tensor:
        return self.scaled(split_heads(self.query(x_BTC) if self.settings.projections else x_BTC, self.heads))

    def forward(self, x_BTC: Tensor, memory: KeyValue, look: AttentionMask) -> Tensor:
        if look.stop is not None:
            q_NHD = self.ask(x_BTC).transpose(1, 2).flatten(0, 1)
            read_BTC: Tensor = self.out(attend_to_source(q_NHD, memory, look.stop).flatten(1)).view_as(x_BTC)
            return read_BTC
        return self.joined(self.kernel(self.ask(x_BTC), *memory, look))

    def over(self, x_BTC: Tensor, memory_BSC: Tensor, look: AttentionMask) -> Tensor:
        """The same straight from the source's states, for those who ask only once."""
        if not self.plain:
            return self(x_BTC, self.look_up(memory_BSC), look)  # type: ignore[no-any-return]
        query_BTC = self.query(x_BTC)
        if not rows.supports_packed_kernel(query_BTC, look, self.settings.head_width):
            return self(x_BTC, self.look_up(memory_BSC), look)  # type: ignore[no-any-return]
        read_BTC = rows.attend_packed(query_BTC, self.key_value(memory_BSC), look, self.heads)
        return self.joined(split_heads(read_BTC, self.heads))

    def weights(self, x_BTC: Tensor, memory: KeyValue, look: AttentionMask) -> Tensor:
        """What `forward` looks at, before it reads the values: weights_BHTS."""
        return compute_attention_weights(self.ask(x_BTC), memory[0], look)
