"""Random ways to cut words into pieces: BPE-dropout and unigram sampling, from the scores of a SentencePiece model.

SentencePiece's own sampler draws from one stream per thread that cannot be set back, so that a resumed run would see
other pieces. Here every draw is a function of where it happens:

    variant v (of 64) of a word              is a function of (rate, word, v), made when first wanted, and remembered;
    the variant of the n-th word of a line   is a function of (seed, epoch, line, n).

A word is a run between spaces. No piece crosses a space, so cutting word by word loses nothing.

Subword kinds, BPE and unigram, learned and applied by SentencePiece on raw text, with nothing normalised away.

SentencePiece keeps two characters for itself: U+2581, which stands for a space, and U+2585, whose lines it leaves out
of training. Text that holds them is escaped, so that text in is text out, whatever it holds.
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
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import Any, ClassVar, Self

import sentencepiece

from dragoman.config.settings import TokenizerSettings
from dragoman.data.simple_tokenizers import BYTE_TOKENS, SPACE_MARK, Tokenizer, find_starts
from dragoman.errors import UserError
from dragoman.types import BOS, EOS, PAD, SPECIALS, UNK

VARIANTS = 64
CACHED_VARIANTS = 1 << 18  # variants held in memory at most
LONGEST_CACHED = 32  # characters; longer words hardly come twice
UNKNOWN_PENALTY = 10.0  # how much worse than the worst piece an unknown character is, as in SentencePiece


@dataclass(frozen=True)
class SubwordVocabulary:
    """The ordinary pieces of a model with their ids and scores, and the ids of the 256 bytes, if it has them."""

    ids: dict[str, int]
    scores: dict[str, float]
    byte_ids: Sequence[int]

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.scores))

    @cached_property
    def unknown(self) -> float:
        """The score of a character that is no piece."""
        return min(self.scores.values()) - UNKNOWN_PENALTY

    def spell(self, pieces: Sequence[str]) -> list[int]:
        """Ids of pieces. An unknown one is spelt in bytes, or else a run of unknown ones is one <unk>."""
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
    """Endless numbers in [0, 1), a function of their name. Cheap to begin, unlike a random.Random."""
    state = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        yield (state >> 11) * 2**-53


Segment = Callable[[str, SubwordVocabulary, float, Iterator[float]], list[str]]


def segment_bpe(word: str, lexicon: SubwordVocabulary, rate: float, draws: Iterator[float]) -> list[str]:
    """Merge neighbours, best score first and then leftmost, but let each merge slip with probability `rate`.

    With rate 0 this is SentencePiece's own way to cut.
    """
    scores = lexicon.scores
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


def segment_unigram(word: str, lexicon: SubwordVocabulary, rate: float, draws: Iterator[float]) -> list[str]:
    """Draw one of all ways to cut the word, with probability in proportion to p(pieces) ** alpha.

    alpha is (1 - rate) / (50 * rate): towards rate 0 always the most probable way; at 0.1 alpha is 0.18, a usual
    strength (Kudo 2018 takes 0.1 to 0.5); towards 1 every way is as likely as any other.
    Sum forward, draw backward: exact, with no list of ways.
    """
    scores = lexicon.scores
    alpha = min((1 - rate) / (50 * rate), 1e6)
    unknown, longest = lexicon.unknown, lexicon.longest
    total = [0.0]  # total[end]: log of the sum over all ways to cut word[:end]
    arriving: list[list[tuple[int, float]]] = [[]]  # pieces that end here: where they begin, and their share
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
    """Cuts lines into random pieces, word by word, with a memory of the variants it has made."""

    def __init__(self, lexicon: SubwordVocabulary, cut: Segment, space: str) -> None:
        self.lexicon, self.cut, self.space = lexicon, cut, space
        self.forget(0.0)

    def forget(self, rate: float) -> None:
        """Begin two memories, of what was wanted lately and of what was wanted before that."""
        self.rate, self.name = rate, str(rate)
        self.recent: dict[tuple[str, int], list[int]] = {}
        self.older: dict[tuple[str, int], list[int]] = {}

    def sample(self, text: str, *, rate: float, key: tuple[int, int, int]) -> list[int]:
        seed, epoch, line = key
        if self.rate != rate:
            self.forget(rate)
        ids: list[int] = []
        for word, draw in zip(text.split(" "), generate_uniform(f"{seed} {epoch} {line}")):
            at = (word, int(draw * VARIANTS))
            ids += self.recent.get(at) or self.recall(at)
        return ids

    def recall(self, at: tuple[str, int]) -> list[int]:
        """A variant from the older memory, or made anew."""
        ids = self.older.get(at) or self.make(*at)
        if len(at[0]) <= LONGEST_CACHED:
            if len(self.recent) >= CACHED_VARIANTS // 2:
                self.older, self.recent = self.recent, {}
            self.recent[at] = ids
        return ids

    def make(self, word: str, variant: int) -> list[int]:
        draws = generate_uniform(f"{self.name} {variant} {word}")
        return self.lexicon.spell(self.cut(self.space + word, self.lexicon, self.rate, draws))


MAX_TRAINING_CHUNK = 4000  # letters
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


def in_parts(line: str) -> list[str]:
    """The line in parts of a size that SentencePiece can learn from: a word of 65,536 letters would abort it."""
    return [line[start : start + MAX_TRAINING_CHUNK] for start in range(0, len(line), MAX_TRAINING_CHUNK)]


class SubwordTokenizer(Tokenizer):
    """Pieces of words, from a SentencePiece model."""

    suffix = ".model"
    kind: ClassVar[str]

    @staticmethod
    @abstractmethod
    def cut(word: str, lexicon: SubwordVocabulary, rate: float, draws: Iterator[float]) -> list[str]:
        """One random way to cut a word into pieces."""

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
        lexicon = SubwordVocabulary(
            {pieces[i]: i for i in ordinary}, {pieces[i]: scores[i] for i in ordinary}, byte_ids
        )
        self.sampler = SubwordSampler(lexicon, self.cut, SPACE_MARK)

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
        return unescape(text.removeprefix(SPACE_MARK).replace(SPACE_MARK, " "))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return list(map(self.shown.__getitem__, ids))

    def spellings(self) -> list[bytes]:
        return [spelt.replace(SPACE_MARK.encode(), b" ") for spelt in self.spelling]

    def starts(self, text: str, ids: Sequence[int]) -> list[int] | None:
        sizes = [len(self.spelling[i].replace(SPACE_MARK.encode(), b"")) for i in ids]
        if not self.lossless:  # an unknown piece is a run of letters that are no pieces
            lexicon, escaped = self.sampler.lexicon, escape(text).replace(" ", SPACE_MARK)
            unknown = iter(
                [len("".join(run).encode()) for known, run in groupby(escaped, lexicon.ids.__contains__) if not known]
            )
            sizes = [next(unknown, 0) if i == UNK else size for i, size in zip(ids, sizes)]
        return find_starts(sizes, text)

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


class BpeTokenizer(SubwordTokenizer):
    """Byte-pair encoding: the most frequent neighbours become one piece, again and again. Sampling: BPE-dropout."""

    kind = "bpe"
    cut = staticmethod(segment_bpe)


class UnigramTokenizer(SubwordTokenizer):
    """A unigram language model over pieces, pruned to size. Sampling: by the probability of each way to cut."""

    kind = "unigram"
    cut = staticmethod(segment_unigram)


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
