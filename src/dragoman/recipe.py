"""A recipe: the sections of settings that describe a run, joined in one record and read from a YAML file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from dragoman.config.settings import (
    SearchSettings,
    Settings,
    TokenizerSettings,
    TrainSettings,
    build,
    override,
    read_values,
)
from dragoman.data.corpus import DataSettings
from dragoman.errors import UserError
from dragoman.models.settings import ModelSettings, TransformerSettings

RECIPES = "recipes"  # a folder
PACKAGE = Path(__file__).parent


class Recipe(Settings):
    """All settings of a run. Names that a registry must have are checked by `check_model` and by training."""

    data: DataSettings = DataSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    model: ModelSettings = TransformerSettings()
    train: TrainSettings = TrainSettings()
    search: SearchSettings = SearchSettings()

    @property
    def example_format(self) -> str:
        """How texts become examples: an entry of EXAMPLE_FORMATS (data/batches.py)."""
        if self.model.task == "generate":
            return "lines" if self.data.documents == "line" else "windows"
        return "pairs" if self.model.task == "translate" else "labels"

    @property
    def batch_layout(self) -> str:
        """How examples are arranged in batches. Windows fill their rows, and the last of a text has its own."""
        return "padded" if self.example_format == "windows" else self.model.layout

    @property
    def can_bucket_shapes(self) -> bool:
        """Whether batches can be padded to a small set of shapes. Otherwise each is as wide as its longest text."""
        return self.model.layout == "packed" or self.example_format == "pairs"


def read_recipe(path: Path, overrides: Iterable[str] = (), *, parent: Recipe | None = None) -> Recipe:
    """Read a recipe file with `a.b=c` laid over it. Corpus paths are looked up here first, then beside the recipe.

    With a parent, the run that training begins with, settings of the model that the recipe leaves out are the parent's.
    """
    values, lines = read_values(path)
    given, merged = list(overrides), deepcopy(values)
    try:
        for item in given:
            override(merged, item)
            lines.pop(item.partition("=")[0], None)
        recipe = _build_checked(merged, parent, lines)
    except UserError as fault:
        to_blame = f" with {' '.join(given)}" if given and _is_valid(values, parent) else ""
        raise UserError(f"{path}{to_blame}: {fault}") from None
    return recipe.model_copy(update={"data": recipe.data.resolve_paths(path.parent)})


def override_recipe(recipe: Recipe, overrides: Iterable[str] = (), *, parent: Recipe | None = None) -> Recipe:
    """Return a recipe with `a.b=c` laid over it and, with a parent, its model's settings under those that are set."""
    values = recipe.model_dump(mode="json", exclude_unset=True)
    for item in overrides:
        override(values, item)
    return build(Recipe, inherit_model(values, parent))


def inherit_model(values: dict[str, Any], parent: Recipe | None) -> dict[str, Any]:
    """Return the values of a recipe with the parent's model settings under its own."""
    given = values.get("model") or {}
    if parent is None or not isinstance(given, dict):
        return values
    own = {} if given == {"kind": "transformer"} else given  # the default kind says nothing
    return {**values, "model": {**parent.model.model_dump(mode="json"), **own}}


def check_model(recipe: Recipe) -> Recipe:
    """Return the recipe; refuse a model section that no model can be built from, or that is too short for the data."""
    recipe.model.check()
    limit, longest = recipe.model.length_limit, recipe.data.max_length
    if limit is not None and longest >= limit and recipe.model.task != "generate":  # a language model reads windows
        raise UserError(
            f"data.max_length={longest} leaves no place for a sentence of that length and its mark in a model with "
            f"model.max_length={limit}; lower the one below the other"
        )
    return recipe


def _build_checked(values: dict[str, Any], parent: Recipe | None, line_of: Mapping[str, int] | None = None) -> Recipe:
    recipe = build(Recipe, inherit_model(values, parent), line_of=line_of)
    recipe.data.check()
    return recipe


def _is_valid(values: dict[str, Any], parent: Recipe | None) -> bool:
    try:
        _build_checked(values, parent)
    except UserError:
        return False
    return True


def packaged_folder() -> Path | None:
    """Return the folder of the recipes that come with Dragoman: in a wheel inside the package, else beside src."""
    return next((folder / RECIPES for folder in (PACKAGE, PACKAGE.parents[1]) if (folder / RECIPES).is_dir()), None)


def find_recipe(path: Path) -> Path:
    """Return the path or, where nothing is there, the recipe or folder that comes with Dragoman under this name.

    `recipes/lectures`, `lectures` and `lectures/21-rotary` are found; a path that is found nowhere comes back.
    """
    folder = packaged_folder()
    if folder is None or path.is_absolute() or path.exists():
        return path
    inside = Path(*path.parts[1:]) if path.parts[:1] == (RECIPES,) else path
    names = [inside, inside.with_name(inside.name + ".yaml")] if inside.name else [inside]
    return next((folder / name for name in names if (folder / name).exists()), path)


def list_recipes() -> Iterator[tuple[str, str]]:
    """Yield the name of every recipe that comes with Dragoman, and the comment that it begins with."""
    if (folder := packaged_folder()) is None:
        return
    for file in sorted(folder.rglob("*.yaml")):
        if file.name != "questions.yaml":
            first = file.read_text(encoding="utf-8").partition("\n")[0]
            yield str(file.relative_to(folder).with_suffix("")), first.removeprefix("#").strip()
