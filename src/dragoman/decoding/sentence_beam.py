"""Beam search of one sentence in plain Python, and the methods that choose differently among its candidates.

`SentenceBeam` is the readable reference implementation of beam.py, which searches for many sentences at once. The rarer
methods build on it and change only which candidates survive a step:

    DiverseBeam      groups of beams; a token that one group has just used costs the later groups more
    ConstrainedBeam  beams are kept apart by how many tokens of the required terms are still missing

`SentenceSearches` runs them side by side.

Shapes   W beams of a sentence   N rows of the model   V vocabulary   L active beams   K terms
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
    """A candidate: the beam that it extends, the token that it adds, and the log-probability of all its tokens."""

    row: int
    token: int
    logp: float


def pad_extensions(extensions: list[Extension], width: int) -> list[Extension]:
    """Add dummies for the rows that have nothing to extend."""
    return extensions + [Extension(0, EOS, NEVER)] * (width - len(extensions))


class SentenceBeam:
    """Beam search of one sentence.

    `active` holds the tokens and the log-probability of each active beam, best first; `finished` the results that
    reached EOS, best first. Sums are float32, as in beam.py.
    """

    def __init__(self, job: Job, settings: BaseSearchSettings, width: int, device: torch.device) -> None:  # noqa: ARG002
        self.limit, self.width, self.nbest = job.limit, width, min(settings.nbest, width)
        self.norm_T = LENGTH_NORMS[settings.length_norm](self.limit, settings.length_penalty)
        self.should_stop = STOP_RULES[settings.stop]
        self.active: list[tuple[list[int], float]] = [([], 0.0)]
        self.finished: list[SearchResult] = []
        self.done = self.limit == 0

    def advance(self, logp_WV: Tensor, cost_V: Tensor | float = 0.0) -> list[Extension]:
        """Take the log-probabilities of the next token of each beam; return up to W extensions that stay active.

        `cost_V` makes candidates rank lower. Scores ignore it.
        """
        total_LV = self.add_logp(logp_WV)
        best = self.find_candidates(total_LV, total_LV - cost_V, 2 * self.width)
        ends = [one for one in best[: self.width] if one.token == EOS]
        return self.extend(ends, [one for one in best if one.token != EOS][: self.width])

    def add_logp(self, logp_WV: Tensor) -> Tensor:
        """Return the log-probability of every continuation of the active beams."""
        active_L = torch.tensor([logp for _, logp in self.active], device=logp_WV.device)
        return active_L[:, None] + logp_WV[: len(self.active)]

    @staticmethod
    def find_candidates(total_LV: Tensor, rank_LV: Tensor, count: int) -> list[Extension]:
        """Return the candidates of the highest rank, best first; ties go to the better beam, then the lower token."""
        V = total_LV.size(1)
        rank_1K, index_1K = stable_topk(rank_LV.reshape(1, -1), count)
        logps = total_LV.flatten()[index_1K[0]].tolist()
        rows = zip(rank_1K[0].tolist(), index_1K[0].tolist(), logps, strict=True)
        return [Extension(index // V, index % V, logp) for rank, index, logp in rows if rank > NEVER]

    def extend(self, ends: list[Extension], growing: list[Extension]) -> list[Extension]:
        """Add the finished results, replace the active beams by their extensions, and decide whether to stop."""
        if not ends and not growing:
            self.done = True
            return []
        for one in ends:
            tokens = self.active[one.row][0]
            self.finished.append(SearchResult(tokens, one.logp, self.score(one.logp, len(tokens) + 1), True))
        self.finished = sorted(self.finished, key=lambda result: -result.score)[: self.width]
        self.active = [([*self.active[one.row][0], one.token], one.logp) for one in growing]
        self.done = not growing or len(self.active[0][0]) >= self.limit
        if not self.done:
            scores = [result.score for result in self.finished] + [NEVER] * (self.width - len(self.finished))
            hope_1 = torch.tensor([max(logp for _, logp in self.active)]) / self.norm_T[self.limit]
            self.done = bool(self.should_stop(torch.tensor([scores]), hope_1, self.nbest))
        return growing

    def score(self, logp: float, length: int) -> float:
        return float(torch.tensor(logp) / self.norm_T[length])

    def results(self) -> list[SearchResult]:
        """Return finished results by score, then, if there are fewer than `nbest`, unfinished ones."""
        if self.limit == 0:
            return []
        cut = [SearchResult(tokens, logp, self.score(logp, len(tokens)), False) for tokens, logp in self.active]
        return (self.finished + cut)[: self.nbest]


class DiverseSettings(BaseSearchSettings):
    groups: int = setting(4, "diverse: number of groups of the beam, which avoid each other's tokens", ge=1, le=1000)
    diversity: float = setting(0.5, "diverse: penalty of a token per earlier group that has chosen it", ge=0, le=100)


class DiverseBeam:
    """Diverse beam search (Vijayakumar 2018): several groups, each a beam search of the same width.

    The alternative, sampling without replacement (Kool 2019), needs a temperature to give good results, and its best
    one is not the one that beam search finds. Here the first group is a plain beam search and nothing is random.
    """

    def __init__(self, job: Job, settings: DiverseSettings, width: int, device: torch.device) -> None:
        self.width, self.penalty, self.nbest = width // settings.groups, settings.diversity, settings.nbest
        settings = settings.model_copy(update={"nbest": self.width})
        self.groups = [SentenceBeam(job, settings, self.width, device) for _ in range(settings.groups)]

    @property
    def done(self) -> bool:
        return all(group.done for group in self.groups)

    def advance(self, logp_WV: Tensor) -> list[Extension]:
        """Advance the groups in order; a token costs more each time an earlier group has chosen it in this step."""
        cost_V = torch.zeros_like(logp_WV[0])
        extensions = []
        for number, group in enumerate(self.groups):
            first = number * self.width
            some = [] if group.done else group.advance(logp_WV[first:], cost_V)
            for one in some:
                cost_V[one.token] += self.penalty
            extensions += [one._replace(row=first + one.row) for one in pad_extensions(some, self.width)]
        return extensions

    def results(self) -> list[SearchResult]:
        """Take the best of each group, then the second of each, and so on without repeats; sort what was taken."""
        lists = [group.results() for group in self.groups]
        chosen: dict[tuple[int, ...], SearchResult] = {}
        for one in (some[rank] for rank in range(self.width) for some in lists if rank < len(some)):
            chosen.setdefault(tuple(one.tokens), one)
        return sorted(list(chosen.values())[: self.nbest], key=lambda one: (not one.finished, -one.score))


class ConstrainedBeam(SentenceBeam):
    """Beam search in which terms must appear. Terms that the vocabulary cannot spell are left out.

    A plain beam drops a prefix with an unlikely term long before the term pays off. So the beams are shared among
    banks, one for each number of tokens that the terms still need, and each bank keeps its best (Post and Vilar 2018).
    Every beam also tries the likeliest token that brings each of its terms nearer, and cannot end before all terms are
    there. The model chooses how to spell a term; a beam that starts a term and turns away from it falls back to a
    lower bank, because the automata of its terms say how far each term has come.
    """

    def __init__(self, job: Job, settings: BaseSearchSettings, width: int, device: torch.device) -> None:
        super().__init__(job, settings, width, device)
        terms = job.constraints.spellable
        self.next = [torch.tensor(term.next_SV, device=device) for term in terms]
        self.left = [torch.tensor(term.left_S, device=device) for term in terms]
        self.ends = [torch.tensor(term.ends_S, device=device) for term in terms]
        self.states: list[list[int]] = [[0] * len(terms)]  # automaton states of each active beam

    def advance(self, logp_WV: Tensor, cost_V: Tensor | float = 0.0) -> list[Extension]:  # noqa: ARG002
        """Extend the best candidates of every bank."""
        total_LV = self.add_logp(logp_WV)
        state_KL = torch.tensor(self.states, device=total_LV.device).T
        left_KLV = torch.stack(
            [left[table[state_L].int()] for left, table, state_L in zip(self.left, self.next, state_KL, strict=True)]
        )
        may_end_L = torch.stack([ends[state_L] for ends, state_L in zip(self.ends, state_KL, strict=True)]).all(0)
        total_LV[:, EOS] = torch.where(may_end_L, total_LV[:, EOS], NEVER)
        left_LV = left_KLV.sum(0)
        left_LV[:, EOS] = 0  # a beam that may end has all terms
        banks = defaultdict(list)
        for one in self.try_terms(total_LV, left_KLV < left_KLV[:, :, EOS, None]):  # EOS leaves a term's state as it is
            banks[int(left_LV[one.row, one.token])].append(one)
        ends = [one for one in banks[0][: self.width] if one.token == EOS]
        by_bank = [[one for one in banks[left] if one.token != EOS] for left in sorted(banks)]
        growing = [one for rank in zip_longest(*by_bank) for one in rank if one][: self.width]
        states = [[int(t[self.states[e.row][k], e.token]) for k, t in enumerate(self.next)] for e in growing]
        extensions = self.extend(ends, growing)
        self.states = states or self.states
        return extensions

    def try_terms(self, total_LV: Tensor, nearer_KLV: Tensor) -> list[Extension]:
        """Return the best candidates of all beams, the best of each, and each beam's best that brings a term nearer."""
        apart_KLV = torch.where(nearer_KLV, total_LV, NEVER)
        logp, token = torch.cat([total_LV[None], apart_KLV]).max(-1)
        each = [
            Extension(row, *one)
            for logps, tokens in zip(logp.tolist(), token.tolist(), strict=True)
            for row, one in enumerate(zip(tokens, logps, strict=True))
        ]
        best = each + self.find_candidates(total_LV, total_LV, 2 * self.width)
        unique = {one[:2]: one for one in best if one.logp > NEVER}
        return sorted(unique.values(), key=lambda one: (-one.logp, one.row, one.token))

    def results(self) -> list[SearchResult]:
        """Return the results that contain all terms; there may be none."""
        met = [all(bool(ends[s]) for ends, s in zip(self.ends, states, strict=True)) for states in self.states]
        self.active = [beam for beam, all_met in zip(self.active, met, strict=False) if all_met]
        return super().results()


