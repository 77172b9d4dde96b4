"""The recipes that come with Dragoman: in a wheel inside the package, in a checkout in recipes/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

NAME = "recipes"
PACKAGE = Path(__file__).parents[1]


def packaged_folder() -> Path | None:
    """Return the folder of the recipes that come with Dragoman."""
    return next((folder / NAME for folder in (PACKAGE, PACKAGE.parents[1]) if (folder / NAME).is_dir()), None)


def find_recipe(path: Path) -> Path:
    """Return the path or, where nothing is there, the recipe or folder that comes with Dragoman under this name.

    `recipes/lectures`, `lectures` and `lectures/21-rotary` are found; a path that is found nowhere comes back.
    """
    folder = packaged_folder()
    if folder is None or path.is_absolute() or path.exists():
        return path
    inside = Path(*path.parts[1:]) if path.parts[:1] == (NAME,) else path
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
