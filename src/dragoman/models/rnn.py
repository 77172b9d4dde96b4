"""Recurrent encoder-decoders (`Rnn`), and recurrent decoders with a Transformer encoder (`Hybrid`).

A bridge computes the initial state of the decoder from the encoder. Without attention, the decoder sees the source only
through this state (Sutskever 2014). With attention and input feeding, it is the model of Luong (2015). With the context
as an input, attention precedes the cell, as in Bahdanau (2015). Batches of these models are padded, not packed
(`RowLayout.is_unpacked`): one sentence per row.

Shapes   B rows   S source length   T target length (in a RowLayout: of either side)   E embedding width
         N hypotheses in a search   W hypotheses per sentence (N = B * W)   K selected sentences   G width of all gates
         C width of a decoder state   M width of an encoder state, by default C   L layers
         P tensors of a layer's state   O output width   J width of a context and a decoder state, joined
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dragoman.config.settings import Count, Fraction, Layers, Registries, setting
from dragoman.errors import UserError
from dragoman.kernels.attention import RowLayout
from dragoman.models.base import BaseModelSettings, Seq2Seq, expand_to_rows
from dragoman.models.transformer import Encoder, TransformerSettings
from dragoman.modules.attention_scores import SCORES, EncodedSource, ScoreSettings, SourceAttention
from dragoman.modules.copying import append_copy_distribution
from dragoman.modules.dropout import Dropout, WordDropout, sample_dropout_mask
from dragoman.modules.feedforward import Linear
from dragoman.modules.recurrent import (
    CELLS,
    NONLINEARITIES,
    Cell,
    CellSettings,
    CellStack,
    RecurrentLayer,
    SentenceEnds,
    StackState,
)
from dragoman.types import Batch

Width = Annotated[int, Field(ge=0, le=65_536)]
ContextPlace = Literal["output", "input"]
CONTEXT_PLACE_TEXT = "where a step reads its context vector: after the cell, or (input) before it, as an input too"


class RnnSettings(CellSettings, ScoreSettings, BaseModelSettings):
    """The settings of a recurrent encoder-decoder."""

    kind: Literal["rnn"] = "rnn"
    initial_state: Literal["zero", "learned"] = setting("zero", "initial state of each recurrent cell")
    layers: Layers = setting(1, "number of layers of the encoder and of the decoder", ge=1)
    width: int = setting(512, "width of a state; each direction of a bidirectional encoder has half", ge=1, le=65_536)
    encoder_width: Width = setting(0, "width of an encoder state; 0: same as `width`")
    embedding_width: Width = setting(0, "width of the embeddings; 0: same as `width`")
    bidirectional: bool = setting(True, "the encoder reads the source in both directions")
    bridge: str = setting("linear", "how the encoder's final state becomes the decoder's initial state")
    attention: str = setting("additive", "score function of the decoder's attention to the source")
    attention_width: Width = setting(0, "width of additive, rank of reduced_rank scores; 0: same as `width`")
    context_place: ContextPlace = setting("output", CONTEXT_PLACE_TEXT)
    input_feeding: bool = setting(False, "feed the output of each step into the next step")
    dropout: Fraction = setting(0.2, "dropout rate of embeddings, between layers, and of the output")
    source_word_dropout: Fraction = setting(0.0, "probability of zeroing a source token's embedding")
    checked_choices: ClassVar[tuple[str, ...]] = ("cell", "attention")

    @classmethod
    def registries(cls) -> Registries:
        return {"cell": CELLS, "nonlinearity": NONLINEARITIES, "bridge": BRIDGES, "attention": SCORES}

    def check(self) -> None:
        super().check()
        if self.bidirectional and self.memory_width % 2:
            name = "encoder_width" if self.encoder_width else "width"
            raise UserError(
                f"model.bidirectional=true needs an even model.{name}, half for each direction; got {self.memory_width}"
            )
        for name, part in (("attention", SCORES[self.attention]), ("bridge", BRIDGES[self.bridge])):
            if part.needs_equal_widths and self.memory_width != self.width:
                raise UserError(
                    f"model.{name}={getattr(self, name)} needs encoder and decoder states of the same width, got "
                    f"model.encoder_width={self.encoder_width} and model.width={self.width}; leave encoder_width out"
                )
        if BRIDGES[self.bridge].reads_all_layers and self.encoder_depth != self.decoder_depth:
            raise UserError(
                f"model.bridge={self.bridge} needs as many encoder layers as decoder layers, got {self.encoder_depth} "
                f"and {self.decoder_depth}; set both by model.layers, or choose another bridge"
            )
        check_context_place(self, "attention")
        if not SCORES[self.attention].has_context and not BRIDGES[self.bridge].uses_encoder:
            raise UserError(
                f"with model.attention={self.attention} and model.bridge={self.bridge} the decoder never sees the "
                "source; change one of them"
            )

    @property
    def aligns(self) -> bool:  # see BaseModelSettings; False for the scores none and mean
        return SCORES[self.attention].aligns

    @property
    def embedded_width(self) -> int:  # the actual width of the embeddings
        return self.embedding_width or self.width

    @property
    def memory_width(self) -> int:  # the actual width of the encoder's states
        return self.encoder_width or self.width

    @property
    def output_width(self) -> int:
        """The width of the decoder's outputs, from which logits are computed: that of the embeddings, if tied."""
        return self.embedded_width if self.tied else self.width


