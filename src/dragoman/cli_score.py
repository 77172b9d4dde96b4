"""Commands that judge: evaluate."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli_options import Beam, Conllu, Device, Json, SourceFile, say_counts
from dragoman.config import pick
from dragoman.console import paper, say
from dragoman.types import Mistake


def evaluate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help="run folders", show_default=False)],
    source: SourceFile = None,
    reference: Annotated[
        list[Path] | None, typer.Option(help="one or several, line by line", show_default=False)
    ] = None,
    phrasebook: Annotated[str, typer.Option(metavar="SPLIT", help="instead of files: dev, test or unseen")] = "",
    count: Annotated[int, typer.Option(min=1, help="sentences of the phrasebook")] = 1000,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="what to count, may be repeated; by default the run's own", show_default=False),
    ] = None,
    conllu: Conllu = None,
    beam: Beam = None,
    as_json: Json = False,
    device: Device = "auto",
) -> None:
    """Score runs on files, on the phrasebook, or, when neither is named, on their own data.test."""
    from dragoman import evaluation
    from dragoman.loading import load, load_as
    from dragoman.score.metrics import METRICS
    from dragoman.translator import Translator

    files = source is not None or bool(reference)
    if (phrasebook and files) or ((files or conllu) and not source):
        raise Mistake("evaluate takes --source F and --reference F, or --phrasebook SPLIT, or the run's own data.test")
    names = [pick(METRICS, name, "metric").name for name in metric or []]
    texts = evaluation.read_texts(source, reference or []) if source else None
    trees = evaluation.read_trees(conllu, texts[0], source) if source and conllu and texts else None
    results = []
    for run in runs:
        if texts:
            door = load(run, device=device)
            if trees and not getattr(door, "asks_for_trees", False):
                say(f"{run} reads no trees: it is scored without them")
            found = [evaluation.against_references(door, *texts, names=names, beam=beam, trees=trees)]
        elif phrasebook:
            translator = load_as(Translator, run, device=device)
            found = [evaluation.on_phrasebook(translator, phrasebook, count, names=names, beam=beam)]
        else:
            found = list(evaluation.on_own_tests(load(run, device=device), names=names, beam=beam))
        for one in found:
            say_counts(Counter(one["warnings"]))
            results.append({"run": str(run), **one})
            if as_json:
                print(json.dumps(results[-1], ensure_ascii=False))
    if not as_json:
        paper().print(evaluation.table(results))
