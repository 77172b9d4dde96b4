"""Pools: from the states of a text's tokens to one state for the text. To add one: a function and a line in POOLS.

Shapes   B rows   S source width   T texts of a row   C model width
A pool takes states_BSC, where the tokens stand, and T; a row with fewer than T texts has zeros in the places left over.

Half a model: a language model is a decoder without a source, a classifier an encoder with a label in the end.

Either can be built from each backbone; its settings are those of the backbone and a few of its own.

Shapes   B rows   S source width   T target width, or texts of a row   C model width   N rows of a search   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from dragoman.config.settings import Count, Menus
from dragoman.errors import UserError
from dragoman.kernels.masks import RowLayout
from dragoman.models.base import AutoregressiveModel, Model, initialize_parameters, useless
from dragoman.models.rnn import RecurrentEncoder, RecurrentLmDecoder, RnnSettings
from dragoman.models.transformer import Decoder, Encoder, TransformerSettings
from dragoman.modules.dropout import Dropout
from dragoman.modules.positions import POSITIONS
from dragoman.types import Batch


def make_membership(rows: RowLayout, texts: int) -> Tensor:
    """Which token belongs to which text of its row: member_BTS."""
    number_T = torch.arange(1, texts + 1, device=rows.segment_BT.device)
    return rows.segment_BT[:, None] == number_T[:, None]


def pool_mean(states_BSC: Tensor, rows: RowLayout, texts: int) -> Tensor:
    member_BTS = make_membership(rows, texts).to(states_BSC.dtype)
    return member_BTS / member_BTS.sum(-1, keepdim=True).clamp(min=1) @ states_BSC


def pool_max(states_BSC: Tensor, rows: RowLayout, texts: int) -> Tensor:
    """The largest value of each feature. Padding is gathered in a place 0 of its own, which is then left out."""
    B, S, C = states_BSC.shape
    segment_BSC = rows.segment_BT[..., None].expand(B, S, C)
    lowest = states_BSC.new_full((B, texts + 1, C), float("-inf"))
    pooled_BTC = lowest.scatter_reduce(1, segment_BSC, states_BSC, "amax")[:, 1:]
    return torch.where(make_membership(rows, texts).any(-1, keepdim=True), pooled_BTC, 0.0)


def pool_first(states_BSC: Tensor, rows: RowLayout, texts: int) -> Tensor:
    chosen_BTS = make_membership(rows, texts) & (rows.position_BT == 0)[:, None]
    return chosen_BTS.to(states_BSC.dtype) @ states_BSC


def pool_final_states(states_BSC: Tensor, rows: RowLayout, texts: int) -> Tensor:
    """Return each direction's final state: the forward half at the last token, the backward half at the first."""
    forward_BSC, backward_BSC = states_BSC.chunk(2, -1)
    return torch.cat([pool_last(forward_BSC, rows, texts), pool_first(backward_BSC, rows, texts)], -1)


def pool_last(states_BSC: Tensor, rows: RowLayout, texts: int) -> Tensor:
    """The state of the </s>, which stands at the end of every text."""
    member_BTS = make_membership(rows, texts)
    chosen_BTS = member_BTS & (rows.position_BT[:, None] == member_BTS.sum(-1, keepdim=True) - 1)
    return chosen_BTS.to(states_BSC.dtype) @ states_BSC


Pool = Callable[[Tensor, RowLayout, int], Tensor]
POOLS: dict[str, Pool] = {
    "mean": pool_mean,
    "max": pool_max,
    "first": pool_first,
    "last": pool_last,
    "last_token": pool_last,
}

SOURCE_SETTINGS = ("bridge", "attention", "attention_width", "input_feeding")  # how a recurrent decoder meets a source
TARGET_SETTINGS = ("tied", "target_word_dropout")  # what only those ask that write


class TransformerLmSettings(TransformerSettings):
    kind: Literal["lm"] = "lm"  # type: ignore[assignment]
    backbone: Literal["transformer"] = "transformer"
    context: Count = 256  # tokens of a window of the text, and the most that are looked back at
    bounded: ClassVar[bool] = True  # it looks back no further than its context
    absent: ClassVar[tuple[str, ...]] = ("encoder_layers", "attention", "source_word_dropout")

    def check(self) -> None:
        super().check()
        useless(self, "a language model, which has no encoder", *self.absent)
        if POSITIONS[self.position].of_trees:
            raise UserError(
                f"model.position={self.position} needs whole sentences, which a language model has not read yet"
            )
        if self.most is not None and self.most < self.context:
            raise UserError(
                f"model.context={self.context} is more than model.position={self.position} reaches; "
                f"raise model.max_length, which is {self.max_length}"
            )

    @property
    def said_width(self) -> int:
        """Of what goes to the projection."""
        return self.width

    def decoder(self, size: int) -> nn.Module:
        return Decoder(self, nn.Embedding(size, self.width), cross=False)


