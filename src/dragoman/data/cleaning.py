"""Filters for sentence pairs, and what they need: language guesses, a compact set of texts, overlap of corpora.

`PairFilter.find_reason` tries the reasons to drop a pair one after the other. Dropped pairs are counted by reason.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from dragoman.config.settings import Amount, Settings, suggest_name
from dragoman.errors import UserError
from dragoman.io import hash_stably
from dragoman.types import Pair

LANGUAGE_MARGIN = 5.0  # a text is called foreign if the log-probability of another language is higher by this


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
        return str(code) if score > -1e38 else ""

    def foreign(self, text: str, code: str) -> bool:
        """Return whether the text is clearly in another language than `code`; short texts rarely are."""
        if self.guess(text) in ("", code):
            return False
        scores = dict(self.langid.rank(text))
        return bool(max(scores.values()) - scores[code] > LANGUAGE_MARGIN)


class TextSet:
    """A set of texts, to which texts can only be added: a table of 64-bit hashes, about 20 bytes a text.

    Two different texts share a hash once in some 10**19 tries: among ten million texts, the chance is 3 in a million.

    seen = TextSet()
    assert seen.add("a dog") and not seen.add("a dog")
    """

    def __init__(self) -> None:
        self.count = 0
        self.table = array("Q", bytes(8 << 10))  # open addressing; 0 is an empty slot

    def add(self, *parts: str) -> bool:
        """Add a text of these parts; return True if it was not there yet."""
        slot, key = self._find(parts)
        if self.table[slot]:
            return False
        self.table[slot] = key
        self.count += 1
        if self.count * 3 > len(self.table) * 2:
            self._grow()
        return True

    def holds(self, *parts: str) -> bool:
        """Return whether a text of these parts was added."""
        return bool(self.table[self._find(parts)[0]])

    def _find(self, parts: tuple[str, ...]) -> tuple[int, int]:
        """Return the slot of a text, which is empty if the text was not added, and the text's hash."""
        text = b"\xff".join([part.encode() for part in parts])  # no byte of UTF-8: ("ab", "c") is not ("a", "bc")
        key = hash_stably(text) or 1
        table, mask = self.table, len(self.table) - 1
        slot = key & mask
        while (held := table[slot]) and held != key:
            slot = (slot + 1) & mask
        return slot, key

    def _grow(self) -> None:
        old, self.table = self.table, array("Q", bytes(16 * len(self.table)))
        table, mask = self.table, len(self.table) - 1
        for key in filter(None, old):
            slot = key & mask
            while table[slot]:
                slot = (slot + 1) & mask
            table[slot] = key


UNKNOWN_EXAMPLES = 5  # unknown words that are named
# A run of letters; in scripts without spaces between words, each character.
COUNTED_WORD = re.compile(r"[\u2e80-\ua4cf\uac00-\ud7af]|[^\W\u2e80-\ua4cf\uac00-\ud7af]+")


@dataclass(frozen=True, slots=True)
class UnknownWords:
    """Words of one side of a corpus that the same side of the other corpus does not have."""

    words: int  # all that were counted
    unknown: int
    examples: list[str]  # most frequent first

    @property
    def share(self) -> float:
        return self.unknown / self.words if self.words else 0.0


@dataclass(frozen=True, slots=True)
class Overlap:
    """What `dragoman data stats --against` adds."""

    name: str  # of the other corpus
    other_pairs: int
    shared_sources: int  # pairs whose source is one of the other corpus, to the letter
    shared_pairs: int  # those whose target is the same too
    source: UnknownWords
    target: UnknownWords


