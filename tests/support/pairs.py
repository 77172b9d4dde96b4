"""Pairwise testing: few combinations of settings in which every pair of choices occurs, instead of the full product."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import pytest

TRIES = 200  # random combinations with a pair; if none of them is valid, the pair counts as impossible
CANDIDATES = 12  # valid combinations with a pair, of which the one with most new pairs is used


def pairwise(
    menus: Mapping[str, Sequence[Any]], fits: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """Return valid combinations of one choice per menu, in which every possible pair of choices occurs.

    `fits` returns whether a combination is valid.
    """
    random, found, covered = Random(1), list[dict[str, Any]](), set[tuple[tuple[str, Any], ...]]()
    for pair in iterate_pairs(menus):
        if pair in covered:
            continue
        sampled = ({name: random.choice(menu) for name, menu in menus.items()} | dict(pair) for _ in range(TRIES))
        fitting = itertools.islice((one for one in sampled if fits(one)), CANDIDATES)
        best = max(fitting, key=lambda one: len(collect_pairs(one) - covered), default=None)
        if best is not None:
            found.append(best)
            covered |= collect_pairs(best)
    return found


def iterate_pairs(menus: Mapping[str, Sequence[Any]]) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Yield every pair of choices from different menus."""
    for one, other in itertools.combinations(menus, 2):
        for first, second in itertools.product(menus[one], menus[other]):
            yield (one, first), (other, second)


def collect_pairs(choices: Mapping[str, Any]) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations(choices.items(), 2))


def parametrize_pairwise(menus: Mapping[str, Sequence[Any]], *, indirect: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parametrize a test by few combinations of these menus. Names in `indirect` are parameters of fixtures."""
    combinations = [tuple(one.values()) for one in pairwise(menus)]
    return pytest.mark.parametrize(tuple(menus), combinations, indirect=indirect, ids=str)
