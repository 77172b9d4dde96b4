"""Symmetrisation: one alignment from the alignments of both directions.

A forward alignment usually links each target word to at most one source word, and a backward alignment each source word
to at most one target word; the functions here accept any links. The heuristics (Och and Ney 2003, Koehn et al. 2003)
return an alignment between the intersection and the union:

    intersection          links of both directions: high precision
    union                 links of either direction: high recall
    grow                  the intersection; then repeatedly add links of the union that are horizontal or vertical
                          neighbours of a link and contain a word without a link
    grow-diag             the same with diagonal neighbours too, as in Moses
    grow-diag-and         the same, but both words of an added link must have no link yet: the `grow-diag` of many
                          published alignment error rates
    grow-diag-final       then add links of either direction that contain a word without a link
    grow-diag-final-and   then add links of either direction between two words without a link

Shapes   I source words   J target words
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dragoman.smt.compiled import Array, compiled
from dragoman.smt.settings import THRESHOLD

Links = list[tuple[int, int]]  # (source, target) positions


class Heuristic(NamedTuple):
    """How an alignment is extended from the intersection towards the union."""

    neighbours: int = 0  # how many of the eight NEIGHBOURS can be added; the first four are not diagonal
    grow: int = 1  # minimum number of words without a link, 1 or 2, in an added neighbour
    final: int = 0  # the same for links that are added at the end; 0: none is added
    union: bool = False


SYMMETRIZATIONS = {
    "intersection": Heuristic(),
    "union": Heuristic(union=True),
    "grow": Heuristic(neighbours=4),
    "grow-diag": Heuristic(neighbours=8),
    "grow-diag-and": Heuristic(neighbours=8, grow=2),
    "grow-diag-final": Heuristic(neighbours=8, final=1),
    "grow-diag-final-and": Heuristic(neighbours=8, final=2),
}
NEIGHBOURS = np.array([(-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)])


@compiled
def symmetrize(forward_IJ: Array, backward_IJ: Array, heuristic: Heuristic, out_IJ: Array) -> None:
    """Write into `out_IJ` which words of a sentence pair are linked, given the links of both directions."""
    I, J = out_IJ.shape
    source_linked, target_linked = np.zeros(I, np.bool_), np.zeros(J, np.bool_)
    for i in range(I):
        for j in range(J):
            both, either = forward_IJ[i, j] and backward_IJ[i, j], forward_IJ[i, j] or backward_IJ[i, j]
            out_IJ[i, j] = either if heuristic.union else both
            if out_IJ[i, j]:
                source_linked[i] = target_linked[j] = True
    growing = heuristic.neighbours > 0
    while growing:
        growing = False
        for i in range(I):
            for j in range(J):
                if not out_IJ[i, j]:
                    continue
                for neighbour in range(heuristic.neighbours):
                    a, b = i + NEIGHBOURS[neighbour, 0], j + NEIGHBOURS[neighbour, 1]
                    if a < 0 or a >= I or b < 0 or b >= J or not (forward_IJ[a, b] or backward_IJ[a, b]):
                        continue
                    if int(not source_linked[a]) + int(not target_linked[b]) >= heuristic.grow:
                        out_IJ[a, b] = source_linked[a] = target_linked[b] = growing = True
    if heuristic.final:
        for j in range(J):
            for i in range(I):
                if forward_IJ[i, j] and int(not source_linked[i]) + int(not target_linked[j]) >= heuristic.final:
                    out_IJ[i, j] = source_linked[i] = target_linked[j] = True
        for i in range(I):
            for j in range(J):
                if backward_IJ[i, j] and int(not source_linked[i]) + int(not target_linked[j]) >= heuristic.final:
                    out_IJ[i, j] = source_linked[i] = target_linked[j] = True


def combine_links(
    forward: Iterable[tuple[int, int]], backward: Iterable[tuple[int, int]], method: str, lengths: tuple[int, int]
) -> Links:
    """Return one alignment from those of both directions; all links are (source, target) positions."""
    matrices = np.zeros((3, *lengths), np.bool_)
    for matrix_IJ, links in zip(matrices[:2], (forward, backward), strict=True):
        for i, j in links:
            matrix_IJ[i, j] = True
    symmetrize(matrices[0], matrices[1], SYMMETRIZATIONS[method], matrices[2])
    return list_links(matrices[2])


def link_by_attention(weight_JI: Array, method: str, threshold: float) -> Links:
    """Return links between words, given the attention weights of target words on source words.

    The method `threshold` links words whose weight is at least `threshold`. Otherwise each target word is linked to the
    source word with its largest weight, each source word to the target word that attends to it most, and the two
    alignments are symmetrised.
    """
    J, I = weight_JI.shape
    if not I or not J:
        return []
    if method == THRESHOLD:
        return list_links((weight_JI >= threshold).T)
    # A word without tokens has no weights, and no link.
    forward = [(int(i), j) for j, i in enumerate(weight_JI.argmax(1)) if weight_JI[j, i] > 0]
    backward = [(i, int(j)) for i, j in enumerate(weight_JI.argmax(0)) if weight_JI[j, i] > 0]
    return combine_links(forward, backward, method, (I, J))


def list_links(linked_IJ: Array) -> Links:
    return [(int(i), int(j)) for i, j in np.argwhere(linked_IJ)]
