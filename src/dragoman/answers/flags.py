"""What about an answer looks odd: flags for a reader who cannot read them all. Ordinary text must not raise them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import eq
from typing import NamedTuple, Self

from dragoman.types import SPECIALS, UNK

REPEATS, LONG, SHORT, COPIES, UNKNOWN_WORDS, LOST, ADDED = (
    "with repetitions",
    "far too long",
    "far too short",
    "copying the source",
    "with unknown words left out",
    "with placeholders, tags or links missing from the translation",
    "with placeholders, tags or links not in the source",
)
WORDS = re.compile(r"[\u2e80-\ua4cf\uac00-\ud7af]|[^\W\u2e80-\ua4cf\uac00-\ud7af]+(?:['’\-]\w+)*")
LONGEST_LOOP = 40  # words of what is repeated
FEW = 5  # words: so short a line may well be a name that stays as it is
SAME = 0.8  # share of its words that a copy has from the source
RARE = 0.01  # share of copies in training below which a copy is odd
ROOM = 4  # tokens that are added to both sides before they are compared: short lines vary more
MARGIN = 1.25  # times beyond the most that training had
OFTEN = 0.3  # share of training pairs with other placeholders than their source, from which on that is no fault
ENOUGH = 10  # training pairs with placeholders, below which they say little
SHOWN = 10  # placeholders that a warning names
MARKS = re.compile(r"[{<%@]|://|www\.")  # a text without any of these has no placeholder, tag or link
# Every alternative begins with a mark of its own or where a word begins, and its repetitions are possessive: a text is
# read in linear time, whatever it holds.
PLACEHOLDER = re.compile(
    r"""
      (?<!\w)(?:(?:https?|ftp)://|www\.) (?:[\-.~:/?#\[\]@!$&'()*+,;=%] | [^\W\u2e80-\ua4cf\uac00-\ud7af])++
    | (?<![A-Za-z0-9.+\-_]) [A-Za-z0-9.+\-_]++ @ [A-Za-z0-9\-]++ (?:\.[A-Za-z0-9\-]++)++  # an e-mail address
    | </?[A-Za-z][\w:.\-]*+ (?:\s[^<>]*+)? /?>                                            # <b>, </b>, <a href="x">
    | \{\{[^{}]*+\}\} | [$%]\{[^{}]*+\} | \{[\w.:,!\-]*+\}                               # {{x}}, ${x}, {name}, {0}
    | (?<![\d%]) % (?:\([\w.]++\)|\d++\$)? [\-+\#0]*+ \d*+ (?:\.\d++)? (?:hh?|ll?|z)? [sdifgeuxXc@] (?!\w)  # %s
    """,
    re.VERBOSE,
)


class Usual(NamedTuple):
    """What pairs of training look like: bounds of target tokens to source tokens, how many copy their source, and how
    many of those with placeholders, tags or links have others in the target (runs of earlier releases do not say)."""

    least: float
    most: float
    copies: float
    rewritten: float = 0.0

    @classmethod
    def of(cls, lengths: Iterable[tuple[int, int]], texts: Iterable[tuple[str, str]]) -> Self:
        """Learn from the lengths of many pairs and the texts of some. One pair in a thousand may be out of bounds."""
        ratios = sorted(ratio(source, target) for source, target in lengths)
        outside = len(ratios) // 2000
        copied, kept = [], []
        for source, target in texts:
            copied.append(copies(words_of(source), words_of(target)))
            if MARKS.search(source) or MARKS.search(target):
                found = placeholders(source), placeholders(target)
                kept += [found[0] == found[1]] if any(found) else []
        rewritten = kept.count(False) / max(len(kept), ENOUGH)
        return cls(ratios[outside], ratios[-1 - outside], sum(copied) / max(len(copied), 1), rewritten)

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


def placeholders(text: str) -> Counter[str]:
    """Count what a translation keeps as it is: placeholders, tags, URLs and e-mail addresses."""
    found: Counter[str] = Counter()
    for match in PLACEHOLDER.finditer(text):
        span = match[0]
        if span[0] not in "{<%$":  # a full stop or a bracket behind a link is not part of it
            span = span.rstrip(".,;:!?'")
            if span.endswith(")") and span.count(")") > span.count("("):
                span = span[:-1].rstrip(".,;:!?'")
        found[span] += 1
    del found[SPECIALS[UNK]]
    return found


def placeholder_warnings(source: str, answer: str, usual: Usual | None) -> list[str]:
    """Name the placeholders, tags and links of the source that the answer lacks, and those that it has too many of.

    None are named where training pairs often have others in the target, such as links of a text in its summary.
    """
    if not (MARKS.search(source) or MARKS.search(answer)) or (usual and usual.rewritten >= OFTEN):
        return []
    given, said = placeholders(source), placeholders(answer)
    warnings = []
    for flag, names in ((LOST, list((given - said).elements())), (ADDED, list((said - given).elements()))):
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        warnings += [f"{flag}: {', '.join(names[:SHOWN])}{more}"] if names else []
    return warnings


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
