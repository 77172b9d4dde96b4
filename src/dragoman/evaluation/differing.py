"""Lines on which systems differ, and the words that make the difference.

Shapes   N lines   S systems
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from html import escape
from itertools import groupby

import numpy as np

from dragoman.score.metrics import METRICS
from dragoman.score.totals import Array
from dragoman.score.words import WORD

PIECE = re.compile(rf"{WORD.pattern}|\s+|.", re.DOTALL)  # words, spaces, and each mark by itself


def qualities(texts: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Array:
    """chrF of every line by itself, for each system: value_SN."""
    chrf = METRICS["chrf"]
    return np.stack([chrf.values(chrf.counted(lines, references).line_NK) for lines in texts])


def most_different(value_SN: Array, each: int) -> list[int]:
    """The lines that each system does much better or much worse than the first, `each` of either kind, the largest
    difference first. Of a system alone, the lines that it does worst."""
    if len(value_SN) == 1:
        return [int(line) for line in np.argsort(value_SN[0], kind="stable")[: 2 * each]]
    gap_SN = value_SN[1:] - value_SN[0]
    chosen: dict[int, None] = {}
    for gap_N in gap_SN:
        order = np.argsort(gap_N, kind="stable")
        ends = np.concatenate([order[:each], order[::-1][:each]])
        chosen.update(dict.fromkeys(int(line) for line in ends if gap_N[line]))
    return sorted(chosen, key=lambda line: -np.abs(gap_SN[:, line]).max())


def common(pieces: Sequence[str], other: Sequence[str]) -> set[int]:
    """Which pieces are in the other text too, in the same order; spaces apart."""
    mine, theirs = ([i for i, piece in enumerate(text) if not piece.isspace()] for text in (pieces, other))
    matcher = SequenceMatcher(None, [pieces[i] for i in mine], [other[i] for i in theirs], autojunk=False)
    return {mine[at] for block in matcher.get_matching_blocks() for at in range(block.a, block.a + block.size)}


def marked(text: str, references: Sequence[str], others: Sequence[str]) -> str:
    """The text as HTML: what stands in no reference is `off`, what some other system did not say is `own`."""
    pieces = PIECE.findall(text)
    right = set[int]().union(*(common(pieces, PIECE.findall(reference)) for reference in references))
    shared = [common(pieces, PIECE.findall(other)) for other in others]
    said = set(range(len(pieces))).intersection(*shared) if others else set(range(len(pieces)))
    kinds = [
        None if piece.isspace() else " ".join(["off"] * (at not in right) + ["own"] * (at not in said))
        for at, piece in enumerate(pieces)
    ]
    return "".join(spans(pieces, kinds))


def spans(pieces: Sequence[str], kinds: list[str | None]) -> Iterator[str]:
    """Neighbours of one kind in one mark, with the spaces between them."""
    for at in range(1, len(kinds) - 1):
        if kinds[at] is None and kinds[at - 1] == kinds[at + 1]:
            kinds[at] = kinds[at - 1]
    for kind, run in groupby(zip(kinds, pieces, strict=True), key=lambda pair: pair[0] or ""):
        words = escape("".join(piece for _, piece in run))
        yield f'<mark class="{kind}">{words}</mark>' if kind else words
