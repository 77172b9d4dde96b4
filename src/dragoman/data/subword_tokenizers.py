"""Subword tokenizers, BPE and unigram, trained and applied by SentencePiece on raw text without normalization.

SentencePiece reserves two characters: U+2581, which stands for a space, and U+2585, whose lines it leaves out of
training. Text that holds them is escaped, so that decode(encode(text)) is the text, whatever it holds.

Random segmentations (BPE-dropout, unigram sampling) are computed here from the scores of the SentencePiece model.
SentencePiece's own sampler uses one random stream per thread that cannot be restored, so a resumed run would see other
tokens. Here every choice is a function of its key:

    variant v (of 64) of a word               depends on (rate, word, v); it is cached;
    the variant of the n-th word of a line    depends on (seed, epoch, line, n).

A word is a run between spaces. No subword crosses a space, so segmenting word by word loses nothing.

To add a kind that SentencePiece can train: a subclass of SubwordTokenizer, and its entry in SUBWORD_TOKENIZERS.
"""

from __future__ import annotations

import heapq
import io
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, ClassVar, Self

import sentencepiece

from dragoman.config.settings import TokenizerSettings
from dragoman.data.simple_tokenizers import BYTE_TOKENS, SPACE_MARK, Tokenizer, find_starts
from dragoman.errors import UserError
from dragoman.io import hash_stably
from dragoman.types import BOS, EOS, PAD, SPECIALS, UNK

VARIANTS = 64
CACHED_VARIANTS = 1 << 18  # maximum number of cached variants, in two generations
LONGEST_CACHED = 32  # characters; longer words hardly come twice
UNKNOWN_PENALTY = 10.0  # how much worse than the worst piece an unknown character is, as in SentencePiece


@dataclass(frozen=True)
class SubwordVocabulary:
    """The ordinary subwords of a model with their ids and scores, and the ids of the 256 bytes, if it has them."""

    ids: dict[str, int]
    scores: dict[str, float]
    byte_ids: Sequence[int]

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.scores))

    @cached_property
    def unknown(self) -> float:
        """Return the score of a character that is not in the vocabulary."""
        return min(self.scores.values()) - UNKNOWN_PENALTY

    def spell(self, pieces: Sequence[str]) -> list[int]:
        """Return the ids of subwords. Unknown subwords become bytes or, without byte fallback, one <unk> per run."""
        found: list[int] = []
        for piece in pieces:
            i = self.ids.get(piece)
            if i is not None:
                found.append(i)
            elif self.byte_ids:
                found.extend([self.byte_ids[byte] for byte in piece.encode()])
            elif not found or found[-1] != UNK:
                found.append(UNK)
        return found


def generate_uniform(name: str) -> Iterator[float]:
    """Yield pseudo-random numbers in [0, 1) for ever, determined by `name`. Cheaper to start than a random.Random."""
    state = hash_stably(name.encode())
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        yield (state >> 11) * 2**-53


Segment = Callable[[str, SubwordVocabulary, float, Iterator[float]], list[str]]


