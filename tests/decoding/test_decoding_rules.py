"""Tests of decoding rules: no repeated n-grams, a minimum length, terms to avoid, and required prefixes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.decoding.methods import SEARCH_METHODS, SearchSettings, decode
from dragoman.decoding.protocol import RULES, DecodingConstraints, Prefix, forbid_repeats, make_rules
from dragoman.types import EOS, PAD
from toy_requests import PIECES, make_toy_request, search_reference, term
from toy_steps import Toy

NEG_INF = -math.inf
QUICK: dict[str, Any] = {"beam": 4, "groups": 2, "samples": 8, "max_expansions": 200}
seeds, limits = st.integers(0, 5000), st.integers(4, 12)
few = settings(max_examples=15)


def join_tokens(ids: Sequence[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode().strip()


def list_forbidden(logp_NV: torch.Tensor) -> list[set[int]]:
    return [{token for token, logp in enumerate(row) if logp == NEG_INF} - {PAD} for row in logp_NV.tolist()]


@given(
    tokens_of=st.lists(st.lists(st.integers(4, 6), min_size=9, max_size=9), min_size=1, max_size=4),
    lengths=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    n=st.integers(1, 4),
)
def test_exactly_the_repeated_ngrams_are_forbidden(tokens_of: list[list[int]], lengths: list[int], n: int) -> None:
    """Compare with a plain Python implementation. Tokens beyond the length of a row are ignored."""
    length_N = torch.tensor(lengths[: len(tokens_of)])
    rule = forbid_repeats([], SearchSettings(no_repeat=n), torch.device("cpu"))
    assert rule
    logp_NV = rule(torch.zeros(len(tokens_of), 8), Prefix(torch.tensor(tokens_of), length_N))
    for row, length, never in zip(tokens_of, length_N.tolist(), list_forbidden(logp_NV)):
        prefix = row[:length]
        ngrams = {tuple(prefix[i : i + n]) for i in range(length - n + 1)}
        assert never == {
            token for token in range(8) if (*prefix[length - n + 1 :], token)[-n:] in ngrams and length >= n
        }


def test_there_are_no_rules_without_constraints() -> None:
    nothing: Any = ([DecodingConstraints(seed_text="a")] * 2, SearchSettings(), torch.device("cpu"))
    assert make_rules(*nothing) == []
    assert all(make(*nothing) is None for make in RULES.values())


@pytest.mark.parametrize("method", SEARCH_METHODS)
@few
@given(seed=seeds, limit=limits)
def test_rules_hold_for_every_method(method: str, seed: int, limit: int) -> None:
    """Each sentence has another constraint: none, a minimum length, a prefix, or a term to avoid."""
    model = Toy(seed=seed, vocabulary=len(PIECES), sharp=6.0)
    constraints = [
        DecodingConstraints(seed_text="0"),
        DecodingConstraints(min_tokens=3, seed_text="1"),
        DecodingConstraints(prefix=(5, 5, 4), seed_text="2"),
        DecodingConstraints(avoid=(term("ab"),), seed_text="3"),
    ]
    found = decode(make_toy_request(model, [4, 5, 6, 7], [limit] * 4, constraints, method=method, no_repeat=2, **QUICK))
    for results in found:
        for result in results:
            ngrams = list(zip(result.tokens, result.tokens[1:]))
            assert len(set(ngrams)) == len(ngrams) or result.tokens[:3] == [5, 5, 4]
    assert all(len(result.tokens) >= 3 for result in found[1] if result.finished)
    assert all(result.tokens[:3] == [5, 5, 4] for result in found[2])
    assert all(
        "ab" not in join_tokens(result.tokens).replace(".", " ").split() for result in found[3] if result.finished
    )


@few
@given(seed=seeds, limit=limits)
def test_rules_do_not_affect_other_sentences(seed: int, limit: int) -> None:
    model = Toy(seed=seed, vocabulary=len(PIECES))
    free = search_reference(make_toy_request(model, [4, 5, 6], [limit] * 3))
    for constraint in (
        DecodingConstraints(prefix=(4, 4)),
        DecodingConstraints(avoid=(term("a"), term("b"))),
        DecodingConstraints(min_tokens=4),
    ):
        found = search_reference(
            make_toy_request(model, [4, 5, 6], [limit] * 3, [DecodingConstraints(), constraint, DecodingConstraints()])
        )
        assert [found[0], found[2]] == [free[0], free[2]]


@few
@given(seed=seeds)
def test_avoiding_a_term_loses_no_other_hypothesis(seed: int) -> None:
    """The beam is wide enough for all hypotheses."""
    model = Toy(seed=seed, vocabulary=len(PIECES))
    wide: dict[str, Any] = {"beam": 400, "nbest": 400, "stop": "limit"}
    everything = search_reference(make_toy_request(model, [4], [3], **wide))[0]
    without = search_reference(make_toy_request(model, [4], [3], [DecodingConstraints(avoid=(term("a"),))], **wide))[0]
    wanted = [
        result
        for result in everything
        if "a" not in join_tokens(result.tokens).replace(".", " ").split() and result.finished
    ]
    assert [result.tokens for result in without if result.finished] == [result.tokens for result in wanted]


def test_a_required_prefix_overrides_the_other_rules() -> None:
    constraint = DecodingConstraints(prefix=(4, 5, 4, 5), avoid=(term("a"),))
    [found] = search_reference(
        make_toy_request(Toy(vocabulary=len(PIECES)), [4], [12], [constraint], no_repeat=1, beam=3, nbest=3)
    )
    assert found
    for result in found:
        assert result.tokens[:4] == [4, 5, 4, 5]
        assert EOS not in result.tokens
        assert not set(result.tokens[:4]) & set(result.tokens[4:])
