"""Attention of a recurrent decoder to its source: scores, softmax, and the weighted mean of the source states.

A score takes decoder states and keys made from encoder states, and returns score_BTS. To add a score, write a subclass
of AttentionScore and a line in SCORES. Settings of its own are fields of ScoreSettings, listed in its `uses`.

Shapes   B sentences   S source width   T queries   C decoder width   M encoder width   A attention width
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.config.settings import Settings
from dragoman.kernels.attention import unmask_empty_queries
from dragoman.modules.feedforward import Linear

BLOCK_ELEMENTS = {
    "cpu": 1 << 18,
    "cuda": 1 << 26,
}  # elements of the tanh computed at a time; on a CPU they fit into the cache
WIDEST_FUSED_SCORE = 2048  # maximum attention width of the Triton kernel


class ScoreSettings(Settings):
    """The settings that scores read, apart from the widths, which have other names in a hybrid than in an RNN."""


class AttentionScore(nn.Module):
    """Score all source tokens alike, so that the context vector is their mean. Base class of the scores."""

    reads = True  # whether the decoder gets a context vector
    uses: tuple[str, ...] = ()  # settings that only some scores read
    aligns = False  # whether its weights distinguish source tokens

    def __init__(self, settings: ScoreSettings, width: int, memory_width: int, attention_width: int) -> None:  # noqa: ARG002 - the registry's signature
        super().__init__()
        self.settings, self.width, self.attention_width = settings, width, attention_width

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds per query and key (models/registry.py)."""
        return 0

    def keys(self, memory_BSM: Tensor) -> Tensor:
        """Return the keys of the source states, which are made once and used at every step."""
        return memory_BSM

    def forward(self, query_BTC: Tensor, key_BSA: Tensor) -> Tensor:
        return query_BTC.new_zeros(len(query_BTC), query_BTC.size(1), key_BSA.size(1))


class NoAttention(AttentionScore):
    """No attention: the decoder sees the source only through its initial state, the bottleneck."""

    reads = False


class DotScore(AttentionScore):
    """s'h, where s is the decoder state and h the encoder state, of the same width."""

    aligns = True

    @property
    def multiply_adds(self) -> int:
        return self.width

    def forward(self, query_BTC: Tensor, key_BSA: Tensor) -> Tensor:
        return query_BTC @ key_BSA.mT


class MultiplicativeScore(DotScore):
    """s'Wh (Luong 2015)."""

    def __init__(self, settings: ScoreSettings, width: int, memory_width: int, attention_width: int) -> None:
        super().__init__(settings, width, memory_width, attention_width)
        self.key = Linear(memory_width, width, bias=False)

    def keys(self, memory_BSM: Tensor) -> Tensor:
        return self.key(memory_BSM)


class AdditiveScore(AttentionScore):
    """v'tanh(W1 h + W2 s) (Bahdanau 2015)."""

    uses = ("attention_width", "score_width")  # the names of its width in an RNN and in a hybrid
    aligns = True

    def __init__(self, settings: ScoreSettings, width: int, memory_width: int, attention_width: int) -> None:
        super().__init__(settings, width, memory_width, attention_width)
        self.key = Linear(memory_width, attention_width, bias=False)
        self.query = Linear(width, attention_width, bias=False)
        self.weight = nn.Parameter(torch.empty(attention_width).uniform_(-1, 1) * (3 / attention_width) ** 0.5)

    @property
    def multiply_adds(self) -> int:
        return self.attention_width

    def keys(self, memory_BSM: Tensor) -> Tensor:
        return self.key(memory_BSM)

    def forward(self, query_BTC: Tensor, key_BSA: Tensor) -> Tensor:
        inputs = self.query(query_BTC), key_BSA, self.weight
        if not supports_fused_score(*inputs):
            return score_additive_chunked(*inputs)
        from dragoman.kernels.attention_triton import additive_score

        score_BTS: Tensor = additive_score(*inputs)  # keeps the tanh in registers
        return score_BTS


def score_additive_reference(query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor) -> Tensor:
    """Compute the additive score (reference implementation). It materializes B x T x S x A elements."""
    return torch.tanh(query_BTA[:, :, None] + key_BSA[:, None]) @ weight_A


def supports_fused_score(*inputs: Tensor) -> bool:
    """Return whether the Triton kernel can be used, which computes in float32."""
    supported = all(x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16) for x in inputs)
    return supported and inputs[-1].numel() <= WIDEST_FUSED_SCORE


