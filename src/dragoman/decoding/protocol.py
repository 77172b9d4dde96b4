"""The interface between search and models, the data types of all decoding methods, and the base class of searches.

    state = model.start(source_BS, real_BS)          # one row per sentence
    logp_NV, state = model.step(token_N, state)      # one token per row in, log-probabilities of the next token out
    state = state.select(rows_N)                     # keep these rows, in this order

A search is independent of the kind of model; an `Ensemble` implements the same protocol. A `Search` decodes several
sentences together, each in a slot; the schedulers in continuous_batching.py drive it.

Constraints can require or forbid terms, given as text. The term "Hund" may be tokenized as one token, as "Hu" and "nd",
or letter by letter. So a term is compiled into a finite automaton over the bytes of the text, and then into a table of
the state after each token. A term matches whole words only: "Hund" does not appear in "Hundertwasser".

Shapes   B sentences, one per slot   S source length, or states of an automaton   N rows of the model   V vocabulary
         W rows per sentence (N = B * W)   L bytes of the longest token   T tokens of the longest prefix
         K selected slots, or terms of a sentence   P tokens of the longest required prefix   G n-grams of a prefix
         n tokens of an n-gram
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.config.settings import Amount, SampleSettings, Seed, setting
from dragoman.types import BOS, EOS, PAD, TokenFeature

ByteSet = frozenset[int]
BytePattern = tuple[ByteSet, ...]  # the bytes allowed at each position of a text
UNREACHABLE = 1 << 20  # number of missing tokens if the vocabulary cannot complete a term
ANY_BYTE: ByteSet = frozenset(range(256))
CONTINUATION: ByteSet = frozenset(range(0x80, 0xC0))  # the bytes of a character in UTF-8 after the first
ASCII_BREAKS: ByteSet = frozenset(b for b in range(0x80) if not chr(b).isalnum())
WORD_BREAKS: list[BytePattern] = [  # characters that are not part of words, in UTF-8
    (ASCII_BREAKS,),
    (frozenset({0xC2}), CONTINUATION),  # Latin-1 punctuation
    (frozenset({0xE2}), frozenset({0x80, 0x81}), CONTINUATION),  # general punctuation
    (frozenset({0xE3}), frozenset({0x80}), CONTINUATION),  # CJK punctuation
    (frozenset({0xEF}), frozenset({0xBC}), CONTINUATION),  # full-width forms
]


@dataclass(frozen=True, eq=False)
class Term:
    """A term, as a finite automaton that reads the tokens of a text.

    State 0 is the start of a text. State S - 1, which the automaton never leaves, means that the term has occurred.
    """

    text: str
    next_SV: NDArray[np.int16]  # the state after each token
    missing_S: NDArray[np.int32]  # the minimum number of tokens until the term has occurred
    complete_at_end_S: NDArray[np.bool_]  # whether the term has occurred if the text ends in this state

    @property
    def is_spellable(self) -> bool:
        return int(self.missing_S[0]) < UNREACHABLE


class TokenByteTable:
    """The bytes of every token of a vocabulary, from which the automata of terms are built.

    `byte_VL` has a row for each token, the longest first; `order_V` are the token ids of the rows.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.length_V = np.array([len(token) for token in token_bytes])
        self.order_V = np.argsort(-self.length_V, kind="stable")
        self.byte_VL = np.zeros((len(token_bytes), max(self.length_V)), dtype=np.uint8)
        for row, token in enumerate(self.order_V):
            self.byte_VL[row, : len(token_bytes[token])] = np.frombuffer(token_bytes[token], dtype=np.uint8)

    def build_term(self, text: str, case_variants: Iterable[bytes], *, before: bool, after: bool) -> Term:
        """Build the automaton of a term. `before` and `after`: whether it needs a word boundary on that side."""
        next_S256, complete_at_end_S = build_automaton(case_variants, before=before, after=after)
        states = len(next_S256)
        # Feed the bytes of all tokens to the automaton, from every state, one column of bytes after the other.
        sorted_SV = np.repeat(np.arange(states, dtype=np.int16)[:, None], len(self.length_V), axis=1)
        for column, byte_V in enumerate(self.byte_VL.T):
            count = int((self.length_V > column).sum())  # tokens with a byte in this column; they come first
            sorted_SV[:, :count] = next_S256[sorted_SV[:, :count], byte_V[:count]]
        next_SV = np.empty_like(sorted_SV)
        next_SV[:, self.order_V] = sorted_SV
        # Shortest paths to the accepting state: repeat until no path gets shorter.
        missing_S = np.full(states, UNREACHABLE, dtype=np.int32)
        missing_S[-1] = 0
        while (shorter_S := np.minimum(missing_S, missing_S[next_SV].min(1) + 1)).tolist() != missing_S.tolist():
            missing_S = shorter_S
        return Term(text, next_SV, missing_S, complete_at_end_S)


