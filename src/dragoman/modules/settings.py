"""The settings of attention and positions, a part of a Transformer's settings."""

from __future__ import annotations

from dragoman.config.settings import Amount, Count, Fraction, Seed, Settings, setting


class AttentionSettings(Settings):
    width: int = setting(512, "of a token's state", ge=1, le=65_536)
    heads: Count = setting(8, "of each attention")
    query_width: int = setting(0, "of queries and keys, all heads together; 0: the width", ge=0, le=65_536)
    value_width: int = setting(0, "of values, all heads together; 0: the width", ge=0, le=65_536)
    projections: bool = setting(
        True, "false: queries, keys and values are the token states themselves, without weights"
    )
    scaled: bool = setting(True, "divide scores by the square root of a head's query width")
    head_dropout: Fraction = setting(0.0, "of a head's whole output for a row, at training")
    kernel: str = setting("auto", "implementation of attention")
    position: str = setting("sinusoidal", "position encoding")
    max_length: Count = setting(1024, "number of positions for learned positions and Linformer")
    reach: int = setting(16, "relative, tree: larger distances are clipped to this one", ge=1, le=65_536)
    attention: str = setting("full", "the encoder's attention pattern")
    decoder_attention: str = setting("full", "the decoder's attention pattern")
    window: Count = setting(64, "local: tokens attended to on either side")
    block: Count = setting(16, "BigBird: tokens of a block")
    window_blocks: Count = setting(1, "BigBird: blocks attended to on either side, beside the own one")
    global_blocks: Amount = setting(1, "BigBird: blocks at the start that attend to all and are attended to by all")
    random_blocks: Amount = setting(1, "BigBird: further blocks that each block attends to")
    random_seed: Seed = setting(1, "BigBird: of the random blocks")
    rank: Count = setting(64, "Linformer: keys and values that a sentence is projected to")

    @property
    def key_width(self) -> int:
        """Of one head."""
        return (self.query_width or self.width) // self.heads

    @property
    def head_width(self) -> int:
        """Of one head's values."""
        return (self.value_width or self.width) // self.heads
