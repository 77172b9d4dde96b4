"""Gradient flow: how much of the loss's gradient is left at inputs some steps back.

    flow = gradient_by_distance(model, batch)
    flow.target[3]     # the gradient three inputs before a target token, relative to that at its own input

A model whose gradient vanishes over a distance cannot learn dependencies of that length. Gradients are taken with
respect to the token embeddings, through a hook, so that any kind of model can be examined.

Shapes   B rows   T target width   S source width   C embedding width   D distances   N gradients
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.models.base import Seq2Seq
from dragoman.types import Batch

MIN_SHARE = 1e-12  # smaller shares count as this one
MIN_REACH = 0.04  # of all gradients: a distance that fewer tokens reach is left out


class GradientFlow(NamedTuple):
    """Shares of the gradient by distance, 1 at distance 0: geometric means over all tokens of all sentences.

    Source distances count from its end, where decoding begins, and refer to the loss of the full target.
    """

    target: list[float]
    source: list[float]


def gradient_by_distance(model: Seq2Seq, batch: Batch) -> GradientFlow:
    """Return how gradients decay with distance, given one sentence per row and one gradient per target token."""
    assert batch.unpacked
    with (
        capture_embeddings(model, batch.target_in_BT, batch.source_BS) as embedded,
        torch.backends.cudnn.flags(enabled=False),
    ):
        logits_BTV = model.project(model(batch))
        loss_BT = nn.functional.cross_entropy(logits_BTV.transpose(1, 2), batch.target_out_BT, reduction="none")
        loss_BT = loss_BT * (batch.target_segment_BT > 0)  # 0 at padding
        target_BTC, source_BSC = embedded[0], embedded[1]
        shares: list[Tensor] = []
        for position in range(loss_BT.size(1)):
            real_B = batch.target_segment_BT[:, position] > 0
            [grad_BTC] = torch.autograd.grad(loss_BT[:, position].sum(), target_BTC, retain_graph=True)
            shares.append(compute_log_shares(grad_BTC[real_B, : position + 1].norm(dim=-1).flip(1)))
        [grad_BSC] = torch.autograd.grad(loss_BT.sum(), source_BSC)
    size_BS = grad_BSC.norm(dim=-1)
    ends = (batch.source_segment_BS > 0).sum(1).tolist()
    source = [compute_log_shares(size_S[None, :end].flip(1)) for size_S, end in zip(size_BS, ends, strict=True)]
    return GradientFlow(average_columns(shares), average_columns(source))


def compute_log_shares(size_ND: Tensor) -> Tensor:
    """Return the logarithm of each row relative to its first entry, without rows whose first entry is 0."""
    size_ND = size_ND[size_ND[:, 0] > 0].double()
    return (size_ND / size_ND[:, :1]).clamp(min=MIN_SHARE).log()


def average_columns(tables: list[Tensor]) -> list[float]:
    """Return the geometric mean of each column over all tables that have it, as far as enough rows reach."""
    columns = [
        torch.cat([log_ND[:, distance] for log_ND in tables if log_ND.size(1) > distance])
        for distance in range(max((log_ND.size(1) for log_ND in tables), default=0))
    ]
    return [float(column_N.mean().exp()) for column_N in columns if len(column_N) > MIN_REACH * len(columns[0])]


@contextmanager
def capture_embeddings(model: nn.Module, *ids: Tensor) -> Iterator[dict[int, Tensor]]:
    """Collect the embeddings of these ids during the block, as leaf tensors that get gradients."""
    embedded: dict[int, Tensor] = {}

    def make_leaf(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        for number, wanted in enumerate(ids):
            if inputs[0].shape == wanted.shape and torch.equal(inputs[0], wanted):
                embedded[number] = output.detach().requires_grad_()
                return embedded[number]
        return output

    hooks = [module.register_forward_hook(make_leaf) for module in model.modules() if isinstance(module, nn.Embedding)]
    try:
        yield embedded
    finally:
        for hook in hooks:
            hook.remove()