def check_context_place(settings: RnnSettings | HybridSettings, score_setting: str) -> None:
    """Raise a UserError if there is no context that could be an input of the cell."""
    score = getattr(settings, score_setting)
    if settings.context_place == "input" and not SCORES[score].has_context:
        raise UserError(
            f"model.context_place=input needs attention to the source, but model.{score_setting}={score} computes no "
            "context; leave context_place out, or choose another score"
        )


class HybridSettings(CellSettings, ScoreSettings, TransformerSettings):
    """The settings of a hybrid: those of a Transformer, for the encoder, and those of the recurrent decoder."""

    kind: Literal["hybrid"] = "hybrid"  # type: ignore[assignment]
    decoder_layers: Count = setting(1, "number of recurrent decoder layers", le=1000)
    cell: str = setting("lstm", "recurrent cell of the decoder")
    score: str = setting("additive", "score function of the decoder's attention to the source")
    score_width: Width = setting(0, "width of additive, rank of reduced_rank scores; 0: same as decoder_width")
    decoder_width: Width = setting(0, "width of a decoder layer's state; 0: same as `width`")
    embedding_width: Width = setting(
        0, "width of target embeddings; 0: same as `width`, as one table for both sides requires"
    )
    context_place: ContextPlace = setting("output", CONTEXT_PLACE_TEXT)
    input_feeding: bool = setting(False, "feed the output of each step into the next step")
    compiles: ClassVar[bool] = False
    inapplicable_settings = ("decoder_attention", "output_bias")
    kind_in_words: ClassVar[str] = "a hybrid, whose decoder is recurrent"
    checked_choices: ClassVar[tuple[str, ...]] = ("norm", "cell", "score")

    @classmethod
    def registries(cls) -> Registries:
        return {**super().registries(), "cell": CELLS, "nonlinearity": NONLINEARITIES, "score": SCORES}

    def check(self) -> None:
        super().check()
        check_context_place(self, "score")

    @property
    def layout(self) -> str:
        return "padded"

    @property
    def aligns(self) -> bool:  # see BaseModelSettings; False for the scores none and mean
        return SCORES[self.score].aligns

    def make_decoder_settings(self) -> RnnSettings:
        common = {name: getattr(self, name) for name in type(self).model_fields if name in RnnSettings.model_fields}
        widths = {"width": self.decoder_width or self.width, "embedding_width": self.embedding_width or self.width}
        score = {"attention": self.score, "attention_width": self.score_width}
        return RnnSettings(**{**common, **widths, **score, "kind": "rnn"})


