"""The Transformer on packed rows: encoder, causal decoder with cross-attention, tied embeddings (Vaswani 2017).

Shapes   B rows   S source width   T target width   C model width   N rows of a search (B sentences x W beams)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from dragoman.kernels.attention import KeyValue
from dragoman.kernels.masks import AttentionMask, RowLayout, make_additive_mask, make_cross_attention_mask
from dragoman.models.base import Seq2Seq, initialize_parameters
from dragoman.models.kv_cache import KVCache
from dragoman.models.settings import TransformerSettings
from dragoman.modules.attention import CrossAttention, SelfAttention, StepContext
from dragoman.modules.dropout import Dropout, LayerDropout, WordDropout
from dragoman.modules.feedforward import FEEDFORWARDS, FeedForward, Residual, Sublayer
from dragoman.modules.linear import to_autocast_dtype
from dragoman.modules.norms import NORMS
from dragoman.modules.positions import POSITIONS, PositionScheme
from dragoman.types import Batch

CAPACITY_STEP = 16  # a cache grows by full SIMD vectors, so that masked positions change no sum
SMALL_PRODUCT = 400  # multiply-adds below which PyTorch's products on a CPU round differently


def wrap_residual(sublayer: Sublayer, settings: TransformerSettings) -> Residual[Sublayer]:
    """Return a sublayer with its norm, residual connection and dropout."""
    norm = NORMS[settings.norm](settings.width)
    return Residual(sublayer, norm, norm_place=settings.norm_place, skip=settings.residual, dropout=settings.dropout)


def make_feedforward(settings: TransformerSettings) -> Residual[FeedForward] | None:
    """Return the feed-forward sublayer, or None if the model has none."""
    kind, inner = FEEDFORWARDS[settings.activation], settings.feedforward_width or 4 * settings.width
    return wrap_residual(kind(settings.width, inner, settings.activation_dropout), settings) if kind else None


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward network, each with a residual connection."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        scheme = POSITIONS[settings.position]
        self.attention = wrap_residual(SelfAttention(settings, scheme.relate, bidirectional=True), settings)
        self.feedforward = make_feedforward(settings)

    def forward(self, x_BSC: Tensor, rows: RowLayout, mask: AttentionMask) -> Tensor:
        x_BSC = self.attention(x_BSC, rows.real_BT, rows.position_BT, mask)
        out: Tensor = self.feedforward(x_BSC, rows.real_BT) if self.feedforward else x_BSC
        return out


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention if there is a source, and feed-forward network."""

    def __init__(self, settings: TransformerSettings, *, cross: bool) -> None:
        super().__init__()
        self.attention = wrap_residual(
            SelfAttention(settings, settings.decoder_scheme.relate, bidirectional=False), settings
        )
        self.cross = wrap_residual(CrossAttention(settings), settings) if cross else None
        self.feedforward = make_feedforward(settings)

    def project_memory(self, memory_BSC: Tensor) -> KeyValue | None:
        """Return the keys and values of the source for this layer."""
        return self.cross.sublayer.project_memory(memory_BSC) if self.cross else None

    def forward(
        self, x_BTC: Tensor, rows: RowLayout, mask: AttentionMask, memory_BSC: Tensor | None, cross_mask: AttentionMask
    ) -> Tensor:
        x_BTC = self.attention(x_BTC, rows.real_BT, rows.position_BT, mask)
        if self.cross and memory_BSC is not None:
            x_BTC = self.cross.wrap(x_BTC, rows.real_BT, self.cross.sublayer.attend_states, memory_BSC, cross_mask)
        return self.feedforward(x_BTC, rows.real_BT) if self.feedforward else x_BTC

    def step(
        self, x_BWC: Tensor, cache: KeyValue, context: StepContext, memory: KeyValue | None, cross_mask: AttentionMask
    ) -> Tensor:
        """Compute one token per row. The W rows of a sentence attend to its source together, as W queries."""
        x_N1C = self.attention.wrap(x_BWC.flatten(0, 1)[:, None], None, self.attention.sublayer.step, cache, context)
        x_BWC = x_N1C.view_as(x_BWC)
        if self.cross and memory:
            x_BWC = self.cross(x_BWC, None, memory, cross_mask)
        return self.feedforward(x_BWC, None) if self.feedforward else x_BWC

    def compute_alignment(
        self, x_BTC: Tensor, rows: RowLayout, mask: AttentionMask, memory: KeyValue, cross_mask: AttentionMask
    ) -> Tensor:
        """Return the cross-attention weights, averaged over the heads: weight_BTS."""
        assert self.cross
        x_BTC = self.cross.normalize_input(self.attention(x_BTC, rows.real_BT, rows.position_BT, mask), rows.real_BT)
        return self.cross.sublayer.weights(x_BTC, memory, cross_mask).float().mean(1)


