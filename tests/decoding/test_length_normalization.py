"""Tests of the length normalization of scores."""

from __future__ import annotations

import pytest

from dragoman.config.settings import parse_settings
from dragoman.decoding.beam import LENGTH_NORMS
from dragoman.decoding.methods import SearchSettings
from dragoman.errors import UserError


@pytest.mark.parametrize("name", LENGTH_NORMS)
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 3.0])
def test_divisors_are_at_least_1_and_never_decrease(name: str, alpha: float) -> None:
    """The stop rule "best" relies on this: the divisor of the maximum length gives an upper bound of the score."""
    table = LENGTH_NORMS[name](60, alpha).tolist()
    assert len(table) == 61
    assert table == sorted(table)
    assert min(table) >= 1
    assert table[0] == table[1] == 1


@pytest.mark.parametrize(
    ("name", "alpha", "length", "divisor"),
    [
        ("length", 1.0, 7, 7.0),
        ("length", 0.5, 16, 4.0),
        ("gnmt", 1.0, 7, 2.0),
        ("gnmt", 2.0, 13, 9.0),
        ("none", 2.0, 9, 1.0),
    ],
)
def test_known_divisors(name: str, alpha: float, length: int, divisor: float) -> None:
    assert float(LENGTH_NORMS[name](20, alpha)[length]) == pytest.approx(divisor)


def test_a_negative_penalty_is_refused() -> None:
    with pytest.raises(UserError, match="length_penalty"):
        parse_settings(SearchSettings, {"length_penalty": -0.5}, where="search")
