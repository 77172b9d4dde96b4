"""Hugging Face's MarianMTModel in a short training loop, with length buckets and its own attention kernels."""

from __future__ import annotations

import torch
import transformers
from padded import BOS, EOS, PAD, Padded, fill, padded_batches
from torch import nn
from torch.nn import functional as F
from turns import Turns, task


def main() -> None:
    asked, turns = task(), Turns()
    torch.set_num_threads(asked["threads"])
    torch.manual_seed(1)
    size = asked["size"]
    model = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=asked["vocabulary"],
            d_model=size["width"],
            encoder_layers=size["layers"],
            decoder_layers=size["layers"],
            encoder_attention_heads=size["heads"],
            decoder_attention_heads=size["heads"],
            encoder_ffn_dim=size["inner"],
            decoder_ffn_dim=size["inner"],
            activation_function="relu",
            dropout=asked["dropout"],
            attention_dropout=0.0,
            activation_dropout=0.0,
            max_position_embeddings=512,
            scale_embedding=True,
            share_encoder_decoder_embeddings=True,
            tie_word_embeddings=True,
            use_cache=False,
            pad_token_id=PAD,
            eos_token_id=EOS,
            decoder_start_token_id=BOS,
            forced_eos_token_id=None,
        )
    )
    if asked.get("attention"):
        model.set_attn_implementation(asked["attention"])
    model.train()
    forward = torch.compile(model) if asked["compiled"] else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True)
    budget = {"tokens": asked["tokens"]}
    turns.ready(
        version=f"{transformers.__version__} on torch {torch.__version__}",
        fill=fill(asked["folder"], **budget),
        parameters=sum(p.numel() for p in model.parameters()),
    )

    def update(batch: Padded) -> None:
        keep = batch.source_BS != PAD
        with torch.autocast("cpu", torch.bfloat16, enabled=asked["precision"] == "bf16"):
            logits = forward(
                input_ids=batch.source_BS, attention_mask=keep, decoder_input_ids=batch.target_in_BT, use_cache=False
            ).logits.float()
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


if __name__ == "__main__":
    main()
