"""Random ways to cut words into pieces: BPE-dropout and unigram sampling, from the scores of a SentencePiece model.

SentencePiece's own sampler draws from one stream per thread that cannot be set back, so that a resumed run would see
other pieces. Here every draw is a function of where it happens:

    variant v (of 64) of a word              is a function of (rate, word, v), made when first wanted, and remembered;
    the variant of the n-th word of a line   is a function of (seed, epoch, line, n).

A word is a run between spaces. No piece crosses a space, so cutting word by word loses nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise

from dragoman.types import UNK

VARIANTS = 64
REMEMBERED = 1 << 18  # variants held in memory at most
LONGEST_REMEMBERED = 32  # characters; longer words hardly come twice
UNKNOWN_PENALTY = 10.0  # how much worse than the worst piece an unknown character is, as in SentencePiece


@dataclass(frozen=True)
class Lexicon:
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


def uniform(name: str) -> Iterator[float]:
    """Endless numbers in [0, 1), a function of their name. Cheap to begin, unlike a random.Random."""
    state = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        yield (state >> 11) * 2**-53


Cut = Callable[[str, Lexicon, float, Iterator[float]], list[str]]


def bpe_dropout(word: str, lexicon: Lexicon, rate: float, draws: Iterator[float]) -> list[str]:
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


def unigram_sample(word: str, lexicon: Lexicon, rate: float, draws: Iterator[float]) -> list[str]:
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


class Sampler:
    """Cuts lines into random pieces, word by word, with a memory of the variants it has made."""

    def __init__(self, lexicon: Lexicon, cut: Cut, space: str) -> None:
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
        for word, draw in zip(text.split(" "), uniform(f"{seed} {epoch} {line}")):
            at = (word, int(draw * VARIANTS))
            ids += self.recent.get(at) or self.recall(at)
        return ids

    def recall(self, at: tuple[str, int]) -> list[int]:
        """A variant from the older memory, or made anew."""
        ids = self.older.get(at) or self.make(*at)
        if len(at[0]) <= LONGEST_REMEMBERED:
            if len(self.recent) >= REMEMBERED // 2:
                self.older, self.recent = self.recent, {}
            self.recent[at] = ids
        return ids

    def make(self, word: str, variant: int) -> list[int]:
        draws = uniform(f"{self.name} {variant} {word}")
        return self.lexicon.spell(self.cut(self.space + word, self.lexicon, self.rate, draws))
