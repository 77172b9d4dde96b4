"""Beam search: at each step, keep the W most probable prefixes of every sentence.

`BeamSearch` decodes many sentences at once. The rows of a finished sentence are still computed, but their values are
ignored. The sentences of a batch may have different lengths, so a new sentence can start while others are half decoded
(decoding/continuous_batching.py). sentence_beam.py has the reference implementation.

If two hypotheses have equal scores, the one from the earlier step ranks higher, then the one from the better beam, then
the one with the lower token id.

Shapes   B sentences   W beams   N = B * W rows of the model   V vocabulary   T maximum target length
         K = 2 * W candidates   G groups of vocabulary columns   S columns of a group   C columns to choose from
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.decoding.protocol import NEG_INF, BaseSearchSettings, Prefix, Search, SearchJob, SearchResult
from dragoman.types import EOS

GROUP_SIZE = 64  # vocabulary columns in a group, see `find_candidates`


class BeamState(NamedTuple):
    """The active prefixes, and the W best finished hypotheses (in the fields `end_...`), both best first."""

    token_BWT: Tensor
    logp_BW: Tensor  # -inf where there is no prefix
    length_B: Tensor  # all prefixes of a sentence have the same length
    end_token_BWT: Tensor
    end_logp_BW: Tensor
    end_score_BW: Tensor  # -inf where there is no hypothesis
    end_length_BW: Tensor  # including EOS
    limit_B: Tensor  # maximum length of a hypothesis, including EOS; 0 means no search
    done_B: Tensor  # whether the search of a sentence has ended


class Candidates(NamedTuple):
    """Continuations of each sentence, best first: log-probability, the beam that is extended, and the new token."""

    logp_BK: Tensor
    parent_BK: Tensor
    token_BK: Tensor


class BeamSearch(Search):
    """Beam search for the sentences of all slots. With beam 1 and stop rule "enough" it is greedy search.

    The results of a sentence are distinct: finished hypotheses by score, then, if there are fewer than `nbest`,
    unfinished ones. A finished hypothesis precedes an unfinished one whatever their scores, because a model that
    repeats itself up to the limit gives every token a high probability. If the model returns only NaN or -inf for a
    sentence, that sentence ends: its prefixes are returned as unfinished, and other sentences are not affected.
    """

    state: BeamState

    def __init__(self, settings: BaseSearchSettings, max_length: int, device: torch.device) -> None:
        super().__init__(settings, settings.beam, max_length, device)
        assert settings.nbest <= settings.beam
        self.norm_T = LENGTH_NORMS[settings.length_norm](max_length, settings.length_penalty)
        self.device_norm_T = self.norm_T.to(device)
        self.should_stop, self.finish = STOP_RULES[settings.stop], settings.finish or self.width

    @property
    def done_B(self) -> Tensor:
        return self.state.done_B

    @property
    def prefix(self) -> Prefix:
        return Prefix(self.state.token_BWT.flatten(0, 1), self.state.length_B.repeat_interleave(self.width))

    def make_state(self, jobs: Sequence[SearchJob]) -> BeamState:
        """Return the initial state: one empty prefix per sentence, or none if the limit is 0."""
        B, W, device = len(jobs), self.width, self.device
        limit_B = torch.tensor([job.max_tokens for job in jobs], dtype=torch.long, device=device)
        token_BWT = torch.full((B, W, self.max_length), EOS, device=device)
        neg_inf_BW = torch.full((B, W), NEG_INF, device=device)
        length_BW = torch.zeros(B, W, dtype=torch.long, device=device)
        logp_BW = neg_inf_BW.clone()
        logp_BW[:, 0] = torch.where(limit_B > 0, 0.0, NEG_INF)
        no_hypotheses = (token_BWT, neg_inf_BW, neg_inf_BW, length_BW)
        return BeamState(token_BWT, logp_BW, length_BW[:, 0], *no_hypotheses, limit_B, limit_B == 0)

    def extend(self, logp_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Extend the best prefixes, add the hypotheses that end with this step, and decide which sentences are done."""
        old, W, norm_T = self.state, self.width, self.device_norm_T
        candidates = find_candidates(old.logp_BW, logp_NV)
        done_B = old.done_B | (candidates.logp_BK[:, 0] == NEG_INF)  # no token is possible

        # A hypothesis ends only if its EOS is among the W best candidates, so that width 1 is greedy search. The W best
        # of the old and new finished hypotheses are kept.
        length_B1 = (old.length_B + 1).clamp(max=len(norm_T) - 1)[:, None]
        logp_BW, parent_BW, token_BW = (field_BK[:, :W] for field_BK in candidates)
        score_BW = torch.where((token_BW == EOS) & ~done_B[:, None], logp_BW / norm_T[length_B1], NEG_INF)
        score_BK, order_BK = torch.cat([old.end_score_BW, score_BW], 1).sort(dim=1, descending=True, stable=True)
        order_BW, end_score_BW = order_BK[:, :W], score_BK[:, :W]
        end_token_BKT = torch.cat([old.end_token_BWT, torch.take_along_dim(old.token_BWT, parent_BW[:, :, None], 1)], 1)
        end_logp_BW = torch.cat([old.end_logp_BW, logp_BW], 1).gather(1, order_BW)
        end_length_BW = torch.cat([old.end_length_BW, length_B1.expand(-1, W)], 1).gather(1, order_BW)

        # The W best candidates other than EOS extend the prefixes. Prefixes of finished sentences do not change.
        order_BW = (candidates.token_BK == EOS).int().sort(dim=1, stable=True).indices[:, :W]
        logp_BW, parent_BW, token_BW = (field_BK.gather(1, order_BW) for field_BK in candidates)
        token_BWT = torch.take_along_dim(old.token_BWT, parent_BW[:, :, None], 1)
        position_BW1 = old.length_B.clamp(max=token_BWT.size(2) - 1)[:, None, None].expand(-1, W, 1)
        token_BWT.scatter_(2, position_BW1, token_BW[:, :, None])
        new_logp_BW = torch.where(done_B[:, None], old.logp_BW, logp_BW)
        length_B = old.length_B + (~done_B).long()
        best_possible_B, best_now_B = (new_logp_BW[:, 0] / norm_T[length] for length in (old.limit_B, length_B))
        nbest = min(self.settings.nbest, self.finish)
        self.state = BeamState(
            torch.where(done_B[:, None, None], old.token_BWT, token_BWT),
            new_logp_BW,
            length_B,
            torch.take_along_dim(end_token_BKT, order_BK[:, :W, None], 1),
            end_logp_BW,
            end_score_BW,
            end_length_BW,
            old.limit_B,
            done_B
            | (length_B >= old.limit_B)
            | self.should_stop(end_score_BW[:, : self.finish], best_possible_B, best_now_B, nbest),
        )
        first_B1 = W * torch.arange(len(done_B), device=done_B.device)[:, None]  # row of a sentence's first beam
        token_BW = token_BW.masked_fill(logp_BW == NEG_INF, EOS)  # no prefix: any id that the model can read
        return (first_B1 + parent_BW).flatten(), token_BW.flatten()

    def results(self, state: BeamState) -> list[list[SearchResult]]:
        """Return up to `nbest` results per slot: finished ones by score, then unfinished ones.

        A stop rule ends a sentence only if `nbest` hypotheses are finished or no beam is active, so an unfinished
        hypothesis is returned only if it has reached the limit. If `finish` ends it earlier, only the finished ones are
        returned. Only the returned tokens are converted to lists, which is slow.
        """
        state = BeamState(*[tensor.cpu() for tensor in state])
        lengths_BW = state.length_B[:, None].expand_as(state.logp_BW)
        unfinished_score_BW = state.logp_BW / self.norm_T[lengths_BW]
        results: list[list[SearchResult]] = [[] for _ in state.limit_B]
        for finished, token_BWT, *numbers in (
            (True, state.end_token_BWT, state.end_length_BW - 1, state.end_logp_BW, state.end_score_BW),
            (False, state.token_BWT, lengths_BW, state.logp_BW, unfinished_score_BW),
        ):
            for b, rows in enumerate(zip(*(number_BW.tolist() for number_BW in numbers), strict=True)):
                if not finished and self.settings.finish and results[b]:
                    continue
                for w, (length, logp, score) in enumerate(zip(*rows, strict=True)):
                    if score > NEG_INF and len(results[b]) < self.settings.nbest:
                        results[b].append(SearchResult(token_BWT[b, w, :length].tolist(), logp, score, finished))
        return results


