"""Query an n-gram model without a decoder: log-probabilities of tokens and sentences, and perplexity.

    model = open_ngrams(Path("model.arpa"))
    scores = [model.score(line.split()) for line in lines]
    print(measure_perplexity(scores).perplexity)

All logarithms are natural. The end of every sentence is a token that is predicted, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.data.overlap import DomainShift
from dragoman.errors import UserError
from dragoman.smt.decoder import NgramScorer
from dragoman.smt.ngram import END, SPECIAL_WORDS, UNKNOWN, read_arpa, train_ngrams

SHIFT_ORDER = 3  # of the n-gram model that compares two texts
HELD_OUT_EVERY = 10  # one line in so many of the training text is held out from this model
MIN_SHIFT_LINES = 100  # fewer different lines of training text make perplexities meaningless


class SentenceScore(NamedTuple):
    """The scores of a sentence: an entry for each word, and one for the end of the sentence."""

    log_probs: list[float]
    unknown: list[bool]

    @property
    def log_prob(self) -> float:
        return sum(self.log_probs)


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text. Tokens are words and ends of sentences."""

    sentences: int
    tokens: int
    unknown_words: int
    log_prob: float
    unknown_log_prob: float  # of the unknown words, a part of `log_prob`

    @property
    def perplexity(self) -> float:
        return math.exp(-self.log_prob / max(self.tokens, 1))

    @property
    def known_perplexity(self) -> float:
        """Return the perplexity of the tokens that the model knows; unknown words still serve as contexts."""
        known = self.tokens - self.unknown_words
        return math.exp(-(self.log_prob - self.unknown_log_prob) / max(known, 1))


class NgramLanguageModel:
    """An n-gram model. `score_tokens` yields (log-probability, is unknown) of each word and of the end."""

    def __init__(self, order: int, score_tokens: Callable[[Sequence[str]], Iterable[tuple[float, bool]]]) -> None:
        self.order, self.score_tokens = order, score_tokens

    def score(self, words: Sequence[str]) -> SentenceScore:
        """Return the log-probabilities of the words and of the end of the sentence."""
        log_probs, unknown = zip(*self.score_tokens(words), strict=True)
        return SentenceScore(list(log_probs), list(unknown))


def open_ngrams(path: Path) -> NgramLanguageModel:
    """Open an ARPA file, or a binary file of KenLM, to be queried by KenLM.

    KenLM has no models of order 1 or above 6; those are queried by NgramScorer, which is slower.
    """
    try:
        import kenlm
    except ImportError:
        raise UserError("n-gram models need an extra: pip install 'dragoman[smt]'") from None
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r}")
    config = kenlm.Config()
    config.show_progress = False
    config.arpa_complain = kenlm.ARPALoadComplain.NONE
    try:
        model = kenlm.Model(str(path), config)
    except (OSError, RuntimeError, UnicodeDecodeError):  # the last: KenLM's message quotes bytes of the file
        ngrams = read_arpa(path)  # a damaged file is refused here, with its line
        return NgramLanguageModel(len(ngrams.orders), NgramScorer(ngrams).score_sentence)
    return NgramLanguageModel(model.order, lambda words: query_kenlm(model, words))


def query_kenlm(model: Any, words: Sequence[str]) -> Iterable[tuple[float, bool]]:
    import kenlm

    state, following = kenlm.State(), kenlm.State()
    model.BeginSentenceWrite(state)
    for word in [*(SPECIAL_WORDS[UNKNOWN] if word in SPECIAL_WORDS else word for word in words), SPECIAL_WORDS[END]]:
        result = model.BaseFullScore(state, word, following)
        yield result.log_prob * math.log(10), result.oov
        state, following = following, state


def measure_perplexity(scores: Iterable[SentenceScore]) -> Perplexity:
    sentences = tokens = unknown_words = 0
    log_prob = unknown_log_prob = 0.0
    for score in scores:
        unknown = [value for value, is_unknown in zip(*score, strict=True) if is_unknown]
        sentences, tokens, unknown_words = sentences + 1, tokens + len(score.log_probs), unknown_words + len(unknown)
        log_prob, unknown_log_prob = log_prob + score.log_prob, unknown_log_prob + sum(unknown)
    return Perplexity(sentences, tokens, unknown_words, log_prob, unknown_log_prob)


def measure_shift(training: Sequence[list[str]], text: Sequence[list[str]]) -> DomainShift | None:
    """Compare the perplexity of a text under a model of the training text with that of held-out training text.

    Lines are lists of words; each different line of the training text is used once, so that no held-out line is also
    in the part that the model is trained on. Unknown words count, with the small probability that smoothing leaves for
    them. Return None if there are too few lines.
    """
    distinct = list(dict.fromkeys(" ".join(words) for words in training if words))
    lines = [words for words in text if words]
    if len(distinct) < MIN_SHIFT_LINES or not lines:
        return None
    held_out = [line.split() for line in distinct[::HELD_OUT_EVERY]]
    del distinct[::HELD_OUT_EVERY]
    scorer = NgramScorer(train_ngrams(distinct, SHIFT_ORDER))
    model = NgramLanguageModel(SHIFT_ORDER, scorer.score_sentence)
    perplexity, baseline = (measure_perplexity(map(model.score, part)).perplexity for part in (lines, held_out))
    return DomainShift(perplexity, baseline, perplexity / baseline)
