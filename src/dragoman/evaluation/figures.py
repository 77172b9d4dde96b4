"""Charts as inline SVG, rendered by matplotlib: lines, or dots of categories.

A line shows the mean of several values (such as one per seed), a band shows their range, and the name of a line stands
at its end. Points of categories, such as models, are not connected: each has a bar from the lowest to the highest
value, and the x axis names them. The style sheet is templates/chart.mplstyle. Colours become CSS variables
(templates/style.css), so that a chart follows the light or dark mode of the page. Text is not converted to paths, so it
has the font of the page. The same chart always gives the same SVG, without dates and random ids.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

STYLE = Path(__file__).parent / "templates" / "chart.mplstyle"
GREY, BACKGROUND_GREY = "#667080", "#c4cad2"  # colours of tick labels, and of series in the background
LINE_COLOURS = ("#0068a8", "#cf5200", "#008a62", "#b0508a", "#a87400", "#6f4bb8", "#2a97d4", "#7d5f2a")
CSS_VARIABLES = {GREY: "--soft", "#d9dce1": "--faint", BACKGROUND_GREY: "--behind"} | {  # faint: grid lines
    colour: f"--line{number}" for number, colour in enumerate(LINE_COLOURS)
}
LINE_STYLES = ("-", (0, (3, 1.5)), (0, (1, 1.5)))  # solid, dashed, dotted: the next style once all colours are used
MARGIN_TOP, MARGIN_BOTTOM, MARGIN_LEFT = 12, 52, 60  # pixels around the plot
LABEL_HEIGHT = 14  # pixels from one label to the next
LABEL_GAP = 8  # pixels left and right of a label
CHARACTER_WIDTH = 6.8  # pixels, estimated for bold text, since the browser chooses the font
MIN_TICKS, MAX_TICKS = 3, 6
# Kinds of matplotlib artists, the first part of their group id (see convert_to_inline_svg)
SVG_CLASSES = {"line", "band", "range", "behind", "dots", "name", "title", "y-tick", "grid"}
MAX_DOTS = 12  # lines with more points have no dots
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")  # characters that XML does not allow
HEX_COLOUR = re.compile(r"#[0-9a-f]{6}")
LONG_NUMBER = re.compile(r"\d+\.\d{2,}")
MIN_LOG_VALUE = 1e-30  # smaller values, and 0, are drawn at the lower end of a logarithmic axis
CATEGORY_WIDTH = 0.5  # of the distance between two categories, which the dots of several series share


class Point(NamedTuple):
    """A point of a line: one x, and one value or several, such as one per seed."""

    x: float
    label: str  # the x in words, such as "17 to 20 words"
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


class Series(NamedTuple):
    """A line of a chart: its name and its points, by increasing x."""

    name: str
    points: list[Point]


@dataclass(frozen=True)
class Chart:
    """The data of a chart. `low_is_good` does not change the chart; compare/questions.py uses it to rank series."""

    series: list[Series]
    x_title: str
    y_title: str
    unit: str  # of y, for sentences about the chart in a report
    ticks: tuple[str, ...] = ()  # labels of x = 0, 1, 2, ...; if empty, x is a number
    logarithmic: bool = False
    low_is_good: bool = False
    connected: bool = True  # by lines; False if the x are categories, such as models, so that there are only dots


def render_chart(chart: Chart, *, width: int = 720, height: int = 330, behind: Sequence[Series] = ()) -> str:
    """Return the chart as SVG, with the series in `behind` in grey and without names; "" if there are no points."""
    all_series = [*chart.series, *behind]
    if not any(series.points for series in all_series):
        return ""
    import matplotlib
    from matplotlib.figure import Figure

    height = max(height, MARGIN_TOP + MARGIN_BOTTOM + LABEL_HEIGHT * len(chart.series))
    # Names get at most 40 % of the width. Those of `behind` count too, which aligns charts of parts of the series.
    is_named = chart.connected or len(chart.series) > 1
    name_length = max(len(series.name) for series in all_series) if is_named else 0
    name_length = min(name_length, int(0.4 * width / CHARACTER_WIDTH))
    right = width - 2 * LABEL_GAP - name_length * CHARACTER_WIDTH
    tooltips: dict[str, list[str]] = {}  # group id -> tooltips (see convert_to_inline_svg)
    with matplotlib.rc_context(fname=str(STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # missing in matplotlib's font, not in the browser's
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, frameon=False)  # one pixel is one point
        size = (right - MARGIN_LEFT) / width, (height - MARGIN_TOP - MARGIN_BOTTOM) / height
        axes = figure.add_axes((MARGIN_LEFT / width, MARGIN_BOTTOM / height, *size))
        draw_axes(axes, chart, all_series)
        for number, series in enumerate(behind):
            xs, means = [point.x for point in series.points], [point.mean for point in series.points]
            axes.plot(xs, means, color=BACKGROUND_GREY, linewidth=1.2, gid=f"behind:{number}")
            tooltips[f"behind:{number}"] = [series.name]
        lines = []
        for number, series in enumerate(chart.series):
            shift = 0.0 if chart.connected else CATEGORY_WIDTH * ((number + 0.5) / len(chart.series) - 0.5)
            lines.append(draw_series(axes, series, number, connected=chart.connected, shift=shift))
            tooltips[f"dots:{number}"] = [f"{series.name}, {point.label}: {point.mean:.4g}" for point in series.points]
            tooltips[f"name:{number}"] = [series.name]
        if is_named:
            names = [name if len(name) <= name_length else f"{name[: name_length - 1]}…" for name, _ in chart.series]
            draw_labels(axes, lines, names, connected=chart.connected)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return convert_to_inline_svg(svg.getvalue(), f"{chart.y_title} by {chart.x_title}", tooltips)


def draw_axes(axes: Axes, chart: Chart, all_series: Sequence[Series]) -> None:
    """Set limits, ticks, grid and titles of both axes."""
    xs = [point.x for series in all_series for point in series.points]
    values = [value for series in all_series for point in series.points for value in point.values]
    low, high = min(values), max(values)  # the axis extends 4 % beyond them; equal values get a fixed margin
    if chart.logarithmic:
        low = min((value for value in values if value >= MIN_LOG_VALUE), default=MIN_LOG_VALUE)
        high = max(low, high)
        margin = (high / low) ** 0.04 if high > low * (1 + 1e-9) else 1.1
        low, high = low / margin, high * margin
        axes.set_yscale("log")
        y_ticks = choose_log_ticks(math.log10(low), math.log10(high))
    else:  # the axis starts at 0, unless all values are so far from 0 that their differences would not be visible
        margin = 0.04 * (high - low) if high - low > 1e-9 * max(abs(low), abs(high), 1.0) else 1.0
        low, high = (low - margin if low > 0.6 * high else min(0.0, low)), high + margin
        y_ticks = choose_linear_ticks(low, high)
    if chart.connected:
        axes.set_xlim(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1)
    else:
        axes.set_xlim(min(xs) - 0.5, max(xs) + 0.5)
    axes.set_ylim(low, high)
    x_ticks: Sequence[float] = range(len(chart.ticks)) if chart.ticks else choose_linear_ticks(*axes.get_xlim())
    axes.set_xticks(x_ticks, [""] * len(x_ticks))
    axes.set_yticks(y_ticks, [format_tick(tick) for tick in y_ticks])
    axes.minorticks_off()
    for x, name in zip(x_ticks, chart.ticks or map(format_tick, x_ticks), strict=True):
        # Draw labels line by line, since matplotlib would align the lines by the width of its own font
        for row, text in enumerate(name.split("\n")):
            position = (x, MARGIN_BOTTOM - 17 - 12 * row)  # baselines are 12 pixels apart, the first 17 below the axis
            axes.annotate(text, position, xycoords=("data", "figure pixels"), ha="center", va="baseline", color=GREY)
    axes.grid(True, gid="grid")
    for label in axes.get_yticklabels():
        label.set_gid("y-tick")
    axes.set_xlabel(chart.x_title, labelpad=34, gid="title")  # below the two lines of tick labels
    axes.set_ylabel(f"{chart.y_title} (log scale)" if chart.logarithmic else chart.y_title, gid="title")


def choose_linear_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between low and high, from MIN_TICKS to about MAX_TICKS of them."""
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(MAX_TICKS, steps=[1, 2, 2.5, 5, 10], min_n_ticks=MIN_TICKS).tick_values(low, high)
    tolerance = 1e-9 * (high - low)  # for rounding errors
    return [float(tick) for tick in ticks if low - tolerance <= tick <= high + tolerance]


