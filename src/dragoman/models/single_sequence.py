"""Models of single sequences: language models, which have only a decoder, and text classifiers, with only an encoder.

A classifier pools the states of a text into one. A pooling function takes states_BSC, the row layout and the maximum
number T of texts in a row, and returns pooled_BTC, with zeros for texts that a row does not have. To add one, write a
function and a line in POOLS.

Shapes   B rows   S source length (T in RowLayout)   T target length, or texts of a row   C model width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from dragoman.config.settings import Count, Registries, setting
from dragoman.errors import UserError
from dragoman.kernels.attention import RowLayout
from dragoman.models.base import AutoregressiveModel, BaseModelSettings, Model
from dragoman.models.rnn import RecurrentEncoder, RecurrentLmDecoder, RnnSettings
from dragoman.models.transformer import Decoder, Encoder, TransformerSettings
from dragoman.modules.dropout import Dropout
from dragoman.types import Batch

# Settings of a recurrent decoder with a source, and settings of all decoders.
SOURCE_SETTINGS = ("encoder_width", "bridge", "attention", "attention_width", "context_place", "input_feeding")
TARGET_SETTINGS = ("decoder_layers", "tied", "target_word_dropout", "copying")


class LmFields(BaseModelSettings):
    """The settings of all language models, in addition to those of their backbone."""

    kind: Literal["lm"] = "lm"
    context: Count = setting(256, "tokens per window of the text, and the maximum distance of attention")
    task: ClassVar[Literal["translate", "generate", "classify"]] = "generate"
    has_fixed_context: ClassVar[bool] = True  # whether a prediction depends on at most `context` previous tokens
    kind_in_words: ClassVar[str] = "a language model, which has no encoder"


class TransformerLmSettings(LmFields, TransformerSettings):  # type: ignore[misc]
    backbone: Literal["transformer"] = "transformer"
    # `attention` is the encoder's
    inapplicable_settings = ("encoder_layers", "attention", "source_word_dropout", "copying", "output_bias")

    def check(self) -> None:
        super().check()
        if self.source_features:
            raise UserError(
                f"model.position={self.position} needs trees beside texts, which only translation models support"
            )
        if self.length_limit is not None and self.length_limit < self.context:
            raise UserError(
                f"model.context={self.context} is more than model.position={self.position} can represent; "
                f"raise model.max_length, which is {self.max_length}"
            )

    @property
    def output_width(self) -> int:
        return self.width


class RnnLmSettings(LmFields, RnnSettings):  # type: ignore[misc]
    backbone: Literal["rnn"] = "rnn"
    context: Count = setting(256, "tokens per training window; generation has no such limit")
    bidirectional: bool = setting(False, "not available: a language model reads from left to right")
    has_fixed_context: ClassVar[bool] = False
    inapplicable_settings = ("encoder_layers", "bidirectional", "source_word_dropout", "copying", *SOURCE_SETTINGS)


class ClassifierFields(BaseModelSettings):
    """The settings of all classifiers, in addition to those of their backbone."""

    kind: Literal["classifier"] = "classifier"
    pool: str = setting("mean", "how the states of a text are combined into one")
    task: ClassVar[Literal["translate", "generate", "classify"]] = "classify"
    kind_in_words: ClassVar[str] = "a classifier, which has no decoder"

    @classmethod
    def registries(cls) -> Registries:
        return {**super().registries(), "pool": POOLS}


class TransformerClassifierSettings(ClassifierFields, TransformerSettings):  # type: ignore[misc]
    backbone: Literal["transformer"] = "transformer"
    inapplicable_settings = ("decoder_attention", "output_bias", *TARGET_SETTINGS)

    def check(self) -> None:
        super().check()
        if self.source_features:
            raise UserError(
                f"model.position={self.position} needs trees beside texts, which only translation models support"
            )


class RnnClassifierSettings(ClassifierFields, RnnSettings):  # type: ignore[misc]
    backbone: Literal["rnn"] = "rnn"
    inapplicable_settings = (*TARGET_SETTINGS, *SOURCE_SETTINGS)


LmSettings = TransformerLmSettings | RnnLmSettings
ClassifierSettings = TransformerClassifierSettings | RnnClassifierSettings


class LanguageModel(AutoregressiveModel):
    """A model of the next token, given all previous tokens."""

    def __init__(self, settings: LmSettings, *, source_size: int, target_size: int, joint: bool) -> None:  # noqa: ARG002
        super().__init__()
        self.settings = settings
        self.decoder: RecurrentLmDecoder | Decoder
        if isinstance(settings, RnnLmSettings):
            self.decoder = RecurrentLmDecoder(settings, nn.Embedding(target_size, settings.embedded_width))
        else:
            self.decoder = Decoder(settings, nn.Embedding(target_size, settings.width), cross=False)
        self.add_projection_and_initialize(
            settings.output_width, target_size, self.decoder.embedding if settings.tied else None
        )

    def forward(self, batch: Batch) -> Tensor:
        return self.decoder(batch.target_in_BT, RowLayout.from_target(batch))

    def start(self, source_BS: Tensor, real_BS: Tensor) -> Any:  # noqa: ARG002 - the protocol's signature
        """Return the state before the first token, one row per source; the sources are ignored."""
        return self.decoder.start(len(source_BS))


def make_membership(rows: RowLayout, texts: int) -> Tensor:
    """Return which tokens belong to which text of their row, member_BTS; the segment ids of texts start at 1."""
    segment_T = torch.arange(1, texts + 1, device=rows.segment_BT.device)
    return rows.segment_BT[:, None] == segment_T[:, None]


def pool_mean(states_BSC: Tensor, rows: RowLayout, texts: int) -> Tensor:
    member_BTS = make_membership(rows, texts).to(states_BSC.dtype)
    return member_BTS / member_BTS.sum(-1, keepdim=True).clamp(min=1) @ states_BSC


def pool_max(states_BSC: Tensor, rows: RowLayout, texts: int) -> Tensor:
    """Return the maximum of each component of the states. Padding is segment 0, which is dropped in the end."""
    B, S, C = states_BSC.shape
    segment_BSC = rows.segment_BT[..., None].expand(B, S, C)
    lowest = states_BSC.new_full((B, texts + 1, C), float("-inf"))
    pooled_BTC = lowest.scatter_reduce(1, segment_BSC, states_BSC, "amax")[:, 1:]
    return torch.where(make_membership(rows, texts).any(-1, keepdim=True), pooled_BTC, 0.0)


def pool_first(states_BSC: Tensor, rows: RowLayout, texts: int) -> Tensor:
    chosen_BTS = make_membership(rows, texts) & (rows.position_BT == 0)[:, None]
    return chosen_BTS.to(states_BSC.dtype) @ states_BSC


def pool_final_states(states_BSC: Tensor, rows: RowLayout, texts: int) -> Tensor:
    """Return the final states of both directions of a bidirectional encoder, for each text.

    The forward direction ends at the last token, the backward direction at the first one.
    """
    forward_BSC, backward_BSC = states_BSC.chunk(2, -1)
    return torch.cat([pool_last(forward_BSC, rows, texts), pool_first(backward_BSC, rows, texts)], -1)


def pool_last(states_BSC: Tensor, rows: RowLayout, texts: int) -> Tensor:
    """Return the state of the last token of each text, which is EOS."""
    member_BTS = make_membership(rows, texts)
    chosen_BTS = member_BTS & (rows.position_BT[:, None] == member_BTS.sum(-1, keepdim=True) - 1)
    return chosen_BTS.to(states_BSC.dtype) @ states_BSC


Pool = Callable[[Tensor, RowLayout, int], Tensor]
# "last" and "last_token" differ only in a bidirectional recurrent encoder, where "last" is `pool_final_states`.
POOLS: dict[str, Pool] = {
    "mean": pool_mean,
    "max": pool_max,
    "first": pool_first,
    "last": pool_last,
    "last_token": pool_last,
}


class TextClassifier(Model):
    """A model of the label of a text. `project` maps the pooled state of a text to a logit per label."""

    def __init__(self, settings: ClassifierSettings, *, source_size: int, target_size: int, joint: bool) -> None:  # noqa: ARG002
        super().__init__()
        self.settings, self.pool = settings, POOLS[settings.pool]
        self.encoder: RecurrentEncoder | Encoder
        if isinstance(settings, RnnClassifierSettings):
            self.encoder = RecurrentEncoder(settings, nn.Embedding(source_size, settings.embedded_width))
            if settings.bidirectional and settings.pool == "last":
                self.pool = pool_final_states
        else:
            self.encoder = Encoder(settings, nn.Embedding(source_size, settings.width))
        self.dropout = Dropout(settings.dropout)
        self.add_projection_and_initialize(settings.width, target_size)

    def forward(self, batch: Batch) -> Tensor:
        """Return the pooled state of each text, pooled_BTC. The targets of a row are the labels of its texts."""
        rows = RowLayout.from_source(batch)
        states_BSC = self.encoder(batch.source_BS, rows)
        return self.dropout(self.pool(states_BSC, rows, batch.target_out_BT.size(1)))
