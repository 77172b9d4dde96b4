"""What training, search and the lens ask of a model, whatever its kind.

Shapes   B rows   S source width   T target width   C model width   N rows of a search   K sentences   V vocabulary
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.types import Batch


class Model(nn.Module, ABC):
    """Anything that training can teach. What it owns of the source side is called `encoder.` something."""

    project: nn.Linear  # states to logits; apart, so that the loss need not hold all logits at once

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """States of every target position, before the projection to the vocabulary: states_BTC."""


class AutoregressiveModel(Model):
    """Models that write an answer, token by token: what search asks of them (decoding/protocol.py)."""

    decoder: Any  # with a `step` of its own, which gives the states before the projection
    spoken: int | None = None  # tokens that it may say; those behind them are tags, which it only reads

    @abstractmethod
    def start(self, source_BS: Tensor, keep_BS: Tensor) -> Any:
        """Read the sources, one to a row, and stand before the first target token."""

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token in for every row; log-probabilities_NV of the next one and the new state out."""
        states_NC, state = self.decoder.step(token_N, state)
        logp_NV = self.project(states_NC).log_softmax(-1, dtype=torch.float32)
        return logp_NV[:, : self.spoken], state


class Seq2Seq(AutoregressiveModel):
    @property
    def aligns(self) -> bool:
        """Whether its attention tells source tokens apart; if not, its weights are no alignment."""
        return True

    @abstractmethod
    def alignment(self, batch: Batch) -> Tensor:
        """Where each target token looked in the source: weight_BTS, each row of it summing to one."""


def expand_to_rows(sentences_K: Tensor, width: int) -> Tensor:
    """The rows of these sentences in a search, `width` to each."""
    return (sentences_K[:, None] * width + torch.arange(width, device=sentences_K.device)).flatten()


def collect_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All that a model is: what it learned, and what it measured on the way (the statistics of batch norm)."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def initialize_parameters(model: nn.Module) -> None:
    """Xavier for products, zero for biases, and embeddings that have unit size once scaled."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
