"""Beam search: keep the W best prefixes of every sentence until its results are found.

A sentence that is done keeps running as a dummy, and nothing in its rows matters any more. Every sentence counts its
own steps, so one may begin while others are in the middle of theirs (decoding/continuous_batching.py).

Ties go to the earlier step, then the better beam, then the lower token id.

Shapes   B sentences   W beams   N = B * W rows of the model   S source width   V vocabulary   T longest target
         K = 2 * W candidates   G groups of a row's columns
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dragoman.config.settings import pick
from dragoman.decoding.protocol import NEVER, Prefix, Rule, SearchResult, StateT, StepModel, apply_rules
from dragoman.errors import UserError
from dragoman.types import BOS, EOS, PAD

GROUP_SIZE = 64  # columns whose maximum is compared first, see `find_candidates`


class ActiveBeams(NamedTuple):
    """The prefixes that are still extended, best first; logp is -inf where there is none. All of a sentence's have
    the same length."""

    token_BWT: Tensor
    logp_BW: Tensor
    length_B: Tensor


class FinishedBeams(NamedTuple):
    """The W best hypotheses that have reached EOS, best first; score is -inf where there is none."""

    token_BWT: Tensor
    logp_BW: Tensor
    score_BW: Tensor
    length_BW: Tensor  # counts EOS


class Candidates(NamedTuple):
    """Prefixes one token longer, best first: the beam that each extends, and the token that it adds."""

    logp_BK: Tensor
    parent_BK: Tensor
    token_BK: Tensor


class BeamState(NamedTuple):
    """The searches of B sentences. `limit_B` is the most tokens of a hypothesis, EOS counted; 0 means no search."""

    active: ActiveBeams
    finished: FinishedBeams
    limit_B: Tensor
    done_B: Tensor

    def select(self, index_K: Tensor) -> BeamState:
        """Return the searches of these sentences."""
        return BeamState(
            ActiveBeams(*[each.index_select(0, index_K) for each in self.active]),
            FinishedBeams(*[each.index_select(0, index_K) for each in self.finished]),
            self.limit_B.index_select(0, index_K),
            self.done_B.index_select(0, index_K),
        )

    def put(self, index_K: Tensor, new: BeamState) -> BeamState:
        """Return the searches with new ones at these indices."""
        return BeamState(
            ActiveBeams(*[old.index_copy(0, index_K, one) for old, one in zip(self.active, new.active, strict=True)]),
            FinishedBeams(
                *[old.index_copy(0, index_K, one) for old, one in zip(self.finished, new.finished, strict=True)]
            ),
            self.limit_B.index_copy(0, index_K, new.limit_B),
            self.done_B.index_copy(0, index_K, new.done_B),
        )

    def results(self, plan: BeamPlan) -> list[list[SearchResult]]:
        """Return up to `nbest` results per sentence: finished ones by score, then unfinished ones.

        A stop rule ends a sentence only when `nbest` hypotheses are finished or no beam is active, so an unfinished
        one gets onto the list only if it was cut. Converting to lists is slow, so only what is returned is converted.
        """
        active, finished = self.active, self.finished
        end_BWT, cut_BWT = finished.token_BWT.cpu(), active.token_BWT.cpu()
        end_scores = finished.score_BW.tolist()
        cut_scores = (active.logp_BW / plan.penalty_T[active.length_B][:, None]).tolist()
        end_logps, cut_logps = finished.logp_BW.tolist(), active.logp_BW.tolist()
        end_lengths, cut_lengths = (finished.length_BW - 1).tolist(), active.length_B.tolist()
        results: list[list[SearchResult]] = []
        for b in range(len(end_scores)):
            ends = [w for w, score in enumerate(end_scores[b]) if score > NEVER][: plan.nbest]
            cuts = [w for w, logp in enumerate(cut_logps[b]) if logp > NEVER][: plan.nbest - len(ends)]
            some = [
                SearchResult(end_BWT[b, w, : end_lengths[b][w]].tolist(), end_logps[b][w], end_scores[b][w], True)
                for w in ends
            ]
            some += [
                SearchResult(cut_BWT[b, w, : cut_lengths[b]].tolist(), cut_logps[b][w], cut_scores[b][w], False)
                for w in cuts
            ]
            results.append(some)
        return results


@dataclass(frozen=True)
class BeamPlan:
    """The settings of a search, the same for all of its sentences."""

    width: int
    nbest: int
    penalty_T: Tensor  # the divisor of a log-probability, for every length up to the longest
    should_stop: Callable[[Tensor, Tensor, int], Tensor]
    rules: Sequence[Rule] = ()
    key: tuple[Any, ...] = ()  # the settings as values that can be compared

    @classmethod
    def of(
        cls,
        longest: int,
        device: torch.device,
        *,
        width: int,
        nbest: int,
        alpha: float,
        norm: str,
        stop: str,
        rules: Sequence[Rule] = (),
    ) -> BeamPlan:
        """Look up the settings by name and check them."""
        if not 1 <= nbest <= width:
            raise UserError(
                f"{nbest} answers cannot come from a beam of {width}; nbest must lie between 1 and the beam"
            )
        penalty_T = pick(LENGTH_NORMS, norm, "length norm")(longest, alpha).to(device)
        key = (longest, width, nbest, alpha, norm, stop)
        return cls(width, nbest, penalty_T, pick(STOP_RULES, stop, "stop rule"), rules, key)


@torch.inference_mode()
def beam_search(
    model: StepModel[StateT],
    source_BS: Tensor,
    keep_BS: Tensor,
    limit_B: Tensor,
    *,
    width: int = 4,
    nbest: int = 1,
    alpha: float = 1.0,
    norm: str = "length",
    stop: str = "enough",
    rules: Sequence[Rule] = (),
    watch: Callable[[BeamState], None] = lambda _: None,
) -> list[list[SearchResult]]:
    """Return up to `nbest` different results per sentence: finished ones by score, then, if too few, unfinished ones.

    A finished result precedes an unfinished one whatever their scores, because a model that repeats itself up to the
    limit is very sure of every token. `limit_B` is the most tokens of a hypothesis, EOS counted; a row with limit 0 has
    no results. A sentence whose model returns only NaN or -inf ends there: its prefixes come back as unfinished, and
    other sentences are not affected. `watch` is called with the beams after every step.
    """
    B, T, device = len(source_BS), max(limit_B.tolist(), default=0), source_BS.device
    plan = BeamPlan.of(max(T, 1), device, width=width, nbest=nbest, alpha=alpha, norm=norm, stop=stop, rules=rules)
    if T <= 0:
        return [[] for _ in range(B)]
    beams = init_beams(limit_B.to(device, torch.long).clamp(min=0), width, T)
    token_N = torch.full((B * width,), BOS, device=device)
    state = model.start(source_BS, keep_BS).select(torch.arange(B, device=device).repeat_interleave(width))
    while not bool(beams.done_B.all()):  # the only value that the host waits for
        logp_NV, state = model.step(token_N, state)
        beams, rows_N, token_N = advance_beams(beams, logp_NV, plan)
        state = state.select(rows_N)
        watch(beams)
    return beams.results(plan)


def init_beams(limit_B: Tensor, W: int, T: int) -> BeamState:
    """Return searches with one empty prefix each, or none where the limit is 0."""
    B, device = len(limit_B), limit_B.device
    token_BWT = torch.full((B, W, T), EOS, device=device)
    never_BW = torch.full((B, W), NEVER, device=device)
    length_BW = torch.zeros(B, W, dtype=torch.long, device=device)
    logp_BW = never_BW.clone()
    logp_BW[:, 0] = torch.where(limit_B > 0, 0.0, NEVER)
    active = ActiveBeams(token_BWT, logp_BW, length_BW[:, 0])
    return BeamState(active, FinishedBeams(token_BWT, never_BW, never_BW, length_BW), limit_B, limit_B == 0)


def advance_beams(beams: BeamState, logp_NV: Tensor, plan: BeamPlan) -> tuple[BeamState, Tensor, Tensor]:
    """Advance every sentence by one token; also return which rows continue, in which order, and their tokens.

    Overwrites the log-probabilities of PAD and BOS, which must never come out.
    """
    active, finished, limit_B, done_B = beams
    W = plan.width
    logp_NV = logp_NV.float()
    logp_NV[:, PAD] = NEVER
    logp_NV[:, BOS] = NEVER
    if plan.rules:
        prefix = Prefix(active.token_BWT.flatten(0, 1), active.length_B.repeat_interleave(W))
        logp_NV = apply_rules(logp_NV, prefix, plan.rules)
    found = find_candidates(active.logp_BW, logp_NV)
    done_B = done_B | (found.logp_BK[:, 0] == NEVER)
    finished = add_finished(finished, active, found, plan.penalty_T, done_B)

    # The W best candidates that are no EOS extend the active beams; those of a sentence that is done stay as they were.
    order_BW = (found.token_BK == EOS).int().sort(dim=1, stable=True).indices[:, :W]
    logp_BW, parent_BW, token_BW = (each_BK.gather(1, order_BW) for each_BK in found)
    token_BWT = gather_beams(active.token_BWT, parent_BW)
    last_BW1 = active.length_B.clamp(max=token_BWT.size(2) - 1)[:, None, None].expand(-1, W, 1)
    token_BWT.scatter_(2, last_BW1, token_BW[:, :, None])
    active = ActiveBeams(
        torch.where(done_B[:, None, None], active.token_BWT, token_BWT),
        torch.where(done_B[:, None], active.logp_BW, logp_BW),
        active.length_B + (~done_B).long(),
    )

    hope_B = active.logp_BW[:, 0] / plan.penalty_T[limit_B]
    done_B = done_B | (active.length_B >= limit_B) | plan.should_stop(finished.score_BW, hope_B, plan.nbest)
    first_B1 = W * torch.arange(len(limit_B), device=limit_B.device)[:, None]  # row of a sentence's first beam
    token_BW = token_BW.masked_fill(logp_BW == NEVER, EOS)  # a token that every model knows
    return BeamState(active, finished, limit_B, done_B), (first_B1 + parent_BW).flatten(), token_BW.flatten()


def find_candidates(logp_BW: Tensor, logp_NV: Tensor) -> Candidates:
    """Return the 2W best continuations. At most W of them are EOS, one per beam, so W can always be extended.

    Sorting all columns is slow. So take the maxima of small groups first, then search only the best 2W groups: any
    other group has 2W maxima before all of its columns. A row with NaN or +inf comes from a broken model, and none of
    it counts.
    """
    B, W = logp_BW.shape
    N, V = logp_NV.shape
    count = 2 * W
    even = V // GROUP_SIZE * GROUP_SIZE
    maxima = [logp_NV[:, :even].view(N, -1, GROUP_SIZE).amax(-1)] if even else []
    if even < V:
        maxima.append(logp_NV[:, even:].amax(-1, keepdim=True))
    peak_NG = torch.cat(maxima, 1)
    broken_N1 = ~(peak_NG.amax(-1, keepdim=True) < torch.inf)
    before_N1 = logp_BW.view(N, 1).masked_fill(broken_N1, NEVER)
    peak_BG = (before_N1 + peak_NG.masked_fill(broken_N1, NEVER)).view(B, -1)
    group_BK = stable_topk(peak_BG, count)[1]
    row_BK, start_BK = group_BK // peak_NG.size(1), group_BK % peak_NG.size(1) * GROUP_SIZE
    column_BKG = start_BK[:, :, None] + torch.arange(GROUP_SIZE, device=logp_NV.device)
    row_BKG = (W * torch.arange(B, device=logp_NV.device)[:, None] + row_BK)[:, :, None]
    total_BKG = before_N1[:, 0][row_BKG] + logp_NV[row_BKG, column_BKG.clamp(max=V - 1)]
    total_BKG = total_BKG.nan_to_num(nan=NEVER, posinf=NEVER, neginf=NEVER).masked_fill(column_BKG >= V, NEVER)
    index_BC = (row_BK[:, :, None] * V + column_BKG).flatten(1)
    logp_BK, order_BK = stable_topk(total_BKG.flatten(1), count, index_BC)
    index_BK = index_BC.gather(1, order_BK)
    return Candidates(logp_BK, index_BK // V, index_BK % V)


def stable_topk(score_BC: Tensor, count: int, index_BC: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the `count` highest scores and their columns; of equals the lowest index wins, by default the column.

    `torch.topk` leaves open which of several equals it takes. So a score and its index become one integer, and no two
    of those are equal: the bits of a float, read as an integer, have the order of floats, apart from the sign.
    """
    bits_BC = score_BC.float().view(torch.int32).long()
    order_BC = torch.where(bits_BC < 0, -(bits_BC & 0x7FFFFFFF), bits_BC)
    if index_BC is None:
        index_BC = torch.arange(score_BC.size(1), device=score_BC.device).expand_as(score_BC)
    column_BK = ((order_BC << 32) - index_BC).topk(min(count, score_BC.size(1)), dim=1).indices
    return score_BC.gather(1, column_BK), column_BK


