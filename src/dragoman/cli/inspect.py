"""The command `inspect`: what a model does with a sentence, as a page, as figures or as data."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from dragoman.cli import line_io
from dragoman.cli import options as opt
from dragoman.data.corpus import CorpusSettings, read_pairs
from dragoman.errors import UserError
from dragoman.io import format_json
from dragoman.progress import WARNING, log
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder


def inspect_command(
    run: opt.Run,
    arguments: Annotated[
        list[str] | None, Argument(metavar="TEXT [search.b=c ...]", help="the sentence, and search settings")
    ] = None,
    target: Annotated[
        str | None, Option(help="a translation to examine, or a label; default: the output of the model")
    ] = None,
    training: Annotated[
        bool, Option("--training", help="show gradients, activations and neurons of the model instead of a sentence")
    ] = False,
    source: Annotated[
        Path | None, Option(help="with --training: file to measure on, with --target FILE; default: the dev set")
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
    if training:
        if texts or overrides or prefix or png:
            raise UserError("--training shows a model, not a sentence; leave out the text, its settings and --png")
        show_training(run, source, Path(target) if target else None, page, as_json=as_json, tag=tag, device=device)
        return
    if source:
        raise UserError("--source is for --training; give the sentence as text")
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


def show_training(
    run: Path, source: Path | None, target: Path | None, page: Path | None, *, as_json: bool, tag: str, device: str
) -> None:
    """Write the page that shows the training of a run; print its most important numbers or, as JSON, all of them."""
    page = page or (None if as_json else Path("training.html"))
    opt.check_arguments(runs=[run], inputs=[file for file in (source, target) if file], output=page)
    recipe = RunFolder(run).load_recipe()
    corpora = choose_corpora(recipe, source, target, tag)
    from dragoman.inference.loading import load
    from dragoman.inspection.training_report import CORPUS_LINES, inspect_training, read_probes

    trees = "tree" in recipe.model.source_features
    direction = recipe.data.direction
    pairs = (pair for corpus in corpora for pair in read_pairs(corpus, split="dev", direction=direction, trees=trees))
    data = ", ".join(corpus.title for corpus in corpora)
    history = read_probes(RunFolder(run).probes_file)
    first_pairs = list(islice(pairs, CORPUS_LINES))
    report = inspect_training(load(run, device=device), first_pairs, history=history, data=data)
    for note in report.notes:
        log(f"note: {note}", WARNING)
    print(format_json(report.to_json()) if as_json else report.format_tables())
    if page:
        report.save(page)
        log(f"wrote {page}")


def choose_corpora(recipe: Recipe, source: Path | None, target: Path | None, tag: str) -> list[CorpusSettings]:
    """Return the given files as a corpus, or else data.dev of the recipe if its files still exist."""
    is_text = recipe.model.task == "generate"
    needed = "--source FILE" if is_text else "--source FILE and --target FILE"
    if source and is_text and not target:
        return [CorpusSettings(text=str(source))]
    if source and target and not is_text:
        return [CorpusSettings(source=str(source), target=str(target), tag=tag)]
    if source or target:
        raise UserError(f"--training of a model with model.kind={recipe.model.kind} needs {needed}, or neither")
    if not recipe.data.dev:
        raise UserError(f"this run has no data.dev; give data to measure on with {needed}")
    for file in (file for corpus in recipe.data.dev for file in corpus.files):
        if not Path(file).exists():
            raise UserError(f"{file!r}, of the dev set of this run, no longer exists; give other data with {needed}")
    return list(recipe.data.dev)
