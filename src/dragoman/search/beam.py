"""Beam search: the best few prefixes of every sentence, side by side, until the answers are in.

Shapes   B sentences   W beams   N = B * W rows of the model   S source width   V vocabulary   T longest answer
         K = 2 * W candidates   C places to choose from   G groups of places

Shapes stay the same through the whole search: a sentence that is done keeps running as a dummy, and nothing that
happens in its rows is looked at. Rows of the model never shrink, since how floats round depends on shapes, and a
sentence must get the same answer whoever its neighbours are.

Equal scores are settled by place: the earlier step first, then the better beam, then the lower token id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.config import pick
from dragoman.search.step import NEVER, Found, S, StepModel, legal, penalties
from dragoman.types import BOS, EOS, Mistake

GROUP = 64  # places whose maximum is looked at first, see `best`


class Live(NamedTuple):
    """The prefixes that still grow, best first; logp is -inf where there is none. A sentence's are equally long."""

    token_BWT: Tensor
    logp_BW: Tensor
    length_B: Tensor


class Whole(NamedTuple):
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
    stop: str = "enough",
) -> list[list[Found]]:
    """For every sentence up to `nbest` different answers: whole ones by score, then, if those are too few, cut ones.

    A whole answer comes before a cut one whatever their scores, because a model that repeats itself up to the limit
    is very sure of every word. `limit_B` is the most tokens an answer may have, its end mark counted; 0 is a dead
    row, and its list is empty. A sentence whose model gives nothing but NaN or -inf ends there: its prefixes up to
    that point come back as cut, and its neighbours do not notice.
    """
    if not 1 <= nbest <= width:
        raise Mistake(f"{nbest} answers cannot come from a beam of {width}; nbest must lie between 1 and the beam")
    stopped = pick(STOPS, stop, "stop rule")
    B, W, T, device = len(source_BS), width, max(limit_B.tolist(), default=0), source_BS.device
    if T <= 0:
        return [[] for _ in range(B)]
    limit_B = limit_B.to(device, torch.long).clamp(min=0)
    penalty_T = penalties(T, alpha, device)
    first_B1 = W * torch.arange(B, device=device)[:, None]  # row of a sentence's first beam
    live, whole = _begin(limit_B, W, T)
    done_B = limit_B == 0
    token_N = torch.full((B * W,), BOS, device=device)
    state = model.start(source_BS, keep_BS).select(torch.arange(B, device=device).repeat_interleave(W))
    for step in range(T):
        if bool(done_B.all()):  # the one word that the host waits for
            break
        logp_NV, state = model.step(token_N, state)
        found = candidates(live.logp_BW, legal(logp_NV))
        done_B = done_B | (found.logp_BK[:, 0] == NEVER)
        going = growing(found)
        whole = close(whole, live, found, step, penalty_T, done_B)
        live = grow(live, going, step, done_B)
        hope_B = live.logp_BW[:, 0] / penalty_T[limit_B]
        done_B = done_B | (live.length_B >= limit_B) | stopped(whole.score_BW, hope_B, nbest)
        state = state.select((first_B1 + going.parent_BK).flatten())
        token_N = going.token_BK.masked_fill(going.logp_BK == NEVER, EOS).flatten()  # a token that every model knows
    return _harvest(live, whole, penalty_T, nbest)


def _begin(limit_B: Tensor, W: int, T: int) -> tuple[Live, Whole]:
    """One empty prefix for every sentence that may have an answer, and no answers."""
    B, device = len(limit_B), limit_B.device
    token_BWT = torch.full((B, W, T), EOS, device=device)
    never_BW = torch.full((B, W), NEVER, device=device)
    length_BW = torch.zeros(B, W, dtype=torch.long, device=device)
    logp_BW = never_BW.clone()
    logp_BW[:, 0] = torch.where(limit_B > 0, 0.0, NEVER)
    return Live(token_BWT, logp_BW, length_BW[:, 0]), Whole(token_BWT, never_BW, never_BW, length_BW)