def choose_log_ticks(low: float, high: float) -> list[float]:
    """Return ticks between 10**low and 10**high: powers of ten or, if these are few, also their multiples by 2 and 5.

    A range with fewer than MIN_TICKS of these, such as 3.0 to 3.9, gets linear ticks.
    """
    powers = range(math.floor(low), math.ceil(high) + 1)
    step = max(1, len(powers) // MAX_TICKS)
    for factors in ((1,), (1, 2, 5)):
        ticks = [factor * 10.0**power for power in powers if power % step == 0 for factor in factors]
        ticks = [tick for tick in ticks if low - 1e-9 <= math.log10(tick) <= high + 1e-9]
        if len(ticks) >= MIN_TICKS:
            return ticks
    return choose_linear_ticks(10**low, 10**high)


def format_tick(value: float) -> str:
    """Return a number as short text: 20000 is 20k, 0.00002 is 2e-5."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.0e}".replace("e-0", "e-")


def draw_series(axes: Axes, series: Series, number: int, *, connected: bool, shift: float = 0.0) -> Line2D:
    """Draw the means of the points and the ranges of their values, and return the line or the dots of the means.

    Joined points are a line in a band, with dots if there are few. Others are dots, each on a bar, moved by `shift`.
    """
    is_logarithmic, floor = axes.get_yscale() == "log", axes.get_ylim()[0]
    xs = [point.x + shift for point in series.points]
    rows = [(point.mean, min(point.values), max(point.values)) for point in series.points]
    means, lower, upper = (
        [max(value, floor) if is_logarithmic else value for value in column] for column in zip(*rows, strict=True)
    )
    colour = LINE_COLOURS[number % len(LINE_COLOURS)]
    style = LINE_STYLES[number // len(LINE_COLOURS) % len(LINE_STYLES)]
    if not connected:
        for x, low, high in zip(xs, lower, upper, strict=True):
            axes.plot([x, x], [low, high], color=colour, alpha=0.4, linewidth=5, gid="range")
    elif any(len(point.values) > 1 for point in series.points):
        axes.fill([*xs, *reversed(xs)], [*upper, *reversed(lower)], color=colour, alpha=0.16, linewidth=0, gid="band")
    dots = []
    if len(xs) <= MAX_DOTS or not connected:
        dots = axes.plot(xs, means, color=colour, linestyle="none", marker="o", markersize=6, gid=f"dots:{number}")
    [line] = axes.plot(xs, means, color=colour, linewidth=2, linestyle=style, gid="line") if connected else dots
    return line


def draw_labels(axes: Axes, lines: Sequence[Line2D], names: Sequence[str], *, connected: bool) -> None:
    """Write the name of each line to the right of its end, moved up or down so that names do not overlap.

    Names of dots that are not connected are to the right of the plot, at the height of the last dot.
    """
    ends = [axes.transData.transform(np.asarray(line.get_xydata())[-1]) for line in lines]
    order = sorted(range(len(lines)), key=lambda number: float(ends[number][1]))
    plot = axes.get_window_extent()
    label_ys = spread_apart([ends[number][1] for number in order], plot.y0, plot.y1)
    for number, label_y in zip(order, label_ys, strict=True):
        colour, (x, y) = lines[number].get_color(), ends[number]
        connector: dict[str, Any] | None = None
        if connected:
            connector = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "relpos": (0, 0.5), "shrinkB": 0}
        else:
            x = plot.x1
        style: dict[str, Any] = {"color": colour, "weight": "bold", "gid": f"name:{number}"}
        baseline = x + LABEL_GAP, label_y - 4  # 4 pixels: half the height of a letter
        axes.annotate(names[number], (x, y), baseline, "figure pixels", arrowprops=connector, **style)


def spread_apart(wanted: Sequence[float], low: float, high: float, gap: float = LABEL_HEIGHT) -> list[float]:
    """Return positions between low and high at least `gap` apart and close to the wanted ones, which are sorted.

    Subtracting i * gap from position i turns "at least `gap` apart" into "not decreasing". The cumulative maximum from
    the left and the cumulative minimum from the right are both not decreasing, and so is their mean.
    """
    gaps = gap * np.arange(len(wanted))
    shifted = np.array(wanted) - gaps
    upper, lower = np.maximum.accumulate(shifted), np.minimum.accumulate(shifted[::-1])[::-1]
    positions: list[float] = (np.clip((upper + lower) / 2, low, high - gap * (len(wanted) - 1)) + gaps).tolist()
    return positions


def convert_to_inline_svg(text: str, label: str, tooltips: Mapping[str, Sequence[str]]) -> str:
    """Return matplotlib's SVG for use inside a page: without ids, links and namespaces, which could clash.

    matplotlib writes the group id (gid) of an artist, such as "line" or "dots:3", as the id of a group. The part before
    the colon becomes the class of the group. Colours become CSS variables and dots become circles. `tooltips` has the
    texts for dots, lines and names, by group id. `label` is the text for screen readers.
    """
    root = ElementTree.fromstring(CONTROL_CHARACTERS.sub("", text))
    for element in list(root.iter()):
        element.tag = element.tag.rpartition("}")[2]
        element.text, element.tail = (part if part and part.strip() else None for part in (element.text, element.tail))
        for child in [child for child in element if child.tag.endswith(("}defs", "}metadata"))]:
            element.remove(child)
        element.attrib.pop("clip-path", None)
        if "style" in element.attrib:  # the page has colours and a font of its own
            style = re.sub(r"font-family: [^;]*;? ?", "", element.attrib["style"])
            element.set("style", HEX_COLOUR.sub(lambda found: f"var({CSS_VARIABLES.get(found[0], '--ink')})", style))
        for name in {"d", "x", "y", "transform"} & element.attrib.keys():
            element.set(name, LONG_NUMBER.sub(lambda found: f"{float(found[0]):.1f}", element.attrib[name]))
        if element.tag == "use":  # a marker
            element.tag, (x, y, style) = "circle", (element.get(name, "") for name in ("x", "y", "style"))
            element.attrib = {"class": "dot", "cx": x, "cy": y, "r": "3", "style": style}
    for group in root.iter("g"):
        gid = group.attrib.pop("id", "")
        if (kind := gid.partition(":")[0]) in SVG_CLASSES:
            group.set("class", kind)
        shapes = {"behind": [group], "dots": list(group.iter("circle")), "name": list(group.iter("text"))}.get(kind, [])
        for shape, tooltip in zip(shapes, tooltips.get(gid, [])):
            ElementTree.SubElement(shape, "title").text = tooltip
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label}
    svg = ElementTree.tostring(root, encoding="unicode")
    return CONTROL_CHARACTERS.sub("", svg)  # labels and tooltips may contain them too
