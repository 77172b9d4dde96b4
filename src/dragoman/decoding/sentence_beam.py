"""Beam search of one sentence in plain Python, and two variants of it.

`SentenceBeam` is the readable reference implementation of beam.py, which decodes many sentences at once. The variants
differ in the candidates that they keep at each step:

    DiverseBeam      the beam is divided into groups; a token that one group has just chosen is penalized in later ones
    ConstrainedBeam  the beam is divided into banks, by the number of missing tokens of the required terms

`SentenceSearches` runs one of these searches per sentence of a batch.

Shapes   B sentences   W beams each   N = B * W   V vocabulary   L active beams   K terms
         S states of an automaton   C best candidates   T result length
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dragoman.config.settings import setting
from dragoman.decoding.beam import LENGTH_NORMS, STOP_RULES, stable_topk
from dragoman.decoding.protocol import (
    NEG_INF,
    BaseSearchSettings,
    Prefix,
    Search,
    SearchJob,
    SearchResult,
    forbid_invalid_tokens,
)
from dragoman.types import EOS, PAD


class Extension(NamedTuple):
    """A candidate for the next step: an active beam extended by one token."""

    row: int  # index of the beam that is extended
    token: int
    logp: float  # log-probability of all tokens together


def pad_extensions(extensions: list[Extension], width: int) -> list[Extension]:
    """Add dummy extensions, so that there is one for each of the `width` rows of the model."""
    return extensions + [Extension(0, EOS, NEG_INF)] * (width - len(extensions))


class SentenceBeam:
    """Beam search of one sentence.

    `active` holds the tokens and the log-probability of each active beam, best first. `finished` holds the hypotheses
    that ended with EOS, best first. Sums are computed in float32, so that they equal those of beam.py.
    """

    def __init__(self, job: SearchJob, settings: BaseSearchSettings, width: int, device: torch.device) -> None:  # noqa: ARG002
        self.max_tokens, self.width, self.nbest = job.max_tokens, width, min(settings.nbest, width)
        self.norm_T = LENGTH_NORMS[settings.length_norm](self.max_tokens, settings.length_penalty)
        self.should_stop, self.finish = STOP_RULES[settings.stop], settings.finish
        self.active: list[tuple[list[int], float]] = [([], 0.0)]
        self.finished: list[SearchResult] = []
        self.done = self.max_tokens == 0

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
    def find_candidates(total_LV: Tensor, ranking_score_LV: Tensor, count: int) -> list[Extension]:
        """Return the `count` candidates with the highest ranking scores; among equals, by beam, then by token id."""
        V = total_LV.size(1)
        score_1C, index_1C = stable_topk(ranking_score_LV.reshape(1, -1), count)
        logps = total_LV.flatten()[index_1C[0]].tolist()
        rows = zip(score_1C[0].tolist(), index_1C[0].tolist(), logps, strict=True)
        return [Extension(index // V, index % V, logp) for score, index, logp in rows if score > NEG_INF]

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
        self.done = not active or len(self.active[0][0]) >= self.max_tokens
        if not self.done:
            scores = [result.score for result in self.finished] + [NEG_INF] * (self.width - len(self.finished))
            best_B = torch.tensor([max(logp for _, logp in self.active)])
            lengths = (self.max_tokens, len(self.active[0][0]))
            best_possible_B, best_now_B = (best_B / self.norm_T[length] for length in lengths)
            enough = min(self.finish or self.width, self.width)
            score_1W = torch.tensor([scores[:enough]])
            self.done = bool(self.should_stop(score_1W, best_possible_B, best_now_B, min(self.nbest, enough)))
        return active

    def score(self, logp: float, length: int) -> float:
        """Return the log-probability, normalized for the length including EOS."""
        return float(torch.tensor(logp) / self.norm_T[length])

    def results(self) -> list[SearchResult]:
        """Return finished results by score, then, if there are fewer than `nbest`, unfinished ones (see BeamSearch)."""
        if self.max_tokens == 0:
            return []
        if self.finish and self.finished:
            return self.finished[: self.nbest]
        unfinished = [SearchResult(tokens, logp, self.score(logp, len(tokens)), False) for tokens, logp in self.active]
        return (self.finished + unfinished)[: self.nbest]


class DiverseSettings(BaseSearchSettings):
    groups: int = setting(4, "diverse: number of groups of the beam, which avoid each other's tokens", ge=1, le=1000)
    diversity: float = setting(0.5, "diverse: penalty of a token per earlier group that has chosen it", ge=0, le=100)


class DiverseBeam:
    """Diverse beam search of one sentence (Vijayakumar 2018): several groups, each a beam search of the same width.

    The alternative, sampling without replacement (Kool 2019), needs a well-chosen temperature, and its best result is
    not that of beam search. Here the first group is a plain beam search, and nothing is random.
    """

    def __init__(self, job: SearchJob, settings: DiverseSettings, width: int, device: torch.device) -> None:
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
    2018). The automata of the terms (`Term`, in protocol.py) give this number however a term is tokenized; it
    rises again if a beam starts a term and does not complete it. For each term, every beam also tries the most probable
    token that lowers the number. A beam cannot end before all terms are complete.
    """

    def __init__(self, job: SearchJob, settings: BaseSearchSettings, width: int, device: torch.device) -> None:
        super().__init__(job, settings, width, device)
        terms = job.constraints.spellable_terms
        # For each term, by state: the next state for each token, the number of missing tokens, whether the text may end
        self.next_state = [torch.tensor(term.next_SV, device=device) for term in terms]
        self.missing = [torch.tensor(term.missing_S, device=device) for term in terms]
        self.may_end = [torch.tensor(term.complete_at_end_S, device=device) for term in terms]
        self.states: list[list[int]] = [[0] * len(terms)]  # for each active beam, the state of each term's automaton

    def advance(self, logp_WV: Tensor, cost_V: Tensor | float = 0.0) -> list[Extension]:  # noqa: ARG002
        """Extend the beams by one token; keep the best candidate of each bank, then the second best, and so on."""
        total_LV = self.add_logp(logp_WV)
        state_KL = torch.tensor(self.states, device=total_LV.device).T
        by_term = list(zip(self.next_state, self.missing, self.may_end, state_KL, strict=True))
        missing_KLV = torch.stack([missing_S[next_SV[state_L].int()] for next_SV, missing_S, _, state_L in by_term])
        may_end_KL = torch.stack([may_end_S[state_L] for _, _, may_end_S, state_L in by_term])
        total_LV[:, EOS] = torch.where(may_end_KL.all(0), total_LV[:, EOS], NEG_INF)
        missing_LV = missing_KLV.sum(0)
        missing_LV[:, EOS] = 0  # a beam that may end has all terms, since EOS is a word boundary as well
        # EOS leaves the automata unchanged, so its column has the number of missing tokens before this step.
        progress_KLV = missing_KLV < missing_KLV[:, :, EOS, None]
        banks = defaultdict(list)
        for candidate in self.list_candidates(total_LV, progress_KLV):
            banks[int(missing_LV[candidate.row, candidate.token])].append(candidate)
        ends = [candidate for candidate in banks[0][: self.width] if candidate.token == EOS]
        by_bank = [[candidate for candidate in banks[missing] if candidate.token != EOS] for missing in sorted(banks)]
        active = [candidate for rank in zip_longest(*by_bank) for candidate in rank if candidate][: self.width]
        states = []
        for new in active:
            tables = zip(self.next_state, self.states[new.row], strict=True)
            states.append([int(next_SV[state, new.token]) for next_SV, state in tables])
        self.states = states or self.states  # without active beams, `extend` ends the search
        return self.extend(ends, active)

    def list_candidates(self, total_LV: Tensor, progress_KLV: Tensor) -> list[Extension]:
        """Return the 2W best candidates, and each beam's best one, overall and among those that advance a term.

        `progress_KLV` is True where a token lowers the number of missing tokens of a term.
        """
        advancing_KLV = torch.where(progress_KLV, total_LV, NEG_INF)
        best_logp, best_token = torch.cat([total_LV[None], advancing_KLV]).max(-1)
        best_of_beams = [
            Extension(row, token, logp)
            for tokens, logps in zip(best_token.tolist(), best_logp.tolist(), strict=True)
            for row, (token, logp) in enumerate(zip(tokens, logps, strict=True))
        ]
        candidates = best_of_beams + self.find_candidates(total_LV, total_LV, 2 * self.width)
        unique = {(item.row, item.token): item for item in candidates if item.logp > NEG_INF}
        return sorted(unique.values(), key=lambda item: (-item.logp, item.row, item.token))

    def results(self) -> list[SearchResult]:
        """Return the results that contain all terms; there may be none."""
        beams = zip(self.active, self.states, strict=False)  # without active beams, `states` are older ones
        self.active = [beam for beam, states in beams if all(table[s] for table, s in zip(self.may_end, states))]
        return super().results()


