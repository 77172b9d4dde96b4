"""A term as a small machine that reads tokens and knows when it has been said, however the pieces spell it.

"Hund" may come as one piece, as "Hu" and "nd", or letter by letter: all are the same text, and the text is what users
asked for. So the machine is made over the bytes of the text and then told what each token spells. Around a term stands
something that is no letter, a space, a mark or an end of the text: "Hund" is not in "Hundertwasser".

Shapes   S states of the machine   V vocabulary   L bytes of the longest token

What a search is asked: some sentences of one grid, what may be said to each, and how to look.

Shapes   B sentences   S source width
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.config.settings import SearchSettings
from dragoman.decoding.beam import BeamState
from dragoman.decoding.protocol import S, StepModel
from dragoman.types import TokenTree

Bytes = frozenset[int]
UNREACHABLE = 1 << 20  # tokens: it cannot be said at all
ANY: Bytes = frozenset(range(256))
REST: Bytes = frozenset(range(0x80, 0xC0))  # of a character of several bytes
ASCII: Bytes = frozenset(b for b in range(0x80) if not chr(b).isalnum())
BREAKS: list[list[Bytes]] = [  # what stands between words: ASCII, then marks of Latin-1, in general, CJK, full width
    [ASCII],
    [frozenset({0xC2}), REST],
    [frozenset({0xE2}), frozenset({0x80, 0x81}), REST],
    [frozenset({0xE3}), frozenset({0x80}), REST],
    [frozenset({0xEF}), frozenset({0xBC}), REST],
]


@dataclass(frozen=True, eq=False)
class Term:
    """State 0 is the beginning of a text; state S - 1 means that the term has been said, and stays."""

    text: str
    next_SV: NDArray[np.int16]  # the state after each token
    left_S: NDArray[np.int32]  # tokens that it takes at least until it has been said
    ends_S: NDArray[np.bool_]  # whether an end of the text makes the term whole

    @property
    def possible(self) -> bool:
        return int(self.left_S[0]) < UNREACHABLE


class SpellingTable:
    """What the tokens of a vocabulary spell, longest first, as a table of bytes."""

    def __init__(self, spelt: Sequence[bytes]) -> None:
        self.length_V = np.array([len(each) for each in spelt])
        self.order_V = np.argsort(-self.length_V, kind="stable")
        self.byte_VL = np.zeros((len(spelt), max(self.length_V)), dtype=np.uint8)
        for row, token in enumerate(self.order_V):
            self.byte_VL[row, : len(spelt[token])] = np.frombuffer(spelt[token], dtype=np.uint8)
        self.long_L = [int((self.length_V > place).sum()) for place in range(self.byte_VL.shape[1])]

    def term(self, text: str, bodies: Iterable[bytes], *, before: bool, after: bool) -> Term:
        """`bodies` are the ways to write the term; `before` and `after`: what stands there must be no letter."""
        delta_S256, ends_S = build_automaton([*bodies], before=before, after=after)
        states = len(delta_S256)
        next_SV = np.repeat(np.arange(states, dtype=np.int16)[:, None], len(self.length_V), axis=1)
        for place, many in enumerate(self.long_L):  # tokens stand by length, so those that have a byte here come first
            next_SV[:, :many] = delta_S256[next_SV[:, :many], self.byte_VL[:many, place]]
        by_token_SV = np.empty_like(next_SV)
        by_token_SV[:, self.order_V] = next_SV
        return Term(text, by_token_SV, count_tokens_left(by_token_SV), ends_S)


def count_tokens_left(next_SV: NDArray[np.int16]) -> NDArray[np.int32]:
    """Tokens that it takes at least from every state to the last."""
    left_S = np.full(len(next_SV), UNREACHABLE, dtype=np.int32)
    left_S[-1] = 0
    while True:
        nearer_S = np.minimum(left_S, left_S[next_SV].min(1) + 1)
        if (nearer_S == left_S).all():
            return left_S
        left_S = nearer_S


def build_automaton(
    bodies: Sequence[bytes], *, before: bool, after: bool
) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    """The state after each byte, and the states that an end of the text completes.

    Written first as a machine that is in many states at once: it may always be outside of any term, and at every
    beginning of one it tries. Each set of states that it can be in is then one state.
    """
    edges, first, last, said = build_nondeterministic(bodies, before=before, after=after)
    alike = group_bytes(edges)
    begin = frozenset(first)
    number: dict[frozenset[int], int] = {begin: 0}
    queue, rows = [begin], []
    while queue:
        here = queue.pop(0)
        row = np.zeros(256, dtype=np.int64)
        for some in alike:
            there = frozenset(to for state in here for among, to in edges.get(state, ()) if some[0] in among)
            if said in there:
                there = frozenset({said})
            if there not in number:
                number[there] = len(number)
                queue.append(there)
            row[some] = number[there]
        rows.append(row)
    return number_states(rows, [*number], said, last)


Edges = dict[int, list[tuple[Bytes, int]]]


def build_nondeterministic(
    bodies: Sequence[bytes], *, before: bool, after: bool
) -> tuple[Edges, set[int], set[int], int]:
    """Edges by state, the states at the beginning, those before an end, and the one that says: it is there."""
    edges: Edges = {0: [(ANY, 0)], 1: [(ANY, 1)]}  # 0 is outside, 1 is there
    first, last, count = {0}, set(), 2

    def road(start: int, steps: Sequence[Bytes], end: int | None = None) -> int:
        nonlocal count
        for place, among in enumerate(steps):
            if place == len(steps) - 1 and end is not None:
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
            road(0, steps, begun)
        written = road(begun, [frozenset({byte}) for byte in body], None if after else 1)
        if after:
            last.add(written)
            for steps in BREAKS:
                road(written, steps, 1)
    return edges, first, last, 1


def group_bytes(edges: Edges) -> list[list[int]]:
    """Bytes that no edge tells apart."""
    sets = list({among for each in edges.values() for among, _ in each})
    found: dict[tuple[bool, ...], list[int]] = {}
    for byte in range(256):
        found.setdefault(tuple(byte in among for among in sets), []).append(byte)
    return list(found.values())


def number_states(
    rows: list[Any], states: list[frozenset[int]], said: int, last: set[int]
) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    """The same with the state that says it is there put at the end."""
    order = sorted(range(len(states)), key=lambda i: said in states[i])
    place = np.argsort(order)
    delta_S256 = place[np.stack(rows)[order]].astype(np.int16)
    ends_S = np.array([bool(states[i] & (last | {said})) for i in order])
    return delta_S256, ends_S


@dataclass(frozen=True, slots=True)
class DecodingConstraints:
    """What is asked of the answer to one sentence, beyond that it be likely."""

    prefix: tuple[int, ...] = ()  # tokens that it begins with
    must: tuple[Term, ...] = ()  # terms that appear in it
    avoid: tuple[Term, ...] = ()  # terms that do not
    minimum: int = 0  # tokens that it has at least, its end mark not counted
    text: str = ""  # of the source: what is drawn for a sentence depends on it, and not on its place in a batch

    @property
    def any(self) -> bool:
        """Whether anything is asked at all."""
        return bool(self.prefix or self.must or self.avoid or self.minimum)


@dataclass(frozen=True)
class Request(Generic[S]):
    """Sentences side by side. `limit_B` is the most tokens an answer may have, its end mark counted; 0: no answer."""

    model: StepModel[S]
    source_BS: Tensor
    keep_BS: Tensor
    limit_B: Tensor
    settings: SearchSettings
    constraints: Sequence[DecodingConstraints]
    decode: Callable[[Sequence[int]], str]  # the text that tokens spell
    watch: Callable[[BeamState], None] | None = None  # is shown the beams of a beam search after every step

    @property
    def device(self) -> torch.device:
        return self.source_BS.device

    @property
    def longest(self) -> int:
        return max(self.limit_B.tolist(), default=0)

    def only(self, chosen: Sequence[bool]) -> Request[S]:
        """The same grid, with answers for these rows alone: shapes stay, so answers do not change."""
        keep_B = torch.tensor(list(chosen), device=self.device)
        return replace(self, limit_B=torch.where(keep_B, self.limit_B, 0))


def sample_key(seed: int, text: str, number: int) -> list[int]:
    """What the draws for the `number`-th sample of a sentence are made from."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
    return [seed, number, *memoryview(digest).cast("I")]


class Job(NamedTuple):
    """A source to answer: its ids without marks, and the most tokens that an answer may have, its end mark counted."""

    ids: list[int]
    limit: int
    constraints: DecodingConstraints = DecodingConstraints()
    links: TokenTree | None = None  # of the source's tree, for models that ask for trees
