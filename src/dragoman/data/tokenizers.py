"""Tokenizers convert raw text to ids and back: by characters, bytes, words, subwords, or the labels of a classifier.

A Tokenizer is the vocabulary of one side; Tokenizers are those of both sides, with the tags of the sources. Ids 0 to 3
are <pad>, <unk>, <s> and </s>, except for labels. With byte fallback, unknown characters are encoded as UTF-8 bytes,
and ids 4 to 259 are the 256 bytes. The symbols follow; of characters and words, the most frequent has the lowest id.

Subwords (subwords.py) are trained and applied by SentencePiece on raw text without normalization.

To add a kind, write a subclass of Tokenizer, an entry in TOKENIZERS, and fields in TokenizerSettings for its settings.
"""

from __future__ import annotations

import io
import json
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Self, TypeVar

from dragoman.config.settings import get_entry
from dragoman.data.sentencepiece_tokenizer import SentencePieceTokenizer
from dragoman.data.subwords import (
    SPACE_MARK,
    SubwordSampler,
    SubwordVocabulary,
    escape,
    explain_failure,
    segment_bpe,
    segment_unigram,
    unescape,
)
from dragoman.data.tokenizer import Tokenizer as Tokenizer
from dragoman.data.tokenizer import TokenizerSettings as TokenizerSettings
from dragoman.errors import UserError
from dragoman.io import digest_bytes
from dragoman.types import BOS, EOS, PAD, SPECIALS, UNK, Pair

Item = TypeVar("Item")
TARGET_MARK = "=>"  # a word of a tag that begins with it names the first token of the target, not of the source
MAX_TRAINING_LINES = 1_000_000  # maximum number of lines that a tokenizer is trained on, sampled from all
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


