"""Commands from model to model: distil, backtranslate, export and import; cache shows what they keep."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.options import (
    FORMAT_NAMES,
    BatchSize,
    Beam,
    Device,
    EngineName,
    Json,
    Overrides,
    Run,
    Tag,
    check_arguments,
    check_recipe,
    parse_output_file,
)
from dragoman.config.settings import pick
from dragoman.errors import UserError
from dragoman.io import CACHE, cache_entries, cache_folder, remove_unused
from dragoman.progress import DETAIL, WARNING, log
from dragoman.recipe import find_recipe


def distil_command(
    run: Annotated[Path, typer.Argument(help="the teacher's run folder", show_default=False)],
    recipe: Annotated[Path, typer.Argument(help="the student's recipe in YAML", show_default=False)],
    overrides: Overrides = None,
    out_folder: Annotated[Path, typer.Option("-o", "--out", help="the run folder to create", show_default=False)] = ...,  # type: ignore[assignment]
    resume: Annotated[bool, typer.Option("--resume", help="resume training from the last checkpoint")] = False,
    others: Annotated[
        list[Path] | None,
        typer.Option("--with", help="another teacher with the same vocabulary, for an ensemble", show_default=False),
    ] = None,
    beam: Annotated[int, typer.Option(min=0, help="beam width of the teacher; 0: the setting of its run")] = 0,
    closest: Annotated[
        bool, typer.Option("--closest", help="use the beam hypothesis that is most similar to the reference")
    ] = False,
    originals: Annotated[
        bool, typer.Option("--with-originals", help="train the student on the original pairs too")
    ] = False,
    sources: Annotated[
        list[Path] | None,
        typer.Option(
            "--source", help="plain text file with more lines for the teacher to translate", show_default=False
        ),
    ] = None,
    tag: Annotated[
        str, typer.Option(help="tag of the lines of --source, if the teacher has tags", show_default=False)
    ] = "",
) -> None:
    """Train a small, fast student on the translations of data.train by a large model, the teacher."""
    recipe = find_recipe(recipe)
    teachers = [run, *(others or [])]
    check_arguments(runs=teachers, inputs=sources or [])
    check_recipe(recipe, overrides or [])
    from dragoman.augmentation.distillation import DistilSettings
    from dragoman.augmentation.distillation import distil as run_distillation

    files = tuple(map(str, sources or []))
    settings = DistilSettings(beam=beam, closest=closest, originals=originals, sources=files, tag=tag)
    run_distillation(teachers, recipe, out=out_folder, overrides=overrides or [], resume=resume, settings=settings)


def backtranslate_command(
    run: Run,
    overrides: Overrides = None,
    input_file: Annotated[
        Path, typer.Option("-i", "--input", help="text to translate, one sentence per line", show_default=False)
    ] = ...,  # type: ignore[assignment]
    output_file: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            parser=parse_output_file,
            metavar="<path>",
            help="JSONL file for the pairs",
            show_default=False,
        ),
    ] = ...,  # type: ignore[assignment]
    beam: Beam = None,
    tag: Tag = "",
    batch: BatchSize = 1024,
    engine: EngineName = "auto",
    device: Device = "auto",
) -> None:
    """Make training pairs from monolingual text: its lines as targets, their translations by a reverse run as sources.

    Started again after it was killed it goes on; under torchrun all processes share the work.
    """
    check_arguments(engine=engine, runs=[run], inputs=[input_file])
    from dragoman.augmentation.backtranslation import backtranslate as translate_back
    from dragoman.inference.constraints import parse_search_overrides

    search = parse_search_overrides(overrides or [], {})
    translate_back(
        run, input_file, output_file, search=search, beam=beam, tag=tag, batch=batch, engine=engine, device=device
    )


Quantization = Annotated[
    str, typer.Option(help="precision of the weights: float32, or int8 and others for CTranslate2")
]


def export_command(
    run: Run,
    folder: Annotated[Path, typer.Argument(help="the folder to create", show_default=False)],
    to: Annotated[str, typer.Option(help="ctranslate2, huggingface or onnx", show_default=False)],
    quantization: Quantization = "float32",
    force: Annotated[
        bool, typer.Option("--force", help="write the folder even if its translations differ too much")
    ] = False,
) -> None:
    """Write a run in another format, after comparing its translations with those of the run."""
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
    folder: Annotated[Path, typer.Argument(help="folder of a model saved by transformers", show_default=False)],
    out_folder: Annotated[Path, typer.Option("-o", "--out", help="the run folder to create", show_default=False)],
) -> None:
    """Convert a Hugging Face model (MarianMT or Pegasus, as written by export) to a run folder."""
    from dragoman.inference.export import import_run

    for agreement in import_run(folder, out_folder):
        print(agreement)
    print(f"done: {out_folder}")


def cache_command(
    folder: Annotated[Path, typer.Option(help="the cache folder, as data.cache in a recipe")] = Path(CACHE),
    clear: Annotated[
        bool, typer.Option("--clear", help="remove all that Dragoman has written there, and nothing else")
    ] = False,
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
