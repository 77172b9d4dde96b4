"""Attention weights of every layer and head, recorded during a forward pass.

    with record_attention(model) as recorded:
        model(batch)
    recorded["cross"]      # one tensor per layer: weight_BHQK

Fast kernels never compute the full matrix of weights. A hook on each attention module therefore computes them once
more, from the same inputs, by the readable implementation with which the kernels are compared in tests. Only what the
thread of the `with` block computes is recorded: other threads may use the model meanwhile, as in a server.

Shapes   B rows of a batch   H heads   Q queries   K keys   C width
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.modules.attention import CrossAttention, SelfAttention
from dragoman.modules.attention_scores import SourceAttention

RecordedAttention = dict[str, list[Tensor]]  # part of the model -> weight_BHQK of each layer


@contextmanager
def record_attention(model: nn.Module) -> Iterator[RecordedAttention]:
    """Record the weights of all attention of a model within the `with` block.

    The parts are "encoder" and "decoder" (self-attention) and "cross" (attention to the source). A recurrent decoder
    with input feeding, or with the context as its input, attends step by step; its steps are joined after the block.
    """
    recorded: RecordedAttention = defaultdict(list)
    steps: list[Tensor] = []
    thread = threading.get_ident()

    def record(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if threading.get_ident() != thread:
            return
        with torch.no_grad():
            if isinstance(module, SelfAttention):
                part = "encoder" if module.pattern.bidirectional else "decoder"
                recorded[part].append(module.compute_weights(*inputs))
            elif isinstance(module, CrossAttention):
                recorded["cross"].append(module.compute_weights(*inputs))
            elif isinstance(module, SourceAttention) and module.score.has_context:
                steps.append(module.compute_weights(*inputs)[:, None])

    hooks = [module.register_forward_pre_hook(record) for module in model.modules()]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()
    if steps:
        recorded["cross"] = [torch.cat(steps, 2)]
