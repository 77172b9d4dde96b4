"""Forms: what the texts of a task look like in a store and in a grid. One record each, on the menu at the foot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dragoman.data.batch import Examples, Grid, Lengths, lay, lay_labels, lay_lines, lay_windows
from dragoman.types import Batch, Example

Ids = Sequence[int]


@dataclass(frozen=True)
class Form:
    noun: str  # what its examples are called
    refuse: Callable[[Ids, Ids, int], str]  # why source and target are left out, given data.max_length; or nothing
    held: Callable[[Lengths, Lengths], tuple[Lengths, Lengths]]  # how many places of the two grids they take
    lay: Callable[[Grid, Examples], Batch]
    closed: bool = False  # the store keeps the </s> of every line: one text goes on from line to line

    def lengths(self, examples: Sequence[Example]) -> tuple[Lengths, Lengths]:
        """What these examples take in the two grids."""
        return self.held(*(np.array([len(getattr(e, side)) for e in examples]) for side in ("source", "target")))


def too_long(most: int, max_length: int) -> str:
    return f"longer than {max_length} tokens" if most > max_length else ""


def pair_refused(source: Ids, target: Ids, max_length: int) -> str:
    return too_long(max(len(source), len(target)), max_length) if source and target else "one side empty"


def label_refused(source: Ids, target: Ids, max_length: int) -> str:
    if not target:
        return "with a label that training does not have"
    return too_long(len(source), max_length) if source else "without text"


def line_refused(source: Ids, target: Ids, max_length: int) -> str:  # noqa: ARG001 - there is no source
    return too_long(len(target), max_length) if target else "empty"


FORMS = {
    "pairs": Form("pairs", pair_refused, lambda source_N, target_N: (source_N + 1, target_N + 1), lay),
    "labels": Form("texts", label_refused, lambda source_N, target_N: (source_N + 1, target_N), lay_labels),
    "lines": Form("lines", line_refused, lambda source_N, target_N: (source_N, target_N + 1), lay_lines),
    "windows": Form(
        "lines", lambda *_: "", lambda source_N, target_N: (source_N, target_N - 1), lay_windows, closed=True
    ),
}
