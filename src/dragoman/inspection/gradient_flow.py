"""How far a mistake is felt: how much of the loss's slope is left at inputs that lie some steps back.

    flow = gradient_by_distance(model, batch)
    flow.target[3]     # of the slope at a target token's own input, the share that is left three inputs before

A model that cannot carry a gradient over a distance cannot learn what depends on it. The slope is taken with respect
to the embedded tokens, which a hook hands over, so that any kind of model can be asked.

Shapes   B rows   T target width   S source width   C embedding width   D distances   N slopes
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.models.base import Seq2Seq
from dragoman.types import Batch

MIN_SHARE = 1e-12  # share that is told from nothing
MIN_REACH = 0.04  # of all slopes: a distance that fewer reach is left out


class GradientFlow(NamedTuple):
    """Shares by distance, from 0 on, where it is 1: geometric means over all tokens of all sentences.

    Those of the source count from its end, where decoding begins, and are of the loss of the whole target.
    """

    target: list[float]
    source: list[float]


def gradient_by_distance(model: Seq2Seq, batch: Batch) -> GradientFlow:
    """One sentence to a row. The slope of each target token's loss is taken apart from all others."""
    assert batch.unpacked
    with (
        capture_embeddings(model, batch.target_in_BT, batch.source_BS) as held,
        torch.backends.cudnn.flags(enabled=False),
    ):
        loss_BT = compute_token_losses(model, batch)
        target_BTC, source_BSC = held[0], held[1]
        shares: list[Tensor] = []
        for place in range(loss_BT.size(1)):
            real_B = batch.target_segment_BT[:, place] > 0
            [slope_BTC] = torch.autograd.grad(loss_BT[:, place].sum(), target_BTC, retain_graph=True)
            shares.append(compute_log_shares(slope_BTC[real_B, : place + 1].norm(dim=-1).flip(1)))
        [slope_BSC] = torch.autograd.grad(loss_BT.sum(), source_BSC)
    size_BS = slope_BSC.norm(dim=-1)
    ends = (batch.source_segment_BS > 0).sum(1).tolist()
    source = [compute_log_shares(size_S[None, :end].flip(1)) for size_S, end in zip(size_BS, ends, strict=True)]
    return GradientFlow(average_columns(shares), average_columns(source))


def compute_log_shares(size_ND: Tensor) -> Tensor:
    """What is left of each row's first entry, where there is one, as logarithms."""
    size_ND = size_ND[size_ND[:, 0] > 0].double()
    return (size_ND / size_ND[:, :1]).clamp(min=MIN_SHARE).log()


def average_columns(many: list[Tensor]) -> list[float]:
    """The mean of each column over all tables that have it, as far as enough rows reach."""
    columns = [
        torch.cat([log_ND[:, distance] for log_ND in many if log_ND.size(1) > distance])
        for distance in range(max((log_ND.size(1) for log_ND in many), default=0))
    ]
    return [float(column_N.mean().exp()) for column_N in columns if len(column_N) > MIN_REACH * len(columns[0])]


def compute_token_losses(model: Seq2Seq, batch: Batch) -> Tensor:
    """Of every target token; 0 at padding."""
    logits_BTV = model.project(model(batch))
    loss_BT = nn.functional.cross_entropy(logits_BTV.transpose(1, 2), batch.target_out_BT, reduction="none")
    return loss_BT * (batch.target_segment_BT > 0)


@contextmanager
def capture_embeddings(model: nn.Module, *ids: Tensor) -> Iterator[dict[int, Tensor]]:
    """Inside, what the model's tables give for these ids is kept, as leaves whose slopes can be asked for."""
    held: dict[int, Tensor] = {}

    def keep(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        for number, wanted in enumerate(ids):
            if inputs[0].shape == wanted.shape and torch.equal(inputs[0], wanted):
                held[number] = output.detach().requires_grad_()
                return held[number]
        return output

    hooks = [module.register_forward_hook(keep) for module in model.modules() if isinstance(module, nn.Embedding)]
    try:
        yield held
    finally:
        for hook in hooks:
            hook.remove()
