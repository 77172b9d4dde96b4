"""Perplexity: KenLM and our own scorer agree for every token, and sums are those of the definition."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dragoman.errors import UserError
from dragoman.smt.decoder import NgramScorer
from dragoman.smt.ngram import SPECIAL, read_arpa, train_ngrams, write_arpa
from dragoman.smt.perplexity import SentenceScore, measure_perplexity, open_ngrams
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
        known = set(reference.words) - set(SPECIAL)
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


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        open_ngrams(tmp_path / "model.arpa")
    (tmp_path / "model.arpa").write_text("something else")
    with pytest.raises(UserError, match="no ARPA file"):
        open_ngrams(tmp_path / "model.arpa")
