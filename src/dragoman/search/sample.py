"""Answers made from left to right, one token at a time, with no second thoughts.

Shapes   B sentences   S source width   V vocabulary   T answer length
"""

from __future__ import annotations

import torch
from torch import Tensor

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


def _found(answer: list[int], length: int, logp: float, score: float) -> Found:
    finished = length > 0 and answer[length - 1] == EOS
    return Found(answer[: length - finished], logp, score, finished)