def build_automaton(
    case_variants: Iterable[bytes], *, before: bool, after: bool
) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    """Build the automaton of a term over bytes; return the state after each byte, next_S256, and `complete_at_end_S`.

    It accepts the term in each of its `case_variants`. A state is the set of what remains to be read of all occurrences
    that have begun, as patterns. The empty pattern remains when an occurrence is complete. An occurrence may begin at
    every byte; the start of the text counts as a word boundary.
    """
    # `at_start` has the patterns of occurrences at the start of the text, `patterns` those after another character.
    ends = WORD_BREAKS if after else [()]
    at_start = [(*(frozenset({byte}) for byte in variant), *end) for variant in case_variants for end in ends]
    patterns = [(*begin, *rest) for begin in (WORD_BREAKS if before else [(ANY_BYTE,)]) for rest in at_start]
    byte_sets = list({byte_set for pattern in patterns for byte_set in pattern})
    byte_classes: dict[tuple[bool, ...], list[int]] = {}  # bytes in the same byte sets lead to the same states
    for byte in range(256):
        byte_classes.setdefault(tuple(byte in byte_set for byte_set in byte_sets), []).append(byte)
    begun = {byte: [pattern[1:] for pattern in patterns if byte in pattern[0]] for byte, *_ in byte_classes.values()}
    complete: frozenset[BytePattern] = frozenset({()})
    states, rows = [frozenset(at_start)], []
    state_numbers = {states[0]: 0}
    for state in states:  # new states are appended while the loop runs
        row = np.zeros(256, dtype=np.int64)
        for byte_class in byte_classes.values():
            byte = byte_class[0]  # any byte of the class
            next_state = frozenset([*begun[byte], *(rest[1:] for rest in state if rest and byte in rest[0])])
            next_state = complete if state == complete or () in next_state else next_state
            if next_state not in state_numbers:
                state_numbers[next_state] = len(states)
                states.append(next_state)
            row[byte_class] = state_numbers[next_state]
        rows.append(row)
    order = sorted(range(len(states)), key=lambda i: states[i] == complete)  # the accepting state comes last
    next_S256 = np.argsort(order)[np.stack(rows)[order]].astype(np.int16)
    return next_S256, np.array([states[i] == complete or not states[i].isdisjoint(ends) for i in order])


NEG_INF = float("-inf")  # log-probability of tokens that must not be generated


class BaseSearchSettings(SampleSettings):
    """The settings that several decoding methods share. The inherited ones are for the methods sample and mbr."""

    method: str = setting("beam", "decoding method")
    beam: int = setting(4, "number of hypotheses kept at each step; 1 is greedy search", ge=1, le=1000)
    nbest: int = setting(1, "number of hypotheses returned per line", ge=1, le=1000)
    length_norm: str = setting("length", "divide log-probabilities by length ** length_penalty, the GNMT formula, or 1")
    length_penalty: float = setting(1.0, "exponent of the length normalization", ge=0, le=10)
    coverage: float = setting(0.0, "weight of the coverage penalty (Wu et al., 2016)", ge=0, le=100)
    stop: str = setting(
        "enough",
        "when to stop: enough (`finish` hypotheses are finished, or the results cannot improve), best (the results "
        "cannot improve), ahead (`beam` hypotheses are finished and none scores lower than the best prefix), limit "
        "(at the maximum length)",
    )
    finish: int = setting(0, "stop=enough: finished hypotheses that are enough; 0: as many as the beam", ge=0, le=1000)
    no_repeat: int = setting(0, "never repeat an n-gram of this length; 0: off", ge=0, le=1000)
    min_ratio: float = setting(0.0, "output tokens >= min_ratio * source tokens", ge=0, le=100)
    max_ratio: float = setting(2.0, "output tokens <= max_ratio * source tokens + max_extra", gt=0, le=100)
    max_extra: int = setting(16, "tokens added to the length limit, see max_ratio", ge=0, le=10_000)
    max_tokens: Amount = setting(0, "output tokens, EOS included, of any source, besides max_ratio; 0: no such limit")
    seed: Seed = setting(1, "seed of sampling, combined with the text of the line")
    unknown: str = setting("drop", "word vocabularies: how to treat <unk> in the output")
    scores: bool = setting(True, "compute scores; false: engines may return nan if that is faster")


