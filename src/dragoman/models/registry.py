"""The registry of models, and the number of floating-point operations (FLOPs) that a model needs for a batch.

To add a kind of model, write a class and its settings, and add a line to MODELS and to MODEL_KINDS.

Only matrix products are counted, as is customary. A weight costs two operations, a multiplication and an addition, per
entry and token. In attention, each pair of a query and a key costs a product for the score and one for the weighted
value. Masked scores of a decoder are counted too, because they are computed, but padding is not. The backward pass
costs twice the forward pass.

Shapes   N sentence pairs of a batch   B rows   T tokens of a row
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

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
from dragoman.modules.copying import CopyAttention
from dragoman.modules.patterns import Lengths
from dragoman.types import Batch

MODELS: dict[str, Callable[..., Model]] = {
    "transformer": Transformer,
    "rnn": Rnn,
    "hybrid": Hybrid,
    "lm": LanguageModel,
    "classifier": TextClassifier,
}
NeuralModelSettings = TransformerSettings | RnnSettings | HybridSettings | LmSettings | ClassifierSettings
# Settings by `model.kind` and `model.backbone`; the backbone is "" for kinds that have no such setting.
MODEL_KINDS: dict[str, dict[str, type[BaseModelSettings]]] = {
    "transformer": {"": TransformerSettings},
    "rnn": {"": RnnSettings},
    "hybrid": {"": HybridSettings},
    "lm": {"transformer": TransformerLmSettings, "rnn": RnnLmSettings},
    "classifier": {"transformer": TransformerClassifierSettings, "rnn": RnnClassifierSettings},
}


def build_model(settings: NeuralModelSettings, *, source_size: int, target_size: int, joint: bool) -> Model:
    """Return a model with initial weights; `joint` if source and target share a vocabulary."""
    return MODELS[settings.kind](settings, source_size=source_size, target_size=target_size, joint=joint)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters; shared parameters count once."""
    return sum(p.numel() for p in model.parameters())


FORMAT_1_NAMES = (  # parameter names in old run folders (format 1), and the names that they have now
    (r"(encoder|decoder)\.(\d+)\.", r"\1.layers.\2."),
    (r"(encoder|decoder)_norm\.", r"\1.norm."),
    (r"source_embedding\.", r"encoder.embedding."),
    (r"target_embedding\.", r"decoder.embedding."),
)


def rename_format_1_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under their present names."""
    for old, new in FORMAT_1_NAMES:
        tensors = {re.sub(f"^{old}", new, name): tensor for name, tensor in tensors.items()}
    return tensors


BACKWARD_FACTOR = 2  # products per product of the forward pass: for the gradients of the input and of the weight
WEIGHT_SIDES = {  # part of a weight's name -> what the weight is applied to; all other weights: target tokens
    "bridge.": "pair",
    "encoder.": "source",
    ".key_value.": "source",
    ".score.key.": "source",
    ".copy_attention.key.": "source",
}
# Parts of names of uncounted weights: patterns (see count_keys), relative positions, initial states.
UNCOUNTED_WEIGHTS = (".pattern.", ".relate.", ".start")


@dataclass(frozen=True)
class AttentionCost:
    query_side: str  # "source" or "target"
    key_side: str
    pair_cost: int  # multiply-adds per pair of a query and a key
    count_keys: Callable[[Lengths], Lengths] = lambda length_N: length_N  # keys per query, by the number of tokens


@dataclass(frozen=True)
class Cost:
    """The multiply-adds of a model's forward pass."""

    source: int  # per source token
    target: int  # per target token
    pair: int  # per sentence pair
    attentions: tuple[AttentionCost, ...]
    passes: int = 1  # forward passes over each batch in training: 2 with a consistency loss (R-Drop)

    @classmethod
    def from_model(cls, model: Model, passes: int = 1) -> Cost:
        """Count the multiply-adds of a model's weights and attentions."""
        weights = dict.fromkeys(("source", "target", "pair"), 0)  # number of weights applied to each side
        # Embedding tables do not count, unless they are also the output projection. Shared weights count in each layer.
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        weights["target"] += model.project.weight.numel() if id(model.project.weight) in tables else 0
        for name, weight in model.named_parameters(remove_duplicate=False):
            if weight.dim() == 2 and id(weight) not in tables and not any(part in name for part in UNCOUNTED_WEIGHTS):
                side = next((side for part, side in WEIGHT_SIDES.items() if part in f".{name}"), "target")
                weights[side] += weight.numel()
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
            elif isinstance(module, CopyAttention):
                costs.append(AttentionCost("target", "source", module.width))  # only weights, no weighted values
        return cls(**weights, attentions=tuple(costs), passes=passes)

    def count_forward(self, source_N: Lengths, target_N: Lengths) -> float:
        """Return the FLOPs of a forward pass over sentence pairs of these lengths, which include EOS or BOS."""
        length = {"source": source_N, "target": target_N}
        multiply_adds = self.source * float(source_N.sum()) + self.target * float(target_N.sum())
        multiply_adds += self.pair * np.count_nonzero(target_N)
        for cost in self.attentions:
            pairs_N = length[cost.query_side] * cost.count_keys(length[cost.key_side])
            multiply_adds += cost.pair_cost * float(pairs_N.sum())
        return 2 * multiply_adds

    def count_training(self, batch: Batch) -> float:
        lengths = map(measure_segments, (batch.source_segment_BS, batch.target_segment_BT))
        return self.passes * (1 + BACKWARD_FACTOR) * self.count_forward(*lengths)


def measure_segments(segment_BT: Tensor) -> Lengths:
    """Return the lengths of all sentences of a batch, row by row. Source and target of a pair have the same index.

    Rows with fewer sentences than others have lengths of 0 at their end.
    """
    segment = segment_BT.numpy()
    B, width = len(segment), int(segment.max(initial=0)) + 1  # segments per row, with padding, which is segment 0
    lengths = np.bincount((segment + width * np.arange(B)[:, None]).ravel(), minlength=width * B)
    return lengths.reshape(-1, width)[:, 1:].ravel()
