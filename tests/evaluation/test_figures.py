"""Tests of line charts: readable for any numbers and names."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.evaluation.figures import (
    CHARACTER_WIDTH,
    LABEL_HEIGHT,
    MARGIN_BOTTOM,
    MARGIN_LEFT,
    MARGIN_TOP,
    Chart,
    Point,
    Series,
    choose_linear_ticks,
    choose_log_ticks,
    render_chart,
    spread_apart,
)

HEIGHT = 330
VALUES = st.lists(st.tuples(*[st.floats(0, 1e6)] * 2), min_size=1, max_size=9)


def make_chart(*lines: list[tuple[float, ...]], logarithmic: bool = False) -> Chart:
    made = [
        Series(f"model <{n}>", [Point(x, f"{x} words", v) for x, v in enumerate(line)]) for n, line in enumerate(lines)
    ]
    return Chart(made, "words & more", "BLEU", "BLEU", logarithmic=logarithmic)


def find_texts(svg: str, kind: str) -> list[ElementTree.Element]:
    """Return the text elements in groups of a class, such as the names of the lines."""
    groups = ElementTree.fromstring(svg).iter("g")
    return [text for group in groups if group.get("class") == kind for text in group.iter("text")]


def find_label_heights(svg: str) -> list[float]:
    """Return the y coordinates of the names of the lines, which grow downwards."""
    return [float(text.attrib["y"]) for text in find_texts(svg, "name")]


@settings(max_examples=25, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=12), st.booleans())
def test_any_numbers_can_be_plotted(lines: list[list[tuple[float, ...]]], logarithmic: bool) -> None:
    """Every line is drawn with its name, and no point is outside the plot."""
    svg = render_chart(make_chart(*lines, logarithmic=logarithmic), height=HEIGHT)
    names = [str(text.text) for text in find_texts(svg, "name")]
    assert sorted(names) == sorted(f"model <{n}>" for n in range(len(lines)))
    for circle in ElementTree.fromstring(svg).iter("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= 720
        assert MARGIN_TOP - 1 <= float(circle.attrib["cy"]) <= HEIGHT - MARGIN_BOTTOM + 1


def test_categories_are_not_joined() -> None:
    """A chart that is not connected has a dot and a bar per point inside the plot, and neither lines nor bands."""
    values = [(1.0, 2.0), (3.0,), *[(5.0, 7.0)] * 15]  # more points than a line has dots
    chart = replace(
        make_chart(values), ticks=tuple(f"model {number}" for number in range(len(values))), connected=False
    )
    root = ElementTree.fromstring(render_chart(chart, height=HEIGHT))
    kinds = [group.get("class") for group in root.iter("g")]
    assert not {"line", "band", "name"} & set(kinds)
    assert kinds.count("range") == len(values)
    xs = [float(circle.attrib["cx"]) for circle in root.iter("circle")]
    assert len(xs) == len(values)
    assert MARGIN_LEFT < xs[0] < xs[-1] < 720


def test_dots_of_several_series_are_side_by_side_with_names_beside_the_plot() -> None:
    """The second series has no point at the last category, and its name is not inside the plot all the same."""
    chart = replace(make_chart([(1.0,), (2.0,)], [(1.0,)]), ticks=("one", "two"), connected=False)
    svg = render_chart(chart, height=HEIGHT)
    xs = [float(circle.attrib["cx"]) for circle in ElementTree.fromstring(svg).iter("circle")]
    assert xs[0] + 6 < xs[2] < xs[1]
    assert all(left > xs[1] for left, *_ in find_label_boxes(svg).values())


def test_small_values_are_drawn_at_their_place_on_a_logarithmic_axis() -> None:
    """Zero is drawn at the lower end of the axis, just below the smallest positive value."""
    svg = render_chart(make_chart([(1.0,), (1e-10,), (1e-20,), (0.0,)], logarithmic=True), height=HEIGHT)
    one, ten, twenty, zero = (float(dot.attrib["cy"]) for dot in ElementTree.fromstring(svg).iter("circle"))
    assert twenty - ten == pytest.approx(ten - one, abs=0.5)
    assert zero - twenty == pytest.approx(0.04 * (twenty - one), abs=0.5)  # the lower end of the axis


@pytest.mark.parametrize("count", [1, 5, 15])
def test_names_do_not_overlap_if_lines_end_together(count: int) -> None:
    """All lines end at the same point: at the bottom, in the middle or at the top."""
    for end in (0.0, 50.0, 100.0):
        flat: list[tuple[float, ...]] = [(end,), (end,)]
        lines: list[list[tuple[float, ...]]] = [[(0.0,), (100.0,)], *[flat] * (count - 1)]
        svg = render_chart(make_chart(*lines), height=HEIGHT)
        found = sorted(find_label_heights(svg))
        assert all(low + LABEL_HEIGHT <= high + 1e-6 for low, high in pairwise(found))
        assert found[-1] <= HEIGHT - MARGIN_BOTTOM + 5


def find_label_boxes(svg: str) -> dict[str, tuple[float, float, float, float]]:
    """Return left, top, right and bottom of every label, by name."""
    found = {}
    for text in find_texts(svg, "name"):
        left, baseline = float(text.attrib["x"]), float(text.attrib["y"])
        found[str(text.text)] = (left, baseline - 10, left + CHARACTER_WIDTH * len(str(text.text)), baseline + 3)
    return found


def test_label_is_beside_the_end_of_its_line() -> None:
    """The line has a single point far left of the end of the other, like a model that was validated once."""
    svg = render_chart(make_chart([(3.9,)], [(3.8 - n / 10,) for n in range(9)], logarithmic=True))
    left, top, *_ = find_label_boxes(svg)["model <0>"]
    dot = next(ElementTree.fromstring(svg).iter("circle"))
    assert 0 < left - float(dot.attrib["cx"]) < 20
    assert abs(top + 6 - float(dot.attrib["cy"])) < 5 * LABEL_HEIGHT


@settings(max_examples=25, deadline=None)
@given(st.lists(VALUES, min_size=2, max_size=6))
def test_labels_overlap_neither_each_other_nor_the_edge(lines: list[list[tuple[float, ...]]]) -> None:
    boxes = list(find_label_boxes(render_chart(make_chart(*lines), width=860, height=HEIGHT)).values())
    assert all(right <= 860 for _, _, right, _ in boxes)
    for one, other in combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] + 0.2 or other[3] <= one[1] + 0.2
        assert apart


def test_long_name_is_shortened_with_a_tooltip() -> None:
    svg = render_chart(Chart([Series("x" * 300, [Point(0, "", (1.0,))])], "x", "y", "y"))
    [box] = find_label_boxes(svg).values()
    assert box[2] <= 720
    assert f"<title>{'x' * 300}</title>" in svg


@given(st.lists(st.floats(-100, 400), max_size=14).map(sorted))
def test_spread_positions_are_apart_and_in_range(wanted: list[float]) -> None:
    found = spread_apart(wanted, 0.0, 300.0)
    assert all(low + LABEL_HEIGHT <= high + 1e-6 for low, high in pairwise(found))
    assert all(-1e-6 <= one <= 300 + 1e-6 for one in found)
    assert spread_apart(found, 0.0, 300.0) == pytest.approx(found)


def test_a_higher_value_is_drawn_higher() -> None:
    tree = ElementTree.fromstring(render_chart(make_chart([(1.0,), (2.0,), (4.0,)])))
    heights = [float(circle.attrib["cy"]) for circle in tree.iter("circle")]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] - heights[1] == pytest.approx((heights[1] - heights[2]) / 2, abs=0.2)


def test_on_a_logarithmic_axis_equal_factors_are_equal_steps() -> None:
    tree = ElementTree.fromstring(render_chart(make_chart([(1.0,), (10.0,), (100.0,)], logarithmic=True)))
    heights = [float(circle.attrib["cy"]) for circle in tree.iter("circle")]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


@pytest.mark.parametrize("ends", [(3.0, 3.9), (1.1, 115.0), (0.02, 5.0), (9.0, 14.0), (1e-9, 1e3)])
def test_logarithmic_axis_has_ticks(ends: tuple[float, float]) -> None:
    """Also if the range contains no power of ten. The title names the scale."""
    svg = render_chart(make_chart([(ends[0],), (ends[1],)], logarithmic=True))
    ticks = [float(text.text or "") for text in find_texts(svg, "y-tick")]
    assert len(ticks) >= 3
    assert any((text.text or "").endswith("(log scale)") for text in find_texts(svg, "title"))


def test_axes_have_titles_and_a_grid() -> None:
    svg = render_chart(make_chart([(1.0,), (2.0,)]))
    assert [text.text for text in find_texts(svg, "title")] == ["words & more", "BLEU"]
    assert svg.count('class="grid"') >= 6


def test_background_lines_have_tooltips() -> None:
    other = Series("<b>", [Point(0, "", (1.0,)), Point(1, "", (2.0,))])
    assert "<title>&lt;b&gt;</title></g>" in render_chart(make_chart([(1.0,), (2.0,)]), behind=[other])


def test_band_is_drawn_if_there_are_several_values() -> None:
    assert 'class="band"' in render_chart(make_chart([(1.0, 3.0), (2.0, 4.0)]))
    assert 'class="band"' not in render_chart(make_chart([(1.0,), (2.0,)]))


def test_chart_is_reproducible_and_self_contained() -> None:
    """Several charts can be on one page: they have no ids, links or style sheets."""
    made = make_chart([(1.0, 2.0), (3.0, 4.0)], [(2.0,), (1.0,)])
    svg = render_chart(made)
    assert svg == render_chart(made)
    assert not any(part in svg for part in (" id=", "href", "url(", "http", "<style", "<defs", "font-family", "#"))


@pytest.mark.parametrize("name", ["$x$ and $y$", "<script>alert(1)</script>", "漢字", "a\x07b\u202e"])
def test_names_are_escaped(name: str) -> None:
    svg = render_chart(Chart([Series(name, [Point(0, "", (1.0,))])], name, name, name, (name,)))
    [label] = find_texts(svg, "name")
    assert label.text == name.replace("\x07", "")
    assert "<script" not in svg


def test_chart_without_points_is_empty() -> None:
    assert render_chart(make_chart()) == ""


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_linear_ticks_are_few_and_in_range(low: float, size: float) -> None:
    ticks = choose_linear_ticks(low, low + size)
    assert 3 <= len(ticks) <= 7
    assert all(low - 1e-6 * size <= tick <= low + size * (1 + 1e-6) for tick in ticks)


@given(st.floats(-12, 12), st.floats(1, 20))
def test_logarithmic_ticks_are_few_and_in_range(low: float, size: float) -> None:
    ticks = choose_log_ticks(low, low + size)
    assert 3 <= len(ticks) <= 12
    assert all(low - 1e-6 <= math.log10(tick) <= low + size + 1e-6 for tick in ticks)
