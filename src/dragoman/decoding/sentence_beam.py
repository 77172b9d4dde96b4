"""Beam search of one sentence in plain Python, and two variants of it.

`SentenceBeam` is the readable reference implementation of beam.py, which decodes many sentences at once. The variants
differ in the candidates that they keep at each step:

    DiverseBeam      the beam is divided into groups; a token that one group has just chosen is penalized in later ones
    ConstrainedBeam  the beam is divided into banks, by the number of missing tokens of the required terms

`SentenceSearches` runs one of these searches per slot.

Shapes   W beams of a sentence   N rows of the model   V vocabulary   L active beams   K terms   T length of a result
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.config.settings import setting
from dragoman.decoding.beam import LENGTH_NORMS, STOP_RULES, stable_topk
from dragoman.decoding.protocol import NEVER, BaseSearchSettings, Job, Prefix, Search, SearchResult, sanitize_logp
from dragoman.types import EOS, PAD


class Extension(NamedTuple):
    """A candidate for the next step: an active beam extended by one token."""

    row: int  # index of the beam that is extended
    token: int
    logp: float  # log-probability of all tokens together


def pad_extensions(extensions: list[Extension], width: int) -> list[Extension]:
    """Add dummy extensions, so that there is one for each of the `width` rows of the model."""
    return extensions + [Extension(0, EOS, NEVER)] * (width - len(extensions))


class SentenceBeam:
    """Beam search of one sentence.

    `active` holds the tokens and the log-probability of each active beam, best first. `finished` holds the hypotheses
    that ended with EOS, best first. Sums are computed in float32, so that they equal those of beam.py.
    """

    def __init__(self, job: Job, settings: BaseSearchSettings, width: int, device: torch.device) -> None:  # noqa: ARG002
        self.limit, self.width, self.nbest = job.limit, width, min(settings.nbest, width)
        self.norm_T = LENGTH_NORMS[settings.length_norm](self.limit, settings.length_penalty)
        self.should_stop = STOP_RULES[settings.stop]
        self.active: list[tuple[list[int], float]] = [([], 0.0)]
        self.finished: list[SearchResult] = []
        self.done = self.limit == 0

    def advance(self, logp_WV: Tensor, cost_V: Tensor | float = 0.0) -> list[Extension]:
        """Extend the beams by one token; return the extensions that stay active, at most W.

        `logp_WV` are the log-probabilities of the token. Candidates are ranked by their total log-probability minus
        `cost_V`; scores do not include this cost.
        """
        total_LV = self.add_logp(logp_WV)
        best = self.find_candidates(total_LV, total_LV - cost_V, 2 * self.width)
        ends = [candidate for candidate in best[: self.width] if candidate.token == EOS]
        return self.extend(ends, [candidate for candidate in best if candidate.token != EOS][: self.width])

    def add_logp(self, logp_WV: Tensor) -> Tensor:
        """Return the log-probability of every continuation of the active beams."""
        active_L = torch.tensor([logp for _, logp in self.active], device=logp_WV.device)
        return active_L[:, None] + logp_WV[: len(self.active)]

    @staticmethod
    def find_candidates(total_LV: Tensor, rank_LV: Tensor, count: int) -> list[Extension]:
        """Return the `count` candidates with the highest `rank_LV`, best first.

        If ranks are equal, the better beam comes first, then the lower token.
        """
        V = total_LV.size(1)
        rank_1K, index_1K = stable_topk(rank_LV.reshape(1, -1), count)
        logps = total_LV.flatten()[index_1K[0]].tolist()
        rows = zip(rank_1K[0].tolist(), index_1K[0].tolist(), logps, strict=True)
        return [Extension(index // V, index % V, logp) for rank, index, logp in rows if rank > NEVER]

    def extend(self, ends: list[Extension], active: list[Extension]) -> list[Extension]:
        """Finish the beams in `ends`, make `active` the new active beams and return it. Decide whether to stop."""
        if not ends and not active:
            self.done = True
            return []
        for end in ends:
            tokens = self.active[end.row][0]
            self.finished.append(SearchResult(tokens, end.logp, self.score(end.logp, len(tokens) + 1), True))
        self.finished = sorted(self.finished, key=lambda result: -result.score)[: self.width]
        self.active = [([*self.active[new.row][0], new.token], new.logp) for new in active]
        self.done = not active or len(self.active[0][0]) >= self.limit
        if not self.done:
            scores = [result.score for result in self.finished] + [NEVER] * (self.width - len(self.finished))
            bound_B = torch.tensor([max(logp for _, logp in self.active)]) / self.norm_T[self.limit]  # B = 1
            self.done = bool(self.should_stop(torch.tensor([scores]), bound_B, self.nbest))
        return active

    def score(self, logp: float, length: int) -> float:
        """Return the log-probability, normalized for the length including EOS."""
        return float(torch.tensor(logp) / self.norm_T[length])

    def results(self) -> list[SearchResult]:
        """Return finished results by score, then, if there are fewer than `nbest`, unfinished ones."""
        if self.limit == 0:
            return []
        unfinished = [SearchResult(tokens, logp, self.score(logp, len(tokens)), False) for tokens, logp in self.active]
        return (self.finished + unfinished)[: self.nbest]


class DiverseSettings(BaseSearchSettings):
    """The settings of diverse beam search."""

    groups: int = setting(4, "diverse: number of groups of the beam, which avoid each other's tokens", ge=1, le=1000)
    diversity: float = setting(0.5, "diverse: penalty of a token per earlier group that has chosen it", ge=0, le=100)


class DiverseBeam:
    """Diverse beam search of one sentence (Vijayakumar 2018): several groups, each a beam search of the same width.

    The alternative, sampling without replacement (Kool 2019), needs a well-chosen temperature, and its best result is
    not that of beam search. Here the first group is a plain beam search, and nothing is random.
    """

    def __init__(self, job: Job, settings: DiverseSettings, width: int, device: torch.device) -> None:
        self.width, self.penalty, self.nbest = width // settings.groups, settings.diversity, settings.nbest
        settings = settings.model_copy(update={"nbest": self.width})
        self.groups = [SentenceBeam(job, settings, self.width, device) for _ in range(settings.groups)]

    @property
    def done(self) -> bool:
        return all(group.done for group in self.groups)

    def advance(self, logp_WV: Tensor) -> list[Extension]:
        """Advance the groups in order. Each use of a token in this step adds `penalty` to its cost in later groups."""
        cost_V = torch.zeros_like(logp_WV[0])
        extensions = []
        for number, group in enumerate(self.groups):
            first = number * self.width
            chosen = [] if group.done else group.advance(logp_WV[first:], cost_V)
            for extension in chosen:
                cost_V[extension.token] += self.penalty
            padded = pad_extensions(chosen, self.width)
            extensions += [extension._replace(row=first + extension.row) for extension in padded]
        return extensions

    def results(self) -> list[SearchResult]:
        """Take the best of each group, then the second of each, and so on without repeats; sort them by score."""
        by_group = [group.results() for group in self.groups]
        by_tokens: dict[tuple[int, ...], SearchResult] = {}
        for result in (results[rank] for rank in range(self.width) for results in by_group if rank < len(results)):
            by_tokens.setdefault(tuple(result.tokens), result)
        return sorted(list(by_tokens.values())[: self.nbest], key=lambda result: (not result.finished, -result.score))


class ConstrainedBeam(SentenceBeam):
    """Beam search of one sentence in which terms must appear. Terms that the vocabulary cannot spell are ignored.

    Plain beam search drops a prefix with an unlikely term before the term is complete. So the beams are divided into
    banks, one for each number of tokens that the terms still need, and each bank keeps its best beams (Post and Vilar
    2018). The automata of the terms (see `Term`) give this number for every beam, however a term is tokenized; it
    rises again if a beam starts a term and does not complete it. For each term, every beam also tries the most probable
    token that lowers the number. A beam cannot end before all terms are complete.
    """

    def __init__(self, job: Job, settings: BaseSearchSettings, width: int, device: torch.device) -> None:
        super().__init__(job, settings, width, device)
        terms = job.constraints.spellable
        # The tables of each term's automaton, which `Term` explains
        self.next = [torch.tensor(term.next_SV, device=device) for term in terms]
        self.missing = [torch.tensor(term.missing_S, device=device) for term in terms]
        self.ends = [torch.tensor(term.ends_S, device=device) for term in terms]
        self.states: list[list[int]] = [[0] * len(terms)]  # for each active beam, the state of each term's automaton

    def advance(self, logp_WV: Tensor, cost_V: Tensor | float = 0.0) -> list[Extension]:  # noqa: ARG002
        """Extend the beams by one token; keep the best candidate of each bank, then the second best, and so on."""
        total_LV = self.add_logp(logp_WV)
        state_KL = torch.tensor(self.states, device=total_LV.device).T
        terms = zip(self.next, self.missing, self.ends, state_KL, strict=True)
        tables = [(missing_S[next_SV[state_L].int()], ends_S[state_L]) for next_SV, missing_S, ends_S, state_L in terms]
        missing_KLV, may_end_KL = (torch.stack(tensors) for tensors in zip(*tables, strict=True))
        total_LV[:, EOS] = torch.where(may_end_KL.all(0), total_LV[:, EOS], NEVER)
        missing_LV = missing_KLV.sum(0)
        missing_LV[:, EOS] = 0  # a beam that may end has all terms
        # EOS has no bytes and leaves the automata unchanged, so its column has the missing tokens before this step.
        progress_KLV = missing_KLV < missing_KLV[:, :, EOS, None]
        banks = defaultdict(list)
        for candidate in self.list_candidates(total_LV, progress_KLV):
            banks[int(missing_LV[candidate.row, candidate.token])].append(candidate)
        ends = [candidate for candidate in banks[0][: self.width] if candidate.token == EOS]
        by_bank = [[candidate for candidate in banks[missing] if candidate.token != EOS] for missing in sorted(banks)]
        active = [candidate for rank in zip_longest(*by_bank) for candidate in rank if candidate][: self.width]
        parents = [(self.states[new.row], new.token) for new in active]
        states = [[int(table[s, token]) for table, s in zip(self.next, old, strict=True)] for old, token in parents]
        extensions = self.extend(ends, active)
        self.states = states or self.states
        return extensions

    def list_candidates(self, total_LV: Tensor, progress_KLV: Tensor) -> list[Extension]:
        """Return the 2W best candidates, the best of each beam, and the best of each beam that advances each term.

        `progress_KLV` is True where a token lowers the number of missing tokens of a term.
        """
        advancing_KLV = torch.where(progress_KLV, total_LV, NEVER)
        logp, token = torch.cat([total_LV[None], advancing_KLV]).max(-1)
        best_of_beams = [
            Extension(row, *token_and_logp)
            for logps, tokens in zip(logp.tolist(), token.tolist(), strict=True)
            for row, token_and_logp in enumerate(zip(tokens, logps, strict=True))
        ]
        candidates = best_of_beams + self.find_candidates(total_LV, total_LV, 2 * self.width)
        unique = {(item.row, item.token): item for item in candidates if item.logp > NEVER}
        return sorted(unique.values(), key=lambda item: (-item.logp, item.row, item.token))

    def results(self) -> list[SearchResult]:
        """Return the results that contain all terms; there may be none."""
        complete = [all(bool(ends_S[s]) for ends_S, s in zip(self.ends, states, strict=True)) for states in self.states]
        self.active = [beam for beam, has_terms in zip(self.active, complete, strict=False) if has_terms]
        return super().results()


SentenceSearch = SentenceBeam | DiverseBeam


class SentenceSlot(NamedTuple):
    """The search of one sentence."""

    search: SentenceSearch
    prefixes: list[list[int]]  # the tokens so far of each of the W rows, for the rules


class SentenceSearches(Search):
    """A `Search` that runs a separate search of one sentence in each slot."""

    state: list[SentenceSlot]

    def __init__(
        self,
        search_class: Callable[[Job, DiverseSettings, int, torch.device], SentenceSearch],
        settings: DiverseSettings,
        width: int,
        max_length: int,
        device: torch.device,
    ) -> None:
        super().__init__(settings, width, max_length, device)
        self.make_search: Callable[[Job], SentenceSearch] = lambda job: search_class(job, settings, width, device)

    @property
    def done_B(self) -> Tensor:
        return torch.tensor([slot.search.done for slot in self.state], device=self.device)

    @property
    def prefix(self) -> Prefix:
        prefixes = [tokens for slot in self.state for tokens in slot.prefixes]
        T = max(map(len, prefixes))
        padded = [[*tokens, *[PAD] * (T - len(tokens))] for tokens in prefixes]
        length_N = torch.tensor([len(tokens) for tokens in prefixes], device=self.device)
        return Prefix(torch.tensor(padded, dtype=torch.long, device=self.device), length_N)

    def make_state(self, jobs: Sequence[Job]) -> list[SentenceSlot]:
        return [SentenceSlot(self.make_search(job), [[]] * self.width) for job in jobs]

    def put(self, slots: Sequence[int], jobs: Sequence[Job]) -> None:
        for slot, job, new in zip(slots, jobs, self.make_state(jobs), strict=True):
            self.jobs[slot], self.state[slot] = job, new
        self.set_jobs(self.jobs, self.state)

    def select(self, slots: Sequence[int]) -> list[SentenceSlot]:
        return [self.state[slot] for slot in slots]

    def extend(self, logp_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the sentences one after the other."""
        rows, tokens = [], []
        for b, (slot, logp_WV) in enumerate(
            zip(self.state, torch.split(sanitize_logp(logp_NV), self.width), strict=True)
        ):
            extensions = pad_extensions([] if slot.search.done else slot.search.advance(logp_WV), self.width)
            if not slot.search.done:
                self.state[b] = slot._replace(prefixes=[[*slot.prefixes[row], token] for row, token, _ in extensions])
            rows += [b * self.width + extension.row for extension in extensions]
            tokens += [extension.token for extension in extensions]
        return torch.tensor(rows, device=self.device), torch.tensor(tokens, device=self.device)

    def results(self, state: list[SentenceSlot]) -> list[list[SearchResult]]:
        return [slot.search.results() for slot in state]
