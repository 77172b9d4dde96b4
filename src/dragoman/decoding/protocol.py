"""The interface between search and models, the records that decoding methods share, and the base class of searches.

    state = model.start(source_BS, real_BS)          # one row per sentence
    logp_NV, state = model.step(token_N, state)      # one token per row in, log-probabilities of the next token out
    state = state.select(rows_N)                     # keep these rows, in this order

Search never asks what kind of model it has; an `Ensemble` implements the same protocol. A `Search` decodes the
sentences of some slots side by side; the loop in continuous_batching.py drives it, whatever the method.

A term that must or must not appear is text, and "Hund" may be tokenized as one token, as "Hu" and "nd", or letter by
letter. So a term becomes an automaton over the bytes of the text, and the bytes of every token are run through it once.
A term stands between characters that are no letters, or at an end of the text: "Hund" is not in "Hundertwasser".

Shapes   B sentences   S source width, or states of an automaton   N rows being searched   V vocabulary
         L bytes of the longest token
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.config.settings import SampleSettings, Seed, setting
from dragoman.types import BOS, EOS, PAD, TokenFeature

Bytes = frozenset[int]
Spelling = tuple[Bytes, ...]  # the bytes allowed at each position
UNREACHABLE = 1 << 20  # tokens that a term needs which cannot be spelt at all
ANY: Bytes = frozenset(range(256))
REST: Bytes = frozenset(range(0x80, 0xC0))  # later bytes of a character
ASCII: Bytes = frozenset(b for b in range(0x80) if not chr(b).isalnum())
BREAKS: list[Spelling] = [  # between words: ASCII, then punctuation of Latin-1, general, CJK, full width
    (ASCII,),
    (frozenset({0xC2}), REST),
    (frozenset({0xE2}), frozenset({0x80, 0x81}), REST),
    (frozenset({0xE3}), frozenset({0x80}), REST),
    (frozenset({0xEF}), frozenset({0xBC}), REST),
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

    def term(self, text: str, bodies: Iterable[bytes], *, before: bool, after: bool) -> Term:
        """Build a term's automaton. `bodies` are its spellings; `before` and `after` require word boundaries."""
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

    A state is the set of spellings that may still follow, each as the bytes allowed at its positions. A new occurrence
    may start at every byte. The empty spelling means that the term is complete.
    """
    ends = BREAKS if after else [()]
    inside = [(*(frozenset({byte}) for byte in body), *end) for body in bodies for end in ends]
    starts = [(*begin, *rest) for begin in (BREAKS if before else [(ANY,)]) for rest in inside]
    distinct = list({among for rest in starts for among in rest})
    alike: dict[tuple[bool, ...], list[int]] = {}  # bytes that no spelling tells apart
    for byte in range(256):
        alike.setdefault(tuple(byte in among for among in distinct), []).append(byte)
    started = {some[0]: [rest[1:] for rest in starts if some[0] in rest[0]] for some in alike.values()}
    complete: frozenset[Spelling] = frozenset({()})
    states, rows = [frozenset(inside)], []
    number = {states[0]: 0}
    for here in states:  # which grows on the way
        row = np.zeros(256, dtype=np.int64)
        for some in alike.values():
            there = frozenset([*started[some[0]], *(rest[1:] for rest in here if rest and some[0] in rest[0])])
            there = complete if here == complete or () in there else there
            if there not in number:
                number[there] = len(states)
                states.append(there)
            row[some] = number[there]
        rows.append(row)
    order = sorted(range(len(states)), key=lambda i: states[i] == complete)  # the accepting state comes last
    delta_S256 = np.argsort(order)[np.stack(rows)[order]].astype(np.int16)
    return delta_S256, np.array([states[i] == complete or not states[i].isdisjoint(ends) for i in order])


NEVER = float("-inf")  # log-probability of impossible tokens


class BaseSearchSettings(SampleSettings):
    """The settings of all decoding methods. Those of sampling are for the methods sample and mbr."""

    method: str = setting("beam", "decoding method")
    beam: int = setting(4, "number of hypotheses kept at each step; 1 is greedy search", ge=1, le=1000)
    nbest: int = setting(1, "number of hypotheses returned per line", ge=1, le=1000)
    length_norm: str = setting("length", "divide log-probabilities by length ** length_penalty, the GNMT formula, or 1")
    length_penalty: float = setting(1.0, "exponent of the length normalization", ge=0, le=10)
    coverage: float = setting(0.0, "weight of the coverage penalty (Wu et al., 2016)", ge=0, le=100)
    stop: str = setting("enough", "stop with enough finished hypotheses, when none can improve, or at the limit")
    no_repeat: int = setting(0, "never repeat an n-gram of this length; 0: off", ge=0, le=1000)
    min_ratio: float = setting(0.0, "output tokens >= min_ratio * source tokens", ge=0, le=100)
    max_ratio: float = setting(2.0, "output tokens <= max_ratio * source tokens + max_extra", gt=0, le=100)
    max_extra: int = setting(16, "tokens added to the length limit, see max_ratio", ge=0, le=10_000)
    seed: Seed = setting(1, "seed of sampling, combined with the text of the line")
    unknown: str = setting("drop", "word vocabularies: how to treat <unk> in the output")
    scores: bool = setting(True, "compute scores; false: engines may return nan if that is faster")


class SearchState(Protocol):
    """The state of a model after reading prefixes, one row per prefix."""

    def select(self, rows_N: Tensor) -> Self:
        """Return the state of these rows, in this order. Rows may repeat, and their number may change."""
        ...


StateT = TypeVar("StateT", bound=SearchState)


class StepModel(Protocol[StateT]):
    """A model that predicts one token at a time."""

    def start(self, source_BS: Tensor, real_BS: Tensor) -> StateT:
        """Read the sources and return the state of empty prefixes; `real_BS` is False at padding."""
        ...

    def step(self, token_N: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Append one token to every prefix, BOS first; return log-probabilities (at most 0) and the new state."""
        ...