def add_finished(
    finished: FinishedBeams, active: ActiveBeams, found: Candidates, penalty_T: Tensor, done_B: Tensor
) -> FinishedBeams:
    """Add the candidates that end here, and keep the W best hypotheses.

    Only those among the W best candidates count: an EOS that could not have held a beam of its own ends no hypothesis.
    So width 1 ends where greedy search ends.
    """
    W = finished.score_BW.size(1)
    length_B1 = (active.length_B + 1).clamp(max=len(penalty_T) - 1)[:, None]
    logp_BW, parent_BW, token_BW = (each_BK[:, :W] for each_BK in found)
    ends_BW = (token_BW == EOS) & ~done_B[:, None]
    score_BW = torch.where(ends_BW, logp_BW / penalty_T[length_B1], NEVER)
    score_BK, order_BK = torch.cat([finished.score_BW, score_BW], 1).sort(dim=1, descending=True, stable=True)
    order_BW = order_BK[:, :W]
    return FinishedBeams(
        gather_beams(torch.cat([finished.token_BWT, gather_beams(active.token_BWT, parent_BW)], 1), order_BW),
        torch.cat([finished.logp_BW, logp_BW], 1).gather(1, order_BW),
        score_BK[:, :W],
        torch.cat([finished.length_BW, length_B1.expand(-1, W)], 1).gather(1, order_BW),
    )


