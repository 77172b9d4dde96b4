"""Train, save and load the tokenizers of a run: raw text to ids and back.

The kinds are defined and registered in simple_tokenizers.py and subword_tokenizers.py; TOKENIZERS joins the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from dragoman.config.settings import TokenizerSettings, pick
from dragoman.data.simple_tokenizers import SIMPLE_TOKENIZERS, LabelTokenizer, Tokenizer
from dragoman.data.subword_tokenizers import SUBWORD_TOKENIZERS
from dragoman.errors import UserError
from dragoman.io import digest_bytes
from dragoman.types import Pair

__all__ = ["TOKENIZERS", "Tokenizer", "Tokenizers", "train_tokenizer"]

MAX_TRAINING_LINES = 1_000_000  # maximum number of lines that a tokenizer is trained on, sampled from all
Item = TypeVar("Item")


def train_tokenizer(
    texts: Iterable[str],
    settings: TokenizerSettings,
    *,
    seed: int = 1,
    log: Callable[[str], None] = lambda _: None,
) -> Tokenizer:
    """Train a tokenizer of `settings.kind`. The same lines and seed give the same tokenizer.

    tokenizer = train_tokenizer(["a man walks", "a dog runs"], TokenizerSettings(kind="char"))
    assert tokenizer.decode(tokenizer.encode("a cat!")) == "a cat!"
    """
    kind = pick(TOKENIZERS, settings.kind, "tokenizer")
    lines, total = sample_reservoir(texts, MAX_TRAINING_LINES, seed)
    if total > len(lines):
        log(f"the tokenizer learns from {len(lines)} of {total} lines, drawn at random")
    return kind.train(lines, settings)


def target_settings(settings: TokenizerSettings) -> TokenizerSettings:
    """Return the tokenizer settings of the target side; they must not differ if the vocabulary is joint."""
    kind, size = settings.target_kind or settings.kind, settings.target_size or settings.size
    target = settings.model_copy(update={"kind": kind, "size": size})
    if settings.joint and target != settings:
        raise UserError("tokenizer.target_kind and target_size are for two vocabularies; set tokenizer.joint to false")
    return target


def sample_reservoir(items: Iterable[Item], count: int, seed: int) -> tuple[list[Item], int]:
    """Return at most `count` items, sampled uniformly in one pass, and how many items there were."""
    random = Random(seed)
    sampled: list[Item] = []
    total = 0
    for total, item in enumerate(items, 1):
        if total <= count:
            sampled.append(item)
        elif (index := random.randrange(total)) < count:
            sampled[index] = item
    return sampled, total


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of the two sides; the same object twice when the vocabulary is joint.

    A tag before a source says what kind of pair it is, such as the target language. It is not text: its id follows
    those of the source vocabulary, so no line can be tokenized into it, and the target side does not have it, so no
    model can output it.

    tokenizers = Tokenizers.train(lambda: [Pair("a dog", "ein Hund")], TokenizerSettings(kind="char"))
    tokenizers.save(Path("run/tokenizer"))
    assert Tokenizers.load(Path("run/tokenizer")).fingerprint() == tokenizers.fingerprint()
    """

    source: Tokenizer
    target: Tokenizer
    tags: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Return the vocabulary sizes of both sides, tags included, by the names that models use."""
        return {"source_size": self.source.size + len(self.tags), "target_size": self.target.size}

    def with_tags(self, tags: Iterable[str]) -> Tokenizers:
        """Return the tokenizers with these tags added; known tags keep their ids."""
        return replace(self, tags=tuple(dict.fromkeys([*self.tags, *tags])))

    def tag_ids(self, tag: str) -> list[int]:
        """Return the ids that precede a source with this tag: one for each word of the tag."""
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
        log: Callable[[str], None] = lambda _: None,
    ) -> Tokenizers:
        """Train on the pairs of a corpus; each call of `pairs` reads the corpus from its beginning."""
        target = target_settings(settings)
        if settings.joint:
            both = (side for pair in pairs() for side in (pair.source, pair.target))
            joint = train_tokenizer(both, settings, seed=seed, log=log)
            return cls(joint, joint)
        return cls(
            train_tokenizer((pair.source for pair in pairs()), settings, seed=seed, log=log),
            train_tokenizer((pair.target for pair in pairs()), target, seed=seed, log=log),
        )

    def fingerprint(self) -> str:
        """Return a digest that is equal for tokenizers with equal behaviour."""
        return combine_digests((digest_bytes(part.content()) for part in self._sides().values()), self.tags)

    def _sides(self) -> dict[str, Tokenizer]:
        return {"joint": self.source} if self.source is self.target else {"source": self.source, "target": self.target}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        index: dict[str, Any] = {}
        for name, part in self._sides().items():
            path = part.save(folder, name)
            kind = next(kind for kind, cls in SAVED_TOKENIZERS.items() if type(part) is cls)
            index[name] = {"kind": kind, "file": path.name, "hash": digest_bytes(part.content())}
        if self.tags:
            index["tags"] = self.tags
        (folder / "tokenizer.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, *, fingerprint: str | None = None) -> Tokenizers:
        """Read the tokenizers of a run folder. Refuse others than those with this fingerprint, if it is given."""
        try:
            index = json.loads((folder / "tokenizer.json").read_bytes())
            tags, parts = tuple(map(str, index.pop("tags", ()))), {}
            for name, entry in index.items():
                content = (folder / Path(entry["file"]).name).read_bytes()
                if digest_bytes(content) != entry["hash"]:
                    raise UserError(f"{folder / entry['file']} is damaged; copy the whole folder again")
                parts[name] = SAVED_TOKENIZERS[entry["kind"]].from_content(content)
            if fingerprint not in (None, combine_digests((entry["hash"] for entry in index.values()), tags)):
                raise UserError(f"{str(folder)!r} is damaged, or not the tokenizer that the model was trained with")
            return cls(parts.get("joint") or parts["source"], parts.get("joint") or parts["target"], tags)
        except FileNotFoundError as error:
            raise UserError(f"there is no file {error.filename!r}; copy the whole folder again") from None
        except OSError as error:
            raise UserError(
                f"{error.filename!r} cannot be read ({error.strerror}); copy the whole folder again"
            ) from None
        except (KeyError, TypeError, AttributeError, RuntimeError, UnicodeDecodeError, json.JSONDecodeError):
            raise UserError(f"{folder / 'tokenizer.json'} is damaged; copy the whole folder again") from None


def combine_digests(digests: Iterable[str], tags: tuple[str, ...]) -> str:
    """Return the fingerprint of tokenizers, given the digest of each."""
    return digest_bytes("".join(digests).encode() + (json.dumps(tags).encode() if tags else b""))


TOKENIZERS: dict[str, type[Tokenizer]] = {**SUBWORD_TOKENIZERS, **SIMPLE_TOKENIZERS}
SAVED_TOKENIZERS: dict[str, type[Tokenizer]] = {
    **TOKENIZERS,
    "labels": LabelTokenizer,
}  # those that a run folder may hold