def score_additive_chunked(query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor) -> Tensor:
    """Compute the score in blocks; the backward pass recomputes the tanh instead of storing it.

    tanh(x) = 2 sigmoid(2x) - 1, and a CPU computes a sigmoid in a sixth of the time. Half precision is widened to
    float32, since a CPU adds it slowly.
    """
    dtype = torch.promote_types(query_BTA.dtype, torch.float32)
    with torch.autocast(query_BTA.device.type, enabled=False):  # it would compute the tanh in half precision
        score_BTS: Tensor = _Additive.apply(  # type: ignore[no-untyped-call]
            2 * query_BTA.to(dtype), 2 * key_BSA.to(dtype), weight_A.to(dtype)
        )
    return score_BTS.to(query_BTA.dtype)


class _Additive(torch.autograd.Function):
    """Given twice the queries and twice the keys, return 2 v'y - v'1, where y = sigmoid(query + key), dy = y - y^2."""

    @staticmethod
    def forward(ctx: Any, query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor) -> Tensor:
        ctx.save_for_backward(query_BTA, key_BSA, weight_A)
        score_BTS = query_BTA.new_empty(*query_BTA.shape[:2], key_BSA.size(1))
        for rows, times in split_into_blocks(query_BTA, key_BSA):
            y_btSA = (query_BTA[rows, times, None] + key_BSA[rows, None]).sigmoid_()
            score_BTS[rows, times] = y_btSA @ weight_A
        return score_BTS.mul_(2).sub_(weight_A.sum())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query_BTA, key_BSA, weight_A = ctx.saved_tensors
        grad_BTS = grads[0].contiguous()
        query_grad_BTA, key_grad_BSA = torch.empty_like(query_BTA), torch.zeros_like(key_BSA)
        weight_grad_A = -grad_BTS.sum().expand_as(weight_A)
        for rows, times in split_into_blocks(query_BTA, key_BSA):
            grad_bt1S = grad_BTS[rows, times, None]
            y_btSA = (query_BTA[rows, times, None] + key_BSA[rows, None]).sigmoid_()
            weight_grad_A = weight_grad_A + 2 * (grad_bt1S.reshape(1, -1) @ y_btSA.flatten(0, 2))[0]
            dy_btSA = torch.addcmul(y_btSA, y_btSA, y_btSA, value=-1, out=y_btSA)
            query_grad_BTA[rows, times] = (grad_bt1S @ dy_btSA)[:, :, 0]
            key_grad_BSA[rows] += dy_btSA.mul_(grad_bt1S.mT).sum(1)
        return query_grad_BTA.mul_(2 * weight_A), key_grad_BSA.mul_(2 * weight_A), weight_grad_A


def split_into_blocks(query_BTA: Tensor, key_BSA: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of rows and of queries, small enough for their B x T x S x A elements to stay in cache."""
    B, T, _ = query_BTA.shape
    budget = BLOCK_ELEMENTS[query_BTA.device.type] // max(1, key_BSA[0].numel())
    height, width = max(1, budget // max(1, T)), max(1, min(budget, T))
    for row in range(0, B, height):
        for time in range(0, T, width):
            yield slice(row, row + height), slice(time, time + width)


class EncodedSource(NamedTuple):
    """Keys, values and padding mask of the sources, one per sentence."""

    key_BSA: Tensor
    value_BSM: Tensor
    allowed_B1S: Tensor

    def keep(self, sentences_K: Tensor) -> EncodedSource:
        """Return only these sentences."""
        return EncodedSource(*(part.index_select(0, sentences_K) for part in self))

    def put(self, sentences_K: Tensor, fresh: EncodedSource) -> EncodedSource:
        """Overwrite these sentences in place."""
        for old, new in zip(self, fresh, strict=True):
            old.index_copy_(0, sentences_K, new)
        return self


class SourceAttention(nn.Module):
    """Attention of every target token to the source, by any of the scores."""

    def __init__(self, score: AttentionScore, memory_width: int) -> None:
        super().__init__()
        self.score = score
        self.width = memory_width if score.reads else 0  # of the context vector

    def prepare(self, memory_BSM: Tensor, real_BS: Tensor) -> EncodedSource:
        """Return the source in the form that attention reads; `real_BS` is False at padding."""
        return EncodedSource(self.score.keys(memory_BSM), memory_BSM, unmask_empty_queries(real_BS[:, None]))

    def weights(self, query_BTC: Tensor, source: EncodedSource) -> Tensor:
        """Return the attention weights: weight_BTS."""
        score_BTS: Tensor = self.score(query_BTC, source.key_BSA)
        return score_BTS.masked_fill(~source.allowed_B1S, -torch.inf).softmax(-1)

    def forward(self, query_BTC: Tensor, source: EncodedSource) -> Tensor:
        """Return [a; s], the context vector beside the decoder state."""
        if not self.score.reads:
            return query_BTC
        return torch.cat([self.weights(query_BTC, source) @ source.value_BSM, query_BTC], -1)


SCORES: dict[str, type[AttentionScore]] = {
    "none": NoAttention,
    "mean": AttentionScore,
    "dot": DotScore,
    "multiplicative": MultiplicativeScore,
    "additive": AdditiveScore,
}
