"""Random dependency trees, and what is true of them by walking their arcs one by one."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st


@st.composite
def heads(draw: st.DrawFn, *, most: int = 12) -> tuple[int, ...]:
    """Any tree over some words: each hangs on one that was hung before it, wherever that stands in the sentence."""
    order = draw(st.permutations(range(1, draw(st.integers(1, most)) + 1)))
    found = [0] * len(order)
    for n, word in enumerate(order[1:], 1):
        found[word - 1] = order[draw(st.integers(0, n - 1))]
    return tuple(found)


def to_root(word: int, heads: Sequence[int]) -> list[int]:
    """The words on the way up, the word itself among them; 0 is above all roots."""
    way = [word]
    while way[-1]:
        way.append(heads[way[-1] - 1])
    return way


def arcs(one: int, other: int, heads: Sequence[int]) -> int:
    """Up from one word to where the way up from the other is met, and down again."""
    up, down = to_root(one, heads), to_root(other, heads)
    meeting = next(word for word in up if word in down)
    return up.index(meeting) + down.index(meeting)
