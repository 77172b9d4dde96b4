"""Diverse beam search: the first group is a beam search like any other, and the others keep off its words."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.decoding.methods import Request, decode_diverse
from dragoman.decoding.sentence_beam import DiverseBeam, SentenceBeam, SentenceSearches
from dragoman.types import EOS
from toy_requests import asked, search_reference
from toy_steps import Script, Toy, rescore

seeds = st.integers(0, 5000)
few = settings(max_examples=20)


@few
@given(seed=seeds, each=st.integers(1, 3), diversity=st.floats(0, 3))
def test_the_first_group_is_a_beam_search(seed: int, each: int, diversity: float) -> None:
    model = Toy(seed=seed, vocabulary=9)
    alone = search_reference(asked(model, [4, 5], [7, 5], beam=each))
    found = decode_diverse(asked(model, [4, 5], [7, 5], beam=3 * each, groups=3, nbest=3 * each, diversity=diversity))
    for [best], many in zip(alone, found, strict=True):
        assert best in many


@few
@given(seed=seeds)
def test_answers_are_sorted_truly_scored_and_differ(seed: int) -> None:
    model = Toy(seed=seed, vocabulary=9)
    answers = decode_diverse(asked(model, [4, 5, 6], [7, 0, 5], beam=6, groups=3, nbest=4))
    for first, found in zip((4, 5, 6), answers, strict=True):
        for one in found:
            marked = [*one.tokens, EOS] if one.finished else one.tokens
            assert one.logp == pytest.approx(rescore(model, first, marked), rel=1e-5)
        assert len({tuple(one.tokens) for one in found}) == len(found)
        assert found == sorted(found, key=lambda one: (not one.finished, -one.score))


def test_without_a_price_all_groups_say_the_same_and_with_one_they_do_not() -> None:
    def first_words(diversity: float) -> int:
        total = 0
        for seed in range(30):
            request = asked(Toy(seed=seed, vocabulary=9), [4], [6], beam=4, groups=4, nbest=4, diversity=diversity)
            total += len({tuple(group.results()[0].tokens) for group in groups_of(request)})
        return total

    assert first_words(0.0) == 30
    assert first_words(2.0) > 75


def groups_of(request: Request) -> list[SentenceBeam]:
    made = []

    def make(*given: Any) -> DiverseBeam:
        made.append(DiverseBeam(*given))
        return made[-1]

    request.run(request.jobs, partial(SentenceSearches, make, request.settings, request.settings.beam))
    return made[0].groups


def test_a_word_costs_what_it_is_said_to_cost() -> None:
    """Two groups of one: the second takes the second word only when the first's is dearer than it is better."""
    never = float("-inf")
    model = Script([never, never, never, never, -0.5, -1.0], [never, never, never, 0.0, never, never])
    for diversity, words in ((0.4, [4]), (0.6, [4, 5])):
        [found] = decode_diverse(asked(model, [4], [5], beam=2, groups=2, nbest=2, diversity=diversity))
        assert [one.tokens for one in found] == [[word] for word in words]
        assert [one.logp for one in found] == [-0.5, -1.0][: len(words)]
