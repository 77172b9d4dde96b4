"""Subwords of a SentencePiece model: escapes, and random segmentations by BPE-dropout and unigram sampling.

SentencePiece reserves two characters: U+2581 stands for a space, and lines with U+2585 are left out of training. Both
are escaped in the text, so that decode(encode(text)) equals the text even if it contains them.

Random segmentations are computed from the scores of the model. The sampler of SentencePiece uses one random stream per
thread that cannot be restored, so a resumed run would see other tokens. Here a segmentation is a pure function:

    variant v (of SEGMENTATIONS_PER_WORD) of a word         depends on (rate, word, v) and is cached;
    the variant of the n-th word of a line    depends on (seed, epoch, line, n).

The rate is the strength of the randomness, in BPE the dropout rate of merges. Words are separated by spaces. No subword
contains a space except at its beginning, so words can be segmented one by one.
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

SEGMENTATIONS_PER_WORD = 64  # number of random segmentations of a word
CACHED_VARIANTS = 1 << 18
LONGEST_CACHED = 32  # characters; longer words are rarely repeated
UNKNOWN_PENALTY = 10.0  # an unknown character scores this much less than the worst subword, as in SentencePiece
SPACE_MARK = "▁"  # stands for a space in subwords
ESCAPE = "\ue581"  # an arbitrary private-use character; it is escaped too, so that `unescape` is exact
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
    """The subwords of a model, without special tokens."""

    ids: dict[str, int]
    scores: dict[str, float]  # log-probabilities (unigram), or minus the rank of the merge (BPE)
    byte_ids: Sequence[int]  # ids of the 256 bytes; empty without byte fallback

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.scores))

    @cached_property
    def unknown_score(self) -> float:
        return min(self.scores.values()) - UNKNOWN_PENALTY

    def to_ids(self, subwords: Sequence[str]) -> list[int]:
        """Return the ids of subwords. Unknown ones become bytes; without byte fallback, neighbours share one <unk>."""
        ids: list[int] = []
        for subword in subwords:
            known = self.ids.get(subword)
            if known is not None:
                ids.append(known)
            elif self.byte_ids:
                ids.extend([self.byte_ids[byte] for byte in subword.encode()])
            elif not ids or ids[-1] != UNK:
                ids.append(UNK)
        return ids


def generate_uniform(seed: str) -> Iterator[float]:
    """Yield pseudo-random numbers in [0, 1) for ever from a linear congruential generator, with the constants of MMIX.

    It starts faster than random.Random, and most words need only a few numbers.
    """
    state = hash_stably(seed.encode())
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        yield (state >> 11) * 2**-53  # the higher 53 of 64 bits: as many as a float can hold


# Returns the subwords of a word, given the word, the vocabulary, the rate and uniform random numbers.
Segment = Callable[[str, SubwordVocabulary, float, Iterator[float]], list[str]]


def segment_bpe(word: str, vocabulary: SubwordVocabulary, rate: float, uniform: Iterator[float]) -> list[str]:
    """Merge neighbours, best score first and then leftmost, but skip each merge with probability `rate` (BPE-dropout).

    With rate 0 this is the segmentation of SentencePiece.
    """
    scores = vocabulary.scores
    symbols = list(word)  # a merged symbol is stored at the index of its first character, with "" at the others
    following = [*range(1, len(symbols)), -1]  # index of the next symbol, or -1
    previous = list(range(-1, len(symbols) - 1))

    def push(left: int, right: int) -> None:
        merged = symbols[left] + symbols[right]
        if merged in scores:
            heapq.heappush(merges, (-scores[merged], left, right, len(merged)))

    merges = [(-scores[a + b], i, i + 1, 2) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
    heapq.heapify(merges)
    while merges:
        _, left, right, size = heapq.heappop(merges)
        # A merge is stale if one of its symbols has been merged with another one since it was queued.
        stale = not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != size
        if stale or (rate and next(uniform) < rate):
            continue
        symbols[left] += symbols[right]
        symbols[right] = ""
        following[left] = following[right]
        if following[left] >= 0:
            previous[following[left]] = left
            push(left, following[left])
        if previous[left] >= 0:
            push(previous[left], left)
    return [symbol for symbol in symbols if symbol]


def segment_unigram(word: str, vocabulary: SubwordVocabulary, rate: float, uniform: Iterator[float]) -> list[str]:
    """Sample one of all segmentations of the word, with probability proportional to p(subwords) ** alpha.

    alpha is (1 - rate) / (50 * rate). Towards rate 0, the most probable segmentation is always chosen; at 0.1, alpha is
    0.18, a usual value (Kudo 2018 uses 0.1 to 0.5); towards 1, all segmentations are equally likely. Forward filtering
    and backward sampling is exact, without a list of all segmentations.
    """
    alpha = min((1 - rate) / (50 * rate), 1e6)  # finite also for tiny rates
    scores, longest = vocabulary.scores, vocabulary.longest
    total = [0.0]  # total[end]: log of the summed weights of all segmentations of word[:end]
    endings: list[list[tuple[int, float]]] = [[]]  # endings[end]: begin and log-weight of each subword that ends there
    for end in range(1, len(word) + 1):
        ending = []
        for begin in range(max(0, end - longest), end):
            score = scores.get(word[begin:end], vocabulary.unknown_score if begin == end - 1 else None)
            if score is not None:
                ending.append((begin, total[begin] + alpha * score))
        highest = max(weight for _, weight in ending)
        total.append(highest + math.log(math.fsum(math.exp(weight - highest) for _, weight in ending)))
        endings.append(ending)
    subwords: list[str] = []
    end = len(word)
    while end:
        remaining = next(uniform)
        for begin, weight in endings[end]:
            subword = word[begin:end]
            remaining -= math.exp(weight - total[end])
            if remaining < 0:
                break
        subwords.append(subword)
        end -= len(subword)
    return subwords[::-1]


class SubwordSampler:
    """Samples segmentations of lines word by word. Variants of words are cached."""

    def __init__(self, vocabulary: SubwordVocabulary, segment: Segment) -> None:
        self.vocabulary, self.segment = vocabulary, segment
        self.encode_cached = lru_cache(CACHED_VARIANTS)(self.encode_word)

    def sample(self, text: str, *, rate: float, key: tuple[int, int, int]) -> list[int]:
        """Return the ids of a random segmentation of an escaped text; key = (seed, epoch, line)."""
        seed, epoch, line = key
        ids: list[int] = []
        for word, number in zip(text.split(" "), generate_uniform(f"{seed} {epoch} {line}")):
            encode = self.encode_cached if len(word) <= LONGEST_CACHED else self.encode_word
            ids += encode(word, int(number * SEGMENTATIONS_PER_WORD), rate)
        return ids

    def encode_word(self, word: str, variant: int, rate: float) -> list[int]:
        uniform = generate_uniform(f"{rate} {variant} {word}")
        return self.vocabulary.to_ids(self.segment(SPACE_MARK + word, self.vocabulary, rate, uniform))


def explain_failure(message: str, kind: str, vocabulary_size: int, byte_fallback: bool) -> UserError:
    """Return a UserError that explains an error message of SentencePiece's trainer."""
    size = f"tokenizer.size {vocabulary_size}"
    if found := re.search(r"value <= (\d+)", message):
        return UserError(
            f"{size} is more than this text can fill with {kind} pieces; the largest that works here is {found[1]}"
        )
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        parts = "characters, bytes and special symbols" if byte_fallback else "characters and special symbols"
        return UserError(f"{size} is too small for the {found[1]} {parts} of this text; set it above {found[1]}")
    return UserError(f"SentencePiece cannot learn {kind} pieces from this text: {message}")
