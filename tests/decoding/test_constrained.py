"""Terms that must appear: met, or no answer is given; and with room enough, the best answer that has them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dragoman.decoding.methods import METHODS, choose_width, decode, decode_constrained
from dragoman.decoding.protocol import DecodingConstraints
from exhaustive_search import search_exhaustively
from toy_requests import PIECES, REAL, asked, real_request, term
from toy_steps import Toy, rescore, sources

TERMS = ["a", "ab", "aba", "a b", "b b a", "abab"]
few = settings(max_examples=25)


def text_of(ids: list[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode()


def has(text: str, wanted: str) -> bool:
    """Return whether a text contains a term, with no letter directly before or after it."""
    return bool(re.search(rf"(?<![a-z]){wanted}(?![a-z])", text))


@few
@given(
    seed=st.integers(0, 5000),
    wanted=st.lists(st.sampled_from(TERMS), min_size=1, max_size=3, unique=True),
    sharp=st.sampled_from([1.0, 6.0, 20.0]),
)
def test_terms_are_met(seed: int, wanted: list[str], sharp: float) -> None:
    """Where there is room for them, always, whatever the model thinks of them."""
    model = Toy(seed=seed, vocabulary=len(PIECES), sharp=sharp)
    wish = DecodingConstraints(must=tuple(map(term, wanted)))
    found = decode_constrained(asked(model, [4, 5], [20, 20], [DecodingConstraints(), wish], beam=3, nbest=2))
    assert found[0] == []
    assert found[1]
    for one in found[1]:
        assert all(has(text_of(one.tokens), each) for each in wanted), text_of(one.tokens)
        marked = [*one.tokens, 3] if one.finished else one.tokens
        assert one.logp == pytest.approx(rescore(model, 5, marked), rel=1e-4)


@few
@given(seed=st.integers(0, 5000), wanted=st.sampled_from(["a", "ab", "a b"]))
@example(seed=3997, wanted="a b")  # "a.b" has the best score, but does not contain the term
def test_the_best_answer_that_has_the_term(seed: int, wanted: str) -> None:
    """Wide enough, and never stopped early: what trying everything finds."""
    model = Toy(seed=seed, vocabulary=len(PIECES))
    everything = search_exhaustively(model, *sources(4), 4)
    best = next(one for one in everything if one.finished and has(text_of(one.tokens), wanted))
    [found] = decode_constrained(
        asked(model, [4], [4], [DecodingConstraints(must=(term(wanted),))], beam=600, stop="limit")
    )
    assert found[0].tokens == best.tokens


@few
@given(seed=st.integers(0, 5000), limit=st.integers(1, 3))
def test_a_term_without_room_is_not_pretended(seed: int, limit: int) -> None:
    """No answer from here: the ordinary search answers, and whoever asked sees that the term is not there."""
    model = Toy(seed=seed, vocabulary=len(PIECES))
    wishes = [DecodingConstraints(must=(term("abab"), term("b b a"))), DecodingConstraints()]
    request = asked(model, [4, 5], [limit, limit], wishes)
    assert decode_constrained(request) == [[], []]
    assert decode(request) == METHODS["beam"].decode(request)


def test_a_term_that_is_forbidden_as_well_is_not_met() -> None:
    """At most it stands where an answer is cut; none with an end of its own has it."""
    wish = DecodingConstraints(must=(term("ab"),), avoid=(term("ab"),))
    for seed in range(10):
        request = asked(Toy(seed=seed, vocabulary=len(PIECES)), [4], [9], [wish])
        assert not any(one.finished for one in decode_constrained(request)[0])
        assert decode(request)[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", REAL)
def test_terms_are_met_by_every_model_and_method_and_neighbours_change_nothing(name: str, method: str) -> None:
    spelt = [b"", b"", b"", b"", b" a", b" b", b"c", b"."]
    wishes = [
        DecodingConstraints(text="x"),
        DecodingConstraints(must=(term("ac", spelt),), text="y"),
        DecodingConstraints(must=(term("bc a", spelt),), text="z"),
    ]
    options: dict[str, Any] = {"method": method, "samples": 8}
    together = decode(real_request(name, 3, 12, wishes, **options))
    for row, wanted in ((1, " ac"), (2, " bc a")):
        assert wanted in b"".join(spelt[i] for i in together[row][0].tokens).decode()
    for row in range(3):
        alone = [wish if i == row else DecodingConstraints() for i, wish in enumerate(wishes)]
        request = real_request(name, 3, 12, alone, **options).only([i == row for i in range(3)])
        assert decode(request)[row] == together[row]


def test_rows_are_as_many_as_banks_and_beams() -> None:
    short, long = DecodingConstraints(must=(term("a"),)), DecodingConstraints(must=tuple(map(term, TERMS)))
    assert short.needed_tokens == 2
    assert choose_width(short, 4) == 8
    assert choose_width(long, 4) >= long.needed_tokens + 4
    assert choose_width(DecodingConstraints(must=tuple(term("ab" * 30) for _ in range(9))), 4) == 64
