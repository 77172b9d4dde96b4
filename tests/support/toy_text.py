"""A small invented corpus for tests of tokenizers, one tokenizer of every kind trained on it, and difficult texts."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from dragoman.data.tokenizers import TOKENIZERS, TokenizerSettings, train_tokenizer
from dragoman.types import Pair

RANDOM = Random(1)
SYLLABLES = ["ba", "del", "fo", "gri", "mun", "ne", "pol", "ra", "sti", "tor", "um", "ver", "wi", "schö", "ßen", "zü"]
WORDS = ["dog", "The", "größer", *("".join(RANDOM.choices(SYLLABLES, k=RANDOM.randint(1, 4))) for _ in range(300))]


def _side(form: str) -> str:
    return form.format(*RANDOM.choices(WORDS, weights=range(len(WORDS), 0, -1), k=5))


PAIRS = [Pair(_side("The dog, it {} {}/{} the {} {}!"), _side("Für {}: {} „{} {}“ ({}).")) for _ in range(200)]
LINES = [side for pair in PAIRS for side in (pair.source, pair.target)]
SIZE = 400
SIZES = {  # tokenizers that do not split off punctuation need more entries
    kind: SIZE if tokenizer.splits_punctuation else 4000 for kind, tokenizer in TOKENIZERS.items()
}
ALL = {kind: train_tokenizer(LINES, TokenizerSettings(kind=kind, size=SIZES[kind])) for kind in TOKENIZERS}

ODD = ["▁", "▅", "\ue581", "\ue5810", " ", "  ", "\t", "\n", "\r\n", "\0", "\u2028", "\ufeff", "日本", "🎉", "e\u0301"]
ODD += ["<s>", "</s>", "<unk>", "<pad>", "<0x41>", "<", "￭", "The", " dog", "größer", "1", "2"]
TEXT = st.lists(st.sampled_from(ODD) | st.text(max_size=3), max_size=8).map("".join)
