"""Greedy search and sampling: one token at a time, from left to right, without alternatives.

Shapes   B sentences   S source width   P prompt width   V vocabulary   T target length   W samples   N rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dragoman.config.settings import SampleSettings
from dragoman.decoding.beam import LENGTH_NORMS
from dragoman.decoding.protocol import (
    NEVER,
    Prefix,
    Rule,
    SearchResult,
    StateT,
    StepModel,
    apply_rules,
    sanitize_logp,
)
from dragoman.types import BOS, EOS


@torch.inference_mode()
def search_greedy(
    model: StepModel[StateT],
    source_BS: Tensor,
    keep_BS: Tensor,
    limit_B: Tensor,
    *,
    alpha: float = 1.0,
    norm: str = "length",
    rules: Sequence[Rule] = (),
) -> list[list[SearchResult]]:
    """Take the likeliest token at every step, of equals the lower id: what beam search of width 1 finds.

    `limit_B` is the most tokens of a result, EOS counted; a row with limit 0 has no result, every other row has one.
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
    model: StepModel[StateT],
    source_BS: Tensor,
    keep_BS: Tensor,
    limit_B: Tensor,
    uniform_BWT: Tensor,
    settings: SampleSettings,
    *,
    alpha: float = 1.0,
    norm: str = "length",
    rules: Sequence[Rule] = (),
) -> list[list[SearchResult]]:
    """Sample W translations of every sentence. `uniform_BWT` holds a number from [0, 1) for every token."""
    B, W, T = uniform_BWT.shape
    if not any(limit_B.tolist()):
        return [[] for _ in range(B)]
    row_N = torch.arange(B, device=source_BS.device).repeat_interleave(W)
    uniform_NT = uniform_BWT.to(source_BS.device).flatten(0, 1)

    def choose(logp_NV: Tensor, step: int) -> Tensor:
        return pick_sampled_tokens(apply_filters(logp_NV, settings), uniform_NT[:, step])

    state = model.start(source_BS, keep_BS).select(row_N)
    limit_N = limit_B.to(source_BS.device)[row_N]
    found = generate_tokens(model, state, limit_N, LENGTH_NORMS[norm](T, alpha), choose, rules)
    return [[one for one in found[b * W : (b + 1) * W] if one] for b in range(B)]


def generate_tokens(
    model: StepModel[StateT],
    state: StateT,
    limit_N: Tensor,
    norm_T: Tensor,
    choose: Callable[[Tensor, int], Tensor],
    rules: Sequence[Rule],
) -> list[SearchResult | None]:
    """Extend every row by the tokens that `choose` returns until it ends; None where the limit is 0.

    A row that has ended keeps running as a dummy, so that shapes never change.
    """
    N, T, device = len(limit_N), len(norm_T) - 1, limit_N.device
    token_N = torch.full((N,), BOS, device=device)
    token_NT = torch.full((N, T), EOS, device=device)
    logp_N, length_N = torch.zeros(N, device=device), torch.zeros(N, dtype=torch.long, device=device)
    done_N = limit_N <= 0
    for step in range(T):
        if bool(done_N.all()):
            break
        logp_NV, state = model.step(token_N, state)
        clean_NV = apply_rules(
            sanitize_logp(logp_NV), Prefix(token_NT[:, :step], torch.full_like(length_N, step)), rules
        )
        token_N = choose(clean_NV, step)
        step_N = clean_NV.gather(1, token_N[:, None])[:, 0]
        done_N = done_N | (step_N == NEVER)
        token_NT[:, step] = torch.where(done_N, EOS, token_N)
        logp_N = torch.where(done_N, logp_N, logp_N + step_N)
        length_N = length_N + (~done_N).long()
        done_N = done_N | (token_N == EOS) | (length_N >= limit_N)
        token_N = token_N.masked_fill(step_N == NEVER, EOS)
    score_N = logp_N / norm_T.to(device)[length_N]
    rows = zip(limit_N.tolist(), token_NT.tolist(), length_N.tolist(), logp_N.tolist(), score_N.tolist())
    results: list[SearchResult | None] = []
    for limit, tokens, length, logp, score in rows:
        finished = length > 0 and tokens[length - 1] == EOS
        results.append(SearchResult(tokens[: length - finished], logp, score, finished) if limit > 0 else None)
    return results


