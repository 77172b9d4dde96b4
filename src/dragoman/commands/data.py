"""`dragoman data`: look at, filter and make corpora."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from dragoman.commands.options import Commands
from dragoman.config import CorpusSettings, build
from dragoman.console import paper, say

data = Commands(help="Look at, filter and make corpora.")

Json = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]
SourceFile = Annotated[
    Path | None, typer.Option("--source", help="plain text, one sentence a line", show_default=False)
]
TargetFile = Annotated[Path | None, typer.Option("--target", help="its translations, line by line", show_default=False)]
TsvFile = Annotated[Path | None, typer.Option("--tsv", help="source and target in columns", show_default=False)]
JsonlFile = Annotated[Path | None, typer.Option("--jsonl", help="objects with source and target", show_default=False)]


@data.command()
def stats(
    source: SourceFile = None,
    target: TargetFile = None,
    tsv: TsvFile = None,
    jsonl: JsonlFile = None,
    as_json: Json = False,
) -> None:
    """Counts, lengths, ratios, duplicates, languages: what a corpus is like, and what is odd about it."""
    from dragoman.text.corpus import read_pairs
    from dragoman.text.stats import render
    from dragoman.text.stats import stats as look
    from dragoman.train.report import Report

    found = look(Report().counted(read_pairs(corpus_from(source, target, tsv, jsonl)), "reading"))
    if as_json:
        print(json.dumps(found.as_dict(), ensure_ascii=False))
    else:
        paper().print(render(found))


@data.command()
def clean(
    source: SourceFile = None,
    target: TargetFile = None,
    tsv: TsvFile = None,
    jsonl: JsonlFile = None,
    out_prefix: Annotated[
        Path, typer.Option("-o", "--out", help="writes OUT.source and OUT.target", show_default=False)
    ] = ...,  # type: ignore[assignment]
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[name=value ...]", help="what to drop, such as max_ratio=3", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Filter pairs by length, ratio, duplicates and language; say how many went, and why."""
    from dragoman.corpora import clean_files

    show_counts(clean_files(corpus_from(source, target, tsv, jsonl), out_prefix, settings or []), as_json=as_json)


@data.command()
def split(
    source: SourceFile = None,
    target: TargetFile = None,
    tsv: TsvFile = None,
    jsonl: JsonlFile = None,
    out_prefix: Annotated[
        Path,
        typer.Option("-o", "--out", help="writes OUT.train.source, OUT.train.target and so on", show_default=False),
    ] = ...,  # type: ignore[assignment]
    dev: Annotated[int, typer.Option(min=0, help="sources to check on while training")] = 500,
    test: Annotated[int, typer.Option(min=0, help="sources to score in the end")] = 500,
    seed: Annotated[int, typer.Option()] = 1,
    as_json: Json = False,
) -> None:
    """Cut a corpus into train, dev and test that share no source sentence."""
    from dragoman.corpora import split_files

    counts = split_files(corpus_from(source, target, tsv, jsonl), out_prefix, dev=dev, test=test, seed=seed)
    show_counts(counts, as_json=as_json)


@data.command()
def phrasebook(
    out_prefix: Annotated[Path, typer.Option("-o", "--out", help="writes OUT.en and OUT.de", show_default=False)] = ...,  # type: ignore[assignment]
    count: Annotated[int, typer.Option(min=1, help="pairs")] = 20000,
    split: Annotated[str, typer.Option(help="train, dev, test or unseen")] = "train",
    seed: Annotated[int, typer.Option()] = 1,
    gold: Annotated[
        bool, typer.Option("--gold", help="also OUT.jsonl: alignments, trees, coreference, phenomena")
    ] = False,
    conllu: Annotated[bool, typer.Option("--conllu", help="also OUT.en.conllu and OUT.de.conllu: trees")] = False,
) -> None:
    """Make English-German pairs from the built-in grammar."""
    from dragoman.corpora import write_phrasebook

    write_phrasebook(out_prefix, count=count, split=split, seed=seed, gold=gold, conllu=conllu)
    say(f"{count:,} pairs in {out_prefix}.en and {out_prefix}.de")


def show_counts(counts: Counter[str], *, as_json: bool) -> None:
    """How many pairs went where."""
    if as_json:
        print(json.dumps(dict(counts)))
        return
    total, width = sum(counts.values()), max(20, *map(len, counts))
    for reason, count in counts.most_common():
        print(f"{reason:>{width}}  {count:>10,}  {100 * count / total:6.2f} %")


def corpus_from(source: Path | None, target: Path | None, tsv: Path | None, jsonl: Path | None) -> CorpusSettings:
    given = {"source": source, "target": target, "tsv": tsv, "jsonl": jsonl}
    corpus = build(CorpusSettings, {name: str(path) for name, path in given.items() if path is not None})
    corpus.check("the command")
    return corpus