class CharTokenizer(Tokenizer):
    """One id per character; a character that is not in the vocabulary is encoded as bytes, or as <unk>."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        values = json.loads(content)
        symbols, byte_tokens = values["symbols"], BYTE_TOKENS if values["byte_fallback"] else []
        reserved = [b""] * len(SPECIALS) + [bytes([byte]) for byte in range(len(byte_tokens))]
        self.bytes_by_id = reserved + [symbol.encode() for symbol in symbols]
        self.token_texts = [*SPECIALS, *byte_tokens, *(symbol.replace(" ", SPACE_MARK) for symbol in symbols)]
        self.ids = {symbol: i for i, symbol in enumerate(symbols, len(reserved))}
        self.size = len(self.bytes_by_id)
        self.lossless = values["byte_fallback"]

    @classmethod
    def train(cls, lines: Sequence[str], settings: TokenizerSettings) -> CharTokenizer:
        symbols = find_most_frequent(chain.from_iterable(lines), settings.size)
        return cls(to_json({"byte_fallback": settings.byte_fallback, "symbols": symbols}))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for character in text:
            if character in self.ids:
                ids.append(self.ids[character])
            else:
                ids += [len(SPECIALS) + byte for byte in character.encode()] if self.lossless else [UNK]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join([self.bytes_by_id[i] for i in ids]).decode(errors="replace")

    def token_bytes(self) -> list[bytes]:
        return self.bytes_by_id

    def locate_tokens(self, text: str, ids: Sequence[int]) -> list[int] | None:
        tokens = [self.bytes_by_id[i] for i in ids] if self.lossless else [character.encode() for character in text]
        return find_starts([len(token.replace(b" ", b"")) for token in tokens], text)


class ByteTokenizer(CharTokenizer):
    """One id per byte of UTF-8, and four special ids. It needs no training and encodes every text."""

    def __init__(self, content: bytes = b"") -> None:  # noqa: ARG002 - all byte tokenizers are the same
        super().__init__(to_json({"byte_fallback": True, "symbols": []}))
        self.token_texts = [*SPECIALS, *(chr(b) if 0x20 < b < 0x7F else BYTE_TOKENS[b] for b in range(256))]
        self.token_texts[len(SPECIALS) + ord(" ")] = SPACE_MARK

    @classmethod
    def train(cls, lines: Sequence[str], settings: TokenizerSettings) -> ByteTokenizer:  # noqa: ARG003
        return cls()

    def encode(self, text: str) -> list[int]:
        return [len(SPECIALS) + byte for byte in text.encode()]


PUNCTUATION = (  # character ranges: ASCII, Latin-1, Arabic, danda, general, symbols, CJK, full-width, emoji
    r"!-/:-@\[-`{-~¡-©«-±´-¸»¿×÷،؛؟।॥\u2010-\u205e\u20a0-\u20cf\u2190-\u2bff\u3001-\u303f\uff01-\uff0f"
    r"\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65\uffe0-\uffee\U0001f000-\U0001faff"
)
WORD_OR_MARK = re.compile(rf"(?P<word>[^\s{PUNCTUATION}]+(?:['’\-][^\s{PUNCTUATION}]+)*)|[{PUNCTUATION}]")
CODE_WORD_OR_MARK = re.compile(
    rf"(?P<word>[^\s{PUNCTUATION}]+(?:['’\-._][^\s{PUNCTUATION}]+)*)|[{PUNCTUATION}]"
)  # names such as city.max_size are words
JOINER = "￭"  # marks a side of a punctuation mark without a space: "walks." has the tokens "walks" and "￭."


class WordTokenizer(Tokenizer):
    """One id per word or punctuation mark. It is not lossless: rare words are unknown, and runs of spaces become one.

    Missing spaces are recorded at punctuation marks (JOINER), not at words. So a word has the same id beside a mark as
    elsewhere.
    """

    lossless = False
    token_pattern: ClassVar[re.Pattern[str]] = WORD_OR_MARK

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.symbols = [*SPECIALS, *json.loads(content)["symbols"]]
        self.ids = {symbol: i for i, symbol in enumerate(self.symbols) if i >= len(SPECIALS)}
        self.size = len(self.symbols)

    @classmethod
    def train(cls, lines: Sequence[str], settings: TokenizerSettings) -> Self:
        return cls.from_symbols(find_most_frequent(chain.from_iterable(map(cls.split, lines)), settings.size))

    @classmethod
    def from_symbols(cls, symbols: Sequence[str]) -> Self:
        return cls(to_json({"symbols": list(symbols)}))

    @classmethod
    def split(cls, text: str) -> list[str]:
        """Return words and punctuation marks; a mark has a joiner on each side that has no space."""
        matches = list(cls.token_pattern.finditer(text))
        is_word = [match["word"] is not None for match in matches]
        tokens = [match[0] for match in matches]
        for i in range(1, len(matches)):
            if matches[i - 1].end() == matches[i].start():
                if not is_word[i]:
                    tokens[i] = JOINER + tokens[i]
                else:
                    tokens[i - 1] += JOINER
        return tokens

    def encode(self, text: str) -> list[int]:
        return [self.ids.get(word, UNK) for word in self.split(text)]

    def decode(self, ids: Iterable[int]) -> str:
        known = [i for i in ids if i >= len(SPECIALS)]
        return "".join(self.ids_to_tokens(known)).replace(SPACE_MARK, " ")[1:]

    def ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        tokens: list[str] = []
        joins_next = False  # the previous symbol has a joiner on its right side
        for symbol in (self.symbols[i] for i in ids):
            joins_left = len(symbol) > 1 and symbol[0] == JOINER
            joins_right = len(symbol) > 1 + joins_left and symbol[-1] == JOINER
            joined = bool(tokens) and (joins_next or joins_left)
            tokens.append(("" if joined else SPACE_MARK) + symbol[joins_left : len(symbol) - joins_right])
            joins_next = joins_right
        return tokens

    def locate_tokens(self, text: str, ids: Sequence[int]) -> list[int] | None:  # noqa: ARG002 - `ids` has one id per word
        return [count_letter_bytes(text[: match.start()]) for match in self.token_pattern.finditer(text)]


class CodeTokenizer(WordTokenizer):
    """One id per word or punctuation mark of queries and programs, in which a name such as city.max_size is one word.

    Quotation marks and brackets are tokens of their own. So a value in a query has the same id as in a question.
    """

    token_pattern = CODE_WORD_OR_MARK

    @classmethod
    def from_symbols(cls, symbols: Sequence[str]) -> Self:
        # The kind distinguishes the content, and so the fingerprint, from that of a WordTokenizer with these symbols.
        return cls(to_json({"kind": "code", "symbols": list(symbols)}))


class SpaceTokenizer(WordTokenizer):
    """One id per run of characters between spaces, for text that is already tokenized: phones, actions, SQL."""

    splits_punctuation = False
    token_pattern = re.compile(r"\S+")

    @classmethod
    def split(cls, text: str) -> list[str]:
        return text.split()

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.symbols[i] for i in ids if i >= len(SPECIALS))

    def ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        return [SPACE_MARK + self.symbols[i] for i in ids]


def count_letter_bytes(text: str) -> int:
    """Return how many bytes a text has, without spaces."""
    return len(text.replace(" ", "").encode())


def find_starts(sizes: Sequence[int], text: str) -> list[int] | None:
    """Return where tokens of these sizes in bytes begin, or None if the sizes do not add up to that of the text."""
    *starts, end = accumulate(sizes, initial=0)
    return starts if end == count_letter_bytes(text) else None


def find_most_frequent(symbols: Iterable[str], size: int) -> list[str]:
    """Return the `size` most frequent symbols; ties are sorted, so the order of lines has no effect."""
    counts = Counter(symbols)
    return sorted(counts, key=lambda symbol: (-counts[symbol], symbol))[:size]


def to_json(values: dict[str, object]) -> bytes:
    return (json.dumps(values, ensure_ascii=False, indent=0) + "\n").encode()


MIN_PARALLEL_TEXTS = 32  # texts that are tokenized by several threads
MAX_TRAINING_CHUNK = 4000  # longer lines are divided, because SentencePiece aborts at a word of 65,536 characters


class SubwordTokenizer(Tokenizer):
    """Subwords of a SentencePiece model. `content` is its model file."""

    suffix = ".model"
    can_sample = True
    kind: ClassVar[str]  # SentencePiece's model_type

    @staticmethod
    @abstractmethod
    def segment(word: str, vocabulary: SubwordVocabulary, rate: float, uniform: Iterator[float]) -> list[str]:
        """Return one random segmentation of a word; `uniform` yields random numbers in [0, 1)."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        import sentencepiece  # here, because recipes import this module and must load quickly

        self.processor: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
        self.size = self.processor.get_piece_size()
        pieces: list[str] = self.processor.id_to_piece(list(range(self.size)))
        has_bytes = pieces[len(SPECIALS)] == BYTE_TOKENS[0]  # with byte fallback, they follow the special tokens
        byte_ids = [self.processor.piece_to_id(name) for name in BYTE_TOKENS] if has_bytes else []
        ordinary = range(len(SPECIALS) + len(byte_ids), self.size)
        self.lossless = bool(byte_ids)
        self.bytes_by_id = [b""] * len(SPECIALS) + [bytes([b]) for b in range(len(byte_ids))]
        self.bytes_by_id += [pieces[i].encode() for i in ordinary]
        self.token_texts = [unescape(piece) for piece in pieces]
        scores: list[float] = self.processor.get_score(list(range(self.size)))
        ids, scores_by_piece = {pieces[i]: i for i in ordinary}, {pieces[i]: scores[i] for i in ordinary}
        vocabulary = SubwordVocabulary(ids, scores_by_piece, byte_ids)
        self.sampler = SubwordSampler(vocabulary, self.segment)

    @classmethod
    def train(cls, lines: Sequence[str], settings: TokenizerSettings) -> Self:
        if not any(lines):
            raise UserError(f"there is no text to learn {cls.kind} pieces from; every line is empty")
        import sentencepiece

        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(
                    escape(line[start : start + MAX_TRAINING_CHUNK])
                    for line in lines
                    for start in range(0, len(line), MAX_TRAINING_CHUNK)
                ),
                model_writer=model,
                model_type=cls.kind,
                vocab_size=settings.size,
                byte_fallback=settings.byte_fallback,
                character_coverage=0.9995 if settings.byte_fallback else 1.0,  # rare characters become bytes
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
            raise explain_failure(str(error), cls.kind, settings.size, settings.byte_fallback) from None
        return cls(model.getvalue())

    def encode(self, text: str) -> list[int]:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        if len(texts) < MIN_PARALLEL_TEXTS:  # SentencePiece starts threads whenever it is given a list
            return [self.processor.encode(escape(text)) for text in texts]
        ids: list[list[int]] = self.processor.encode([escape(text) for text in texts])
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        text = b"".join([self.bytes_by_id[i] for i in ids]).decode(errors="replace")
        return unescape(text.removeprefix(SPACE_MARK).replace(SPACE_MARK, " "))

    def token_bytes(self) -> list[bytes]:
        return [token.replace(SPACE_MARK.encode(), b" ") for token in self.bytes_by_id]

    def locate_tokens(self, text: str, ids: Sequence[int]) -> list[int] | None:
        sizes = [len(self.bytes_by_id[i].replace(SPACE_MARK.encode(), b"")) for i in ids]
        if not self.lossless:  # one <unk> stands for a run of characters that are not in the vocabulary
            vocabulary, escaped = self.sampler.vocabulary, escape(text).replace(" ", SPACE_MARK)
            runs = groupby(escaped, vocabulary.ids.__contains__)
            unknown = iter([len("".join(run).encode()) for known, run in runs if not known])
            sizes = [next(unknown, 0) if i == UNK else size for i, size in zip(ids, sizes)]
        return find_starts(sizes, text)

    def sample(self, text: str, *, rate: float, key: tuple[int, int, int]) -> list[int]:
        if not rate or not text:
            return self.encode(text)
        return self.sampler.sample(escape(text), rate=rate, key=key)


