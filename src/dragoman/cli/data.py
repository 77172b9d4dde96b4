"""The commands of `dragoman data`: statistics, cleaning, splitting and generation of corpora."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option
from typer.core import TyperCommand

from dragoman.cli.options import CommandGroup, Json
from dragoman.config.settings import parse_settings
from dragoman.data.corpus import CorpusSettings
from dragoman.errors import UserError
from dragoman.progress import log, results_console

if TYPE_CHECKING:
    from dragoman.data.overlap import MeasureShift
    from dragoman.data.preparation import CorpusList

data = CommandGroup(help="Describe, filter, split and generate corpora.")


CorpusFiles = list[Path] | None


@dataclass(frozen=True)
class CorpusOptions:
    """The options that name corpora, one per field (`adapt_for_typer`). All corpora are read as one, in this order."""

    source: Annotated[
        CorpusFiles, Option(metavar="FILE", help="plain text, one sentence per line; may be given several times")
    ] = None
    target: Annotated[CorpusFiles, Option(metavar="FILE", help="the translations of --source, line by line")] = None
    tsv: Annotated[CorpusFiles, Option(metavar="FILE", help="source and target in tab-separated columns")] = None
    jsonl: Annotated[CorpusFiles, Option(metavar="FILE", help="one JSON object with source and target per line")] = None
    columns: Annotated[str, Option(metavar="S,T", help="columns of --tsv, counted from 0; by default 0,1")] = ""
    keys: Annotated[str, Option(metavar="S,T", help="keys of --jsonl; by default source,target")] = ""
    corpus: Annotated[
        list[str] | None,
        Option(metavar="CORPUS", help="a corpus as in a recipe: '{tsv: FILE, columns: [1, 0]}'; or RECIPE.yaml:dev"),
    ] = None

    def parse(self) -> CorpusList:
        """Return the settings of the corpora that the options name; no corpus is read yet."""
        from dragoman.data.preparation import CorpusList, parse_corpora

        sources, targets = self.source or [], self.target or []
        if self.columns and not self.tsv:
            raise UserError("--columns is for --tsv; leave it out, or name a table with --tsv F")
        if self.keys and not self.jsonl:
            raise UserError("--keys is for --jsonl; leave it out, or name a file with --jsonl F")
        if len(sources) != len(targets):
            raise UserError(f"there are {len(sources)} --source and {len(targets)} --target; give as many of both")
        settings: list[dict[str, Any]] = [{"source": str(s), "target": str(t)} for s, t in zip(sources, targets)]
        settings += [{"tsv": str(path), **parse_pair_option("columns", self.columns, int)} for path in self.tsv or []]
        settings += [{"jsonl": str(path), **parse_pair_option("keys", self.keys, str)} for path in self.jsonl or []]
        corpora = [parse_settings(CorpusSettings, values) for values in settings]
        corpora += [corpus for text in self.corpus or [] for corpus in parse_corpora(text, "--corpus").corpora]
        if not corpora:
            raise UserError(
                "name a corpus: --source F --target F, --tsv F, --jsonl F, or --corpus as a recipe describes it"
            )
        return CorpusList(tuple(corpora))


class CleanCommand(TyperCommand):
    """The command `data clean`, whose help also lists its settings with their defaults and descriptions."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from dragoman.data.cleaning import CleanSettings

        fields = CleanSettings.model_fields.items()
        rows = [(f"{name}={json.dumps(field.default)}", field.description or "") for name, field in fields]
        with formatter.section("Settings"):
            formatter.write_dl(rows)
        super().format_epilog(ctx, formatter)


