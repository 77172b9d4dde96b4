"""TextSet behaves like a set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dragoman.data.cleaning import TextSet


@given(st.lists(st.tuples(st.text(max_size=2), st.text(max_size=2))))
def test_text_set_behaves_like_a_set_of_tuples(items: list[tuple[str, str]]) -> None:
    seen, known = TextSet(), set()
    for item in items:
        assert seen.add(*item) == (item not in known)
        known.add(item)
    assert seen.count == len(known)


def test_text_set_stays_correct_and_small_while_it_grows() -> None:
    seen, count = TextSet(), 20_000
    assert all(seen.add(str(n)) for n in range(count))
    assert not any(seen.add(str(n)) for n in range(count))
    assert seen.table.itemsize * len(seen.table) <= 32 * count
