"""A Transformer reads, a recurrent decoder writes: made for students. One sentence to a row.

The source is read once, so depth there is cheap; a token that is written, in every beam, costs a few cells instead of
a stack of attentions.

Shapes   B rows   S source width   C width of a state   V vocabulary
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from dragoman.config.settings import Layers, Menus
from dragoman.kernels.masks import RowLayout
from dragoman.models.base import initialize_parameters, useless
from dragoman.models.rnn import RecurrentDecoder, RecurrentSeq2Seq, RnnSettings, Width
from dragoman.models.transformer import Encoder, TransformerSettings
from dragoman.modules.attention_scores import SCORES
from dragoman.modules.linear import Linear
from dragoman.modules.recurrent import CELLS


class HybridSettings(TransformerSettings):
    """The encoder's settings are a Transformer's; those of the decoder follow here."""

    kind: Literal["hybrid"] = "hybrid"  # type: ignore[assignment]
    decoder_layers: Annotated[Layers, Field(ge=1)] = 1  # of cells
    cell: str = "lstm"
    score: str = "additive"  # of the decoder's attention to the source
    score_width: Width = 0  # of additive scores; 0: decoder_width
    decoder_width: Width = 0  # of a cell's state; 0: the width
    embedding_width: Width = 0  # of target embeddings and, if tied, output; 0: the width, and the source's are the same
    input_feeding: bool = False  # what is said at a step goes into the next one too
    compiles: ClassVar[bool] = False
    absent: ClassVar[tuple[str, ...]] = ("decoder_attention",)

    @classmethod
    def menus(cls) -> Menus:
        return {**super().menus(), "cell": CELLS, "score": SCORES}

    def check(self) -> None:
        super().check()
        useless(self, "a hybrid, whose decoder is recurrent", *self.absent)
        if not SCORES[self.score].sized:
            useless(self, f"model.score={self.score}", "score_width")

    @property
    def layout(self) -> str:
        return "padded"

    @property
    def aligns(self) -> bool:
        return SCORES[self.score].aligns

    @property
    def state_width(self) -> int:
        return self.decoder_width or self.width

    @property
    def embedded_width(self) -> int:
        return self.embedding_width or self.width

    def of_decoder(self) -> RnnSettings:
        """The decoder as a recurrent model calls it."""
        return RnnSettings(
            cell=self.cell,
            decoder_layers=self.decoder_layers,
            width=self.state_width,
            embedding_width=self.embedded_width,
            attention=self.score,
            attention_width=self.score_width,
            input_feeding=self.input_feeding,
            dropout=self.dropout,
            target_word_dropout=self.target_word_dropout,
            tied=self.tied,
        )


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