def make_layers(make: Callable[[], nn.Module], depth: int, *, shared: bool) -> nn.ModuleList:
    """Return `depth` layers or, if shared, one layer `depth` times."""
    return nn.ModuleList([make()] * depth if shared else [make() for _ in range(depth)])


class TransformerStack(nn.Module):
    """The common part of encoder and decoder: embeddings, layers and a final norm."""

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

    def make_mask(self, rows: RowLayout) -> AttentionMask:
        """Return the self-attention mask of these rows, which all layers share."""
        mask: AttentionMask = self.layers[0].attention.sublayer.make_mask(rows)  # type: ignore[union-attr,operator]
        return mask


class Encoder(TransformerStack):
    """Return one state per source token."""

    def __init__(self, settings: TransformerSettings, embedding: nn.Embedding) -> None:
        layers = make_layers(lambda: EncoderLayer(settings), settings.encoder_depth, shared=settings.shared)
        scheme = POSITIONS[settings.position]
        super().__init__(settings, embedding, scheme, layers, word_dropout=settings.source_word_dropout)

    def forward(self, ids_BS: Tensor, rows: RowLayout) -> Tensor:
        x_BSC, mask = self.embed(ids_BS, rows), self.make_mask(rows)
        for layer in self.layers:
            x_BSC = self.bypass(x_BSC, layer(x_BSC, rows, mask))
        out: Tensor = self.norm(x_BSC, rows.real_BT)
        return out


