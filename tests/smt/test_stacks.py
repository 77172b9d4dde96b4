"""Listed stacks are those of the search: they end in its best derivations, and no stack is larger than its limits."""

from __future__ import annotations

import numpy as np
import pytest

from dragoman.smt.alignment import train_aligner
from dragoman.smt.decoder import NgramScorer, PhraseDecoder
from dragoman.smt.ngram import train_ngrams
from dragoman.smt.phrases import build_table
from dragoman.smt.settings import DecoderSettings, SmtSettings
from dragoman.smt.stacks import PartialTranslation, list_stacks
from toy_pairs import SOURCE, TARGET

SENTENCES = ["der hund läuft", "im haus schläft eine", "der zzz läuft", ""]
LIMITS = [
    DecoderSettings(stack=10**6, beam=1e9, distortion_limit=-1),
    DecoderSettings(stack=3),
    DecoderSettings(beam=0.5),
]


@pytest.fixture(scope="module")
def decoder() -> PhraseDecoder:
    aligner = train_aligner(SOURCE, TARGET)
    links = list(aligner.align(SOURCE, TARGET))
    flat = np.array([link for pair in links for link in pair])
    starts = np.concatenate([[0], np.cumsum([len(pair) for pair in links])])
    sides = aligner.encode(SOURCE, 0), aligner.encode(TARGET, 1)
    sizes = len(aligner.words[0]), len(aligner.words[1])
    table = build_table(*sides, sizes, (starts, flat[:, 0], flat[:, 1]), longest=3)
    lm, weights = NgramScorer(train_ngrams(TARGET, 3)), np.array(SmtSettings().initial_weights())
    return PhraseDecoder(aligner.words[0], list(aligner.words[1]), table, lm, weights, LIMITS[0])


@pytest.mark.parametrize("limits", LIMITS, ids=["unlimited", "small stacks", "narrow beam"])
@pytest.mark.parametrize("sentence", SENTENCES)
def test_stacks_lead_to_the_best_derivation(decoder: PhraseDecoder, sentence: str, limits: DecoderSettings) -> None:
    decoder.settings, words = limits, sentence.split()
    stacks = list_stacks(decoder, words)
    best = decoder.decode(words)[0]
    assert len(stacks) == len(words) + 1
    assert stacks[-1].kept[0].words == best.words
    assert stacks[-1].kept[0].score == pytest.approx(best.score)
    assert stacks[-1].kept[0].future == pytest.approx(0.0)
    for size, stack in enumerate(stacks):
        totals = [hypothesis.total for hypothesis in stack.kept]
        assert totals == sorted(totals, reverse=True)
        assert len(totals) <= limits.stack
        assert all(total >= totals[0] - limits.beam for total in totals)
        assert all(hypothesis.coverage(len(words)).count("x") == size for hypothesis in stack.kept)


def name_phrases(hypothesis: PartialTranslation) -> tuple[tuple[int, int, str], ...]:
    return tuple((phrase.start, phrase.end, " ".join(phrase.words)) for phrase in hypothesis.phrases)


@pytest.mark.parametrize("limits", LIMITS, ids=["unlimited", "small stacks", "narrow beam"])
def test_only_kept_hypotheses_are_extended(decoder: PhraseDecoder, limits: DecoderSettings) -> None:
    decoder.settings, words = limits, ["die", "kleine", "katze", "läuft"]
    stacks = list_stacks(decoder, words)
    kept = {name_phrases(hypothesis) for stack in stacks for hypothesis in stack.kept}
    assert all(name_phrases(hypothesis)[:-1] in kept for stack in stacks[1:] for hypothesis in stack.kept)
    pruned = sum(stack.pruned for stack in stacks)
    assert pruned == 0 if limits is LIMITS[0] else pruned > 0 or limits is LIMITS[2]  # a beam prunes before storing