@dataclass(frozen=True, slots=True)
class DecodingConstraints:
    """Constraints on the translation of one sentence."""

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


class Job(NamedTuple):
    """A source to decode: its ids without BOS and EOS, and the maximum length of a result, including EOS."""

    ids: list[int]
    limit: int  # 0: no result
    constraints: DecodingConstraints = DecodingConstraints()
    features: Mapping[str, TokenFeature] = {}  # features of the source, for models that need them


@dataclass(frozen=True, slots=True)
class SearchResult:
    """One hypothesis, without BOS and EOS.

    `logp` is the sum over its tokens and EOS; `score` is logp / length ** alpha, where length counts EOS. `finished`
    is False if it has no EOS, because it reached its limit or the model gave no continuation any probability.
    """

    tokens: list[int]
    logp: float
    score: float
    finished: bool


@dataclass(frozen=True)
class EnsembleState:
    """The states of all models."""

    each: tuple[Any, ...]

    def select(self, rows_N: Tensor) -> EnsembleState:
        return EnsembleState(tuple(state.select(rows_N) for state in self.each))

    def keep(self, sentences_K: Tensor) -> EnsembleState:
        return EnsembleState(tuple(state.keep(sentences_K) for state in self.each))

    def put(self, sentences_K: Tensor, fresh: EnsembleState) -> EnsembleState:
        return EnsembleState(
            tuple(state.put(sentences_K, new) for state, new in zip(self.each, fresh.each, strict=True))
        )

    def reset_finished(self, done_B: Tensor) -> EnsembleState:
        return EnsembleState(tuple(state.reset_finished(done_B) for state in self.each))


