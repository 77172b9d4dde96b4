"""The Transformer on packed rows: an encoder stack, a masked decoder stack that asks it, tied embeddings.

Shapes   B rows   S source width   T target width   C model width   H heads   D head width   V vocabulary
         L layers   N rows of a search (B sentences x W beams)   K cache capacity
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from dragoman.kernels.attention import KeyValue
from dragoman.kernels.masks import AttentionMask, RowLayout, make_additive_mask, make_cross_attention_mask
from dragoman.models.base import Seq2Seq, initialize_parameters
from dragoman.models.kv_cache import KVCache
from dragoman.models.settings import TransformerSettings
from dragoman.modules.attention import CrossAttention, SelfAttention, StepContext
from dragoman.modules.dropout import Dropout, LayerDropout, WordDropout
from dragoman.modules.feedforward import FEEDFORWARDS, FeedForward, Residual
from dragoman.modules.linear import to_autocast_dtype
from dragoman.modules.norms import NORMS
from dragoman.modules.positions import POSITIONS, PositionScheme
from dragoman.types import Batch

M = TypeVar("M", bound=nn.Module)
CAPACITY_STEP = 16  # a cache grows by whole vectors of floats, so that places that are masked change no sum
SMALL_PRODUCT = 400  # multiply-adds below which PyTorch's products on a CPU round in another way


def wrap_residual(sublayer: M, settings: TransformerSettings) -> Residual[M]:
    norm = NORMS[settings.norm](settings.width)
    return Residual(sublayer, norm, place=settings.norm_place, skip=settings.residual, dropout=settings.dropout)


def make_feedforward(settings: TransformerSettings) -> Residual[FeedForward] | None:
    kind, inner = FEEDFORWARDS[settings.activation], settings.feedforward_width or 4 * settings.width
    return wrap_residual(kind(settings.width, inner, settings.activation_dropout), settings) if kind else None


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each in its residual wiring."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        scheme = POSITIONS[settings.position]
        self.attention = wrap_residual(SelfAttention(settings, scheme.relate, ahead=True), settings)
        self.feedforward = make_feedforward(settings)

    def forward(self, x_BSC: Tensor, rows: RowLayout, look: AttentionMask) -> Tensor:
        x_BSC = self.attention(x_BSC, rows.real_BT, rows.position_BT, look)
        out: Tensor = self.feedforward(x_BSC, rows.real_BT) if self.feedforward else x_BSC
        return out


class DecoderLayer(nn.Module):
    """Self-attention that does not look ahead, cross-attention to the source if there is one, and feed-forward."""

    def __init__(self, settings: TransformerSettings, *, cross: bool) -> None:
        super().__init__()
        self.attention = wrap_residual(SelfAttention(settings, settings.decoder_scheme.relate, ahead=False), settings)
        self.cross = wrap_residual(CrossAttention(settings), settings) if cross else None
        self.feedforward = make_feedforward(settings)

    def look_up(self, memory_BSC: Tensor) -> KeyValue | None:
        """Keys and values of the source for this layer."""
        return self.cross.sublayer.look_up(memory_BSC) if self.cross else None

    def forward(
        self, x_BTC: Tensor, rows: RowLayout, look: AttentionMask, memory_BSC: Tensor | None, cross_look: AttentionMask
    ) -> Tensor:
        x_BTC = self.attention(x_BTC, rows.real_BT, rows.position_BT, look)
        if self.cross and memory_BSC is not None:
            x_BTC = self.cross.around(x_BTC, rows.real_BT, self.cross.sublayer.over, memory_BSC, cross_look)
        return self.feedforward(x_BTC, rows.real_BT) if self.feedforward else x_BTC

    def step(
        self, x_BWC: Tensor, cache: KeyValue, now: StepContext, memory: KeyValue | None, cross_look: AttentionMask
    ) -> Tensor:
        """One token for every row. The W rows of a sentence ask its source together, as W queries."""
        x_N1C = self.attention.around(x_BWC.flatten(0, 1)[:, None], None, self.attention.sublayer.step, cache, now)
        x_BWC = x_N1C.view_as(x_BWC)
        if self.cross and memory:
            x_BWC = self.cross(x_BWC, None, memory, cross_look)
        return self.feedforward(x_BWC, None) if self.feedforward else x_BWC

    def looks(
        self, x_BTC: Tensor, rows: RowLayout, look: AttentionMask, memory: KeyValue, cross_look: AttentionMask
    ) -> Tensor:
        """Where each target token looks in the source, mean over heads: weights_BTS."""
        assert self.cross
        x_BTC = self.cross.inlet(self.attention(x_BTC, rows.real_BT, rows.position_BT, look), rows.real_BT)
        return self.cross.sublayer.weights(x_BTC, memory, cross_look).float().mean(1)


def make_layers(make: Callable[[], nn.Module], depth: int, *, shared: bool) -> nn.ModuleList:
    """So many layers, or one of them so many times."""
    return nn.ModuleList([make()] * depth if shared else [make() for _ in range(depth)])


class TransformerStack(nn.Module):
    """Embeddings, layers and a last norm: what an encoder and a decoder have in common."""

    def __init__(
        self,
        settings: TransformerSettings,
        embedding: nn.Embedding,
        scheme: PositionScheme,
        layers: nn.ModuleList,
        *,
        word_dropout: float,
    ) -> None:
        super().__init__()
        self.settings, self.layers = settings, layers
        self.embedding = embedding
        self.words, self.bypass = WordDropout(word_dropout), LayerDropout(settings.layer_dropout)
        self.position = scheme.embed(settings)
        self.dropout = Dropout(settings.dropout)
        self.norm = NORMS[settings.norm if settings.norm_place == "pre" else "none"](settings.width)

    def embed(self, ids_BT: Tensor, rows: RowLayout) -> Tensor:
        x_BTC = self.words(self.embedding(ids_BT) * math.sqrt(self.settings.width), rows.seen_BT)
        return to_autocast_dtype(self.dropout(self.position(x_BTC, rows)))

    def look(self, rows: RowLayout) -> AttentionMask:
        """Who may look at whom within the rows: the same in every layer."""
        look: AttentionMask = self.layers[0].attention.sublayer.look(rows)  # type: ignore[union-attr,operator]
        return look


class Encoder(TransformerStack):
    """Source tokens in, one state for each out."""

    def __init__(self, settings: TransformerSettings, embedding: nn.Embedding) -> None:
        layers = make_layers(lambda: EncoderLayer(settings), settings.encoder_depth, shared=settings.shared)
        scheme = POSITIONS[settings.position]
        super().__init__(settings, embedding, scheme, layers, word_dropout=settings.source_word_dropout)

    def forward(self, ids_BS: Tensor, rows: RowLayout) -> Tensor:
        x_BSC, look = self.embed(ids_BS, rows), self.look(rows)
        for layer in self.layers:
            x_BSC = self.bypass(x_BSC, layer(x_BSC, rows, look))
        out: Tensor = self.norm(x_BSC, rows.real_BT)
        return out


class Decoder(TransformerStack):
    """Target tokens in, one state for each out, made of what stands before it and of the source, if there is one."""

    def __init__(self, settings: TransformerSettings, embedding: nn.Embedding, *, cross: bool) -> None:
        layers = make_layers(
            lambda: DecoderLayer(settings, cross=cross), settings.decoder_depth, shared=settings.shared
        )
        scheme = settings.decoder_scheme
        super().__init__(settings, embedding, scheme, layers, word_dropout=settings.target_word_dropout)

    def forward(
        self, ids_BT: Tensor, rows: RowLayout, memory_BSC: Tensor | None = None, source: RowLayout | None = None
    ) -> Tensor:
        x_BTC, look, cross_look = self.before(ids_BT, rows, source)
        for layer in self.layers:
            x_BTC = self.bypass(x_BTC, layer(x_BTC, rows, look, memory_BSC, cross_look))
        out: Tensor = self.norm(x_BTC, rows.real_BT)
        return out

    def before(
        self, ids_BT: Tensor, rows: RowLayout, source: RowLayout | None
    ) -> tuple[Tensor, AttentionMask, AttentionMask]:
        cross_look = make_cross_attention_mask(rows, source) if source else AttentionMask()
        return self.embed(ids_BT, rows), self.look(rows), cross_look

    @staticmethod
    def look_up(layer: nn.Module, memory_BSC: Tensor | None) -> KeyValue | None:
        return None if memory_BSC is None else layer.look_up(memory_BSC)  # type: ignore[operator]

    def looks(self, ids_BT: Tensor, rows: RowLayout, memory_BSC: Tensor, source: RowLayout) -> Tensor:
        """Return cross-attention weights, the mean over the heads of the layer that aligns best."""
        x_BTC, look, cross_look = self.before(ids_BT, rows, source)
        *before, chosen = self.layers[: self.settings.alignment_layer + 1]
        for layer in before:
            x_BTC = layer(x_BTC, rows, look, memory_BSC, cross_look)
        looks: Tensor = chosen.looks(x_BTC, rows, look, self.look_up(chosen, memory_BSC), cross_look)  # type: ignore[operator]
        return looks

    def start(self, rows: int, memory_BSC: Tensor | None = None, source: RowLayout | None = None) -> KVCache:
        """Stand before the first target token of so many rows."""
        like = self.embedding.weight if memory_BSC is None else memory_BSC
        caches = [layer.attention.sublayer.empty(rows, like) for layer in self.layers]  # type: ignore[union-attr,operator]
        look = make_cross_attention_mask(source, source) if source else AttentionMask()
        if look.keep is not None:
            look = AttentionMask(bias=make_additive_mask(look.keep, like.dtype))
        at_B = torch.zeros(rows, dtype=torch.long, device=like.device)
        memory = [self.look_up(layer, memory_BSC) for layer in self.layers]
        memory = [pair and (pair[0].contiguous(), pair[1].contiguous()) for pair in memory]
        return KVCache(memory, look, caches, at_B, torch.zeros(rows, 0, dtype=torch.int32, device=like.device))

    def step(self, token_N: Tensor, state: KVCache) -> tuple[Tensor, KVCache]:
        """One token in for every row; the states_NC that come after it and the new state out."""
        if not state.stay and int(state.at_B.max()) >= state.capacity:
            state = state.reserve(CAPACITY_STEP * max(-(-SMALL_PRODUCT // (CAPACITY_STEP * self.narrowest)), 1))
        place_N1 = state.at_B.repeat_interleave(len(token_N) // len(state.at_B))[:, None]
        x_N1C = self.embed(token_N[:, None], RowLayout(torch.ones_like(place_N1), place_N1))
        x_BWC = x_N1C.view(len(state.at_B), -1, x_N1C.size(-1))
        now = self.now(place_N1, state, x_N1C.dtype)
        for layer, memory, cache in zip(self.layers, state.memory, state.caches, strict=True):
            x_BWC = layer.step(x_BWC, cache, now, memory, state.look)  # type: ignore[operator]
        states_NC: Tensor = self.norm(x_BWC).flatten(0, 1)
        return states_NC, replace(state, at_B=state.at_B + 1)

    def now(self, place_N1: Tensor, state: KVCache, dtype: torch.dtype) -> StepContext:
        row_N1 = torch.arange(len(place_N1), dtype=torch.int32, device=place_N1.device)[:, None]
        state.who_NK.scatter_(1, place_N1, row_N1)
        if state.stay:
            return StepContext(place_N1, AttentionMask(), state.who_NK)
        look: AttentionMask = self.layers[0].attention.sublayer.glance(place_N1, state.capacity, dtype)  # type: ignore[union-attr,operator]
        return StepContext(place_N1, look)

    @property
    def narrowest(self) -> int:
        """Width of a head's keys or values."""
        return min(self.settings.key_width, self.settings.head_width)


