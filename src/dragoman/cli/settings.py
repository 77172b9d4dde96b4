"""Collect every setting with its default, its choices and its description, for `dragoman settings`.

Defaults and descriptions come from the settings classes, choices from the registries and from Literal types.
`python -m dragoman.cli.settings` writes the collected settings to config/settings.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from dragoman.config.reference import CORPUS, Reference, Setting, save_reference
from dragoman.config.settings import Registries, Settings, apply_override, parse_settings
from dragoman.data.corpus import CorpusSettings
from dragoman.data.tokenizers import TOKENIZERS
from dragoman.decoding.methods import SEARCH_REGISTRIES
from dragoman.inference.postprocess import UNKNOWN_WORD_METHODS
from dragoman.metrics.metrics import metrics_for_task
from dragoman.phrasebook.generate import DIRECTIONS
from dragoman.recipe import Recipe, list_model_kinds
from dragoman.training.start import TRAIN_REGISTRIES


def describe_recipe(overrides: Sequence[str]) -> tuple[Reference, str]:
    """Return the settings of the default recipe with `a.b=c` overrides applied, and its model.kind."""
    values: dict[str, Any] = {}
    for item in overrides:
        apply_override(values, item)
    recipe = parse_settings(Recipe, values)
    return {recipe.model.kind: list_settings(recipe)}, recipe.model.kind


def build_reference() -> Reference:
    """Return the settings of every kind of model, which are the contents of settings.json."""
    reference: Reference = {}
    for kind, backbones in list_model_kinds().items():
        for backbone in backbones:
            model = {"kind": kind, "backbone": backbone} if backbone else {"kind": kind}
            reference["/".join(model.values())] = list_settings(parse_settings(Recipe, {"model": model}))
    return reference


def list_settings(recipe: Recipe) -> list[Setting]:
    """Return every setting of a recipe, with the value in the recipe as its default.

    The settings `kind`, `backbone` and `method` come first in a section: they decide which other settings it has.
    """
    recipe.model.check()
    settings: list[Setting] = []
    registries = collect_registries(recipe)
    sections = [(name, getattr(recipe, name)) for name in Recipe.model_fields]
    sections.insert(1, (CORPUS, CorpusSettings()))  # after the section data, whose corpora have these settings
    for section, values in sections:
        settings += describe_section(values, section, registries.get(section, {}))
    return settings


def describe_section(values: Settings, section: str, registries: Registries, prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a section; a setting of a nested section has a name with a dot, such as align.ibm1."""
    json_values = values.model_dump(mode="json")
    for name in sorted(json_values, key=lambda name: name not in ("kind", "backbone", "method")):
        field, value = type(values).model_fields[name], getattr(values, name)
        if isinstance(value, Settings):
            yield from describe_section(value, section, registries, f"{prefix}{name}.")
        else:
            choices = list(registries.get(prefix + name, ())) or list_literals(field.annotation)
            yield Setting(section, prefix + name, json_values[name], choices, field.description or "")


def collect_registries(recipe: Recipe) -> dict[str, Registries]:
    """Return, for each section, the registries (name -> implementation) that settings choose from, by setting."""
    task, backbones = recipe.model.task, list_model_kinds()[recipe.model.kind]
    metrics = metrics_for_task(task)
    with_backbone = {} if "" in backbones else {"backbone": backbones}
    return {
        "data": {"metrics": metrics, "direction": dict.fromkeys(DIRECTIONS)},
        "tokenizer": {"kind": TOKENIZERS, **({"target_kind": TOKENIZERS} if task == "translate" else {})},
        "model": {"kind": list_model_kinds(), **with_backbone, **recipe.model.registries()},
        "train": {**TRAIN_REGISTRIES, "metric": {"auto": None, "loss": None, **metrics}},
        "search": {**SEARCH_REGISTRIES, "unknown": UNKNOWN_WORD_METHODS},
    }


def list_literals(annotation: Any) -> list[str]:
    """Return the values of the Literal types in an annotation, and true and false for a bool in a union.

    A plain bool gives an empty list, since its values are obvious.
    """
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    members = () if isinstance(annotation, type) else get_args(annotation)
    return [name for member in members for name in (["true", "false"] if member is bool else list_literals(member))]


if __name__ == "__main__":
    save_reference(build_reference())
