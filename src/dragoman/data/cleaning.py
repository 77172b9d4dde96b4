"""Cleaning of sentence pairs, and its tools: language identification and a compact set of texts.

`clean_pairs` drops pairs by the rules in CleanSettings and counts them by reason. LanguageGuesser and TextSet are also
used for the statistics of a corpus (statistics.py) and its overlap with another one (overlap.py).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from pydantic import Field

from dragoman.config.settings import Amount, Settings, suggest_name
from dragoman.errors import UserError
from dragoman.io import hash_stably
from dragoman.types import Pair

LANGUAGE_MARGIN = 5.0  # a text is foreign if the log-probability of another language is higher by more than this
NO_EVIDENCE = -1e38  # py3langid's score is the lowest float32 if no n-gram of the text is known to it


class LanguageGuesser:
    """Language identification with py3langid, an optional dependency.

    languages = LanguageGuesser()
    assert languages.guess("Ein Mann geht mit seinem Hund.") == "de"
    """

    def __init__(self) -> None:
        try:
            import py3langid
        except ImportError:
            raise UserError("to guess languages, install the extra: pip install 'dragoman[clean]'") from None
        self.langid: Any = py3langid
        self.codes: frozenset[str] = frozenset(code for code, _ in py3langid.rank("a"))

    def guess(self, text: str) -> str:
        """Return a code such as "en", or "" for a text without evidence, such as a number."""
        code, score = self.langid.classify(text)
        return str(code) if score > NO_EVIDENCE else ""

    def is_foreign(self, text: str, code: str) -> bool:
        """Return whether the text is clearly in another language than `code`. Short texts are seldom clear enough."""
        if self.guess(text) in ("", code):
            return False
        scores = dict(self.langid.rank(text))
        return bool(max(scores.values()) - scores[code] > LANGUAGE_MARGIN)


class TextSet:
    """A set of texts without removal: a hash table of 64-bit hashes, which takes about 20 bytes per text.

    The texts themselves are not stored, so a collision of hashes makes a new text look known. Among ten million texts
    the probability of a collision is 3 in a million.

    seen = TextSet()
    assert seen.add("a dog") and not seen.add("a dog")
    """

    def __init__(self) -> None:
        self.count = 0
        self.table = array("Q", bytes(8 << 10))  # open addressing with 1024 slots; 0 is an empty slot

    def add(self, *parts: str) -> bool:
        """Add a text that consists of these parts; return True if it was not in the set."""
        key = self.hash_parts(parts)
        slot = self.find_slot(key)
        if self.table[slot]:
            return False
        self.table[slot] = key
        self.count += 1
        if self.count * 3 > len(self.table) * 2:  # more than two thirds are occupied: double the table
            keys = filter(None, self.table)
            self.table = array("Q", bytes(2 * 8 * len(self.table)))  # 8 bytes per slot
            for known in keys:
                self.table[self.find_slot(known)] = known
        return True

    def __contains__(self, parts: tuple[str, ...]) -> bool:
        return bool(self.table[self.find_slot(self.hash_parts(parts))])

    @staticmethod
    def hash_parts(parts: tuple[str, ...]) -> int:
        """Return a hash that is not 0. Parts are joined by a byte that UTF-8 lacks: ("ab", "c") is not ("a", "bc")."""
        return hash_stably(b"\xff".join([part.encode() for part in parts])) or 1

    def find_slot(self, key: int) -> int:
        """Return the slot of a hash, or the empty slot where it has to be inserted."""
        table, mask = self.table, len(self.table) - 1
        slot = key & mask
        while (stored := table[slot]) and stored != key:
            slot = (slot + 1) & mask
        return slot


class CleanSettings(Settings):
    """Rules for dropping pairs. 0, "" and False turn a rule off; pairs with an empty side are always dropped.

    `dragoman data clean --help` prints these descriptions.
    """

    min_words: Amount = Field(0, description="drop a pair if a side has fewer words; words are separated by spaces")
    max_words: Amount = Field(250, description="drop a pair if a side has more words; 0: off")
    max_characters: Amount = Field(
        2000, description="drop a pair if a side has more characters, for languages written without spaces; 0: off"
    )
    max_ratio: Annotated[float, Field(ge=0)] = Field(
        5.0,
        description="drop a pair if a side has more than this many times the UTF-8 bytes of the other; 0: off",
    )
    drop_duplicates: bool = Field(True, description="keep only the first of equal pairs")
    drop_equal: bool = Field(False, description="drop a pair if both sides are the same text")
    source_language: str = Field(
        "", description="such as en: drop a pair if its source is clearly in another language (needs dragoman[clean])"
    )
    target_language: str = Field("", description="the same for the target")


class CleaningFilter:
    """Applies the rules of CleanSettings to one pair after the other. It stores hashes of pairs to find duplicates."""

    def __init__(self, settings: CleanSettings) -> None:
        self.settings, self.seen = settings, TextSet()
        codes = {"source": settings.source_language, "target": settings.target_language}
        self.codes = {side: code for side, code in codes.items() if code}  # languages to check
        self.languages = LanguageGuesser() if self.codes else None
        for side, code in self.codes.items():
            if self.languages and code not in self.languages.codes:
                hint = suggest_name(code, self.languages.codes)
                raise UserError(f"{side}_language {code!r} is not a language that py3langid knows{hint}")

    def find_reason(self, pair: Pair) -> str:
        """Return the first reason to drop a pair, or "kept"."""
        settings, sides = self.settings, (pair.source, pair.target)
        if not all(side.strip() for side in sides):
            return "empty"
        if settings.drop_equal and pair.source.strip() == pair.target.strip():
            return "equal"
        if settings.min_words and any(len(side.split()) < settings.min_words for side in sides):
            return "short"
        max_words, max_characters = settings.max_words or math.inf, settings.max_characters or math.inf
        for side in sides:
            # n words and the spaces between them have at least 2n - 1 characters, so short texts need not be split.
            if len(side) > max_characters or (len(side) > 2 * max_words and len(side.split()) > max_words):
                return "long"
        shorter, longer = sorted(len(side.encode()) for side in sides)
        if settings.max_ratio and longer > settings.max_ratio * shorter:
            return "ratio"
        if settings.drop_duplicates and not self.seen.add(*sides):
            return "duplicate"
        for name, code in self.codes.items():
            if self.languages and self.languages.is_foreign(getattr(pair, name), code):
                return "language"
        return "kept"


def clean_pairs(pairs: Iterable[Pair], settings: CleanSettings, counts: Counter[str]) -> Iterator[Pair]:
    """Return the pairs that no rule drops; count the pairs in `counts` by the reason for dropping them, or as "kept".

    counts = Counter()
    kept = list(clean_pairs([Pair("a dog", "ein Hund"), Pair("a dog", "")], CleanSettings(), counts))
    assert counts == {"kept": 1, "empty": 1}
    """
    rules = CleaningFilter(settings)

    def keep(pair: Pair) -> bool:
        reason = rules.find_reason(pair)
        counts[reason] += 1
        return reason == "kept"

    return filter(keep, pairs)
