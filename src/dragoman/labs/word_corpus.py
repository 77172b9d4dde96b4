"""The phrasebook as ids of words, for translation models and language models without a tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from dragoman.labs.small_models import FIRST_ID, make_batch
from dragoman.phrasebook.generate import generate_pairs, split_words
from dragoman.types import Batch

TEST_PAIRS = 100
WordIds = list[int]


class WordCorpus(NamedTuple):
    """Sentence pairs of the phrasebook as ids of words. Both languages have one vocabulary."""

    id_of: dict[str, int]
    train: list[tuple[WordIds, WordIds]]
    test: list[tuple[WordIds, WordIds]]  # only pairs whose words all occur in training

    @property
    def vocabulary(self) -> int:
        return FIRST_ID + len(self.id_of)

    def sample_batch(self, seed: int, step: int, *, pairs: int, language_model: bool = False) -> Batch:
        """Return the batch of a training step."""
        chosen = np.random.default_rng((seed, step)).integers(len(self.train), size=pairs)
        return self.make_batch([self.train[index] for index in chosen], language_model=language_model)

    @staticmethod
    def make_batch(pairs: Sequence[tuple[WordIds, WordIds]], *, language_model: bool = False) -> Batch:
        """Return a batch for translation, or one for a language model of the sources."""
        sources, targets = zip(*pairs, strict=True)
        if language_model:
            return make_batch([[]] * len(pairs), sources, example_format="lines")
        return make_batch(sources, targets)


@cache
def load_words(pairs: int) -> WordCorpus:
    """Return a corpus with this number of training pairs."""
    train, test = (
        [(split_words(pair.source), split_words(pair.target)) for pair in generate_pairs(split, count)]
        for split, count in (("train", pairs), ("test", 4 * TEST_PAIRS))
    )
    words = Counter(word for pair in train for side in pair for word in side)
    id_of = {word: FIRST_ID + index for index, word in enumerate(sorted(words))}
    known = [pair for pair in test if all(word in words for side in pair for word in side)][:TEST_PAIRS]
    encoded = [
        [([id_of[word] for word in source], [id_of[word] for word in target]) for source, target in some]
        for some in (train, known)
    ]
    return WordCorpus(id_of, *encoded)
