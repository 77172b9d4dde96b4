"""Terms as automata over tokens.

"Hund" may be tokenized as one token, as "Hu" and "nd", or letter by letter: all spell the same text, and users ask for
text. So a term becomes an automaton over the bytes of the text, and the bytes of every token are run through it once. A
term stands between characters that are no letters, or at an end of the text: "Hund" is not in "Hundertwasser".

Shapes   S states of an automaton   V vocabulary   L bytes of the longest token
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = frozenset[int]
Edges = dict[int, list[tuple[Bytes, int]]]  # by state: the bytes that lead to another state
UNREACHABLE = 1 << 20  # tokens that a term needs which cannot be spelt at all
ANY: Bytes = frozenset(range(256))
REST: Bytes = frozenset(range(0x80, 0xC0))  # later bytes of a character
ASCII: Bytes = frozenset(b for b in range(0x80) if not chr(b).isalnum())
BREAKS: list[list[Bytes]] = [  # between words: ASCII, then punctuation of Latin-1, general, CJK, full width
    [ASCII],
    [frozenset({0xC2}), REST],
    [frozenset({0xE2}), frozenset({0x80, 0x81}), REST],
    [frozenset({0xE3}), frozenset({0x80}), REST],
    [frozenset({0xEF}), frozenset({0xBC}), REST],
]
OUTSIDE, ACCEPT = 0, 1  # states of the nondeterministic automaton: outside the term, and term complete


@dataclass(frozen=True, eq=False)
class Term:
    """The automaton of a term. State 0 is the start of a text; state S - 1, which it never leaves, accepts."""

    text: str
    next_SV: NDArray[np.int16]  # the state after each token
    left_S: NDArray[np.int32]  # the fewest tokens until the term is complete
    ends_S: NDArray[np.bool_]  # whether the end of the text completes the term

    @property
    def possible(self) -> bool:
        """Return whether the vocabulary can spell the term."""
        return int(self.left_S[0]) < UNREACHABLE


class SpellingTable:
    """The bytes of every token of a vocabulary as a table, the longest token first."""

    def __init__(self, spelt: Sequence[bytes]) -> None:
        self.length_V = np.array([len(each) for each in spelt])
        self.order_V = np.argsort(-self.length_V, kind="stable")
        self.byte_VL = np.zeros((len(spelt), max(self.length_V)), dtype=np.uint8)
        for row, token in enumerate(self.order_V):
            self.byte_VL[row, : len(spelt[token])] = np.frombuffer(spelt[token], dtype=np.uint8)

    def term(self, text: str, bodies: Iterable[bytes], *, before: bool, after: bool) -> Term:
        """Build a term's automaton. `bodies` are the ways to write it; `before` and `after` ask for word boundaries."""
        delta_S256, ends_S = build_automaton(bodies, before=before, after=after)
        states = len(delta_S256)
        sorted_SV = np.repeat(np.arange(states, dtype=np.int16)[:, None], len(self.length_V), axis=1)
        for column, byte_V in enumerate(self.byte_VL.T):  # tokens with a byte in this column come first
            many = int((self.length_V > column).sum())
            sorted_SV[:, :many] = delta_S256[sorted_SV[:, :many], byte_V[:many]]
        next_SV = np.empty_like(sorted_SV)
        next_SV[:, self.order_V] = sorted_SV
        left_S = np.full(states, UNREACHABLE, dtype=np.int32)
        left_S[-1] = 0
        while (nearer_S := np.minimum(left_S, left_S[next_SV].min(1) + 1)).tolist() != left_S.tolist():
            left_S = nearer_S
        return Term(text, next_SV, left_S, ends_S)


def build_automaton(
    bodies: Iterable[bytes], *, before: bool, after: bool
) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    """Return the state after each byte, and the states that the end of the text completes.

    The nondeterministic automaton may always be outside the term, and tries at every possible start of it. The subset
    construction makes each reachable set of its states one state of the result.
    """
    edges, first, last = build_nondeterministic(bodies, before=before, after=after)
    sets = list({among for each in edges.values() for among, _ in each})
    alike: dict[tuple[bool, ...], list[int]] = {}  # bytes that no edge tells apart
    for byte in range(256):
        alike.setdefault(tuple(byte in among for among in sets), []).append(byte)
    states, rows = [frozenset(first)], []
    number = {states[0]: 0}
    for here in states:  # which grows on the way
        row = np.zeros(256, dtype=np.int64)
        for some in alike.values():
            there = frozenset(to for state in here for among, to in edges.get(state, ()) if some[0] in among)
            if ACCEPT in there:
                there = frozenset({ACCEPT})
            if there not in number:
                number[there] = len(states)
                states.append(there)
            row[some] = number[there]
        rows.append(row)
    order = sorted(range(len(states)), key=lambda i: ACCEPT in states[i])  # the accepting state comes last
    delta_S256 = np.argsort(order)[np.stack(rows)[order]].astype(np.int16)
    return delta_S256, np.array([bool(states[i] & {*last, ACCEPT}) for i in order])


def build_nondeterministic(bodies: Iterable[bytes], *, before: bool, after: bool) -> tuple[Edges, set[int], set[int]]:
    """Return edges by state, the initial states, and those that the end of the text completes."""
    edges: Edges = {OUTSIDE: [(ANY, OUTSIDE)], ACCEPT: [(ANY, ACCEPT)]}
    first, last, count = {OUTSIDE}, set(), 2

    def add_path(start: int, steps: Sequence[Bytes], end: int | None = None) -> int:
        nonlocal count
        for i, among in enumerate(steps):
            if i == len(steps) - 1 and end is not None:
                target = end
            else:
                target, count = count, count + 1
            edges.setdefault(start, []).append((among, target))
            start = target
        return start

    for body in bodies:
        begun, count = count, count + 1
        first.add(begun)
        for steps in BREAKS if before else [[ANY]]:
            add_path(OUTSIDE, steps, begun)
        written = add_path(begun, [frozenset({byte}) for byte in body], None if after else ACCEPT)
        if after:
            last.add(written)
            for steps in BREAKS:
                add_path(written, steps, ACCEPT)
    return edges, first, last
