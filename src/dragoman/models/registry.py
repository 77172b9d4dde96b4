"""From settings to a model. To add a kind: its own file with a settings record and a module, and a line in MODELS.

How earlier formats of a run folder called the tensors of a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from dragoman.config.settings import Recipe, Settings, build, pick
from dragoman.errors import UserError
from dragoman.models.base import Model
from dragoman.models.heads import (
    LanguageModel,
    RnnClassifierSettings,
    RnnLmSettings,
    TextClassifier,
    TransformerClassifierSettings,
    TransformerLmSettings,
)
from dragoman.models.hybrid import Hybrid, HybridSettings
from dragoman.models.rnn import Rnn, RnnSettings
from dragoman.models.transformer import Transformer, TransformerSettings
from dragoman.modules.positions import POSITIONS


class Kind(NamedTuple):
    settings: type[Any]  # with `check()`, `menus()`, `layout` (of its batches, data/batches.py), `most` and `compiles`
    model: Callable[..., Model]
    task: str  # translate, generate or classify


MODELS: dict[str, dict[str, Kind]] = {  # by kind, then by backbone; a kind with one way to build it has ""
    "transformer": {"": Kind(TransformerSettings, Transformer, "translate")},
    "rnn": {"": Kind(RnnSettings, Rnn, "translate")},
    "hybrid": {"": Kind(HybridSettings, Hybrid, "translate")},
    "lm": {
        "transformer": Kind(TransformerLmSettings, LanguageModel, "generate"),
        "rnn": Kind(RnnLmSettings, LanguageModel, "generate"),
    },
    "classifier": {
        "transformer": Kind(TransformerClassifierSettings, TextClassifier, "classify"),
        "rnn": Kind(RnnClassifierSettings, TextClassifier, "classify"),
    },
}


def kind_of(model: dict[str, Any]) -> Kind:
    backbones = pick(MODELS, str(model.get("kind", "transformer")), "model.kind")
    if "" in backbones:
        return backbones[""]
    return pick(backbones, str(model.get("backbone", "transformer")), "model.backbone")


def settings_of(model: dict[str, Any]) -> Any:
    """The model section as its kind's own record, checked."""
    try:
        settings = build(kind_of(model).settings, model, where="model")
    except UserError as fault:
        if not str(fault).startswith("there is no setting"):
            raise
        kind = model.get("kind", "transformer")  # it may be a setting of the kind that the recipe had before
        raise UserError(f"with model.kind={kind} {fault}") from None
    settings.check()
    return settings


def settings_in_use(model: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a model section that have an effect in it, its depths written out.

    Left out as well: how attention is computed, dropout that is off, and widths of 0, which mean "as the width".
    """
    settings = settings_of(model)
    values: dict[str, Any] = settings.model_dump(mode="json")
    if settings.encoder_layers or settings.decoder_layers:
        values |= {"encoder_layers": settings.encoder_depth, "decoder_layers": settings.decoder_depth}
        values.pop("layers")
    if values.get("feedforward_width") == 0:
        values["feedforward_width"] = 4 * values["width"]
    off = {name for name, value in values.items() if not value and name.endswith(("_dropout", "_width", "_layers"))}
    return {name: value for name, value in values.items() if name not in {*off, *settings.unused(), "kernel"}}


def layout_of(model: dict[str, Any]) -> str:
    layout: str = settings_of(model).layout
    return layout


def asks_for_trees(model: dict[str, Any]) -> bool:
    """Whether its batches are to carry the dependency trees of the sources."""
    scheme = POSITIONS.get(model.get("position", ""))
    return scheme is not None and scheme.of_trees


def most_tokens(model: dict[str, Any]) -> int | None:
    """Places that a model has for a sentence and the mark that goes with it; None where any length will do."""
    most: int | None = settings_of(model).most
    return most


def completed(recipe: Recipe) -> Recipe:
    """The recipe with every setting of its model written out."""
    filled: Settings = settings_of(recipe.model)
    most, longest = most_tokens(recipe.model), recipe.data.max_length
    if most is not None and longest >= most and kind_of(recipe.model).task != "generate":  # that one reads windows
        raise UserError(
            f"data.max_length={longest} leaves no place for a sentence of that length and its mark in a model with "
            f"model.max_length={most}; lower the one below the other"
        )
    return recipe.model_copy(update={"model": filled.model_dump(mode="json")})


def build_model(recipe: Recipe, *, source_size: int, target_size: int) -> Model:
    kind = kind_of(recipe.model)
    return kind.model(
        settings_of(recipe.model), source_size=source_size, target_size=target_size, joint=recipe.tokenizer.joint
    )


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


FIRST = (  # format 1: a Transformer's layers stood in the model itself
    (r"(encoder|decoder)\.(\d+)\.", r"\1.layers.\2."),
    (r"(encoder|decoder)_norm\.", r"\1.norm."),
    (r"source_embedding\.", r"encoder.embedding."),
    (r"target_embedding\.", r"decoder.embedding."),
)


def renamed(tensors: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    """The same tensors under today's names."""
    found = dict(tensors)
    if version == 1:
        for old, new in FIRST:
            found = {re.sub(f"^{old}", new, name): tensor for name, tensor in found.items()}
    return found
