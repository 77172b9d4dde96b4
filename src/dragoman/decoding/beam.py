"""Beam search: the best few prefixes of every sentence, side by side, until the answers are in.

Shapes   B sentences   W beams   N = B * W rows of the model   S source width   V vocabulary   T longest answer
         K = 2 * W candidates   G groups of a row's places

A sentence that is done keeps running as a dummy, and nothing that happens in its rows is looked at; every sentence
counts its own steps, so one may begin while its neighbours are in the middle of theirs
(decoding/continuous_batching.py).

Equal scores are settled by place: the earlier step first, then the better beam, then the lower token id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dragoman.config.settings import pick
from dragoman.decoding.protocol import (
    LENGTH_NORMS,
    NEVER,
    Prefix,
    Rule,
    S,
    SearchResult,
    StepModel,
    apply_rules,
    forbid_pad_and_bos,
)
from dragoman.errors import UserError
from dragoman.types import BOS, EOS

GROUP_SIZE = 64  # places whose maximum is looked at first, see `candidates`


class ActiveBeams(NamedTuple):
    """The prefixes that still grow, best first; logp is -inf where there is none. A sentence's are equally long."""

    token_BWT: Tensor
    logp_BW: Tensor
    length_B: Tensor

    @property
    def prefix(self) -> Prefix:
        W = self.logp_BW.size(1)
        return Prefix(self.token_BWT.flatten(0, 1), self.length_B.repeat_interleave(W))


class FinishedBeams(NamedTuple):
    """The W best answers so far that came to their end mark, best first; score is -inf where there is none."""

    token_BWT: Tensor
    logp_BW: Tensor
    score_BW: Tensor
    length_BW: Tensor  # counts the end mark


class Candidates(NamedTuple):
    """Prefixes one token longer, best first: the beam each comes from, and the token that it adds."""

    logp_BK: Tensor
    parent_BK: Tensor
    token_BK: Tensor


class BeamState(NamedTuple):
    """The searches of B sentences. `limit_B`: the most tokens an answer may have, its end mark counted; 0 is none."""

    live: ActiveBeams
    whole: FinishedBeams
    limit_B: Tensor
    done_B: Tensor


@dataclass(frozen=True)
class BeamPlan:
    """What a search is asked for, the same for all of its sentences."""

    width: int
    nbest: int
    penalty_T: Tensor  # what a log-probability is divided by, for every length up to the longest
    stopped: Callable[[Tensor, Tensor, int], Tensor]
    rules: Sequence[Rule] = ()
    key: tuple[Any, ...] = ()  # the settings that it was made of

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
        if not 1 <= nbest <= width:
            raise UserError(
                f"{nbest} answers cannot come from a beam of {width}; nbest must lie between 1 and the beam"
            )
        penalty_T = pick(LENGTH_NORMS, norm, "length norm")(longest, alpha).to(device)
        key = (longest, width, nbest, alpha, norm, stop)
        return cls(width, nbest, penalty_T, pick(STOP_RULES, stop, "stop rule"), rules, key)


