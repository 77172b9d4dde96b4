"""`dragoman settings`: collect every setting with its default, its choices and its meaning.

Nothing is listed here: defaults and descriptions come from the settings' records, choices from the registries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from dragoman.config.reference import CORPUS, Reference, Setting, save_reference
from dragoman.config.settings import Registries, build, override
from dragoman.data.corpus import CorpusSettings
from dragoman.data.tokenizers import TOKENIZERS
from dragoman.decoding.methods import SEARCH_REGISTRIES
from dragoman.inference.postprocess import UNKNOWN_WORD_METHODS
from dragoman.metrics.metrics import metrics_for_task
from dragoman.models.registry import MODEL_KINDS
from dragoman.phrasebook.generate import DIRECTIONS
from dragoman.recipe import Recipe
from dragoman.training.start import TRAIN_REGISTRIES


def describe_recipe(overrides: Sequence[str]) -> tuple[Reference, str]:
    """Return the settings of the default recipe with `a.b=c` overrides applied, and the name of its kind of model."""
    values: dict[str, Any] = {}
    for item in overrides:
        override(values, item)
    recipe = build(Recipe, values)
    return {recipe.model.kind: list_settings(recipe)}, recipe.model.kind


def build_reference() -> Reference:
    """Return the settings of every kind of model, as settings.json holds them."""
    found: Reference = {}
    for kind, backbones in MODEL_KINDS.items():
        for backbone in backbones:
            model = {"kind": kind, "backbone": backbone} if backbone else {"kind": kind}
            found["/".join(model.values())] = list_settings(build(Recipe, {"model": model}))
    return found


def list_settings(recipe: Recipe) -> list[Setting]:
    """Return every setting of a recipe, with its value in place of the default.

    In each section those come first that decide which others there are.
    """
    recipe.model.check()
    found: list[Setting] = []
    registries = collect_registries(recipe)
    sections = [(name, getattr(recipe, name)) for name in Recipe.model_fields]
    sections.insert(1, (CORPUS, CorpusSettings()))
    for section, record in sections:
        values = record.model_dump(mode="json")
        for name in sorted(values, key=lambda name: name not in ("kind", "backbone", "method")):
            field = type(record).model_fields[name]
            choices = list(registries.get(section, {}).get(name, ())) or list_literals(field.annotation)
            found.append(Setting(section, name, values[name], choices, field.description or ""))
    return found


def collect_registries(recipe: Recipe) -> dict[str, Registries]:
    """Return the registries of the settings of each section."""
    task, backbones = recipe.model.task, MODEL_KINDS[recipe.model.kind]
    metrics = metrics_for_task(task)
    with_backbone = {} if "" in backbones else {"backbone": backbones}
    return {
        "data": {"metrics": metrics, "direction": dict.fromkeys(DIRECTIONS)},
        "tokenizer": {"kind": TOKENIZERS, **({"target_kind": TOKENIZERS} if task == "translate" else {})},
        "model": {"kind": MODEL_KINDS, **with_backbone, **recipe.model.registries()},
        "train": {**TRAIN_REGISTRIES, "metric": {"auto": None, "loss": None, **metrics}},
        "search": {**SEARCH_REGISTRIES, "unknown": UNKNOWN_WORD_METHODS},
    }


def list_literals(kind: Any) -> list[str]:
    """Return the values that a type lists. Those of a plain bool are left out, since they are obvious."""
    if get_origin(kind) is Literal:
        return [str(each) for each in get_args(kind)]
    members = () if isinstance(kind, type) else get_args(kind)
    return [name for each in members for name in (["true", "false"] if each is bool else list_literals(each))]


if __name__ == "__main__":
    save_reference(build_reference())
