"""The overlap of two corpora: pairs and words that one shares with the other, and how well one predicts the other.

`dragoman data stats --against` shows it. Samples of both corpora are compared by the perplexity of an n-gram model
(smt/perplexity.py), which the caller passes as a function, since this package does not import that one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from dragoman.data.cleaning import TextSet
from dragoman.types import Pair

UNKNOWN_EXAMPLES = 5  # number of unknown words that are shown as examples
TRAINING_SAMPLE = 50_000  # pairs of the other corpus, sampled at random, that an n-gram model is trained on
TEXT_SAMPLE = 5_000  # pairs of the corpus, sampled at random, whose perplexity is measured
# A word is a run of letters and digits; in scripts without spaces between words, each character is a word.
COUNTED_WORD = re.compile(r"[\u2e80-\ua4cf\uac00-\ud7af]|[^\W\u2e80-\ua4cf\uac00-\ud7af]+")


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


@dataclass(frozen=True, slots=True)
class DomainShift:
    """How much worse an n-gram model of a training text predicts another text than unseen lines of the training text.

    A ratio of about 1 means that both texts are of the same domain.
    """

    perplexity: float  # of the other text
    held_out_perplexity: float  # of lines of the training text that the model was not trained on
    ratio: float


# From words of the lines of a training text and of another text to the ratio of their perplexities; None if there are
# too few lines.
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
