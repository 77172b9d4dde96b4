"""Attention of a recurrent decoder to its source: scores, softmax, and the weighted mean of the source states.

A score is computed from decoder states (the queries) and from keys, which are computed from encoder states. To add a
score, write a subclass of AttentionScore and add it to SCORES. Settings that only this score reads are fields of
ScoreSettings, and the score lists their names in `uses`.

Shapes   B sentences   S source tokens   T queries   C decoder width   M encoder width   A attention width
         K selected sentences   b, t the sentences and queries of one block of a chunked computation
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.config.settings import Settings
from dragoman.kernels.attention import unmask_empty_queries
from dragoman.modules.feedforward import Linear

# Number of activations that a chunked computation holds at a time, by device. On a CPU they fit into the cache.
BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
WIDEST_FUSED_SCORE = 2048  # maximum attention width of the Triton kernel


class ScoreSettings(Settings):
    """The settings of scores: none so far. Widths are arguments, since `Rnn` and `Hybrid` name them differently."""


class AttentionScore(nn.Module):
    """The base class of scores, and the score "mean": 0 everywhere, so the context is the mean of the source states.

    `width` is the width of the decoder states, `memory_width` that of the encoder states.
    """

    has_context = True  # whether the decoder gets a context vector
    needs_equal_widths = False  # whether encoder and decoder states must have the same width
    uses: tuple[str, ...] = ()  # names of settings that some other scores ignore
    aligns = False  # whether the weights differ between source tokens, so that they can serve as a word alignment

    def __init__(self, settings: ScoreSettings, width: int, memory_width: int, attention_width: int) -> None:  # noqa: ARG002 - the signature of all scores
        super().__init__()
        self.settings, self.width, self.attention_width = settings, width, attention_width

    @property
    def multiply_adds(self) -> int:
        """Return the number of multiply-adds per query and key, for FLOP counts (models/registry.py)."""
        return 0

    def compute_keys(self, memory_BSM: Tensor) -> Tensor:
        """Compute the keys of the source states, once per sentence."""
        return memory_BSM

    def forward(self, query_BTC: Tensor, key_BSA: Tensor) -> Tensor:
        """Return score_BTS."""
        return query_BTC.new_zeros(len(query_BTC), query_BTC.size(1), key_BSA.size(1))


class NoAttention(AttentionScore):
    """No attention: the decoder gets the source only through its initial state."""

    has_context = False


class DotScore(AttentionScore):
    """s^T h, where s is the decoder state and h the encoder state; both have the same width."""

    needs_equal_widths = True
    aligns = True

    @property
    def multiply_adds(self) -> int:
        return self.width

    def forward(self, query_BTC: Tensor, key_BSA: Tensor) -> Tensor:
        return query_BTC @ key_BSA.mT


class MultiplicativeScore(DotScore):
    """s^T W h (Luong 2015). W is rectangular if the widths of encoder and decoder differ."""

    needs_equal_widths = False

    def __init__(self, settings: ScoreSettings, width: int, memory_width: int, attention_width: int) -> None:
        super().__init__(settings, width, memory_width, attention_width)
        self.key = Linear(memory_width, width, bias=False)

    def compute_keys(self, memory_BSM: Tensor) -> Tensor:
        return self.key(memory_BSM)


class ReducedRankScore(DotScore):
    """s^T U^T V h: a multiplicative score whose matrix U^T V has at most the rank `attention_width`."""

    needs_equal_widths = False
    uses = ("attention_width", "score_width")  # the name of the width in `Rnn`, and in `Hybrid`

    def __init__(self, settings: ScoreSettings, width: int, memory_width: int, attention_width: int) -> None:
        super().__init__(settings, width, memory_width, attention_width)
        self.key = Linear(memory_width, attention_width, bias=False)
        self.query = Linear(width, attention_width, bias=False)

    @property
    def multiply_adds(self) -> int:
        return self.attention_width

    def compute_keys(self, memory_BSM: Tensor) -> Tensor:
        return self.key(memory_BSM)

    def forward(self, query_BTC: Tensor, key_BSA: Tensor) -> Tensor:
        return super().forward(self.query(query_BTC), key_BSA)


class AdditiveScore(AttentionScore):
    """v^T tanh(W1 h + W2 s) (Bahdanau 2015)."""

    uses = ("attention_width", "score_width")
    aligns = True

    def __init__(self, settings: ScoreSettings, width: int, memory_width: int, attention_width: int) -> None:
        super().__init__(settings, width, memory_width, attention_width)
        self.key = Linear(memory_width, attention_width, bias=False)
        self.query = Linear(width, attention_width, bias=False)
        limit = (3 / attention_width) ** 0.5  # the variance is 1 / attention_width
        self.weight = nn.Parameter(torch.empty(attention_width).uniform_(-1, 1) * limit)

    @property
    def multiply_adds(self) -> int:
        return self.attention_width

    def compute_keys(self, memory_BSM: Tensor) -> Tensor:
        return self.key(memory_BSM)

    def forward(self, query_BTC: Tensor, key_BSA: Tensor) -> Tensor:
        inputs = self.query(query_BTC), key_BSA, self.weight
        if not supports_fused_score(*inputs):
            return score_additive_chunked(*inputs)
        from dragoman.kernels.attention_triton import additive_score

        score_BTS: Tensor = additive_score(*inputs)
        return score_BTS


def score_additive_reference(query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor) -> Tensor:
    """Compute the additive score (reference implementation). It materializes B x T x S x A elements."""
    return torch.tanh(query_BTA[:, :, None] + key_BSA[:, None]) @ weight_A


def supports_fused_score(query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor) -> bool:
    """Return whether the Triton kernel can be used: on a GPU, except for float64, since it computes in float32."""
    inputs, dtypes = (query_BTA, key_BSA, weight_A), (torch.float32, torch.bfloat16, torch.float16)
    return all(x.is_cuda and x.dtype in dtypes for x in inputs) and len(weight_A) <= WIDEST_FUSED_SCORE


def score_additive_chunked(query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor) -> Tensor:
    """Compute the additive score in blocks; the backward pass recomputes the tanh instead of storing it.

    The tanh is computed as 2 sigmoid(2x) - 1, which takes a sixth of the time on a CPU. Half precision is converted to
    float32, since additions in half precision are slow on a CPU.
    """
    dtype = torch.promote_types(query_BTA.dtype, torch.float32)
    with torch.autocast(query_BTA.device.type, enabled=False):  # autocast would use half precision
        score_BTS: Tensor = _ChunkedAdditiveScore.apply(  # type: ignore[no-untyped-call]
            2 * query_BTA.to(dtype), 2 * key_BSA.to(dtype), weight_A.to(dtype)
        )
    return score_BTS.to(query_BTA.dtype)


class _ChunkedAdditiveScore(torch.autograd.Function):
    """The differentiable form of `score_additive_chunked`; queries and keys are given multiplied by 2.

    The score is 2 v^T y - v^T 1, where y = sigmoid(query + key). The derivative of y is dy = y - y^2.
    """

    @staticmethod
    def forward(ctx: Any, query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor) -> Tensor:
        ctx.save_for_backward(query_BTA, key_BSA, weight_A)
        score_BTS = query_BTA.new_empty(*query_BTA.shape[:2], key_BSA.size(1))
        for rows, queries in split_into_blocks(query_BTA, key_BSA):
            y_btSA = (query_BTA[rows, queries, None] + key_BSA[rows, None]).sigmoid_()
            score_BTS[rows, queries] = y_btSA @ weight_A
        return score_BTS.mul_(2).sub_(weight_A.sum())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query_BTA, key_BSA, weight_A = ctx.saved_tensors
        grad_BTS = grads[0].contiguous()
        query_grad_BTA, key_grad_BSA = torch.empty_like(query_BTA), torch.zeros_like(key_BSA)
        weight_grad_A = -grad_BTS.sum().expand_as(weight_A)
        for rows, queries in split_into_blocks(query_BTA, key_BSA):
            grad_bt1S = grad_BTS[rows, queries, None]
            y_btSA = (query_BTA[rows, queries, None] + key_BSA[rows, None]).sigmoid_()
            weight_grad_A = weight_grad_A + 2 * (grad_bt1S.reshape(1, -1) @ y_btSA.flatten(0, 2))[0]
            dy_btSA = torch.addcmul(y_btSA, y_btSA, y_btSA, value=-1, out=y_btSA)
            query_grad_BTA[rows, queries] = (grad_bt1S @ dy_btSA)[:, :, 0]
            key_grad_BSA[rows] += dy_btSA.mul_(grad_bt1S.mT).sum(1)
        return query_grad_BTA.mul_(2 * weight_A), key_grad_BSA.mul_(2 * weight_A), weight_grad_A


def split_into_blocks(query_BTA: Tensor, key_BSA: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of sentences and of queries, so that their b x t x S x A activations fit BLOCK_ELEMENTS."""
    B, T, _ = query_BTA.shape
    budget = BLOCK_ELEMENTS[query_BTA.device.type] // max(1, key_BSA[0].numel())  # queries per block
    block_rows, block_queries = max(1, budget // max(1, T)), max(1, min(budget, T))
    for row in range(0, B, block_rows):
        for query in range(0, T, block_queries):
            yield slice(row, row + block_rows), slice(query, query + block_queries)


class EncodedSource(NamedTuple):
    """Keys, values, padding mask and, for copying, the tokens of the source sentences."""

    key_BSA: Tensor
    value_BSM: Tensor
    allowed_B1S: Tensor
    ids_BS: Tensor | None = None  # the tokens, for copying

    def keep_sentences(self, sentences_K: Tensor) -> EncodedSource:
        return EncodedSource(*(None if part is None else part.index_select(0, sentences_K) for part in self))  # type: ignore[arg-type]

    def replace_sentences(self, sentences_K: Tensor, fresh: EncodedSource) -> EncodedSource:
        for old, new in zip(self, fresh, strict=True):
            if old is not None and new is not None:
                old.index_copy_(0, sentences_K, new)
        return self


class SourceAttention(nn.Module):
    """Attention of every target token to the source, with a score of SCORES."""

    def __init__(self, score: AttentionScore, memory_width: int) -> None:
        super().__init__()
        self.score = score
        self.width = memory_width if score.has_context else 0  # width of the context vector

    def prepare(self, memory_BSM: Tensor, real_BS: Tensor, ids_BS: Tensor | None = None) -> EncodedSource:
        """Compute keys, values and mask of the source, once per sentence. `real_BS` is False at padding."""
        allowed_B1S = unmask_empty_queries(real_BS[:, None])
        return EncodedSource(self.score.compute_keys(memory_BSM), memory_BSM, allowed_B1S, ids_BS)

    def compute_weights(self, query_BTC: Tensor, source: EncodedSource) -> Tensor:
        score_BTS: Tensor = self.score(query_BTC, source.key_BSA)
        return score_BTS.masked_fill(~source.allowed_B1S, -torch.inf).softmax(-1)

    def forward(self, query_BTC: Tensor, source: EncodedSource) -> tuple[Tensor, Tensor | None]:
        """Return the context vector and the decoder state, concatenated, and the attention weights, weight_BTS.

        Without attention, return only the state, and None.
        """
        if not self.score.has_context:
            return query_BTC, None
        weight_BTS = self.compute_weights(query_BTC, source)
        return torch.cat([weight_BTS @ source.value_BSM, query_BTC], -1), weight_BTS


SCORES: dict[str, type[AttentionScore]] = {
    "none": NoAttention,
    "mean": AttentionScore,
    "dot": DotScore,
    "multiplicative": MultiplicativeScore,
    "reduced_rank": ReducedRankScore,
    "additive": AdditiveScore,
}
