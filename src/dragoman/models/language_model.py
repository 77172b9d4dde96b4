"""Language models: a decoder without a source.

Shapes   B rows   S source width   T target width   C model width   N rows of a search   V vocabulary
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dragoman.kernels.masks import RowLayout
from dragoman.models.base import AutoregressiveModel, initialize_parameters
from dragoman.models.rnn import RecurrentLmDecoder
from dragoman.models.settings import LmSettings, RnnLmSettings
from dragoman.models.transformer import Decoder
from dragoman.types import Batch


class LanguageModel(AutoregressiveModel):
    """A model of the next token, given all tokens before it."""

    def __init__(self, settings: LmSettings, *, source_size: int, target_size: int, joint: bool) -> None:  # noqa: ARG002
        super().__init__()
        settings.check()
        self.settings = settings
        self.decoder: RecurrentLmDecoder | Decoder
        if isinstance(settings, RnnLmSettings):
            self.decoder = RecurrentLmDecoder(settings, nn.Embedding(target_size, settings.embedded_width))
        else:
            self.decoder = Decoder(settings, nn.Embedding(target_size, settings.width), cross=False)
        self.project = nn.Linear(settings.output_width, target_size, bias=False)
        initialize_parameters(self)
        if settings.tied:
            self.project.weight = self.decoder.embedding.weight

    def forward(self, batch: Batch) -> Tensor:
        out: Tensor = self.decoder(batch.target_in_BT, RowLayout.from_target(batch))
        return out

    def start(self, source_BS: Tensor, keep_BS: Tensor) -> Any:  # noqa: ARG002 - the protocol's signature
        """Return the state before the first token, one row per source; the sources are ignored."""
        return self.decoder.start(len(source_BS))
