"""Tests of MBR decoding: pairwise similarities equal those of sacreBLEU, and the most similar hypothesis wins."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from dragoman.decoding.methods import MBR_METRICS, rank_by_agreement
from dragoman.decoding.protocol import SearchResult
from dragoman.errors import UserError

SACREBLEU = {"chrf": CHRF(), "bleu": BLEU(effective_order=True)}
TEXTS = st.lists(st.text(st.sampled_from("ab cä.,1'  "), max_size=25), min_size=1, max_size=6)


@pytest.mark.parametrize("name", MBR_METRICS)
@settings(max_examples=40)
@given(texts=TEXTS)
def test_similarity_equals_sacrebleu(name: str, texts: list[str]) -> None:
    similarity_HH = MBR_METRICS[name](texts)
    for answer, row in zip(texts, similarity_HH.tolist(), strict=True):
        for reference, value in zip(texts, row, strict=True):
            assert 100 * value == pytest.approx(SACREBLEU[name].sentence_score(answer, [reference]).score, abs=1e-9)


def found(*logps: float) -> list[SearchResult]:
    return [SearchResult([4 + i], logp, logp, True) for i, logp in enumerate(logps)]


@pytest.mark.parametrize("name", MBR_METRICS)
def test_an_outlier_ranks_last_even_if_it_is_the_most_probable(name: str) -> None:
    texts = ["a cat sat on a mat", "the cat sat on the mat", "the cat sat on a mat", "something else entirely"]
    ranked = rank_by_agreement(found(-5.0, -4.0, -6.0, -1.0), texts, [1.0] * 4, name)
    assert ranked[0].tokens == [6]
    assert ranked[-1].tokens == [7]
    assert [one.score for one in ranked] == sorted((one.score for one in ranked), reverse=True)
    assert ranked[0].logp == -6.0


@given(texts=TEXTS)
def test_equal_texts_are_merged_and_counted_with_multiplicity(texts: list[str]) -> None:
    ranked = rank_by_agreement(found(*[-1.0] * len(texts)), texts, [1.0] * len(texts), "chrf")
    assert len(ranked) == len(set(texts))
    double = rank_by_agreement(found(*[-1.0] * 2 * len(texts)), texts * 2, [1.0] * 2 * len(texts), "chrf")
    assert [one.tokens for one in double] == [one.tokens for one in ranked]


def test_weights_change_the_ranking() -> None:
    texts = ["aaaa", "aaab", "zzzz"]
    assert rank_by_agreement(found(-1.0, -1.0, -1.0), texts, [1.0, 1.0, 1.0], "chrf")[0].tokens == [4]
    assert rank_by_agreement(found(-1.0, -1.0, -1.0), texts, [0.1, 0.1, 1.0], "chrf")[0].tokens == [6]


def test_empty_input_and_unknown_metric() -> None:
    assert rank_by_agreement([], [], [], "chrf") == []
    with pytest.raises(UserError, match="did you mean 'chrf'"):
        rank_by_agreement(found(-1.0), ["a"], [1.0], "chr")
