"""The Transformer of 2017 on packed rows: an encoder stack, a masked decoder stack that asks it, tied embeddings.

Shapes   B rows   S source width   T target width   C model width   H heads   D head width   V vocabulary
         L layers   N rows of a search (B sentences x W beams)   K cache capacity
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from dragoman.config import Amount, Count, Fraction, Settings, pick
from dragoman.models.base import Seq2Seq
from dragoman.nn.attention import KERNELS, CrossAttention, SelfAttention
from dragoman.nn.block import ACTIVATIONS, PLACES, FeedForward, Residual
from dragoman.nn.dropout import Dropout
from dragoman.nn.mask import causal, never_empty, same_segment
from dragoman.nn.norm import NORMS
from dragoman.nn.position import POSITIONS
from dragoman.types import Batch, Mistake

M = TypeVar("M", bound=nn.Module)
CAPACITY_STEP = 32  # a cache grows by so many places at a time; its size depends on the step alone


class TransformerSettings(Settings):
    kind: Literal["transformer"] = "transformer"
    layers: Count = 6
    encoder_layers: Amount = 0  # 0: as many as `layers`
    decoder_layers: Amount = 0
    width: Annotated[int, Field(ge=1, le=65_536)] = 512
    heads: Count = 8
    feedforward_width: Annotated[int, Field(ge=0, le=1_000_000)] = 0  # 0: four times the width
    dropout: Fraction = 0.1
    norm: str = "layer"
    norm_place: str = "pre"
    activation: str = "relu"
    position: str = "sinusoidal"
    kernel: str = "auto"
    tied: bool = (
        True  # one matrix for target embeddings and output; for source embeddings too, if the vocabulary is joint
    )

    def check(self) -> None:
        if self.width % self.heads or self.width % 2:
            raise Mistake(
                f"model.width must be even and a multiple of model.heads, got width {self.width} and {self.heads} heads"
            )
        pick(NORMS, self.norm, "model.norm")
        pick(PLACES, self.norm_place, "model.norm_place")
        pick(ACTIVATIONS, self.activation, "model.activation")
        pick(POSITIONS, self.position, "model.position")
        pick(KERNELS, self.kernel, "model.kernel")


def residual(sublayer: M, settings: TransformerSettings) -> Residual[M]:
    return Residual(sublayer, NORMS[settings.norm](settings.width), settings.norm_place, settings.dropout)


def feedforward(settings: TransformerSettings) -> FeedForward:
    inner = settings.feedforward_width or 4 * settings.width
    return FeedForward(settings.width, inner, ACTIVATIONS[settings.activation])


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each in its residual wiring."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        kernel = KERNELS[settings.kernel]
        self.attention = residual(SelfAttention(settings.width, settings.heads, kernel), settings)
        self.feedforward = residual(feedforward(settings), settings)

    def forward(self, x_BSC: Tensor, keep: Tensor) -> Tensor:
        out: Tensor = self.feedforward(self.attention(x_BSC, keep))
        return out


class DecoderLayer(nn.Module):
    """Self-attention that does not look ahead, cross-attention to the source, and feed-forward."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        kernel = KERNELS[settings.kernel]
        self.attention = residual(SelfAttention(settings.width, settings.heads, kernel), settings)
        self.cross = residual(CrossAttention(settings.width, settings.heads, kernel), settings)
        self.feedforward = residual(feedforward(settings), settings)

    def look_up(self, memory_BSC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the source for this layer."""
        return self.cross.sublayer.look_up(memory_BSC)

    def forward(self, x_BTC: Tensor, memory_BSC: Tensor, keep: Tensor, cross_keep: Tensor) -> Tensor:
        x_BTC = self.cross(self.attention(x_BTC, keep), self.look_up(memory_BSC), cross_keep)
        out: Tensor = self.feedforward(x_BTC)
        return out

    def step(
        self, x_BWC: Tensor, memory: tuple[Tensor, Tensor], cache: Tensor, at: int, keep: Tensor, cross_keep: Tensor
    ) -> Tensor:
        """One token for every row. The W rows of a sentence ask its source together, as W queries."""
        x_N1C = self.attention.around(x_BWC.flatten(0, 1)[:, None], self.attention.sublayer.step, cache, at, keep)
        out: Tensor = self.feedforward(self.cross(x_N1C.view_as(x_BWC), memory, cross_keep))
        return out

    def looks(self, x_BTC: Tensor, memory_BSC: Tensor, keep: Tensor, cross_keep: Tensor) -> Tensor:
        """Where each target token looks in the source, mean over heads: weights_BTS."""
        x_BTC = self.cross.inlet(self.attention(x_BTC, keep))
        return self.cross.sublayer.weights(x_BTC, self.look_up(memory_BSC), cross_keep).float().mean(1)


@dataclass(frozen=True)
class State:
    """What a search carries from step to step. The source's keys and values stay one per sentence.

    A state serves for one step: the step writes into its caches.
    """

    memory: list[tuple[Tensor, Tensor]]  # L x (k_BHSD, v_BHSD)
    keep_B11S: Tensor
    caches: list[Tensor]  # L x cache_2NHKD
    at: int = 0

    def select(self, rows_N: Tensor) -> State:
        """The rows at these places. The rows of a sentence stay together, N / B of them to each."""
        return replace(self, caches=[cache.index_select(1, rows_N) for cache in self.caches])


class Transformer(Seq2Seq):
    """Source rows in, target states out; `project` turns states into logits."""

    def __init__(self, settings: TransformerSettings, *, source_size: int, target_size: int, joint: bool) -> None:
        super().__init__()
        settings.check()
        self.settings = settings
        width = settings.width
        self.scale = math.sqrt(width)
        self.position = POSITIONS[settings.position](width)
        self.dropout = Dropout(settings.dropout)
        self.target_embedding = nn.Embedding(target_size, width)
        self.source_embedding = self.target_embedding if joint and settings.tied else nn.Embedding(source_size, width)
        self.encoder = nn.ModuleList(EncoderLayer(settings) for _ in range(settings.encoder_layers or settings.layers))
        self.decoder = nn.ModuleList(DecoderLayer(settings) for _ in range(settings.decoder_layers or settings.layers))
        last = settings.norm if settings.norm_place == "pre" else "none"
        self.encoder_norm, self.decoder_norm = NORMS[last](width), NORMS[last](width)
        self.project = nn.Linear(width, target_size, bias=False)
        self.initialise()
        if settings.tied:
            self.project.weight = self.target_embedding.weight

    def initialise(self) -> None:
        """Xavier for products, zero for biases, and embeddings that have unit size once scaled."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)

    def embed(self, table: nn.Embedding, ids_BT: Tensor, position_BT: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.position.embed(table(ids_BT) * self.scale, position_BT))
        return out

    def encode(self, source_BS: Tensor, segment_BS: Tensor, position_BS: Tensor) -> Tensor:
        keep = same_segment(segment_BS, segment_BS)[:, None]
        x_BSC = self.embed(self.source_embedding, source_BS, position_BS)
        for layer in self.encoder:
            x_BSC = layer(x_BSC, keep)
        out: Tensor = self.encoder_norm(x_BSC)
        return out

    def forward(self, batch: Batch) -> Tensor:
        """States of every target position, before the projection to the vocabulary: states_BTC."""
        x_BTC, memory_BSC, keep, cross_keep = self.before_decoder(batch)
        for layer in self.decoder:
            x_BTC = layer(x_BTC, memory_BSC, keep, cross_keep)
        out: Tensor = self.decoder_norm(x_BTC)
        return out

    def before_decoder(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        segment_BT, position_BT = batch.target_segment_BT, batch.target_position_BT
        memory_BSC = self.encode(batch.source_BS, batch.source_segment_BS, batch.source_position_BS)
        keep = (same_segment(segment_BT, segment_BT) & causal(position_BT, position_BT))[:, None]
        cross_keep = never_empty(same_segment(segment_BT, batch.source_segment_BS))[:, None]
        return self.embed(self.target_embedding, batch.target_in_BT, position_BT), memory_BSC, keep, cross_keep

    def alignment(self, batch: Batch) -> Tensor:
        """Where each target token looked: cross-attention of the last layer but one, the one that aligns best."""
        x_BTC, *rest = self.before_decoder(batch)
        chosen = max(len(self.decoder) - 2, 0)
        for layer in self.decoder[:chosen]:
            x_BTC = layer(x_BTC, *rest)
        looks: Tensor = self.decoder[chosen].looks(x_BTC, *rest)  # type: ignore[operator]
        return looks

    def start(self, source_BS: Tensor, keep_BS: Tensor) -> State:
        """Read the sources, one to a row, and stand before the first target token."""
        position_BS = torch.arange(source_BS.size(1), device=source_BS.device).expand_as(source_BS)
        memory_BSC = self.encode(source_BS, keep_BS.long(), position_BS)
        H, D = self.settings.heads, self.settings.width // self.settings.heads
        caches = [memory_BSC.new_zeros(2, len(source_BS), H, 0, D) for _ in self.decoder]
        memory = [layer.look_up(memory_BSC) for layer in self.decoder]  # type: ignore[operator]
        return State(memory, never_empty(keep_BS[:, None])[:, None], caches)

    def step(self, token_N: Tensor, state: State) -> tuple[Tensor, State]:
        """One token in for every row, log-probabilities_NV of the next one and the new state out."""
        at, caches = state.at, state.caches
        if at % CAPACITY_STEP == 0:
            caches = [nn.functional.pad(cache, (0, 0, 0, CAPACITY_STEP)) for cache in caches]
        keep = (torch.arange(caches[0].size(3), device=token_N.device) <= at)[None, None, None]
        x_NC = self.embed(self.target_embedding, token_N, torch.full_like(token_N, at))
        x_BWC = x_NC.view(len(state.keep_B11S), -1, x_NC.size(-1))
        for layer, memory, cache in zip(self.decoder, state.memory, caches, strict=True):
            x_BWC = layer.step(x_BWC, memory, cache, at, keep, state.keep_B11S)  # type: ignore[operator]
        logits_NV = self.project(self.decoder_norm(x_BWC)).flatten(0, 1)
        return logits_NV.float().log_softmax(-1), replace(state, caches=caches, at=at + 1)
