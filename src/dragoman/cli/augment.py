"""Commands that train on translations of another model, or make such pairs: distil, backtranslate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.options import (
    BatchSize,
    Beam,
    Device,
    EngineName,
    Overrides,
    Run,
    Tag,
    check_arguments,
    check_recipe,
    parse_output_file,
)
from dragoman.recipe import find_recipe


def distil_command(
    run: Annotated[Path, typer.Argument(help="the teacher's run folder", show_default=False)],
    recipe: Annotated[Path, typer.Argument(help="the student's recipe in YAML", show_default=False)],
    overrides: Overrides = None,
    out_folder: Annotated[Path, typer.Option("-o", "--out", help="the run folder to make", show_default=False)] = ...,  # type: ignore[assignment]
    resume: Annotated[bool, typer.Option("--resume", help="go on exactly where the run was")] = False,
    others: Annotated[
        list[Path] | None,
        typer.Option("--with", help="a further teacher with that vocabulary: they teach as one", show_default=False),
    ] = None,
    beam: Annotated[int, typer.Option(min=0, help="of the teacher; 0: its own")] = 0,
    closest: Annotated[
        bool, typer.Option("--closest", help="of a beam's answers take the one most like the reference")
    ] = False,
    originals: Annotated[
        bool, typer.Option("--with-originals", help="the student learns from the original pairs too")
    ] = False,
    sources: Annotated[
        list[Path] | None,
        typer.Option("--source", help="more for the teacher to translate: plain text", show_default=False),
    ] = None,
    tag: Annotated[
        str, typer.Option(help="of the lines of --source, if the teacher has tags", show_default=False)
    ] = "",
) -> None:
    """Train a small fast student on what a large model says to the sources of the recipe's data.train."""
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
        Path, typer.Option("-i", "--input", help="text that the run reads, a line each", show_default=False)
    ] = ...,  # type: ignore[assignment]
    output_file: Annotated[
        Path,
        typer.Option(
            "-o", "--output", parser=parse_output_file, metavar="<path>", help="pairs, as JSONL", show_default=False
        ),
    ] = ...,  # type: ignore[assignment]
    beam: Beam = None,
    tag: Tag = "",
    batch: BatchSize = 1024,
    engine: EngineName = "auto",
    device: Device = "auto",
) -> None:
    """Make pairs from text alone: its lines as targets, what a run of the other direction says to them as sources.

    Started again after it was killed it goes on; under torchrun all processes share the work.
    """
    check_arguments(engine=engine, runs=[run], inputs=[input_file])
    from dragoman.augmentation.backtranslation import backtranslate as translate_back
    from dragoman.inference.constraints import parse_search_overrides

    search = parse_search_overrides(overrides or [], {})
    translate_back(
        run, input_file, output_file, search=search, beam=beam, tag=tag, batch=batch, engine=engine, device=device
    )
