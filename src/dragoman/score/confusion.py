"""Confusion matrices: predicted labels against reference labels, with precision, recall and F1 of each label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


def confusion(found: Sequence[str], wanted: Sequence[str]) -> dict[str, Any]:
    """`counts[i][j]` texts of labels[i] were called labels[j]; for each label precision, recall and F1, in per cent.

    A label that was never given has precision 0; the mean of F1 counts every label alike, however rare.
    """
    counts = Counter(zip(wanted, found, strict=True))
    said, there = Counter(found), Counter(wanted)
    labels = sorted({*said, *there})
    each = {label: _shares(counts[label, label], said[label], there[label]) for label in labels}
    return {
        "labels": labels,
        "counts": [[counts[right, given] for given in labels] for right in labels],
        "each": each,
        "f1": sum(one["f1"] for one in each.values()) / max(len(each), 1),
    }


def _shares(right: int, given: int, there: int) -> dict[str, float]:
    return {
        "precision": 100 * right / max(given, 1),
        "recall": 100 * right / max(there, 1),
        "f1": 200 * right / max(given + there, 1),
        "texts": there,
    }


def render_confusion_matrix(table: dict[str, Any]) -> str:
    """Return the matrix as text: a row for each reference label, a column for each predicted label."""
    labels, shares = table["labels"], ("precision", "recall", "f1")
    rows = [["reference", *(f"as {label}" for label in labels), *shares]]
    for label, row in zip(labels, table["counts"], strict=True):
        rows.append([label, *map(str, row), *(f"{table['each'][label][name]:.2f}" for name in shares)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )
