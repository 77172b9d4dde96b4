"""Line charts as inline SVG: the mean of several values as a line, their range as a band, a label at each line's end.

Colours are CSS variables (--line0, --line1, ...; shell.py), so a chart follows the page's light or dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import NamedTuple

COLOURS = 8
DASHES = ("", "6 3", "2 3")  # for the ninth line and on, the seventeenth and on
TOP, BOTTOM, LEFT = 12, 52, 60  # pixels around the plot
LABEL = 14  # pixels from one label's baseline to the next
LABEL_GAP = 8  # pixels between the end of a line and its label
CHARACTER = 6.8  # pixels, about the width of a bold character at 11 pixels
FEWEST_TICKS = 3


class Point(NamedTuple):
    x: float
    label: str  # the x in words, such as "17 to 20 words"
    values: tuple[float, ...]  # such as one per seed

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


class Line(NamedTuple):
    name: str
    points: list[Point]


@dataclass(frozen=True)
class Figure:
    lines: list[Line]
    x_title: str
    y_title: str
    unit: str  # of a value, in a sentence
    ticks: tuple[str, ...] = ()  # names of x = 0, 1, 2, ...; none: x is a number
    logarithmic: bool = False
    low_is_good: bool = False


class Scale:
    """Map numbers to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, *, logarithmic: bool = False) -> None:
        self.transform = (lambda v: math.log10(max(v, 1e-12))) if logarithmic else float
        self.low, self.high = self.transform(low), self.transform(high)
        self.start, self.end = start, end
        self.logarithmic = logarithmic

    def __call__(self, value: float) -> float:
        share = (self.transform(value) - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        return logarithmic_ticks(self.low, self.high) if self.logarithmic else linear_ticks(self.low, self.high)


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return the multiples of 1, 2, 2.5 or 5 times a power of ten between low and high: three to about `most`."""
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9) / most))
    step = next(step * factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (step * factor) <= most)
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def logarithmic_ticks(low: float, high: float) -> list[float]:
    """Return ticks between 10**low and 10**high: powers of ten, with 2 and 5 times those where powers are few.

    A range that holds fewer than three of either, such as 3.0 to 3.9, gets linear ticks.
    """
    powers = range(math.floor(low), math.ceil(high) + 1)
    every = max(1, len(powers) // 6)
    for factors in ((1,), (1, 2, 5)):
        found = [factor * 10.0**power for power in powers if power % every == 0 for factor in factors]
        found = [value for value in found if low - 1e-9 <= math.log10(value) <= high + 1e-9]
        if len(found) >= FEWEST_TICKS:
            return found
    return linear_ticks(10**low, 10**high)


def render_chart(figure: Figure, *, width: int = 720, height: int = 330, behind: Sequence[Line] = ()) -> str:
    """Return the figure as SVG: its lines in colour, the lines `behind` in grey, unlabelled."""
    points = [point for line in (*figure.lines, *behind) for point in line.points]
    if not points:
        return ""
    height = max(height, TOP + BOTTOM + LABEL * len(figure.lines))
    longest = max(text_width(line.name) for line in (*figure.lines, *behind))  # so that panels have the same axes
    right = width - 2 * LABEL_GAP - min(longest, 0.4 * width)
    x = Scale(min(p.x for p in points), max(p.x for p in points), LEFT, right)
    values = [value for point in points for value in point.values]
    low, high = y_limits(min(values), max(values), logarithmic=figure.logarithmic)
    y = Scale(low, high, height - BOTTOM, TOP, logarithmic=figure.logarithmic)
    parts = [*render_axes(figure, x, y, right, height)]
    parts += [
        f'<path class="behind" d="{path_of(line.points, x, y)}"><title>{escape(line.name)}</title></path>'
        for line in behind
    ]
    for number, line in enumerate(figure.lines):
        parts += render_line(line, number, x, y)
    parts += render_labels(figure.lines, x, y, width)
    label = escape(f"{figure.y_title} by {figure.x_title}")
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def y_limits(low: float, high: float, *, logarithmic: bool) -> tuple[float, float]:
    """Return the ends of the y axis. A linear one starts at 0, unless the values lie too far from it to tell apart."""
    if logarithmic:
        slack = (high / max(low, 1e-12)) ** 0.04 if high > low > 0 else 1.1
        return low / slack, high * slack
    slack = 0.04 * (high - low) or 1.0
    return (low - slack if low > 0.6 * high else min(0.0, low)), high + slack


def render_axes(figure: Figure, x: Scale, y: Scale, right: float, height: int) -> Iterator[str]:
    """Yield the grid, the numbers on both axes and the axis titles."""
    foot, middle = height - BOTTOM, (TOP + height - BOTTOM) / 2
    for tick in y.ticks():
        at = y(tick)
        yield f'<line class="grid" x1="{LEFT}" x2="{right:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="y-tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{format_tick(tick)}</text>'
    ticks = list(enumerate(figure.ticks)) if figure.ticks else [(tick, format_tick(tick)) for tick in x.ticks()]
    for position, name in ticks:
        at = x(position)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{foot}"/>'
        for row, words in enumerate(name.split("\n")):
            yield f'<text x="{at:.1f}" y="{foot + 17 + 12 * row}" text-anchor="middle">{escape(words)}</text>'
    yield f'<path class="axis" d="M{LEFT} {TOP} V{foot} H{right:.1f}"/>'
    y_title = f"{figure.y_title} (log scale)" if figure.logarithmic else figure.y_title
    for title, at_x, at_y, turned in (
        (figure.x_title, (LEFT + right) / 2, height - 6.0, ""),
        (y_title, 12.0, middle, f' transform="rotate(-90 12 {middle})"'),
    ):
        yield f'<text class="title" x="{at_x:.1f}" y="{at_y}" text-anchor="middle"{turned}>{escape(title)}</text>'


def format_tick(value: float) -> str:
    """Write a number as short as it can be."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.0e}".replace("e-0", "e-")


def path_of(points: Sequence[Point], x: Scale, y: Scale) -> str:
    return "M" + " L".join(f"{x(p.x):.1f} {y(p.mean):.1f}" for p in points)


def render_line(line: Line, number: int, x: Scale, y: Scale) -> Iterator[str]:
    """Yield a band from the lowest to the highest value, the mean as a line, and dots where points are few."""
    colour = f"--c: var(--line{number % COLOURS})"
    dash = DASHES[number // COLOURS % len(DASHES)]
    if any(len(p.values) > 1 for p in line.points):
        upper = [f"{x(p.x):.1f} {y(max(p.values)):.1f}" for p in line.points]
        lower = [f"{x(p.x):.1f} {y(min(p.values)):.1f}" for p in reversed(line.points)]
        yield f'<path class="band" style="{colour}" d="M{" L".join(upper + lower)} Z"/>'
    yield f'<path class="line" style="{colour}" stroke-dasharray="{dash}" d="{path_of(line.points, x, y)}"/>'
    for point in line.points if len(line.points) <= 12 else []:
        tip = escape(f"{line.name}, {point.label}: {point.mean:.4g}")
        circle = f'cx="{x(point.x):.1f}" cy="{y(point.mean):.1f}" r="3"'
        yield f'<circle class="dot" style="{colour}" {circle}><title>{tip}</title></circle>'


# Labels: the names of the lines, each near the end of its line


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


Path = Sequence[tuple[float, float]]  # of a line, in pixels


def text_width(text: str) -> float:
    return CHARACTER * len(text)


def render_labels(lines: Sequence[Line], x: Scale, y: Scale, width: int) -> Iterator[str]:
    """Yield the labels. One that was moved away from its line's end is tied to it by a thin line."""
    paths = [[(x(p.x), y(p.mean)) for p in line.points] for line in lines]
    room = int((width - x.end - 2 * LABEL_GAP + 0.5) / CHARACTER)
    names = [line.name if len(line.name) <= room else f"{line.name[: room - 1]}…" for line in lines]
    for number, (left, baseline) in place_labels(paths, names, right=x.end, foot=y.start).items():
        colour = f"--c: var(--line{number % COLOURS})"
        end_x, end_y = paths[number][-1]
        if left - end_x > 2 * LABEL_GAP or abs(baseline - 4 - end_y) > LABEL / 2:
            ends = f'x1="{end_x:.1f}" y1="{end_y:.1f}" x2="{left - 2:.1f}" y2="{baseline - 4:.1f}"'
            yield f'<line class="leader" style="{colour}" {ends}/>'
        whole = f"<title>{escape(lines[number].name)}</title>" if names[number] != lines[number].name else ""
        at = f'x="{left:.1f}" y="{baseline:.1f}"'
        yield f'<text class="name" style="{colour}" {at}>{escape(names[number])}{whole}</text>'


def place_labels(
    paths: Sequence[Path], names: Sequence[str], *, right: float, foot: float
) -> dict[int, tuple[float, float]]:
    """Return the left end and the baseline of each label, by the number of its line.

    A label whose text fits into the plot stands there, right of its line's end, off the lines where possible. The
    others stand in a column right of the plot.
    """
    ends = [path[-1] for path in paths]
    inside = [n for n, (x, _) in enumerate(ends) if x + LABEL_GAP + text_width(names[n]) <= right]
    column = sorted((n for n in range(len(ends)) if n not in inside), key=lambda n: ends[n][1])
    baselines = spread_apart([ends[n][1] + 4 for n in column], TOP + 4, foot + 4)
    places = {n: (right + LABEL_GAP, baseline) for n, baseline in zip(column, baselines, strict=True)}
    taken: list[Box] = []
    steps = sorted(range(-30, 31), key=lambda step: (abs(step), step))
    for n in inside:
        left, wanted = ends[n][0] + LABEL_GAP, ends[n][1] + 4
        options = [wanted + LABEL / 2 * step for step in steps]
        boxes = [Box(left - 2, at - 11, left + text_width(names[n]), at + 3) for at in options]
        boxes = [box for box in boxes if box.top >= TOP - 8 and box.bottom <= foot + 8]
        boxes = [box for box in boxes if not any(box.overlaps(other) for other in taken)] or boxes
        box = next((box for box in boxes if not any(crosses(path, box) for path in paths)), boxes[0])
        taken.append(box)
        places[n] = (left, box.bottom - 3)
    return places


def crosses(path: Path, box: Box) -> bool:
    """Say whether a line runs through a box."""
    for (x0, y0), (x1, y1) in pairwise([path[0], *path]):
        steps = max(1, int((x1 - x0) / 3))
        for step in range(steps + 1):
            x, y = x0 + (x1 - x0) * step / steps, y0 + (y1 - y0) * step / steps
            if box.left < x < box.right and box.top < y < box.bottom:
                return True
    return False


def spread_apart(wanted: Sequence[float], low: float, high: float, gap: float = LABEL) -> list[float]:
    """Return positions between low and high, at least `gap` apart and as near to the wanted ones (sorted) as can be.

    Neighbours that lie too close move as one block around their mean (isotonic regression).
    """
    blocks: list[tuple[float, int]] = []  # mean of the positions less what the gaps add, and how many they are
    for index, position in enumerate(wanted):
        blocks.append((position - index * gap, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (one, n), (other, m) = blocks[-2:]
            blocks[-2:] = [((one * n + other * m) / (n + m), n + m)]
    moved = [mean for mean, count in blocks for _ in range(count)]
    last = high - gap * (len(wanted) - 1)
    return [min(max(position, low), last) + index * gap for index, position in enumerate(moved)]
