"""A model with what it is to learn: batches in, sums of the loss out. What is compiled, captured and shared out.

Shapes   B rows   T target width   C model width   N tokens
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dragoman.config import TrainSettings
from dragoman.models.base import Model
from dragoman.nn.dropout import cut
from dragoman.train.loss import LOSSES
from dragoman.types import Batch


class Learner(nn.Module):
    def __init__(self, model: Model, settings: TrainSettings) -> None:
        super().__init__()
        self.model, self.settings = model, settings
        self.loss = LOSSES[settings.loss]

    def forward(self, batch: Batch) -> Tensor:
        """The loss, with its slope, and the plain negative log-likelihood: sums over the batch's real target tokens."""
        with cut(batch.first, batch.height):
            states_BTC = self.model(batch)
        states_NC, target_N = real(states_BTC, batch)
        sums = self.loss(states_NC, self.model.project.weight, target_N, self.settings.label_smoothing)
        return torch.stack(sums)

    def compile_layers(self) -> None:
        """Each kind of layer is compiled once, for all layers of that kind; what stands between them is little."""
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList):
                for layer in module:
                    layer.compile(dynamic=False)


def real(states_BTC: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The states and the right answers at all places that count.

    A GPU would have to stop and count them; there all places are given, and where none counts the answer is below 0.
    """
    real_BT = batch.target_segment_BT > 0
    if states_BTC.device.type == "cpu":
        return states_BTC[real_BT], batch.target_out_BT[real_BT]
    return states_BTC.flatten(0, 1), torch.where(real_BT, batch.target_out_BT, -1).flatten()
