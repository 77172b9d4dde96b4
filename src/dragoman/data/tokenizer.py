"""The interface of tokenizers, and the settings of those that training makes (tokenizers.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from dragoman.config.settings import Fraction, Settings, setting
from dragoman.data.subwords import SPACE_MARK
from dragoman.errors import UserError
from dragoman.types import SPECIALS


class TokenizerSettings(Settings):
    """The `tokenizer` section of a recipe."""

    kind: str = setting("bpe", "type of tokenizer")
    size: int = setting(8000, "vocabulary size; for words and characters, the maximum", ge=8, le=1_000_000)
    joint: bool = setting(True, "share one vocabulary between source and target")
    target_kind: str = setting("", "type of the target tokenizer if joint=false; by default the same as `kind`")
    target_size: int = setting(0, "vocabulary size of the target if joint=false; 0: same as `size`", ge=0, le=1_000_000)
    byte_fallback: bool = setting(True, "encode characters outside the vocabulary as bytes, so that no text is lost")
    sampling: Fraction = setting(
        0.0, "subword sampling in training; bpe: merge dropout rate; unigram: smoothing of the distribution"
    )

    def for_target(self) -> TokenizerSettings:
        """Return the settings of the target side; they must not differ if the vocabulary is joint."""
        kind, size = self.target_kind or self.kind, self.target_size or self.size
        target = self.model_copy(update={"kind": kind, "size": size})
        if self.joint and target != self:
            raise UserError("tokenizer.target_kind and target_size are for two vocabularies; set tokenizer.joint=false")
        return target


class Tokenizer(ABC):
    """The vocabulary of one side: converts raw text to ids and back. `content` is the content of its file."""

    suffix: ClassVar[str] = ".json"  # of the file
    can_sample: ClassVar[bool] = False  # whether a text has several segmentations, of which `sample` returns one
    splits_punctuation: ClassVar[bool] = True  # whether punctuation marks are tokens apart from the words beside them
    size: int  # number of ids
    lossless: bool  # whether decode(encode(text)) == text for every text
    token_texts: list[str]  # one readable string for each id; a space is shown as "▁"

    def __init__(self, content: bytes) -> None:
        self.content = content

    @classmethod
    @abstractmethod
    def train(cls, lines: Sequence[str], settings: TokenizerSettings) -> Tokenizer:
        """Return a tokenizer whose vocabulary is learned from these lines."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without <s> and </s>."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids; the four special tokens are left out."""

    def ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """Return one readable string for each id; a space is shown as "▁"."""
        return list(map(self.token_texts.__getitem__, ids))

    def token_bytes(self) -> list[bytes]:
        """Return the bytes that each id decodes to; those of a word begin with a space, those of specials are empty."""
        ordinary = range(len(SPECIALS), self.size)
        return [b""] * len(SPECIALS) + [self.ids_to_tokens([i])[0].replace(SPACE_MARK, " ").encode() for i in ordinary]

    def sample(self, text: str, *, rate: float, key: tuple[int, int, int]) -> list[int]:  # noqa: ARG002
        """Return a random segmentation of the text: a pure function of text, rate and key = (seed, epoch, line).

        Kinds with a single segmentation return it.
        """
        return self.encode(text)

    def find_special(self, name: str) -> int | None:  # noqa: ARG002
        """Return the id of a token that is no text, such as the language token of a published model, or None."""
        return None

    def locate_tokens(self, text: str, ids: Sequence[int]) -> list[int] | None:  # noqa: ARG002
        """Return where each token begins, in bytes of the text without its spaces; None if that is unknown."""
        return None

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[bytes]]:
        """Pickle only the content, from which another process rebuilds the tokenizer."""
        return type(self), (self.content,)
