"""Commands on the files of models: export, import, cache."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.options import FORMAT_NAMES, Json, Run, check_arguments
from dragoman.config.settings import pick
from dragoman.errors import UserError
from dragoman.io import CACHE, cache_entries, cache_folder, remove_unused
from dragoman.progress import DETAIL, WARNING, log

Quantization = Annotated[str, typer.Option(help="of the weights: float32, int8 and others that CTranslate2 has")]


def export_command(
    run: Run,
    folder: Annotated[Path, typer.Argument(help="where it goes", show_default=False)],
    to: Annotated[str, typer.Option(help="ctranslate2, huggingface or onnx", show_default=False)],
    quantization: Quantization = "float32",
    force: Annotated[
        bool, typer.Option("--force", help="write it even if its translations differ too much, and say how")
    ] = False,
) -> None:
    """Write a run in another format, and compare its translations with the run's own before it is done."""
    pick(dict.fromkeys(FORMAT_NAMES), to, "format")
    check_arguments(runs=[run])
    from dragoman.inference.export import export as write

    begun = time.monotonic()
    for agreement in write(run, to=to, out=folder, quantization=quantization, force=force):
        print(agreement)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    log(f"{size / 2**20:.1f} MiB in {time.monotonic() - begun:.1f} s", DETAIL)
    print(f"done: {folder}")


def import_command(
    folder: Annotated[Path, typer.Argument(help="a model that transformers has saved", show_default=False)],
    out_folder: Annotated[Path, typer.Option("-o", "--out", help="where the run goes", show_default=False)],
) -> None:
    """Make a run folder of a Hugging Face model: MarianMT or Pegasus, such as export writes."""
    from dragoman.inference.export import import_run

    for agreement in import_run(folder, out_folder):
        print(agreement)
    print(f"done: {out_folder}")


def cache_command(
    folder: Annotated[Path, typer.Option(help="as data.cache of a recipe names it")] = Path(CACHE),
    clear: Annotated[bool, typer.Option("--clear", help="remove what Dragoman made there, and nothing else")] = False,
    as_json: Json = False,
) -> None:
    """Show what Dragoman keeps between commands, with its size, or remove it. All of it can be made again.

    What a running command uses is not removed.
    """
    folder = cache_folder(folder)
    kinds: dict[str, dict[str, int]] = {}
    in_use: list[str] = []
    for kind, path in cache_entries(folder):
        size = measure_size(path)
        if clear and not remove_entry(path):
            in_use.append(path.name)
            continue
        found = kinds.setdefault(kind, {"entries": 0, "bytes": 0})
        found["entries"] += 1
        found["bytes"] += size
    if in_use:
        log(f"not removed, since a command is using it: {', '.join(in_use)}", WARNING)
    if as_json:
        about = {"folder": str(folder), "cleared": clear, "kinds": kinds, "in_use": in_use}
        print(json.dumps(about, ensure_ascii=False))
        return
    print(f"{folder}{': removed' if clear else ''}")
    total = {name: sum(found[name] for found in kinds.values()) for name in ("entries", "bytes")}
    for kind, found in [*kinds.items(), ("all", total)]:
        print(f"{kind:<22}  {found['entries']:>6,}  {found['bytes'] / 1e6:>10,.1f} MB")


def measure_size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder. Links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum((Path(folder) / name).lstat().st_size for folder, _, names in os.walk(path) for name in names)


def remove_entry(path: Path) -> bool:
    """Remove an entry of the cache, unless a command has locked it; return whether it is gone."""
    try:
        if path.is_dir() and not path.is_symlink():
            return remove_unused(path)
        path.unlink()
    except FileNotFoundError:
        pass  # another command was quicker
    except OSError as error:
        raise UserError(f"cannot remove {str(path)!r} ({error.strerror})") from None
    return True
