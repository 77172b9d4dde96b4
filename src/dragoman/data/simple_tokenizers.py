"""The Tokenizer interface, and the kinds that only count symbols: characters, bytes, words, labels of a classifier.

Ids 0 to 3 are <pad>, <unk>, <s> and </s>, except for labels. Kinds with byte fallback, which spell unknown characters
in bytes, keep ids 4 to 259 for the 256 bytes; then come the symbols, most frequent first.

To add a kind: a subclass of Tokenizer here, and its entry in SIMPLE_TOKENIZERS.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import ClassVar, Self

from dragoman.config.settings import TokenizerSettings
from dragoman.errors import UserError
from dragoman.types import SPECIALS, UNK

SPACE_MARK = "▁"  # stands for a space where tokens are shown
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


class Tokenizer(ABC):
    """Raw text to ids and back. `lossless` promises decode(encode(text)) == text for every text.

    `samples` is set where a text has several segmentations, from which `sample` chooses. `splits_punctuation` is unset
    where punctuation marks stay part of the word that they touch.
    """

    suffix: ClassVar[str] = ".json"
    samples: ClassVar[bool] = False
    splits_punctuation: ClassVar[bool] = True
    size: int
    lossless: bool

    @classmethod
    @abstractmethod
    def train(cls, lines: Sequence[str], settings: TokenizerSettings) -> Tokenizer: ...

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without <s> and </s>."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids; the four specials have none."""

    @abstractmethod
    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return one readable string for each id; a space is shown as "▁"."""

    def spellings(self) -> list[bytes]:
        """Return the bytes that each id decodes to, with a space before a word; the four specials have none."""
        shown = [self.pieces([i])[0].replace(SPACE_MARK, " ").encode() for i in range(len(SPECIALS), self.size)]
        return [b""] * len(SPECIALS) + shown

    def sample(self, text: str, *, rate: float, key: tuple[int, int, int]) -> list[int]:  # noqa: ARG002
        """Return a random segmentation of the text: a pure function of text, rate and key = (seed, epoch, line).

        Kinds with a single segmentation return it.
        """
        return self.encode(text)

    def starts(self, text: str, ids: Sequence[int]) -> list[int] | None:  # noqa: ARG002
        """Return how many bytes of the text, without spaces, precede each token; None where that is unknown."""
        return None

    @abstractmethod
    def content(self) -> bytes:
        """Return the tokenizer as the bytes of one file."""

    @classmethod
    @abstractmethod
    def from_content(cls, content: bytes) -> Tokenizer: ...

    def __reduce__(self) -> tuple[Callable[[bytes], Tokenizer], tuple[bytes]]:
        """Pickle by content: other processes rebuild the tokenizer from it."""
        return type(self).from_content, (self.content(),)

    def save(self, folder: Path, name: str) -> Path:
        path = folder / (name + self.suffix)
        path.write_bytes(self.content())
        return path

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        return cls.from_content(path.read_bytes())


class CharTokenizer(Tokenizer):
    """One id per character; a character that is not in the vocabulary is encoded as bytes, or as <unk>."""

    def __init__(self, symbols: Sequence[str], byte_fallback: bool) -> None:
        reserved = [b""] * len(SPECIALS) + [bytes([byte]) for byte in range(256) if byte_fallback]
        self.symbols = list(symbols)
        self.spelling = reserved + [symbol.encode() for symbol in symbols]
        self.shown = [
            *SPECIALS,
            *(BYTE_TOKENS if byte_fallback else ()),
            *(s.replace(" ", SPACE_MARK) for s in symbols),
        ]
        self.ids = {symbol: [len(reserved) + i] for i, symbol in enumerate(symbols)}
        self.size = len(self.spelling)
        self.lossless = byte_fallback

    @classmethod
    def train(cls, lines: Sequence[str], settings: TokenizerSettings) -> CharTokenizer:
        counts: Counter[str] = Counter()
        for line in lines:
            counts.update(line)
        return cls(most_frequent(counts, settings.size), settings.byte_fallback)

    def encode(self, text: str) -> list[int]:
        ids = self.ids
        return [i for character in text for i in ids.get(character) or self._spell(character)]

    def _spell(self, character: str) -> list[int]:
        return [len(SPECIALS) + byte for byte in character.encode()] if self.lossless else [UNK]

    def decode(self, ids: Iterable[int]) -> str:
        spelling = self.spelling
        return b"".join([spelling[i] for i in ids]).decode(errors="replace")

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self.shown[i] for i in ids]

    def spellings(self) -> list[bytes]:
        return self.spelling

    def starts(self, text: str, ids: Sequence[int]) -> list[int] | None:
        spelling = [self.spelling[i] for i in ids] if self.lossless else [character.encode() for character in text]
        return find_starts([len(spelt.replace(b" ", b"")) for spelt in spelling], text)

    def content(self) -> bytes:
        return to_json({"byte_fallback": self.lossless, "symbols": self.symbols})

    @classmethod
    def from_content(cls, content: bytes) -> CharTokenizer:
        record = json.loads(content)
        return cls(record["symbols"], record["byte_fallback"])


class ByteTokenizer(CharTokenizer):
    """One id per byte of UTF-8: no training, 260 ids, every text of every language."""

    def __init__(self) -> None:
        super().__init__([], byte_fallback=True)
        self.shown = [*SPECIALS, *(chr(b) if 0x20 < b < 0x7F else BYTE_TOKENS[b] for b in range(256))]
        self.shown[len(SPECIALS) + ord(" ")] = SPACE_MARK

    @classmethod
    def train(cls, lines: Sequence[str], settings: TokenizerSettings) -> ByteTokenizer:  # noqa: ARG003
        return cls()

    def encode(self, text: str) -> list[int]:
        return [len(SPECIALS) + byte for byte in text.encode()]

    @classmethod
    def from_content(cls, content: bytes) -> ByteTokenizer:  # noqa: ARG003
        return cls()


PUNCTUATION = (  # ASCII, Latin-1, Arabic, danda, general, symbols, CJK, full-width, emoji
    r"!-/:-@\[-`{-~¡-©«-±´-¸»¿×÷،؛؟।॥\u2010-\u205e\u20a0-\u20cf\u2190-\u2bff\u3001-\u303f\uff01-\uff0f"
    r"\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65\uffe0-\uffee\U0001f000-\U0001faff"
)
WORD_OR_MARK = re.compile(rf"(?P<word>[^\s{PUNCTUATION}]+(?:['’\-][^\s{PUNCTUATION}]+)*)|[{PUNCTUATION}]")
JOINER = "￭"  # on the side of a punctuation mark where no space stands: "walks." is the tokens "walks" and "￭."


class WordTokenizer(Tokenizer):
    """One id per word or punctuation mark. Rare words are unknown and runs of spaces become one: it is not lossless.

    Marks, not words, record where no space stands, so that a word has the same id beside a mark as anywhere else.
    """

    lossless = False
    token: ClassVar[re.Pattern[str]] = WORD_OR_MARK

    def __init__(self, symbols: Sequence[str]) -> None:
        self.symbols = [*SPECIALS, *symbols]
        self.ids = {symbol: i for i, symbol in enumerate(self.symbols) if i >= len(SPECIALS)}
        self.size = len(self.symbols)

    @classmethod
    def train(cls, lines: Sequence[str], settings: TokenizerSettings) -> Self:
        counts: Counter[str] = Counter()
        for line in lines:
            counts.update(cls.split(line))
        return cls(most_frequent(counts, settings.size))

    @staticmethod
    def split(text: str) -> list[str]:
        """Return words and punctuation marks, a mark with a joiner on each side where no space stands."""
        found = list(WORD_OR_MARK.finditer(text))
        is_word = [match["word"] is not None for match in found]
        tokens = [match[0] for match in found]
        for i in range(1, len(found)):
            if found[i - 1].end() == found[i].start():
                if not is_word[i]:
                    tokens[i] = JOINER + tokens[i]
                else:
                    tokens[i - 1] += JOINER
        return tokens

    def encode(self, text: str) -> list[int]:
        return [self.ids.get(word, UNK) for word in self.split(text)]

    def decode(self, ids: Iterable[int]) -> str:
        known = [i for i in ids if i >= len(SPECIALS)]
        return "".join(self.pieces(known)).replace(SPACE_MARK, " ")[1:]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        shown: list[str] = []
        joined = False
        for symbol in (self.symbols[i] for i in ids):
            left = len(symbol) > 1 and symbol[0] == JOINER
            right = len(symbol) > 1 + left and symbol[-1] == JOINER
            glued = bool(shown) and (joined or left)
            shown.append(("" if glued else SPACE_MARK) + symbol[left : len(symbol) - right])
            joined = right
        return shown

    def starts(self, text: str, ids: Sequence[int]) -> list[int] | None:  # noqa: ARG002 - unknown words count too
        return [count_letter_bytes(text[: found.start()]) for found in self.token.finditer(text)]

    def content(self) -> bytes:
        return to_json({"symbols": self.symbols[len(SPECIALS) :]})

    @classmethod
    def from_content(cls, content: bytes) -> Self:
        return cls(json.loads(content)["symbols"])


class SpaceTokenizer(WordTokenizer):
    """One id per run between spaces: for text that is tokenized already, such as phones, actions or SQL."""

    splits_punctuation = False
    token = re.compile(r"\S+")

    @staticmethod
    def split(text: str) -> list[str]:
        return text.split()

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.symbols[i] for i in ids if i >= len(SPECIALS))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [SPACE_MARK + self.symbols[i] for i in ids]


def count_letter_bytes(text: str) -> int:
    """Return how many bytes a text has, without spaces."""
    return len(text.replace(" ", "").encode())


def find_starts(sizes: Sequence[int], text: str) -> list[int] | None:
    """Return where tokens of these sizes in bytes begin, or None if they do not add up to the text."""
    *starts, end = accumulate(sizes, initial=0)
    return starts if end == count_letter_bytes(text) else None


def most_frequent(counts: Counter[str], size: int) -> list[str]:
    """Return the most frequent symbols; ties go by the symbol itself, so the order of the corpus does not matter."""
    return [symbol for symbol, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:size]]


def to_json(record: dict[str, object]) -> bytes:
    return (json.dumps(record, ensure_ascii=False, indent=0) + "\n").encode()


MAX_LABELS = 10_000  # a corpus with more has probably named the wrong column


class LabelTokenizer(Tokenizer):
    """The labels of a classifier, one id each, from 0, in alphabetical order, without special tokens."""

    lossless = False

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.ids = {name: i for i, name in enumerate(names)}
        self.size = len(self.names)

    @classmethod
    def train(cls, lines: Iterable[str], settings: TokenizerSettings | None = None) -> LabelTokenizer:  # noqa: ARG003
        """Collect every label. Spaces around it do not count."""
        names: set[str] = set()
        for line in lines:
            names.add(line.strip())
            if len(names) > MAX_LABELS:
                raise UserError(
                    f"there are more than {MAX_LABELS} different labels; check columns or keys of data.train"
                )
        names.discard("")
        if len(names) < 2:
            only = f"only the label {min(names)!r}" if names else "no label at all"
            raise UserError(f"data.train has {only}, but a classifier needs two or more; check its columns or keys")
        return cls(sorted(names))

    def encode(self, text: str) -> list[int]:
        """Return the label's id, or no id if the label is unknown."""
        found = self.ids.get(text.strip())
        return [] if found is None else [found]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.pieces(ids))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self.names[i] for i in ids]

    def content(self) -> bytes:
        return to_json({"labels": self.names})

    @classmethod
    def from_content(cls, content: bytes) -> LabelTokenizer:
        return cls(json.loads(content)["labels"])


SIMPLE_TOKENIZERS: dict[str, type[Tokenizer]] = {
    "char": CharTokenizer,
    "byte": ByteTokenizer,
    "word": WordTokenizer,
    "space": SpaceTokenizer,
}