class Transformer(Seq2Seq):
    """Source rows in, target states out; `project` turns states into logits."""

    decoder: Decoder

    def __init__(self, settings: TransformerSettings, *, source_size: int, target_size: int, joint: bool) -> None:
        super().__init__()
        settings.check()
        self.settings = settings
        same = joint and settings.tied
        size = source_size if same else target_size  # tags are read, and never said
        table = nn.Embedding(size, settings.width)
        self.decoder = Decoder(settings, table, cross=True)  # the first: a table that both read is called by its name
        self.encoder = Encoder(settings, table if same else nn.Embedding(source_size, settings.width))
        self.project = nn.Linear(settings.width, size, bias=False)
        self.spoken = target_size
        initialize_parameters(self)
        if settings.tied:
            self.project.weight = table.weight

    @property
    def indexable(self) -> bool:
        """Whether a search may leave its caches where they are: all of the past counts, and alike."""
        full = self.settings.decoder_attention == "full"
        return full and self.settings.decoder_scheme.relate.needs == "nothing"

    def forward(self, batch: Batch) -> Tensor:
        """States of every target position, before the projection to the vocabulary: states_BTC."""
        source = RowLayout.of_source(batch)
        memory_BSC = self.encoder(batch.source_BS, source)
        out: Tensor = self.decoder(batch.target_in_BT, RowLayout.of_target(batch), memory_BSC, source)
        return out

    def alignment(self, batch: Batch) -> Tensor:
        source = RowLayout.of_source(batch)
        memory_BSC = self.encoder(batch.source_BS, source)
        return self.decoder.looks(batch.target_in_BT, RowLayout.of_target(batch), memory_BSC, source)

    def start(
        self, source_BS: Tensor, keep_BS: Tensor, depth_BS: Tensor | None = None, tree_BSS: Tensor | None = None
    ) -> KVCache:
        """Read the sources, one to a row, and stand before the first target token."""
        rows = RowLayout.one_each(keep_BS, depth_BS, tree_BSS)
        return self.decoder.start(len(source_BS), self.encoder(source_BS, rows), rows)