class OverlapCounter:
    """Remember a corpus, then count what another shares with it.

    counter = OverlapCounter(train_pairs, "train.tsv")
    found = compute_statistics(counter.watch(test_pairs))
    print(counter.result().shared_sources)
    """

    def __init__(self, pairs: Iterable[Pair], name: str) -> None:
        self.name, self.other_pairs, self.sources, self.pairs = name, 0, TextSet(), TextSet()
        self.vocabularies: tuple[set[str], set[str]] = (set(), set())
        for pair in pairs:
            self.other_pairs += 1
            self.sources.add(pair.source or pair.target)  # plain text has targets alone
            self.pairs.add(pair.source, pair.target)
            for vocabulary, text in zip(self.vocabularies, (pair.source, pair.target)):
                vocabulary.update(COUNTED_WORD.findall(text))
        self.shared_sources = self.shared_pairs = 0
        self.words = [0, 0]
        self.unknown: tuple[Counter[str], Counter[str]] = (Counter(), Counter())

    def watch(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Yield the same pairs, and count them."""
        for pair in pairs:
            self.shared_sources += self.sources.holds(pair.source or pair.target)
            self.shared_pairs += self.pairs.holds(pair.source, pair.target)
            for side, text in enumerate((pair.source, pair.target)):
                words = COUNTED_WORD.findall(text)
                self.words[side] += len(words)
                self.unknown[side].update(word for word in words if word not in self.vocabularies[side])
            yield pair

    def result(self) -> Overlap:
        sides = [
            UnknownWords(words, unknown.total(), [word for word, _ in unknown.most_common(UNKNOWN_EXAMPLES)])
            for words, unknown in zip(self.words, self.unknown)
        ]
        return Overlap(self.name, self.other_pairs, self.shared_sources, self.shared_pairs, *sides)


class CleanSettings(Settings):
    """Which pairs to drop. 0, "" and False turn a reason off; pairs with an empty side are always dropped.

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


class PairFilter:
    """Tests whether a pair is worth keeping. It remembers the pairs before, to find duplicates."""

    def __init__(self, settings: CleanSettings) -> None:
        self.settings, self.seen = settings, TextSet()
        codes = {"source": settings.source_language, "target": settings.target_language}
        self.codes = {side: code for side, code in codes.items() if code}
        self.languages = LanguageGuesser() if self.codes else None
        for side, code in self.codes.items():
            known = self.languages.codes if self.languages else frozenset()
            if code not in known:
                raise UserError(
                    f"{side}_language {code!r} is not a language that py3langid knows{suggest_name(code, known)}"
                )

    def find_reason(self, pair: Pair) -> str:
        """Return the first reason to drop a pair, or "kept"."""
        limits, sides = self.settings, (pair.source, pair.target)
        if not all(side.strip() for side in sides):
            return "empty"
        if limits.drop_equal and pair.source.strip() == pair.target.strip():
            return "equal"
        if limits.min_words and any(len(side.split()) < limits.min_words for side in sides):
            return "short"
        words, characters = limits.max_words or math.inf, limits.max_characters or math.inf
        # Words and the spaces between them: a text of n words has at least 2n - 1 characters.
        if any(len(side) > characters or (2 * words < len(side) and len(side.split()) > words) for side in sides):
            return "long"
        least, most = sorted(len(side.encode()) for side in sides)
        if limits.max_ratio and most > limits.max_ratio * least:
            return "ratio"
        if limits.drop_duplicates and not self.seen.add(*sides):
            return "duplicate"
        if self.languages and any(
            self.languages.foreign(getattr(pair, side), code) for side, code in self.codes.items()
        ):
            return "language"
        return "kept"


def clean_pairs(pairs: Iterable[Pair], settings: CleanSettings, counts: Counter[str]) -> Iterator[Pair]:
    """Return the pairs worth keeping; count in `counts` how many were kept, and dropped for which reason.

    counts = Counter()
    kept = list(clean_pairs([Pair("a dog", "ein Hund"), Pair("a dog", "")], CleanSettings(), counts))
    assert counts == {"kept": 1, "empty": 1}
    """
    chosen = PairFilter(settings)

    def keep(pair: Pair) -> bool:
        reason = chosen.find_reason(pair)
        counts[reason] += 1
        return reason == "kept"

    return filter(keep, pairs)
