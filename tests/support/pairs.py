"""Few combinations in which every two choices meet: what stands for a product of long menus."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import pytest

TRIES = 60  # random fillings around a pair before it is held to be one that cannot work
CANDIDATES = 12  # fillings that fit, of which the one with most new pairs is taken


def pairwise(
    menus: Mapping[str, Sequence[Any]], fits: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """Combinations that fit, of one choice from each menu, in which every two choices that can meet do."""
    random, found, met = Random(1), list[dict[str, Any]](), set[tuple[tuple[str, Any], ...]]()
    for pair in iterate_pairs(menus):
        if pair in met:
            continue
        drawn = ({name: random.choice(menu) for name, menu in menus.items()} | dict(pair) for _ in range(TRIES))
        fitting = itertools.islice((one for one in drawn if fits(one)), CANDIDATES)
        best = max(fitting, key=lambda one: len(collect_pairs(one) - met), default=None)
        if best is not None:
            found.append(best)
            met |= collect_pairs(best)
    return found


def iterate_pairs(menus: Mapping[str, Sequence[Any]]) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every two choices from different menus."""
    for one, other in itertools.combinations(menus, 2):
        for first, second in itertools.product(menus[one], menus[other]):
            yield (one, first), (other, second)


def collect_pairs(choices: Mapping[str, Any]) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations(choices.items(), 2))


def parametrize_pairwise(menus: Mapping[str, Sequence[Any]], *, indirect: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parametrize a test by few combinations of these menus; what is `indirect` is the parameter of a fixture."""
    combinations = [tuple(one.values()) for one in pairwise(menus)]
    return pytest.mark.parametrize(tuple(menus), combinations, indirect=indirect, ids=str)
