"""Answers made from left to right, one token at a time, with no second thoughts.

Shapes   B sentences   S source width   P prompt width   V vocabulary   T answer length   W samples   N rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dragoman.config.settings import SampleSettings
from dragoman.decoding.protocol import (
    LENGTH_NORMS,
    NEVER,
    Prefix,
    Rule,
    S,
    SearchResult,
    StepModel,
    apply_rules,
    sanitize_logp,
)
from dragoman.types import BOS, EOS


@torch.inference_mode()
def search_greedy(
    model: StepModel[S],
    source_BS: Tensor,
    keep_BS: Tensor,
    limit_B: Tensor,
    *,
    alpha: float = 1.0,
    norm: str = "length",
    rules: Sequence[Rule] = (),
) -> list[list[SearchResult]]:
    """The likeliest token at every step, the lower id among equals: what beam search of width 1 finds.

    `limit_B` is the most tokens an answer may have, its end mark counted; 0 is a dead row, and its list is empty.
    Every other list holds one answer.
    """
    if not any(limit_B.tolist()):
        return [[] for _ in limit_B]
    norm_T = LENGTH_NORMS[norm](max(limit_B.tolist()), alpha)
    limit_B = limit_B.to(source_BS.device)
    state = model.start(source_BS, keep_BS)
    found = generate_tokens(model, state, limit_B, norm_T, lambda logp_NV, _: logp_NV.argmax(-1), rules)
    return [[one] if one else [] for one in found]


@torch.inference_mode()
def sample_translations(
    model: StepModel[S],
    source_BS: Tensor,
    keep_BS: Tensor,
    limit_B: Tensor,
    draw_BWT: Tensor,
    settings: SampleSettings,
    *,
    alpha: float = 1.0,
    norm: str = "length",
    rules: Sequence[Rule] = (),
) -> list[list[SearchResult]]:
    """W answers to every sentence, each token of them drawn. `draw_BWT` holds a number from [0, 1) for every token."""
    B, W, T = draw_BWT.shape
    if not any(limit_B.tolist()):
        return [[] for _ in range(B)]
    row_N = torch.arange(B, device=source_BS.device).repeat_interleave(W)
    draw_NT = draw_BWT.to(source_BS.device).flatten(0, 1)

    def choose(logp_NV: Tensor, step: int) -> Tensor:
        return pick_sampled_tokens(apply_filters(logp_NV, settings), draw_NT[:, step])

    state = model.start(source_BS, keep_BS).select(row_N)
    limit_N = limit_B.to(source_BS.device)[row_N]
    found = generate_tokens(model, state, limit_N, LENGTH_NORMS[norm](T, alpha), choose, rules)
    return [[one for one in found[b * W : (b + 1) * W] if one] for b in range(B)]


def generate_tokens(
    model: StepModel[S],
    state: S,
    limit_N: Tensor,
    norm_T: Tensor,
    choose: Callable[[Tensor, int], Tensor],
    rules: Sequence[Rule],
) -> list[SearchResult | None]:
    """The rows of a state written to their ends, token by token, as `choose` says; None where the limit is 0.

    A row at its end keeps running as a dummy, so that shapes never change.
    """
    N, T, device = len(limit_N), len(norm_T) - 1, limit_N.device
    token_N = torch.full((N,), BOS, device=device)
    answer_NT = torch.full((N, T), EOS, device=device)
    logp_N, length_N = torch.zeros(N, device=device), torch.zeros(N, dtype=torch.long, device=device)
    done_N = limit_N <= 0
    for step in range(T):
        if bool(done_N.all()):
            break
        logp_NV, state = model.step(token_N, state)
        legal_NV = apply_rules(
            sanitize_logp(logp_NV), Prefix(answer_NT[:, :step], torch.full_like(length_N, step)), rules
        )
        token_N = choose(legal_NV, step)
        step_N = legal_NV.gather(1, token_N[:, None])[:, 0]
        done_N = done_N | (step_N == NEVER)
        answer_NT[:, step] = torch.where(done_N, EOS, token_N)
        logp_N = torch.where(done_N, logp_N, logp_N + step_N)
        length_N = length_N + (~done_N).long()
        done_N = done_N | (token_N == EOS) | (length_N >= limit_N)
        token_N = token_N.masked_fill(step_N == NEVER, EOS)
    score_N = logp_N / norm_T.to(device)[length_N]
    rows = zip(limit_N.tolist(), answer_NT.tolist(), length_N.tolist(), logp_N.tolist(), score_N.tolist())
    return [_found(*row) if limit > 0 else None for limit, *row in rows]


@torch.inference_mode()
def sample_continuations(
    model: StepModel[S],
    prompt_BP: Tensor,
    length_B: Tensor,
    draw_BT: Tensor,
    limit_B: Tensor,
    settings: SampleSettings,
    *,
    ends: bool,
) -> list[SearchResult]:
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
        legal_BV = sanitize_logp(logp_BV)
        place_B = made_B.clamp(max=draw_BT.size(1) - 1)
        token_B = pick_sampled_tokens(apply_filters(legal_BV, settings), draw_BT[row_B, place_B])
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


def _sampled(tokens: list[int], logp: float, ends: bool) -> SearchResult:
    finished = ends and tokens[-1:] == [EOS]
    return SearchResult(tokens[:-1] if finished else tokens, logp, logp / max(len(tokens), 1), finished)


def apply_filters(logp_NV: Tensor, settings: SampleSettings) -> Tensor:
    for name, rule in FILTERS.items():
        logp_NV = rule(logp_NV, getattr(settings, name))
    return logp_NV


def pick_sampled_tokens(logp_NV: Tensor, draw_N: Tensor) -> Tensor:
    """The token on which a draw from [0, 1) falls, when all stand side by side, each as wide as it is likely."""
    sum_NV = logp_NV.double().softmax(-1).nan_to_num().cumsum(-1)
    mark_N1 = draw_N.double()[:, None] * sum_NV[:, -1:]
    return torch.searchsorted(sum_NV, mark_N1, right=True)[:, 0].clamp(max=logp_NV.size(1) - 1)


def apply_temperature(logp_NV: Tensor, value: float) -> Tensor:
    return logp_NV / value if value else apply_top_k(logp_NV, 1)


def apply_top_k(logp_NV: Tensor, value: float) -> Tensor:
    """Of equals the lower id comes first, as in greedy search."""
    return keep_ranks(logp_NV, torch.arange(logp_NV.size(1), device=logp_NV.device) < value) if value else logp_NV


def apply_top_p(logp_NV: Tensor, value: float) -> Tensor:
    """The fewest tokens that together have this probability: the nucleus (Holtzman 2020)."""
    if value == 1:
        return logp_NV
    share_NV = logp_NV.softmax(-1).sort(dim=-1, descending=True, stable=True).values
    return keep_ranks(logp_NV, share_NV.cumsum(-1) - share_NV < value)


def keep_ranks(logp_NV: Tensor, keep: Tensor) -> Tensor:
    """Without those that `keep` does not keep; it is asked from the likeliest token down."""
    order_NV = logp_NV.sort(dim=-1, descending=True, stable=True).indices
    return logp_NV.masked_fill(~keep.expand_as(logp_NV).gather(1, order_NV.argsort(-1)), NEVER)


def _found(answer: list[int], length: int, logp: float, score: float) -> SearchResult:
    finished = length > 0 and answer[length - 1] == EOS
    return SearchResult(answer[: length - finished], logp, score, finished)


FILTERS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "temperature": apply_temperature,
    "top_k": apply_top_k,
    "top_p": apply_top_p,
}
