"""Attention with several heads: of a sentence to itself, and of a target to its source.

Shapes   B batch   H heads   T tokens   S source tokens   D head width   C model width   N rows of a search   K cache
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dragoman.nn.kernel import KERNELS, weights
from dragoman.nn.linear import Linear
from dragoman.nn.mask import Look, Rows
from dragoman.nn.pattern import PATTERNS
from dragoman.nn.position import Relate
from dragoman.nn.settings import AttentionSettings

Cache = tuple[Tensor, Tensor]  # keys_NHKD and values_NHKD of the tokens so far


def split_heads(x_BTC: Tensor, heads: int) -> Tensor:
    return x_BTC.view(*x_BTC.shape[:2], heads, -1).transpose(1, 2)


def join_heads(x_BHTD: Tensor) -> Tensor:
    return x_BHTD.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """What both kinds share: how wide queries, keys and values are, and what becomes of the answer."""

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__()
        self.settings, self.heads, self.kernel = settings, settings.heads, KERNELS[settings.kernel]
        self.query_width, self.value_width = settings.key_width * self.heads, settings.head_width * self.heads
        self.out = Linear(self.value_width, settings.width) if settings.projections else nn.Identity()

    def scaled(self, q_BHTD: Tensor) -> Tensor:
        """Kernels divide scores by the root of the width; where that is not wanted, queries make up for it."""
        return q_BHTD if self.settings.scaled else q_BHTD * q_BHTD.size(-1) ** 0.5


class SelfAttention(Attention):
    """Every token asks the tokens of its own sentence. One product makes queries, keys and values."""

    def __init__(self, settings: AttentionSettings, relate: Callable[[AttentionSettings], Relate], *, ahead: bool):
        super().__init__(settings)
        if settings.projections:
            self.query_key_value = Linear(settings.width, 2 * self.query_width + self.value_width)
        self.relate = relate(settings)
        self.pattern = PATTERNS[settings.attention if ahead else settings.decoder_attention](settings, ahead=ahead)

    def split(self, x_BTC: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.settings.projections:
            made = self.query_key_value(x_BTC).split([self.query_width, self.query_width, self.value_width], -1)
        else:
            made = (x_BTC, x_BTC, x_BTC)
        q, k, v = (split_heads(each, self.heads) for each in made)
        return self.scaled(self.relate.turn(q, position_BT)), self.relate.turn(k, position_BT), v

    def look(self, rows: Rows) -> Look:
        """What `forward` must know of the rows. All layers of a stack can share it."""
        return self.pattern.look(rows, self.relate)

    def forward(self, x_BTC: Tensor, position_BT: Tensor, look: Look) -> Tensor:
        q, k, v = self.split(x_BTC, position_BT)
        out_BTC: Tensor = self.out(join_heads(self.pattern(q, k, v, look, self.relate, self.kernel)))
        return out_BTC

    def step(self, x_N1C: Tensor, cache: Cache, at: int) -> Tensor:
        """One more token: its key and value go to place `at` of the cache, then it looks at what is there."""
        places_K = torch.arange(cache[0].size(2), device=x_N1C.device)
        q_NH1D, k_NH1D, v_NH1D = self.split(x_N1C, places_K[None, at : at + 1])
        cache[0][:, :, at : at + 1], cache[1][:, :, at : at + 1] = k_NH1D, v_NH1D
        keep_1K, visible_1K = places_K[None] <= at, self.pattern.visible(places_K[at : at + 1], places_K)
        keep_1K = keep_1K if visible_1K is None else keep_1K & visible_1K
        look = Look(keep_1K[None, None], gap=self.relate.gap(places_K[None, at : at + 1], places_K[None]))
        out_N1C: Tensor = self.out(join_heads(self.relate.attend(self.kernel, q_NH1D, *cache, look)))
        return out_N1C

    def empty(self, rows: int, like: Tensor) -> Cache:
        return (
            like.new_zeros(rows, self.heads, 0, self.settings.key_width),
            like.new_zeros(rows, self.heads, 0, self.settings.head_width),
        )


class CrossAttention(Attention):
    """Every target token asks the tokens of its source sentence."""

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__(settings)
        if settings.projections:
            self.query = Linear(settings.width, self.query_width)
            self.key_value = Linear(settings.width, self.query_width + self.value_width)

    def look_up(self, memory_BSC: Tensor) -> Cache:
        """Keys and values of the source: made once, asked at every step."""
        if not self.settings.projections:
            both = split_heads(memory_BSC, self.heads)
            return both, both
        k, v = self.key_value(memory_BSC).split([self.query_width, self.value_width], -1)
        return split_heads(k, self.heads), split_heads(v, self.heads)

    def ask(self, x_BTC: Tensor) -> Tensor:
        return self.scaled(split_heads(self.query(x_BTC) if self.settings.projections else x_BTC, self.heads))

    def forward(self, x_BTC: Tensor, memory: Cache, look: Look) -> Tensor:
        out_BTC: Tensor = self.out(join_heads(self.kernel(self.ask(x_BTC), *memory, look)))
        return out_BTC

    def weights(self, x_BTC: Tensor, memory: Cache, look: Look) -> Tensor:
        """What `forward` looks at, before it reads the values: weights_BHTS."""
        return weights(self.ask(x_BTC), memory[0], look)