class SentenceSearch(Protocol):
    """The search of one sentence, which has W rows of the model."""

    @property
    def done(self) -> bool: ...

    def advance(self, logp_WV: Tensor, /) -> list[Extension]:
        """Extend the prefixes of the rows by one token; return the extensions that stay active, at most W."""
        ...

    def results(self) -> list[SearchResult]:
        """Return the results, best first."""
        ...


class SentenceSlot(NamedTuple):
    """The search of one sentence."""

    search: SentenceSearch
    prefixes: list[list[int]]  # the tokens so far of each of the W rows, for rules such as no_repeat


class SentenceSearches(Search):
    """A `Search` that decodes the sentence of each slot by a search of its own."""

    state: list[SentenceSlot]

    def __init__(
        self,
        search_class: Callable[[SearchJob, DiverseSettings, int, torch.device], SentenceSearch],
        settings: DiverseSettings,
        width: int,
        max_length: int,
        device: torch.device,
    ) -> None:
        super().__init__(settings, width, max_length, device)
        self.make_search: Callable[[SearchJob], SentenceSearch] = lambda job: search_class(job, settings, width, device)

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

    def make_state(self, jobs: Sequence[SearchJob]) -> list[SentenceSlot]:
        return [SentenceSlot(self.make_search(job), [[]] * self.width) for job in jobs]

    def replace_jobs(self, slots: Sequence[int], jobs: Sequence[SearchJob]) -> None:
        for slot, job, new in zip(slots, jobs, self.make_state(jobs), strict=True):
            self.jobs[slot], self.state[slot] = job, new
        self.update_rules()

    def select(self, slots: Sequence[int]) -> list[SentenceSlot]:
        return [self.state[slot] for slot in slots]

    def extend(self, logp_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the sentences one after the other."""
        rows, tokens = [], []
        logps = torch.split(forbid_invalid_tokens(logp_NV), self.width)
        for b, (slot, logp_WV) in enumerate(zip(self.state, logps, strict=True)):
            extensions = pad_extensions([] if slot.search.done else slot.search.advance(logp_WV), self.width)
            if not slot.search.done:
                self.state[b] = slot._replace(prefixes=[[*slot.prefixes[row], token] for row, token, _ in extensions])
            rows += [b * self.width + extension.row for extension in extensions]
            tokens += [extension.token for extension in extensions]
        return torch.tensor(rows, device=self.device), torch.tensor(tokens, device=self.device)

    def results(self, state: list[SentenceSlot]) -> list[list[SearchResult]]:
        return [slot.search.results() for slot in state]
