"""Symmetrisation: one alignment from those of both directions.

`forward` links every target word to at most one source word, `backward` every source word to at most one target word.
The heuristics (Och and Ney 2003, Koehn 2003) lie between the links of both and the links of either:

    intersection          links of both directions: precise
    union                 links of either: complete
    grow                  the intersection and, step by step, neighbours of its links that are in the union and link a
                          word that has no link yet
    grow-diag             the same, diagonal neighbours too
    grow-diag-final       then all remaining links of either direction with a word that has no link yet
    grow-diag-final-and   ... with two such words
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dragoman.smt.compiled import Array, compiled

Links = list[tuple[int, int]]


class Heuristic(NamedTuple):
    """How far an alignment grows from the intersection towards the union."""

    grows: int = 0  # to how many of the eight neighbours, the four beside first
    final: int = 0  # 1: links with one word that has none; 2: with two
    everything: bool = False


SYMMETRIZATIONS = {
    "intersection": Heuristic(),
    "union": Heuristic(everything=True),
    "grow": Heuristic(grows=4),
    "grow-diag": Heuristic(grows=8),
    "grow-diag-final": Heuristic(grows=8, final=1),
    "grow-diag-final-and": Heuristic(grows=8, final=2),
}
NEIGHBOURS = np.array([(-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)])


@compiled
def symmetrize(forward: Array, backward: Array, heuristic: Heuristic, out: Array) -> None:
    """Write the links of a pair into a matrix (source, target).

    `forward[j]` is the source position of target word j or -1, `backward[i]` the target position of source word i.
    """
    I, J = len(backward), len(forward)
    either = np.zeros((I, J), np.bool_)
    for j in range(J):
        if forward[j] >= 0:
            either[forward[j], j] = True
    for i in range(I):
        if backward[i] >= 0:
            out[i, backward[i]] = either[i, backward[i]]  # so far, the links of both directions
            either[i, backward[i]] = True
    if heuristic.everything:
        out[:] = either
    has_source, has_target = np.zeros(I, np.bool_), np.zeros(J, np.bool_)
    for i in range(I):
        for j in range(J):
            if out[i, j]:
                has_source[i] = has_target[j] = True
    added = heuristic.grows > 0
    while added:
        added = False
        for i in range(I):
            for j in range(J):
                if not out[i, j]:
                    continue
                for neighbour in range(heuristic.grows):
                    a, b = i + NEIGHBOURS[neighbour, 0], j + NEIGHBOURS[neighbour, 1]
                    if 0 <= a < I and 0 <= b < J and either[a, b] and not (has_source[a] and has_target[b]):
                        out[a, b] = has_source[a] = has_target[b] = added = True
    for direction in range(2 if heuristic.final else 0):
        for number in range(J if direction == 0 else I):
            i, j = (forward[number], number) if direction == 0 else (number, backward[number])
            if i >= 0 and j >= 0 and int(not has_source[i]) + int(not has_target[j]) >= heuristic.final:
                out[i, j] = has_source[i] = has_target[j] = True


def combine_links(forward: Links, backward: Links, method: str, lengths: tuple[int, int]) -> Links:
    """Return one alignment from the links of both directions, given as (source, target) positions."""
    to_source, to_target = np.full(lengths[1], -1), np.full(lengths[0], -1)
    for i, j in forward:
        to_source[j] = i
    for i, j in backward:
        to_target[i] = j
    out = np.zeros(lengths, np.bool_)
    symmetrize(to_source, to_target, SYMMETRIZATIONS[method], out)
    return [(int(i), int(j)) for i, j in np.argwhere(out)]
