"""The reference implementation of beam search finds the same results as the fast one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.decoding.beam import LENGTH_NORMS, STOP_RULES
from dragoman.decoding.methods import decode_beam
from dragoman.decoding.protocol import DecodingConstraints
from toy_requests import REAL, make_toy_request, real_request, search_reference
from toy_steps import Broken, Toy


@pytest.mark.parametrize("stop", STOP_RULES)
@pytest.mark.parametrize("norm", LENGTH_NORMS)
@settings(max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(2, 5),
    levels=st.sampled_from([2, 5, 1 << 20]),
    alpha=st.sampled_from([0.0, 0.6, 1.0]),
    finish=st.integers(0, 2),
)
def test_reference_and_fast_search_agree_to_the_bit(
    stop: str, norm: str, seed: int, width: int, levels: int, alpha: float, finish: int
) -> None:
    """The cases include ties, limits, empty jobs and rules."""
    model = Toy(seed=seed, levels=levels)
    constraints = [
        DecodingConstraints(),
        DecodingConstraints(min_tokens=2),
        DecodingConstraints(),
        DecodingConstraints(prefix=(5,)),
    ]
    options: dict[str, Any] = {
        "stop": stop,
        "length_norm": norm,
        "length_penalty": alpha,
        "no_repeat": 3,
        "finish": finish,
    }
    request = make_toy_request(model, [4, 5, 6, 7], [6, 9, 0, 3], constraints, beam=width, nbest=width, **options)
    assert search_reference(request) == decode_beam(request)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("age", [0, 2])
def test_reference_and_fast_search_agree_for_broken_models(value: float, age: int) -> None:
    request = make_toy_request(Broken(value, age, 5, seed=10), [4, 5, 6], [7, 7, 7], beam=3, nbest=3, stop="best")
    assert search_reference(request) == decode_beam(request)


@pytest.mark.parametrize("name", REAL)
def test_reference_and_fast_search_agree_for_real_models(name: str) -> None:
    request = real_request(name, 5, 9, beam=4, nbest=4)
    assert search_reference(request) == decode_beam(request)
