"""Greedy search takes the likeliest token, and says when it was cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.search.sample import greedy
from dragoman.search.step import Found, legal
from dragoman.types import BOS, EOS, Mistake
from toy_steps import Broken, Script, Toy, rescore, sources


def follow(model: Toy, first: int, limit: int) -> list[int]:
    """The likeliest tokens, one sentence at a time, in plain Python; the end mark is kept."""
    state, tokens = model.start(*sources(first)), [BOS]
    while len(tokens) <= limit and tokens[-1] != EOS:
        logp_NV, state = model.step(torch.tensor(tokens[-1:]), state)
        row = legal(logp_NV)[0].tolist()
        tokens.append(row.index(max(row)))
    return tokens[1:]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), levels=st.sampled_from([2, 5, 1 << 20]), alpha=st.sampled_from([0.0, 0.6, 1.0]))
def test_every_token_is_the_likeliest(seed: int, levels: int, alpha: float) -> None:
    model, firsts, limits = Toy(seed=seed, levels=levels), [4, 5, 6, 7], [8, 3, 0, 1]
    answers = greedy(model, *sources(*firsts), torch.tensor(limits), alpha=alpha)
    assert answers[2] == []
    for b in (0, 1, 3):
        (found,) = answers[b]
        wanted = follow(model, firsts[b], limits[b])
        assert [*found.tokens, EOS][: len(wanted)] == wanted
        assert found.finished == (wanted[-1] == EOS)
        assert found.logp == pytest.approx(rescore(model, firsts[b], wanted), rel=1e-5)
        assert found.score == pytest.approx(found.logp / len(wanted) ** alpha, rel=1e-5)


def test_neighbours_change_nothing() -> None:
    model, firsts, limits = Toy(seed=5), [4, 5, 6], [9, 2, 5]
    together = greedy(model, *sources(*firsts), torch.tensor(limits))
    for b, (first, limit) in enumerate(zip(firsts, limits)):
        assert greedy(model, *sources(8, first, 8), torch.tensor([0, limit, 0])) == [[], together[b], []]


def test_it_stops_when_all_have_ended() -> None:
    never = -math.inf
    model = Script([never, never, never, -2.0, -0.1], [never, never, never, -0.1, -2.0])
    (found,) = greedy(model, *sources(4), torch.tensor([50]))
    assert found == [Found([4], pytest.approx(-0.2), pytest.approx(-0.1), True)]
    assert model.steps == 2


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_a_broken_sentence_ends_there_and_the_others_do_not_notice(value: float) -> None:
    limit_B = torch.tensor([7, 7])
    healthy = greedy(Toy(seed=10), *sources(4, 5), limit_B)
    assert len(healthy[1][0].tokens) > 1
    broken = greedy(Broken(value, 1, 5, seed=10), *sources(4, 5), limit_B)
    assert broken[0] == healthy[0]
    (found,) = broken[1]
    assert found.tokens == healthy[1][0].tokens[:1]
    assert not found.finished
    assert math.isfinite(found.score)
    assert greedy(Broken(value, 0, 5, seed=10), *sources(4, 5), limit_B)[1] == [Found([], 0.0, 0.0, False)]


def test_dead_rows_ask_nothing_of_the_model() -> None:
    model = Toy()
    assert greedy(model, *sources(4, 5), torch.tensor([0, 0])) == [[], []]
    assert greedy(model, *sources(), torch.tensor([], dtype=torch.long)) == []
    assert model.steps == 0


def test_a_negative_penalty_is_a_mistake() -> None:
    with pytest.raises(Mistake, match="must be 0 or more"):
        greedy(Toy(), *sources(4), torch.tensor([3]), alpha=-0.5)
