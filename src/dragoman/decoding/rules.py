"""Rules that forbid tokens. Each takes log-probabilities and the prefixes, and writes NEVER where it forbids a token.

The rest is not rescaled, so that scores stay the model's own. A required prefix takes precedence over all other rules.

Shapes   B sentences   W rows of a sentence   N = B * W   V vocabulary   T width of the prefixes   K terms
         G n-grams of a prefix   P width of the required prefixes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.protocol import NEVER, Prefix, Rule, apply_rules
from dragoman.decoding.request import Request, Term
from dragoman.types import EOS, PAD


def make_rules(request: Request[Any]) -> tuple[Rule, ...]:
    """Return the rules of a request. If prefixes are required, one rule applies the others after the prefix."""
    rules = [rule for make in RULES.values() if (rule := make(request))]
    prefixes = [each.prefix for each in request.constraints]
    if any(prefixes):
        return (force_prefixes(prefixes, rules, request.device),)
    return tuple(rules)


def force_prefixes(prefixes: Sequence[Sequence[int]], rules: Sequence[Rule], device: torch.device) -> Rule:
    """Force the prefix of every sentence, whatever the other rules forbid; they apply from there on."""
    P = max(map(len, prefixes))
    required_BP = torch.tensor([[*prefix, *[PAD] * (P - len(prefix))] for prefix in prefixes], device=device)
    length_B = torch.tensor([len(prefix) for prefix in prefixes], device=device)

    def rule(logp_NV: Tensor, prefix: Prefix) -> Tensor:
        W = len(logp_NV) // len(length_B)
        inside_N = prefix.length_N < length_B.repeat_interleave(W)
        position_N1 = prefix.length_N.clamp(max=P - 1)[:, None]
        token_N1 = required_BP.repeat_interleave(W, 0).gather(1, position_N1)
        only_NV = torch.full_like(logp_NV, NEVER).scatter(1, token_N1, logp_NV.gather(1, token_N1))
        return torch.where(inside_N[:, None], only_NV, apply_rules(logp_NV, prefix, rules))

    return rule


def make_no_repeat(request: Request[Any]) -> Rule | None:
    """Forbid repeated n-grams, if the settings ask for it."""
    n = request.settings.no_repeat
    return forbid_repeats(n) if n else None


def forbid_repeats(n: int) -> Rule:
    """Forbid a token that would complete an n-gram which the prefix already has."""

    def rule(logp_NV: Tensor, prefix: Prefix) -> Tensor:
        token_NT, length_N = prefix
        if token_NT.size(1) < n:
            return logp_NV
        ngram_NGn = token_NT.unfold(1, n, 1)
        begin_G = torch.arange(ngram_NGn.size(1), device=token_NT.device)
        back_n = torch.arange(1 - n, 0, device=token_NT.device)
        last_Nn = token_NT.gather(1, (length_N[:, None] + back_n).clamp(min=0))
        repeated_NG = (begin_G + n <= length_N[:, None]) & (ngram_NGn[:, :, :-1] == last_Nn[:, None]).all(-1)
        token_NG = torch.where(repeated_NG, ngram_NGn[:, :, -1], PAD)  # which is forbidden anyway
        return logp_NV.scatter(1, token_NG, NEVER)

    return rule


def make_minimum(request: Request[Any]) -> Rule | None:
    """Forbid EOS before the minimum length, if some sentence has one."""
    least_B = torch.tensor([each.minimum for each in request.constraints], device=request.device)
    return forbid_early_end(least_B) if any(each.minimum for each in request.constraints) else None


def forbid_early_end(least_B: Tensor) -> Rule:
    """Forbid EOS in prefixes of fewer tokens than these."""

    def rule(logp_NV: Tensor, prefix: Prefix) -> Tensor:
        early_N = prefix.length_N < least_B.repeat_interleave(len(logp_NV) // len(least_B))
        ends_V = torch.arange(logp_NV.size(1), device=logp_NV.device) == EOS
        return logp_NV.masked_fill(early_N[:, None] & ends_V, NEVER)

    return rule


def make_avoided(request: Request[Any]) -> Rule | None:
    """Forbid tokens that would complete a term to avoid, if some sentence has one."""
    terms = [each.avoid for each in request.constraints]
    return forbid_terms(terms, request.device) if any(terms) else None


def forbid_terms(terms: Sequence[Sequence[Term]], device: torch.device) -> Rule:
    """Forbid the terms of each sentence. All automata are in one table, each with its states after the last one's.

    Sentences with fewer terms than others run an automaton that never accepts.
    """
    automata = list({id(term): term for some in terms for term in some}.values())
    first = dict(zip(map(id, automata), np.cumsum([1, *(len(m.left_S) for m in automata)]).tolist()))
    K, V = max(map(len, terms)), automata[0].next_SV.shape[1]
    idle_SV = np.zeros((1, V), dtype=np.int32)
    next_SV = torch.tensor(
        np.vstack([idle_SV, *(m.next_SV.astype(np.int32) + first[id(m)] for m in automata)]), device=device
    )
    accepts_S = torch.tensor(np.concatenate([[False], *(m.left_S == 0 for m in automata)]), device=device)
    ends_S = torch.tensor(np.concatenate([[False], *(m.ends_S for m in automata)]), device=device)
    begins = [[*(first[id(term)] for term in some), *[0] * (K - len(some))] for some in terms]
    begin_BK = torch.tensor(begins, dtype=torch.int32, device=device)

    def rule(logp_NV: Tensor, prefix: Prefix) -> Tensor:
        state_NK = begin_BK.repeat_interleave(len(logp_NV) // len(begin_BK), 0)
        for position in range(prefix.token_NT.size(1)):
            there_N1 = (position < prefix.length_N)[:, None]
            state_NK = torch.where(there_N1, next_SV[state_NK, prefix.token_NT[:, position, None]], state_NK)
        complete_NK = accepts_S[state_NK]  # a required prefix may contain the term
        forbidden_NV = (accepts_S[next_SV[state_NK]] & ~complete_NK[:, :, None]).any(1)
        forbidden_NV[:, EOS] = (ends_S[state_NK] & ~complete_NK).any(1)
        return logp_NV.masked_fill(forbidden_NV, NEVER)

    return rule


RULES: dict[str, Callable[[Request[Any]], Rule | None]] = {
    "no_repeat": make_no_repeat,
    "minimum": make_minimum,
    "avoid": make_avoided,
}
