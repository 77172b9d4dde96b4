"""Stack decoding finds what an exhaustive search finds; scores are sums of features; n-best lists are exact."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from dragoman.smt import decoder_kernels as kernels
from dragoman.smt.alignment import train_aligner
from dragoman.smt.decoder import DISTORTION, LM, REORDERING, NgramScorer, PhraseDecoder
from dragoman.smt.decoder_kernels import Options
from dragoman.smt.ngram import END, train_ngrams
from dragoman.smt.phrases import build_table
from dragoman.smt.settings import FEATURE_NAMES, DecoderSettings, SmtSettings
from toy_pairs import SOURCE, TARGET

DEFAULT_WEIGHTS, NOISY_CHANNEL = (
    np.array(SmtSettings(preset=preset).initial_weights()) for preset in ("log-linear", "noisy-channel")
)
UNLIMITED = DecoderSettings(stack=10**6, beam=1e9, distortion_limit=-1, options=30)
SENTENCES = ["der hund läuft", "im haus schläft eine", "die kleine katze läuft"]


@pytest.fixture(scope="module")
def decoder() -> PhraseDecoder:
    aligner = train_aligner(SOURCE, TARGET)
    links = list(aligner.align(SOURCE, TARGET))
    flat = np.array([link for some in links for link in some])
    starts = np.concatenate([[0], np.cumsum([len(some) for some in links])])
    sides = aligner.encode(SOURCE, 0), aligner.encode(TARGET, 1)
    sizes = len(aligner.words[0]), len(aligner.words[1])
    table = build_table(*sides, sizes, (starts, flat[:, 0], flat[:, 1]), longest=3)
    lm = NgramScorer(train_ngrams(TARGET, 3))
    return PhraseDecoder(aligner.words[0], list(aligner.words[1]), table, lm, DEFAULT_WEIGHTS, UNLIMITED)


def enumerate_scores(decoder: PhraseDecoder, words: list[str]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield the score of every derivation there is, with its options."""
    options, weights, lm = decoder.collect_options(words), decoder.weights, decoder.lm.trie
    spans = [(start, end) for start in range(len(words)) for end in range(start + 1, start + decoder.max_phrase + 1)]
    sizes = [
        options.span_starts[start, end - start + 1] - options.span_starts[start, end - start] for start, end in spans
    ]
    span_of = [span for span, size in zip(spans, sizes, strict=True) for _ in range(size)]

    def extend(covered: frozenset[int], path: tuple[int, ...]) -> Iterator[tuple[float, tuple[int, ...]]]:
        if len(covered) == len(words):
            yield score(options, path), path
        for option, (start, end) in enumerate(span_of):
            span = frozenset(range(start, end))
            if not span & covered:
                yield from extend(covered | span, (*path, option))

    def score(options: Options, path: tuple[int, ...]) -> float:
        total, state, last, before = 0.0, lm.begin, (0, 0), -1
        for option in path:
            start, end = span_of[option]
            turn = kernels.find_orientation(*last, start, end)
            total += options.static[option] + options.reorder[option, turn] - weights[DISTORTION] * abs(start - last[1])
            total += options.reorder[before, 3 + turn] if before >= 0 else 0.0
            for word in options.lm_words[options.word_starts[option] : options.word_starts[option + 1]]:
                logp, state = kernels.score_word(lm, state, word)
                total += weights[LM] * logp
            last, before = (start, end), option
        return float(total + weights[LM] * kernels.score_word(lm, state, END)[0])

    yield from extend(frozenset(), ())


def without(names: slice | int) -> np.ndarray:
    weights = DEFAULT_WEIGHTS.copy()
    weights[names] = 0.0
    return weights


@pytest.mark.parametrize("sentence", SENTENCES)
@pytest.mark.parametrize(
    "weights",
    [DEFAULT_WEIGHTS, NOISY_CHANNEL, without(REORDERING), without(LM)],
    ids=["all", "noisy channel", "no reordering", "no lm"],
)
def test_unlimited_stacks_find_the_best_of_all(decoder: PhraseDecoder, sentence: str, weights: np.ndarray) -> None:
    decoder.set_weights(weights)
    words = sentence.split()
    expected = sorted((score for score, _ in enumerate_scores(decoder, words)), reverse=True)
    found = [derivation.score for derivation in decoder.decode(words, 50)]
    np.testing.assert_allclose(found, expected[: len(found)], rtol=1e-6)
    assert len(found) == min(50, len(expected))


