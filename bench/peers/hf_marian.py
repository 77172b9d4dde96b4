"""Hugging Face's MarianMTModel in a short training loop, with length buckets and its own attention kernels."""

from __future__ import annotations

import torch
import transformers
from padded import BOS, EOS, PAD
from plain import make_turns, train
from torch import Tensor
from turns import read_task


def main() -> None:
    task = read_task()
    turns = make_turns(task["device"])
    torch.manual_seed(1)
    size = task["size"]
    model = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=task["vocabulary"],
            d_model=size["width"],
            encoder_layers=size["layers"],
            decoder_layers=size["layers"],
            encoder_attention_heads=size["heads"],
            decoder_attention_heads=size["heads"],
            encoder_ffn_dim=size["inner"],
            decoder_ffn_dim=size["inner"],
            activation_function="relu",
            dropout=task["dropout"],
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
    if task.get("attention"):
        model.set_attn_implementation(task["attention"])

    def logits(source_BS: Tensor, target_in_BT: Tensor, length_B: Tensor) -> Tensor:  # noqa: ARG001
        real_BS = source_BS != PAD
        out: Tensor = model(
            input_ids=source_BS, attention_mask=real_BS, decoder_input_ids=target_in_BT, use_cache=False
        ).logits
        return out

    train(task, turns, model, logits, f"{transformers.__version__} on torch {torch.__version__}")


if __name__ == "__main__":
    main()
