"""Answers made from left to right, one token at a time, with no second thoughts.

Shapes   B sentences   S source width   P prompt width   V vocabulary   T answer length
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from dragoman.config import Amount, Settings
from dragoman.search.step import NEVER, Found, S, StepModel, legal, penalties
from dragoman.types import BOS, EOS


@torch.inference_mode()
def greedy(
    model: StepModel[S], source_BS: Tensor, keep_BS: Tensor, limit_B: Tensor, *, alpha: float = 1.0
) -> list[list[Found]]:
    """The likeliest token at every step, the lower id among equals: what beam search of width 1 finds.

    `limit_B` is the most tokens an answer may have, its end mark counted; 0 is a dead row, and its list is empty.
    Every other list holds one answer. A sentence at its end keeps running as a dummy, so that shapes never change.
    """
    B, T, device = len(source_BS), max(limit_B.tolist(), default=0), source_BS.device
    if T <= 0:
        return [[] for _ in range(B)]
    limit_B = limit_B.to(device, torch.long).clamp(min=0)
    penalty_T = penalties(T, alpha, device)
    state = model.start(source_BS, keep_BS)
    token_B = torch.full((B,), BOS, device=device)
    answer_BT = torch.full((B, T), EOS, device=device)
    logp_B = torch.zeros(B, device=device)
    length_B = torch.zeros(B, dtype=torch.long, device=device)
    done_B = limit_B == 0
    for step in range(T):
        if bool(done_B.all()):
            break
        logp_BV, state = model.step(token_B, state)
        legal_BV = legal(logp_BV)
        token_B = legal_BV.argmax(-1)
        step_B = legal_BV.gather(1, token_B[:, None])[:, 0]
        done_B = done_B | (step_B == NEVER)
        answer_BT[:, step] = torch.where(done_B, EOS, token_B)
        logp_B = torch.where(done_B, logp_B, logp_B + step_B)
        length_B = length_B + (~done_B).long()
        done_B = done_B | (token_B == EOS) | (length_B >= limit_B)
        token_B = token_B.masked_fill(step_B == NEVER, EOS)
    score_B = logp_B / penalty_T[length_B]
    rows = zip(limit_B.tolist(), answer_BT.tolist(), length_B.tolist(), logp_B.tolist(), score_B.tolist())
    return [[_found(*row)] if limit > 0 else [] for limit, *row in rows]


class SampleSettings(Settings):
    """How the next token is drawn; each name stands on the menu FILTERS."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0  # below 1: likely tokens become likelier; 0: the likeliest
    top_k: Amount = 0  # only from the so many likeliest; 0: from all
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # only from the likeliest that together have this probability


@torch.inference_mode()
def sample(
    model: StepModel[S],
    prompt_BP: Tensor,
    length_B: Tensor,
    draw_BT: Tensor,
    limit_B: Tensor,
    settings: SampleSettings,
    *,
    ends: bool,
) -> list[Found]:
    """Read each row's prompt, begin mark included, and go on from it, token by token.

    `draw_BT` holds a number from [0, 1) for every token to come: what is drawn depends on nothing else. `limit_B` is
    the most tokens a row may add. With `ends`, an end mark ends a row; else it is a token like any other.
    """
    B, device = len(prompt_BP), prompt_BP.device
    state = model.start(prompt_BP[:, :0], prompt_BP[:, :0] > 0)
    token_B, row_B = prompt_BP[:, 0], torch.arange(B, device=device)
    answer_BT = torch.full_like(draw_BT, EOS, dtype=torch.long)
    logp_B, made_B = torch.zeros(B, device=device), torch.zeros_like(length_B)
    done_B = limit_B <= 0
    at = 0
    while not bool(done_B.all()):
        at += 1
        logp_BV, state = model.step(token_B, state)
        legal_BV = legal(logp_BV)
        place_B = made_B.clamp(max=draw_BT.size(1) - 1)
        token_B = drawn(filtered(legal_BV, settings), draw_BT[row_B, place_B])
        step_B = legal_BV.gather(1, token_B[:, None])[:, 0]
        reading_B = length_B > at
        done_B = done_B | (~reading_B & (step_B == NEVER))
        writing_B = ~reading_B & ~done_B
        answer_BT[row_B, place_B] = torch.where(writing_B, token_B, answer_BT[row_B, place_B])
        logp_B = torch.where(writing_B, logp_B + step_B, logp_B)
        made_B = made_B + writing_B.long()
        done_B = done_B | (made_B >= limit_B) | (writing_B & (token_B == EOS) & ends)
        token_B = torch.where(reading_B, prompt_BP[:, min(at, prompt_BP.size(1) - 1)], token_B)
    rows = zip(answer_BT.tolist(), made_B.tolist(), logp_B.tolist())
    return [_sampled(answer[:made], logp, ends) for answer, made, logp in rows]


def _sampled(tokens: list[int], logp: float, ends: bool) -> Found:
    finished = ends and tokens[-1:] == [EOS]
    return Found(tokens[:-1] if finished else tokens, logp, logp / max(len(tokens), 1), finished)


def filtered(logp_NV: Tensor, settings: SampleSettings) -> Tensor:
    for name, rule in FILTERS.items():
        logp_NV = rule(logp_NV, getattr(settings, name))
    return logp_NV


def drawn(logp_NV: Tensor, draw_N: Tensor) -> Tensor:
    """The token on which a draw from [0, 1) falls, when all stand side by side, each as wide as it is likely."""
    sum_NV = logp_NV.double().softmax(-1).nan_to_num().cumsum(-1)
    mark_N1 = draw_N.double()[:, None] * sum_NV[:, -1:]
    return torch.searchsorted(sum_NV, mark_N1, right=True)[:, 0].clamp(max=logp_NV.size(1) - 1)


def temperature(logp_NV: Tensor, value: float) -> Tensor:
    return logp_NV / value if value else top_k(logp_NV, 1)


def top_k(logp_NV: Tensor, value: float) -> Tensor:
    """Of equals the lower id comes first, as in greedy search."""
    return keep_first(logp_NV, torch.arange(logp_NV.size(1), device=logp_NV.device) < value) if value else logp_NV


def top_p(logp_NV: Tensor, value: float) -> Tensor:
    """The fewest tokens that together have this probability: the nucleus (Holtzman 2020)."""
    if value == 1:
        return logp_NV
    share_NV = logp_NV.softmax(-1).sort(dim=-1, descending=True, stable=True).values
    return keep_first(logp_NV, share_NV.cumsum(-1) - share_NV < value)


def keep_first(logp_NV: Tensor, keep: Tensor) -> Tensor:
    """Without those that `keep` does not keep; it is asked from the likeliest token down."""
    order_NV = logp_NV.sort(dim=-1, descending=True, stable=True).indices
    return logp_NV.masked_fill(~keep.expand_as(logp_NV).gather(1, order_NV.argsort(-1)), NEVER)


def _found(answer: list[int], length: int, logp: float, score: float) -> Found:
    finished = length > 0 and answer[length - 1] == EOS
    return Found(answer[: length - finished], logp, score, finished)


FILTERS: dict[str, Callable[[Tensor, float], Tensor]] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
