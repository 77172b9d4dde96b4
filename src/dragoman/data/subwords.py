"""Subwords of a SentencePiece model: escapes, and random segmentations by BPE-dropout and unigram sampling.

SentencePiece reserves two characters: U+2581, which stands for a space, and U+2585, whose lines it leaves out of
training. Text that holds them is escaped, so that decode(encode(text)) is the text, whatever it holds.

Random segmentations are computed from the scores of the model. SentencePiece's own sampler uses one random stream per
thread that cannot be restored, so a resumed run would see other tokens. Here every choice is a function of its key:

    variant v (of 64) of a word               depends on (rate, word, v); it is cached;
    the variant of the n-th word of a line    depends on (seed, epoch, line, n).

A word is a run between spaces. No subword crosses a space, so segmenting word by word loses nothing.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from dragoman.errors import UserError
from dragoman.io import hash_stably
from dragoman.types import UNK

VARIANTS = 64
CACHED_VARIANTS = 1 << 18  # maximum number of cached variants
LONGEST_CACHED = 32  # characters; longer words hardly come twice
UNKNOWN_PENALTY = 10.0  # how much worse than the worst piece an unknown character is, as in SentencePiece
SPACE_MARK = "▁"  # stands for a space where tokens are shown
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

    def __init__(self, vocabulary: SubwordVocabulary, segment: Segment) -> None:
        self.vocabulary, self.segment = vocabulary, segment
        self.make_cached = lru_cache(CACHED_VARIANTS)(self.make)

    def sample(self, text: str, *, rate: float, key: tuple[int, int, int]) -> list[int]:
        seed, epoch, line = key
        ids: list[int] = []
        for word, draw in zip(text.split(" "), generate_uniform(f"{seed} {epoch} {line}")):
            make = self.make_cached if len(word) <= LONGEST_CACHED else self.make
            ids += make(word, int(draw * VARIANTS), rate)
        return ids

    def make(self, word: str, variant: int, rate: float) -> list[int]:
        """Segment a word."""
        draws = generate_uniform(f"{rate} {variant} {word}")
        return self.vocabulary.spell(self.segment(SPACE_MARK + word, self.vocabulary, rate, draws))


def explain_failure(message: str, kind: str, vocabulary_size: int, byte_fallback: bool) -> UserError:
    """Return an error for a message of SentencePiece's trainer."""
    size = f"tokenizer.size {vocabulary_size}"
    if found := re.search(r"value <= (\d+)", message):
        return UserError(
            f"{size} is more than this text can fill with {kind} pieces; the largest that works here is {found[1]}"
        )
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        parts = "characters, bytes and special symbols" if byte_fallback else "characters and special symbols"
        return UserError(f"{size} is too small for the {found[1]} {parts} of this text; set it above {found[1]}")
    return UserError(f"SentencePiece cannot learn {kind} pieces from this text: {message}")