@torch.inference_mode()
def sample_continuations(
    model: StepModel[StateT],
    prompt_BP: Tensor,
    length_B: Tensor,
    uniform_BT: Tensor,
    limit_B: Tensor,
    settings: SampleSettings,
    *,
    ends: bool,
) -> list[SearchResult]:
    """Read each row's prompt, which starts with BOS, and sample a continuation.

    `uniform_BT` holds a number from [0, 1) for every new token, and samples depend on nothing else. `limit_B` is the
    most new tokens of a row. With `ends`, EOS ends a row; otherwise it is a token like any other.
    """
    B, device = len(prompt_BP), prompt_BP.device
    state = model.start(prompt_BP[:, :0], prompt_BP[:, :0] > 0)
    token_B, row_B = prompt_BP[:, 0], torch.arange(B, device=device)
    token_BT = torch.full_like(uniform_BT, EOS, dtype=torch.long)
    logp_B, written_B = torch.zeros(B, device=device), torch.zeros_like(length_B)
    done_B = limit_B <= 0
    read = 0
    while not bool(done_B.all()):
        read += 1
        logp_BV, state = model.step(token_B, state)
        clean_BV = sanitize_logp(logp_BV)
        position_B = written_B.clamp(max=uniform_BT.size(1) - 1)
        token_B = pick_sampled_tokens(apply_filters(clean_BV, settings), uniform_BT[row_B, position_B])
        step_B = clean_BV.gather(1, token_B[:, None])[:, 0]
        reading_B = length_B > read
        done_B = done_B | (~reading_B & (step_B == NEVER))
        writing_B = ~reading_B & ~done_B
        token_BT[row_B, position_B] = torch.where(writing_B, token_B, token_BT[row_B, position_B])
        logp_B = torch.where(writing_B, logp_B + step_B, logp_B)
        written_B = written_B + writing_B.long()
        done_B = done_B | (written_B >= limit_B) | (writing_B & (token_B == EOS) & ends)
        token_B = torch.where(reading_B, prompt_BP[:, min(read, prompt_BP.size(1) - 1)], token_B)
    results = []
    for row, written, logp in zip(token_BT.tolist(), written_B.tolist(), logp_B.tolist(), strict=True):
        tokens = row[:written]
        finished = ends and tokens[-1:] == [EOS]
        score = logp / max(written, 1)
        results.append(SearchResult(tokens[:-1] if finished else tokens, logp, score, finished))
    return results


def apply_filters(logp_NV: Tensor, settings: SampleSettings) -> Tensor:
    """Apply temperature, top-k and top-p, in this order."""
    for name, rule in FILTERS.items():
        logp_NV = rule(logp_NV, getattr(settings, name))
    return logp_NV


def pick_sampled_tokens(logp_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Return the token of each row at which the cumulative probability exceeds a number from [0, 1)."""
    sum_NV = logp_NV.double().softmax(-1).nan_to_num().cumsum(-1)
    threshold_N1 = uniform_N.double()[:, None] * sum_NV[:, -1:]
    return torch.searchsorted(sum_NV, threshold_N1, right=True)[:, 0].clamp(max=logp_NV.size(1) - 1)


def apply_temperature(logp_NV: Tensor, value: float) -> Tensor:
    """Divide by the temperature; 0 is greedy search."""
    return logp_NV / value if value else apply_top_k(logp_NV, 1)


def apply_top_k(logp_NV: Tensor, value: float) -> Tensor:
    """Keep the k likeliest tokens; of equals the lower id comes first, as in greedy search."""
    return keep_ranks(logp_NV, torch.arange(logp_NV.size(1), device=logp_NV.device) < value) if value else logp_NV


def apply_top_p(logp_NV: Tensor, value: float) -> Tensor:
    """Keep the nucleus, the fewest tokens that together have this probability (Holtzman 2020)."""
    if value == 1:
        return logp_NV
    prob_NV = logp_NV.softmax(-1).sort(dim=-1, descending=True, stable=True).values
    return keep_ranks(logp_NV, prob_NV.cumsum(-1) - prob_NV < value)


def keep_ranks(logp_NV: Tensor, keep: Tensor) -> Tensor:
    """Forbid tokens by rank; `keep` is indexed from the likeliest token down."""
    order_NV = logp_NV.sort(dim=-1, descending=True, stable=True).indices
    return logp_NV.masked_fill(~keep.expand_as(logp_NV).gather(1, order_NV.argsort(-1)), NEVER)


FILTERS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "temperature": apply_temperature,
    "top_k": apply_top_k,
    "top_p": apply_top_p,
}
