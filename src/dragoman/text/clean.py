"""Filters for pairs. Every pair that is dropped is counted under the reason why.

The reasons stand on the menu at the foot of this file, in the order in which they are asked. Each is a function from
the settings to a test of one pair, or to None when the settings turn it off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

from pydantic import Field

from dragoman.config import Amount, Settings
from dragoman.faults import near
from dragoman.text.language import Languages
from dragoman.text.seen import Seen
from dragoman.types import Pair, UserError


class CleanSettings(Settings):
    """What to drop. 0, "" and False turn a reason off; pairs with an empty side are always dropped.

    `dragoman data clean --help` lists the descriptions.
    """

    min_words: Amount = Field(0, description="drop a pair if a side has fewer words, which are runs between spaces")
    max_words: Amount = Field(250, description="drop a pair if a side has more words; 0 turns it off")
    max_characters: Amount = Field(
        2000, description="drop a pair if a side has more characters, for languages written without spaces; 0: off"
    )
    max_ratio: Annotated[float, Field(ge=0)] = Field(
        5.0, description="drop a pair if a side is more than so many times as long as the other, in UTF-8 bytes; 0: off"
    )
    drop_duplicates: bool = Field(True, description="keep only the first of equal pairs")
    drop_equal: bool = Field(False, description="drop a pair if both sides are the same text")
    source_language: str = Field(
        "", description="such as en: drop a pair if its source is clearly in another language (needs dragoman[clean])"
    )
    target_language: str = Field("", description="likewise for the target")


Test = Callable[[Pair], bool]


def clean(pairs: Iterable[Pair], settings: CleanSettings, counts: Counter[str]) -> Iterator[Pair]:
    """The pairs worth keeping, as they come; `counts` learns how many were kept, and dropped for which reason.

    counts = Counter()
    kept = list(clean([Pair("a dog", "ein Hund"), Pair("a dog", "")], CleanSettings(), counts))
    assert counts == {"kept": 1, "empty": 1}
    """
    tests = [(name, test) for name, reason in REASONS.items() if (test := reason(settings))]

    def kept() -> Iterator[Pair]:
        for pair in pairs:
            verdict = next((name for name, test in tests if test(pair)), "kept")
            counts[verdict] += 1
            if verdict == "kept":
                yield pair

    return kept()


def empty(settings: CleanSettings) -> Test:  # noqa: ARG001
    """A side holds no character but spaces."""
    return lambda pair: not pair.source.strip() or not pair.target.strip()


def equal(settings: CleanSettings) -> Test | None:
    """Both sides are the same text, but for spaces around it."""
    return (lambda pair: pair.source.strip() == pair.target.strip()) if settings.drop_equal else None


def short(settings: CleanSettings) -> Test | None:
    """A side has fewer words than min_words."""
    least = settings.min_words
    return (lambda pair: any(len(side.split()) < least for side in (pair.source, pair.target))) if least else None


def long(settings: CleanSettings) -> Test | None:
    """A side has more words than max_words, or more characters than max_characters."""
    words = settings.max_words or float("inf")
    characters = settings.max_characters or float("inf")
    return lambda pair: any(
        len(side) > characters or (2 * words < len(side) and len(side.split()) > words)
        for side in (pair.source, pair.target)
    )


def ratio(settings: CleanSettings) -> Test | None:
    """One side is more than max_ratio times as long as the other."""
    most = settings.max_ratio

    def lopsided(pair: Pair) -> bool:
        lengths = len(pair.source.encode()), len(pair.target.encode())
        return max(lengths) > most * min(lengths)

    return lopsided if most else None


def duplicate(settings: CleanSettings) -> Test | None:
    """The same pair came before."""
    seen = Seen()
    return (lambda pair: not seen.add(pair.source, pair.target)) if settings.drop_duplicates else None


def language(settings: CleanSettings) -> Test | None:
    """A side is clearly in another language than the settings say."""
    wanted = settings.source_language, settings.target_language
    if not any(wanted):
        return None
    languages = Languages()
    for name, code in zip(("source_language", "target_language"), wanted):
        if code and code not in languages.codes:
            raise UserError(f"{name} {code!r} is not a language that py3langid knows{near(code, languages.codes)}")

    def foreign(pair: Pair) -> bool:
        sides = (pair.source, pair.target)
        return any(code and languages.foreign(side, code) for side, code in zip(sides, wanted))

    return foreign


REASONS: dict[str, Callable[[CleanSettings], Test | None]] = {
    "empty": empty,
    "equal": equal,
    "short": short,
    "long": long,
    "ratio": ratio,
    "duplicate": duplicate,
    "language": language,
}