def make_cell_factory(settings: RnnSettings, *, learned_start: bool = True) -> Callable[[int, int], Cell]:
    """Return a function that makes a cell, given the widths of input and state.

    `learned_start` allows a learned initial state, if `initial_state` is "learned".
    """
    learned_start = learned_start and settings.initial_state == "learned"
    return partial(CELLS[settings.cell], settings, learned_start=learned_start)


def make_decoder_stack(settings: RnnSettings, *, learned_start: bool = True) -> CellStack:
    """Return the layers of the decoder, one cell each. The lowest cell reads embeddings."""
    make_cell, width = make_cell_factory(settings, learned_start=learned_start), settings.width
    higher_cells = [make_cell(width, width) for _ in range(settings.decoder_depth - 1)]
    return CellStack([make_cell(settings.embedded_width, width), *higher_cells], settings.dropout)


class TokenEmbedder(nn.Module):
    """The common part of recurrent encoders and decoders: embeddings with dropout."""

    def __init__(self, settings: RnnSettings, embedding: nn.Embedding, *, word_dropout: float) -> None:
        super().__init__()
        self.settings, self.embedding = settings, embedding
        self.word_dropout, self.dropout = WordDropout(word_dropout), Dropout(settings.dropout)

    def embed(self, ids: Tensor, visible: Tensor | None = None) -> Tensor:
        """Return the input of the first layer: embeddings, scaled by the root of their width, with dropout.

        Where `visible` is False, the embedding is zeroed: a consistency loss hides these tokens (training/loss.py).
        """
        x = self.word_dropout(self.embedding(ids) * math.sqrt(self.embedding.embedding_dim), visible)
        return self.dropout(x)


class RecurrentEncoder(TokenEmbedder):
    """A stack of recurrent layers that returns one state per source token."""

    def __init__(self, settings: RnnSettings, embedding: nn.Embedding) -> None:
        super().__init__(settings, embedding, word_dropout=settings.source_word_dropout)
        make_cell = make_cell_factory(settings)
        make_layer = partial(RecurrentLayer, width=settings.memory_width, bidirectional=settings.bidirectional)
        input_widths = [settings.embedded_width, *[settings.memory_width] * (settings.encoder_depth - 1)]
        self.layers = nn.ModuleList(make_layer(make_cell, input_width) for input_width in input_widths)

    def forward(self, ids_BS: Tensor, rows: RowLayout) -> Tensor:
        memory_BSM: Tensor = self.encode(ids_BS, rows)[0]
        return memory_BSM

    def encode(self, ids_BS: Tensor, rows: RowLayout) -> tuple[Tensor, StackState]:
        """Return the states of the top layer, memory_BSM, and the final states of all layers.

        A final state consists of the output, last_BM, and of the memory cell only if the bridge reads it.
        """
        ends, final = SentenceEnds(rows), []
        whole_state = BRIDGES[self.settings.bridge].reads_all_layers
        x_BSM = self.embed(ids_BS, rows.visible_BT)
        for index, layer in enumerate(self.layers):  # `embed` applies the dropout before the first layer
            x_BSM, last = layer(self.dropout(x_BSM) if index else x_BSM, ends, whole_state=whole_state)
            final.append(last)
        return x_BSM, final


class Bridge(nn.Module):
    """Compute the decoder's initial state from `final`, the final states of the encoder's layers.

    This base class is the bridge "none": it ignores the encoder and returns `initial`, which is zero or learned.
    """

    uses_encoder = False  # whether the initial state depends on the encoder
    needs_equal_widths = False  # whether encoder and decoder states must have the same width
    reads_all_layers = False  # whether it reads the whole state of each layer, not only the output of the top layer

    def __init__(self, settings: RnnSettings) -> None:
        super().__init__()
        self.depth, self.width = settings.decoder_depth, settings.width
        self.state_tensors = CELLS[settings.cell].state_tensors

    def forward(self, final: StackState, initial: StackState) -> StackState:  # noqa: ARG002 - the signature of all bridges
        return initial


