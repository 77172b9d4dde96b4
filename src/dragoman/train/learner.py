"""A model with what it is to learn: batches in, sums of the loss out. What is compiled, captured and shared out.

Shapes   B rows   T target width   C model width   N tokens
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dragoman.config import TrainSettings
from dragoman.models.base import Model
from dragoman.nn.dropout import cut
from dragoman.train import consistency
from dragoman.train.consistency import CONSISTENCY, passes, twice
from dragoman.train.loss import LOSSES
from dragoman.types import Batch

AVOIDED = ("triton.mix_order_reduction",)  # of what the compiler does: it doubles the time that a norm's slopes take


class Learner(nn.Module):
    def __init__(self, model: Model, settings: TrainSettings) -> None:
        super().__init__()
        self.model, self.settings = model, settings
        self.loss = LOSSES[settings.loss]
        self.consistency, self.of_both = CONSISTENCY[settings.consistency], consistency.LOSSES[settings.loss]

    def forward(self, batch: Batch) -> Tensor:
        """The loss, with its slope, the plain negative log-likelihood, and how far two passes are apart, if there are
        two: sums over the batch's real target tokens."""
        with cut(batch.first, batch.height, passes(self.settings)):
            if self.consistency:
                batch = twice(batch, self.consistency, self.settings.cut)
            states_BTC = self.model(batch)
        return torch.stack(self.sums(*real(states_BTC, batch)))

    def sums(self, states_NC: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight_VC, smoothing = self.model.project.weight, self.settings.label_smoothing
        if not self.consistency:
            loss, likelihood = self.loss(states_NC, weight_VC, target_N, smoothing)
            return loss, likelihood, torch.zeros_like(likelihood)
        states_2NC, target_N = states_NC.view(2, -1, states_NC.size(-1)), target_N.chunk(2)[0]
        weight = self.settings.consistency_weight
        return self.of_both(states_2NC, weight_VC, target_N, smoothing, self.consistency, weight)

    def compile_layers(self) -> None:
        """Each kind of layer is compiled once, for all layers of that kind; what stands between them is little."""
        options: dict[str, Any] = {name: False for name in AVOIDED if name in torch._inductor.list_options()}
        for stack in self.model.modules():
            if isinstance(layers := getattr(stack, "layers", None), nn.ModuleList):
                stack.embed = torch.compile(stack.embed, dynamic=False, options=options)  # type: ignore
                for part in (*layers, stack.norm):
                    part.compile(dynamic=False, options=options)
        self.of_both = consistency.compiled(self.of_both)


def real(states_BTC: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The states and the right answers at all places that count.

    A GPU would have to stop and count them; there all places are given, and where none counts the answer is below 0.
    """
    real_BT = batch.target_segment_BT > 0
    if states_BTC.device.type == "cpu":
        return states_BTC[real_BT], batch.target_out_BT[real_BT]
    return states_BTC.flatten(0, 1), torch.where(real_BT, batch.target_out_BT, -1).flatten()
