"""Scores of word alignments against gold alignments made by people: error rate, precision and recall.

Alignment error rate (AER) is defined by Och and Ney (2003). Alignments are read and written in Pharaoh format, one line
per sentence pair: `0-0 1-2` are links from source to target positions, counted from 0. In gold alignments `1-2` is a
sure link and `1?2` (or `1p2`) a possible one, which a system may find or not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from dragoman.errors import UserError

Link = tuple[int, int]  # source position, target position
LINK = re.compile(r"(\d+)([-?p])(\d+)")


class GoldLinks(NamedTuple):
    """The gold links of a sentence pair. Every sure link is also possible."""

    sure: set[Link]
    possible: set[Link]


class AlignmentScore(NamedTuple):
    """Alignment error rate, precision of all links and recall of the sure links, in per cent."""

    aer: float
    precision: float
    recall: float
    links: int


def format_links(links: Iterable[Link]) -> str:
    return " ".join(f"{i}-{j}" for i, j in links)


def parse_links(line: str, where: str) -> GoldLinks:
    """Parse a line in Pharaoh format. `where` names the line in error messages."""
    sure, possible = set(), set()
    for text in line.split():
        if not (match := LINK.fullmatch(text)):
            raise UserError(f"{where}: {text!r} is not a link; write links as 0-0, or as 0?0 if they are only possible")
        link = int(match[1]), int(match[3])
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return GoldLinks(sure, possible)


def check_links(links: Collection[Link], source: Sequence[str], target: Sequence[str], where: str) -> None:
    for i, j in sorted(links):
        if i >= len(source) or j >= len(target):
            side, words = ("source", source) if i >= len(source) else ("target", target)
            raise UserError(
                f"{where}: the link {i}-{j} is out of range; the {side} has {len(words)} words, the first is 0"
            )


class AlignmentCounts:
    """Counts of links over sentence pairs, which are added one at a time."""

    def __init__(self) -> None:
        self.links = self.sure = self.correct = self.correct_sure = 0

    def add(self, predicted: Collection[Link], gold: GoldLinks) -> None:
        self.links += len(predicted)
        self.sure += len(gold.sure)
        self.correct += len(gold.possible.intersection(predicted))
        self.correct_sure += len(gold.sure.intersection(predicted))

    def compute_score(self) -> AlignmentScore:
        total = self.links + self.sure
        aer = 1 - (self.correct_sure + self.correct) / total if total else 0.0
        precision, recall = self.correct / max(self.links, 1), self.correct_sure / max(self.sure, 1)
        return AlignmentScore(100 * aer, 100 * precision, 100 * recall, self.links)


def score_alignments(predicted: Sequence[Collection[Link]], gold: Sequence[GoldLinks]) -> AlignmentScore:
    """Score predicted links against gold links, with counts summed over all sentence pairs."""
    counts = AlignmentCounts()
    for links, gold_links in zip(predicted, gold, strict=True):
        counts.add(links, gold_links)
    return counts.compute_score()
