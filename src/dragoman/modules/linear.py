"""The linear layer, and faster matrix products for training in float32 on a CPU.

Shapes   N tokens   I inputs   O outputs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """Compute x W' + b, as nn.Linear does, through oneDNN where that is faster."""

    __call__: Callable[..., Tensor]  # nn.Module has no type for its result

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or torch.is_autocast_enabled(x.device.type) or not uses_onednn(x):
            return super().forward(x)
        out: Tensor = _Linear.apply(x.flatten(0, -2), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)


class ReluLinear(torch.autograd.Function):
    """Compute relu(x W' + b) under autocast on a GPU in one kernel, where PyTorch uses two."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cuda")
        x, weight = x_NI.to(dtype), weight_OI.to(dtype)
        out_NO = torch._addmm_activation(bias_O.to(dtype), x, weight.T)
        ctx.save_for_backward(x, weight, out_NO)
        ctx.dtypes = x_NI.dtype, weight_OI.dtype
        return out_NO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        from dragoman.kernels.rowwise_triton import relu_backward

        x, weight, out_NO = ctx.saved_tensors
        grad_NO, bias_grad_O = relu_backward(grads[0].contiguous(), out_NO)
        x_dtype, weight_dtype = ctx.dtypes
        return (grad_NO @ weight).to(x_dtype), (grad_NO.T @ x).to(weight_dtype), bias_grad_O.to(weight_dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return fast_linear(x_NI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_NO = grads[0].contiguous()  # oneDNN falls back to its slowest code on a strided second operand
        x_NI, weight_OI = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            fast_linear(grad_NO, weight_OI.T) if wants_x else None,
            compute_weight_gradient(grad_NO, x_NI) if wants_weight else None,
            grad_NO.sum(0) if wants_bias else None,
        )


def uses_onednn(x: Tensor) -> bool:
    """Return whether a product with x is faster through oneDNN than through PyTorch's default.

    In float32 a Zen 4 core reaches 105 to 110 GFLOP/s through oneDNN, 92 to 97 through PyTorch's own products.
    In bf16 PyTorch uses oneDNN itself, and so does its compiler, which cannot trace this operator.
    """
    available = ONEDNN_AVAILABLE and not torch.compiler.is_compiling()
    return available and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0


def fast_linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute x W' + b, through oneDNN where that is faster."""
    if not uses_onednn(x_NI):
        return nn.functional.linear(x_NI, weight_OI, bias_O)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")
    return out


def compute_weight_gradient(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """Return g' x, the gradient of weight_OI. The order of the operands only affects speed."""
    outputs, inputs = grad_NO.size(1), x_NI.size(1)
    if uses_onednn(x_NI) and outputs >= 2 * inputs:
        return fast_linear(x_NI.T, grad_NO.T).T
    if uses_onednn(x_NI) and inputs >= 2 * outputs:
        return fast_linear(grad_NO.T, x_NI.T)
    return grad_NO.T @ x_NI


ONEDNN_AVAILABLE: bool = torch.backends.mkldnn.is_available() and hasattr(  # type: ignore[no-untyped-call]
    torch.ops.mkldnn, "_linear_pointwise"
)
