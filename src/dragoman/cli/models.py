"""The commands distil, backtranslate, export and import, which convert models or make data with them, and cache."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from dragoman.cli import line_io
from dragoman.cli import options as opt
from dragoman.config.settings import get_entry
from dragoman.errors import UserError
from dragoman.io import DEFAULT_CACHE, cache_entries, cache_folder, remove_unused
from dragoman.progress import DETAIL, WARNING, log


def distil_command(
    run: Annotated[Path, Argument(help="the teacher's run folder")],
    recipe: Annotated[Path, Argument(help="the student's recipe in YAML")],
    overrides: opt.Overrides = None,
    *,
    out_folder: opt.NewRun,
    resume: opt.Resume = False,
    others: Annotated[
        list[Path] | None, Option("--with", help="another teacher with the same vocabulary, for an ensemble")
    ] = None,
    beam: Annotated[int, Option(min=0, help="beam width of the teacher; 0: the setting of its run")] = 0,
    closest: Annotated[
        bool, Option("--closest", help="use the beam hypothesis that is most similar to the reference")
    ] = False,
    originals: Annotated[bool, Option("--with-originals", help="train the student on the original pairs too")] = False,
    sources: Annotated[
        list[Path] | None, Option("--source", help="plain text file with more lines for the teacher to translate")
    ] = None,
    tag: Annotated[str, Option(help="tag of the lines of --source, if the teacher has tags")] = "",
) -> None:
    """Train a small, fast student on the translations of data.train by a large model, the teacher."""
    teachers = [run, *(others or [])]
    opt.check_arguments(runs=teachers, inputs=sources or [])
    recipe = opt.check_recipe(recipe, overrides)
    from dragoman.augmentation.distillation import DistilSettings
    from dragoman.augmentation.distillation import distil as run_distillation

    files = tuple(map(str, sources or []))
    settings = DistilSettings(beam=beam, closest=closest, originals=originals, sources=files, tag=tag)
    run_distillation(teachers, recipe, out=out_folder, overrides=overrides or [], resume=resume, settings=settings)


def backtranslate_command(
    run: opt.Run,
    overrides: opt.Overrides = None,
    *,
    input_file: Annotated[Path, Option("-i", "--input", help="text to translate, one sentence per line")],
    output_file: Annotated[Path, Option("-o", "--output", help="JSONL file for the pairs", **opt.OUTPUT_PATH)],
    beam: opt.Beam = None,
    tag: opt.Tag = "",
    batch: opt.BatchSize = 1024,
    engine: opt.EngineName = "auto",
    device: opt.Device = "auto",
) -> None:
    """Make training pairs from monolingual text: its lines as targets, their translations by a reverse run as sources.

    If the command was killed, repeat it to resume where it stopped. Under torchrun, the processes divide the work.
    """
    opt.check_arguments(engine=engine, runs=[run], inputs=[input_file])
    from dragoman.augmentation.backtranslation import backtranslate as translate_back

    search = line_io.parse_search_overrides(overrides or [], {})
    translate_back(
        run, input_file, output_file, search=search, beam=beam, tag=tag, batch=batch, engine=engine, device=device
    )


def export_command(
    run: opt.Run,
    folder: Annotated[Path, Argument(help="the folder to create")],
    to: Annotated[str, Option(help="ctranslate2, huggingface or onnx")],
    quantization: Annotated[
        str, Option(help="precision of the weights: float32, or int8 and others for CTranslate2")
    ] = "float32",
    force: Annotated[bool, Option("--force", help="write the folder even if its translations differ too much")] = False,
) -> None:
    """Write a run in another format, after comparing its translations with those of the run."""
    get_entry(dict.fromkeys(opt.FORMAT_NAMES), to, "format")
    opt.check_arguments(runs=[run])
    from dragoman.inference.export import export as export_run

    start = time.monotonic()
    for agreement in export_run(run, to=to, out=folder, quantization=quantization, force=force):
        print(agreement)
    log(f"{measure_size(folder) / 2**20:.1f} MiB in {time.monotonic() - start:.1f} s", DETAIL)
    print(f"done: {folder}")


def import_command(
    folder: Annotated[Path, Argument(help="folder of a model saved by transformers")],
    out_folder: opt.NewRun,
    licence: Annotated[str, Option(help="licence of the model; by default the one in its README.md")] = "",
    source_language: Annotated[str, Option("--from", help="source language, if the folder does not name it")] = "",
    target_language: Annotated[str, Option("--to", help="target language, if the folder does not name it")] = "",
) -> None:
    """Convert a Hugging Face model to a run folder: MarianMT (opus-mt), M2M100, NLLB, or one that export wrote."""
    from dragoman.inference.export import import_run

    agreements = import_run(
        folder, out_folder, licence=licence, source_language=source_language, target_language=target_language
    )
    for agreement in agreements:
        print(agreement)
    print(f"done: {out_folder}")


def cache_command(
    folder: Annotated[Path, Option(help="the cache folder, as data.cache in a recipe")] = Path(DEFAULT_CACHE),
    clear: Annotated[
        bool, Option("--clear", help="remove everything that Dragoman has written there, and nothing else")
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """List the kinds of files in the cache with their sizes, or remove them. Later commands make them again if needed.

    Files that a running command uses are not removed.
    """
    folder = cache_folder(folder)
    kinds: dict[str, dict[str, int]] = {}  # number of entries and bytes by kind
    in_use: list[str] = []
    for kind, path in cache_entries(folder):
        size = measure_size(path)
        if clear and not remove_entry(path):
            in_use.append(path.name)
            continue
        counts = kinds.setdefault(kind, {"entries": 0, "bytes": 0})
        counts["entries"] += 1
        counts["bytes"] += size
    if in_use:
        log(f"not removed, since a command is using it: {', '.join(in_use)}", WARNING)
    if as_json:
        result = {"folder": str(folder), "cleared": clear, "kinds": kinds, "in_use": in_use}
        print(json.dumps(result, ensure_ascii=False))
        return
    print(f"{folder}{': removed' if clear else ''}")
    total = {name: sum(counts[name] for counts in kinds.values()) for name in ("entries", "bytes")}
    for kind, counts in [*kinds.items(), ("all", total)]:
        print(f"{kind:<22}  {counts['entries']:>6,}  {counts['bytes'] / 1e6:>10,.1f} MB")


def measure_size(path: Path) -> int:
    """Return the size in bytes of a file, or of all files in a folder. Symbolic links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum((Path(folder) / name).lstat().st_size for folder, _, names in os.walk(path) for name in names)


def remove_entry(path: Path) -> bool:
    """Remove an entry of the cache, unless a command has locked it; return whether the entry no longer exists."""
    try:
        if path.is_dir() and not path.is_symlink():
            return remove_unused(path)
        path.unlink()
    except FileNotFoundError:
        pass  # another command has removed it
    except OSError as error:
        raise UserError(f"cannot remove {str(path)!r} ({error.strerror})") from None
    return True
