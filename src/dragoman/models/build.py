"""From settings to a model. To add a kind: its own file with a settings record and a module, and a line in MODELS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from dragoman.config import Recipe, Settings, build, pick
from dragoman.models.base import Seq2Seq
from dragoman.models.transformer import Transformer, TransformerSettings


class Kind(NamedTuple):
    settings: type[Any]
    model: Callable[..., Seq2Seq]
    layout: str  # how its batches are laid out (data/batch.py)


MODELS = {"transformer": Kind(TransformerSettings, Transformer, "packed")}


def kind_of(model: dict[str, Any]) -> Kind:
    return pick(MODELS, str(model.get("kind", "transformer")), "model.kind")


def settings_of(model: dict[str, Any]) -> Any:
    """The model section as its kind's own record, checked."""
    settings = build(kind_of(model).settings, model, where="model")
    settings.check()
    return settings


def completed(recipe: Recipe) -> Recipe:
    """The recipe with every setting of its model written out."""
    filled: Settings = settings_of(recipe.model)
    return recipe.model_copy(update={"model": filled.model_dump(mode="json")})


def build_model(recipe: Recipe, *, source_size: int, target_size: int) -> Seq2Seq:
    kind = kind_of(recipe.model)
    return kind.model(
        settings_of(recipe.model), source_size=source_size, target_size=target_size, joint=recipe.tokenizer.joint
    )


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
