"""Tokenizers: raw text in, ids out, and raw text back. The kinds stand on the menu at the foot of this file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from dragoman.config.settings import TokenizerSettings, pick
from dragoman.data.simple_tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    LabelTokenizer,
    SpaceTokenizer,
    Tokenizer,
    WordTokenizer,
)
from dragoman.data.subword_tokenizers import BpeTokenizer, UnigramTokenizer
from dragoman.errors import UserError
from dragoman.types import Pair

__all__ = ["TOKENIZERS", "Tokenizer", "Tokenizers", "train_tokenizer"]

MAX_TRAINING_LINES = 1_000_000  # a tokenizer learns from at most so many lines, drawn at random from all
Item = TypeVar("Item")


def train_tokenizer(
    texts: Iterable[str],
    settings: TokenizerSettings,
    *,
    seed: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> Tokenizer:
    """A tokenizer of `settings.kind`, learned from lines of text. The same lines and seed give the same tokenizer.

    tokenizer = train_tokenizer(["a man walks", "a dog runs"], TokenizerSettings(kind="char"))
    assert tokenizer.decode(tokenizer.encode("a cat!")) == "a cat!"
    """
    kind = pick(TOKENIZERS, settings.kind, "tokenizer")
    lines, total = sample_reservoir(texts, MAX_TRAINING_LINES, seed)
    if total > len(lines):
        say(f"the tokenizer learns from {len(lines)} of {total} lines, drawn at random")
    return kind.train(lines, settings)


def target_settings(settings: TokenizerSettings) -> TokenizerSettings:
    """The settings of the target side's tokenizer, which one vocabulary for both sides cannot have apart."""
    kind, size = settings.target_kind or settings.kind, settings.target_size or settings.size
    target = settings.model_copy(update={"kind": kind, "size": size})
    if settings.joint and target != settings:
        raise UserError("tokenizer.target_kind and target_size are for two vocabularies; set tokenizer.joint to false")
    return target


def sample_reservoir(items: Iterable[Item], count: int, seed: int) -> tuple[list[Item], int]:
    """At most `count` items, each with the same chance, and how many there were. One pass."""
    random = Random(seed)
    drawn: list[Item] = []
    total = 0
    for total, item in enumerate(items, 1):
        if total <= count:
            drawn.append(item)
        elif (place := random.randrange(total)) < count:
            drawn[place] = item
    return drawn, total


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of the two sides; one and the same when the vocabulary is joint.

    A tag stands before a source and says what kind of pair it is, such as the language that is wanted. It is no text:
    its id comes after those of the source side, and no line is cut into it, whatever it holds. The target side does not
    have it, so it is never said.

    tokenizers = Tokenizers.train(lambda: [Pair("a dog", "ein Hund")], TokenizerSettings(kind="char"))
    tokenizers.save(Path("run/tokenizer"))
    assert Tokenizers.load(Path("run/tokenizer")).fingerprint() == tokenizers.fingerprint()
    """

    source: Tokenizer
    target: Tokenizer
    tags: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Of the vocabularies that a model reads and writes."""
        return {"source_size": self.source.size + len(self.tags), "target_size": self.target.size}

    def with_tags(self, tags: Iterable[str]) -> Tokenizers:
        """The same with these tags too; what had an id keeps it."""
        return replace(self, tags=tuple(dict.fromkeys([*self.tags, *tags])))

    def before(self, tag: str) -> list[int]:
        """What stands before the ids of a source with this tag: an id for each of its words, and nothing for none."""
        return [self.source.size + self.tags.index(word) for word in tag.split()]

    @property
    def joint(self) -> bool:
        return self.source is self.target

    @classmethod
    def train(
        cls,
        pairs: Callable[[], Iterable[Pair]],
        settings: TokenizerSettings,
        *,
        seed: int = 1,
        say: Callable[[str], None] = lambda _: None,
    ) -> Tokenizers:
        """`pairs` begins the corpus anew at each call."""
        target = target_settings(settings)
        if settings.joint:
            both = (side for pair in pairs() for side in (pair.source, pair.target))
            joint = train_tokenizer(both, settings, seed=seed, say=say)
            return cls(joint, joint)
        return cls(
            train_tokenizer((pair.source for pair in pairs()), settings, seed=seed, say=say),
            train_tokenizer((pair.target for pair in pairs()), target, seed=seed, say=say),
        )

    def fingerprint(self) -> str:
        """The same for tokenizers that do the same."""
        parts = [_hash(part.content()).encode() for part in self._sides().values()]
        return _hash(*parts, *([json.dumps(self.tags).encode()] if self.tags else []))

    def _sides(self) -> dict[str, Tokenizer]:
        return {"joint": self.source} if self.joint else {"source": self.source, "target": self.target}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        index: dict[str, Any] = {}
        for name, part in self._sides().items():
            path = part.save(folder, name)
            kind = next(kind for kind, cls in SAVED_TOKENIZERS.items() if type(part) is cls)
            index[name] = {"kind": kind, "file": path.name, "hash": _hash(part.content())}
        if self.tags:
            index["tags"] = self.tags
        (folder / "tokenizer.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Tokenizers:
        try:
            index = json.loads((folder / "tokenizer.json").read_bytes())
            tags, parts = tuple(map(str, index.pop("tags", ()))), {}
            for name, entry in index.items():
                content = (folder / Path(entry["file"]).name).read_bytes()
                if _hash(content) != entry["hash"]:
                    raise UserError(f"{folder / entry['file']} is damaged; copy the whole folder again")
                parts[name] = SAVED_TOKENIZERS[entry["kind"]].from_content(content)
            return cls(parts.get("joint") or parts["source"], parts.get("joint") or parts["target"], tags)
        except FileNotFoundError as error:
            raise UserError(f"there is no file {error.filename!r}; copy the whole folder again") from None
        except OSError as error:
            raise UserError(
                f"{error.filename!r} cannot be read ({error.strerror}); copy the whole folder again"
            ) from None
        except (KeyError, TypeError, AttributeError, RuntimeError, UnicodeDecodeError, json.JSONDecodeError):
            raise UserError(f"{folder / 'tokenizer.json'} is damaged; copy the whole folder again") from None


def _hash(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


TOKENIZERS: dict[str, type[Tokenizer]] = {
    "bpe": BpeTokenizer,
    "unigram": UnigramTokenizer,
    "char": CharTokenizer,
    "byte": ByteTokenizer,
    "word": WordTokenizer,
    "space": SpaceTokenizer,
}
SAVED_TOKENIZERS: dict[str, type[Tokenizer]] = {**TOKENIZERS, "labels": LabelTokenizer}  # what a run folder may hold
