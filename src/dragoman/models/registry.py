"""From settings to a model. To add a kind: a record in models/settings.py, a module, and a line in MODELS."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from dragoman.models.base import Model
from dragoman.models.rnn import Hybrid, Rnn
from dragoman.models.settings import ModelSettings
from dragoman.models.single_sequence import LanguageModel, TextClassifier
from dragoman.models.transformer import Transformer

MODELS: dict[str, Callable[..., Model]] = {
    "transformer": Transformer,
    "rnn": Rnn,
    "hybrid": Hybrid,
    "lm": LanguageModel,
    "classifier": TextClassifier,
}


def build_model(settings: ModelSettings, *, source_size: int, target_size: int, joint: bool) -> Model:
    """Return a model with initial weights; `joint` where source and target share a vocabulary."""
    return MODELS[settings.kind](settings, source_size=source_size, target_size=target_size, joint=joint)


def count_parameters(model: nn.Module) -> int:
    """Return the number of weights; shared ones count once."""
    return sum(p.numel() for p in model.parameters())


FORMAT_1_NAMES = (  # format 1: a Transformer's layers stood in the model itself
    (r"(encoder|decoder)\.(\d+)\.", r"\1.layers.\2."),
    (r"(encoder|decoder)_norm\.", r"\1.norm."),
    (r"source_embedding\.", r"encoder.embedding."),
    (r"target_embedding\.", r"decoder.embedding."),
)


def rename_tensors(tensors: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint of this format under the names that parameters have now."""
    found = dict(tensors)
    if version == 1:
        for old, new in FORMAT_1_NAMES:
            found = {re.sub(f"^{old}", new, name): tensor for name, tensor in found.items()}
    return found
