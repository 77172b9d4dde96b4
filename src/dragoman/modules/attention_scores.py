"""How a recurrent decoder looks at its source: scores on a menu, softmax over them, and the mean of what it looks at.

Shapes   B sentences   S source width   T queries   C width of a state   M width of a source state   A attention width
A score takes the decoder's states and keys made of the source's states, and returns score_BTS.
To add one: a class below and a line in SCORES.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.kernels.masks import unmask_empty_queries
from dragoman.modules.linear import Linear

BLOCK_ELEMENTS = {
    "cpu": 1 << 18,
    "cuda": 1 << 26,
}  # numbers of the additive score held at a time: few enough for a CPU's cache
WIDEST_FUSED_SCORE = 2048  # attention width whose sums a program of a GPU can hold


class AttentionScore(nn.Module):
    """All source tokens count alike, so that what is read is their mean."""

    reads = True  # whether the decoder gets to see what it looks at
    sized = False  # whether model.attention_width matters to it
    aligns = False  # whether its weights tell source tokens apart

    def __init__(self, width: int, memory_width: int, attention_width: int) -> None:  # noqa: ARG002 - the menu's shape
        super().__init__()
        self.width, self.attention_width = width, attention_width

    @property
    def products(self) -> int:
        """Multiply-adds when a query meets a key (models/flops.py)."""
        return 0

    def keys(self, memory_BSM: Tensor) -> Tensor:
        """What a source state shows of itself: made once, asked at every step."""
        return memory_BSM

    def forward(self, query_BTC: Tensor, key_BSA: Tensor) -> Tensor:
        return query_BTC.new_zeros(len(query_BTC), query_BTC.size(1), key_BSA.size(1))


class NoAttention(AttentionScore):
    """The bottleneck: the decoder sees nothing of the source but the state that it starts from."""

    reads = False


class DotScore(AttentionScore):
    """s'h. Both have one width."""

    aligns = True

    @property
    def products(self) -> int:
        return self.width

    def forward(self, query_BTC: Tensor, key_BSA: Tensor) -> Tensor:
        return query_BTC @ key_BSA.mT


class MultiplicativeScore(DotScore):
    """s'Wh."""

    def __init__(self, width: int, memory_width: int, attention_width: int) -> None:
        super().__init__(width, memory_width, attention_width)
        self.key = Linear(memory_width, width, bias=False)

    def keys(self, memory_BSM: Tensor) -> Tensor:
        out: Tensor = self.key(memory_BSM)
        return out


class AdditiveScore(AttentionScore):
    """v'tanh(W1 h + W2 s)."""

    sized = True
    aligns = True

    def __init__(self, width: int, memory_width: int, attention_width: int) -> None:
        super().__init__(width, memory_width, attention_width)
        self.key = Linear(memory_width, attention_width, bias=False)
        self.query = Linear(width, attention_width, bias=False)
        self.weight = nn.Parameter(torch.empty(attention_width).uniform_(-1, 1) * (3 / attention_width) ** 0.5)

    @property
    def products(self) -> int:
        return self.attention_width

    def keys(self, memory_BSM: Tensor) -> Tensor:
        out: Tensor = self.key(memory_BSM)
        return out

    def forward(self, query_BTC: Tensor, key_BSA: Tensor) -> Tensor:
        given = self.query(query_BTC), key_BSA, self.weight
        return score_additive_fused(*given) if supports_fused_score(*given) else score_additive_chunked(*given)


def score_additive_reference(query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor) -> Tensor:
    """The additive score, written to be read. It holds B x T x S x A numbers."""
    return torch.tanh(query_BTA[:, :, None] + key_BSA[:, None]) @ weight_A


def supports_fused_score(*given: Tensor) -> bool:
    """Whether the kernel for a GPU can make the additive score of these: it counts in float32."""
    narrow = all(x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16) for x in given)
    return narrow and given[-1].numel() <= WIDEST_FUSED_SCORE


def score_additive_fused(query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor) -> Tensor:
    """The same numbers by one kernel, in whose registers all that is in the tanh stays; gradients included."""
    from dragoman.kernels.additive_score_triton import additive_score

    score_BTS: Tensor = additive_score(query_BTA, key_BSA, weight_A)
    return score_BTS


