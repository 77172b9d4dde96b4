"""The command `inspect`: what a model does with a sentence, as a page, as figures or as data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from dragoman.cli import line_io
from dragoman.cli import options as opt
from dragoman.errors import UserError
from dragoman.io import format_json
from dragoman.progress import WARNING, log


def inspect_command(
    run: opt.Run,
    arguments: Annotated[
        list[str] | None, Argument(metavar="TEXT [search.b=c ...]", help="the sentence, and search settings")
    ] = None,
    target: Annotated[
        str | None, Option(help="a translation to examine, or a label; default: the output of the model")
    ] = None,
    prefix: Annotated[str, Option(help="the translation starts with this text; the search continues it")] = "",
    page: Annotated[
        Path | None, Option("-o", "--out", help="HTML page to write (default: inspection.html)", **opt.OUTPUT_PATH)
    ] = None,
    png: Annotated[Path | None, Option(help="folder for the figures as PNG files")] = None,
    as_json: opt.Json = False,
    part: Annotated[int, Option(min=1, help="which part of a text that is too long for one piece")] = 1,
    tag: opt.Tag = "",
    device: opt.Device = "auto",
) -> None:
    """Show what a model does with a sentence: attention, probabilities, search."""
    texts, overrides = line_io.split_arguments(arguments or [])
    if len(texts) != 1:
        raise UserError(f"inspect takes one sentence, not {len(texts)}; put it in quotation marks")
    page = page or (None if as_json or png else Path("inspection.html"))
    opt.check_arguments(runs=[run], output=page)
    from dragoman.inference.loading import load
    from dragoman.inspection.sentence import inspect

    search = line_io.parse_search_overrides(overrides, {}) if overrides else None
    inspection = inspect(
        load(run, device=device), texts[0], target=target, prefix=prefix, tag=tag, part=part, search=search
    )
    for note in inspection.notes:
        log(f"note: {note}", WARNING)
    if as_json:
        print(format_json(inspection.to_json()))
    if page:
        inspection.save(page)
        log(f"wrote {page}")
    if png:
        from dragoman.inspection.page import render_png

        for path in render_png(inspection, png):
            log(f"wrote {path}")
