"""Rules hold for every sentence by itself, in every search, and forbid no more than they say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.decoding.methods import METHODS, SearchSettings, decode
from dragoman.decoding.protocol import RULES, DecodingConstraints, Prefix, forbid_repeats, make_rules
from dragoman.types import EOS, PAD
from toy_requests import PIECES, asked, search_reference, term
from toy_steps import Toy

NEVER = -math.inf
ENOUGH: dict[str, Any] = {"beam": 4, "groups": 2, "samples": 8}
seeds, limits = st.integers(0, 5000), st.integers(4, 12)
few = settings(max_examples=15)


def text_of(ids: Sequence[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode().strip()


def forbidden(logp_NV: torch.Tensor) -> list[set[int]]:
    return [{token for token, logp in enumerate(row) if logp == NEVER} - {PAD} for row in logp_NV.tolist()]


@given(
    said=st.lists(st.lists(st.integers(4, 6), min_size=9, max_size=9), min_size=1, max_size=4),
    lengths=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    n=st.integers(1, 4),
)
def test_no_run_is_said_twice_and_all_else_is_free(said: list[list[int]], lengths: list[int], n: int) -> None:
    """Against the plain way to say it; what stands behind a row's length is no matter."""
    length_N = torch.tensor(lengths[: len(said)])
    rule = forbid_repeats([], SearchSettings(no_repeat=n), torch.device("cpu"))
    assert rule
    logp_NV = rule(torch.zeros(len(said), 8), Prefix(torch.tensor(said), length_N))
    for row, length, never in zip(said, length_N.tolist(), forbidden(logp_NV)):
        prefix = row[:length]
        runs = {tuple(prefix[i : i + n]) for i in range(length - n + 1)}
        assert never == {token for token in range(8) if (*prefix[length - n + 1 :], token)[-n:] in runs and length >= n}


def test_rules_are_there_only_where_something_is_asked() -> None:
    nothing: Any = ([DecodingConstraints(text="a")] * 2, SearchSettings(), torch.device("cpu"))
    assert make_rules(*nothing) == []
    assert all(make(*nothing) is None for make in RULES.values())


@pytest.mark.parametrize("method", METHODS)
@few
@given(seed=seeds, limit=limits)
def test_rules_hold_for_every_method(method: str, seed: int, limit: int) -> None:
    """A minimum, a prefix, runs that are not repeated and a term that is avoided, each in a sentence of its own."""
    model = Toy(seed=seed, vocabulary=len(PIECES), sharp=6.0)
    wishes = [
        DecodingConstraints(text="0"),
        DecodingConstraints(minimum=3, text="1"),
        DecodingConstraints(prefix=(5, 5, 4), text="2"),
        DecodingConstraints(avoid=(term("ab"),), text="3"),
    ]
    found = decode(asked(model, [4, 5, 6, 7], [limit] * 4, wishes, method=method, no_repeat=2, **ENOUGH))
    for some in found:
        for one in some:
            runs = list(zip(one.tokens, one.tokens[1:]))
            assert len(set(runs)) == len(runs) or one.tokens[:3] == [5, 5, 4]
    assert all(len(one.tokens) >= 3 for one in found[1] if one.finished)
    assert all(one.tokens[:3] == [5, 5, 4] for one in found[2])
    assert all("ab" not in text_of(one.tokens).replace(".", " ").split() for one in found[3] if one.finished)


@few
@given(seed=seeds, limit=limits)
def test_rules_do_not_reach_into_other_sentences(seed: int, limit: int) -> None:
    model = Toy(seed=seed, vocabulary=len(PIECES))
    free = search_reference(asked(model, [4, 5, 6], [limit] * 3))
    for wish in (
        DecodingConstraints(prefix=(4, 4)),
        DecodingConstraints(avoid=(term("a"), term("b"))),
        DecodingConstraints(minimum=4),
    ):
        found = search_reference(
            asked(model, [4, 5, 6], [limit] * 3, [DecodingConstraints(), wish, DecodingConstraints()])
        )
        assert [found[0], found[2]] == [free[0], free[2]]


@few
@given(seed=seeds)
def test_avoiding_takes_the_best_answer_without_the_term(seed: int) -> None:
    """A beam that holds everything: nothing else is lost."""
    model = Toy(seed=seed, vocabulary=len(PIECES))
    wide: dict[str, Any] = {"beam": 400, "nbest": 400, "stop": "limit"}
    everything = search_reference(asked(model, [4], [3], **wide))[0]
    without = search_reference(asked(model, [4], [3], [DecodingConstraints(avoid=(term("a"),))], **wide))[0]
    wanted = [one for one in everything if "a" not in text_of(one.tokens).replace(".", " ").split() and one.finished]
    assert [one.tokens for one in without if one.finished] == [one.tokens for one in wanted]


def test_a_prefix_goes_before_the_other_rules() -> None:
    wish = DecodingConstraints(prefix=(4, 5, 4, 5), avoid=(term("a"),))
    [found] = search_reference(asked(Toy(vocabulary=len(PIECES)), [4], [12], [wish], no_repeat=1, beam=3, nbest=3))
    assert found
    for one in found:
        assert one.tokens[:4] == [4, 5, 4, 5]
        assert EOS not in one.tokens
        assert not set(one.tokens[:4]) & set(one.tokens[4:])
