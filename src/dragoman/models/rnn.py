"""Recurrent encoder-decoders: the bottleneck model, attention, input feeding. One sentence to a row.

Shapes   B rows   S source width   T target width   E embedding width   C width of a state   O width of what is said
         V vocabulary   N rows of a search (B sentences x W beams)   G width of all gates
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.kernels.masks import RowLayout
from dragoman.models.base import Seq2Seq, expand_to_rows, initialize_parameters
from dragoman.models.settings import RnnSettings
from dragoman.modules.attention_scores import SCORES, EncodedSource, SourceAttention
from dragoman.modules.dropout import Dropout, WordDropout
from dragoman.modules.linear import Linear
from dragoman.modules.recurrent import CELLS, Cell, CellStack, RecurrentLayer, SentenceEnds, StackState
from dragoman.types import Batch


def make_cell_factory(settings: RnnSettings, *, learned: bool) -> Callable[[int, int], Cell]:
    return partial(CELLS[settings.cell], nonlinearity=settings.nonlinearity, learned=learned)


def make_decoder_stack(settings: RnnSettings, *, learned: bool) -> CellStack:
    """The decoder's cells, the lowest of which reads embeddings."""
    make, width = make_cell_factory(settings, learned=learned), settings.width
    higher = [make(width, width) for _ in range(settings.decoder_depth - 1)]
    return CellStack([make(settings.embedded_width, width), *higher], settings.dropout)


class EmbeddedModule(nn.Module):
    """Token ids to vectors of unit size, with dropout: what all of the following begin with."""

    def __init__(self, settings: RnnSettings, embedding: nn.Embedding, *, word_dropout: float) -> None:
        super().__init__()
        self.settings, self.embedding = settings, embedding
        self.words, self.dropout = WordDropout(word_dropout), Dropout(settings.dropout)

    def embed(self, ids: Tensor, seen: Tensor | None = None) -> Tensor:
        x = self.words(self.embedding(ids) * math.sqrt(self.embedding.embedding_dim), seen)
        out: Tensor = self.dropout(x)
        return out


class RecurrentEncoder(EmbeddedModule):
    """Source tokens in, one state for each out."""

    def __init__(self, settings: RnnSettings, embedding: nn.Embedding) -> None:
        super().__init__(settings, embedding, word_dropout=settings.source_word_dropout)
        make = make_cell_factory(settings, learned=settings.initial_state == "learned")
        widths = [settings.embedded_width, *[settings.width] * (settings.encoder_depth - 1)]
        self.layers = nn.ModuleList(
            RecurrentLayer(make, width, settings.width, bidirectional=settings.bidirectional) for width in widths
        )

    def forward(self, ids_BS: Tensor, rows: RowLayout) -> Tensor:
        memory_BSC: Tensor = self.read(ids_BS, rows)[0]
        return memory_BSC

    def read(self, ids_BS: Tensor, rows: RowLayout) -> tuple[Tensor, Tensor]:
        """The states, memory_BSC, and what the top layer says once all is read, each end's half of it, last_BC."""
        ends = SentenceEnds(rows)
        x_BSC = self.embed(ids_BS, rows.seen_BT)
        for number, layer in enumerate(self.layers):
            x_BSC, last_BC = layer(self.dropout(x_BSC) if number else x_BSC, ends)
        return x_BSC, last_BC


class Bridge(nn.Module):
    """From the encoder to the decoder's first state. This one is not there: the decoder starts as from nothing."""

    linked = False

    def __init__(self, settings: RnnSettings) -> None:
        super().__init__()
        self.depth, self.parts, self.width = settings.decoder_depth, CELLS[settings.cell].parts, settings.width

    def forward(self, last_BC: Tensor, first: StackState) -> StackState:  # noqa: ARG002 - the menu's shape
        return first


class CopyBridge(Bridge):
    """Every layer starts from what the encoder said last."""

    linked = True

    def forward(self, last_BC: Tensor, first: StackState) -> StackState:  # noqa: ARG002 - the menu's shape
        return [(last_BC,) * self.parts] * self.depth


class LinearBridge(Bridge):
    """Every part of every layer's state is a linear map of what the encoder said last, with tanh."""

    linked = True

    def __init__(self, settings: RnnSettings) -> None:
        super().__init__(settings)
        self.out = Linear(self.width, self.depth * self.parts * self.width)

    def forward(self, last_BC: Tensor, first: StackState) -> StackState:  # noqa: ARG002 - the menu's shape
        states_BLPC = torch.tanh(self.out(last_BC)).view(-1, self.depth, self.parts, self.width)
        return [layer_BPC.unbind(1) for layer_BPC in states_BLPC.unbind(1)]


