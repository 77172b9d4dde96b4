"""Charts that can be read, whatever the numbers."""

from __future__ import annotations

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.pages.chart import BOTTOM, LABEL, TOP, Figure, Line, Point, chart, decades, round_numbers

HEIGHT = 330
VALUES = st.lists(st.tuples(*[st.floats(0, 1e6)] * 2), min_size=1, max_size=9)


def figure(*lines: list[tuple[float, ...]], logarithmic: bool = False) -> Figure:
    made = [
        Line(f"model <{n}>", [Point(x, f"{x} words", v) for x, v in enumerate(line)]) for n, line in enumerate(lines)
    ]
    return Figure(made, "words & more", "BLEU", "BLEU", logarithmic=logarithmic)


def places(svg: str) -> list[float]:
    """Where the names of the lines stand, from above."""
    return [float(text.attrib["y"]) for text in ElementTree.fromstring(svg).iter("text") if text.get("class") == "name"]


@given(st.lists(VALUES, min_size=1, max_size=12), st.booleans())
def test_any_numbers_make_a_chart(lines: list[list[tuple[float, ...]]], logarithmic: bool) -> None:
    """It is whole, every line is there by name, and nothing is drawn outside."""
    tree = ElementTree.fromstring(chart(figure(*lines, logarithmic=logarithmic), height=HEIGHT))
    names = [text.text for text in tree.iter("text") if text.get("class") == "name"]
    assert sorted(map(str, names)) == sorted(f"model <{n}>" for n in range(len(lines)))
    for circle in tree.iter("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= 720
        assert TOP - 1 <= float(circle.attrib["cy"]) <= HEIGHT - BOTTOM + 1


@pytest.mark.parametrize("count", [1, 5, 15])
def test_names_do_not_lie_on_one_another(count: int) -> None:
    """Not even where all lines end at one place, at the top, in the middle or at the bottom."""
    for end in (0.0, 50.0, 100.0):
        svg = chart(figure([(0.0,), (100.0,)], *([[(end,), (end,)]] * (count - 1))), height=HEIGHT)
        found = sorted(places(svg))
        assert all(low + LABEL <= high + 1e-6 for low, high in pairwise(found))
        assert found[-1] <= HEIGHT - BOTTOM + 5


def test_a_higher_value_is_drawn_higher() -> None:
    tree = ElementTree.fromstring(chart(figure([(1.0,), (2.0,), (4.0,)])))
    heights = [float(circle.attrib["cy"]) for circle in tree.iter("circle")]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] - heights[1] == pytest.approx((heights[1] - heights[2]) / 2, abs=0.2)


def test_on_a_logarithmic_axis_equal_factors_are_equal_steps() -> None:
    tree = ElementTree.fromstring(chart(figure([(1.0,), (10.0,), (100.0,)], logarithmic=True)))
    heights = [float(circle.attrib["cy"]) for circle in tree.iter("circle")]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


def test_the_band_is_there_when_seeds_differ() -> None:
    assert 'class="band"' in chart(figure([(1.0, 3.0), (2.0, 4.0)]))
    assert 'class="band"' not in chart(figure([(1.0,), (2.0,)]))


def test_nothing_to_draw_is_no_chart() -> None:
    assert chart(figure()) == ""


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_few_and_inside(low: float, size: float) -> None:
    ticks = round_numbers(low, low + size)
    assert 1 <= len(ticks) <= 7
    assert all(low - 1e-6 * size <= tick <= low + size * (1 + 1e-6) for tick in ticks)


@given(st.floats(-12, 12), st.floats(1, 20))
def test_decades_are_few_and_inside(low: float, size: float) -> None:
    ticks = decades(low, low + size)
    assert 1 <= len(ticks) <= 12
    assert all(low - 1e-6 <= math.log10(tick) <= low + size + 1e-6 for tick in ticks)
