"""N-gram models: probabilities sum to one, KenLM reads them and agrees, bad files are refused."""

from __future__ import annotations

import math
from pathlib import Path

import kenlm
import numpy as np
import pytest

from dragoman.errors import UserError
from dragoman.smt.decoder import NgramScorer
from dragoman.smt.decoder_kernels import score_word
from dragoman.smt.ngram import BEGIN, UNKNOWN, NgramModel, read_arpa, train_ngrams, write_arpa

WORDS = ["the", "a", "dog", "cat", "house", "small", "big", "runs", "sleeps", "in", "on", "and"]
RNG = np.random.default_rng(0)
TEXT = [" ".join(RNG.choice(WORDS, RNG.integers(1, 12), p=np.arange(12, 0, -1) / 78)) for _ in range(300)]
CASES = [(1, ()), (2, ()), (3, ()), (5, ()), (3, (0, 0, 1)), (5, (0, 1))]


def save(model: NgramModel, path: Path) -> Path:
    with path.open("w", encoding="utf-8") as file:
        write_arpa(model, file)
    return path


@pytest.fixture(scope="module", params=CASES, ids=str)
def model(request: pytest.FixtureRequest) -> NgramModel:
    order, prune = request.param
    return train_ngrams(TEXT, order, prune=prune)


def test_probabilities_sum_to_one(model: NgramModel) -> None:
    """After any words, seen or not."""
    lm = NgramScorer(model)
    for context in ([], ["the"], ["the", "dog"], ["zzz", "dog"], ["cat", "house", "on", "the"]):
        state = lm.trie.begin
        for word in context:
            _, state = score_word(lm.trie, state, lm.ids.get(word, UNKNOWN))
        outcomes = [index for index in range(len(lm.words)) if index != BEGIN]
        total = sum(math.exp(score_word(lm.trie, state, index)[0]) for index in outcomes)
        assert total == pytest.approx(1.0, abs=1e-6)


def test_kenlm_agrees(model: NgramModel, tmp_path: Path) -> None:
    if len(model.orders) == 1:
        pytest.skip("KenLM needs two orders at least")
    reader = kenlm.Model(str(save(model, tmp_path / "model.arpa")))
    lm = NgramScorer(model)
    for line in [*TEXT[:50], "zzz the dog", "", "the the the the the the"]:
        assert lm.score(line.split()) / math.log(10) == pytest.approx(reader.score(line), abs=1e-5)


def test_written_is_read(model: NgramModel, tmp_path: Path) -> None:
    again = NgramScorer(read_arpa(save(model, tmp_path / "model.arpa")))
    lm = NgramScorer(model)
    assert all(again.score(line.split()) == pytest.approx(lm.score(line.split()), abs=1e-4) for line in TEXT[:20])


def test_unigrams_by_hand() -> None:
    """Continuation counts of the bigrams' suffixes: a follows <s> and b, b follows a, </s> follows both."""
    model = train_ngrams(["a b a", "a b"], 2)
    unigrams = dict(zip(model.words, 10 ** model.orders[0].log_prob, strict=True))
    discount = [0.5, 1.0, 1.5]  # the counts of counts are too few to estimate others
    mass = (2 * discount[1] + discount[0]) / 5
    assert unigrams["b"] == pytest.approx((1 - discount[0]) / 5 + mass / 4)
    assert unigrams["a"] == pytest.approx((2 - discount[1]) / 5 + mass / 4)


def test_pruning_drops_rare_ngrams_and_no_prefixes() -> None:
    whole, pruned = train_ngrams(TEXT, 4), train_ngrams(TEXT, 4, prune=(0, 1, 2))
    assert len(pruned.orders[0].word) == len(whole.orders[0].word)
    for n in range(1, 4):
        assert 0 < len(pruned.orders[n].word) < len(whole.orders[n].word)
        assert pruned.orders[n].prefix.max() < len(pruned.orders[n - 1].word)


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = save(train_ngrams(TEXT, 3), tmp_path / "model.arpa")
    whole = path.read_bytes()
    for share in (0.3, 0.9, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(UserError, match=r"model\.arpa"):
            read_arpa(path)
    with pytest.raises(UserError, match="at least one line"):
        train_ngrams([], 3)
