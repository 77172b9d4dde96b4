"""Plan the runs of a comparison: each recipe with each seed, on the same data, with the same budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dragoman.config.settings import LIMITS, DataSettings
from dragoman.errors import UserError
from dragoman.recipe import Recipe, check_model, read_recipe
from dragoman.run_dir import RunFolder
from dragoman.training.prepare import check_files
from dragoman.training.start import MAY_CHANGE, check

QUESTIONS_FILE = "questions.yaml"  # in a folder of recipes: what to ask about them (questions.py)
STEP_SIZE = ("tokens", "accumulate")  # settings that must agree where the budget is in steps
FREE_SETTINGS = MAY_CHANGE["train"] - {*LIMITS, "patience", "average"}  # settings of train that change no result


class PlannedRun(NamedTuple):
    """One run: `name` is the recipe's, `recipe` has every setting written out."""

    name: str
    seed: int
    recipe: Recipe
    folder: Path

    @property
    def measurements(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")


def plan_runs(paths: Sequence[Path], out: Path, overrides: Sequence[str], seeds: int) -> list[PlannedRun]:
    """Return every recipe with the first seed, then every recipe with the second: all models are there early."""
    recipes: dict[str, Recipe] = {}
    for path in find_recipes(paths):
        if path.stem in recipes:
            raise UserError(f"two recipes are called {path.stem!r}; rename {str(path)!r}, since runs bear their names")
        try:
            recipes[path.stem] = check_model(read_recipe(path, overrides))
            check(recipes[path.stem])
            check_files(recipes[path.stem])
        except UserError as fault:
            message = str(fault)
            raise UserError(message if str(path) in message else f"{path}: {message}") from None
    check_same_task(recipes)
    check_same_data(recipes)
    check_same_budget(recipes)
    runs = []
    for number in range(seeds):
        for name, recipe in recipes.items():
            train = recipe.train.model_copy(update={"seed": recipe.train.seed + number})
            folder = out / "runs" / f"{name}-seed{train.seed}"
            runs.append(PlannedRun(name, train.seed, recipe.model_copy(update={"train": train}), folder))
    for run in runs:
        check_same_settings(run)
    return runs


def find_recipes(paths: Sequence[Path]) -> list[Path]:
    """Return the files themselves, and those of each folder, sorted by name."""
    found: list[Path] = []
    for path in paths:
        inside = (
            sorted(file for file in path.glob("*.yaml") if file.name != QUESTIONS_FILE) if path.is_dir() else [path]
        )
        if not inside:
            raise UserError(f"there is no recipe (*.yaml) in the folder {str(path)!r}")
        found += inside
    if not found:
        raise UserError("compare needs recipes: files, or folders of them, such as recipes/lectures")
    return found


def check_same_task(recipes: dict[str, Recipe]) -> None:
    tasks: dict[str, object] = {name: recipe.model.task for name, recipe in recipes.items()}
    check_equal(tasks, "what model.kind is for", "only models that do the same can be compared")


def check_same_data(recipes: dict[str, Recipe]) -> None:
    for name, recipe in recipes.items():
        if not (recipe.data.test or recipe.data.dev):
            raise UserError(f"{name!r} has nothing to be evaluated on; name a corpus under data.test or data.dev")
    for key in DataSettings.model_fields.keys() - {"cache"}:
        values = {name: getattr(recipe.data, key) for name, recipe in recipes.items()}
        check_equal(values, f"data.{key}", "a comparison needs the same data for all")


def check_same_budget(recipes: dict[str, Recipe]) -> None:
    in_steps = any(recipe.train.steps for recipe in recipes.values())
    for key in (*LIMITS, *(STEP_SIZE if in_steps else ())):
        values = {name: getattr(recipe.train, key) for name, recipe in recipes.items()}
        example = next(iter(values.values()))
        check_equal(
            values, f"train.{key}", f"give all the same budget, such as train.{key}={example:g} on the command line"
        )


def check_equal(values: dict[str, object], key: str, remedy: str) -> None:
    (first, wanted), *rest = values.items()
    for name, value in rest:
        if value != wanted:
            raise UserError(
                f"{key} is not the same in {first!r} and {name!r} "
                f"({format_value(wanted)}, {format_value(value)}); {remedy}"
            )


def format_value(value: object) -> str:
    """Return a setting as text for a message: corpora without their defaults."""
    if isinstance(value, tuple):
        return "[" + ", ".join(format_value(each) for each in value) + "]"
    return str(value.model_dump(exclude_defaults=True)) if hasattr(value, "model_dump") else repr(value)


def check_same_settings(run: PlannedRun) -> None:
    """Refuse a folder in which an earlier comparison left a run of another recipe."""
    if not RunFolder(run.folder).format.exists():
        return
    before = RunFolder(run.folder).recipe()
    old, new = (recipe.model_dump(mode="json") for recipe in (before, run.recipe))
    for section in new:
        free = {"train": FREE_SETTINGS, "data": {"cache"}}.get(section, set())
        for key in new[section].keys() - free:
            if old[section].get(key) != new[section][key]:
                raise UserError(
                    f"{str(run.folder)!r} was made with {section}.{key}={old[section].get(key)!r}, not "
                    f"{new[section][key]!r}; remove it, or choose another --out"
                )
