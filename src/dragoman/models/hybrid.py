"""A Transformer reads, a recurrent decoder writes: made for students. One sentence to a row.

The source is read once, so depth there is cheap; a token that is written, in every beam, costs a few cells instead of
a stack of attentions.

Shapes   B rows   S source width   C width of a state   V vocabulary
"""

from __future__ import annotations

from torch import Tensor, nn

from dragoman.kernels.masks import RowLayout
from dragoman.models.base import initialize_parameters
from dragoman.models.rnn import RecurrentDecoder, RecurrentSeq2Seq
from dragoman.models.settings import HybridSettings
from dragoman.models.transformer import Encoder
from dragoman.modules.linear import Linear


class ReadingEncoder(Encoder):
    """A Transformer's encoder whose states have the width that the decoder asks for."""

    def __init__(self, settings: HybridSettings, embedding: nn.Embedding) -> None:
        super().__init__(settings, embedding)
        widths = settings.width, settings.state_width
        self.out = Linear(*widths) if widths[0] != widths[1] else nn.Identity()

    def read(self, ids_BS: Tensor, rows: RowLayout) -> tuple[Tensor, Tensor]:
        """The states, memory_BSC, and their mean, which the decoder starts from: no token has seen more than others."""
        memory_BSC: Tensor = self.out(self(ids_BS, rows))
        real_BS1 = rows.real_BT[..., None]
        return memory_BSC, memory_BSC.where(real_BS1, 0.0).sum(1) / real_BS1.sum(1).clamp(min=1)


class Hybrid(RecurrentSeq2Seq):
    """`project` turns states into logits."""

    def __init__(self, settings: HybridSettings, *, source_size: int, target_size: int, joint: bool) -> None:
        super().__init__()
        settings.check()
        self.settings = settings
        decoder = settings.of_decoder()
        same = joint and settings.tied and settings.embedded_width == settings.width
        size = source_size if same else target_size  # tags are read, and never said
        table = nn.Embedding(size, settings.embedded_width)
        self.decoder = RecurrentDecoder(decoder, table)  # the first: a table that both read is called by its name
        self.encoder = ReadingEncoder(settings, table if same else nn.Embedding(source_size, settings.width))
        self.project = nn.Linear(decoder.said_width, size, bias=False)
        self.spoken = target_size
        initialize_parameters(self)
        if settings.tied:
            self.project.weight = table.weight