class Decoder(TransformerStack):
    """Return one state per target token, made of the tokens up to it and of the source, if there is one."""

    def __init__(self, settings: TransformerSettings, embedding: nn.Embedding, *, cross: bool) -> None:
        layers = make_layers(
            lambda: DecoderLayer(settings, cross=cross), settings.decoder_depth, shared=settings.shared
        )
        scheme = settings.decoder_scheme
        super().__init__(settings, embedding, scheme, layers, word_dropout=settings.target_word_dropout)

    def forward(
        self, ids_BT: Tensor, rows: RowLayout, memory_BSC: Tensor | None = None, source: RowLayout | None = None
    ) -> Tensor:
        x_BTC, mask, cross_mask = self.prepare(ids_BT, rows, source)
        for layer in self.layers:
            x_BTC = self.bypass(x_BTC, layer(x_BTC, rows, mask, memory_BSC, cross_mask))
        out: Tensor = self.norm(x_BTC, rows.real_BT)
        return out

    def prepare(
        self, ids_BT: Tensor, rows: RowLayout, source: RowLayout | None
    ) -> tuple[Tensor, AttentionMask, AttentionMask]:
        cross_mask = make_cross_attention_mask(rows, source) if source else AttentionMask()
        return self.embed(ids_BT, rows), self.make_mask(rows), cross_mask

    @staticmethod
    def project_memory(layer: nn.Module, memory_BSC: Tensor | None) -> KeyValue | None:
        return None if memory_BSC is None else layer.project_memory(memory_BSC)  # type: ignore[operator]

    def compute_alignment(self, ids_BT: Tensor, rows: RowLayout, memory_BSC: Tensor, source: RowLayout) -> Tensor:
        """Return cross-attention weights, the mean over the heads of the layer that aligns best."""
        x_BTC, mask, cross_mask = self.prepare(ids_BT, rows, source)
        *lower, aligning = self.layers[: self.settings.alignment_layer + 1]
        for layer in lower:
            x_BTC = layer(x_BTC, rows, mask, memory_BSC, cross_mask)
        weights: Tensor = aligning.compute_alignment(  # type: ignore[operator]
            x_BTC, rows, mask, self.project_memory(aligning, memory_BSC), cross_mask
        )
        return weights

    def start(self, rows: int, memory_BSC: Tensor | None = None, source: RowLayout | None = None) -> KVCache:
        """Return the state before the first target token of so many rows."""
        like = self.embedding.weight if memory_BSC is None else memory_BSC
        caches = [layer.attention.sublayer.make_empty_cache(rows, like) for layer in self.layers]  # type: ignore[union-attr,operator]
        mask = make_cross_attention_mask(source, source) if source else AttentionMask()
        if mask.allowed is not None:
            mask = AttentionMask(bias=make_additive_mask(mask.allowed, like.dtype))
        length_B = torch.zeros(rows, dtype=torch.long, device=like.device)
        memory = [self.project_memory(layer, memory_BSC) for layer in self.layers]
        memory = [pair and (pair[0].contiguous(), pair[1].contiguous()) for pair in memory]
        return KVCache(memory, mask, caches, length_B, torch.zeros(rows, 0, dtype=torch.int32, device=like.device))

    def step(self, token_N: Tensor, state: KVCache) -> tuple[Tensor, KVCache]:
        """Return the states after one more token per row, states_NC, and the new cache."""
        if not state.indirect and int(state.length_B.max()) >= state.capacity:
            state = state.reserve(CAPACITY_STEP * max(-(-SMALL_PRODUCT // (CAPACITY_STEP * self.min_head_width)), 1))
        position_N1 = state.length_B.repeat_interleave(len(token_N) // len(state.length_B))[:, None]
        x_N1C = self.embed(token_N[:, None], RowLayout(torch.ones_like(position_N1), position_N1))
        x_BWC = x_N1C.view(len(state.length_B), -1, x_N1C.size(-1))
        context = self.make_step_context(position_N1, state, x_N1C.dtype)
        for layer, memory, cache in zip(self.layers, state.memory, state.caches, strict=True):
            x_BWC = layer.step(x_BWC, cache, context, memory, state.mask)  # type: ignore[operator]
        states_NC: Tensor = self.norm(x_BWC).flatten(0, 1)
        return states_NC, replace(state, length_B=state.length_B + 1)

    def make_step_context(self, position_N1: Tensor, state: KVCache, dtype: torch.dtype) -> StepContext:
        """Return what all layers share in this step, and enter the new tokens in the table of rows."""
        row_N1 = torch.arange(len(position_N1), dtype=torch.int32, device=position_N1.device)[:, None]
        state.beam_indices_NK.scatter_(1, position_N1, row_N1)
        if state.indirect:
            return StepContext(position_N1, AttentionMask(), state.beam_indices_NK)
        mask: AttentionMask = self.layers[0].attention.sublayer.make_step_mask(position_N1, state.capacity, dtype)  # type: ignore[union-attr,operator]
        return StepContext(position_N1, mask)

    @property
    def min_head_width(self) -> int:
        """The smaller width of a head's keys or values."""
        return min(self.settings.key_width, self.settings.head_width)


class Transformer(Seq2Seq):
    """The encoder-decoder Transformer; `project` maps states to logits."""

    decoder: Decoder

    def __init__(self, settings: TransformerSettings, *, source_size: int, target_size: int, joint: bool) -> None:
        super().__init__()
        settings.check()
        self.settings = settings
        same = joint and settings.tied
        size = source_size if same else target_size  # tags are read, never generated
        table = nn.Embedding(size, settings.width)
        self.decoder = Decoder(settings, table, cross=True)  # first, so that a shared table is named after it
        self.encoder = Encoder(settings, table if same else nn.Embedding(source_size, settings.width))
        self.project = nn.Linear(settings.width, size, bias=False)
        self.output_size = target_size
        initialize_parameters(self)
        if settings.tied:
            self.project.weight = table.weight

    @property
    def supports_indirect_cache(self) -> bool:
        """Whether an indirect KV cache can be used: every past token is attended to, whatever its distance."""
        full = self.settings.decoder_attention == "full"
        return full and self.settings.decoder_scheme.relate.needs == "nothing"

    def forward(self, batch: Batch) -> Tensor:
        """Return the states of every target position before the projection to the vocabulary: states_BTC."""
        source = RowLayout.from_source(batch)
        memory_BSC = self.encoder(batch.source_BS, source)
        out: Tensor = self.decoder(batch.target_in_BT, RowLayout.from_target(batch), memory_BSC, source)
        return out

    def alignment(self, batch: Batch) -> Tensor:
        source = RowLayout.from_source(batch)
        memory_BSC = self.encoder(batch.source_BS, source)
        return self.decoder.compute_alignment(batch.target_in_BT, RowLayout.from_target(batch), memory_BSC, source)

    def start(
        self, source_BS: Tensor, keep_BS: Tensor, depth_BS: Tensor | None = None, tree_BSS: Tensor | None = None
    ) -> KVCache:
        """Encode the sources, one per row, and return the state before the first target token."""
        rows = RowLayout.from_padding_mask(keep_BS, depth_BS, tree_BSS)
        return self.decoder.start(len(source_BS), self.encoder(source_BS, rows), rows)