@data.command()
def stats(
    corpora: CorpusOptions,
    against: Annotated[
        list[str] | None,
        Option(
            metavar="CORPUS",
            help="another corpus, as for --corpus: count what is shared, words not in it, and compare perplexities",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print counts, lengths, length ratios, duplicates and languages of a corpus, and likely errors in it."""
    from dragoman.data.preparation import compute_corpus_statistics
    from dragoman.data.statistics import render_statistics

    measure: MeasureShift | None = None
    if against:
        try:
            from dragoman.smt.perplexity import measure_shift as measure
        except UserError as error:  # Numba is not installed
            log(f"perplexities are left out: {error}")
    statistics = compute_corpus_statistics(corpora.parse(), against or [], measure)
    if as_json:
        print(json.dumps(asdict(statistics), ensure_ascii=False))
    else:
        results_console().print(render_statistics(statistics))


@data.command(cls=CleanCommand)
def clean(
    corpora: CorpusOptions,
    *,
    out_prefix: Annotated[Path, Option("-o", "--out", help="writes OUT.source and OUT.target")],
    settings: Annotated[
        list[str] | None, Argument(metavar="[name=value ...]", help="what to drop, such as max_ratio=3")
    ] = None,
    as_json: Json = False,
) -> None:
    """Filter pairs by length, length ratio, duplicates and language; print how many were dropped, and why."""
    from dragoman.data.preparation import write_cleaned

    print_counts(write_cleaned(corpora.parse(), out_prefix, settings or []), as_json=as_json)


@data.command()
def split(
    corpora: CorpusOptions,
    *,
    out_prefix: Annotated[Path, Option("-o", "--out", help="writes OUT.train.source, OUT.train.target and so on")],
    dev: Annotated[int, Option(min=0, help="number of sources in dev, for validation during training")] = 500,
    test: Annotated[int, Option(min=0, help="number of sources in test, for the final evaluation")] = 500,
    seed: Annotated[int, Option()] = 1,
    as_json: Json = False,
) -> None:
    """Split a corpus into train, dev and test that share no source sentence."""
    from dragoman.data.preparation import write_split

    print_counts(write_split(corpora.parse(), out_prefix, dev=dev, test=test, seed=seed), as_json=as_json)


@data.command()
def phrasebook(
    out_prefix: Annotated[
        Path, Option("-o", "--out", help="writes OUT.en and OUT.de; with --view OUT.source and OUT.target")
    ],
    count: Annotated[int, Option(min=1, help="number of pairs")] = 20000,
    split: Annotated[str, Option(help="train, dev, test or unseen")] = "train",
    seed: Annotated[int, Option()] = 1,
    gold: Annotated[bool, Option("--gold", help="also OUT.jsonl: alignments, trees, coreference, grammar")] = False,
    conllu: Annotated[bool, Option("--conllu", help="also OUT.en.conllu and OUT.de.conllu: trees")] = False,
    links: Annotated[
        bool, Option("--links", help="also OUT.words.en and OUT.words.de, tokenized, and OUT.align: gold word links")
    ] = False,
    documents: Annotated[
        bool,
        Option(
            "--documents",
            help="documents of two sentences, separated by empty lines; a pronoun of the second refers to the first",
        ),
    ] = False,
    view: Annotated[
        str, Option(help="another task than translation: tree, simplify, paraphrases or dropped-pronouns")
    ] = "translation",
    direction: Annotated[
        str, Option(help="with --view: en-de or de-en; the source is in the first language")
    ] = "en-de",
) -> None:
    """Generate English-German pairs from the built-in grammar."""
    from dragoman.data.preparation import write_phrasebook, write_view

    if view != "translation":
        if conllu or links or documents:
            raise UserError("--conllu, --links and --documents are for translation; leave out either them or --view")
        write_view(out_prefix, view=view, count=count, split=split, seed=seed, direction=direction, gold=gold)
        log(f"{count:,} pairs in {out_prefix}.source and {out_prefix}.target")
        return
    if direction != "en-de":
        raise UserError("--direction is for --view; both languages of translation pairs are written anyway")
    write_phrasebook(
        out_prefix, count=count, split=split, seed=seed, gold=gold, conllu=conllu, links=links, documents=documents
    )
    log(f"{count:,} pairs in {out_prefix}.en and {out_prefix}.de")


def print_counts(counts: Counter[str], *, as_json: bool) -> None:
    """Print how many pairs each outcome has, such as "kept" or the reason why they were dropped."""
    if as_json:
        print(json.dumps(dict(counts)))
        return
    total, width = sum(counts.values()), max(20, *map(len, counts))
    for outcome, count in counts.most_common():
        print(f"{outcome:>{width}}  {count:>10,}  {100 * count / total:6.2f} %")


def parse_pair_option(name: str, text: str, convert: Callable[[str], Any]) -> dict[str, Any]:
    """Parse `--columns 1,0` or `--keys body,subject`: return {name: [source, target]}, or {} if `text` is empty.

    `convert` converts each of the two values.
    """
    try:
        values = [convert(part.strip()) for part in text.split(",")] if text else []
    except ValueError:
        values = [text]
    if text and (len(values) != 2 or any(value == "" or (convert is int and value < 0) for value in values)):
        expected = "numbers, such as 1,0 (columns counted from 0)" if convert is int else "names, such as body,subject"
        raise UserError(f"--{name} takes two {expected}, got {text!r}")
    return {name: values} if text else {}
