"""What about an answer looks odd: flags for a reader who cannot read them all. Ordinary text must not raise them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import eq
from typing import NamedTuple, Self

REPEATS, LONG, SHORT, COPIES, UNKNOWN_WORDS = (
    "with repetitions",
    "far too long",
    "far too short",
    "copying the source",
    "with unknown words left out",
)
WORDS = re.compile(r"[\u2e80-\ua4cf\uac00-\ud7af]|[^\W\u2e80-\ua4cf\uac00-\ud7af]+(?:['’\-]\w+)*")
LONGEST_LOOP = 40  # words of what is repeated
FEW = 5  # words: so short a line may well be a name that stays as it is
SAME = 0.8  # share of its words that a copy has from the source
RARE = 0.01  # share of copies in training below which a copy is odd
ROOM = 4  # tokens that are added to both sides before they are compared: short lines vary more
MARGIN = 1.25  # times beyond the most that training had


class Usual(NamedTuple):
    """What pairs of training look like: bounds of target tokens to source tokens, and how many copy their source."""

    least: float
    most: float
    copies: float

    @classmethod
    def of(cls, lengths: Iterable[tuple[int, int]], pairs: Iterable[tuple[Sequence[str], Sequence[str]]]) -> Self:
        """From the lengths of many pairs, and the words of some. One pair in a thousand may be out of bounds."""
        ratios = sorted(ratio(source, target) for source, target in lengths)
        outside = len(ratios) // 2000
        some = [copies(source, target) for source, target in pairs]
        return cls(ratios[outside], ratios[-1 - outside], sum(some) / max(len(some), 1))

    def text(self) -> str:
        return json.dumps([round(value, 4) for value in self])

    @classmethod
    def read(cls, text: str) -> Self:
        return cls(*json.loads(text))


def ratio(source: int, target: int) -> float:
    return (target + ROOM) / (source + ROOM)


def flags_of(source: str, answer: str, tokens: tuple[int, int], usual: Usual | None) -> tuple[str, ...]:
    """`tokens` are how many the source and the answer have. Without knowledge of training, only loops are odd."""
    said = words_of(answer)
    again, copying = loops(said), usual is not None and usual.copies < RARE
    given = words_of(source) if again or copying else []
    found = [REPEATS] if again and again > loops(given) else []
    if usual:
        share = ratio(*tokens)
        found += [LONG] if share > usual.most * MARGIN else [SHORT] if share < usual.least / MARGIN else []
        found += [COPIES] if copying and copies(given, said) else []
    return tuple(found)


def words_of(text: str) -> list[str]:
    return WORDS.findall(text.casefold())


def loops(said: Sequence[str]) -> int:
    """How often a run of words is said too often in a row: three times, or twice where it is of four words or more."""
    again = len(said) - len(set(said))  # words that were said before, of which loops are made
    found = 0
    for period in range(1, min(LONGEST_LOOP, len(said) // 2, again) + 1):
        enough = period * (1 if period >= 4 else 2)
        if enough > again or sum(as_before := list(map(eq, said[period:], said))) < enough:
            continue
        same = 0
        for repeated in as_before:
            same = same + 1 if repeated else 0
            found += same == enough
    return found


def copies(source: Sequence[str], answer: Sequence[str]) -> bool:
    """Whether an answer is made of the words of its source, and leaves few of them out."""
    if len(source) < FEW or len(answer) < FEW:
        return False
    shared = (Counter(source) & Counter(answer)).total()
    return shared >= SAME * max(len(source), len(answer))
