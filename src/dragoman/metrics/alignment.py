"""Word alignments against gold ones that people made: alignment error rate, precision and recall (Och and Ney 2003).

Text has a line for each pair, in Pharaoh's format: `0-0 1-2` are links between positions from 0, source first. In gold
alignments `1?2` (or `1p2`) is a possible link, which may be there or not; the others are sure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from dragoman.errors import UserError

Link = tuple[int, int]
LINK = re.compile(r"(\d+)([-?p])(\d+)")


class GoldLinks(NamedTuple):
    """The links of a pair: sure ones, and those that are possible, the sure ones included."""

    sure: set[Link]
    possible: set[Link]


class AlignmentScore(NamedTuple):
    """How well links agree with gold ones, in percent: error rate, precision of all, recall of the sure ones."""

    aer: float
    precision: float
    recall: float
    links: int


def format_links(links: Iterable[Link]) -> str:
    """Return links in Pharaoh's format."""
    return " ".join(f"{i}-{j}" for i, j in links)


def parse_links(line: str, where: str) -> GoldLinks:
    """Read a line in Pharaoh's format; `where` names it in messages."""
    sure, possible = set(), set()
    for text in line.split():
        if not (found := LINK.fullmatch(text)):
            raise UserError(f"{where}: {text!r} is no link; links look like 0-0, or 0?0 where they are only possible")
        link = int(found[1]), int(found[3])
        possible.add(link)
        if found[2] == "-":
            sure.add(link)
    return GoldLinks(sure, possible)


def check_links(links: Collection[Link], source: Sequence[str], target: Sequence[str], where: str) -> None:
    """Refuse links to words that a pair does not have."""
    for i, j in sorted(links):
        if i >= len(source) or j >= len(target):
            side, words = ("source", source) if i >= len(source) else ("target", target)
            raise UserError(
                f"{where}: the link {i}-{j} is out of range; the {side} has {len(words)} words, the first is 0"
            )


def score_alignments(found: Sequence[Collection[Link]], gold: Sequence[GoldLinks]) -> AlignmentScore:
    """Compare the links of every pair with the gold ones, counted over all pairs."""
    pairs = list(zip(found, gold, strict=True))
    links = sum(len(some) for some in found)
    sure = sum(len(one.sure) for one in gold)
    right_sure = sum(len(one.sure.intersection(some)) for some, one in pairs)
    right = sum(len(one.possible.intersection(some)) for some, one in pairs)
    aer = 1 - (right_sure + right) / (links + sure) if links + sure else 0.0
    return AlignmentScore(100 * aer, 100 * right / max(links, 1), 100 * right_sure / max(sure, 1), links)
