"""Models prepared for a CPU: weights packed once as oneDNN wants them, in the precision asked for.

A product whose weights are packed beforehand is up to twice as fast on few rows, and a row's result does not depend on
how many other rows are in the batch. A precision that the CPU cannot compute correctly is refused here.

Shapes   N rows   I inputs   O outputs
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dragoman.config import pick
from dragoman.hardware import CpuFeatures, best_precision, cpu_features
from dragoman.types import UserError


class Packed(nn.Module):
    """x W' + b in float32 or bf16."""

    bias: Tensor | None

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        weight_OI = linear.weight.detach().to(dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return out


class Int8(nn.Module):
    """The same with weights and inputs of 8 bits: each output has a scale of its own, and each row of inputs too.

    A row's scale is its largest number, so it does not depend on the rows beside it. Inputs are unsigned, at most 255.
    CPUs without VNNI add two products in 16 signed bits, so weights must stay within 64 there: 2 * 255 * 64 < 2**15.
    """

    ZERO = 128  # of the inputs
    WIDE, SAFE = 127, 64  # the largest weight, where sums are exact in any case and where they would saturate

    def __init__(self, linear: nn.Linear, features: CpuFeatures) -> None:
        super().__init__()
        largest = self.WIDE if features.exact_int8 else self.SAFE
        weight_OI = linear.weight.detach().float()
        self.scale_O = weight_OI.abs().amax(1).clamp(min=1e-12) / largest
        whole_OI = (weight_OI / self.scale_O[:, None]).round().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(whole_OI, None)
        self.zero_O = torch.zeros(len(weight_OI), dtype=torch.int32)
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        x_NI = x.flatten(0, -2)
        scale_N1 = x_NI.abs().amax(1, keepdim=True).clamp_(min=1e-12).div_(127)
        whole_NI = (x_NI / scale_N1).add_(self.ZERO + 0.5).to(torch.uint8)  # cut off after a half was added: rounded
        out_NO = torch.ops.onednn.qlinear_pointwise.default(
            whole_NI,
            1.0,
            self.ZERO,
            self.weight,
            self.scale_O,
            self.zero_O,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        out_NO = out_NO.mul_(scale_N1) if self.bias is None else torch.addcmul(self.bias, out_NO, scale_N1)
        return out_NO.view(*x.shape[:-1], -1)


def ready(model: nn.Module, device: torch.device, precision: str, features: CpuFeatures | None = None) -> nn.Module:
    """Return the model, or a copy where weights change, in a precision that the device computes correctly."""
    make = pick(PRECISIONS, precision, "precision")
    features = features or cpu_features()
    packs = device.type == "cpu" and packable()
    if precision == "int8" and not packs:
        raise UserError("int8 needs a CPU and a PyTorch with oneDNN; use float32 (--engine torch)")
    if precision == "bf16" and not supports_bf16(device, features):
        raise UserError(f"this {device.type} has no instructions for bf16; use float32 (--engine torch)")
    if precision == "float32" and not packs:
        return model.eval()
    prepared = copy.deepcopy(model).eval().requires_grad_(False)
    if precision == "bf16":
        prepared = prepared.bfloat16()
    if packs:
        for module in list(prepared.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, make(child, features))
    return prepared


def packable() -> bool:
    """Return whether this PyTorch has oneDNN's products with packed weights."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]


def supports_bf16(device: torch.device, features: CpuFeatures) -> bool:
    """Return whether there are instructions for bf16. Packing weights raises without them on some CPUs."""
    return features.bf16 if device.type == "cpu" else best_precision(device) == "bf16"


PRECISIONS: dict[str, Callable[[nn.Linear, CpuFeatures], nn.Module]] = {
    "float32": lambda linear, _: Packed(linear, torch.float32),
    "bf16": lambda linear, _: Packed(linear, torch.bfloat16),
    "int8": Int8,
}
