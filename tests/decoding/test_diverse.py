"""Tests of diverse beam search: the first group is a plain beam search, and the others avoid its tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.decoding.methods import Request, decode_diverse
from dragoman.decoding.sentence_beam import DiverseBeam, SentenceBeam, SentenceSearches
from dragoman.types import EOS
from toy_requests import make_toy_request, search_reference
from toy_steps import Script, Toy, rescore

seeds = st.integers(0, 5000)
few = settings(max_examples=20)


@few
@given(seed=seeds, each=st.integers(1, 3), diversity=st.floats(0, 3))
def test_the_first_group_is_a_beam_search(seed: int, each: int, diversity: float) -> None:
    model = Toy(seed=seed, vocabulary=9)
    alone = search_reference(make_toy_request(model, [4, 5], [7, 5], beam=each))
    found = decode_diverse(
        make_toy_request(model, [4, 5], [7, 5], beam=3 * each, groups=3, nbest=3 * each, diversity=diversity)
    )
    for [best], many in zip(alone, found, strict=True):
        assert best in many


@few
@given(seed=seeds)
def test_results_are_sorted_distinct_and_correctly_scored(seed: int) -> None:
    model = Toy(seed=seed, vocabulary=9)
    answers = decode_diverse(make_toy_request(model, [4, 5, 6], [7, 0, 5], beam=6, groups=3, nbest=4))
    for first, found in zip((4, 5, 6), answers, strict=True):
        for result in found:
            marked = [*result.tokens, EOS] if result.finished else result.tokens
            assert result.logp == pytest.approx(rescore(model, first, marked), rel=1e-5)
        assert len({tuple(result.tokens) for result in found}) == len(found)
        assert found == sorted(found, key=lambda result: (not result.finished, -result.score))


def test_groups_differ_only_with_a_penalty() -> None:
    def count_distinct(diversity: float) -> int:
        total = 0
        for seed in range(30):
            request = make_toy_request(
                Toy(seed=seed, vocabulary=9), [4], [6], beam=4, groups=4, nbest=4, diversity=diversity
            )
            total += len({tuple(group.results()[0].tokens) for group in run_groups(request)})
        return total

    assert count_distinct(0.0) == 30
    assert count_distinct(2.0) > 75


def run_groups(request: Request) -> list[SentenceBeam]:
    made = []

    def make(*given: Any) -> DiverseBeam:
        made.append(DiverseBeam(*given))
        return made[-1]

    request.run(request.jobs, partial(SentenceSearches, make, request.settings, request.settings.beam))
    return made[0].groups


def test_the_penalty_of_a_token_is_the_setting() -> None:
    """Of two groups of one beam each, the second takes the second-best token only if the penalty is high enough."""
    never = float("-inf")
    model = Script([never, never, never, never, -0.5, -1.0], [never, never, never, 0.0, never, never])
    for diversity, tokens_of_groups in ((0.4, [4]), (0.6, [4, 5])):
        [found] = decode_diverse(make_toy_request(model, [4], [5], beam=2, groups=2, nbest=2, diversity=diversity))
        assert [result.tokens for result in found] == [[token] for token in tokens_of_groups]
        assert [result.logp for result in found] == [-0.5, -1.0][: len(tokens_of_groups)]