@pytest.mark.parametrize("sentence", SENTENCES)
def test_future_cost_is_the_best_completion(decoder: PhraseDecoder, sentence: str) -> None:
    """Without language model, jumps and orientation, the estimate before any word is covered is the best score."""
    weights = without(REORDERING)
    weights[[LM, DISTORTION]] = 0.0
    decoder.set_weights(weights)
    words = sentence.split()
    options = decoder.collect_options(words)
    future = kernels.estimate_future(len(words), options.span_starts, options.estimate, decoder.max_phrase)
    assert future[0, len(words)] == pytest.approx(decoder.decode(words)[0].score)


@pytest.mark.parametrize("sentence", [*SENTENCES, "der zzz läuft", "zzz yyy"])
@pytest.mark.parametrize("weights", [DEFAULT_WEIGHTS, without(REORDERING)], ids=["all", "no reordering"])
def test_forced_decoding_finds_the_best_of_all(decoder: PhraseDecoder, sentence: str, weights: np.ndarray) -> None:
    """For every translation that can be produced, its best derivation; for others none."""
    decoder.set_weights(weights)
    words = sentence.split()
    expected: dict[tuple[str, ...], float] = {}
    options = decoder.collect_options(words)
    texts = [decoder.read_phrase(words, max(-1 - row, 0), 0, row).words for row in options.rows.tolist()]
    for score, path in enumerate_scores(decoder, words):
        text = tuple(word for option in path for word in texts[option])
        expected[text] = max(score, expected.get(text, -np.inf))
    for text, score in list(expected.items())[:300]:
        forced = decoder.force(words, text)
        assert forced is not None
        assert forced.score == pytest.approx(score)
        assert tuple(forced.words) == text
        assert forced.features @ weights == pytest.approx(forced.score)
    [best] = decoder.decode(words)
    for other in (["nonsense"], [*best.words, "nonsense"], best.words[:-1], [*best.words, *best.words], []):
        assert (decoder.force(words, other) is not None) == (tuple(other) in expected)


def test_forced_decoding_of_nothing(decoder: PhraseDecoder) -> None:
    [nothing, *impossible] = decoder.force_all([([], []), ([], ["the"]), (["der"], [])])
    assert nothing is not None
    assert nothing.score == 0.0
    assert impossible == [None, None]


@pytest.mark.parametrize("limit", [0, 2])
def test_own_translations_are_forced_at_least_as_well(decoder: PhraseDecoder, limit: int) -> None:
    """Forced decoding searches exactly, within the distortion limit; the decoder prunes."""
    decoder.set_weights(DEFAULT_WEIGHTS)
    decoder.settings = DecoderSettings(stack=3, beam=0.5, distortion_limit=limit, options=2)
    for sentence in [*SOURCE, "zzz eine katze im haus läuft"]:
        [best] = decoder.decode(sentence.split())
        forced = decoder.force(sentence.split(), best.words)
        assert forced is not None
        assert forced.score >= best.score - 1e-9
        last = 0
        for phrase in forced.phrases:
            assert abs(phrase.start - last) <= limit
            last = phrase.end
    decoder.settings = UNLIMITED


def test_scores_are_sums_of_features(decoder: PhraseDecoder) -> None:
    decoder.set_weights(DEFAULT_WEIGHTS)
    for derivation in decoder.decode(["der", "kleine", "zzz", "läuft"], 10):
        assert derivation.score == pytest.approx(float(derivation.features @ DEFAULT_WEIGHTS))
        assert dict(zip(FEATURE_NAMES, derivation.features, strict=True))["words"] == len(derivation.words)


def test_unknown_words_are_copied_and_linked(decoder: PhraseDecoder) -> None:
    decoder.set_weights(DEFAULT_WEIGHTS)
    [best] = decoder.decode(["der", "zzz", "läuft"])
    position = best.words.index("zzz")
    assert (1, position) in best.links
    assert [derivation.words for derivation in decoder.decode([])] == [[]]


@pytest.mark.parametrize("limit", [0, 1, 2, 6])
def test_the_distortion_limit_holds(decoder: PhraseDecoder, limit: int) -> None:
    """No jump is longer, and every sentence still has a translation."""
    decoder.set_weights(DEFAULT_WEIGHTS)
    decoder.settings = UNLIMITED.model_copy(update={"distortion_limit": limit})
    words = ["eine", "kleine", "katze", "schläft", "im", "haus"]
    derivations = decoder.decode(words, 200)
    decoder.settings = UNLIMITED
    assert derivations
    for derivation in derivations:
        last = 0
        for phrase in derivation.phrases:
            assert abs(phrase.start - last) <= limit
            last = phrase.end
        assert sorted(i for phrase in derivation.phrases for i in range(phrase.start, phrase.end)) == [*range(6)]
