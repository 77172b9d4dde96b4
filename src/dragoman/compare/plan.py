"""Which runs a comparison is made of: each recipe with each seed, on the same data, with the same budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dragoman.config import LIMITS, DataSettings, Recipe, read_recipe
from dragoman.models.build import completed, kind_of
from dragoman.store import RunFolder
from dragoman.train.prepare import check_files
from dragoman.train.start import MAY_CHANGE, check
from dragoman.types import UserError

QUESTIONS = "questions.yaml"  # in a folder of recipes: what to ask of them (questions.py)
OF_A_STEP = ("tokens", "accumulate")  # settings that make a step what it is
NO_MATTER = MAY_CHANGE["train"] - {*LIMITS, "patience", "average"}  # settings of train that change no result


class Planned(NamedTuple):
    """One run: `name` is the recipe's, `recipe` has every setting written out."""

    name: str
    seed: int
    recipe: Recipe
    folder: Path

    @property
    def judgement(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")


def planned(paths: Sequence[Path], out: Path, overrides: Sequence[str], seeds: int) -> list[Planned]:
    """Every recipe with the first seed, then every recipe with the second, so that a whole picture is there early."""
    recipes: dict[str, Recipe] = {}
    for path in recipe_files(paths):
        if path.stem in recipes:
            raise UserError(f"two recipes are called {path.stem!r}; rename {str(path)!r}, since runs bear their names")
        try:
            recipes[path.stem] = completed(read_recipe(path, overrides))
            check(recipes[path.stem])
            check_files(recipes[path.stem])
        except UserError as fault:
            said = str(fault)
            raise UserError(said if str(path) in said else f"{path}: {said}") from None
    same_task(recipes)
    same_data(recipes)
    same_budget(recipes)
    runs = []
    for number in range(seeds):
        for name, recipe in recipes.items():
            train = recipe.train.model_copy(update={"seed": recipe.train.seed + number})
            folder = out / "runs" / f"{name}-seed{train.seed}"
            runs.append(Planned(name, train.seed, recipe.model_copy(update={"train": train}), folder))
    for run in runs:
        same_settings(run)
    return runs


def recipe_files(paths: Sequence[Path]) -> list[Path]:
    """The files themselves, and those of each folder, sorted by name."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(file for file in path.glob("*.yaml") if file.name != QUESTIONS) if path.is_dir() else [path]
        if not inside:
            raise UserError(f"there is no recipe (*.yaml) in the folder {str(path)!r}")
        found += inside
    if not found:
        raise UserError("compare needs recipes: files, or folders of them, such as recipes/lectures")
    return found


def same_task(recipes: dict[str, Recipe]) -> None:
    tasks: dict[str, object] = {name: kind_of(recipe.model).task for name, recipe in recipes.items()}
    agree(tasks, "what model.kind is for", "only models that do the same can be compared")


def same_data(recipes: dict[str, Recipe]) -> None:
    for name, recipe in recipes.items():
        if not (recipe.data.test or recipe.data.dev):
            raise UserError(f"{name!r} has nothing to be judged by; name a corpus under data.test or data.dev")
    for key in DataSettings.model_fields.keys() - {"cache"}:
        values = {name: getattr(recipe.data, key) for name, recipe in recipes.items()}
        agree(values, f"data.{key}", "a comparison needs the same data for all")


def same_budget(recipes: dict[str, Recipe]) -> None:
    in_steps = any(recipe.train.steps for recipe in recipes.values())
    for key in (*LIMITS, *(OF_A_STEP if in_steps else ())):
        values = {name: getattr(recipe.train, key) for name, recipe in recipes.items()}
        example = next(iter(values.values()))
        agree(values, f"train.{key}", f"give all the same budget, such as train.{key}={example:g} on the command line")


def agree(values: dict[str, object], key: str, remedy: str) -> None:
    (first, wanted), *rest = values.items()
    for name, value in rest:
        if value != wanted:
            raise UserError(
                f"{key} is not the same in {first!r} and {name!r} ({short(wanted)}, {short(value)}); {remedy}"
            )


def short(value: object) -> str:
    """A setting as a sentence can hold it: corpora without their defaults."""
    if isinstance(value, tuple):
        return "[" + ", ".join(short(each) for each in value) + "]"
    return str(value.model_dump(exclude_defaults=True)) if hasattr(value, "model_dump") else repr(value)


def same_settings(run: Planned) -> None:
    """What an earlier comparison left in the folder must be of the same recipe, or the figures would lie."""
    if not RunFolder(run.folder).format.exists():
        return
    before = completed(RunFolder(run.folder).recipe())  # an older Dragoman may have known fewer settings
    old, new = (recipe.model_dump(mode="json") for recipe in (before, run.recipe))
    for section in new:
        free = {"train": NO_MATTER, "data": {"cache"}}.get(section, set())
        for key in new[section].keys() - free:
            if old[section].get(key) != new[section][key]:
                raise UserError(
                    f"{str(run.folder)!r} was made with {section}.{key}={old[section].get(key)!r}, not "
                    f"{new[section][key]!r}; remove it, or choose another --out"
                )