@torch.inference_mode()
def beam_search(
    model: StepModel[S],
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
    """For every sentence up to `nbest` different answers: whole ones by score, then, if those are too few, cut ones.

    A whole answer comes before a cut one whatever their scores, because a model that repeats itself up to the limit
    is very sure of every word. `limit_B` is the most tokens an answer may have, its end mark counted; 0 is a dead
    row, and its list is empty. A sentence whose model gives nothing but NaN or -inf ends there: its prefixes up to
    that point come back as cut, and its neighbours do not notice. `watch` is shown the beams after every step.
    """
    B, T, device = len(source_BS), max(limit_B.tolist(), default=0), source_BS.device
    plan = BeamPlan.of(max(T, 1), device, width=width, nbest=nbest, alpha=alpha, norm=norm, stop=stop, rules=rules)
    if T <= 0:
        return [[] for _ in range(B)]
    beams = init_beams(limit_B.to(device, torch.long).clamp(min=0), width, T)
    token_N = torch.full((B * width,), BOS, device=device)
    state = model.start(source_BS, keep_BS).select(torch.arange(B, device=device).repeat_interleave(width))
    while not bool(beams.done_B.all()):  # the one word that the host waits for
        logp_NV, state = model.step(token_N, state)
        beams, rows_N, token_N = advance_beams(beams, logp_NV, plan)
        state = state.select(rows_N)
        watch(beams)
    return collect_results(beams, plan)


def init_beams(limit_B: Tensor, W: int, T: int) -> BeamState:
    """One empty prefix for every sentence that may have an answer, and no answers."""
    B, device = len(limit_B), limit_B.device
    token_BWT = torch.full((B, W, T), EOS, device=device)
    never_BW = torch.full((B, W), NEVER, device=device)
    length_BW = torch.zeros(B, W, dtype=torch.long, device=device)
    logp_BW = never_BW.clone()
    logp_BW[:, 0] = torch.where(limit_B > 0, 0.0, NEVER)
    live, whole = (
        ActiveBeams(token_BWT, logp_BW, length_BW[:, 0]),
        FinishedBeams(token_BWT, never_BW, never_BW, length_BW),
    )
    return BeamState(live, whole, limit_B, limit_B == 0)


def advance_beams(beams: BeamState, logp_NV: Tensor, plan: BeamPlan) -> tuple[BeamState, Tensor, Tensor]:
    """One step of every sentence; then which rows go on, in which order, and with which tokens."""
    live, whole, limit_B, done_B = beams
    logp_NV = forbid_pad_and_bos(logp_NV)
    if plan.rules:
        logp_NV = apply_rules(logp_NV, live.prefix, plan.rules)
    found = find_candidates(live.logp_BW, logp_NV)
    done_B = done_B | (found.logp_BK[:, 0] == NEVER)
    going = drop_finished(found)
    whole = add_finished(whole, live, found, plan.penalty_T, done_B)
    live = extend_active(live, going, done_B)
    hope_B = live.logp_BW[:, 0] / plan.penalty_T[limit_B]
    done_B = done_B | (live.length_B >= limit_B) | plan.stopped(whole.score_BW, hope_B, plan.nbest)
    first_B1 = plan.width * torch.arange(len(limit_B), device=limit_B.device)[:, None]  # row of a sentence's first beam
    token_BW = going.token_BK.masked_fill(going.logp_BK == NEVER, EOS)  # a token that every model knows
    return BeamState(live, whole, limit_B, done_B), (first_B1 + going.parent_BK).flatten(), token_BW.flatten()


def find_candidates(logp_BW: Tensor, logp_NV: Tensor) -> Candidates:
    """The 2W best ways to go on. At most W of them are end marks, one for each beam, so W can always grow.

    Sorting every place is slow. So: first the maxima of small groups, then only the places of the best groups. No other
    group can hold one of the best, since each of those has a place that goes before all of its own. A row that
    holds a NaN or +inf comes from a broken model, and none of it counts.
    """
    B, W = logp_BW.shape
    N, V = logp_NV.shape
    count = 2 * W
    peak_NG = group_maxima(logp_NV)
    broken_N1 = ~(peak_NG.amax(-1, keepdim=True) < torch.inf)
    before_N1 = logp_BW.view(N, 1).masked_fill(broken_N1, NEVER)
    peak_BG = (before_N1 + peak_NG.masked_fill(broken_N1, NEVER)).view(B, -1)
    group_BK = stable_topk(peak_BG, count)[1]
    row_BK, start_BK = group_BK // peak_NG.size(1), group_BK % peak_NG.size(1) * GROUP_SIZE
    column_BKG = start_BK[:, :, None] + torch.arange(GROUP_SIZE, device=logp_NV.device)
    row_BKG = (W * torch.arange(B, device=logp_NV.device)[:, None] + row_BK)[:, :, None]
    total_BKG = before_N1[:, 0][row_BKG] + logp_NV[row_BKG, column_BKG.clamp(max=V - 1)]
    total_BKG = total_BKG.nan_to_num(nan=NEVER, posinf=NEVER, neginf=NEVER).masked_fill(column_BKG >= V, NEVER)
    place_BC = (row_BK[:, :, None] * V + column_BKG).flatten(1)
    logp_BK, order_BK = stable_topk(total_BKG.flatten(1), count, place_BC)
    place_BK = place_BC.gather(1, order_BK)
    return Candidates(logp_BK, place_BK // V, place_BK % V)


def group_maxima(logp_NV: Tensor) -> Tensor:
    """The maximum of every GROUP places, peak_NG; the last group may be shorter."""
    N, V = logp_NV.shape
    even = V // GROUP_SIZE * GROUP_SIZE
    parts = [logp_NV[:, :even].view(N, -1, GROUP_SIZE).amax(-1)] if even else []
    return torch.cat([*parts, logp_NV[:, even:].amax(-1, keepdim=True)] if even < V else parts, 1)


def stable_topk(score_BC: Tensor, count: int, place_BC: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `count` highest scores and where they stand; among equals the lowest place wins, by default the column.

    `torch.topk` leaves open which of several equals it takes. So a score and its place become one whole number, and no
    two of those are equal: the bits of a float, read as an integer, are in the order of floats, apart from the sign.
    """
    bits_BC = score_BC.float().view(torch.int32).long()
    order_BC = torch.where(bits_BC < 0, -(bits_BC & 0x7FFFFFFF), bits_BC)
    place_BC = (
        torch.arange(score_BC.size(1), device=score_BC.device).expand_as(score_BC) if place_BC is None else place_BC
    )
    column_BK = ((order_BC << 32) - place_BC).topk(min(count, score_BC.size(1)), dim=1).indices
    return score_BC.gather(1, column_BK), column_BK


def drop_finished(found: Candidates) -> Candidates:
    """The W best candidates that are not at their end."""
    W = found.token_BK.size(1) // 2
    order_BW = (found.token_BK == EOS).int().sort(dim=1, stable=True).indices[:, :W]
    return Candidates(*(each_BK.gather(1, order_BW) for each_BK in found))


def extend_active(live: ActiveBeams, going: Candidates, done_B: Tensor) -> ActiveBeams:
    """Every prefix one token longer; those of a sentence that is done stay as they were."""
    token_BWT = _rows(live.token_BWT, going.parent_BK)
    at_BW1 = live.length_B.clamp(max=token_BWT.size(2) - 1)[:, None, None].expand(-1, token_BWT.size(1), 1)
    token_BWT.scatter_(2, at_BW1, going.token_BK[:, :, None])
    return ActiveBeams(
        torch.where(done_B[:, None, None], live.token_BWT, token_BWT),
        torch.where(done_B[:, None], live.logp_BW, going.logp_BK),
        live.length_B + (~done_B).long(),
    )


def add_finished(
    whole: FinishedBeams, live: ActiveBeams, found: Candidates, penalty_T: Tensor, done_B: Tensor
) -> FinishedBeams:
    """Take in the candidates that end here, and keep the W best answers.

    Only those among the W best candidates count: an end mark that could not have held a beam of its own is no
    answer. So width 1 ends where greedy search ends.
    """
    W = whole.score_BW.size(1)
    length_B1 = (live.length_B + 1).clamp(max=len(penalty_T) - 1)[:, None]
    logp_BW, parent_BW, token_BW = (each_BK[:, :W] for each_BK in found)
    ends_BW = (token_BW == EOS) & ~done_B[:, None]
    score_BW = torch.where(ends_BW, logp_BW / penalty_T[length_B1], NEVER)
    score_BK, order_BK = torch.cat([whole.score_BW, score_BW], 1).sort(dim=1, descending=True, stable=True)
    order_BW = order_BK[:, :W]
    return FinishedBeams(
        _rows(torch.cat([whole.token_BWT, _rows(live.token_BWT, parent_BW)], 1), order_BW),
        torch.cat([whole.logp_BW, logp_BW], 1).gather(1, order_BW),
        score_BK[:, :W],
        torch.cat([whole.length_BW, length_B1.expand(-1, W)], 1).gather(1, order_BW),
    )


def _rows(token_BKT: Tensor, row_BW: Tensor) -> Tensor:
    return token_BKT.gather(1, row_BW[:, :, None].expand(-1, -1, token_BKT.size(2)))


def collect_results(beams: BeamState, plan: BeamPlan) -> list[list[SearchResult]]:
    """The answers as Python lists; that is slow, so only those that are asked for. A stop rule ends a sentence only
    when `nbest` answers are whole or no prefix lives, so a prefix that gets onto a list is one that was cut."""
    live, whole = beams.live, beams.whole
    end_BWT, cut_BWT = whole.token_BWT.cpu(), live.token_BWT.cpu()
    scores = (whole.score_BW, live.logp_BW / plan.penalty_T[live.length_B][:, None])
    end_BW, cut_BW = (each.tolist() for each in scores)
    logps = (whole.logp_BW.tolist(), live.logp_BW.tolist())
    lengths, length_B = (whole.length_BW - 1).tolist(), live.length_B.tolist()
    found: list[list[SearchResult]] = []
    for b in range(len(end_BW)):
        ends = [w for w, score in enumerate(end_BW[b]) if score > NEVER][: plan.nbest]
        cuts = [w for w, logp in enumerate(logps[1][b]) if logp > NEVER][: plan.nbest - len(ends)]
        answers = [(end_BWT[b, w, : lengths[b][w]], logps[0][b][w], end_BW[b][w], True) for w in ends]
        answers += [(cut_BWT[b, w, : length_B[b]], logps[1][b][w], cut_BW[b][w], False) for w in cuts]
        found.append([SearchResult(tokens.tolist(), *rest) for tokens, *rest in answers])
    return found


def stop_when_full(score_BW: Tensor, hope_B: Tensor, nbest: int) -> Tensor:
    """Stop when W answers are whole, or earlier where "best" would.

    The default: the work is in proportion to the answer, not to its limit, and width 1 is greedy search. A longer
    answer with a better score may be missed.
    """
    return (score_BW[:, -1] > NEVER) | stop_when_unbeatable(score_BW, hope_B, nbest)


def stop_when_unbeatable(score_BW: Tensor, hope_B: Tensor, nbest: int) -> Tensor:
    """Stop when no living prefix can come before the nbest-th answer any more.

    No log-probability is above 0, so the most that a prefix can hope for is to reach its limit at no further cost:
    hope = logp / limit ** alpha. With a generous limit that is a lot to hope for, and the search runs long.
    """
    return score_BW[:, nbest - 1] >= hope_B


def stop_at_limit(score_BW: Tensor, hope_B: Tensor, nbest: int) -> Tensor:  # noqa: ARG001 - the menu's shape
    """Go on until every prefix has reached the limit."""
    return torch.zeros_like(hope_B, dtype=torch.bool)


STOP_RULES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "enough": stop_when_full,
    "best": stop_when_unbeatable,
    "limit": stop_at_limit,
}