@dataclass(frozen=True)
class RnnState:
    """What a search carries from step to step. The source stays one per sentence."""

    layers: StackState
    source: EncodedSource | None = None
    said_NO: Tensor | None = None  # at the last step, where it is fed to the next one

    def select(self, rows_N: Tensor) -> RnnState:
        """The rows at these places. The rows of a sentence stay together, N / B of them to each."""
        layers = [tuple(part_NC.index_select(0, rows_N) for part_NC in layer) for layer in self.layers]
        said_NO = None if self.said_NO is None else self.said_NO.index_select(0, rows_N)
        return replace(self, layers=layers, said_NO=said_NO)

    def keep(self, sentences_K: Tensor) -> RnnState:
        """Only these sentences, with all of their rows."""
        return replace(self.select(self.rows_of(sentences_K)), source=self.source and self.source.keep(sentences_K))

    def put(self, sentences_K: Tensor, fresh: RnnState) -> RnnState:
        """Fresh sentences in the places of these."""
        rows_N = self.rows_of(sentences_K)
        layers = [
            tuple(held.index_copy(0, rows_N, new) for held, new in zip(*both))
            for both in zip(self.layers, fresh.layers)
        ]
        fed = self.said_NO is not None and fresh.said_NO is not None
        said_NO = self.said_NO.index_copy(0, rows_N, fresh.said_NO) if fed else None  # type: ignore[union-attr,arg-type]
        both = self.source and fresh.source
        return RnnState(layers, self.source.put(sentences_K, fresh.source) if both else None, said_NO)  # type: ignore[union-attr,arg-type]

    def rest(self, done_B: Tensor) -> RnnState:  # noqa: ARG002 - what search says to every state
        """A recurrent state needs no more room for more tokens."""
        return self

    def rows_of(self, sentences_K: Tensor) -> Tensor:
        assert self.source
        return expand_to_rows(sentences_K, len(self.layers[0][0]) // len(self.source.value_BSM))


class RecurrentDecoder(EmbeddedModule):
    """Target tokens in; out comes what is said after each, made of the state and of what the state reads in the source.

    Without input feeding the whole target runs through the fused kernel and looks at the source at once; with it, step
    by step.
    """

    def __init__(self, settings: RnnSettings, embedding: nn.Embedding) -> None:
        super().__init__(settings, embedding, word_dropout=settings.target_word_dropout)
        width = settings.width
        self.bridge = BRIDGES[settings.bridge](settings)
        self.stack = make_decoder_stack(
            settings, learned=settings.initial_state == "learned" and not self.bridge.linked
        )
        score = SCORES[settings.attention](width, width, settings.attention_width or width)
        self.attention = SourceAttention(score, width)
        self.join = Linear(self.attention.width + width, settings.said_width)
        gates = self.stack.each()[0].gates * width
        self.feed = Linear(settings.said_width, gates, bias=False) if settings.input_feeding else None

    def say(self, state_BTC: Tensor, source: EncodedSource) -> Tensor:
        """tanh(W [a; s] + b): the state joined with what it reads."""
        return torch.tanh(self.join(self.attention(state_BTC, source)))

    def before(self, memory_BSC: Tensor, last_BC: Tensor, keep_BS: Tensor) -> tuple[EncodedSource, StackState]:
        return self.attention.look_up(memory_BSC, keep_BS), self.bridge(last_BC, self.stack.first(len(last_BC)))

    def forward(
        self, ids_BT: Tensor, source: EncodedSource, states: StackState, seen_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The top layer's states, which look at the source, and what is said: state_BTC, said_BTO."""
        x_BTE = self.embed(ids_BT, seen_BT)
        if self.feed:
            return self.step_by_step(x_BTE, source, states)
        state_BTC = self.stack(x_BTE, states)
        return state_BTC, self.dropout(self.say(state_BTC, source))

    def step_by_step(self, x_BTE: Tensor, source: EncodedSource, states: StackState) -> tuple[Tensor, Tensor]:
        read_TBG = self.stack.each()[0].read(x_BTE.transpose(0, 1).contiguous())
        tops, said = [], [self.nothing(len(x_BTE))]
        shape_BTO = (*x_BTE.shape[:2], self.settings.said_width)
        factor_BTO = self.dropout.factors(shape_BTO, read_TBG)  # drawn for all steps at once
        for step, read_BG in enumerate(read_TBG.unbind()):
            top_BC, said_BO, states = self.advance(read_BG, said[-1], states, source)
            tops.append(top_BC)
            said.append(said_BO if factor_BTO is None else said_BO * factor_BTO[:, step])
        return torch.stack(tops, 1), torch.stack(said[1:], 1)

    def advance(
        self, read_NG: Tensor, said_NO: Tensor | None, states: StackState, source: EncodedSource
    ) -> tuple[Tensor, Tensor, StackState]:
        """One token on: the top layer's state, what is said, and all states. The rows of a sentence look together."""
        if self.feed and said_NO is not None:
            read_NG = read_NG + self.feed(said_NO)
        top_NC, states = self.stack.advance(read_NG, states)
        top_BWC = top_NC.view(len(source.value_BSM), -1, top_NC.size(-1))
        return top_NC, self.say(top_BWC, source).flatten(0, 1), states

    def nothing(self, rows: int) -> Tensor:
        """What was said before the first token."""
        return self.embedding.weight.new_zeros(rows, self.settings.said_width)  # engines pack other weights

    def step(self, token_N: Tensor, state: RnnState) -> tuple[Tensor, RnnState]:
        """One token in for every row; what is said after it, said_NO, and the new state out."""
        assert state.source
        read_NG = self.stack.each()[0].read(self.embed(token_N))
        _, said_NO, layers = self.advance(read_NG, state.said_NO, state.layers, state.source)
        return said_NO, RnnState(layers, state.source, said_NO if self.feed else None)


class RecurrentLmDecoder(EmbeddedModule):
    """A decoder without a source, for a language model: what is said after each token, said_BTO."""

    def __init__(self, settings: RnnSettings, embedding: nn.Embedding) -> None:
        super().__init__(settings, embedding, word_dropout=settings.target_word_dropout)
        self.stack = make_decoder_stack(settings, learned=settings.initial_state == "learned")
        widths = settings.width, settings.said_width
        self.out = Linear(*widths) if widths[0] != widths[1] else nn.Identity()

    def forward(self, ids_BT: Tensor, rows: RowLayout) -> Tensor:
        assert rows.alone
        x_BTE = self.embed(ids_BT, rows.seen_BT)
        out: Tensor = self.dropout(self.out(self.stack(x_BTE, self.stack.first(len(ids_BT)))))
        return out

    def start(self, rows: int) -> RnnState:
        return RnnState(self.stack.first(rows))

    def step(self, token_N: Tensor, state: RnnState) -> tuple[Tensor, RnnState]:
        top_NC, layers = self.stack.step(self.embed(token_N), state.layers)
        return self.out(top_NC), RnnState(layers)


class RecurrentSeq2Seq(Seq2Seq):
    """A recurrent decoder behind any encoder that can `read`: source rows in, target states out."""

    encoder: Any
    decoder: RecurrentDecoder

    @property
    def aligns(self) -> bool:
        return self.decoder.attention.score.aligns

    def look_up(self, source_BS: Tensor, rows: RowLayout) -> tuple[EncodedSource, StackState]:
        memory_BSC, last_BC = self.encoder.read(source_BS, rows)
        return self.decoder.before(memory_BSC, last_BC, rows.real_BT)

    def forward(self, batch: Batch) -> Tensor:
        source, states = self.look_up(batch.source_BS, RowLayout.of_source(batch))
        said_BTO: Tensor = self.decoder(batch.target_in_BT, source, states, batch.target_seen_BT)[1]
        return said_BTO

    def alignment(self, batch: Batch) -> Tensor:
        source, states = self.look_up(batch.source_BS, RowLayout.of_source(batch))
        state_BTC, _ = self.decoder(batch.target_in_BT, source, states)
        return self.decoder.attention.weights(state_BTC, source).float()

    def start(
        self, source_BS: Tensor, keep_BS: Tensor, depth_BS: Tensor | None = None, tree_BSS: Tensor | None = None
    ) -> RnnState:
        """Read the sources, one to a row, and stand before the first target token."""
        source, states = self.look_up(source_BS, RowLayout.one_each(keep_BS, depth_BS, tree_BSS))
        return RnnState(states, source, self.decoder.nothing(len(source_BS)) if self.decoder.feed else None)


class Rnn(RecurrentSeq2Seq):
    """Recurrent on both sides; `project` turns states into logits."""

    def __init__(self, settings: RnnSettings, *, source_size: int, target_size: int, joint: bool) -> None:
        super().__init__()
        settings.check()
        self.settings = settings
        same = joint and settings.tied
        size = source_size if same else target_size  # tags are read, and never said
        table = nn.Embedding(size, settings.embedded_width)
        self.decoder = RecurrentDecoder(settings, table)  # the first: a table that both read is called by its name
        self.encoder = RecurrentEncoder(settings, table if same else nn.Embedding(source_size, settings.embedded_width))
        self.project = nn.Linear(settings.said_width, size, bias=False)
        self.spoken = target_size
        initialize_parameters(self)
        if settings.tied:
            self.project.weight = table.weight


BRIDGES: dict[str, type[Bridge]] = {"linear": LinearBridge, "copy": CopyBridge, "none": Bridge}
