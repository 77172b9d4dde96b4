"""Random dependency trees, and reference implementations of depth and distance that follow the arcs one by one."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st


@st.composite
def heads(draw: st.DrawFn, *, most: int = 12) -> tuple[int, ...]:
    """Draw the heads of a random tree: in a random order of words, the head of each word is an earlier one."""
    order = draw(st.permutations(range(1, draw(st.integers(1, most)) + 1)))
    found = [0] * len(order)
    for n, word in enumerate(order[1:], 1):
        found[word - 1] = order[draw(st.integers(0, n - 1))]
    return tuple(found)


def to_root(word: int, heads: Sequence[int]) -> list[int]:
    """Return the words on the path from a word, inclusive, to the root, and 0, which is above all roots."""
    way = [word]
    while way[-1]:
        way.append(heads[way[-1] - 1])
    return way


def arcs(one: int, other: int, heads: Sequence[int]) -> int:
    """Return the number of arcs between two words, through their lowest common ancestor."""
    up, down = to_root(one, heads), to_root(other, heads)
    meeting = next(word for word in up if word in down)
    return up.index(meeting) + down.index(meeting)
