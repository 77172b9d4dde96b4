"""Checks of a command line that need no model. They come before PyTorch is imported, which takes seconds.

Under torchrun they are left out: every process would print the same error, and some machines may lack the files that
only the main process reads. What is wrong is then found when the processes have met.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dragoman.config import CorpusSettings, pick, read_recipe
from dragoman.console import is_stdin
from dragoman.faults import near
from dragoman.recipe_files import list_recipes
from dragoman.store import RunFolder
from dragoman.types import UserError

ENGINES = ("auto", "torch", "torch-bf16", "torch-int8", "ctranslate2", "ctranslate2-int8")  # engines/choose.py
FORMATS = ("ctranslate2", "huggingface", "onnx")  # export.py


def is_distributed() -> bool:
    """Tell whether this is one of several processes that torchrun started."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def check_runs(runs: Iterable[str | Path | None]) -> None:
    """Refuse a path that does not exist, is not a run folder, or holds a run of a later version of Dragoman."""
    for run in runs:
        if run is not None and not is_distributed():
            RunFolder(run).check()


def check_files(paths: Iterable[Path | None]) -> None:
    """Refuse a file to read that is not there. What is in it is another matter."""
    for path in paths:
        if path is None or is_stdin(path) or is_distributed():
            continue
        try:
            path.stat()
        except FileNotFoundError:
            raise UserError(f"there is no file {str(path)!r}") from None
        except (OSError, ValueError) as error:  # a null character in the name is a ValueError
            raise UserError(f"{str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if path.is_dir():
            raise UserError(f"{str(path)!r} is a folder, but a text file is wanted")


def check_output(path: Path | None) -> None:
    """Refuse a file to write in a folder that is not there."""
    if path and not is_distributed() and not path.absolute().parent.is_dir():
        raise UserError(f"cannot write {str(path)!r}: there is no such folder")


def check_engine(name: str) -> None:
    pick(dict.fromkeys(ENGINES), name, "engine")


def check_recipe(path: Path, overrides: Iterable[str] = ()) -> None:
    """Refuse a recipe that cannot be read with `a.b=c` laid over it, or names a file which is not there."""
    if is_distributed():
        return
    if not path.exists():
        names = [name for name, _ in list_recipes()]
        raise UserError(f"there is no recipe file {str(path)!r}{near(str(path), names)}; dragoman recipes lists ours")
    recipe = read_recipe(path, overrides)
    corpora: list[CorpusSettings] = [*recipe.data.train, *recipe.data.dev, *recipe.data.test]
    for file in (Path(name) for corpus in corpora for name in corpus.files):
        try:
            check_files([file])
        except UserError as error:  # names the recipe, which may be one of several
            beside = path.absolute().parent / file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
            also = "" if beside == file else f", nor {str(beside)!r} beside the recipe"
            raise UserError(f"{path}: {error}{also}") from None
