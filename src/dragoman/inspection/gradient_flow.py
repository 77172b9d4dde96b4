"""Gradient flow: the size of the loss's gradient at earlier inputs, relative to its size at the latest input.

    flow = measure_gradient_flow(model, batch)
    flow.target[3]     # size of the gradient three tokens before the latest input, relative to that at this input

A model whose gradient vanishes over a distance gets hardly any signal from there, and may have to learn dependencies of
that length by way of shorter ones. Gradients are taken with respect to the token embeddings, through a hook, so that
any kind of model can be examined.

Shapes   B rows   T target width   S source width   C embedding width   V vocabulary   D distances
         N tokens whose losses were differentiated (sentences, for the source)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.models.base import Model
from dragoman.types import Batch

MIN_RATIO = 1e-12  # smaller ratios are raised to this one, so that logarithms are finite
MIN_FRACTION = 0.04  # a distance is left out if a smaller fraction of all tokens has an input at this distance


class GradientFlow(NamedTuple):
    """Sizes of gradients by distance, relative to distance 0: geometric means over all tokens of all sentences."""

    target: list[float]  # of the loss of a target token; distances count back from the input that predicts the token
    source: list[float]  # of the loss of the full target; distances count back from the end of the source


def measure_gradient_flow(model: Model, batch: Batch) -> GradientFlow:
    """Return how gradients decay with distance. The batch must be unpacked: with one sentence per row.

    There is a backward pass for each target position, and one for the source. The list of a side that the model does
    not read is empty: the source of a language model, the target of a classifier.
    """
    assert batch.is_unpacked
    with (
        capture_embeddings(model) as embeddings,
        torch.backends.cudnn.flags(enabled=False),  # cuDNN has no backward pass for recurrent models in eval mode
    ):
        logits_BTV = model.compute_logits(model(batch))
        loss_BT = nn.functional.cross_entropy(logits_BTV.transpose(1, 2), batch.target_out_BT, reduction="none")
        loss_BT = loss_BT * (batch.target_segment_BT > 0)  # 0 at padding
        target_BTC, source_BSC = embeddings.get("target"), embeddings.get("source")
        target_ratios: list[Tensor] = []
        for position in range(loss_BT.size(1)):
            if target_BTC is None:
                break
            real_B = batch.target_segment_BT[:, position] > 0
            [grad_BTC] = torch.autograd.grad(loss_BT[:, position].sum(), target_BTC, retain_graph=True)
            target_ratios.append(compute_log_ratios(grad_BTC[real_B, : position + 1].norm(dim=-1).flip(1)))
        source_ratios: list[Tensor] = []
        if source_BSC is not None:
            [grad_BSC] = torch.autograd.grad(loss_BT.sum(), source_BSC)
            size_BS = grad_BSC.norm(dim=-1)
            ends = (batch.source_segment_BS > 0).sum(1).tolist()
            source_ratios = [compute_log_ratios(size_S[None, :end].flip(1)) for size_S, end in zip(size_BS, ends)]
    return GradientFlow(average_columns(target_ratios), average_columns(source_ratios))


def compute_log_ratios(size_ND: Tensor) -> Tensor:
    """Return the logarithms of the entries divided by the first entry of their row; drop rows that start with 0."""
    size_ND = size_ND[size_ND[:, 0] > 0].double()
    return (size_ND / size_ND[:, :1]).clamp(min=MIN_RATIO).log()


def average_columns(tables: list[Tensor]) -> list[float]:
    """Return the geometric mean of each column over all tables that have it; leave out columns with too few rows."""
    columns = [
        torch.cat([log_ND[:, distance] for log_ND in tables if log_ND.size(1) > distance])
        for distance in range(max((log_ND.size(1) for log_ND in tables), default=0))
    ]
    return [float(column_N.mean().exp()) for column_N in columns if len(column_N) > MIN_FRACTION * len(columns[0])]


def keep_embeddings(_side: str, x_BTC: Tensor) -> Tensor:
    return x_BTC


@contextmanager
def capture_embeddings(
    model: Model, transform: Callable[[str, Tensor], Tensor] = keep_embeddings
) -> Iterator[dict[str, Tensor]]:
    """Collect the token embeddings of a forward pass within the `with` block as leaf tensors that get gradients.

    The keys are "source" and "target", as far as the model has these sides. Positions are added later, so they are no
    part of the embeddings. `transform(side, x_BTC)` returns embeddings that the model uses instead of x_BTC. Other
    threads may use the model meanwhile, as in a server: nothing changes for them.
    """
    embeddings: dict[str, Tensor] = {}
    thread = threading.get_ident()

    def make_hook(side: str) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
        def make_leaf(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            if threading.get_ident() != thread:
                return inputs
            embeddings[side] = transform(side, inputs[0].detach()).requires_grad_()
            return embeddings[side], *inputs[1:]

        return make_leaf

    # Encoder and decoder may share their embedding table, but each has its own `word_dropout`, which reads the
    # embeddings first. So the side of a token is certain even if source and target have the same ids.
    hooks = [
        part.word_dropout.register_forward_pre_hook(make_hook(side)) for side, part in find_embedders(model).items()
    ]
    try:
        yield embeddings
    finally:
        for hook in hooks:
            hook.remove()


def find_embedders(model: Model) -> dict[str, Any]:
    """Return the parts of a model that embed tokens by side: "source", the encoder, and "target", the decoder."""
    names = {"source": "encoder", "target": "decoder"}
    return {side: getattr(model, name) for side, name in names.items() if hasattr(model, name)}
