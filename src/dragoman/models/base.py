"""What training, decoding and inspection rely on, whatever the kind of model.

Shapes   B rows   S source width   T target width   C model width   N rows of a search   K sentences   V vocabulary
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.types import Batch


class Model(nn.Module, ABC):
    """A trainable model. Parameters of the source side have names that begin with `encoder.`."""

    project: nn.Linear  # states to logits; separate, so that the loss need not hold all logits at once

    def add_projection(self, width: int, size: int, table: nn.Embedding | None = None) -> None:
        """Add the projection to `size` logits and initialize all parameters. `table`, if given, shares its weight.

        Weights are drawn from Xavier's distribution, biases are zero, and embeddings have unit norm once they are
        scaled by the root of their width.
        """
        self.project = nn.Linear(width, size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        if table is not None:
            self.project.weight = table.weight

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Return the states of every target position before the projection to the vocabulary: states_BTC."""


class AutoregressiveModel(Model):
    """A model that generates token by token (decoding/protocol.py)."""

    decoder: Any  # its `step` returns the states before the projection
    output_size: int | None = None  # tokens that it may generate; the ids above are tags, which it only reads

    @abstractmethod
    def start(self, source_BS: Tensor, keep_BS: Tensor) -> Any:
        """Encode the sources, one per row, and return the state before the first target token."""

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the log-probabilities of the next token, logp_NV, given one more token per row, and the new state."""
        states_NC, state = self.decoder.step(token_N, state)
        logp_NV = self.project(states_NC).log_softmax(-1, dtype=torch.float32)
        return logp_NV[:, : self.output_size], state


class Seq2Seq(AutoregressiveModel):
    """A model that generates a target from a source."""

    aligns = True  # whether attention distinguishes source tokens; if not, its weights are no alignment

    @abstractmethod
    def alignment(self, batch: Batch) -> Tensor:
        """Return attention weights from target to source tokens, weight_BTS; those of a target token sum to one."""


def expand_to_rows(sentences_K: Tensor, width: int) -> Tensor:
    """Return the rows of these sentences in a search with `width` rows per sentence."""
    return (sentences_K[:, None] * width + torch.arange(width, device=sentences_K.device)).flatten()


def collect_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name. Buffers are the statistics of batch norm."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
