"""The base class of searches, and the rules that forbid tokens.

A search holds the hypotheses of sentences that are decoded side by side, one sentence per slot. It never sees the
model: it takes log-probabilities, and returns which rows of the model continue and with which tokens. One loop drives
all searches (continuous_batching.py); sentences come and go while it runs.

A rule takes log-probabilities and the prefixes, and writes NEVER where it forbids a token. The rest is not rescaled, so
that scores stay the model's own. A required prefix takes precedence over all other rules.

Shapes   B slots   W rows of a slot   N = B * W   V vocabulary   T width of the prefixes   K terms, or some slots
         G n-grams of a prefix   P width of the required prefixes
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dragoman.config.settings import SearchSettings
from dragoman.decoding.protocol import NEVER, DecodingConstraints, Job, SearchResult
from dragoman.types import BOS, EOS, PAD


class Prefix(NamedTuple):
    """The tokens of the rows so far: the first `length` of each are valid. Rows of one slot are adjacent."""

    token_NT: Tensor
    length_N: Tensor


Rule = Callable[[Tensor, Prefix], Tensor]


class Search(ABC):
    """Sentences that are searched side by side, one per slot, with `width` adjacent rows of the model each.

    `longest` is the highest limit of any job that will come. A job with limit 0 is done from the beginning. Here the
    state of a search is a NamedTuple of tensors with one entry per slot; subclasses may keep another one.
    """

    state: Any

    def __init__(self, settings: SearchSettings, width: int, longest: int, device: torch.device) -> None:
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
        """Advance every slot by one token; return which rows continue, in which order, and their tokens.

        No rows are returned if all continue as they are. Overwrites the log-probabilities of PAD and BOS, which must
        never come out.
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
        """Return the state of jobs that begin."""

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
    constraints: Sequence[DecodingConstraints], settings: SearchSettings, device: torch.device
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


def forbid_repeats(_: Sequence[DecodingConstraints], settings: SearchSettings, __: torch.device) -> Rule | None:
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
    constraints: Sequence[DecodingConstraints], _: SearchSettings, device: torch.device
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


def forbid_terms(constraints: Sequence[DecodingConstraints], _: SearchSettings, device: torch.device) -> Rule | None:
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


RULES: dict[str, Callable[[Sequence[DecodingConstraints], SearchSettings, torch.device], Rule | None]] = {
    "no_repeat": forbid_repeats,
    "minimum": forbid_early_end,
    "avoid": forbid_terms,
}
