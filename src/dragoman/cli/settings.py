"""`dragoman settings`: every setting with its default, what else it may be and what it means, as a recipe in YAML.

Nothing is listed here: defaults and descriptions come from the settings' records, choices from the registries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from dragoman.config.reference import CORPUS, Reference, Setting, find_settings, render_settings, save_reference
from dragoman.config.settings import CorpusSettings, Menus, Settings, build, override
from dragoman.data.tokenizers import TOKENIZERS
from dragoman.decoding.methods import SEARCH_REGISTRIES as SEARCH
from dragoman.inference.postprocess import UNKNOWN_WORD_METHODS
from dragoman.metrics.metrics import metrics_for_task
from dragoman.models.settings import MODEL_KINDS
from dragoman.phrasebook.generate import DIRECTIONS
from dragoman.recipe import Recipe
from dragoman.training.consistency import CONSISTENCY
from dragoman.training.distributed import PARALLEL
from dragoman.training.loss import LOSSES
from dragoman.training.optim import OPTIMIZERS, SCHEDULES


def catalogue(sections: Sequence[str] = (), overrides: Sequence[str] = ()) -> str:
    """Return the settings that words ask for, by default all, of a recipe with `a.b=c` laid over its defaults."""
    found, kind = laid_over(overrides)
    return render_settings(find_settings(found, kind, sections), kind)


def laid_over(overrides: Sequence[str]) -> tuple[Reference, str]:
    """Return the settings of one recipe as a reference, with the name of its kind of model there."""
    values: dict[str, Any] = {}
    for item in overrides:
        override(values, item)
    recipe = build(Recipe, values)
    return {recipe.model.kind: list_settings(recipe)}, recipe.model.kind


def list_settings(recipe: Recipe) -> list[Setting]:
    """Return every setting of a recipe, with its value in place of the default."""
    recipe.model.check()
    found: list[Setting] = []
    for name in Recipe.model_fields:
        found += rows(name, getattr(recipe, name), menus(recipe)[name])
        if name == "data":
            found += rows(CORPUS, CorpusSettings(), {})
    return found


def reference() -> Reference:
    """Return the settings of every kind of model, as settings.json holds them."""
    kinds = [(kind, backbone) for kind, backbones in MODEL_KINDS.items() for backbone in backbones]
    models = {"/".join(filter(None, each)): dict(zip(("kind", "backbone"), filter(None, each))) for each in kinds}
    return {name: list_settings(build(Recipe, {"model": model})) for name, model in models.items()}


def menus(recipe: Recipe) -> dict[str, Menus]:
    """What the settings of each section choose from."""
    task, backbones = recipe.model.task, MODEL_KINDS[recipe.model.kind]
    answers = metrics_for_task(task)
    return {
        "data": {"metrics": answers, "direction": dict.fromkeys(DIRECTIONS)},
        "tokenizer": {"kind": TOKENIZERS, **({"target_kind": TOKENIZERS} if task == "translate" else {})},
        "model": {"kind": MODEL_KINDS, **({} if "" in backbones else {"backbone": backbones}), **recipe.model.menus()},
        "train": {
            "optimizer": OPTIMIZERS,
            "schedule": SCHEDULES,
            "loss": LOSSES,
            "consistency": CONSISTENCY,
            "parallel": PARALLEL,
            "metric": {"auto": None, "loss": None, **answers},
        },
        "search": {**SEARCH, "unknown": UNKNOWN_WORD_METHODS},
    }


def rows(section: str, record: Settings, menus: Menus) -> Iterator[Setting]:
    """Yield the settings of a record, those first that decide which others there are."""
    fields = type(record).model_fields
    values = sorted(
        record.model_dump(mode="json").items(), key=lambda item: item[0] not in ("kind", "backbone", "method")
    )
    for name, value in values:
        choices = list(menus.get(name, ())) or literals(fields[name].annotation)
        yield Setting(section, name, value, choices, fields[name].description or "")


def literals(kind: Any) -> list[str]:
    """What a setting may be where its type says so; that one which is true may be false goes without saying."""
    if get_origin(kind) is Literal:
        return [str(each) for each in get_args(kind)]
    members = () if isinstance(kind, type) else get_args(kind)
    return [name for each in members for name in (["true", "false"] if each is bool else literals(each))]


if __name__ == "__main__":
    save_reference(reference())
