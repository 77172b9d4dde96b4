"""Pooling computes one vector per text from the states of its tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dragoman.kernels.attention import RowLayout
from dragoman.models.single_sequence import POOLS
from tolerance import assert_same

ALL_POOLS = pytest.mark.parametrize("kind", POOLS)
FORMULAS = {
    "mean": lambda states_TC: states_TC.mean(0),
    "max": lambda states_TC: states_TC.amax(0),
    "first": lambda states_TC: states_TC[0],
    "last": lambda states_TC: states_TC[-1],
    "last_token": lambda states_TC: states_TC[-1],
}


def make_rows(*lengths: list[int], width: int = 12) -> RowLayout:
    """Return packed rows with texts of these lengths."""
    segment_BT, position_BT = torch.zeros(2, len(lengths), width, dtype=torch.long)
    for b, row_lengths in enumerate(lengths):
        start = 0
        for number, length in enumerate(row_lengths, 1):
            segment_BT[b, start : start + length] = number
            position_BT[b, start : start + length] = torch.arange(length)
            start += length
    return RowLayout(segment_BT, position_BT)


LENGTHS = [[3, 1, 5], [12], [], [2, 2, 2, 2]]


@pytest.mark.parametrize("kind", FORMULAS)
def test_pools_equal_their_formulas(kind: str) -> None:
    rows = make_rows(*LENGTHS)
    states_BSC = torch.randn(4, 12, 6, dtype=torch.float64, requires_grad=True)
    pooled_BTC = POOLS[kind](states_BSC, rows, 5)
    expected_BTC = torch.zeros(4, 5, 6, dtype=torch.float64)
    for b, row_lengths in enumerate(LENGTHS):
        for number in range(len(row_lengths)):
            expected_BTC[b, number] = FORMULAS[kind](states_BSC[b][rows.segment_BT[b] == number + 1])
    assert_same(pooled_BTC, expected_BTC)
    weight_BTC = torch.randn_like(pooled_BTC)
    gradients = [torch.autograd.grad((x * weight_BTC).sum(), states_BSC)[0] for x in (pooled_BTC, expected_BTC)]
    assert_same(gradients[0], gradients[1])


@ALL_POOLS
def test_padding_and_other_texts_have_no_influence(kind: str) -> None:
    rows = make_rows(*LENGTHS)
    states_BSC = torch.randn(4, 12, 6)
    before = POOLS[kind](states_BSC, rows, 4)
    other: Tensor = states_BSC.masked_fill((rows.segment_BT != 1)[..., None], 1e4)
    assert_same(POOLS[kind](other, rows, 4)[:, 0], before[:, 0])
    assert POOLS[kind](other, rows, 4).isfinite().all()


@ALL_POOLS
def test_packed_texts_are_pooled_independently(kind: str) -> None:
    rows, states_BSC = make_rows(*LENGTHS), torch.randn(4, 12, 6, dtype=torch.float64)
    pooled_BTC = POOLS[kind](states_BSC, rows, 5)
    for b, row_lengths in enumerate(LENGTHS):
        for number, length in enumerate(row_lengths, 1):
            states_SC = states_BSC[b][rows.segment_BT[b] == number]
            assert_same(
                pooled_BTC[b, number - 1], POOLS[kind](states_SC[None], make_rows([length], width=length), 1)[0, 0]
            )
        assert (pooled_BTC[b, len(row_lengths) :] == 0).all()
