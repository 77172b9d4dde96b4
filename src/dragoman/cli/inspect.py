"""The command `inspect`: what a model does with a sentence, what its attention heads do, and how it was trained.

Without --heads and --training it shows one sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from dragoman.cli import line_io
from dragoman.cli import options as opt
from dragoman.data.corpus import CorpusSettings, read_pairs
from dragoman.errors import UserError
from dragoman.io import format_json
from dragoman.progress import WARNING, log, results_console
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder

DEFAULT_HEAD_PAIRS = 500


@dataclass(frozen=True)
class InspectOptions:
    """The arguments and options of `dragoman inspect`, one per field (`adapt_for_typer`)."""

    run: opt.Run
    arguments: Annotated[
        list[str] | None, Argument(metavar="TEXT [search.b=c ...]", help="the sentence, and search settings")
    ] = None
    target: Annotated[
        str | None,
        Option(
            help="a translation to examine, or a label; default: the output of the model; with --heads or --training: "
            "a file"
        ),
    ] = None
    prefix: opt.ForcedPrefix = ""
    page: Annotated[
        Path | None,
        Option(
            "-o", "--out", help="page to write; default: inspection.html, training.html, or none with --heads",
            **opt.OUTPUT_PATH,
        ),
    ] = None  # fmt: skip
    png: Annotated[Path | None, Option(help="folder for the figures as PNG files")] = None
    as_json: opt.Json = False
    part: Annotated[int, Option(min=1, help="which part of a text that is too long for one piece")] = 1
    heads: Annotated[bool, Option("--heads", help="score what each attention head attends to, over a corpus")] = False
    training: Annotated[
        bool, Option("--training", help="show gradients, activations and neurons of the model, and its probes")
    ] = False
    source: Annotated[
        Path | None,
        Option(
            help="--heads, --training: source file, with the --target file; default: the phrasebook, or the dev set"
        ),
    ] = None
    conllu: Annotated[Path | None, Option(help="--heads: CoNLL-U file with the trees of the source")] = None
    count: Annotated[int, Option(min=1, help="--heads: maximum number of pairs")] = DEFAULT_HEAD_PAIRS
    ablate: Annotated[bool, Option("--ablate", help="--heads: also BLEU and loss without each head")] = False
    tag: opt.Tag = ""
    previous: Annotated[
        list[str] | None,
        Option(metavar="TEXT", help="sentence before the text, for data.context; may be repeated, oldest first"),
    ] = None
    device: opt.Device = "auto"


def inspect_command(options: InspectOptions) -> None:
    """Show what a model does with a sentence: attention, probabilities, search.

    With --heads: what its attention heads do. With --training: gradients, activations and neurons.
    """
    texts, overrides = line_io.split_arguments(options.arguments or [])
    shows_model = options.heads or options.training
    if options.heads and options.training:
        raise UserError("--heads and --training exclude each other; give one of them at a time")
    if shows_model and (texts or overrides or options.prefix or options.png or options.part != 1 or options.previous):
        name, others = "--heads" if options.heads else "--training", "--prefix, --png, --part or --previous"
        raise UserError(f"{name} shows a model, so it takes no sentence, search setting, {others}")
    if not options.heads and (options.conllu or options.ablate or options.count != DEFAULT_HEAD_PAIRS):
        raise UserError("--conllu, --count and --ablate belong to --heads; add it, or leave them out")
    if not shows_model and options.source:
        raise UserError("--source belongs to --heads or --training; give a sentence as text")
    if options.heads:
        show_heads(options)
    elif options.training:
        show_training(options)
    else:
        show_sentence(options, texts, overrides)


def show_sentence(options: InspectOptions, texts: list[str], overrides: list[str]) -> None:
    """Write what a model does with a sentence as a page, as figures and as JSON, as the options say."""
    if len(texts) != 1:
        raise UserError(f"inspect takes one sentence, not {len(texts)}; put it in quotation marks")
    page = options.page or (None if options.as_json or options.png else Path("inspection.html"))
    if options.png and options.png.exists() and not options.png.is_dir():
        raise UserError(f"--png {str(options.png)!r} is a file; name a folder for the figures")
    opt.check_arguments(runs=[options.run], output=page)
    from dragoman.inference.loading import load
    from dragoman.inspection.page import render_png
    from dragoman.inspection.sentence import inspect

    search = line_io.parse_search_overrides(overrides, {}) if overrides else None
    inspection = inspect(
        load(options.run, device=options.device),
        texts[0],
        target=options.target,
        prefix=options.prefix,
        tag=options.tag,
        part=options.part,
        search=search,
        context=options.previous or (),
    )
    write_report(inspection, page, as_json=options.as_json)
    for path in render_png(inspection, options.png) if options.png else ():
        log(f"wrote {path}")


def write_report(report: Any, page: Path | None, *, as_json: bool) -> None:
    """Log the notes of a report, print it as JSON if asked for, and write its page if there is a path for it."""
    for note in report.notes:
        log(f"note: {note}", WARNING)
    if as_json:
        print(format_json(report.to_json()))
    if page:
        report.save(page)
        log(f"wrote {page}")


def show_heads(options: InspectOptions) -> None:
    """Score the attention heads of a model over a corpus: files, or else the phrasebook."""
    source, target = options.source, Path(options.target) if options.target is not None else None
    if (source is None) != (target is None) or (options.conllu and not source):
        raise UserError("a corpus for --heads needs --source and --target; --conllu adds the trees of the source")
    files = [path for path in (source, target, options.conllu) if path]
    opt.check_arguments(runs=[options.run], inputs=files, output=options.page)
    from dragoman.inference.loading import load_as
    from dragoman.inference.translator import Translator
    from dragoman.inspection.head_report import render_heads_table
    from dragoman.inspection.heads import (
        get_phrasebook_direction,
        make_phrasebook_corpus,
        read_head_corpus,
        score_heads,
    )

    translator = load_as(Translator, options.run, device=options.device)
    if source and target:
        corpus, total = read_head_corpus(source, target, options.conllu, options.count)
        name = str(source)
        if total > len(corpus):
            log(f"note: the first {len(corpus):,} of {total:,} pairs are scored (choose another number with --count)")
    else:
        corpus = make_phrasebook_corpus(options.count, direction=get_phrasebook_direction(translator))
        name = "the phrasebook"
    report = score_heads(translator, corpus, corpus_name=name, tag=options.tag, ablate=options.ablate)
    if not options.as_json:
        results_console().print(render_heads_table(report))
    write_report(report, options.page, as_json=options.as_json)


def show_training(options: InspectOptions) -> None:
    """Show gradients, activations and neurons of a run, and the probes that training recorded."""
    source, target = options.source, Path(options.target) if options.target is not None else None
    if options.tag and not (source and target):
        raise UserError("--tag belongs to the files of --source and --target; leave it out: the dev set has its own")
    page = options.page or (None if options.as_json else Path("training.html"))
    opt.check_arguments(runs=[options.run], inputs=[file for file in (source, target) if file], output=page)
    recipe = RunFolder(options.run).load_recipe()
    corpora = choose_corpora(recipe, source, target, options.tag)
    from dragoman.inference.loading import load
    from dragoman.inspection.training_report import CORPUS_LINES, inspect_training, read_probes

    trees = "tree" in recipe.model.source_features
    read = partial(read_pairs, split="dev", direction=recipe.data.direction, trees=trees, context=recipe.data.context)
    pairs = (pair for corpus in corpora for pair in read(corpus))
    data = ", ".join(corpus.title for corpus in corpora)
    history = read_probes(RunFolder(options.run).probes_file)
    first_pairs = list(islice(pairs, CORPUS_LINES))
    report = inspect_training(load(options.run, device=options.device), first_pairs, history=history, data=data)
    if not options.as_json:
        print(report.format_tables())
    write_report(report, page, as_json=options.as_json)


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