def best(score_BC: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest scores of each row and their places; among equals the first place wins.

    `torch.topk` leaves open which of several equals it takes, and sorting every place is slow. So: sort the maxima
    of small groups, then only the places of the best `count` groups. No other group can hold one of the best,
    since each of those `count` has a place that goes before all of its own.
    """
    score_BC = F.pad(score_BC, (0, -score_BC.size(1) % GROUP), value=NEVER)
    peak_BG = score_BC.view(len(score_BC), -1, GROUP).amax(-1)
    group_BK = peak_BG.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
    place_BC = (group_BK[:, :, None] * GROUP + torch.arange(GROUP, device=score_BC.device)).flatten(1)
    score_BK, order_BK = score_BC.gather(1, place_BC).sort(dim=1, descending=True, stable=True)
    return score_BK[:, :count], place_BC.gather(1, order_BK[:, :count])


def candidates(logp_BW: Tensor, logp_NV: Tensor) -> Candidates:
    """The 2W best ways to go on. At most W of them are end marks, one for each beam, so W can always grow."""
    B, W = logp_BW.shape
    V = logp_NV.size(1)
    total_BC = (logp_BW[:, :, None] + logp_NV.view(B, W, V)).flatten(1)
    logp_BK, place_BK = best(total_BC, 2 * W)
    return Candidates(logp_BK, place_BK // V, place_BK % V)


def growing(found: Candidates) -> Candidates:
    """The W best candidates that are not at their end."""
    W = found.token_BK.size(1) // 2
    order_BW = (found.token_BK == EOS).int().sort(dim=1, stable=True).indices[:, :W]
    return Candidates(*(each_BK.gather(1, order_BW) for each_BK in found))


def grow(live: Live, going: Candidates, step: int, done_B: Tensor) -> Live:
    """Every prefix one token longer; those of a sentence that is done stay as they were."""
    token_BWT = _rows(live.token_BWT, going.parent_BK)
    token_BWT[:, :, step] = going.token_BK
    return Live(
        torch.where(done_B[:, None, None], live.token_BWT, token_BWT),
        torch.where(done_B[:, None], live.logp_BW, going.logp_BK),
        torch.where(done_B, live.length_B, step + 1),
    )


def close(whole: Whole, live: Live, found: Candidates, step: int, penalty_T: Tensor, done_B: Tensor) -> Whole:
    """Take in the candidates that end here, and keep the W best answers.

    Only those among the W best candidates count: an end mark that could not have held a beam of its own is no
    answer. So width 1 ends where greedy search ends.
    """
    W = whole.score_BW.size(1)
    logp_BW, parent_BW, token_BW = (each_BK[:, :W] for each_BK in found)
    ends_BW = (token_BW == EOS) & ~done_B[:, None]
    score_BW = torch.where(ends_BW, logp_BW / penalty_T[step + 1], NEVER)
    score_BK, order_BK = torch.cat([whole.score_BW, score_BW], 1).sort(dim=1, descending=True, stable=True)
    order_BW = order_BK[:, :W]
    length_BW = torch.full_like(whole.length_BW, step + 1)
    return Whole(
        _rows(torch.cat([whole.token_BWT, _rows(live.token_BWT, parent_BW)], 1), order_BW),
        torch.cat([whole.logp_BW, logp_BW], 1).gather(1, order_BW),
        score_BK[:, :W],
        torch.cat([whole.length_BW, length_BW], 1).gather(1, order_BW),
    )


def _rows(token_BKT: Tensor, row_BW: Tensor) -> Tensor:
    return token_BKT.gather(1, row_BW[:, :, None].expand(-1, -1, token_BKT.size(2)))


def _harvest(live: Live, whole: Whole, penalty_T: Tensor, nbest: int) -> list[list[Found]]:
    """The answers as Python lists. A stop rule ends a sentence only when `nbest` answers are whole or no prefix
    lives, so a prefix that gets onto a list is one that was cut."""
    score_BW = live.logp_BW / penalty_T[live.length_B][:, None]
    cuts = zip(*(each.tolist() for each in (live.token_BWT, live.logp_BW, score_BW, live.length_B)))
    ends = zip(*(each.tolist() for each in whole))
    return [(_whole(*end) + _cut(*cut))[:nbest] for end, cut in zip(ends, cuts)]


def _whole(answers: list[list[int]], logps: list[float], scores: list[float], lengths: list[int]) -> list[Found]:
    rows = zip(answers, logps, scores, lengths)
    return [Found(tokens[: length - 1], logp, score, True) for tokens, logp, score, length in rows if score > NEVER]


def _cut(prefixes: list[list[int]], logps: list[float], scores: list[float], length: int) -> list[Found]:
    rows = zip(prefixes, logps, scores)
    return [Found(tokens[:length], logp, score, False) for tokens, logp, score in rows if logp > NEVER]


def enough(score_BW: Tensor, hope_B: Tensor, nbest: int) -> Tensor:
    """Stop when W answers are whole, or earlier where "best" would.

    The default: the work is in proportion to the answer, not to its limit, and width 1 is greedy search. A longer
    answer with a better score may be missed.
    """
    return (score_BW[:, -1] > NEVER) | unbeatable(score_BW, hope_B, nbest)


def unbeatable(score_BW: Tensor, hope_B: Tensor, nbest: int) -> Tensor:
    """Stop when no living prefix can come before the nbest-th answer any more.

    No log-probability is above 0, so the most that a prefix can hope for is to reach its limit at no further cost:
    hope = logp / limit ** alpha. With a generous limit that is a lot to hope for, and the search runs long.
    """
    return score_BW[:, nbest - 1] >= hope_B


STOPS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"enough": enough, "best": unbeatable}