class CopyBridge(Bridge):
    """Use the encoder's final output as the initial state of every decoder layer."""

    uses_encoder = True
    needs_equal_widths = True

    def forward(self, final: StackState, initial: StackState) -> StackState:  # noqa: ARG002 - the signature of all bridges
        return [(final[-1][0],) * self.state_tensors] * self.depth


class LinearBridge(Bridge):
    """Compute each decoder layer's initial state by a linear map of the encoder's final output, followed by tanh."""

    uses_encoder = True

    def __init__(self, settings: RnnSettings) -> None:
        super().__init__(settings)
        self.out = Linear(settings.memory_width, self.depth * self.state_tensors * self.width)

    def forward(self, final: StackState, initial: StackState) -> StackState:  # noqa: ARG002 - the signature of all bridges
        states_BLPC = torch.tanh(self.out(final[-1][0])).view(-1, self.depth, self.state_tensors, self.width)
        return [layer_BPC.unbind(1) for layer_BPC in states_BLPC.unbind(1)]


class LayersBridge(Bridge):
    """Start each decoder layer from the final state of the encoder layer of the same number (Sutskever 2014).

    The memory cell of an LSTM is handed on too. Of a bidirectional encoder, the final states of both directions are
    concatenated: that of the backward direction is its state at the first token.
    """

    uses_encoder = True
    needs_equal_widths = True
    reads_all_layers = True

    def forward(self, final: StackState, initial: StackState) -> StackState:  # noqa: ARG002 - the signature of all bridges
        return final