def gather_beams(token_BKT: Tensor, row_BW: Tensor) -> Tensor:
    return token_BKT.gather(1, row_BW[:, :, None].expand(-1, -1, token_BKT.size(2)))


def stop_when_full(score_BW: Tensor, hope_B: Tensor, nbest: int) -> Tensor:
    """Stop when W hypotheses are finished, or when none can be beaten any more.

    The default: the work is proportional to the length of the result, not to its limit, and width 1 is greedy search.
    A longer hypothesis with a better score may be missed.
    """
    return (score_BW[:, -1] > NEVER) | (score_BW[:, nbest - 1] >= hope_B)


def stop_when_unbeatable(score_BW: Tensor, hope_B: Tensor, nbest: int) -> Tensor:
    """Stop when no active prefix can overtake the nbest-th hypothesis any more.

    No log-probability is above 0, so the best that a prefix can hope for is to reach its limit at no further cost:
    hope = logp / limit ** alpha. With a generous limit that is a lot, and the search runs long.
    """
    return score_BW[:, nbest - 1] >= hope_B


def stop_at_limit(score_BW: Tensor, hope_B: Tensor, nbest: int) -> Tensor:  # noqa: ARG001 - the registry's signature
    """Continue until every prefix has reached the limit."""
    return torch.zeros_like(hope_B, dtype=torch.bool)


