"""What a corpus shares with another, such as a test set with the training data: sources, pairs and words.

A test on sources that training has seen says little about new text, and words that training has not seen are hard.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dragoman.text.seen import Seen
from dragoman.types import Pair

EXAMPLES = 5  # unknown words that are named
# Between marks and spaces; where a script writes none between words, each sign counts.
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
    found = stats(counter.watch(test_pairs))
    print(counter.result().shared_sources)
    """

    def __init__(self, pairs: Iterable[Pair], name: str) -> None:
        self.name, self.other_pairs, self.sources, self.pairs = name, 0, Seen(), Seen()
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
            UnknownWords(words, unknown.total(), [word for word, _ in unknown.most_common(EXAMPLES)])
            for words, unknown in zip(self.words, self.unknown)
        ]
        return Overlap(self.name, self.other_pairs, self.shared_sources, self.shared_pairs, *sides)
