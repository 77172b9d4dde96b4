"""Pools: from the states of a text's tokens to one state for the text. To add one: a function and a line in POOLS.

Shapes   B rows   S source width   T texts of a row   C model width
A pool takes states_BSC, where the tokens stand, and T; a row with fewer than T texts has zeros in the places left over.

Half a model: a language model is a decoder without a source, a classifier an encoder with a label in the end.

Either can be built from each backbone; its settings are those of the backbone and a few of its own.

Shapes   B rows   S source width   T target width, or texts of a row   C model width   N rows of a search   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.kernels.masks import RowLayout
from dragoman.models.base import AutoregressiveModel, Model, initialize_parameters
from dragoman.models.rnn import RecurrentEncoder, RecurrentLmDecoder
from dragoman.models.settings import ClassifierSettings, LmSettings, RnnClassifierSettings, RnnLmSettings
from dragoman.models.transformer import Decoder, Encoder
from dragoman.modules.dropout import Dropout
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


class LanguageModel(AutoregressiveModel):
    """What comes next, given all that came before."""

    def __init__(self, settings: LmSettings, *, source_size: int, target_size: int, joint: bool) -> None:  # noqa: ARG002
        super().__init__()
        settings.check()
        self.settings = settings
        self.decoder: RecurrentLmDecoder | Decoder
        if isinstance(settings, RnnLmSettings):
            self.decoder = RecurrentLmDecoder(settings, nn.Embedding(target_size, settings.embedded_width))
        else:
            self.decoder = Decoder(settings, nn.Embedding(target_size, settings.width), cross=False)
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

    def __init__(
        self,
        settings: ClassifierSettings,
        *,
        source_size: int,
        target_size: int,
        joint: bool,  # noqa: ARG002
    ) -> None:
        super().__init__()
        settings.check()
        self.settings, self.pool = settings, POOLS[settings.pool]
        self.encoder: RecurrentEncoder | Encoder
        if isinstance(settings, RnnClassifierSettings):
            self.encoder = RecurrentEncoder(settings, nn.Embedding(source_size, settings.embedded_width))
            if settings.bidirectional and settings.pool == "last":
                self.pool = pool_final_states
        else:
            self.encoder = Encoder(settings, nn.Embedding(source_size, settings.width))
        self.dropout = Dropout(settings.dropout)
        self.project = nn.Linear(settings.width, target_size, bias=False)
        initialize_parameters(self)

    def forward(self, batch: Batch) -> Tensor:
        """The state of the n-th text of a source row is at place n of the target row: states_BTC."""
        rows = RowLayout.of_source(batch)
        states_BSC = self.encoder(batch.source_BS, rows)
        out: Tensor = self.dropout(self.pool(states_BSC, rows, batch.target_out_BT.size(1)))
        return out
