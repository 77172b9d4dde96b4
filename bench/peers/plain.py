"""A plain PyTorch training loop for peers: autocast, cross-entropy, gradient clipping, fused Adam.

Weights and optimizer state are float32. With torch.compile, model and loss are compiled together with dynamic shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from padded import PAD, fill_fraction, make_batches, repeat_batches
from torch import Tensor, nn
from torch.nn import functional as F
from turns import Turns

Logits = Callable[[Tensor, Tensor, Tensor], Tensor]  # (source_BS, target_in_BT, source_length_B) -> logits_BTV


def make_turns(device: str) -> Turns:
    if device == "cpu":
        return Turns()
    return Turns(torch.cuda.synchronize, torch.cuda.max_memory_allocated)


def train(task: dict[str, Any], turns: Turns, model: nn.Module, logits: Logits, version: str) -> None:
    """Train in turns until the benchmark ends. `logits` computes the logits of a batch with the model."""
    device = task["device"]
    torch.set_num_threads(task["threads"])
    model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True)

    def compute_loss(source_BS: Tensor, target_in_BT: Tensor, target_out_BT: Tensor, length_B: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=task["precision"] == "bf16"):
            logits_NV = logits(source_BS, target_in_BT, length_B).flatten(0, 1)
        target_N = target_out_BT.flatten()
        return F.cross_entropy(logits_NV.float(), target_N, ignore_index=PAD, label_smoothing=task["smoothing"])

    forward = torch.compile(compute_loss, dynamic=True) if task["compiled"] else compute_loss
    batches = make_batches(task["folder"], tokens=task["tokens"], multiple=task["multiple"], device=device)
    count = sum(p.numel() for p in model.parameters())
    turns.ready(version=version, fill=fill_fraction(batches), parameters=count)
    for batch in repeat_batches(batches):
        turns.before()
        loss = forward(batch.source_BS, batch.target_in_BT, batch.target_out_BT, batch.source_length_B)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), task["clip"])
        optimizer.step()
        optimizer.zero_grad()
        turns.after(batch.tokens)