class BpeTokenizer(SubwordTokenizer):
    """Byte-pair encoding: training repeatedly merges the most frequent pair of neighbours. Samples by BPE-dropout."""

    kind = "bpe"
    segment = staticmethod(segment_bpe)


class UnigramTokenizer(SubwordTokenizer):
    """A unigram language model over subwords. Samples a segmentation according to its probability."""

    kind = "unigram"
    segment = staticmethod(segment_unigram)


MAX_LABELS = 10_000  # with more labels, the recipe probably names the wrong column


class LabelTokenizer(Tokenizer):
    """The labels of a classifier: ids from 0, in alphabetical order, without special tokens."""

    lossless = False

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.token_texts = json.loads(content)["labels"]
        self.ids = {label: i for i, label in enumerate(self.token_texts)}
        self.size = len(self.token_texts)

    @classmethod
    def train(cls, lines: Iterable[str], settings: TokenizerSettings | None = None) -> LabelTokenizer:  # noqa: ARG003
        """Collect all labels, without the spaces around them."""
        labels: set[str] = set()
        for line in lines:
            labels.add(line.strip())
            if len(labels) > MAX_LABELS:
                raise UserError(f"more than {MAX_LABELS} different labels; check columns or keys of data.train")
        labels.discard("")
        if len(labels) < 2:
            names = f"only the label {min(labels)!r}" if labels else "no label at all"
            raise UserError(f"data.train has {names}, but a classifier needs two or more; check its columns or keys")
        return cls(to_json({"labels": sorted(labels)}))

    def encode(self, text: str) -> list[int]:
        """Return the label's id, or no id if the label is unknown."""
        label_id = self.ids.get(text.strip())
        return [] if label_id is None else [label_id]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.ids_to_tokens(ids))


