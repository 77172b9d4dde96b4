"""Exhaustive search over all sequences, for small cases: beam search is compared with it.

Shapes   N prefixes   V vocabulary   S source width   T tokens so far
"""

from __future__ import annotations

import torch
from torch import Tensor

from dragoman.config.settings import get_entry
from dragoman.decoding.beam import LENGTH_NORMS
from dragoman.decoding.protocol import NEG_INF, SearchResult, StateT, StepModel, forbid_invalid_tokens
from dragoman.errors import UserError
from dragoman.types import BOS, EOS

MAX_PREFIXES = 1 << 20


@torch.inference_mode()
def search_exhaustively(
    model: StepModel[StateT],
    source_1S: Tensor,
    keep_1S: Tensor,
    limit: int,
    *,
    alpha: float = 1.0,
    norm: str = "length",
) -> list[SearchResult]:
    """Return all hypotheses of up to `limit` tokens, including EOS: finished ones by score, then truncated ones.

    Among equal scores the shorter hypothesis comes first, then the one with the likelier prefix, then the lower token.
    """
    norm_T = get_entry(LENGTH_NORMS, norm, "length norm")(limit, alpha).to(source_1S.device)
    state = model.start(source_1S, keep_1S)
    prefix_NT = torch.full((1, 1), BOS, device=source_1S.device)
    logp_N = torch.zeros(1, device=source_1S.device)
    finished_results: list[SearchResult] = []
    for length in range(1, limit + 1):
        logp_NV, state = model.step(prefix_NT[:, -1], state)
        total_NV = logp_N[:, None] + forbid_invalid_tokens(logp_NV)
        finished_results += list_results(prefix_NT, total_NV[:, EOS], norm_T[length], finished=True)
        total_NV[:, EOS] = NEG_INF
        order_N = total_NV.flatten().sort(descending=True, stable=True).indices
        rows_N, token_N = order_N // total_NV.size(1), order_N % total_NV.size(1)
        alive_N = total_NV.flatten()[order_N] > NEG_INF
        rows_N, token_N = rows_N[alive_N], token_N[alive_N]
        if len(rows_N) > MAX_PREFIXES:
            raise UserError(
                f"there are more than {MAX_PREFIXES} sequences of {length} tokens; that is too many to search"
            )
        logp_N = total_NV[rows_N, token_N]
        prefix_NT = torch.cat([prefix_NT[rows_N], token_N[:, None]], 1)
        state = state.select(rows_N)
    truncated_results = list_results(prefix_NT, logp_N, norm_T[limit], finished=False)
    return [
        result
        for results in (finished_results, truncated_results)
        for result in sorted(results, key=lambda result: -result.score)
    ]


def list_results(prefix_NT: Tensor, logp_N: Tensor, norm: Tensor, *, finished: bool) -> list[SearchResult]:
    rows = zip(prefix_NT[:, 1:].tolist(), logp_N.tolist(), (logp_N / norm).tolist())
    return [SearchResult(tokens, logp, score, finished) for tokens, logp, score in rows if logp > NEG_INF]
