"""The training loop that people write around a PyTorch model: autocast, cross-entropy, clipping, fused Adam.

Weights and the optimizer's state stay in float32. Under torch.compile the loss is compiled with the model, for shapes
that change from batch to batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from padded import PAD, endless, fill, padded_batches
from torch import Tensor, nn
from torch.nn import functional as F
from turns import Turns

Logits = Callable[[Tensor, Tensor, Tensor], Tensor]  # of source_BS, target_in_BT, source_length_B


def turns_on(device: str) -> Turns:
    if device == "cpu":
        return Turns()
    return Turns(torch.cuda.synchronize, torch.cuda.max_memory_allocated)


def train(asked: dict[str, Any], turns: Turns, model: nn.Module, logits: Logits, version: str) -> None:
    """Take turns for ever. `logits` is what the model makes of a batch; it must not hold on to the model's device."""
    device = asked["device"]
    torch.set_num_threads(asked["threads"])
    model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True)

    def loss_of(source_BS: Tensor, target_in_BT: Tensor, target_out_BT: Tensor, length_B: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=asked["precision"] == "bf16"):
            logits_NV = logits(source_BS, target_in_BT, length_B).flatten(0, 1)
        target_N = target_out_BT.flatten()
        return F.cross_entropy(logits_NV.float(), target_N, ignore_index=PAD, label_smoothing=asked["smoothing"])

    forward = torch.compile(loss_of, dynamic=True) if asked["compiled"] else loss_of
    batches = padded_batches(asked["folder"], tokens=asked["tokens"], multiple=asked["multiple"], device=device)
    count = sum(p.numel() for p in model.parameters())
    turns.ready(version=version, fill=fill(batches), parameters=count)
    for batch in endless(batches):
        turns.before()
        loss = forward(batch.source_BS, batch.target_in_BT, batch.target_out_BT, batch.source_length_B)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), asked["clip"])
        optimizer.step()
        optimizer.zero_grad()
        turns.after(batch.tokens)
