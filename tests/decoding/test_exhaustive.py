"""Exhaustive search lists all sequences, and a beam of full width finds the same, for every kind of model."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from dragoman.decoding.beam import LENGTH_NORMS, STOP_RULES
from dragoman.decoding.protocol import SearchResult
from dragoman.errors import UserError
from dragoman.types import EOS
from exhaustive_search import search_exhaustively
from toy_requests import REAL, beam_search, real, real_sources
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