def find_candidates(logp_BW: Tensor, logp_NV: Tensor) -> Candidates:
    """Return the 2W best continuations. At most W of them are EOS, one per beam, so at least W can be extended.

    Sorting all columns is slow. So the maxima of small groups of columns are computed first, and only the 2W groups
    with the greatest maxima are searched: columns of other groups are not among the 2W best, because each of the 2W
    maxima is at least as great. A row with NaN or +inf comes from a broken model and is ignored.
    """
    B, W = logp_BW.shape
    N, V = logp_NV.shape
    K = 2 * W
    grouped = V // GROUP_SIZE * GROUP_SIZE  # columns in full groups; the remaining ones form a smaller group
    maxima = [logp_NV[:, :grouped].view(N, -1, GROUP_SIZE).amax(-1)] if grouped else []
    if grouped < V:
        maxima.append(logp_NV[:, grouped:].amax(-1, keepdim=True))
    max_NG = torch.cat(maxima, 1)
    broken_N1 = ~(max_NG.amax(-1, keepdim=True) < torch.inf)  # True for NaN as well
    prefix_logp_N1 = logp_BW.view(N, 1).masked_fill(broken_N1, NEG_INF)
    max_BC = (prefix_logp_N1 + max_NG.masked_fill(broken_N1, NEG_INF)).view(B, -1)  # C = W * G
    group_BK = stable_topk(max_BC, K)[1]
    beam_BK, start_BK = group_BK // max_NG.size(1), group_BK % max_NG.size(1) * GROUP_SIZE
    column_BKS = start_BK[:, :, None] + torch.arange(GROUP_SIZE, device=logp_NV.device)
    row_BK1 = (W * torch.arange(B, device=logp_NV.device)[:, None] + beam_BK)[:, :, None]
    total_BKS = prefix_logp_N1[:, 0][row_BK1] + logp_NV[row_BK1, column_BKS.clamp(max=V - 1)]
    total_BKS = total_BKS.nan_to_num(nan=NEG_INF, posinf=NEG_INF, neginf=NEG_INF).masked_fill(column_BKS >= V, NEG_INF)
    index_BC = (beam_BK[:, :, None] * V + column_BKS).flatten(1)  # by which equal scores are ordered: beam, then token
    logp_BK, order_BK = stable_topk(total_BKS.flatten(1), K, index_BC)
    index_BK = index_BC.gather(1, order_BK)
    return Candidates(logp_BK, index_BK // V, index_BK % V)


def stable_topk(score_BC: Tensor, count: int, index_BC: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the `count` highest scores and their columns; of equal scores, the one with the lowest index wins.

    The index is `index_BC`, by default the column. `torch.topk` does not define which of several equal values it
    returns, so a score and its index are combined into one unique integer: the bits of floats, read as integers, have
    the order of the floats, apart from the sign.
    """
    bits_BC = score_BC.float().view(torch.int32).long()
    order_BC = torch.where(bits_BC < 0, -(bits_BC & 0x7FFFFFFF), bits_BC)
    if index_BC is None:
        index_BC = torch.arange(score_BC.size(1), device=score_BC.device).expand_as(score_BC)
    column_BK = ((order_BC << 32) - index_BC).topk(min(count, score_BC.size(1)), dim=1).indices
    return score_BC.gather(1, column_BK), column_BK


def stop_when_full(score_BW: Tensor, best_possible_B: Tensor, best_now_B: Tensor, nbest: int) -> Tensor:  # noqa: ARG001
    """Stop when W hypotheses are finished, or when no prefix can beat the nbest-th hypothesis any more.

    W is the beam width or, if less, the setting `finish`: callers give the scores of so many hypotheses.
    This is the default, because the number of steps is proportional to the length of the result and not to the limit.
    With width 1 it makes beam search greedy. A longer hypothesis with a better score may be missed.
    """
    return (score_BW[:, -1] > NEG_INF) | (score_BW[:, nbest - 1] >= best_possible_B)


def stop_when_unbeatable(score_BW: Tensor, best_possible_B: Tensor, best_now_B: Tensor, nbest: int) -> Tensor:  # noqa: ARG001
    """Stop when no active prefix can overtake the nbest-th hypothesis any more.

    Log-probabilities are at most 0, so no continuation has a higher score than `best_possible_B`, the best prefix's
    log-probability normalized for the maximum length. If that length is great, this bound is loose and the search takes
    many steps.
    """
    return score_BW[:, nbest - 1] >= best_possible_B


def stop_when_ahead(score_BW: Tensor, best_possible_B: Tensor, best_now_B: Tensor, nbest: int) -> Tensor:  # noqa: ARG001
    """Stop when W hypotheses are finished and none has a lower score than the best prefix would have if it ended now.

    It is the rule of `transformers` with early_stopping=False, with which published models are used. Longer prefixes
    could still overtake, since the length normalization favours them.
    """
    return score_BW[:, -1] >= best_now_B


def stop_at_limit(score_BW: Tensor, best_possible_B: Tensor, best_now_B: Tensor, nbest: int) -> Tensor:  # noqa: ARG001
    """Continue until every prefix has reached the limit."""
    return torch.zeros_like(best_possible_B, dtype=torch.bool)


def make_length_divisors(max_length: int, alpha: float) -> Tensor:
    """Return length ** alpha. If alpha is 1, scores are mean log-probabilities."""
    return torch.tensor([float(max(length, 1)) ** alpha for length in range(max_length + 1)])


def make_gnmt_divisors(max_length: int, alpha: float) -> Tensor:
    """Return ((5 + length) / 6) ** alpha, which is milder on short hypotheses (Wu 2016)."""
    return torch.tensor([((5.0 + max(length, 1)) / 6.0) ** alpha for length in range(max_length + 1)])


def make_unit_divisors(max_length: int, alpha: float) -> Tensor:  # noqa: ARG001 - the registry's signature
    """Return ones: the score is the log-probability."""
    return torch.ones(max_length + 1)


# Length normalization: functions that return the divisor of the log-probability for every length from 0 to
# `max_length`, including EOS. The stop rules rely on divisors that are at least 1 and never decrease. They are tables
# because a power computed inside the search may round differently from batch to batch.
LENGTH_NORMS: dict[str, Callable[[int, float], Tensor]] = {
    "length": make_length_divisors,
    "gnmt": make_gnmt_divisors,
    "none": make_unit_divisors,
}
# Functions that return which sentences are done, given the scores of finished hypotheses, the best score that a prefix
# can reach or would have if it ended now, and `nbest`.
STOP_RULES: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "enough": stop_when_full,
    "best": stop_when_unbeatable,
    "ahead": stop_when_ahead,
    "limit": stop_at_limit,
}
