"""Symmetrisation lies between intersection and union."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dragoman.smt.symmetrization import SYMMETRIZATIONS, combine_links

I, J = 5, 6
FORWARD = st.lists(st.integers(-1, I - 1), min_size=J, max_size=J).map(
    lambda a: [(i, j) for j, i in enumerate(a) if i >= 0]
)
BACKWARD = st.lists(st.integers(-1, J - 1), min_size=I, max_size=I).map(
    lambda a: [(i, j) for i, j in enumerate(a) if j >= 0]
)


@given(FORWARD, BACKWARD)
def test_all_lie_between_intersection_and_union(
    forward: list[tuple[int, int]], backward: list[tuple[int, int]]
) -> None:
    found = {name: set(combine_links(forward, backward, name, (I, J))) for name in SYMMETRIZATIONS}
    assert found["intersection"] == set(forward) & set(backward)
    assert found["union"] == set(forward) | set(backward)
    for links in found.values():
        assert found["intersection"] <= links <= found["union"]
    assert found["grow-diag"] <= found["grow-diag-final-and"] & found["grow-diag-final"]


def test_grow_diag_by_hand() -> None:
    """The intersection is 0-0; 1-1 beside it is in the union and links two new words; 3-3 is far from all links."""
    forward, backward = [(0, 0), (1, 1), (3, 3)], [(0, 0), (1, 2)]
    assert combine_links(forward, backward, "grow-diag", (4, 4)) == [(0, 0), (1, 1), (1, 2)]
    assert combine_links(forward, backward, "grow", (4, 4)) == [(0, 0)]
    assert combine_links(forward, backward, "grow-diag-and", (4, 4)) == [(0, 0), (1, 1)]
    assert combine_links(forward, backward, "grow-diag-final", (4, 4)) == [(0, 0), (1, 1), (1, 2), (3, 3)]
