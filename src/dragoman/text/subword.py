"""Subword kinds, BPE and unigram, learned and applied by SentencePiece on raw text, with nothing normalised away.

SentencePiece keeps two characters for itself: U+2581, which stands for a space, and U+2585, whose lines it leaves out
of training. Text that holds them is escaped, so that text in is text out, whatever it holds.
"""

from __future__ import annotations

import io
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, ClassVar, Self

import sentencepiece

from dragoman.config import TokenizerSettings
from dragoman.text.subword_sampling import Lexicon, Sampler, bpe_dropout, unigram_sample
from dragoman.text.symbols import BYTES, SPACE, Tokenizer, one_after_another
from dragoman.types import BOS, EOS, PAD, SPECIALS, UNK, UserError

LEARNT_AT_ONCE = 4000  # letters
ESCAPE = "\ue581"  # of the private use area; itself escaped, so that the way back is exact
ESCAPES = {ESCAPE: ESCAPE + "0", SPACE: ESCAPE + "1", "\u2585": ESCAPE + "2"}


def escape(text: str) -> str:
    for character, code in ESCAPES.items():
        if character in text:
            text = text.replace(character, code)
    return text


def unescape(text: str) -> str:
    if ESCAPE in text:
        for character, code in reversed(ESCAPES.items()):
            text = text.replace(code, character)
    return text


def in_parts(line: str) -> list[str]:
    """The line in parts of a size that SentencePiece can learn from: a word of 65,536 letters would abort it."""
    return [line[start : start + LEARNT_AT_ONCE] for start in range(0, len(line), LEARNT_AT_ONCE)]


class Subword(Tokenizer):
    """Pieces of words, from a SentencePiece model."""

    suffix = ".model"
    kind: ClassVar[str]

    @staticmethod
    @abstractmethod
    def cut(word: str, lexicon: Lexicon, rate: float, draws: Iterator[float]) -> list[str]:
        """One random way to cut a word into pieces."""

    def __init__(self, model: bytes) -> None:
        self.model = model
        self.processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.size = self.processor.get_piece_size()
        pieces: list[str] = self.processor.id_to_piece(list(range(self.size)))
        byte_ids = [self.processor.piece_to_id(name) for name in BYTES] if pieces[4] == BYTES[0] else []
        ordinary = range(len(SPECIALS) + len(byte_ids), self.size)
        self.lossless = bool(byte_ids)
        self.spelling = [b""] * len(SPECIALS) + [bytes([b]) for b in range(len(byte_ids))]
        self.spelling += [pieces[i].encode() for i in ordinary]
        self.shown = [unescape(piece) for piece in pieces]
        scores: list[float] = self.processor.get_score(list(range(self.size)))
        lexicon = Lexicon({pieces[i]: i for i in ordinary}, {pieces[i]: scores[i] for i in ordinary}, byte_ids)
        self.sampler = Sampler(lexicon, self.cut, SPACE)

    @classmethod
    def train(cls, lines: Sequence[str], settings: TokenizerSettings) -> Self:
        if not any(lines):
            raise UserError(f"there is no text to learn {cls.kind} pieces from; every line is empty")
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(escape(part) for line in lines for part in in_parts(line)),
                model_writer=model,
                model_type=cls.kind,
                vocab_size=settings.size,
                byte_fallback=settings.byte_fallback,
                character_coverage=0.9995 if settings.byte_fallback else 1.0,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                max_sentence_length=1 << 30,  # longer lines would be left out
                pad_id=PAD,
                unk_id=UNK,
                bos_id=BOS,
                eos_id=EOS,
                num_threads=4,  # a constant: sums differ in their last digit with the number of threads
                minloglevel=2,
            )
        except (RuntimeError, ValueError) as error:
            raise _mistake(str(error), settings) from None
        return cls(model.getvalue())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.processor.encode(escape(text))
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self.processor.encode([escape(text) for text in texts])
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        text = b"".join(map(self.spelling.__getitem__, ids)).decode(errors="replace")
        return unescape(text.removeprefix(SPACE).replace(SPACE, " "))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return list(map(self.shown.__getitem__, ids))

    def spellings(self) -> list[bytes]:
        return [spelt.replace(SPACE.encode(), b" ") for spelt in self.spelling]

    def starts(self, text: str, ids: Sequence[int]) -> list[int] | None:
        sizes = [len(self.spelling[i].replace(SPACE.encode(), b"")) for i in ids]
        if not self.lossless:  # an unknown piece is a run of letters that are no pieces
            lexicon, escaped = self.sampler.lexicon, escape(text).replace(" ", SPACE)
            unknown = iter(
                [len("".join(run).encode()) for known, run in groupby(escaped, lexicon.ids.__contains__) if not known]
            )
            sizes = [next(unknown, 0) if i == UNK else size for i, size in zip(ids, sizes)]
        return one_after_another(sizes, text)

    samples = True

    def sample(self, text: str, *, rate: float, key: tuple[int, int, int]) -> list[int]:
        if not rate or not text:
            return self.encode(text)
        return self.sampler.sample(escape(text), rate=rate, key=key)

    def content(self) -> bytes:
        return self.model

    @classmethod
    def from_content(cls, content: bytes) -> Self:
        return cls(content)


class Bpe(Subword):
    """Byte-pair encoding: the most frequent neighbours become one piece, again and again. Sampling: BPE-dropout."""

    kind = "bpe"
    cut = staticmethod(bpe_dropout)


class Unigram(Subword):
    """A unigram language model over pieces, pruned to size. Sampling: by the probability of each way to cut."""

    kind = "unigram"
    cut = staticmethod(unigram_sample)


def _mistake(message: str, settings: TokenizerSettings) -> UserError:
    if found := re.search(r"value <= (\d+)", message):
        return UserError(
            f"tokenizer.size {settings.size} is more than this text can fill with {settings.kind} pieces; "
            f"the largest that works here is {found[1]}"
        )
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        parts = "characters, bytes and special symbols" if settings.byte_fallback else "characters and special symbols"
        return UserError(
            f"tokenizer.size {settings.size} is too small for the {found[1]} {parts} of this text; "
            f"set it above {found[1]}"
        )
    return UserError(f"SentencePiece cannot learn {settings.kind} pieces from this text: {message}")
