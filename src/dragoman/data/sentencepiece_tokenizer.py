"""The tokenizer of a published model: SentencePiece, with the vocabulary and the language tokens of that model.

SentencePiece splits a text into pieces, after a normalization of its own, and a table maps pieces to ids. Published
models keep both apart: MarianMT has one table for the pieces of two SentencePiece models. So pieces may be unknown to
the table (they become <unk>), and tokens of the table may be no pieces: those of other languages, language tokens such
as `__en__`, and tokens that were never used.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dragoman.config.settings import Settings
from dragoman.data.subwords import SPACE_MARK
from dragoman.data.tokenizer import Tokenizer
from dragoman.errors import UserError
from dragoman.types import SPECIALS, UNK

LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class SentencePieceTokenizer(Tokenizer):
    """A vocabulary of a published model, in the order of Dragoman's ids.

    `languages` maps language codes to the tokens that stand for them. If `begins_targets`, each target begins with the
    token of its language and each source with that of its own; otherwise a source begins with the target's.
    """

    lossless = False

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        import sentencepiece  # here, because recipes import this module and must load quickly

        values = json.loads(content)
        self.processor: Any = sentencepiece.SentencePieceProcessor(model_proto=base64.b64decode(values["model"]))
        self.symbols: list[str] = values["vocabulary"]
        self.specials: frozenset[str] = frozenset(values["specials"])  # symbols that are no text
        self.languages: dict[str, str] = values["languages"]
        self.begins_targets: bool = values["begins_targets"]
        self.size = len(self.symbols)
        self.ids = {symbol: i for i, symbol in enumerate(self.symbols) if i >= len(SPECIALS)}
        self.text_ids = {symbol: i for symbol, i in self.ids.items() if symbol not in self.specials}
        self.token_texts = self.symbols

    @classmethod
    def build(
        cls,
        model: bytes,
        symbols: Sequence[str],
        *,
        specials: Iterable[str] = (),
        languages: Mapping[str, str] | None = None,
        begins_targets: bool = False,
    ) -> SentencePieceTokenizer:
        """Return the tokenizer of a SentencePiece model file. `symbols` has a token for each id, SPECIALS first."""
        values = {
            "vocabulary": list(symbols),
            "specials": sorted(specials),
            "languages": dict(languages or {}),
            "begins_targets": begins_targets,
            "model": base64.b64encode(model).decode(),
        }
        return cls((json.dumps(values, ensure_ascii=False) + "\n").encode())

    @classmethod
    def train(cls, lines: Sequence[str], settings: Settings) -> SentencePieceTokenizer:  # noqa: ARG003
        raise UserError("tokenizer.kind=sentencepiece comes with imported models only; choose bpe or unigram")

    def encode(self, text: str) -> list[int]:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        valid = [LONE_SURROGATE.sub("\ufffd", text) for text in texts]
        # Pieces as text, because an unknown piece, which is spelled as in the text, may be in the vocabulary.
        split: list[list[str]] = self.processor.encode(valid, out_type=str)
        return [[self.text_ids.get(piece, UNK) for piece in pieces] for pieces in split]

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes().__getitem__, ids)).decode(errors="replace").strip(" ")

    def token_bytes(self) -> list[bytes]:
        if not hasattr(self, "bytes_by_id"):
            ordinary = [symbol.replace(SPACE_MARK, " ").encode() for symbol in self.symbols[len(SPECIALS) :]]
            is_text = [symbol not in self.specials for symbol in self.symbols[len(SPECIALS) :]]
            self.bytes_by_id = [b""] * len(SPECIALS) + [text if real else b"" for text, real in zip(ordinary, is_text)]
        return self.bytes_by_id

    def find_special(self, name: str) -> int | None:
        return self.ids.get(name) if name in self.specials else None