TOKENIZERS: dict[str, type[Tokenizer]] = {
    "bpe": BpeTokenizer,
    "unigram": UnigramTokenizer,
    "char": CharTokenizer,
    "byte": ByteTokenizer,
    "word": WordTokenizer,
    "space": SpaceTokenizer,
    "code": CodeTokenizer,
}
IMPORTED_TOKENIZERS: dict[str, type[Tokenizer]] = {"sentencepiece": SentencePieceTokenizer}  # of published models
# The kinds in run folders, which include some that a recipe cannot choose.
SAVED_TOKENIZERS = TOKENIZERS | IMPORTED_TOKENIZERS | {"labels": LabelTokenizer}


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
    kind = get_entry(TOKENIZERS, settings.kind, "tokenizer")
    lines, total = sample_reservoir(texts, MAX_TRAINING_LINES, seed)
    if total > len(lines):
        log(f"the tokenizer learns from {len(lines)} of {total} lines, sampled at random")
    return kind.train(lines, settings)


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


def name_tokens(tokenizer: Tokenizer, ids: Sequence[int], tags: Sequence[str] = ()) -> list[str]:
    """Return the names of ids, which may include special tokens and, above the vocabulary, tags."""
    texts = iter(tokenizer.ids_to_tokens([token for token in ids if len(SPECIALS) <= token < tokenizer.size]))
    names = []
    for token in ids:
        if token < len(SPECIALS):
            names.append(SPECIALS[token])
        else:
            names.append(next(texts) if token < tokenizer.size else f"<{tags[token - tokenizer.size]}>")
    return names


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of the two sides; the same object twice if the vocabulary is joint.

    A tag before a source names the kind of the pair, such as the target language. Tags are not text: their ids follow
    those of the source vocabulary, so no text is encoded as a tag; the target side has none, so no model outputs one.

    tokenizers = Tokenizers.train(lambda: [Pair("a dog", "ein Hund")], TokenizerSettings(kind="char"))
    tokenizers.save(Path("run/tokenizer"))
    assert Tokenizers.load(Path("run/tokenizer")).fingerprint() == tokenizers.fingerprint()
    """

    source: Tokenizer
    target: Tokenizer
    tags: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Return the vocabulary sizes of both sides, including tags, by the names of the models' arguments."""
        return {"source_size": self.source.size + len(self.tags), "target_size": self.target.size}

    def with_tags(self, tags: Iterable[str]) -> Tokenizers:
        """Return the tokenizers with these tags added; existing tags keep their ids.

        The words that a published model has language tokens for are known already.
        """
        new = [word for word in tags if not self.knows_tag(word)]
        return replace(self, tags=tuple(dict.fromkeys([*self.tags, *new])))

    def tag_ids(self, tag: str) -> list[int]:
        """Return the ids that precede a source with this tag: one for each word of the tag, apart from target words."""
        words = [word for word in tag.split() if not self.find_target_token(word)]
        special = map(self.source.find_special, words)
        return [self.source.size + self.tags.index(word) if i is None else i for word, i in zip(words, special)]

    def target_tag_ids(self, tag: str) -> list[int]:
        """Return the ids with which a target begins, for the words of the tag that are TARGET_MARK and a token."""
        return [token for word in tag.split() if (token := self.find_target_token(word))]

    def find_target_token(self, word: str) -> int | None:
        return self.target.find_special(word.removeprefix(TARGET_MARK)) if word.startswith(TARGET_MARK) else None

    def knows_tag(self, tag: str) -> bool:
        """Return whether all words of a tag name language tokens of a published model."""
        return all(self.find_target_token(word) or self.source.find_special(word) for word in tag.split())

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
        """Train on the pairs of a corpus. Each call of `pairs` must yield all pairs from the beginning."""
        target = settings.for_target()
        if settings.joint:
            both = (side for pair in pairs() for side in (pair.source, pair.target))
            joint = train_tokenizer(both, settings, seed=seed, log=log)
            return cls(joint, joint)
        return cls(
            train_tokenizer((pair.source for pair in pairs()), settings, seed=seed, log=log),
            train_tokenizer((pair.target for pair in pairs()), target, seed=seed, log=log),
        )

    def fingerprint(self) -> str:
        """Return a digest of the tokenizers' files and tags, which is part of the cache key of a token store."""
        sides = [self.source] if self.joint else [self.source, self.target]
        parts = [digest_bytes(side.content).encode() for side in sides]
        return digest_bytes(b"".join(parts) + (json.dumps(self.tags).encode() if self.tags else b""))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        index: dict[str, Any] = {}
        sides = {"joint": self.source} if self.joint else {"source": self.source, "target": self.target}
        for name, side in sides.items():
            (folder / f"{name}{side.suffix}").write_bytes(side.content)
            kind = next(kind for kind, cls in SAVED_TOKENIZERS.items() if type(side) is cls)
            index[name] = {"kind": kind, "file": f"{name}{side.suffix}", "hash": digest_bytes(side.content)}
        if self.tags:
            index["tags"] = self.tags
        (folder / "tokenizer.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, *, fingerprint: str | None = None) -> Tokenizers:
        """Read the tokenizers of a run folder. If `fingerprint` is given, theirs must equal it."""
        try:
            index = json.loads((folder / "tokenizer.json").read_bytes())
            tags, parts = tuple(map(str, index.pop("tags", ()))), {}
            for name, entry in index.items():
                content = (folder / Path(entry["file"]).name).read_bytes()
                if digest_bytes(content) != entry["hash"]:
                    raise UserError(f"{folder / entry['file']} is damaged; copy the whole folder again")
                parts[name] = SAVED_TOKENIZERS[entry["kind"]](content)
            loaded = cls(parts.get("joint") or parts["source"], parts.get("joint") or parts["target"], tags)
            if fingerprint not in (None, loaded.fingerprint()):
                raise UserError(f"{str(folder)!r} is damaged, or not the tokenizer that the model was trained with")
            return loaded
        except FileNotFoundError as error:
            raise UserError(f"there is no file {error.filename!r}; copy the whole folder again") from None
        except OSError as error:
            raise UserError(
                f"{error.filename!r} cannot be read ({error.strerror}); copy the whole folder again"
            ) from None
        except (KeyError, TypeError, AttributeError, RuntimeError, UnicodeDecodeError, json.JSONDecodeError):
            raise UserError(f"{folder / 'tokenizer.json'} is damaged; copy the whole folder again") from None
