"""Cleaning of sentence pairs, and its tools: language identification, a compact set of texts, overlap of corpora.

`clean_pairs` drops pairs by the rules in CleanSettings and counts them by reason. LanguageGuesser, TextSet,
PairSample and OverlapCounter are also used for the statistics of a corpus (statistics.py).
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
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


class PairSample:
    """A uniform random sample of the pairs that are added, at most `size` of them (reservoir sampling)."""

    def __init__(self, size: int) -> None:
        self.size, self.added, self.pairs = size, 0, list[Pair]()
        self.random = Random(1)

    def add(self, pair: Pair) -> None:
        self.added += 1
        if self.added <= self.size:
            self.pairs.append(pair)
        elif (index := self.random.randrange(self.added)) < self.size:
            self.pairs[index] = pair


UNKNOWN_EXAMPLES = 5  # number of unknown words that are shown as examples
TRAINING_SAMPLE = 50_000  # pairs of the other corpus, sampled at random, that an n-gram model is trained on
TEXT_SAMPLE = 5_000  # pairs of the corpus, sampled at random, whose perplexity is measured
# A word is a run of letters and digits; in scripts without spaces between words, each character is a word.
COUNTED_WORD = re.compile(r"[\u2e80-\ua4cf\uac00-\ud7af]|[^\W\u2e80-\ua4cf\uac00-\ud7af]+")


@dataclass(frozen=True, slots=True)
class DomainShift:
    """How much worse an n-gram model of a training text predicts another text than unseen lines of the training text.

    A ratio of about 1 means that both texts are of the same domain.
    """

    perplexity: float  # of the other text
    held_out_perplexity: float  # of lines of the training text that the model was not trained on
    ratio: float


# From words of the lines of a training text and of another text to their distance; None if there are too few lines.
MeasureShift = Callable[[Sequence[list[str]], Sequence[list[str]]], DomainShift | None]


@dataclass(frozen=True, slots=True)
class UnknownWords:
    """The words on one side of a corpus, and those that are unknown: not on the same side of another corpus."""

    words: int  # number of all words; a repeated word counts every time
    unknown: int  # number of unknown words, counted likewise
    types: int  # number of different words
    unknown_types: int
    examples: list[str]  # the most frequent unknown words
    shift: DomainShift | None = None


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a corpus has in common with another corpus, as `dragoman data stats --against` shows it."""

    name: str  # of the other corpus
    other_pairs: int
    shared_sources: int  # pairs whose source is also a source of the other corpus
    shared_pairs: int
    source: UnknownWords
    target: UnknownWords


class OverlapCounter:
    """Counts which pairs and words of a corpus occur in another corpus, which is given first.

    counter = OverlapCounter(train_pairs, "train.tsv")
    print(compute_statistics(test_pairs, against=counter).against.shared_sources)

    With `measure_shift`, samples of both corpora are kept to compare their words.
    """

    def __init__(self, other: Iterable[Pair], name: str, measure_shift: MeasureShift | None = None) -> None:
        self.name, self.other_pairs, self.sources, self.pairs = name, 0, TextSet(), TextSet()
        self.measure_shift = measure_shift
        self.other_sample, self.sample = PairSample(TRAINING_SAMPLE), PairSample(TEXT_SAMPLE)
        self.vocabularies: tuple[set[str], set[str]] = (set(), set())
        for pair in other:
            self.other_pairs += 1
            self.sources.add(pair.source or pair.target)  # plain text has only targets
            self.pairs.add(pair.source, pair.target)
            if measure_shift:
                self.other_sample.add(pair)
            for vocabulary, text in zip(self.vocabularies, (pair.source, pair.target)):
                vocabulary.update(COUNTED_WORD.findall(text))
        self.shared_sources = self.shared_pairs = 0
        self.words: tuple[Counter[str], Counter[str]] = (Counter(), Counter())  # of each side of the counted pairs

    def count(self, pair: Pair) -> None:
        self.shared_sources += (pair.source or pair.target,) in self.sources
        self.shared_pairs += (pair.source, pair.target) in self.pairs
        if self.measure_shift:
            self.sample.add(pair)
        for words, text in zip(self.words, (pair.source, pair.target)):
            words.update(COUNTED_WORD.findall(text))

    def compute_overlap(self) -> Overlap:
        sides = []
        for side, (words, vocabulary) in enumerate(zip(self.words, self.vocabularies)):
            unknown = Counter({word: count for word, count in words.items() if word not in vocabulary})
            examples = [word for word, _ in unknown.most_common(UNKNOWN_EXAMPLES)]
            shift = None
            if self.measure_shift:
                texts = [[(p.source, p.target)[side] for p in s.pairs] for s in (self.other_sample, self.sample)]
                shift = self.measure_shift(*([COUNTED_WORD.findall(line) for line in lines] for lines in texts))
            sides.append(UnknownWords(words.total(), unknown.total(), len(words), len(unknown), examples, shift))
        return Overlap(self.name, self.other_pairs, self.shared_sources, self.shared_pairs, *sides)


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
