"""Tests of constrained search: results contain all required terms, and a wide beam finds the best such result."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dragoman.decoding.methods import SEARCH_METHODS, choose_width, decode, decode_constrained
from dragoman.decoding.protocol import DecodingConstraints
from exhaustive_search import search_exhaustively
from toy_requests import PIECES, REAL, make_toy_request, real_request, term
from toy_steps import Toy, rescore, sources

TERMS = ["a", "ab", "aba", "a b", "b b a", "abab"]
few = settings(max_examples=25)


def join_tokens(ids: list[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode()


def contains(text: str, wanted: str) -> bool:
    """Return whether a text contains a term, with no letter directly before or after it."""
    return bool(re.search(rf"(?<![a-z]){wanted}(?![a-z])", text))


@few
@given(
    seed=st.integers(0, 5000),
    wanted=st.lists(st.sampled_from(TERMS), min_size=1, max_size=3, unique=True),
    sharp=st.sampled_from([1.0, 6.0, 20.0]),
)
def test_results_contain_all_terms(seed: int, wanted: list[str], sharp: float) -> None:
    """If the limit allows it, the terms appear however improbable they are."""
    model = Toy(seed=seed, vocabulary=len(PIECES), sharp=sharp)
    constraint = DecodingConstraints(required=tuple(map(term, wanted)))
    found = decode_constrained(
        make_toy_request(model, [4, 5], [20, 20], [DecodingConstraints(), constraint], beam=3, nbest=2)
    )
    assert found[0] == []
    assert found[1]
    for result in found[1]:
        assert all(contains(join_tokens(result.tokens), each) for each in wanted), join_tokens(result.tokens)
        marked = [*result.tokens, 3] if result.finished else result.tokens
        assert result.logp == pytest.approx(rescore(model, 5, marked), rel=1e-4)


@few
@given(seed=st.integers(0, 5000), wanted=st.sampled_from(["a", "ab", "a b"]))
@example(seed=3997, wanted="a b")  # "a.b" has the best score, but does not contain the term
def test_a_wide_beam_finds_the_best_result_with_the_term(seed: int, wanted: str) -> None:
    """A beam that is wide enough and never stops early finds the same as exhaustive search."""
    model = Toy(seed=seed, vocabulary=len(PIECES))
    everything = search_exhaustively(model, *sources(4), 4)
    best = next(result for result in everything if result.finished and contains(join_tokens(result.tokens), wanted))
    [found] = decode_constrained(
        make_toy_request(model, [4], [4], [DecodingConstraints(required=(term(wanted),))], beam=600, stop="limit")
    )
    assert found[0].tokens == best.tokens


@few
@given(seed=st.integers(0, 5000), limit=st.integers(1, 3))
def test_no_result_if_the_terms_exceed_the_limit(seed: int, limit: int) -> None:
    """Constrained search returns nothing, so `decode` returns the results of plain beam search."""
    model = Toy(seed=seed, vocabulary=len(PIECES))
    constraints = [DecodingConstraints(required=(term("abab"), term("b b a"))), DecodingConstraints()]
    request = make_toy_request(model, [4, 5], [limit, limit], constraints)
    assert decode_constrained(request) == [[], []]
    assert decode(request) == SEARCH_METHODS["beam"].decode(request)


def test_a_term_that_is_also_forbidden_is_not_in_finished_results() -> None:
    """Only unfinished results may contain the term, at their end."""
    constraint = DecodingConstraints(required=(term("ab"),), avoid=(term("ab"),))
    for seed in range(10):
        request = make_toy_request(Toy(seed=seed, vocabulary=len(PIECES)), [4], [9], [constraint])
        assert not any(result.finished for result in decode_constrained(request)[0])
        assert decode(request)[0]


@pytest.mark.parametrize("method", SEARCH_METHODS)
@pytest.mark.parametrize("name", REAL)
def test_every_model_and_method_produces_the_terms_independently_of_other_sentences(name: str, method: str) -> None:
    token_bytes = [b"", b"", b"", b"", b" a", b" b", b"c", b"."]
    constraints = [
        DecodingConstraints(seed_text="x"),
        DecodingConstraints(required=(term("ac", token_bytes),), seed_text="y"),
        DecodingConstraints(required=(term("bc a", token_bytes),), seed_text="z"),
    ]
    options: dict[str, Any] = {"method": method, "samples": 8, "max_expansions": 50}
    together = decode(real_request(name, 3, 12, constraints, **options))
    for row, wanted in ((1, " ac"), (2, " bc a")):
        assert wanted in b"".join(token_bytes[i] for i in together[row][0].tokens).decode()
    for row in range(3):
        alone = [constraint if i == row else DecodingConstraints() for i, constraint in enumerate(constraints)]
        request = real_request(name, 3, 12, alone, **options).skip_except([i == row for i in range(3)])
        assert decode(request)[row] == together[row]


def test_the_number_of_beams_grows_with_the_required_tokens() -> None:
    short, long = DecodingConstraints(required=(term("a"),)), DecodingConstraints(required=tuple(map(term, TERMS)))
    assert short.needed_tokens == 2
    assert choose_width(short, 4) == 8
    assert choose_width(long, 4) >= long.needed_tokens + 4
    assert choose_width(DecodingConstraints(required=tuple(term("ab" * 30) for _ in range(9))), 4) == 64
