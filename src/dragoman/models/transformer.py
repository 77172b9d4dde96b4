"""The Transformer (Vaswani 2017): encoder, causal decoder with cross-attention, and embeddings that may be tied.

A batch consists of rows with several sentences each (packed rows) or with one; a `RowLayout` has the segment and the
position of every token. In a search, `Decoder.step` computes one token per hypothesis with a KV cache.

Shapes   B rows, or sentences   S source length   T target length   C model width   N hypotheses in a search
         W hypotheses per sentence (N = B * W)   K positions of a cache
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from dragoman.config.settings import Fraction, Registries, setting
from dragoman.errors import UserError
from dragoman.kernels.attention import (
    KERNELS,
    AttentionMask,
    KeyValue,
    RowLayout,
    make_additive_mask,
    make_cross_attention_mask,
)
from dragoman.models.base import BaseModelSettings, KVCache, Seq2Seq
from dragoman.modules.attention import CrossAttention, SelfAttention, StepContext
from dragoman.modules.copying import CopyAttention, append_copy_distribution
from dragoman.modules.dropout import Dropout, LayerDropout, WordDropout
from dragoman.modules.feedforward import FEEDFORWARDS, NORM_PLACES, FeedForwardSettings, Residual, Sublayer
from dragoman.modules.norms import NORMS
from dragoman.modules.patterns import PATTERNS, AttentionSettings
from dragoman.modules.positions import POSITIONS, PositionScheme
from dragoman.types import Batch

# A cache grows by multiples of this number of positions. They fill SIMD vectors, so that the number of masked positions
# does not change how sums are rounded.
CAPACITY_STEP = 16
SMALL_PRODUCT = 400  # matrix products with fewer multiplications are rounded differently by PyTorch on a CPU


class TransformerSettings(FeedForwardSettings, AttentionSettings, BaseModelSettings):
    """The settings of a Transformer."""

    kind: Literal["transformer"] = "transformer"
    shared: bool = setting(False, "share the weights of one layer among all layers of a stack")
    dropout: Fraction = setting(0.1, "dropout rate of embeddings and of each sublayer's output")
    source_word_dropout: Fraction = setting(0.0, "probability of zeroing a source token's embedding, not its position")
    layer_dropout: Fraction = setting(0.0, "probability of skipping a layer, sampled for each row of a batch")
    norm: str = setting("layer", "normalization of the token states")
    norm_place: str = setting("pre", "normalize before (pre) or after (post) each sublayer")
    residual: Literal["encoder", "decoder"] | bool = setting(
        True, "residual connections: add each sublayer's input to its output; of both sides, or of one only"
    )
    output_bias: bool = setting(False, "add a bias to every logit, as MarianMT models do")
    compiles: ClassVar[bool] = True
    checked_choices: ClassVar[tuple[str, ...]] = ("norm",)

    @classmethod
    def registries(cls) -> Registries:
        return {
            "norm": NORMS,
            "norm_place": NORM_PLACES,
            "activation": FEEDFORWARDS,
            "kernel": KERNELS,
            "position": POSITIONS,
            "attention": PATTERNS,
            "decoder_attention": {name: pattern for name, pattern in PATTERNS.items() if pattern.causal},
        }

    def check(self) -> None:
        for name in ("width", "query_width", "value_width"):
            if getattr(self, name) % self.heads:
                raise UserError(
                    f"model.{name} must be a multiple of model.heads, got {getattr(self, name)} and {self.heads} heads"
                )
        causal = self.registries()["decoder_attention"]
        if self.decoder_attention in PATTERNS and self.decoder_attention not in causal:
            raise UserError(
                f"model.decoder_attention={self.decoder_attention} attends to later tokens, which a decoder must not; "
                f"choose one of: {', '.join(causal)}"
            )
        super().check()
        scheme = POSITIONS[self.position]
        scheme.embedding.check(self)
        scheme.attention.check(self)
        for name, part in (("attention", scheme.attention), ("decoder_attention", self.decoder_scheme.attention)):
            if part.needed_distance not in PATTERNS[getattr(self, name)].supported_distances:
                raise UserError(
                    f"model.{name}={getattr(self, name)} does not support the relative positions of "
                    f"model.position={self.position}; choose another position, such as sinusoidal"
                )
        if FEEDFORWARDS[self.activation] is None:
            self.reject_unused(f"a model with model.activation={self.activation}", "activation_dropout")
        if not self.projections and (self.query_width or self.value_width):
            raise UserError("model.projections=false leaves queries, keys and values unprojected; omit their widths")
        if not isinstance(self.residual, bool) and self.kind != "transformer":
            raise UserError(
                f"model.residual={self.residual} is a choice between the two sides of model.kind=transformer, and "
                f"model.kind={self.kind} has residual connections on one side only; write true or false"
            )
        if not self.projections:
            self.reject_unused("a model with model.projections=false, which has none at all", "output_projection")
        if self.output_bias and self.copying:
            raise UserError("model.output_bias=true does not work with model.copying=true; leave one of them out")
        if not self.output_projection and (self.value_width or self.width) != self.width:
            raise UserError(
                f"model.output_projection=false needs values of the width of the token states, got "
                f"model.value_width={self.value_width} and model.width={self.width}; leave value_width out"
            )

    def has_residual(self, side: str) -> bool:
        """Return whether the layers of a side, "encoder" or "decoder", have residual connections."""
        return self.residual in (True, side)

    @property
    def decoder_scheme(self) -> PositionScheme:
        """The position scheme of the decoder: sinusoidal if that of the encoder needs features, which targets lack."""
        scheme = POSITIONS[self.position]
        return POSITIONS["sinusoidal"] if scheme.source_features else scheme

    @property
    def layout(self) -> str:
        """How rows are filled: "packed" with sentences, or "padded" if an attention pattern allows only one per row."""
        patterns = (PATTERNS[self.attention], PATTERNS[self.decoder_attention])
        return "packed" if all(pattern.packable for pattern in patterns) else "padded"

    @property
    def alignment_layer(self) -> int:
        """The decoder layer, counted from 0, whose cross-attention serves as word alignment.

        It is the penultimate layer, as in Garg et al. (2019), or the last one of two: on the phrasebook, the first of
        two layers finds 81 % of the links between words, and the last 98 % (docs/LOG.md).
        """
        return self.decoder_depth - (1 if self.decoder_depth <= 2 else 2)

    @property
    def length_limit(self) -> int | None:
        limited = POSITIONS[self.position].embedding.has_max_length or PATTERNS[self.attention].has_max_length
        return self.max_length if limited else None

    @property
    def source_features(self) -> tuple[str, ...]:
        scheme = POSITIONS.get(self.position)
        return scheme.source_features if scheme else ()


class TransformerLayer(nn.Module):
    """Self-attention, cross-attention if `cross`, and a feed-forward network, each with norm, dropout and residual."""

    def __init__(
        self, settings: TransformerSettings, scheme: PositionScheme, *, bidirectional: bool, cross: bool = False
    ) -> None:
        super().__init__()

        skip = settings.has_residual("encoder" if bidirectional else "decoder")

        def wrap(sublayer: Sublayer) -> Residual[Sublayer]:
            norm, place = NORMS[settings.norm](settings), settings.norm_place
            return Residual(sublayer, norm, norm_place=place, skip=skip, dropout=settings.dropout)

        self.attention = wrap(SelfAttention(settings, scheme.attention, bidirectional=bidirectional))
        self.cross = wrap(CrossAttention(settings)) if cross else None
        feedforward = FEEDFORWARDS[settings.activation]
        self.feedforward = wrap(feedforward(settings)) if feedforward else None

    def forward(
        self,
        x_BTC: Tensor,
        rows: RowLayout,
        mask: AttentionMask,
        memory_BSC: Tensor | None = None,
        cross_mask: AttentionMask | None = None,
    ) -> Tensor:
        x_BTC = self.attention(x_BTC, rows.real_BT, rows.position_BT, mask)
        if self.cross:
            x_BTC = self.cross(x_BTC, rows.real_BT, memory_BSC, cross_mask)
        return self.feedforward(x_BTC, rows.real_BT) if self.feedforward else x_BTC

    def step(
        self, x_BWC: Tensor, cache: KeyValue, context: StepContext, memory: KeyValue | None, cross_mask: AttentionMask
    ) -> Tensor:
        """Return the states of one new token per hypothesis, and add its keys and values to the cache.

        The W hypotheses of a sentence attend to its source together, as W queries.
        """
        x_N1C, attention = x_BWC.flatten(0, 1)[:, None], self.attention
        x_BWC = attention(x_N1C, None, cache, context, function=attention.sublayer.step).view_as(x_BWC)
        if self.cross:
            x_BWC = self.cross(x_BWC, None, memory, cross_mask)
        return self.feedforward(x_BWC, None) if self.feedforward else x_BWC

    def compute_alignment(
        self, x_BTC: Tensor, rows: RowLayout, mask: AttentionMask, memory_BSC: Tensor, cross_mask: AttentionMask
    ) -> Tensor:
        """Return the cross-attention weights of the layer, averaged over its heads: weight_BTS."""
        assert self.cross
        x_BTC = self.cross.normalize_input(self.attention(x_BTC, rows.real_BT, rows.position_BT, mask), rows.real_BT)
        return self.cross.sublayer.compute_weights(x_BTC, memory_BSC, cross_mask).float().mean(1)


class TransformerStack(nn.Module):
    """The common part of encoder and decoder: embeddings, layers and a final normalization."""

    __call__: Callable[..., Tensor]
    layers: Sequence[TransformerLayer]
    causal = False  # whether tokens attend to earlier tokens only

    def __init__(self, settings: TransformerSettings, embedding: nn.Embedding, *, cross: bool = False) -> None:
        super().__init__()
        self.settings, is_decoder = settings, self.causal
        scheme = settings.decoder_scheme if is_decoder else POSITIONS[settings.position]
        depth = settings.decoder_depth if is_decoder else settings.encoder_depth
        make_layer = partial(TransformerLayer, settings, scheme, bidirectional=not is_decoder, cross=cross)
        layers = [make_layer()] * depth if settings.shared else [make_layer() for _ in range(depth)]
        self.layers = nn.ModuleList(layers)  # type: ignore[assignment]
        self.embedding = embedding
        self.word_dropout = WordDropout(settings.target_word_dropout if is_decoder else settings.source_word_dropout)
        self.layer_dropout = LayerDropout(settings.layer_dropout)
        self.position = scheme.embedding(settings)
        self.dropout = Dropout(settings.dropout)
        # Layers with `post` already normalize their output.
        self.norm = NORMS[settings.norm if settings.norm_place == "pre" else "none"](settings)

    def embed(self, ids_BT: Tensor, rows: RowLayout) -> Tensor:
        """Return the input of the first layer: embeddings, positions and dropout."""
        x_BTC = self.word_dropout(self.embedding(ids_BT) * math.sqrt(self.settings.width), rows.visible_BT)
        x_BTC, device = self.dropout(self.position(x_BTC, rows)), x_BTC.device.type
        # With autocast, activations have its lower precision from here on: in float32, elementwise operations would
        # double the memory traffic of a GPU. On a CPU, activations stay in its caches, so there is nothing to gain.
        if device != "cpu" and torch.is_autocast_enabled(device):
            x_BTC = x_BTC.to(torch.get_autocast_dtype(device))
        return x_BTC

    @property
    def attention(self) -> SelfAttention:
        """The self-attention of the first layer, which makes the mask for all layers."""
        return self.layers[0].attention.sublayer


class Encoder(TransformerStack):
    """A stack of layers that returns one state per source token."""

    def forward(self, ids_BS: Tensor, rows: RowLayout) -> Tensor:
        x_BSC, mask = self.embed(ids_BS, rows), self.attention.make_mask(rows)
        for layer in self.layers:
            x_BSC = self.layer_dropout(x_BSC, layer(x_BSC, rows, mask))
        return self.norm(x_BSC, rows.real_BT)


class Decoder(TransformerStack):
    """A stack of causal layers that returns one state per target token, with cross-attention if there is a source.

    With the setting `copying`, its states also have the copy distribution (modules/copying.py).
    """

    causal = True

    def __init__(self, settings: TransformerSettings, embedding: nn.Embedding, *, cross: bool = False) -> None:
        super().__init__(settings, embedding, cross=cross)
        self.copy_attention = CopyAttention(settings.width) if settings.copying else None

    def forward(
        self,
        ids_BT: Tensor,
        rows: RowLayout,
        memory_BSC: Tensor | None = None,
        source: RowLayout | None = None,
        source_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the states of all tokens. `source_BS` has the tokens of the source, which only copying needs."""
        states_BTC = self.compute_states(ids_BT, rows, memory_BSC, source)
        if self.copy_attention is None:
            return states_BTC
        assert memory_BSC is not None
        assert source is not None
        assert source_BS is not None
        weight_BTS = self.compute_copy_weights(states_BTC, rows, memory_BSC, source)
        return append_copy_distribution(states_BTC, weight_BTS, source_BS, self.embedding)

    def compute_copy_weights(
        self, states_BTC: Tensor, rows: RowLayout, memory_BSC: Tensor, source: RowLayout
    ) -> Tensor:
        """Return the weights of the copy attention: weight_BTS."""
        assert self.copy_attention is not None
        mask = make_cross_attention_mask(rows, source)
        return self.copy_attention(states_BTC, self.copy_attention.compute_keys(memory_BSC), mask)

    def compute_states(
        self, ids_BT: Tensor, rows: RowLayout, memory_BSC: Tensor | None = None, source: RowLayout | None = None
    ) -> Tensor:
        """Return the states of all tokens without a copy distribution."""
        x_BTC, mask = self.embed(ids_BT, rows), self.attention.make_mask(rows)
        cross_mask = make_cross_attention_mask(rows, source) if source else None
        for layer in self.layers:
            x_BTC = self.layer_dropout(x_BTC, layer(x_BTC, rows, mask, memory_BSC, cross_mask))
        return self.norm(x_BTC, rows.real_BT)

    def compute_alignment(
        self, ids_BT: Tensor, rows: RowLayout, memory_BSC: Tensor, source: RowLayout, layer_index: int
    ) -> Tensor:
        """Return the cross-attention weights of a layer, counted from 0, averaged over its heads: weight_BTS."""
        x_BTC, mask = self.embed(ids_BT, rows), self.attention.make_mask(rows)
        cross_mask = make_cross_attention_mask(rows, source)
        *lower, alignment_layer = self.layers[: layer_index + 1]
        for layer in lower:
            x_BTC = layer(x_BTC, rows, mask, memory_BSC, cross_mask)
        return alignment_layer.compute_alignment(x_BTC, rows, mask, memory_BSC, cross_mask)

    def start(
        self,
        rows: int,
        memory_BSC: Tensor | None = None,
        source: RowLayout | None = None,
        source_BS: Tensor | None = None,
    ) -> KVCache:
        """Return the state before the first target token, with this number of rows and an empty cache."""
        like = self.embedding.weight if memory_BSC is None else memory_BSC  # has the dtype and device of the state
        mask = make_cross_attention_mask(source, source) if source else AttentionMask()  # hides padding of the source
        if mask.allowed is not None:
            mask = AttentionMask(bias=make_additive_mask(mask.allowed, like.dtype))
        memory: list[KeyValue | None] = []
        for layer in self.layers:
            pair = None if memory_BSC is None or not layer.cross else layer.cross.sublayer.project_memory(memory_BSC)
            memory.append(pair and (pair[0].contiguous(), pair[1].contiguous()))
        if self.copy_attention and memory_BSC is not None and source_BS is not None:
            memory.append((self.copy_attention.compute_keys(memory_BSC), source_BS[:, None, :, None].clone()))
        heads, widths = self.settings.heads, (self.settings.head_key_width, self.settings.head_value_width)
        caches = [tuple(like.new_zeros(rows, heads, 0, width) for width in widths) for _ in self.layers]
        length_B = torch.zeros(rows, dtype=torch.long, device=like.device)
        return KVCache(memory, mask, caches, length_B, torch.zeros(rows, 0, dtype=torch.int32, device=like.device))  # type: ignore[arg-type]

    def step(self, token_N: Tensor, state: KVCache) -> tuple[Tensor, KVCache]:
        """Return the state of one new token per row and the new cache.

        states_NC is followed by the copy distribution if the model copies.
        """
        if not state.indirect and int(state.length_B.max()) >= state.caches[0][0].size(2):  # the cache is full
            # So many positions that the product of a query and a head's cache is not a SMALL_PRODUCT.
            narrowest = min(self.settings.head_key_width, self.settings.head_value_width)
            state = state.reserve(CAPACITY_STEP * math.ceil(SMALL_PRODUCT / (CAPACITY_STEP * narrowest)))
        position_N1 = state.length_B.repeat_interleave(len(token_N) // len(state.length_B))[:, None]
        x_N1C = self.embed(token_N[:, None], RowLayout(torch.ones_like(position_N1), position_N1))
        x_BWC = x_N1C.view(len(state.length_B), -1, x_N1C.size(-1))
        row_N1 = torch.arange(len(token_N), dtype=torch.int32, device=token_N.device)[:, None]
        state.beam_indices_NK.scatter_(1, position_N1, row_N1)  # each row writes the new token itself
        if state.indirect:
            context = StepContext(position_N1, AttentionMask(), state.beam_indices_NK)
        else:
            mask = self.attention.make_step_mask(position_N1, state.caches[0][0].size(2), x_N1C.dtype)
            context = StepContext(position_N1, mask)
        for layer, memory, cache in zip(self.layers, state.memory[: len(self.layers)], state.caches, strict=True):
            x_BWC = layer.step(x_BWC, cache, context, memory, state.mask)
        states_BWC = self.norm(x_BWC)
        if self.copy_attention and (copied := state.memory[-1]):
            key_B1SC, ids_B1S1 = copied
            weight_BWS = self.copy_attention(states_BWC, key_B1SC, state.mask)
            states_BWC = append_copy_distribution(states_BWC, weight_BWS, ids_B1S1[:, 0, :, 0], self.embedding)
        return states_BWC.flatten(0, 1), replace(state, length_B=state.length_B + 1)


class Transformer(Seq2Seq):
    """The encoder-decoder Transformer."""

    decoder: Decoder

    def __init__(self, settings: TransformerSettings, *, source_size: int, target_size: int, joint: bool) -> None:
        super().__init__()
        self.settings, self.output_size = settings, target_size
        one_table = joint and settings.tied
        # One table for both sides also has rows for tags of sources, such as the target language; outputs exclude them.
        # So do logits with copying, whose ids are those of sources.
        size = source_size if one_table or settings.copying else target_size
        table = nn.Embedding(size, settings.width)
        # The decoder comes first, so that one table for both sides gets the name decoder.embedding.
        self.decoder = Decoder(settings, table, cross=True)
        self.encoder = Encoder(settings, table if one_table else nn.Embedding(source_size, settings.width))
        tied_table = table if settings.tied else None
        self.add_projection_and_initialize(
            settings.width, size, tied_table, copying=settings.copying, output_bias=settings.output_bias
        )

    @property
    def supports_indirect_cache(self) -> bool:
        """Whether an indirect KV cache can be used: attention must be full and independent of relative positions."""
        full = self.settings.decoder_attention == "full"
        return full and self.settings.decoder_scheme.attention.needed_distance == "none"

    def forward(self, batch: Batch) -> Tensor:
        """Return the states of every target position before the projection to the vocabulary: states_BTC."""
        source = RowLayout.from_source(batch)
        memory_BSC = self.encoder(batch.source_BS, source)
        return self.decoder(batch.target_in_BT, RowLayout.from_target(batch), memory_BSC, source, batch.source_BS)

    @property
    def attention_layers(self) -> int:  # type: ignore[override]
        return self.settings.decoder_depth

    def compute_alignment(self, batch: Batch, layer: int | None = None) -> Tensor:
        source, target = RowLayout.from_source(batch), RowLayout.from_target(batch)
        memory_BSC = self.encoder(batch.source_BS, source)
        if layer is None and self.decoder.copy_attention:
            states_BTC = self.decoder.compute_states(batch.target_in_BT, target, memory_BSC, source)
            return self.decoder.compute_copy_weights(states_BTC, target, memory_BSC, source).float()
        layer_index = self.settings.alignment_layer if layer is None else layer
        return self.decoder.compute_alignment(batch.target_in_BT, target, memory_BSC, source, layer_index)

    def start(self, source_BS: Tensor, real_BS: Tensor, features: Mapping[str, Tensor] | None = None) -> KVCache:
        """Encode the sources, one per row, and return the state before the first target token."""
        rows = RowLayout.from_padding_mask(real_BS, features)
        return self.decoder.start(len(source_BS), self.encoder(source_BS, rows), rows, source_BS)
