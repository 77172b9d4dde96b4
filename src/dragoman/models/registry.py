"""From settings to a model, and what a batch costs it.

A kind of model is a class and a record of its settings, with a line each in MODELS and MODEL_KINDS.

The cost is counted in floating-point operations of matrix products only, as is customary. A weight costs two operations
per entry and token. In attention each query is multiplied with each key twice, once for the score and once for the
value; masked scores of a decoder count, because they are computed. The backward pass costs twice the forward pass.
Padding is not counted.

Shapes   N pairs of a batch
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from dragoman.config.settings import pick
from dragoman.models.base import BaseModelSettings, Model
from dragoman.models.rnn import Hybrid, HybridSettings, Rnn, RnnSettings
from dragoman.models.single_sequence import (
    ClassifierSettings,
    LanguageModel,
    LmSettings,
    RnnClassifierSettings,
    RnnLmSettings,
    TextClassifier,
    TransformerClassifierSettings,
    TransformerLmSettings,
)
from dragoman.models.transformer import Transformer, TransformerSettings
from dragoman.modules.attention import CrossAttention, SelfAttention
from dragoman.modules.attention_scores import SourceAttention
from dragoman.modules.patterns import Lengths
from dragoman.types import Batch

MODELS: dict[str, Callable[..., Model]] = {
    "transformer": Transformer,
    "rnn": Rnn,
    "hybrid": Hybrid,
    "lm": LanguageModel,
    "classifier": TextClassifier,
}
ModelSettings = TransformerSettings | RnnSettings | HybridSettings | LmSettings | ClassifierSettings
MODEL_KINDS: dict[str, dict[str, type[BaseModelSettings]]] = {  # by kind, then by backbone, "" where there is one
    "transformer": {"": TransformerSettings},
    "rnn": {"": RnnSettings},
    "hybrid": {"": HybridSettings},
    "lm": {"transformer": TransformerLmSettings, "rnn": RnnLmSettings},
    "classifier": {"transformer": TransformerClassifierSettings, "rnn": RnnClassifierSettings},
}


def choose_record(section: Any) -> type[BaseModelSettings]:
    """Return the record that a model section belongs to."""
    values = section if isinstance(section, dict) else {}
    backbones = pick(MODEL_KINDS, str(values.get("kind", "transformer")), "model.kind")
    return backbones.get("") or pick(backbones, str(values.get("backbone", "transformer")), "model.backbone")


def build_model(settings: ModelSettings, *, source_size: int, target_size: int, joint: bool) -> Model:
    """Return a model with initial weights; `joint` if source and target share a vocabulary."""
    return MODELS[settings.kind](settings, source_size=source_size, target_size=target_size, joint=joint)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters; shared parameters count once."""
    return sum(p.numel() for p in model.parameters())


FORMAT_1_NAMES = (  # format 1: a Transformer's layers stood in the model itself
    (r"(encoder|decoder)\.(\d+)\.", r"\1.layers.\2."),
    (r"(encoder|decoder)_norm\.", r"\1.norm."),
    (r"source_embedding\.", r"encoder.embedding."),
    (r"target_embedding\.", r"decoder.embedding."),
)


def rename_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a run folder of format 1 under the names that parameters have now."""
    for old, new in FORMAT_1_NAMES:
        tensors = {re.sub(f"^{old}", new, name): tensor for name, tensor in tensors.items()}
    return tensors


BACKWARD_FACTOR = 2  # per forward pass: one product for the gradient of the input, one for the gradient of the weight
WEIGHT_SIDES = {  # by a part of the name of a weight: what it is applied to; all others, to target tokens
    "bridge.": "pair",
    "encoder.": "source",
    ".key_value.": "source",
    ".score.key.": "source",
}
NO_PRODUCTS = (".pattern.", ".relate.", ".start")  # tables and initial states, or costs that are counted separately


@dataclass(frozen=True)
class AttentionCost:
    """The cost of one attention: sides of queries and keys, and multiply-adds per pair."""

    query: str
    key: str
    width: int
    count_keys: Callable[[Lengths], Lengths] = lambda length_N: length_N  # per query of a sentence of this length


@dataclass(frozen=True)
class Cost:
    """Multiply-adds of a forward pass: per token of a side, per sentence pair, and per query and key."""

    source: int
    target: int
    pair: int
    attentions: tuple[AttentionCost, ...]
    passes: int = 1  # over a batch, at training

    @classmethod
    def of(cls, model: Model, passes: int = 1) -> Cost:
        """Count the multiply-adds of a model's weights and attentions."""
        sides = dict.fromkeys(("source", "target", "pair"), 0)
        # Embedding tables do not count, unless they are also the output projection. Shared weights count in each layer.
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        sides["target"] += model.project.weight.numel() if id(model.project.weight) in tables else 0
        for name, weight in model.named_parameters(remove_duplicate=False):
            if weight.dim() == 2 and id(weight) not in tables and not any(part in name for part in NO_PRODUCTS):
                side = next((side for part, side in WEIGHT_SIDES.items() if part in f".{name}"), "target")
                sides[side] += weight.numel()
        costs = []
        for name, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, SelfAttention):
                side = "source" if name.startswith("encoder.") else "target"
                width = module.query_width + module.value_width
                costs.append(AttentionCost(side, side, width, module.pattern.count_keys))
            elif isinstance(module, CrossAttention):
                costs.append(AttentionCost("target", "source", module.query_width + module.value_width))
            elif isinstance(module, SourceAttention):
                costs.append(AttentionCost("target", "source", module.score.multiply_adds + module.width))
        return cls(**sides, attentions=tuple(costs), passes=passes)

    def forward(self, source_N: Lengths, target_N: Lengths) -> float:
        """Return the operations for sentence pairs of these lengths, EOS and BOS included."""
        length = {"source": source_N, "target": target_N}
        products = self.source * float(source_N.sum()) + self.target * float(target_N.sum())
        products += self.pair * np.count_nonzero(target_N)
        for cost in self.attentions:
            products += cost.width * float((length[cost.query] * cost.count_keys(length[cost.key])).sum())
        return 2 * products

    def training(self, batch: Batch) -> float:
        """Return the operations of forward and backward passes over a batch."""
        sides = (batch.source_segment_BS, batch.target_segment_BT)
        return self.passes * (1 + BACKWARD_FACTOR) * self.forward(*(measure_segments(segment) for segment in sides))


def measure_segments(segment_BT: Tensor) -> Lengths:
    """Return the lengths of all segments, row by row; both sides of a pair have the same index."""
    segment = segment_BT.numpy()
    count = int(segment.max(initial=0)) + 1
    counts = np.bincount((segment + count * np.arange(len(segment))[:, None]).ravel(), minlength=count * len(segment))
    return counts.reshape(-1, count)[:, 1:].ravel()