def segment_bpe(word: str, vocabulary: SubwordVocabulary, rate: float, draws: Iterator[float]) -> list[str]:
    """Merge neighbours, best score first and then leftmost, but skip each merge with probability `rate` (BPE-dropout).

    With rate 0 this is SentencePiece's own segmentation.
    """
    scores = vocabulary.scores
    symbols = list(word)
    after = [*range(1, len(symbols)), -1]
    before = list(range(-1, len(symbols) - 1))

    def propose(left: int, right: int) -> None:
        merged = symbols[left] + symbols[right]
        if merged in scores:
            heapq.heappush(agenda, (-scores[merged], left, right, len(merged)))

    agenda = [(-scores[a + b], i, i + 1, 2) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
    heapq.heapify(agenda)
    while agenda:
        _, left, right, size = heapq.heappop(agenda)
        stale = not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != size
        if stale or (rate and next(draws) < rate):
            continue
        symbols[left] += symbols[right]
        symbols[right] = ""
        after[left] = after[right]
        if after[left] >= 0:
            before[after[left]] = left
            propose(left, after[left])
        if before[left] >= 0:
            propose(before[left], left)
    return [symbol for symbol in symbols if symbol]


def segment_unigram(word: str, vocabulary: SubwordVocabulary, rate: float, draws: Iterator[float]) -> list[str]:
    """Sample one of all segmentations of the word, with probability proportional to p(subwords) ** alpha.

    alpha is (1 - rate) / (50 * rate): towards rate 0 always the most probable segmentation; at 0.1 alpha is 0.18, a
    usual strength (Kudo 2018 takes 0.1 to 0.5); towards 1 all are equally likely. Forward filtering, backward
    sampling: exact, without listing the segmentations.
    """
    scores = vocabulary.scores
    alpha = min((1 - rate) / (50 * rate), 1e6)
    unknown, longest = vocabulary.unknown, vocabulary.longest
    total = [0.0]  # total[end]: log of the sum over all segmentations of word[:end]
    arriving: list[list[tuple[int, float]]] = [[]]  # subwords that end here: where they begin, and their log-share
    for end in range(1, len(word) + 1):
        arrivals = []
        for begin in range(max(0, end - longest), end):
            score = scores.get(word[begin:end], unknown if begin == end - 1 else None)
            if score is not None:
                arrivals.append((begin, total[begin] + alpha * score))
        best = max(share for _, share in arrivals)
        total.append(best + math.log(math.fsum(math.exp(share - best) for _, share in arrivals)))
        arriving.append(arrivals)
    pieces: list[str] = []
    end = len(word)
    while end:
        draw = next(draws)
        for begin, share in arriving[end]:
            piece = word[begin:end]
            draw -= math.exp(share - total[end])
            if draw < 0:
                break
        pieces.append(piece)
        end -= len(piece)
    return pieces[::-1]


class SubwordSampler:
    """Random segmentations of lines, word by word, with a cache of the variants made so far."""

    def __init__(self, vocabulary: SubwordVocabulary, segment: Segment, space: str) -> None:
        self.vocabulary, self.segment, self.space = vocabulary, segment, space
        self.clear_cache(0.0)

    def clear_cache(self, rate: float) -> None:
        """Start two empty generations of the cache: recently used variants and older ones."""
        self.rate, self.name = rate, str(rate)
        self.recent: dict[tuple[str, int], list[int]] = {}
        self.older: dict[tuple[str, int], list[int]] = {}

    def sample(self, text: str, *, rate: float, key: tuple[int, int, int]) -> list[int]:
        seed, epoch, line = key
        if self.rate != rate:
            self.clear_cache(rate)
        ids: list[int] = []
        for word, draw in zip(text.split(" "), generate_uniform(f"{seed} {epoch} {line}")):
            at = (word, int(draw * VARIANTS))
            ids += self.recent.get(at) or self.fetch(at)
        return ids

    def fetch(self, at: tuple[str, int]) -> list[int]:
        """Return a variant from the older generation, or segment the word."""
        ids = self.older.get(at) or self.make(*at)
        if len(at[0]) <= LONGEST_CACHED:
            if len(self.recent) >= CACHED_VARIANTS // 2:
                self.older, self.recent = self.recent, {}
            self.recent[at] = ids
        return ids

    def make(self, word: str, variant: int) -> list[int]:
        draws = generate_uniform(f"{self.name} {variant} {word}")
        return self.vocabulary.spell(self.segment(self.space + word, self.vocabulary, self.rate, draws))


MAX_TRAINING_CHUNK = 4000  # characters of a line given to SentencePiece at once; a word of 65,536 would abort it
ESCAPE = "\ue581"  # of the private use area; itself escaped, so that the way back is exact
ESCAPES = {ESCAPE: ESCAPE + "0", SPACE_MARK: ESCAPE + "1", "\u2585": ESCAPE + "2"}


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


class SubwordTokenizer(Tokenizer):
    """Subwords of a SentencePiece model."""

    suffix = ".model"
    samples = True
    kind: ClassVar[str]

    @staticmethod
    @abstractmethod
    def segment(word: str, vocabulary: SubwordVocabulary, rate: float, draws: Iterator[float]) -> list[str]:
        """Return one random segmentation of a word."""

    def __init__(self, model: bytes) -> None:
        self.model = model
        self.processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.size = self.processor.get_piece_size()
        pieces: list[str] = self.processor.id_to_piece(list(range(self.size)))
        byte_ids = [self.processor.piece_to_id(name) for name in BYTE_TOKENS] if pieces[4] == BYTE_TOKENS[0] else []
        ordinary = range(len(SPECIALS) + len(byte_ids), self.size)
        self.lossless = bool(byte_ids)
        self.spelling = [b""] * len(SPECIALS) + [bytes([b]) for b in range(len(byte_ids))]
        self.spelling += [pieces[i].encode() for i in ordinary]
        self.shown = [unescape(piece) for piece in pieces]
        scores: list[float] = self.processor.get_score(list(range(self.size)))
        vocabulary = SubwordVocabulary(
            {pieces[i]: i for i in ordinary}, {pieces[i]: scores[i] for i in ordinary}, byte_ids
        )
        self.sampler = SubwordSampler(vocabulary, self.segment, SPACE_MARK)

    @classmethod
    def train(cls, lines: Sequence[str], settings: TokenizerSettings) -> Self:
        if not any(lines):
            raise UserError(f"there is no text to learn {cls.kind} pieces from; every line is empty")
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
            raise _explain_failure(str(error), settings) from None
        return cls(model.getvalue())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.processor.encode(escape(text))
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self.processor.encode([escape(text) for text in texts])
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        text = b"".join(map(self.spelling.__getitem__, ids)).decode(errors="replace")
        return unescape(text.removeprefix(SPACE_MARK).replace(SPACE_MARK, " "))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return list(map(self.shown.__getitem__, ids))

    def spellings(self) -> list[bytes]:
        return [spelt.replace(SPACE_MARK.encode(), b" ") for spelt in self.spelling]

    def starts(self, text: str, ids: Sequence[int]) -> list[int] | None:
        sizes = [len(self.spelling[i].replace(SPACE_MARK.encode(), b"")) for i in ids]
        if not self.lossless:  # one <unk> stands for a run of characters that are not in the vocabulary
            vocabulary, escaped = self.sampler.vocabulary, escape(text).replace(" ", SPACE_MARK)
            unknown = iter(
                [
                    len("".join(run).encode())
                    for known, run in groupby(escaped, vocabulary.ids.__contains__)
                    if not known
                ]
            )
            sizes = [next(unknown, 0) if i == UNK else size for i, size in zip(ids, sizes)]
        return find_starts(sizes, text)

    def sample(self, text: str, *, rate: float, key: tuple[int, int, int]) -> list[int]:
        if not rate or not text:
            return self.encode(text)
        return self.sampler.sample(escape(text), rate=rate, key=key)

    def content(self) -> bytes:
        return self.model

    @classmethod
    def from_content(cls, content: bytes) -> Self:
        return cls(content)


class BpeTokenizer(SubwordTokenizer):
    """Byte-pair encoding: merges the most frequent neighbours again and again. Samples by BPE-dropout."""

    kind = "bpe"
    segment = staticmethod(segment_bpe)


class UnigramTokenizer(SubwordTokenizer):
    """A unigram language model over subwords, pruned to size. Samples by the probability of each segmentation."""

    kind = "unigram"
    segment = staticmethod(segment_unigram)


def _explain_failure(message: str, settings: TokenizerSettings) -> UserError:
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


SUBWORD_TOKENIZERS: dict[str, type[Tokenizer]] = {"bpe": BpeTokenizer, "unigram": UnigramTokenizer}
