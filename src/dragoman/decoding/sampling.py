"""Sampling: choose each token at random according to its probability, from left to right.

`SampleSearch` samples translations, `sample_continuations` continuations of prompts. Both extend a `SampleState`. The
random numbers of all tokens are computed beforehand (`uniform_BWT`), so that samples do not depend on the other
sentences of a batch.

Shapes   B sentences   P prompt length   V vocabulary   T maximum target length   W samples   N = B * W model rows
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dragoman.config.settings import SampleSettings
from dragoman.decoding.beam import LENGTH_NORMS
from dragoman.decoding.protocol import (
    NEG_INF,
    BaseSearchSettings,
    Prefix,
    Search,
    SearchJob,
    SearchResult,
    StateT,
    StepModel,
    forbid_invalid_tokens,
)
from dragoman.types import EOS


class SampleState(NamedTuple):
    """The samples of every sentence."""

    token_BWT: Tensor  # including EOS
    logp_BW: Tensor
    length_BW: Tensor  # including EOS
    done_BW: Tensor
    limit_B: Tensor
    uniform_BWT: Tensor  # a random number from [0, 1) for every token

    @classmethod
    def start(cls, limit_B: Tensor, uniform_BWT: Tensor) -> SampleState:
        """Return the state before the first token. A limit of 0 means that no result is wanted."""
        zero_BW = torch.zeros(uniform_BWT.shape[:2], device=limit_B.device)
        token_BWT = torch.full_like(uniform_BWT, EOS, dtype=torch.long)
        return cls(token_BWT, zero_BW, zero_BW.long(), zero_BW >= limit_B[:, None], limit_B, uniform_BWT)


def extend_samples(
    state: SampleState, logp_NV: Tensor, settings: SampleSettings, wait_BW: Tensor, *, eos_ends: bool = True
) -> tuple[SampleState, Tensor]:
    """Extend every sample by one token, except where `wait_BW` is True; return the new state and the tokens.

    If `eos_ends`, EOS ends a sample. The rows of finished and waiting samples are computed too, so that shapes never
    change, but their tokens are not stored.
    """
    shape, T = state.done_BW.shape, state.token_BWT.size(2)
    allowed_NV = forbid_invalid_tokens(logp_NV)
    position_BW1 = state.length_BW.clamp(max=T - 1)[:, :, None]
    uniform_N = state.uniform_BWT.gather(2, position_BW1).flatten()
    filtered_NV = allowed_NV
    for name, apply_filter in FILTERS.items():
        filtered_NV = apply_filter(filtered_NV, getattr(settings, name))
    token_N = pick_sampled_tokens(filtered_NV, uniform_N)
    token_logp_BW, token_BW = allowed_NV.gather(1, token_N[:, None]).view(shape), token_N.view(shape)
    # If all tokens are forbidden, so is the picked one: the sample ends, unfinished.
    done_BW = state.done_BW | (~wait_BW & (token_logp_BW == NEG_INF))
    grows_BW = ~wait_BW & ~done_BW
    length_BW = state.length_BW + grows_BW.long()
    new_BW1 = torch.where(grows_BW[:, :, None], token_BW[:, :, None], state.token_BWT.gather(2, position_BW1))
    done_BW = done_BW | (length_BW >= state.limit_B[:, None]) | (grows_BW & (token_BW == EOS) & eos_ends)
    state = SampleState(
        state.token_BWT.scatter(2, position_BW1, new_BW1),
        torch.where(grows_BW, state.logp_BW + token_logp_BW, state.logp_BW),
        length_BW,
        done_BW,
        state.limit_B,
        state.uniform_BWT,
    )
    return state, token_BW.masked_fill(token_logp_BW == NEG_INF, EOS).flatten()


class SampleSearch(Search):
    """Sample translations of every sentence. The samples of a sentence are numbered; this search samples `numbers`.

    A sample depends only on the model, the settings, the source text and its number.
    """

    state: SampleState

    def __init__(self, settings: BaseSearchSettings, numbers: range, max_length: int, device: torch.device) -> None:
        super().__init__(settings, len(numbers), max_length, device)
        self.numbers = numbers
        self.norm_T = LENGTH_NORMS[settings.length_norm](max_length, settings.length_penalty).to(device)

    @property
    def done_B(self) -> Tensor:
        return self.state.done_BW.all(1)

    @property
    def prefix(self) -> Prefix:
        return Prefix(self.state.token_BWT.flatten(0, 1), self.state.length_BW.flatten())

    def make_state(self, jobs: Sequence[SearchJob]) -> SampleState:
        limit_B = torch.tensor([job.max_tokens for job in jobs], dtype=torch.long, device=self.device)
        uniform_BWT = make_uniforms(jobs, self.settings.seed, self.numbers, self.max_length)
        return SampleState.start(limit_B, uniform_BWT.to(self.device))

    def extend(self, logp_NV: Tensor) -> tuple[None, Tensor]:
        """Sample one token for every row. The first result is None: each row extends itself."""
        wait_BW = torch.zeros_like(self.state.done_BW)
        self.state, token_N = extend_samples(self.state, logp_NV, self.settings, wait_BW)
        return None, token_N

    def results(self, state: SampleState) -> list[list[SearchResult]]:
        """Return the samples of every sentence of a search state, in the order of their numbers."""
        score_BW = state.logp_BW / self.norm_T[state.length_BW]
        columns = (state.token_BWT, state.length_BW, state.logp_BW, score_BW)
        results = []
        for limit, *rows in zip(state.limit_B.tolist(), *(tensor.tolist() for tensor in columns), strict=True):
            samples = []
            for tokens, length, logp, score in zip(*rows, strict=True):
                finished = length > 0 and tokens[length - 1] == EOS
                samples.append(SearchResult(tokens[: length - finished], logp, score, finished))  # without EOS
            results.append(samples if limit > 0 else [])  # 0: no result is wanted
        return results


def make_uniforms(jobs: Sequence[SearchJob], seed: int, numbers: range, max_length: int) -> Tensor:
    """Return uniform_BWT, the random numbers of these samples. They depend only on seed, source text and number."""
    uniform_BWT = np.zeros((len(jobs), len(numbers), max_length))
    for row, job in enumerate(jobs):
        text = job.constraints.seed_text.encode(errors="surrogatepass")
        digest = memoryview(hashlib.blake2b(text, digest_size=16).digest()).cast("I")  # four 32-bit integers
        for column, number in enumerate(numbers):
            generator = np.random.default_rng([seed, number, *digest])
            uniform_BWT[row, column, : job.max_tokens] = generator.random(job.max_tokens)
    return torch.from_numpy(uniform_BWT)


@torch.inference_mode()
def sample_continuations(
    model: StepModel[StateT],
    prompt_BP: Tensor,
    length_B: Tensor,
    uniform_BT: Tensor,
    limit_B: Tensor,
    settings: SampleSettings,
    *,
    eos_ends: bool,
) -> list[SearchResult]:
    """Read a prompt per row, which starts with BOS and has `length_B` tokens, and sample a continuation of each.

    `uniform_BT` holds a random number from [0, 1) for every new token. `limit_B` is the maximum number of new tokens.
    If `eos_ends`, EOS ends a continuation; otherwise it is a token like any other.
    """
    no_source_BS = prompt_BP[:, :0]  # a language model reads only the number of rows
    model_state, token_B = model.start(no_source_BS, no_source_BS > 0), prompt_BP[:, 0]
    state = SampleState.start(limit_B, uniform_BT[:, None])
    tokens_read = 0
    while not bool(state.done_BW.all()):
        tokens_read += 1
        logp_BV, model_state = model.step(token_B, model_state)
        in_prompt_B = length_B > tokens_read
        state, token_B = extend_samples(state, logp_BV, settings, in_prompt_B[:, None], eos_ends=eos_ends)
        token_B = torch.where(in_prompt_B, prompt_BP[:, min(tokens_read, prompt_BP.size(1) - 1)], token_B)
    columns = (state.token_BWT, state.length_BW, state.logp_BW)
    results = []
    for row, length, logp in zip(*(tensor[:, 0].tolist() for tensor in columns), strict=True):
        tokens = row[:length]
        finished = eos_ends and tokens[-1:] == [EOS]
        score = logp / max(length, 1)
        results.append(SearchResult(tokens[:-1] if finished else tokens, logp, score, finished))
    return results


def pick_sampled_tokens(logp_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Return, for each row, the first token at which the cumulative probability exceeds the number from [0, 1)."""
    cumulative_NV = logp_NV.double().softmax(-1).nan_to_num().cumsum(-1)
    threshold_N1 = uniform_N.double()[:, None] * cumulative_NV[:, -1:]
    return torch.searchsorted(cumulative_NV, threshold_N1, right=True)[:, 0].clamp(max=logp_NV.size(1) - 1)