def divide_by_length(longest: int, alpha: float) -> Tensor:
    """Return length ** alpha: with 1, scores are mean log-probabilities."""
    check_alpha(alpha)
    return torch.tensor([float(max(length, 1)) ** alpha for length in range(longest + 1)])


def divide_by_gnmt(longest: int, alpha: float) -> Tensor:
    """Return ((5 + length) / 6) ** alpha, which is milder on short hypotheses (Wu 2016)."""
    check_alpha(alpha)
    return torch.tensor([((5.0 + max(length, 1)) / 6.0) ** alpha for length in range(longest + 1)])


def divide_by_one(longest: int, alpha: float) -> Tensor:  # noqa: ARG001 - the registry's signature
    """Return ones: the score is the log-probability."""
    return torch.ones(longest + 1)


def check_alpha(alpha: float) -> None:
    """Refuse a negative exponent."""
    if not alpha >= 0:
        raise UserError(f"the length penalty must be 0 or more, got {alpha}")


# What a log-probability is divided by, so that long hypotheses are not worse for being long: a divisor for every length
# from 0 to `longest`, EOS counted, none below 1 and none below the one before it (the stop rules rely on that). They
# are tables because a power computed inside the search may round differently from batch to batch.
LENGTH_NORMS: dict[str, Callable[[int, float], Tensor]] = {
    "length": divide_by_length,
    "gnmt": divide_by_gnmt,
    "none": divide_by_one,
}
STOP_RULES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "enough": stop_when_full,
    "best": stop_when_unbeatable,
    "limit": stop_at_limit,
}