@dataclass(frozen=True)
class RnnState:
    """The state of a recurrent decoder in a search. The hypotheses of a sentence are in adjacent rows."""

    layers: StackState  # per layer: the tensors of its cell's state, one row per hypothesis
    source: EncodedSource | None = None  # stored once per sentence; a language model has none
    out_NO: Tensor | None = None  # output of the previous step, for input feeding

    def select(self, rows_N: Tensor) -> RnnState:
        """Return the state of these rows, in this order. All sentences must have the same number of rows."""
        layers = [tuple(part_NC.index_select(0, rows_N) for part_NC in layer) for layer in self.layers]
        out_NO = None if self.out_NO is None else self.out_NO.index_select(0, rows_N)
        return replace(self, layers=layers, out_NO=out_NO)

    def keep_sentences(self, sentences_K: Tensor) -> RnnState:
        assert self.source
        rows_N = expand_to_rows(sentences_K, len(self.layers[0][0]) // len(self.source.value_BSM))
        return replace(self.select(rows_N), source=self.source.keep_sentences(sentences_K))

    def replace_sentences(self, sentences_K: Tensor, fresh: RnnState) -> RnnState:
        assert self.source
        assert fresh.source
        rows_N = expand_to_rows(sentences_K, len(self.layers[0][0]) // len(self.source.value_BSM))
        layers = [
            tuple(old.index_copy(0, rows_N, new) for old, new in zip(old_layer, new_layer, strict=True))
            for old_layer, new_layer in zip(self.layers, fresh.layers, strict=True)
        ]
        out_NO = self.out_NO
        if out_NO is not None and fresh.out_NO is not None:
            out_NO = out_NO.index_copy(0, rows_N, fresh.out_NO)
        return RnnState(layers, self.source.replace_sentences(sentences_K, fresh.source), out_NO)

    def reset_finished(self, done_B: Tensor) -> RnnState:  # noqa: ARG002 - the signature of all states
        """Return the state unchanged: unlike a cache, it does not grow with every token of a finished sentence."""
        return self


class RecurrentDecoder(TokenEmbedder):
    """A stack of recurrent layers with attention to the source, which returns one output per target token.

    By default, one fused kernel computes all positions of the target, which then attend to the source at once. With
    input feeding, or with the context as an input of the cell, each position needs the output or the state of the
    previous one, so positions are computed one by one.
    """

    def __init__(self, settings: RnnSettings, embedding: nn.Embedding) -> None:
        super().__init__(settings, embedding, word_dropout=settings.target_word_dropout)
        width, memory_width = settings.width, settings.memory_width
        self.bridge = BRIDGES[settings.bridge](settings)
        self.stack = make_decoder_stack(settings, learned_start=not self.bridge.uses_encoder)
        score = SCORES[settings.attention](settings, width, memory_width, settings.attention_width or width)
        self.attention = SourceAttention(score, memory_width)
        self.join = Linear(self.attention.width + width, settings.output_width)
        gates = self.stack.cells[0].gates * width
        # Adds the previous output to the input of the lowest cell (input feeding).
        self.feed = Linear(settings.output_width, gates, bias=False) if settings.input_feeding else None
        # Adds the context vector of the step to the input of the lowest cell.
        has_input = settings.context_place == "input"
        self.feed_context = Linear(memory_width, gates, bias=False) if has_input else None

    def combine(self, joined_BTJ: Tensor) -> Tensor:
        """Return the outputs tanh(W [a; s] + b), given [a; s], context vectors and states."""
        return torch.tanh(self.join(joined_BTJ))

    def forward(
        self, ids_BT: Tensor, source: EncodedSource, states: StackState, visible_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs, out_BTO, and the attention weights, weight_BTS; None if there is no attention.

        The state of the top layer attends to the source after it has read a token or, if the context is an input of the
        cell, before it.
        """
        x_BTE = self.embed(ids_BT, visible_BT)
        if not self.feed and not self.feed_context:
            joined_BTJ, weight_BTS = self.attention(self.stack(x_BTE, states), source)
            return self.dropout(self.combine(joined_BTJ)), weight_BTS
        gates_TBG = self.stack.cells[0].project_input(x_BTE.transpose(0, 1).contiguous())
        weights, outputs = [], [self.make_first_output(len(x_BTE))]
        mask_BTO = None
        if self.training and self.dropout.rate:  # the masks of all steps are sampled at once, which is faster
            shape_BTO = (*x_BTE.shape[:2], self.settings.output_width)
            mask_BTO = sample_dropout_mask(shape_BTO, self.dropout.rate, like=gates_TBG)
        for step, gates_BG in enumerate(gates_TBG.unbind()):
            out_BO, weight_B1S, states = self.advance(gates_BG, outputs[-1], states, source)
            weights += [] if weight_B1S is None else [weight_B1S]
            outputs.append(out_BO if mask_BTO is None else out_BO * mask_BTO[:, step])
        return torch.stack(outputs[1:], 1), torch.cat(weights, 1) if weights else None

    def advance(
        self, gates_NG: Tensor, out_NO: Tensor | None, states: StackState, source: EncodedSource
    ) -> tuple[Tensor, Tensor | None, StackState]:
        """Advance by one token; return the output, the attention weights, weight_BWS, and the states of all layers.

        `gates_NG` is the projected input of the lowest cell; `out_NO` is the previous output.
        """
        if self.feed and out_NO is not None:
            gates_NG = gates_NG + self.feed(out_NO)
        if not self.feed_context:
            top_NC, states = self.stack.advance(gates_NG, states)
            joined_BWJ, weight_BWS = self.attend_in_rows(top_NC, source)
            return self.combine(joined_BWJ).flatten(0, 1), weight_BWS, states
        joined_BWJ, weight_BWS = self.attend_in_rows(states[-1][0], source)
        context_NM = joined_BWJ[..., : self.attention.width].flatten(0, 1)
        top_NC, states = self.stack.advance(gates_NG + self.feed_context(context_NM), states)
        return self.combine(torch.cat([context_NM, top_NC], -1)), weight_BWS, states

    def attend_in_rows(self, query_NC: Tensor, source: EncodedSource) -> tuple[Tensor, Tensor | None]:
        """Return the context and the query of each row, joined_BWJ, and the attention weights, weight_BWS.

        The W rows of a sentence attend to it together.
        """
        attended: tuple[Tensor, Tensor | None] = self.attention(
            query_NC.view(len(source.value_BSM), -1, query_NC.size(-1)), source
        )
        return attended

    def append_copies(self, out: Tensor, weight_BTS: Tensor | None, source: EncodedSource) -> Tensor:
        """Return the outputs of a decoder; if it copies, with its copy distribution (modules/copying.py)."""
        if not self.settings.copying:
            return out
        assert weight_BTS is not None
        assert source.ids_BS is not None
        return append_copy_distribution(out, weight_BTS, source.ids_BS, self.embedding)

    def make_first_output(self, rows: int) -> Tensor:
        """Return zeros as the previous output of the first step, for input feeding.

        They have the dtype and device of the embedding, because quantized engines replace the other weights.
        """
        return self.embedding.weight.new_zeros(rows, self.settings.output_width)

    def step(self, token_N: Tensor, state: RnnState) -> tuple[Tensor, RnnState]:
        """Return the output after one more token per row and the new state.

        out_NO is followed by the copy distribution if the model copies.
        """
        assert state.source
        gates_NG = self.stack.cells[0].project_input(self.embed(token_N))
        out_NO, weight_BWS, layers = self.advance(gates_NG, state.out_NO, state.layers, state.source)
        states = self.append_copies(out_NO, weight_BWS, state.source)
        return states, RnnState(layers, state.source, out_NO if self.feed else None)


class RecurrentLmDecoder(TokenEmbedder):
    """A recurrent decoder without a source, for a language model: one output per token, out_BTO."""

    def __init__(self, settings: RnnSettings, embedding: nn.Embedding) -> None:
        super().__init__(settings, embedding, word_dropout=settings.target_word_dropout)
        self.stack = make_decoder_stack(settings)
        widths = settings.width, settings.output_width
        self.out = Linear(*widths) if widths[0] != widths[1] else nn.Identity()

    def forward(self, ids_BT: Tensor, rows: RowLayout) -> Tensor:
        assert rows.is_unpacked
        x_BTE = self.embed(ids_BT, rows.visible_BT)
        return self.dropout(self.out(self.stack(x_BTE, self.stack.make_initial_state(len(ids_BT)))))

    def start(self, rows: int) -> RnnState:
        """Return the state before the first token, with this number of rows."""
        return RnnState(self.stack.make_initial_state(rows))

    def step(self, token_N: Tensor, state: RnnState) -> tuple[Tensor, RnnState]:
        """Return the output after one more token per row, out_NO, and the new state."""
        gates_NG = self.stack.cells[0].project_input(self.embed(token_N))
        top_NC, layers = self.stack.advance(gates_NG, state.layers)
        return self.out(top_NC), RnnState(layers)


class RecurrentSeq2Seq(Seq2Seq):
    """A recurrent decoder, and any encoder whose `encode` returns its states and final states for the bridge."""

    encoder: Any
    decoder: RecurrentDecoder

    def encode(self, source_BS: Tensor, rows: RowLayout) -> tuple[EncodedSource, StackState]:
        """Encode the sources; return what the decoder attends to, and the decoder's initial states."""
        memory_BSM, final = self.encoder.encode(source_BS, rows)
        # A copy, since continuous batching replaces the sources of a decoder state in place.
        copied_BS = source_BS.clone() if self.decoder.settings.copying else None
        source = self.decoder.attention.prepare(memory_BSM, rows.real_BT, copied_BS)
        return source, self.decoder.bridge(final, self.decoder.stack.make_initial_state(len(source_BS)))

    def forward(self, batch: Batch) -> Tensor:
        source, states = self.encode(batch.source_BS, RowLayout.from_source(batch))
        out_BTO, weight_BTS = self.decoder(batch.target_in_BT, source, states, batch.target_visible_BT)
        return self.decoder.append_copies(out_BTO, weight_BTS, source)

    def compute_alignment(self, batch: Batch, layer: int | None = None) -> Tensor:  # noqa: ARG002 - there is one attention
        source, states = self.encode(batch.source_BS, RowLayout.from_source(batch))
        _, weight_BTS = self.decoder(batch.target_in_BT, source, states)
        if weight_BTS is None:  # without attention, all source tokens have the same weight
            allowed_B1S = source.allowed_B1S.float()
            return (allowed_B1S / allowed_B1S.sum(-1, True)).expand(-1, batch.target_in_BT.size(1), -1)
        alignment_BTS: Tensor = weight_BTS.float()
        return alignment_BTS

    def start(self, source_BS: Tensor, real_BS: Tensor, features: Mapping[str, Tensor] | None = None) -> RnnState:
        """Encode the sources, with features of their tokens by name; return the state before the first target token."""
        source, states = self.encode(source_BS, RowLayout.from_padding_mask(real_BS, features))
        return RnnState(states, source, self.decoder.make_first_output(len(source_BS)) if self.decoder.feed else None)


class Rnn(RecurrentSeq2Seq):
    """A recurrent encoder and decoder; `project` maps outputs to logits."""

    def __init__(self, settings: RnnSettings, *, source_size: int, target_size: int, joint: bool) -> None:
        super().__init__()
        self.settings, self.output_size, self.aligns = settings, target_size, settings.aligns
        one_table = joint and settings.tied
        # One table for both sides also has rows for tags of sources, such as the target language; outputs exclude them.
        # So do logits with copying, whose ids are those of sources.
        size = source_size if one_table or settings.copying else target_size
        table = nn.Embedding(size, settings.embedded_width)
        # The decoder comes first, so that one table for both sides gets the name decoder.embedding.
        self.decoder = RecurrentDecoder(settings, table)
        source_table = table if one_table else nn.Embedding(source_size, settings.embedded_width)
        self.encoder = RecurrentEncoder(settings, source_table)
        tied_table = table if settings.tied else None
        self.add_projection_and_initialize(settings.output_width, size, tied_table, copying=settings.copying)


class HybridEncoder(Encoder):
    """A Transformer encoder whose states have the width of the decoder."""

    def __init__(self, settings: HybridSettings, embedding: nn.Embedding) -> None:
        super().__init__(settings, embedding)
        widths = settings.width, settings.make_decoder_settings().width
        self.out = Linear(*widths) if widths[0] != widths[1] else nn.Identity()

    def encode(self, ids_BS: Tensor, rows: RowLayout) -> tuple[Tensor, StackState]:
        """Return the states, memory_BSM, and their mean, which serves as the final state of a single layer."""
        memory_BSM: Tensor = self.out(self(ids_BS, rows))
        real_BS1 = rows.real_BT[..., None]
        mean_BM = memory_BSM.where(real_BS1, 0.0).sum(1) / real_BS1.sum(1).clamp(min=1)
        return memory_BSM, [(mean_BM,)]


class Hybrid(RecurrentSeq2Seq):
    """A Transformer encoder with a recurrent decoder, for small and fast models.

    The source is encoded only once, so a deep encoder is cheap. For each generated token of each beam, a few recurrent
    cells are computed instead of a stack of attention layers.
    """

    def __init__(self, settings: HybridSettings, *, source_size: int, target_size: int, joint: bool) -> None:
        super().__init__()
        self.settings, self.output_size, self.aligns = settings, target_size, settings.aligns
        decoder = settings.make_decoder_settings()
        one_table = joint and settings.tied and decoder.embedded_width == settings.width
        # One table for both sides also has rows for tags of sources, such as the target language; outputs exclude them.
        # So do logits with copying, whose ids are those of sources.
        size = source_size if one_table or settings.copying else target_size
        table = nn.Embedding(size, decoder.embedded_width)
        # The decoder comes first, so that one table for both sides gets the name decoder.embedding.
        self.decoder = RecurrentDecoder(decoder, table)
        self.encoder = HybridEncoder(settings, table if one_table else nn.Embedding(source_size, settings.width))
        tied_table = table if settings.tied else None
        self.add_projection_and_initialize(decoder.output_width, size, tied_table, copying=settings.copying)


BRIDGES: dict[str, type[Bridge]] = {
    "linear": LinearBridge,
    "copy": CopyBridge,
    "layers": LayersBridge,
    "none": Bridge,
}