def apply_temperature(logp_NV: Tensor, value: float) -> Tensor:
    """Divide the log-probabilities by the temperature. At temperature 0, keep only the most probable token."""
    return logp_NV / value if value else apply_top_k(logp_NV, 1)


def apply_top_k(logp_NV: Tensor, value: float) -> Tensor:
    """Keep the k most probable tokens; of equally probable ones, those with the lowest ids. 0 keeps all."""
    return keep_ranks(logp_NV, torch.arange(logp_NV.size(1), device=logp_NV.device) < value) if value else logp_NV


def apply_top_p(logp_NV: Tensor, value: float) -> Tensor:
    """Keep the nucleus: the most probable tokens, as few as together have this probability (Holtzman 2020)."""
    if value == 1:
        return logp_NV
    prob_NV = logp_NV.softmax(-1).sort(dim=-1, descending=True, stable=True).values
    return keep_ranks(logp_NV, prob_NV.cumsum(-1) - prob_NV < value)


def keep_ranks(logp_NV: Tensor, keep: Tensor) -> Tensor:
    """Forbid tokens by their rank: `keep` is False at the ranks to forbid, where rank 0 is the most probable token."""
    order_NV = logp_NV.sort(dim=-1, descending=True, stable=True).indices
    return logp_NV.masked_fill(~keep.expand_as(logp_NV).gather(1, order_NV.argsort(-1)), NEG_INF)


# Filters of log-probabilities, applied in this order: name of a setting -> function of logp_NV and the setting's value.
FILTERS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "temperature": apply_temperature,
    "top_k": apply_top_k,
    "top_p": apply_top_p,
}