@dataclass(frozen=True)
class Ensemble:
    """Models that share a vocabulary, averaged. `features` of the sources are for models that need them."""

    models: Sequence[StepModel[Any]]

    def start(self, source_BS: Tensor, real_BS: Tensor, *features: Mapping[str, Tensor]) -> EnsembleState:
        return EnsembleState(tuple(model.start(source_BS, real_BS, *features) for model in self.models))

    def step(self, token_N: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
        stepped = [model.step(token_N, one) for model, one in zip(self.models, state.each, strict=True)]
        return mean_logp([logp_NV for logp_NV, _ in stepped]), EnsembleState(tuple(one for _, one in stepped))


def mean_logp(logps: Sequence[Tensor]) -> Tensor:
    """Return the log of the mean probability: one confident model can outvote several unsure ones."""
    return (torch.stack([logp.float() for logp in logps]).logsumexp(0) - math.log(len(logps))).clamp(max=0)


class Prefix(NamedTuple):
    """The tokens of the rows so far: the first `length` of each are valid. Rows of one slot are adjacent."""

    token_NT: Tensor
    length_N: Tensor


Rule = Callable[[Tensor, Prefix], Tensor]


class Search(ABC):
    """A search of several sentences at once, one per slot, with `width` adjacent rows of the model each.

    `longest` is the highest limit of any job that will come. A job with limit 0 is done from the beginning. Here the
    state of a search is a NamedTuple of tensors with one entry per slot; subclasses may keep another one.
    """

    state: Any

    def __init__(self, settings: BaseSearchSettings, width: int, longest: int, device: torch.device) -> None:
        self.settings, self.width, self.longest, self.device = settings, width, longest, device

    def open(self, jobs: Sequence[Job], state: Any = None) -> None:
        """Set the jobs of all slots, and their state if they have begun; make the rules of the slots."""
        self.jobs = list(jobs)
        self.rules = make_rules([job.constraints for job in jobs], self.settings, self.device)
        self.state = self.make_state(jobs) if state is None else state

    def put(self, slots: Sequence[int], jobs: Sequence[Job]) -> None:
        """Replace the searches in these slots by those of new jobs."""
        index_K, new = torch.tensor(slots, device=self.device), dict(zip(slots, jobs, strict=True))
        pairs = zip(self.state, self.make_state(jobs), strict=True)
        state = type(self.state)(*[old.index_copy(0, index_K, fresh) for old, fresh in pairs])
        self.open([new.get(slot, job) for slot, job in enumerate(self.jobs)], state)

    def keep(self, slots: Sequence[int]) -> None:
        """Give up all other slots."""
        self.open([self.jobs[slot] for slot in slots], self.select(slots))

    def select(self, slots: Sequence[int]) -> Any:
        """Return the state of these slots."""
        index_K = torch.tensor(slots, device=self.device)
        return type(self.state)(*[each.index_select(0, index_K) for each in self.state])

    def advance(self, logp_NV: Tensor) -> tuple[Tensor | None, Tensor]:
        """Advance every slot by one token; return the row that each new row continues, and the new tokens.

        Rows are None if every row continues itself. Overwrites the log-probabilities of PAD and BOS, which must never
        be generated.
        """
        logp_NV = logp_NV.float()
        logp_NV[:, PAD] = NEVER
        logp_NV[:, BOS] = NEVER
        if self.rules:
            prefix = self.prefix
            prefix = prefix._replace(token_NT=prefix.token_NT[:, : int(prefix.length_N.max())])
            for rule in self.rules:
                logp_NV = rule(logp_NV, prefix)
        return self.extend(logp_NV)

    @property
    @abstractmethod
    def done_B(self) -> Tensor:
        """Return which slots are done. They keep running as dummies, so that shapes do not change."""

    @property
    @abstractmethod
    def prefix(self) -> Prefix:
        """Return the prefixes of all rows, for the rules."""

    @abstractmethod
    def make_state(self, jobs: Sequence[Job]) -> Any:
        """Return the initial state of these jobs."""

    @abstractmethod
    def extend(self, logp_NV: Tensor) -> tuple[Tensor | None, Tensor]:
        """Extend the hypotheses of every slot by one token; see `advance`."""

    @abstractmethod
    def results(self, state: Any) -> list[list[SearchResult]]:
        """Return the results of every slot of a state, best first."""


SearchFactory = Callable[[int, torch.device], Search]  # from the highest limit and the device


def sanitize_logp(logp_NV: Tensor) -> Tensor:
    """Forbid PAD and BOS, and NaN and +inf, which only a broken model returns."""
    clean_NV = torch.nan_to_num(logp_NV.float(), nan=NEVER, posinf=NEVER, neginf=NEVER)
    clean_NV[:, PAD] = NEVER
    clean_NV[:, BOS] = NEVER
    return clean_NV


def make_rules(
    constraints: Sequence[DecodingConstraints], settings: BaseSearchSettings, device: torch.device
) -> list[Rule]:
    """Return the rules of these slots. If prefixes are required, one rule applies the others after the prefix."""
    if not settings.no_repeat and not any(each.any for each in constraints):
        return []
    rules = [rule for make in RULES.values() if (rule := make(constraints, settings, device))]
    if not any(each.prefix for each in constraints):
        return rules
    P = max(len(each.prefix) for each in constraints)
    required_BP = torch.tensor([[*each.prefix, *[PAD] * (P - len(each.prefix))] for each in constraints], device=device)
    length_B = torch.tensor([len(each.prefix) for each in constraints], device=device)

    def force_prefixes(logp_NV: Tensor, prefix: Prefix) -> Tensor:
        W = len(logp_NV) // len(length_B)
        inside_N = prefix.length_N < length_B.repeat_interleave(W)
        position_N1 = prefix.length_N.clamp(max=P - 1)[:, None]
        token_N1 = required_BP.repeat_interleave(W, 0).gather(1, position_N1)
        only_NV = torch.full_like(logp_NV, NEVER).scatter(1, token_N1, logp_NV.gather(1, token_N1))
        for rule in rules:
            logp_NV = rule(logp_NV, prefix)
        return torch.where(inside_N[:, None], only_NV, logp_NV)

    return [force_prefixes]


def forbid_repeats(_: Sequence[DecodingConstraints], settings: BaseSearchSettings, __: torch.device) -> Rule | None:
    """Forbid a token that would complete an n-gram which the prefix already has."""
    n = settings.no_repeat

    def rule(logp_NV: Tensor, prefix: Prefix) -> Tensor:
        token_NT, length_N = prefix
        if token_NT.size(1) < n:
            return logp_NV
        ngram_NGn = token_NT.unfold(1, n, 1)
        begin_G = torch.arange(ngram_NGn.size(1), device=token_NT.device)
        back_n = torch.arange(1 - n, 0, device=token_NT.device)
        last_Nn = token_NT.gather(1, (length_N[:, None] + back_n).clamp(min=0))
        repeated_NG = (begin_G + n <= length_N[:, None]) & (ngram_NGn[:, :, :-1] == last_Nn[:, None]).all(-1)
        token_NG = torch.where(repeated_NG, ngram_NGn[:, :, -1], PAD)  # which is forbidden anyway
        return logp_NV.scatter(1, token_NG, NEVER)

    return rule if n else None


def forbid_early_end(
    constraints: Sequence[DecodingConstraints], _: BaseSearchSettings, device: torch.device
) -> Rule | None:
    """Forbid EOS before the minimum length of a sentence."""
    if not any(each.minimum for each in constraints):
        return None
    least_B = torch.tensor([each.minimum for each in constraints], device=device)

    def rule(logp_NV: Tensor, prefix: Prefix) -> Tensor:
        early_N = prefix.length_N < least_B.repeat_interleave(len(logp_NV) // len(least_B))
        ends_V = torch.arange(logp_NV.size(1), device=logp_NV.device) == EOS
        return logp_NV.masked_fill(early_N[:, None] & ends_V, NEVER)

    return rule


def forbid_terms(
    constraints: Sequence[DecodingConstraints], _: BaseSearchSettings, device: torch.device
) -> Rule | None:
    """Forbid tokens that would complete a term to avoid.

    All automata are in one table, each with its states after the last one's. Sentences with fewer terms than others run
    an automaton that never accepts.
    """
    terms = [each.avoid for each in constraints]
    if not any(terms):
        return None
    automata = list({id(term): term for some in terms for term in some}.values())
    first = dict(zip(map(id, automata), np.cumsum([1, *(len(m.left_S) for m in automata)]).tolist()))
    K, V = max(map(len, terms)), automata[0].next_SV.shape[1]
    idle_SV = np.zeros((1, V), dtype=np.int32)
    next_SV = torch.tensor(
        np.vstack([idle_SV, *(m.next_SV.astype(np.int32) + first[id(m)] for m in automata)]), device=device
    )
    accepts_S = torch.tensor(np.concatenate([[False], *(m.left_S == 0 for m in automata)]), device=device)
    ends_S = torch.tensor(np.concatenate([[False], *(m.ends_S for m in automata)]), device=device)
    begins = [[*(first[id(term)] for term in some), *[0] * (K - len(some))] for some in terms]
    begin_BK = torch.tensor(begins, dtype=torch.int32, device=device)

    def rule(logp_NV: Tensor, prefix: Prefix) -> Tensor:
        state_NK = begin_BK.repeat_interleave(len(logp_NV) // len(begin_BK), 0)
        for position in range(prefix.token_NT.size(1)):
            there_N1 = (position < prefix.length_N)[:, None]
            state_NK = torch.where(there_N1, next_SV[state_NK, prefix.token_NT[:, position, None]], state_NK)
        complete_NK = accepts_S[state_NK]  # a required prefix may contain the term
        forbidden_NV = (accepts_S[next_SV[state_NK]] & ~complete_NK[:, :, None]).any(1)
        forbidden_NV[:, EOS] = (ends_S[state_NK] & ~complete_NK).any(1)
        return logp_NV.masked_fill(forbidden_NV, NEVER)

    return rule


RULES: dict[str, Callable[[Sequence[DecodingConstraints], BaseSearchSettings, torch.device], Rule | None]] = {
    "no_repeat": forbid_repeats,
    "minimum": forbid_early_end,
    "avoid": forbid_terms,
}
