"""Pools: one state for every text, made of its own tokens and of no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dragoman.kernels.attention import RowLayout
from dragoman.models.single_sequence import POOLS
from tolerance import same

KIND = pytest.mark.parametrize("kind", POOLS)
PLAIN = {
    "mean": lambda states_TC: states_TC.mean(0),
    "max": lambda states_TC: states_TC.amax(0),
    "first": lambda states_TC: states_TC[0],
    "last": lambda states_TC: states_TC[-1],
    "last_token": lambda states_TC: states_TC[-1],
}


def rows(*lengths: list[int], width: int = 12) -> RowLayout:
    """Texts of these lengths side by side."""
    segment_BT, position_BT = torch.zeros(2, len(lengths), width, dtype=torch.long)
    for b, some in enumerate(lengths):
        at = 0
        for number, length in enumerate(some, 1):
            segment_BT[b, at : at + length] = number
            position_BT[b, at : at + length] = torch.arange(length)
            at += length
    return RowLayout(segment_BT, position_BT)


LENGTHS = [[3, 1, 5], [12], [], [2, 2, 2, 2]]


@pytest.mark.parametrize("kind", PLAIN)
def test_it_is_what_its_name_says(kind: str) -> None:
    where = rows(*LENGTHS)
    states_BSC = torch.randn(4, 12, 6, dtype=torch.float64, requires_grad=True)
    pooled_BTC = POOLS[kind](states_BSC, where, 5)
    expected_BTC = torch.zeros(4, 5, 6, dtype=torch.float64)
    for b, some in enumerate(LENGTHS):
        for number in range(len(some)):
            expected_BTC[b, number] = PLAIN[kind](states_BSC[b][where.segment_BT[b] == number + 1])
    same(pooled_BTC, expected_BTC)
    weight_BTC = torch.randn_like(pooled_BTC)
    gradient = [torch.autograd.grad((x * weight_BTC).sum(), states_BSC)[0] for x in (pooled_BTC, expected_BTC)]
    same(gradient[0], gradient[1])


@KIND
def test_padding_and_neighbours_change_nothing(kind: str) -> None:
    where = rows(*LENGTHS)
    states_BSC = torch.randn(4, 12, 6)
    before = POOLS[kind](states_BSC, where, 4)
    other: Tensor = states_BSC.masked_fill((where.segment_BT != 1)[..., None], 1e4)
    same(POOLS[kind](other, where, 4)[:, 0], before[:, 0])
    assert POOLS[kind](other, where, 4).isfinite().all()


@KIND
def test_a_text_is_pooled_as_if_alone(kind: str) -> None:
    where, states_BSC = rows(*LENGTHS), torch.randn(4, 12, 6, dtype=torch.float64)
    pooled_BTC = POOLS[kind](states_BSC, where, 5)
    for b, some in enumerate(LENGTHS):
        for number, length in enumerate(some, 1):
            own_SC = states_BSC[b][where.segment_BT[b] == number]
            same(pooled_BTC[b, number - 1], POOLS[kind](own_SC[None], rows([length], width=length), 1)[0, 0])
        assert (pooled_BTC[b, len(some) :] == 0).all()
