"""Attention: the kernels on a menu, and the multi-head modules around them.

Shapes   B batch   H heads   Q queries   K keys   D head width   C model width   N rows of a search
A kernel takes q_BHQD, k_BHKD, v_BHKD and a keep-mask (True = may look) and returns out_BHQD.
To add a variant: one function below and one line in KERNELS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.nn.linear import Linear

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def weights(q_BHQD: Tensor, k_BHKD: Tensor, keep: Tensor) -> Tensor:
    """How much each query looks at each key: scaled dot products, softmax over what it may look at."""
    score_BHQK: Tensor = q_BHQD @ k_BHKD.mT * q_BHQD.size(-1) ** -0.5
    return score_BHQK.masked_fill(~keep, -torch.inf).softmax(-1)


def reference(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, keep: Tensor) -> Tensor:
    """Scaled dot-product attention, written to be read."""
    return weights(q_BHQD, k_BHKD, keep) @ v_BHKD


def fused(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, keep: Tensor) -> Tensor:
    """The same numbers from PyTorch's fused kernel, which never holds the whole score matrix."""
    return F.scaled_dot_product_attention(q_BHQD, k_BHKD, v_BHKD, attn_mask=keep)


def batched(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, keep: Tensor) -> Tensor:
    """The same numbers from plain batched products in the working precision, with a backward pass of our own.

    On a CPU this beats PyTorch's fused kernel, which in bf16 takes three times as long.
    """
    B, H, Q, D = q_BHQD.shape
    q_NQD, k_NKD, v_NKD = (x.reshape(B * H, -1, x.size(-1)) for x in (q_BHQD, k_BHKD, v_BHKD))
    out: Tensor = _Batched.apply(q_NQD, k_NKD, v_NKD, keep, B)  # type: ignore[no-untyped-call]
    return out.view(B, H, Q, D)


class _Batched(torch.autograd.Function):
    """Attention on N = B x H matrices."""

    @staticmethod
    def forward(ctx: Any, q_NQD: Tensor, k_NKD: Tensor, v_NKD: Tensor, keep: Tensor, rows: int) -> Tensor:
        score_NQK = torch.bmm(q_NQD, k_NKD.mT).mul_(q_NQD.size(-1) ** -0.5)
        score_NQK.view(rows, -1, *score_NQK.shape[1:]).add_(as_bias(keep, score_NQK.dtype))
        weight_NQK = score_NQK.softmax(-1, dtype=score_NQK.dtype)  # autocast on a GPU would widen it
        ctx.save_for_backward(q_NQD, k_NKD, v_NKD, weight_NQK)
        return torch.bmm(weight_NQK, v_NKD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_NQD, k_NKD, v_NKD, weight_NQK = ctx.saved_tensors
        grad_NQD = grads[0].contiguous()
        slope_NQK = torch._softmax_backward_data(torch.bmm(grad_NQD, v_NKD.mT), weight_NQK, -1, weight_NQK.dtype)
        slope_NQK.mul_(q_NQD.size(-1) ** -0.5)
        key_grad_NKD, value_grad_NKD = torch.bmm(slope_NQK.mT, q_NQD), torch.bmm(weight_NQK.mT, grad_NQD)
        return torch.bmm(slope_NQK, k_NKD), key_grad_NKD, value_grad_NKD, None, None


def as_bias(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where one may look, the lowest number elsewhere: adding is faster than filling by a mask."""
    return keep.to(dtype).sub_(1).mul_(torch.finfo(dtype).max)


def auto(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, keep: Tensor) -> Tensor:
    """The fastest for the device that the tensors are on."""
    return (batched if q_BHQD.device.type == "cpu" else fused)(q_BHQD, k_BHKD, v_BHKD, keep)


KERNELS: dict[str, Kernel] = {"auto": auto, "reference": reference, "fused": fused, "batched": batched}
READABLE = {"auto": "reference", "fused": "reference", "batched": "reference"}  # a fast kernel and its plain twin


def split_heads(x_BTC: Tensor, heads: int) -> Tensor:
    B, T, C = x_BTC.shape
    return x_BTC.view(B, T, heads, C // heads).transpose(1, 2)


def join_heads(x_BHTD: Tensor) -> Tensor:
    return x_BHTD.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Every token asks the tokens of its own sentence. One product makes queries, keys and values."""

    def __init__(self, width: int, heads: int, kernel: Kernel) -> None:
        super().__init__()
        self.heads, self.kernel = heads, kernel
        self.query_key_value = Linear(width, 3 * width)
        self.out = Linear(width, width)

    def split(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.query_key_value(x_BTC).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x_BTC: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.split(x_BTC)
        out_BTC: Tensor = self.out(join_heads(self.kernel(q, k, v, keep)))
        return out_BTC

    def step(self, x_N1C: Tensor, cache: Tensor, at: int, keep: Tensor) -> Tensor:
        """One more token: its key and value go to place `at` of cache_2NHKD, then it looks at what `keep` allows."""
        q_NH1D, k_NH1D, v_NH1D = self.split(x_N1C)
        cache[0, :, :, at : at + 1], cache[1, :, :, at : at + 1] = k_NH1D, v_NH1D
        seen = keep.size(-1)
        out_N1C: Tensor = self.out(join_heads(self.kernel(q_NH1D, cache[0, :, :, :seen], cache[1, :, :, :seen], keep)))
        return out_N1C


class CrossAttention(nn.Module):
    """Every target token asks the tokens of its source sentence."""

    def __init__(self, width: int, heads: int, kernel: Kernel) -> None:
        super().__init__()
        self.heads, self.kernel = heads, kernel
        self.query = Linear(width, width)
        self.key_value = Linear(width, 2 * width)
        self.out = Linear(width, width)

    def look_up(self, memory_BSC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the source: made once, asked at every step."""
        k, v = self.key_value(memory_BSC).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return k, v

    def forward(self, x_BTC: Tensor, memory: tuple[Tensor, Tensor], keep: Tensor) -> Tensor:
        q_BHTD = split_heads(self.query(x_BTC), self.heads)
        out_BTC: Tensor = self.out(join_heads(self.kernel(q_BHTD, *memory, keep)))
        return out_BTC

    def weights(self, x_BTC: Tensor, memory: tuple[Tensor, Tensor], keep: Tensor) -> Tensor:
        """What `forward` looks at, before it reads the values: weights_BHTS."""
        return weights(split_heads(self.query(x_BTC), self.heads), memory[0], keep)
