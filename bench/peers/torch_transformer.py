"""torch.nn.Transformer with scaled tied embeddings and sinusoidal positions, trained on length buckets.

Dropout is applied as in Dragoman (embeddings and residuals). torch.nn.Transformer also has dropout of attention weights
and of feed-forward activations; both are switched off, which makes it faster.
"""

from __future__ import annotations

import math

import torch
from padded import PAD
from plain import make_turns, train
from torch import Tensor, nn
from torch.nn import functional as F
from turns import read_task


class Translator(nn.Module):
    def __init__(self, *, vocabulary: int, layers: int, width: int, inner: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        angle = torch.arange(512)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("position", torch.stack([angle.sin(), angle.cos()], -1).flatten(1))
        self.dropout = nn.Dropout(dropout)
        self.body = nn.Transformer(width, heads, layers, layers, inner, dropout, batch_first=True)
        for layer in [*self.body.encoder.layers, *self.body.decoder.layers]:
            layer.dropout.p = layer.self_attn.dropout = 0.0
            if hasattr(layer, "multihead_attn"):
                layer.multihead_attn.dropout = 0.0

    position: Tensor

    def embed(self, ids: Tensor) -> Tensor:
        scaled = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        embedded: Tensor = self.dropout(scaled + self.position[: ids.size(1)])
        return embedded

    def forward(self, source_BS: Tensor, target_BT: Tensor, length_B: Tensor) -> Tensor:  # noqa: ARG002
        T = target_BT.size(1)
        future_TT = torch.ones(T, T, dtype=torch.bool, device=target_BT.device).triu(1)
        padding_BS = source_BS == PAD
        states = self.body(
            self.embed(source_BS),
            self.embed(target_BT),
            tgt_mask=future_TT,
            tgt_is_causal=True,
            src_key_padding_mask=padding_BS,
            memory_key_padding_mask=padding_BS,
        )
        return F.linear(states, self.embedding.weight)


def main() -> None:
    task = read_task()
    turns = make_turns(task["device"])
    torch.manual_seed(1)
    size = {name: task["size"][name] for name in ("layers", "width", "inner", "heads")}
    model = Translator(vocabulary=task["vocabulary"], dropout=task["dropout"], **size)
    train(task, turns, model, model, torch.__version__)


if __name__ == "__main__":
    main()
