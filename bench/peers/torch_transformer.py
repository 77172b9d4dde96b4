"""torch.nn.Transformer with the usual things around it: scaled tied embeddings, sinusoidal positions, length buckets.

Dropout stands where Dragoman has it (embeddings and residuals). The class would also drop attention weights and inner
feed-forward values; both are switched off, which makes it faster.
"""

from __future__ import annotations

import math

import torch
from padded import PAD, Padded, fill, padded_batches
from torch import Tensor, nn
from torch.nn import functional as F
from turns import Turns, task


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

    def embed(self, ids: Tensor) -> Tensor:
        scaled = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        return self.dropout(scaled + self.position[: ids.size(1)])

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        ahead = torch.ones(target.size(1), target.size(1), dtype=torch.bool).triu(1)
        blank = source == PAD
        states = self.body(
            self.embed(source),
            self.embed(target),
            tgt_mask=ahead,
            tgt_is_causal=True,
            src_key_padding_mask=blank,
            memory_key_padding_mask=blank,
        )
        return F.linear(states, self.embedding.weight)


def main() -> None:
    asked, turns = task(), Turns()
    torch.set_num_threads(asked["threads"])
    torch.manual_seed(1)
    model = Translator(vocabulary=asked["vocabulary"], dropout=asked["dropout"], **asked["size"])
    forward = torch.compile(model) if asked["compiled"] else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True)
    budget = {"tokens": asked["tokens"]}
    turns.ready(version=torch.__version__, fill=fill(asked["folder"], **budget), parameters=count(model))

    def update(batch: Padded) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=asked["precision"] == "bf16"):
            logits = forward(batch.source_BS, batch.target_in_BT).float()
        loss = F.cross_entropy(
            logits.flatten(0, 1), batch.target_out_BT.flatten(), ignore_index=PAD, label_smoothing=asked["smoothing"]
        )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), asked["clip"])
        optimizer.step()
        optimizer.zero_grad()

    for batch in padded_batches(asked["folder"], **budget):
        turns.before()
        update(batch)
        turns.after(batch.tokens)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    main()
