"""Commands that take a run to the formats of others, and back: export, import."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.options import FORMATS, Run, check_runs
from dragoman.config.settings import pick
from dragoman.progress import DETAIL, log

Quantization = Annotated[str, typer.Option(help="of the weights: float32, int8 and others that CTranslate2 has")]


def export(
    run: Run,
    folder: Annotated[Path, typer.Argument(help="where it goes", show_default=False)],
    to: Annotated[str, typer.Option(help="ctranslate2, huggingface or onnx", show_default=False)],
    quantization: Quantization = "float32",
    force: Annotated[
        bool, typer.Option("--force", help="write it even if its translations differ too much, and say how")
    ] = False,
) -> None:
    """Write a run in another format, and compare its translations with the run's own before it is done."""
    pick(dict.fromkeys(FORMATS), to, "format")
    check_runs([run])
    from dragoman.inference.export import export as write

    begun = time.monotonic()
    for each in write(run, to=to, out=folder, quantization=quantization, say=log, force=force):
        print(each)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    log(f"{size / 2**20:.1f} MiB in {time.monotonic() - begun:.1f} s", DETAIL)
    print(f"done: {folder}")


def import_(
    folder: Annotated[Path, typer.Argument(help="a model that transformers has saved", show_default=False)],
    out_folder: Annotated[Path, typer.Option("-o", "--out", help="where the run goes", show_default=False)],
) -> None:
    """Make a run folder of a Hugging Face model: MarianMT or Pegasus, such as export writes."""
    from dragoman.inference.export import import_run

    for each in import_run(folder, out_folder, say=log):
        print(each)
    print(f"done: {out_folder}")