def score_additive_chunked(query_BTA: Tensor, key_BSA: Tensor, weight_A: Tensor) -> Tensor:
    """The same numbers, a few at a time, gradients included; what is in the tanh is made again for them, not kept.

    tanh(x) is 2 sigmoid(2x) - 1, and a CPU makes a sigmoid in a sixth of the time. Narrow floats are widened, since
    sums of them are slow there too.
    """
    dtype = torch.promote_types(query_BTA.dtype, torch.float32)
    with torch.autocast(query_BTA.device.type, enabled=False):  # it would narrow all that is in the tanh
        score_BTS: Tensor = _Additive.apply(  # type: ignore[no-untyped-call]
            2 * query_BTA.to(dtype), 2 * key_BSA.to(dtype), weight_A.to(dtype)
        )
    return score_BTS.to(query_BTA.dtype)


class _Additive(torch.autograd.Function):
    """From twice the queries and twice the keys: 2 v'y - v'1, where y is the sigmoid of their sum; y' is y - y^2."""

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
        slope_BTA, slope_BSA = torch.empty_like(query_BTA), torch.zeros_like(key_BSA)
        slope_A = -grad_BTS.sum().expand_as(weight_A)
        for rows, times in split_into_blocks(query_BTA, key_BSA):
            grad_bt1S = grad_BTS[rows, times, None]
            y_btSA = (query_BTA[rows, times, None] + key_BSA[rows, None]).sigmoid_()
            slope_A = slope_A + 2 * (grad_bt1S.reshape(1, -1) @ y_btSA.flatten(0, 2))[0]
            bend_btSA = torch.addcmul(y_btSA, y_btSA, y_btSA, value=-1, out=y_btSA)
            slope_BTA[rows, times] = (grad_bt1S @ bend_btSA)[:, :, 0]
            slope_BSA[rows] += bend_btSA.mul_(grad_bt1S.mT).sum(1)
        return slope_BTA.mul_(2 * weight_A), slope_BSA.mul_(2 * weight_A), slope_A


def split_into_blocks(query_BTA: Tensor, key_BSA: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and times of the grid, so few at a time that what is made of them stays in reach."""
    B, T, _ = query_BTA.shape
    room = BLOCK_ELEMENTS[query_BTA.device.type] // max(1, key_BSA[0].numel())
    height, width = max(1, room // max(1, T)), max(1, min(room, T))
    for row in range(0, B, height):
        for time in range(0, T, width):
            yield slice(row, row + height), slice(time, time + width)


@dataclass(frozen=True)
class EncodedSource:
    """The sources as attention sees them, one per sentence."""

    key_BSA: Tensor
    value_BSM: Tensor
    keep_B1S: Tensor

    def keep(self, sentences_K: Tensor) -> EncodedSource:
        """Only these."""
        return EncodedSource(*(each.index_select(0, sentences_K) for each in self.parts))

    def put(self, sentences_K: Tensor, fresh: EncodedSource) -> EncodedSource:
        """Others in the places of these, written over them."""
        for held, new in zip(self.parts, fresh.parts):
            held.index_copy_(0, sentences_K, new)
        return self

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.key_BSA, self.value_BSM, self.keep_B1S


class SourceAttention(nn.Module):
    """Every target token looks at the source, as its score says."""

    def __init__(self, score: AttentionScore, memory_width: int) -> None:
        super().__init__()
        self.score = score
        self.width = memory_width if score.reads else 0  # of what it reads

    def look_up(self, memory_BSM: Tensor, keep_BS: Tensor) -> EncodedSource:
        return EncodedSource(self.score.keys(memory_BSM), memory_BSM, unmask_empty_queries(keep_BS[:, None]))

    def weights(self, query_BTC: Tensor, source: EncodedSource) -> Tensor:
        """How much each target token looks at each source token: shares_BTS."""
        score_BTS: Tensor = self.score(query_BTC, source.key_BSA)
        return score_BTS.masked_fill(~source.keep_B1S, -torch.inf).softmax(-1)

    def forward(self, query_BTC: Tensor, source: EncodedSource) -> Tensor:
        """[a; s]: what was read, beside the state that asked for it."""
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