SentenceSearch = SentenceBeam | DiverseBeam


class SentenceSlot(NamedTuple):
    """The search of one sentence, and the tokens of its rows so far."""

    search: SentenceSearch
    rows: list[list[int]]


class SentenceSearches(Search):
    """Searches of single sentences, side by side in slots."""

    state: list[SentenceSlot]

    def __init__(
        self,
        make: Callable[[Job, DiverseSettings, int, torch.device], SentenceSearch],
        settings: DiverseSettings,
        width: int,
        longest: int,
        device: torch.device,
    ) -> None:
        super().__init__(settings, width, longest, device)
        self.make: Callable[[Job], SentenceSearch] = lambda job: make(job, settings, width, device)

    @property
    def done_B(self) -> Tensor:
        return torch.tensor([slot.search.done for slot in self.state], device=self.device)

    @property
    def prefix(self) -> Prefix:
        rows = [tokens for slot in self.state for tokens in slot.rows]
        T = max(map(len, rows))
        padded = [[*tokens, *[PAD] * (T - len(tokens))] for tokens in rows]
        length_N = torch.tensor([len(tokens) for tokens in rows], device=self.device)
        return Prefix(torch.tensor(padded, dtype=torch.long, device=self.device), length_N)

    def make_state(self, jobs: Sequence[Job]) -> list[SentenceSlot]:
        searches = [self.make(job) for job in jobs]
        return [SentenceSlot(search, [[]] * self.width) for search in searches]

    def put(self, slots: Sequence[int], jobs: Sequence[Job]) -> None:
        for slot, job, new in zip(slots, jobs, self.make_state(jobs), strict=True):
            self.jobs[slot], self.state[slot] = job, new
        self.open(self.jobs, self.state)

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
                self.state[b] = SentenceSlot(slot.search, [[*slot.rows[one.row], one.token] for one in extensions])
            rows += [b * self.width + one.row for one in extensions]
            tokens += [one.token for one in extensions]
        return torch.tensor(rows, device=self.device), torch.tensor(tokens, device=self.device)

    def results(self, state: list[SentenceSlot]) -> list[list[SearchResult]]:
        return [slot.search.results() for slot in state]
