"""A Transformer encoder with a recurrent decoder, for small fast models. One sentence per row.

The source is encoded once, so depth there is cheap; each generated token, in every beam, costs a few recurrent cells
instead of a stack of attentions.

Shapes   B rows   S source width   C state width   V vocabulary
"""

from __future__ import annotations

from torch import Tensor, nn

from dragoman.kernels.masks import RowLayout
from dragoman.models.base import initialize_parameters
from dragoman.models.rnn import RecurrentDecoder, RecurrentSeq2Seq
from dragoman.models.settings import HybridSettings
from dragoman.models.transformer import Encoder
from dragoman.modules.linear import Linear


class HybridEncoder(Encoder):
    """A Transformer encoder whose states have the width of the decoder."""

    def __init__(self, settings: HybridSettings, embedding: nn.Embedding) -> None:
        super().__init__(settings, embedding)
        widths = settings.width, settings.state_width
        self.out = Linear(*widths) if widths[0] != widths[1] else nn.Identity()

    def encode(self, ids_BS: Tensor, rows: RowLayout) -> tuple[Tensor, Tensor]:
        """Return the states, memory_BSC, and their mean, mean_BC, from which the decoder's initial state is made."""
        memory_BSC: Tensor = self.out(self(ids_BS, rows))
        real_BS1 = rows.real_BT[..., None]
        return memory_BSC, memory_BSC.where(real_BS1, 0.0).sum(1) / real_BS1.sum(1).clamp(min=1)


class Hybrid(RecurrentSeq2Seq):
    """A Transformer encoder with a recurrent decoder; `project` maps states to logits."""

    def __init__(self, settings: HybridSettings, *, source_size: int, target_size: int, joint: bool) -> None:
        super().__init__()
        settings.check()
        self.settings = settings
        decoder = settings.of_decoder()
        same = joint and settings.tied and settings.embedded_width == settings.width
        size = source_size if same else target_size  # tags are read, never generated
        table = nn.Embedding(size, settings.embedded_width)
        self.decoder = RecurrentDecoder(decoder, table)  # first, so that a shared table is named after it
        self.encoder = HybridEncoder(settings, table if same else nn.Embedding(source_size, settings.width))
        self.project = nn.Linear(decoder.output_width, size, bias=False)
        self.output_size = target_size
        initialize_parameters(self)
        if settings.tied:
            self.project.weight = table.weight
