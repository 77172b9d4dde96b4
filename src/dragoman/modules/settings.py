"""What attention and positions are built from: the part of a Transformer's settings that this room reads."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dragoman.config.settings import Amount, Count, Fraction, Seed, Settings


class AttentionSettings(Settings):
    width: Annotated[int, Field(ge=1, le=65_536)] = 512
    heads: Count = 8
    query_width: Annotated[int, Field(ge=0, le=65_536)] = 0  # of queries and keys, all heads together; 0: the width
    value_width: Annotated[int, Field(ge=0, le=65_536)] = 0  # of values, all heads together; 0: the width
    projections: bool = True  # false: queries, keys and values are the tokens themselves, and nothing is learned
    scaled: bool = True  # scores divided by the root of a head's query width
    head_dropout: Fraction = 0.0  # of all that a head reads in a row, at training
    kernel: str = "auto"
    position: str = "sinusoidal"
    max_length: Count = 1024  # places that learned positions and Linformer know
    reach: Annotated[int, Field(ge=1, le=65_536)] = 16  # relative, tree: distances beyond this one count as this one
    attention: str = "full"  # the encoder's
    decoder_attention: str = "full"
    window: Count = 64  # local: tokens that are looked at on either side
    block: Count = 16  # BigBird: tokens of a block
    window_blocks: Count = 1  # BigBird: blocks that are looked at on either side, beside one's own
    global_blocks: Amount = 1  # BigBird: blocks at the start that look everywhere and are looked at by all
    random_blocks: Amount = 1  # BigBird: further blocks that each block looks at
    random_seed: Seed = 1  # BigBird: which ones they are
    rank: Count = 64  # Linformer: keys and values that a sentence is squeezed into

    @property
    def key_width(self) -> int:
        """Of one head."""
        return (self.query_width or self.width) // self.heads

    @property
    def head_width(self) -> int:
        """Of one head's values."""
        return (self.value_width or self.width) // self.heads
