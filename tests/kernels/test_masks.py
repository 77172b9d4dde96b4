"""Masks: True = may look."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dragoman.kernels.attention import make_causal_mask, make_segment_mask, unmask_empty_queries

ROW = st.lists(st.integers(0, 3), min_size=1, max_size=8)
GRID = st.integers(1, 8).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=6)
)


@given(ROW, ROW)
def test_one_looks_inside_ones_own_segment(queries: list[int], keys: list[int]) -> None:
    keep_BQK = make_segment_mask(torch.tensor([queries]), torch.tensor([keys]))
    assert keep_BQK.dtype == torch.bool
    assert keep_BQK[0].tolist() == [[query == key for key in keys] for query in queries]


@given(ROW, ROW)
def test_one_looks_back_and_at_oneself(queries: list[int], keys: list[int]) -> None:
    keep_BQK = make_causal_mask(torch.tensor([queries]), torch.tensor([keys]))
    assert keep_BQK.dtype == torch.bool
    assert keep_BQK[0].tolist() == [[key <= query for key in keys] for query in queries]


@given(GRID)
def test_no_query_is_left_without_a_key_and_the_others_are_left_alone(rows: list[list[bool]]) -> None:
    keep_BQK = torch.tensor([rows])
    before = keep_BQK.clone()
    found = unmask_empty_queries(keep_BQK)
    assert found[0].tolist() == [row if any(row) else [True] * len(row) for row in rows]
    assert torch.equal(keep_BQK, before)


def test_masks_are_made_row_by_row() -> None:
    segment = torch.tensor([[1, 1, 2, 0], [1, 2, 2, 2]])
    position = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 2]])
    keep_BQK = make_segment_mask(segment, segment) & make_causal_mask(position, position)
    assert keep_BQK.int().tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]],
    ]