class SearchState(Protocol):
    """The state of a model after reading the prefixes (the tokens so far) of a search, one row per prefix."""

    def select(self, rows_N: Tensor) -> Self:
        """Return the state of these rows, in this order. Rows may repeat, and their number may change."""
        ...


StateT = TypeVar("StateT", bound=SearchState)


class StepModel(Protocol[StateT]):
    """A model that predicts one token at a time."""

    def start(self, source_BS: Tensor, real_BS: Tensor) -> StateT:
        """Encode the sources and return the state of empty prefixes; `real_BS` is False at padding."""
        ...

    def step(self, token_N: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Read the next token of every prefix, first BOS; return the log-probabilities logp_NV and the new state."""
        ...


@dataclass(frozen=True, slots=True)
class DecodingConstraints:
    """Constraints on the translation of one sentence."""

    prefix: tuple[int, ...] = ()  # tokens that the translation must start with
    language_tokens: int = 0  # first tokens of the prefix that are not part of the translation, with log-probability 0
    required: tuple[Term, ...] = ()
    avoid: tuple[Term, ...] = ()
    min_tokens: int = 0  # minimum number of tokens, without EOS
    seed_text: str = ""  # the source text, from which the random numbers of a sentence are derived

    @property
    def is_constrained(self) -> bool:
        return bool(self.prefix or self.required or self.avoid or self.min_tokens)

    @property
    def spellable_terms(self) -> list[Term]:
        return [term for term in self.required if term.is_spellable]

    @property
    def needed_tokens(self) -> int:
        """The minimum number of tokens of the required terms that the vocabulary can spell."""
        return sum(int(term.missing_S[0]) for term in self.spellable_terms)


SlotConstraints = Sequence[DecodingConstraints]  # one element per slot


class SearchJob(NamedTuple):
    """A source sentence to decode."""

    ids: list[int]  # without BOS and EOS
    max_tokens: int  # maximum number of tokens of a result, including EOS; 0: no result
    constraints: DecodingConstraints = DecodingConstraints()
    features: Mapping[str, TokenFeature] = {}  # features of the source, for models that need them


@dataclass(frozen=True, slots=True)
class SearchResult:
    """One hypothesis."""

    tokens: list[int]  # without BOS and EOS
    logp: float  # sum of the log-probabilities of its tokens and EOS
    score: float  # logp after length normalization, by which hypotheses are ranked
    finished: bool  # False if there is no EOS: the limit was reached, or no token had a probability above 0
    warning: str = ""  # becomes a warning of the hypothesis


Results = list[list[SearchResult]]  # of each job, best first
IndexedResults = Iterator[tuple[int, list[SearchResult]]]  # the index of a job, and its results


@dataclass(frozen=True)
class EnsembleState:
    """The states of all models of an ensemble. Its methods (`SlotState`, continuous_batching.py) call theirs."""

    states: tuple[Any, ...]  # one state per model

    def select(self, rows_N: Tensor) -> EnsembleState:
        return EnsembleState(tuple(state.select(rows_N) for state in self.states))

    def keep_sentences(self, sentences_K: Tensor) -> EnsembleState:
        return EnsembleState(tuple(state.keep_sentences(sentences_K) for state in self.states))

    def replace_sentences(self, sentences_K: Tensor, fresh: EnsembleState) -> EnsembleState:
        pairs = zip(self.states, fresh.states, strict=True)
        return EnsembleState(tuple(old.replace_sentences(sentences_K, new) for old, new in pairs))

    def reset_finished(self, done_B: Tensor) -> EnsembleState:
        return EnsembleState(tuple(state.reset_finished(done_B) for state in self.states))


@dataclass(frozen=True)
class Ensemble:
    """Models with the same vocabulary, whose probabilities are averaged.

    `start` takes at most one mapping of `features`: from names of features of the source tokens (data/features.py) to
    their values, for models that need them.
    """

    models: Sequence[StepModel[Any]]

    def start(self, source_BS: Tensor, real_BS: Tensor, *features: Mapping[str, Tensor]) -> EnsembleState:
        return EnsembleState(tuple(model.start(source_BS, real_BS, *features) for model in self.models))

    def step(self, token_N: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
        pairs = [model.step(token_N, member) for model, member in zip(self.models, state.states, strict=True)]
        return mean_logp([logp_NV for logp_NV, _ in pairs]), EnsembleState(tuple(member for _, member in pairs))


def mean_logp(logps: Sequence[Tensor]) -> Tensor:
    """Return the log of the mean probability.

    The mean of probabilities, unlike that of log-probabilities, lets one confident model outvote several unsure ones.
    """
    return (torch.stack([logp.float() for logp in logps]).logsumexp(0) - math.log(len(logps))).clamp(max=0)


class Prefix(NamedTuple):
    """The tokens generated so far, one row per hypothesis. The rows of a slot are adjacent."""

    token_NT: Tensor
    length_N: Tensor  # number of valid tokens of each row


Rule = Callable[[Tensor, Prefix], Tensor]  # returns logp_NV with NEG_INF for the tokens that the rule forbids


def copy_to_device(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Return numbers as a tensor on the device. The host does not wait for work that the device has not finished."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class Search(ABC):
    """The search for the translations of several sentences, one per slot, with `width` adjacent rows of the model each.

    `max_length` is the greatest `max_tokens` of all jobs; a job whose `max_tokens` is 0 is done from the beginning. By
    default, `state` is a NamedTuple of tensors whose first axis is the slots; a subclass with another state overrides
    `replace_jobs` and `select`.
    """

    state: Any

    def __init__(self, settings: BaseSearchSettings, width: int, max_length: int, device: torch.device) -> None:
        self.settings, self.width, self.max_length, self.device = settings, width, max_length, device

    def start_jobs(self, jobs: Sequence[SearchJob]) -> None:
        self.jobs, self.state = list(jobs), self.make_state(jobs)
        self.update_rules()

    def update_rules(self) -> None:
        self.rules = make_rules([job.constraints for job in self.jobs], self.settings, self.device)

    def replace_jobs(self, slots: Sequence[int], jobs: Sequence[SearchJob]) -> None:
        """Start new jobs in these slots; their old searches are discarded."""
        index_K, new = copy_to_device(slots, self.device), dict(zip(slots, jobs, strict=True))
        pairs = zip(self.state, self.make_state(jobs), strict=True)
        self.state = type(self.state)(*[old.index_copy(0, index_K, fresh) for old, fresh in pairs])
        self.jobs = [new.get(slot, job) for slot, job in enumerate(self.jobs)]
        self.update_rules()

    def keep_slots(self, slots: Sequence[int]) -> None:
        """Keep these slots, in this order, and remove all others."""
        self.jobs, self.state = [self.jobs[slot] for slot in slots], self.select(slots)
        self.update_rules()

    def select(self, slots: Sequence[int]) -> Any:
        """Return the state of these slots."""
        index_K = copy_to_device(slots, self.device)
        return type(self.state)(*[tensor.index_select(0, index_K) for tensor in self.state])

    def advance(self, logp_NV: Tensor) -> tuple[Tensor | None, Tensor]:
        """Extend the hypotheses of every slot by one token, after forbidding PAD, BOS and what the rules forbid.

        Return, for each row, the previous row that it extends (None if each row extends itself) and its new token.
        The log-probabilities of PAD and BOS are overwritten in `logp_NV`.
        """
        logp_NV = logp_NV.float()
        logp_NV[:, PAD] = NEG_INF
        logp_NV[:, BOS] = NEG_INF
        if self.rules:
            prefix = self.prefix
            prefix = prefix._replace(token_NT=prefix.token_NT[:, : int(prefix.length_N.max())])
            for rule in self.rules:
                logp_NV = rule(logp_NV, prefix)
        return self.extend(logp_NV)

    @property
    @abstractmethod
    def done_B(self) -> Tensor:
        """Which slots are done. Their rows are still computed, so that shapes do not change."""

    @property
    @abstractmethod
    def prefix(self) -> Prefix:
        """The prefixes of all rows, for the rules."""

    @abstractmethod
    def make_state(self, jobs: Sequence[SearchJob]) -> Any:
        """Return the state of these jobs before the first token."""

    @abstractmethod
    def extend(self, logp_NV: Tensor) -> tuple[Tensor | None, Tensor]:
        """Extend the hypotheses of every slot by one token; return the same as `advance`."""

    @abstractmethod
    def results(self, state: Any) -> list[list[SearchResult]]:
        """Return the results of every slot of a state, best first."""


SearchFactory = Callable[[int, torch.device], Search]  # takes `max_length` and the device


def forbid_invalid_tokens(logp_NV: Tensor) -> Tensor:
    """Forbid PAD, BOS, and tokens with NaN or +inf, which only a broken model returns."""
    clean_NV = torch.nan_to_num(logp_NV.float(), nan=NEG_INF, posinf=NEG_INF, neginf=NEG_INF)
    clean_NV[:, PAD] = NEG_INF
    clean_NV[:, BOS] = NEG_INF
    return clean_NV


def make_rules(constraints: SlotConstraints, settings: BaseSearchSettings, device: torch.device) -> list[Rule]:
    """Return the rules of these slots.

    If a prefix is required, there is a single rule: it forces the prefix and applies the other rules after it.
    """
    if not settings.no_repeat and not any(slot.is_constrained for slot in constraints):
        return []
    rules = [rule for make_rule in RULES.values() if (rule := make_rule(constraints, settings, device))]
    prefixes = [slot.prefix for slot in constraints]
    if not any(prefixes):
        return rules
    P = max(map(len, prefixes))
    language_tokens_B = torch.tensor([slot.language_tokens for slot in constraints], device=device)
    required_BP = torch.tensor([[*prefix, *[PAD] * (P - len(prefix))] for prefix in prefixes], device=device)
    length_B = torch.tensor([len(prefix) for prefix in prefixes], device=device)

    def force_prefixes(logp_NV: Tensor, prefix: Prefix) -> Tensor:
        W = len(logp_NV) // len(length_B)
        is_forced_N = prefix.length_N < length_B.repeat_interleave(W)
        position_N1 = prefix.length_N.clamp(max=P - 1)[:, None]
        token_N1 = required_BP.repeat_interleave(W, 0).gather(1, position_N1)
        is_language_N1 = (prefix.length_N < language_tokens_B.repeat_interleave(W))[:, None]
        token_logp_N1 = logp_NV.gather(1, token_N1).masked_fill(is_language_N1, 0.0)
        forced_NV = torch.full_like(logp_NV, NEG_INF).scatter(1, token_N1, token_logp_N1)
        for rule in rules:
            logp_NV = rule(logp_NV, prefix)
        return torch.where(is_forced_N[:, None], forced_NV, logp_NV)

    return [force_prefixes]


def forbid_repeats(_: SlotConstraints, settings: BaseSearchSettings, __: torch.device) -> Rule | None:
    """Forbid tokens that would complete an n-gram that the prefix already contains."""
    n = settings.no_repeat

    def rule(logp_NV: Tensor, prefix: Prefix) -> Tensor:
        token_NT, length_N = prefix
        if token_NT.size(1) < n:
            return logp_NV
        ngram_NGn = token_NT.unfold(1, n, 1)
        start_G = torch.arange(ngram_NGn.size(1), device=token_NT.device)
        offset_n = torch.arange(1 - n, 0, device=token_NT.device)  # of the last n - 1 tokens from the end of a prefix
        last_Nn = token_NT.gather(1, (length_N[:, None] + offset_n).clamp(min=0))
        repeated_NG = (start_G + n <= length_N[:, None]) & (ngram_NGn[:, :, :-1] == last_Nn[:, None]).all(-1)
        token_NG = torch.where(repeated_NG, ngram_NGn[:, :, -1], PAD)  # PAD is forbidden in any case
        return logp_NV.scatter(1, token_NG, NEG_INF)

    return rule if n else None


def forbid_early_end(constraints: SlotConstraints, _: BaseSearchSettings, device: torch.device) -> Rule | None:
    """Forbid EOS before the minimum length of a sentence."""
    if not any(slot.min_tokens for slot in constraints):
        return None
    min_tokens_B = torch.tensor([slot.min_tokens for slot in constraints], device=device)

    def rule(logp_NV: Tensor, prefix: Prefix) -> Tensor:
        early_N = prefix.length_N < min_tokens_B.repeat_interleave(len(logp_NV) // len(min_tokens_B))
        is_eos_V = torch.arange(logp_NV.size(1), device=logp_NV.device) == EOS
        return logp_NV.masked_fill(early_N[:, None] & is_eos_V, NEG_INF)

    return rule


def forbid_terms(constraints: SlotConstraints, _: BaseSearchSettings, device: torch.device) -> Rule | None:
    """Forbid tokens that would complete a term to avoid.

    All automata are in one table: state 0 belongs to an automaton that never accepts, and the states of each term
    follow those of the previous one. Sentences with fewer than K terms run the automaton of state 0 in addition.
    """
    terms_by_slot = [slot.avoid for slot in constraints]
    if not any(terms_by_slot):
        return None
    distinct = list({id(term): term for terms in terms_by_slot for term in terms}.values())
    first_state = dict(zip(map(id, distinct), np.cumsum([1, *(len(term.missing_S) for term in distinct)]).tolist()))
    K, V = max(map(len, terms_by_slot)), distinct[0].next_SV.shape[1]
    idle_1V = np.zeros((1, V), dtype=np.int32)  # state 0 leads to itself
    shifted = [term.next_SV.astype(np.int32) + first_state[id(term)] for term in distinct]
    next_SV = torch.tensor(np.vstack([idle_1V, *shifted]), device=device)
    accepts_S = torch.tensor(np.concatenate([[False], *(term.missing_S == 0 for term in distinct)]), device=device)
    at_end_S = torch.tensor(np.concatenate([[False], *(term.complete_at_end_S for term in distinct)]), device=device)
    starts = [[*(first_state[id(term)] for term in terms), *[0] * (K - len(terms))] for terms in terms_by_slot]
    start_BK = torch.tensor(starts, dtype=torch.int32, device=device)

    def rule(logp_NV: Tensor, prefix: Prefix) -> Tensor:
        state_NK = start_BK.repeat_interleave(len(logp_NV) // len(start_BK), 0)
        for position in range(prefix.token_NT.size(1)):
            valid_N1 = (position < prefix.length_N)[:, None]
            state_NK = torch.where(valid_N1, next_SV[state_NK, prefix.token_NT[:, position, None]], state_NK)
        complete_NK = accepts_S[state_NK]  # if a required prefix contains the term, nothing is forbidden
        forbidden_NV = (accepts_S[next_SV[state_NK]] & ~complete_NK[:, :, None]).any(1)
        forbidden_NV[:, EOS] = (at_end_S[state_NK] & ~complete_NK).any(1)
        return logp_NV.masked_fill(forbidden_NV, NEG_INF)

    return rule


# Functions that return the rule for the constraints of all slots, or None if it would forbid nothing.
RULES: dict[str, Callable[[SlotConstraints, BaseSearchSettings, torch.device], Rule | None]] = {
    "no_repeat": forbid_repeats,
    "min_tokens": forbid_early_end,
    "avoid": forbid_terms,
}
