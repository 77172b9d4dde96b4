"""Perplexity: KenLM and our own scorer agree for every token, and sums are those of the definition."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dragoman.errors import UserError
from dragoman.phrasebook.generate import generate_phrases
from dragoman.smt.decoder import NgramScorer
from dragoman.smt.ngram import SPECIAL_WORDS, read_arpa, train_ngrams, write_arpa
from dragoman.smt.perplexity import MIN_SHIFT_LINES, SentenceScore, measure_perplexity, measure_shift, open_ngrams
from toy_pairs import TARGET

LINES = [*TARGET, "", "the zzz dog", "yyy", "the </s> dog <s> <unk>", "the dog\u3000runs"]


@pytest.fixture(params=[1, 2, 4])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with (tmp_path / "model.arpa").open("w", encoding="utf-8") as file:
        write_arpa(train_ngrams(TARGET, request.param), file)
    return tmp_path / "model.arpa"


def test_kenlm_agrees_with_our_scorer(path: Path) -> None:
    model, reference = open_ngrams(path), NgramScorer(read_arpa(path))
    for line in LINES:
        words = line.split(" ") if line else []
        expected = list(reference.score_sentence(words))
        found = model.score(words)
        assert found.log_probs == pytest.approx([log_prob for log_prob, _ in expected], abs=1e-5)
        assert found.unknown == [unknown for _, unknown in expected]
        known = set(reference.words) - set(SPECIAL_WORDS)
        assert found.unknown == [*(word not in known for word in words), False]


def test_probabilities_of_words_sum_to_one(path: Path) -> None:
    """Over all words, an unknown one and the end of the sentence."""
    model = open_ngrams(path)
    words = [*{word for line in TARGET for word in line.split()}, "zzz"]
    total = sum(math.exp(model.score(["the", word]).log_probs[1]) for word in words)
    assert total + math.exp(model.score(["the"]).log_probs[1]) == pytest.approx(1.0, abs=1e-5)


def test_perplexity_by_hand() -> None:
    half, tenth = math.log(0.5), math.log(0.1)
    scores = [SentenceScore([half, tenth, half], [False, True, False]), SentenceScore([half], [False])]
    measured = measure_perplexity(scores)
    assert (measured.sentences, measured.tokens, measured.unknown_words) == (2, 4, 1)
    assert measured.log_prob == pytest.approx(3 * half + tenth)
    assert measured.perplexity == pytest.approx((8 * 10) ** 0.25)
    assert measured.known_perplexity == pytest.approx(2.0)
    assert measure_perplexity([]).perplexity == 1.0


def test_a_text_of_the_same_distribution_has_about_the_perplexity_of_held_out_text() -> None:
    """Another domain has a higher one: other combinations of words, other word order, another language."""
    train, test, unseen = (
        [[word.lower() for word in phrase.source_words] for phrase in generate_phrases(split, count)]
        for split, count in (("train", 4000), ("test", 500), ("unseen", 500))
    )
    backwards = [line[::-1] for line in test]
    german = [list(phrase.target_words) for phrase in generate_phrases("test", 500)]
    ratios = []
    for text in (test, unseen, backwards, german):
        shift = measure_shift(train, text)
        assert shift is not None
        ratios.append(shift.ratio)
    assert ratios[0] == pytest.approx(1.0, abs=0.1)
    assert ratios[0] + 0.15 < ratios[1] < ratios[2] < ratios[3]
    assert ratios[2] > 3


def test_repeated_lines_do_not_hide_a_shift() -> None:
    """A line that occurs twice is never both held out and trained on."""
    lines = [list(phrase.source_words) for phrase in generate_phrases("train", 1000)]
    assert measure_shift(lines * 2, lines) == measure_shift(lines, lines)


def test_too_few_lines_have_no_shift() -> None:
    lines = [[str(number), "a"] for number in range(MIN_SHIFT_LINES)]
    assert measure_shift(lines, lines) is not None
    assert measure_shift(lines[1:], lines) is None
    assert measure_shift([*lines[1:], lines[1]], lines) is None
    assert measure_shift(lines, [[], []]) is None


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        open_ngrams(tmp_path / "model.arpa")
    (tmp_path / "model.arpa").write_text("something else")
    with pytest.raises(UserError, match="no ARPA file"):
        open_ngrams(tmp_path / "model.arpa")
