"""Line charts as inline SVG: the mean of several values as a line, all of them as a band, names beside the lines.

Colours are CSS variables (--line0, --line1, ...; shell.py), so that a chart is at home on light and on dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

COLOURS = 8
DASHES = ("", "6 3", "2 3")  # for the ninth line and on, the seventeenth and on
TOP, BOTTOM, LEFT = 12, 52, 56
LABEL = 14  # pixels between names beside lines


class Point(NamedTuple):
    x: float
    said: str  # the x in words, such as "17 to 20 words"
    values: tuple[float, ...]  # such as one of each seed

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
    """Numbers to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, *, logarithmic: bool = False) -> None:
        self.turn = (lambda v: math.log10(max(v, 1e-12))) if logarithmic else float
        self.low, self.high = self.turn(low), self.turn(high)
        self.start, self.end = start, end
        self.logarithmic = logarithmic

    def __call__(self, value: float) -> float:
        share = (self.turn(value) - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        return decades(self.low, self.high) if self.logarithmic else round_numbers(self.low, self.high)


def round_numbers(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9) / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten, few of them; where there are hardly any, also twice and five times those."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    factors = (1,) if high - low > 2 else (1, 2, 5)
    every = max(1, len(powers) // 6)
    found = [factor * 10.0**power for power in powers if power % every == 0 for factor in factors]
    return [value for value in found if low - 1e-9 <= math.log10(value) <= high + 1e-9]


def chart(figure: Figure, *, width: int = 720, height: int = 330, behind: Sequence[Line] = (), room: int = 190) -> str:
    """The figure's lines in colour; those `behind` in grey, for company. `room` is for the names at the right."""
    every = [point for line in (*figure.lines, *behind) for point in line.points]
    if not every:
        return ""
    x = Scale(min(p.x for p in every), max(p.x for p in every), LEFT, width - room)
    values = [value for point in every for value in point.values]
    low, high = (min(values), max(values)) if figure.logarithmic else limits(min(values), max(values))
    y = Scale(low, high, height - BOTTOM, TOP, logarithmic=figure.logarithmic)
    parts = [*axes(figure, x, y, width - room, height)]
    parts += [f'<path class="behind" d="{path(line.points, x, y)}"/>' for line in behind]
    for number, line in enumerate(figure.lines):
        parts += drawn(line, number, x, y)
    parts += names(figure.lines, y, width - room + 8, height)
    label = escape(f"{figure.y_title} by {figure.x_title}")
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def limits(low: float, high: float) -> tuple[float, float]:
    """From 0, unless all lies so far from it that nothing could be told apart."""
    slack = 0.04 * (high - low) or 1.0
    return (low - slack if low > 0.6 * high else min(0.0, low)), high + slack


def axes(figure: Figure, x: Scale, y: Scale, right: float, height: int) -> list[str]:
    foot = height - BOTTOM
    parts = []
    for tick in y.ticks():
        at = y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{said(tick)}</text>')
    ticks = list(enumerate(figure.ticks)) if figure.ticks else [(tick, said(tick)) for tick in x.ticks()]
    for place, name in ticks:
        for row, word in enumerate(name.split("\n")):
            parts.append(
                f'<text x="{x(place):.1f}" y="{foot + 15 + 12 * row}" text-anchor="middle">{escape(word)}</text>'
            )
    middle = (LEFT + right) / 2
    parts.append(
        f'<text class="title" x="{middle}" y="{height - 6}" text-anchor="middle">{escape(figure.x_title)}</text>'
    )
    turned = f'transform="rotate(-90 12 {foot / 2})"'
    parts.append(
        f'<text class="title" x="12" y="{foot / 2}" text-anchor="middle" {turned}>{escape(figure.y_title)}</text>'
    )
    return parts


def said(value: float) -> str:
    """A number as short as it can be."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.0e}".replace("e-0", "e-")


def path(points: Sequence[Point], x: Scale, y: Scale) -> str:
    return "M" + " L".join(f"{x(p.x):.1f} {y(p.mean):.1f}" for p in points)


def drawn(line: Line, number: int, x: Scale, y: Scale) -> list[str]:
    """A band from the lowest to the highest value, the mean as a line, and dots where points are few."""
    colour = f"--c: var(--line{number % COLOURS})"
    dash = DASHES[number // COLOURS % len(DASHES)]
    parts = []
    if any(len(p.values) > 1 for p in line.points):
        upper = [f"{x(p.x):.1f} {y(max(p.values)):.1f}" for p in line.points]
        lower = [f"{x(p.x):.1f} {y(min(p.values)):.1f}" for p in reversed(line.points)]
        parts.append(f'<path class="band" style="{colour}" d="M{" L".join(upper + lower)} Z"/>')
    parts.append(f'<path class="line" style="{colour}" stroke-dasharray="{dash}" d="{path(line.points, x, y)}"/>')
    for point in line.points if len(line.points) <= 12 else []:
        tip = escape(f"{line.name}, {point.said}: {point.mean:.4g}")
        parts.append(
            f'<circle class="dot" style="{colour}" cx="{x(point.x):.1f}" cy="{y(point.mean):.1f}" r="3">'
            f"<title>{tip}</title></circle>"
        )
    return parts


def names(lines: Sequence[Line], y: Scale, left: float, height: int) -> list[str]:
    """Each name beside the end of its line, pushed apart where ends lie close."""
    order = sorted(range(len(lines)), key=lambda number: y(lines[number].points[-1].mean))
    places: list[float] = []
    for number in order:
        places.append(max(y(lines[number].points[-1].mean) + 4, places[-1] + LABEL if places else TOP + 4))
    over = max(0.0, places[-1] - (height - BOTTOM + 4)) if places else 0.0
    for index in range(len(places) - 1, -1, -1):  # what was pushed out below comes back up, pushing others
        ceiling = height - BOTTOM + 4 - LABEL * (len(places) - 1 - index)
        places[index] = min(places[index], ceiling) if over else places[index]
    return [
        f'<text class="name" style="--c: var(--line{number % COLOURS})" x="{left}" y="{place:.1f}">'
        f"{escape(lines[number].name)}</text>"
        for number, place in zip(order, places, strict=True)
    ]