class TransformerClassifierSettings(TransformerSettings):
    kind: Literal["classifier"] = "classifier"  # type: ignore[assignment]
    backbone: Literal["transformer"] = "transformer"
    pool: str = "mean"
    absent: ClassVar[tuple[str, ...]] = ("decoder_layers", "decoder_attention", *TARGET_SETTINGS)

    @classmethod
    def menus(cls) -> Menus:
        return {**super().menus(), "pool": POOLS}

    def check(self) -> None:
        super().check()
        if POSITIONS[self.position].of_trees:
            raise UserError(
                f"model.position={self.position} needs trees beside texts, which only translation takes so far"
            )
        useless(self, "a classifier, which has no decoder", *self.absent)

    @property
    def pooling(self) -> Pool:
        return POOLS[self.pool]

    def encoder(self, size: int) -> nn.Module:
        return Encoder(self, nn.Embedding(size, self.width))


class RnnLmSettings(RnnSettings):
    kind: Literal["lm"] = "lm"  # type: ignore[assignment]
    backbone: Literal["rnn"] = "rnn"
    context: Count = 256  # tokens of a window of the text at training; a state forgets nothing at its end
    bounded: ClassVar[bool] = False
    bidirectional: bool = False
    absent: ClassVar[tuple[str, ...]] = ("encoder_layers", "bidirectional", "source_word_dropout", *SOURCE_SETTINGS)

    def check(self) -> None:
        super().check()
        useless(self, "a language model, which has no encoder", *self.absent)

    def decoder(self, size: int) -> nn.Module:
        return RecurrentLmDecoder(self, nn.Embedding(size, self.embedded_width))


class RnnClassifierSettings(RnnSettings):
    kind: Literal["classifier"] = "classifier"  # type: ignore[assignment]
    backbone: Literal["rnn"] = "rnn"
    pool: str = "mean"
    absent: ClassVar[tuple[str, ...]] = ("decoder_layers", *TARGET_SETTINGS, *SOURCE_SETTINGS)

    @classmethod
    def menus(cls) -> Menus:
        return {**super().menus(), "pool": POOLS}

    def check(self) -> None:
        super().check()
        useless(self, "a classifier, which has no decoder", *self.absent)

    @property
    def pooling(self) -> Pool:
        """Return the pool; `last` is the encoder's final state, which a backward cell has at the first token."""
        return pool_final_states if self.bidirectional and self.pool == "last" else POOLS[self.pool]

    def encoder(self, size: int) -> nn.Module:
        return RecurrentEncoder(self, nn.Embedding(size, self.embedded_width))


class LanguageModel(AutoregressiveModel):
    """What comes next, given all that came before."""

    def __init__(self, settings: Any, *, source_size: int, target_size: int, joint: bool) -> None:  # noqa: ARG002
        super().__init__()
        settings.check()
        self.settings = settings
        self.decoder = settings.decoder(target_size)
        self.project = nn.Linear(settings.said_width, target_size, bias=False)
        initialize_parameters(self)
        if settings.tied:
            self.project.weight = self.decoder.embedding.weight

    def forward(self, batch: Batch) -> Tensor:
        out: Tensor = self.decoder(batch.target_in_BT, RowLayout.of_target(batch))
        return out

    def start(self, source_BS: Tensor, keep_BS: Tensor) -> Any:  # noqa: ARG002 - search speaks of sources
        """Stand before the first token, one row for each source; what the sources say does not matter."""
        return self.decoder.start(len(source_BS))


class TextClassifier(Model):
    """One state for every text, pooled from those of its tokens; `project` turns it into a logit for each label."""

    def __init__(self, settings: Any, *, source_size: int, target_size: int, joint: bool) -> None:  # noqa: ARG002
        super().__init__()
        settings.check()
        self.settings, self.pool = settings, settings.pooling
        self.encoder = settings.encoder(source_size)
        self.dropout = Dropout(settings.dropout)
        self.project = nn.Linear(settings.width, target_size, bias=False)
        initialize_parameters(self)

    def forward(self, batch: Batch) -> Tensor:
        """The state of the n-th text of a source row is at place n of the target row: states_BTC."""
        rows = RowLayout.of_source(batch)
        states_BSC = self.encoder(batch.source_BS, rows)
        out: Tensor = self.dropout(self.pool(states_BSC, rows, batch.target_out_BT.size(1)))
        return out
