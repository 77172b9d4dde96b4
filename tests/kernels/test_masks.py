"""Attention masks: True = attend."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dragoman.kernels.attention import make_causal_mask, make_segment_mask, unmask_empty_queries

ROW = st.lists(st.integers(0, 3), min_size=1, max_size=8)
BOOLEAN_ROWS = st.integers(1, 8).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=6)
)


@given(ROW, ROW)
def test_segment_mask_allows_the_same_segment(queries: list[int], keys: list[int]) -> None:
    allowed_BQK = make_segment_mask(torch.tensor([queries]), torch.tensor([keys]))
    assert allowed_BQK.dtype == torch.bool
    assert allowed_BQK[0].tolist() == [[query == key for key in keys] for query in queries]


@given(ROW, ROW)
def test_causal_mask_allows_the_same_and_earlier_positions(queries: list[int], keys: list[int]) -> None:
    allowed_BQK = make_causal_mask(torch.tensor([queries]), torch.tensor([keys]))
    assert allowed_BQK.dtype == torch.bool
    assert allowed_BQK[0].tolist() == [[key <= query for key in keys] for query in queries]


@given(BOOLEAN_ROWS)
def test_queries_without_keys_get_all_keys_and_others_are_unchanged(rows: list[list[bool]]) -> None:
    allowed_BQK = torch.tensor([rows])
    before = allowed_BQK.clone()
    found = unmask_empty_queries(allowed_BQK)
    assert found[0].tolist() == [row if any(row) else [True] * len(row) for row in rows]
    assert torch.equal(allowed_BQK, before)


def test_combined_masks_of_two_rows() -> None:
    segment = torch.tensor([[1, 1, 2, 0], [1, 2, 2, 2]])
    position = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 2]])
    allowed_BQK = make_segment_mask(segment, segment) & make_causal_mask(position, position)
    assert allowed_BQK.int().tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]],
    ]
