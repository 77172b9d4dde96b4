"""Pointer copying: every output token is generated from the vocabulary or copied from the source (See et al., 2017).

    P(y_t) = g_t softmax(W s_t)[y_t] + (1 - g_t) sum of a_ti over all source positions i whose token is y_t

The state s_t decides how likely it is to generate, g_t = sigmoid(w^T s_t + b), and the attention weights a_ti what is
copied. The ids of source and target must therefore mean the same tokens.

The states that a copying model returns consist of s_t and, after it, the copy distribution: the attention weights,
added up by token. So the probabilities of a position depend on its state only, as in a model without copying.

Shapes   B rows of a batch, or sentences   T target tokens, or hypotheses of a sentence   S source tokens
         C model width   V vocabulary   X = C + V
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.kernels.attention import AttentionMask, compute_attention_weights
from dragoman.modules.feedforward import Linear


def append_copy_distribution(states: Tensor, weight_BTS: Tensor, source_BS: Tensor, table: nn.Embedding) -> Tensor:
    """Return the states, with C features in the last axis, followed by the copy distribution over V tokens.

    V is the size of the embedding table. The distribution has the precision of the table: float32 with autocast, whose
    bfloat16 would round probabilities to three digits.
    """
    weight_BTS = weight_BTS.to(torch.promote_types(weight_BTS.dtype, table.weight.dtype))
    copy_BTV = weight_BTS.new_zeros(*weight_BTS.shape[:2], table.num_embeddings)
    copy_BTV = copy_BTV.scatter_add(2, source_BS[:, None].expand_as(weight_BTS), weight_BTS)
    return torch.cat([states, copy_BTV.view(*states.shape[:-1], -1)], -1)


class CopyGate(nn.Module):
    """The gate g_t, which mixes the distribution over the vocabulary and the copy distribution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.out = width, Linear(width, 1)

    def forward(self, states_BTX: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the log-probabilities of all tokens, logp_BTV; `project` returns the logits of the vocabulary.

        They are added as logarithms, so that no probability becomes 0, however far the gate is to one side.
        """
        dtype = torch.promote_types(states_BTX.dtype, torch.float32)
        states_BTC, copy_BTV = states_BTX[..., : self.width].contiguous(), states_BTX[..., self.width :].to(dtype)
        gate_BT1, logits_BTV = self.out(states_BTC).to(dtype), project(states_BTC).to(dtype)
        generated_BTV = F.logsigmoid(gate_BT1) + logits_BTV.log_softmax(-1)
        copied_BTV = F.logsigmoid(-gate_BT1) + copy_BTV.clamp(min=torch.finfo(dtype).tiny).log()
        return torch.logaddexp(generated_BTV, copied_BTV)


class CopyAttention(nn.Module):
    """The attention of a Transformer that chooses what is copied: one head, from the decoder's output to the source."""

    __call__: Callable[..., Tensor]

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.query, self.key = Linear(width, width, bias=False), Linear(width, width, bias=False)

    def compute_keys(self, memory_BSC: Tensor) -> Tensor:
        """Compute the keys of the source states, key_B1SC. Decoding computes them once and uses them in every step."""
        return self.key(memory_BSC)[:, None]

    def forward(self, states_BTC: Tensor, key_B1SC: Tensor, mask: AttentionMask) -> Tensor:
        """Return weight_BTS. In decoding, the T axis holds the hypotheses of a sentence."""
        if mask.length_B is not None:
            position_S = torch.arange(key_B1SC.size(2), device=key_B1SC.device)
            mask = AttentionMask((position_S < mask.length_B[:, None])[:, None, None])
        return compute_attention_weights(self.query(states_BTC)[:, None], key_B1SC, mask)[:, 0]
