"""Two exhaustive searches and a beam of full width find the same, for every kind of model.

The reference (tests/support/exhaustive_search.py) lists all sequences; the method `exhaustive` is a branch and bound.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from dragoman.decoding.beam import LENGTH_NORMS, STOP_RULES
from dragoman.decoding.exhaustive import EXHAUSTIVE_ROWS, MIN_LISTED
from dragoman.decoding.methods import SEARCH_METHODS, decode
from dragoman.decoding.protocol import DecodingConstraints, SearchResult
from dragoman.errors import UserError
from dragoman.types import BOS, EOS
from exhaustive_search import search_exhaustively
from toy_requests import REAL, beam_search, make_toy_request, real, real_request, real_sources, term
from toy_run import Toy as ToyRun
from toy_run import make_sentences
from toy_steps import Broken, Toy, rescore, sources
from toy_steps import exhaustive as one_by_one


def assert_same(found: list[SearchResult], wanted: list[SearchResult]) -> None:
    assert [(f.tokens, f.finished) for f in found] == [(f.tokens, f.finished) for f in wanted]
    assert [f.logp for f in found] == pytest.approx([f.logp for f in wanted], abs=1e-5)
    assert [f.score for f in found] == pytest.approx([f.score for f in wanted], abs=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_every_sequence_is_listed_once_and_correctly_scored(alpha: float) -> None:
    model, limit, tokens_in_use = Toy(seed=3), 4, (1, 4, 5)
    found = search_exhaustively(model, *sources(4), limit, alpha=alpha)
    finished = [list(tokens) for length in range(limit) for tokens in product(tokens_in_use, repeat=length)]
    unfinished = [list(tokens) for tokens in product(tokens_in_use, repeat=limit)]
    assert sorted(f.tokens for f in found if f.finished) == sorted(finished)
    assert sorted(f.tokens for f in found if not f.finished) == sorted(unfinished)
    for f in found[::7]:
        assert f.logp == pytest.approx(rescore(model, 4, [*f.tokens, EOS] if f.finished else f.tokens), rel=1e-5)
    assert_same(found, one_by_one(model, 4, limit, alpha))


@pytest.mark.parametrize("stop", STOP_RULES)
@pytest.mark.parametrize("norm", LENGTH_NORMS)
@pytest.mark.parametrize("name", REAL)
def test_full_width_equals_exhaustive(name: str, norm: str, stop: str) -> None:
    """The models are a recurrent model, a Transformer and an ensemble of both."""
    model, limit = real(name), 4
    source_BS, real_BS, _ = real_sources(2)
    expected = [
        search_exhaustively(model, source_BS[b : b + 1], real_BS[b : b + 1], limit, norm=norm) for b in range(2)
    ]
    width = len(expected[0])
    found = beam_search(
        model, source_BS, real_BS, torch.full((2,), limit), width=width, nbest=width, norm=norm, stop=stop
    )
    for results, wanted in zip(found, expected, strict=True):
        assert {(tuple(f.tokens), f.finished) for f in results} == {(tuple(f.tokens), f.finished) for f in wanted}
        assert [f.score for f in results] == pytest.approx([f.score for f in wanted], abs=1e-4)
        assert [f.tokens for f in results[:9]] == [f.tokens for f in wanted[:9]]


def test_impossible_sequences_are_not_listed() -> None:
    found = search_exhaustively(Broken(float("nan"), 2, 4), *sources(4), 4)
    assert {len(f.tokens) for f in found} == {0, 1}


def test_too_many_sequences_are_refused() -> None:
    with pytest.raises(UserError, match="too many to search"):
        search_exhaustively(Toy(vocabulary=2000), *sources(4), 3)


@pytest.mark.parametrize("nbest", [1, 3, 40])
@pytest.mark.parametrize("norm", LENGTH_NORMS)
def test_branch_and_bound_finds_the_best_of_all(norm: str, nbest: int) -> None:
    """In the larger vocabulary, there are more continuations than are listed at a time, and more than rows."""
    for vocabulary, limit in ((6, 5), (EXHAUSTIVE_ROWS + 8, 3)):
        assert vocabulary < MIN_LISTED or vocabulary > EXHAUSTIVE_ROWS > MIN_LISTED
        for seed in range(2):
            model = Toy(vocabulary=vocabulary, seed=seed, sharp=8.0)
            settings: dict[str, Any] = {"method": "exhaustive", "nbest": nbest, "length_norm": norm, "beam": 2}
            found = decode(make_toy_request(model, [4, 5, 6], [limit, 0, limit - 1], **settings))
            for results, first, length in zip(found, (4, 5, 6), (limit, 0, limit - 1), strict=True):
                expected = search_exhaustively(model, *sources(first), length, norm=norm) if length else []
                assert_same(results, expected[:nbest])


@pytest.mark.parametrize("name", REAL)
def test_branch_and_bound_with_caches(name: str) -> None:
    source_BS, real_BS, _ = real_sources(3)
    found = decode(real_request(name, 3, 4, method="exhaustive", nbest=5, beam=1))
    for b, results in enumerate(found):
        assert_same(results, search_exhaustively(real(name), source_BS[b : b + 1], real_BS[b : b + 1], 4)[:5])


CONSTRAINTS: list[tuple[DecodingConstraints, dict[str, Any]]] = [
    (DecodingConstraints(prefix=(5, 4)), {}),
    (DecodingConstraints(min_tokens=3), {}),
    (DecodingConstraints(avoid=(term("a"), term("b"))), {}),
    (DecodingConstraints(), {"no_repeat": 1}),
]


@pytest.mark.parametrize(("constraints", "settings"), CONSTRAINTS, ids=str)
def test_constraints_hold_in_exhaustive_search(constraints: DecodingConstraints, settings: dict[str, Any]) -> None:
    """A beam that is wide enough for all sequences finds the best ones that meet the constraints."""
    request = make_toy_request(Toy(vocabulary=10, seed=2), [4], [4], [constraints], nbest=40, beam=40, **settings)
    wide = replace(request, settings=request.settings.model_copy(update={"beam": 1000, "stop": "limit"}))
    exhaustive = replace(request, settings=request.settings.model_copy(update={"method": "exhaustive"}))
    assert_same(decode(exhaustive)[0], decode(wide)[0])


class Trap(Toy):
    """At first, token 4 is a little more probable than 5; but after 4 all tokens are improbable, after 5 EOS is not."""

    def step(self, token_N: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        _, state = super().step(token_N, state)
        logp_NV = torch.full((len(token_N), self.vocabulary), -6.0)
        logp_NV[token_N == BOS, 4], logp_NV[token_N == BOS, 5], logp_NV[token_N == 5, EOS] = -0.6, -0.7, -0.01
        return logp_NV, state


def test_exhaustive_search_finds_what_greedy_search_misses() -> None:
    greedy, best = (decode(make_toy_request(Trap(), [4], [4], method=name))[0][0] for name in ("greedy", "exhaustive"))
    assert (greedy.tokens[0], best.tokens) == (4, [5])
    assert best.score > greedy.score


def test_a_search_that_was_stopped_says_so(toy: ToyRun) -> None:
    """The results are never worse than those of beam search, and only complete searches have no warning."""
    settings: dict[str, Any] = {"method": "exhaustive", "nbest": 3, "beam": 3, "length_norm": "none"}
    for limit in (1, 7, 100, 10_000):
        model = Toy(vocabulary=40, sharp=8.0)
        request = make_toy_request(model, [4, 5], [6, 6], max_expansions=limit, **settings)
        beams = decode(replace(request, settings=request.settings.model_copy(update={"method": "beam"})))
        for results, beam in zip(decode(request), beams, strict=True):
            assert [f.score for f in results] >= [f.score for f in beam]
            [warning] = {f.warning for f in results}
            assert (warning == "") if limit == 10_000 else f"search.max_expansions={limit} " in warning
    [line] = make_sentences(1, seed=3)
    for limit, expected in ((1, 1), (10_000, 0)):
        search = {"method": "exhaustive", "max_expansions": limit, "length_norm": "none"}
        [hypothesis] = toy.translator.translate([line], search=search)
        assert sum("not proven" in warning for warning in hypothesis.warnings) == expected


def test_required_terms_make_no_claim_to_be_exact() -> None:
    constraints = DecodingConstraints(required=(term("b"),))
    for method, properties in SEARCH_METHODS.items():
        request = make_toy_request(Toy(vocabulary=10), [4], [5], [constraints], method=method, max_expansions=50)
        assert bool(decode(request)[0][0].warning) == properties.is_exact


def test_a_model_without_a_result_ends_with_what_beam_search_has() -> None:
    request = make_toy_request(Broken(float("nan"), 2, 4), [4], [4], method="exhaustive", nbest=3)
    assert [f.finished for f in decode(request)[0]] == [True, True, True]
    request = make_toy_request(Broken(float("nan"), 0, 4), [4], [4], method="exhaustive")
    assert [(f.tokens, f.finished) for f in decode(request)[0]] == [([], False)]
