"""`dragoman data`: look at, filter and make corpora."""

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
from dragoman.config.settings import build
from dragoman.data.corpus import CorpusSettings
from dragoman.errors import UserError
from dragoman.progress import log, results_console

if TYPE_CHECKING:
    from dragoman.data.preparation import CorpusList

data = CommandGroup(help="Look at, filter and make corpora.")


CorpusFiles = list[Path] | None


@dataclass(frozen=True)
class CorpusOptions:
    """The options that name corpora. Corpora of all kinds are read as one, in this order."""

    source: Annotated[
        CorpusFiles, Option(metavar="FILE", help="plain text, one sentence a line; may be given several times")
    ] = None
    target: Annotated[CorpusFiles, Option(metavar="FILE", help="its translations, line by line")] = None
    tsv: Annotated[CorpusFiles, Option(metavar="FILE", help="source and target in columns")] = None
    jsonl: Annotated[CorpusFiles, Option(metavar="FILE", help="objects with source and target")] = None
    columns: Annotated[str, Option(metavar="S,T", help="columns of --tsv, counted from 0; by default 0,1")] = ""
    keys: Annotated[str, Option(metavar="S,T", help="keys of --jsonl; by default source,target")] = ""
    corpus: Annotated[
        list[str] | None,
        Option(metavar="CORPUS", help="a corpus as in a recipe: '{tsv: FILE, where: {0: dev}}'; or RECIPE.yaml:dev"),
    ] = None

    def read(self) -> CorpusList:
        """Return the corpora that the options name."""
        from dragoman.data.preparation import CorpusList, parse_corpora

        sources, targets = self.source or [], self.target or []
        if self.columns and not self.tsv:
            raise UserError("--columns is for --tsv; leave it out, or name a table with --tsv F")
        if self.keys and not self.jsonl:
            raise UserError("--keys is for --jsonl; leave it out, or name a file with --jsonl F")
        if len(sources) != len(targets):
            raise UserError(f"there are {len(sources)} --source and {len(targets)} --target; give as many of both")
        values: list[dict[str, Any]] = [{"source": str(s), "target": str(t)} for s, t in zip(sources, targets)]
        values += [{"tsv": str(path), **parse_pair_option("columns", self.columns, int)} for path in self.tsv or []]
        values += [{"jsonl": str(path), **parse_pair_option("keys", self.keys, str)} for path in self.jsonl or []]
        corpora = [build(CorpusSettings, each) for each in values]
        corpora += [corpus for text in self.corpus or [] for corpus in parse_corpora(text, "--corpus").corpora]
        if not corpora:
            raise UserError(
                "name a corpus: --source F --target F, --tsv F, --jsonl F, or --corpus as a recipe describes it"
            )
        return CorpusList(tuple(corpora))


class CleanCommand(TyperCommand):
    """Lists the settings of `data clean`, with defaults and meanings, at the end of its help."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from dragoman.data.cleaning import CleanSettings

        fields = CleanSettings.model_fields.items()
        with formatter.section("Settings"):
            formatter.write_dl(
                [(f"{name}={json.dumps(field.default)}", field.description or "") for name, field in fields]
            )
        super().format_epilog(ctx, formatter)


@data.command()
def stats(
    corpora: CorpusOptions,
    against: Annotated[
        list[str] | None,
        Option(
            metavar="CORPUS",
            help="another corpus, as for --corpus: shared sources and pairs, and words that only this corpus has",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Counts, lengths, ratios, duplicates, languages: what a corpus is like, and what is odd about it."""
    from dragoman.data.preparation import compute_corpus_statistics
    from dragoman.data.statistics import render_statistics

    found = compute_corpus_statistics(corpora.read(), against or [])
    if as_json:
        print(json.dumps(asdict(found), ensure_ascii=False))
    else:
        results_console().print(render_statistics(found))


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
    """Filter pairs by length, ratio, duplicates and language; say how many went, and why."""
    from dragoman.data.preparation import write_cleaned

    print_counts(write_cleaned(corpora.read(), out_prefix, settings or []), as_json=as_json)


@data.command()
def split(
    corpora: CorpusOptions,
    *,
    out_prefix: Annotated[Path, Option("-o", "--out", help="writes OUT.train.source, OUT.train.target and so on")],
    dev: Annotated[int, Option(min=0, help="sources to check on while training")] = 500,
    test: Annotated[int, Option(min=0, help="sources to score in the end")] = 500,
    seed: Annotated[int, Option()] = 1,
    as_json: Json = False,
) -> None:
    """Split a corpus into train, dev and test that share no source sentence."""
    from dragoman.data.preparation import write_split

    print_counts(write_split(corpora.read(), out_prefix, dev=dev, test=test, seed=seed), as_json=as_json)


@data.command()
def phrasebook(
    out_prefix: Annotated[Path, Option("-o", "--out", help="writes OUT.en and OUT.de")],
    count: Annotated[int, Option(min=1, help="pairs")] = 20000,
    split: Annotated[str, Option(help="train, dev, test or unseen")] = "train",
    seed: Annotated[int, Option()] = 1,
    gold: Annotated[bool, Option("--gold", help="also OUT.jsonl: alignments, trees, coreference, phenomena")] = False,
    conllu: Annotated[bool, Option("--conllu", help="also OUT.en.conllu and OUT.de.conllu: trees")] = False,
) -> None:
    """Make English-German pairs from the built-in grammar."""
    from dragoman.data.preparation import write_phrasebook

    write_phrasebook(out_prefix, count=count, split=split, seed=seed, gold=gold, conllu=conllu)
    log(f"{count:,} pairs in {out_prefix}.en and {out_prefix}.de")


def print_counts(counts: Counter[str], *, as_json: bool) -> None:
    """Print the number of pairs per outcome, such as the reason why they were dropped."""
    if as_json:
        print(json.dumps(dict(counts)))
        return
    total, width = sum(counts.values()), max(20, *map(len, counts))
    for reason, count in counts.most_common():
        print(f"{reason:>{width}}  {count:>10,}  {100 * count / total:6.2f} %")


def parse_pair_option(name: str, text: str, kind: Callable[[str], Any]) -> dict[str, Any]:
    """Return the two columns or keys that an option names; an empty dict if the option is not given."""
    try:
        values = [kind(part.strip()) for part in text.split(",")] if text else []
    except ValueError:
        values = [text]
    if text and (len(values) != 2 or any(value == "" or (kind is int and value < 0) for value in values)):
        such = "numbers, such as 1,0 (columns counted from 0)" if kind is int else "names, such as body,subject"
        raise UserError(f"--{name} takes two {such}, got {text!r}")
    return {name: values} if text else {}
