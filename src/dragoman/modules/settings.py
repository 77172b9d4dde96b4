"""The settings of attention and positions, a part of a Transformer's settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dragoman.config.settings import Amount, Count, Fraction, Seed, Settings


class AttentionSettings(Settings):
    width: Annotated[int, Field(ge=1, le=65_536)] = Field(default=512, description="of a token's state")
    heads: Count = Field(default=8, description="of each attention")
    query_width: Annotated[int, Field(ge=0, le=65_536)] = Field(
        default=0, description="of queries and keys, all heads together; 0: the width"
    )
    value_width: Annotated[int, Field(ge=0, le=65_536)] = Field(
        default=0, description="of values, all heads together; 0: the width"
    )
    projections: bool = Field(
        default=True, description="false: queries, keys and values are the token states themselves, without weights"
    )
    scaled: bool = Field(default=True, description="divide scores by the square root of a head's query width")
    head_dropout: Fraction = Field(default=0.0, description="of a head's whole output for a row, at training")
    kernel: str = Field(default="auto", description="implementation of attention")
    position: str = Field(default="sinusoidal", description="position encoding")
    max_length: Count = Field(default=1024, description="number of positions for learned positions and Linformer")
    reach: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=16, description="relative, tree: larger distances are clipped to this one"
    )
    attention: str = Field(default="full", description="the encoder's attention pattern")
    decoder_attention: str = Field(default="full", description="the decoder's attention pattern")
    window: Count = Field(default=64, description="local: tokens attended to on either side")
    block: Count = Field(default=16, description="BigBird: tokens of a block")
    window_blocks: Count = Field(
        default=1, description="BigBird: blocks attended to on either side, beside the own one"
    )
    global_blocks: Amount = Field(
        default=1, description="BigBird: blocks at the start that attend to all and are attended to by all"
    )
    random_blocks: Amount = Field(default=1, description="BigBird: further blocks that each block attends to")
    random_seed: Seed = Field(default=1, description="BigBird: of the random blocks")
    rank: Count = Field(default=64, description="Linformer: keys and values that a sentence is projected to")

    @property
    def key_width(self) -> int:
        """Of one head."""
        return (self.query_width or self.width) // self.heads

    @property
    def head_width(self) -> int:
        """Of one head's values."""
        return (self.value_width or self.width) // self.heads
