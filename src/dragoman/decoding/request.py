"""What one search is asked: the sentences of a batch, the constraints of each, and terms as automata over tokens.

"Hund" may be tokenized as one token, as "Hu" and "nd", or letter by letter: all spell the same text, and users ask for
text. So a term becomes an automaton over the bytes of the text, and the bytes of every token are run through it once. A
term stands between characters that are no letters, or at an end of the text: "Hund" is not in "Hundertwasser".

Shapes   B sentences   S source width, or states of an automaton   V vocabulary   L bytes of the longest token
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.config.settings import SearchSettings
from dragoman.decoding.beam import BeamState
from dragoman.decoding.protocol import StateT, StepModel
from dragoman.types import TokenFeature

Bytes = frozenset[int]
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
        self.long_L = [int((self.length_V > column).sum()) for column in range(self.byte_VL.shape[1])]

    def term(self, text: str, bodies: Iterable[bytes], *, before: bool, after: bool) -> Term:
        """Build a term's automaton. `bodies` are the ways to write it; `before` and `after` ask for word boundaries."""
        delta_S256, ends_S = build_automaton([*bodies], before=before, after=after)
        states = len(delta_S256)
        next_SV = np.repeat(np.arange(states, dtype=np.int16)[:, None], len(self.length_V), axis=1)
        for column, many in enumerate(self.long_L):  # tokens are sorted by length: those with a byte here come first
            next_SV[:, :many] = delta_S256[next_SV[:, :many], self.byte_VL[:many, column]]
        by_token_SV = np.empty_like(next_SV)
        by_token_SV[:, self.order_V] = next_SV
        return Term(text, by_token_SV, count_tokens_left(by_token_SV), ends_S)


def count_tokens_left(next_SV: NDArray[np.int16]) -> NDArray[np.int32]:
    """Return the fewest tokens from every state to the last."""
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
    """Return the state after each byte, and the states that the end of the text completes.

    The nondeterministic automaton may always be outside the term, and tries at every possible start of it. The subset
    construction makes each reachable set of its states one state of the result.
    """
    edges, first, last, accept = build_nondeterministic(bodies, before=before, after=after)
    alike = group_bytes(edges)
    begin = frozenset(first)
    number: dict[frozenset[int], int] = {begin: 0}
    queue, rows = [begin], []
    while queue:
        here = queue.pop(0)
        row = np.zeros(256, dtype=np.int64)
        for some in alike:
            there = frozenset(to for state in here for among, to in edges.get(state, ()) if some[0] in among)
            if accept in there:
                there = frozenset({accept})
            if there not in number:
                number[there] = len(number)
                queue.append(there)
            row[some] = number[there]
        rows.append(row)
    return number_states(rows, [*number], accept, last)


Edges = dict[int, list[tuple[Bytes, int]]]


def build_nondeterministic(
    bodies: Sequence[bytes], *, before: bool, after: bool
) -> tuple[Edges, set[int], set[int], int]:
    """Return edges by state, the initial states, those that the end of the text completes, and the accepting state."""
    edges: Edges = {0: [(ANY, 0)], 1: [(ANY, 1)]}  # 0 is outside the term, 1 accepts
    first, last, count = {0}, set(), 2

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
            add_path(0, steps, begun)
        written = add_path(begun, [frozenset({byte}) for byte in body], None if after else 1)
        if after:
            last.add(written)
            for steps in BREAKS:
                add_path(written, steps, 1)
    return edges, first, last, 1


def group_bytes(edges: Edges) -> list[list[int]]:
    """Group the bytes that no edge tells apart."""
    sets = list({among for each in edges.values() for among, _ in each})
    found: dict[tuple[bool, ...], list[int]] = {}
    for byte in range(256):
        found.setdefault(tuple(byte in among for among in sets), []).append(byte)
    return list(found.values())


def number_states(
    rows: list[Any], states: list[frozenset[int]], accept: int, last: set[int]
) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    """Return the tables with the accepting state moved to the end."""
    order = sorted(range(len(states)), key=lambda i: accept in states[i])
    new_number = np.argsort(order)
    delta_S256 = new_number[np.stack(rows)[order]].astype(np.int16)
    ends_S = np.array([bool(states[i] & (last | {accept})) for i in order])
    return delta_S256, ends_S


@dataclass(frozen=True, slots=True)
class DecodingConstraints:
    """What the translation of one sentence must satisfy."""

    prefix: tuple[int, ...] = ()  # tokens that it starts with
    must: tuple[Term, ...] = ()  # terms that must appear
    avoid: tuple[Term, ...] = ()  # terms that must not appear
    minimum: int = 0  # fewest tokens, without EOS
    text: str = ""  # of the source: random numbers of a sentence depend on it, not on its row

    @property
    def any(self) -> bool:
        """Return whether there is any constraint at all."""
        return bool(self.prefix or self.must or self.avoid or self.minimum)

    @property
    def spellable(self) -> list[Term]:
        """Return the required terms that the vocabulary can spell."""
        return [term for term in self.must if term.possible]

    @property
    def needed_tokens(self) -> int:
        """Return the fewest tokens that the required terms take."""
        return sum(int(term.left_S[0]) for term in self.must if term.possible)


@dataclass(frozen=True)
class Request(Generic[StateT]):
    """A batch of sentences to decode. `limit_B` is the most tokens of a result, EOS counted; 0 means no result."""

    model: StepModel[StateT]
    source_BS: Tensor
    keep_BS: Tensor
    limit_B: Tensor
    settings: SearchSettings
    constraints: Sequence[DecodingConstraints]
    decode: Callable[[Sequence[int]], str]  # from tokens to text
    watch: Callable[[BeamState], None] | None = None  # called with the beams after every step of beam search

    @property
    def device(self) -> torch.device:
        return self.source_BS.device

    @property
    def longest(self) -> int:
        return max(self.limit_B.tolist(), default=0)

    def only(self, chosen: Sequence[bool]) -> Request[StateT]:
        """Return the same batch with results for these rows only. Shapes stay, so results do not change."""
        keep_B = torch.tensor(list(chosen), device=self.device)
        return replace(self, limit_B=torch.where(keep_B, self.limit_B, 0))


def sample_key(seed: int, text: str, number: int) -> list[int]:
    """Return the seed of the random numbers of the `number`-th sample of a sentence."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
    return [seed, number, *memoryview(digest).cast("I")]


class Job(NamedTuple):
    """A source to decode: its ids without BOS and EOS, and the most tokens of a result, EOS counted."""

    ids: list[int]
    limit: int
    constraints: DecodingConstraints = DecodingConstraints()
    features: Mapping[str, TokenFeature] = {}  # of the source, for models that need them
