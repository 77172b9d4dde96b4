"""Engines by name; `auto` is PyTorch in float32.

`auto` depends on nothing else, so a line has the same translation at every batch size, in any order, and whatever ran
before. That is not true of CTranslate2, whose rounding depends on the other sentences in the batch, and engines in less
than float32 lose precision. Both are used only where they are named (docs/decisions/0014-auto-is-torch.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from dragoman.config.settings import pick
from dragoman.data.tokenizers import Tokenizers
from dragoman.errors import UserError
from dragoman.inference.engines.base import Engine
from dragoman.inference.engines.ctranslate2 import CTranslate2Engine, import_ctranslate2
from dragoman.inference.engines.torch import TorchEngine, prepare_model
from dragoman.models.base import Seq2Seq


class EngineParts(NamedTuple):
    """What an engine is made of."""

    model: Seq2Seq
    tokenizers: Tokenizers
    device: torch.device
    cache: Path


def make_torch_engine(parts: EngineParts, precision: str = "float32") -> Engine:
    return TorchEngine(
        prepare_model(parts.model, parts.device, precision), parts.device, parts.tokenizers.target.decode
    )


def make_ctranslate2_engine(parts: EngineParts, quantization: str = "float32") -> Engine:
    model, tokenizers, device, cache = parts
    if device.type == "cuda" and not import_ctranslate2().get_cuda_device_count():
        raise UserError("the CTranslate2 that is installed cannot use the GPU; write --device cpu or --engine torch")
    return CTranslate2Engine.of(model, tokenizers, cache=cache, device=device, quantization=quantization)


ENGINES: dict[str, Callable[[EngineParts], Engine]] = {
    "auto": make_torch_engine,
    "torch": make_torch_engine,
    "torch-bf16": partial(make_torch_engine, precision="bf16"),
    "torch-int8": partial(make_torch_engine, precision="int8"),
    "ctranslate2": make_ctranslate2_engine,
    "ctranslate2-int8": partial(make_ctranslate2_engine, quantization="int8"),
}


def make_engine(name: str, parts: EngineParts) -> Engine:
    """Return the engine of that name for a model."""
    return pick(ENGINES, name, "engine")(parts)
