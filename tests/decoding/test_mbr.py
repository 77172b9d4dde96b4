"""Likeness between all pairs at once is what sacreBLEU counts pair by pair; the answer most like the others wins."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from dragoman.decoding.methods import MBR_METRICS, rank_by_agreement
from dragoman.decoding.protocol import SearchResult
from dragoman.errors import UserError

TRUTH = {"chrf": CHRF(), "bleu": BLEU(effective_order=True)}
TEXTS = st.lists(st.text(st.sampled_from("ab cä.,1'  "), max_size=25), min_size=1, max_size=6)


@pytest.mark.parametrize("name", MBR_METRICS)
@settings(max_examples=40)
@given(texts=TEXTS)
def test_likeness_is_the_metric(name: str, texts: list[str]) -> None:
    likeness_HH = MBR_METRICS[name](texts)
    for answer, row in zip(texts, likeness_HH.tolist(), strict=True):
        for reference, value in zip(texts, row, strict=True):
            assert 100 * value == pytest.approx(TRUTH[name].sentence_score(answer, [reference]).score, abs=1e-9)


def found(*logps: float) -> list[SearchResult]:
    return [SearchResult([4 + i], logp, logp, True) for i, logp in enumerate(logps)]


@pytest.mark.parametrize("name", MBR_METRICS)
def test_the_odd_one_out_loses_even_if_it_is_the_likeliest(name: str) -> None:
    texts = ["a cat sat on a mat", "the cat sat on the mat", "the cat sat on a mat", "something else entirely"]
    ranked = rank_by_agreement(found(-5.0, -4.0, -6.0, -1.0), texts, [1.0] * 4, name)
    assert ranked[0].tokens == [6]
    assert ranked[-1].tokens == [7]
    assert [one.score for one in ranked] == sorted((one.score for one in ranked), reverse=True)
    assert ranked[0].logp == -6.0


@given(texts=TEXTS)
def test_equal_texts_are_one_answer_and_count_as_often_as_they_came(texts: list[str]) -> None:
    ranked = rank_by_agreement(found(*[-1.0] * len(texts)), texts, [1.0] * len(texts), "chrf")
    assert len(ranked) == len(set(texts))
    double = rank_by_agreement(found(*[-1.0] * 2 * len(texts)), texts * 2, [1.0] * 2 * len(texts), "chrf")
    assert [one.tokens for one in double] == [one.tokens for one in ranked]


def test_weights_count() -> None:
    texts = ["aaaa", "aaab", "zzzz"]
    assert rank_by_agreement(found(-1.0, -1.0, -1.0), texts, [1.0, 1.0, 1.0], "chrf")[0].tokens == [4]
    assert rank_by_agreement(found(-1.0, -1.0, -1.0), texts, [0.1, 0.1, 1.0], "chrf")[0].tokens == [6]


def test_nothing_in_nothing_out_and_no_such_metric() -> None:
    assert rank_by_agreement([], [], [], "chrf") == []
    with pytest.raises(UserError, match="did you mean 'chrf'"):
        rank_by_agreement(found(-1.0), ["a"], [1.0], "chr")
