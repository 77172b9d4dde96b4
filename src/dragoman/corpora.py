"""What `dragoman data` writes: cleaned corpora and pages of the phrasebook, each file whole or not there."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from random import Random
from tempfile import TemporaryFile
from typing import Any

from dragoman.config import CorpusSettings, build, override
from dragoman.io import move_into_place, temporary_beside
from dragoman.text import phrasebook
from dragoman.text.clean import CleanSettings, clean
from dragoman.text.corpus import read_pairs
from dragoman.text.phrasebook import Phrase
from dragoman.text.trees import as_conllu
from dragoman.text.words import digest
from dragoman.train.report import Report
from dragoman.types import UserError

SIDES = ("source", "target")
BREAK = re.compile(r"\r?\n|\r\Z")  # inside a text, as JSONL allows, it would shift every line that follows


def clean_files(corpus: CorpusSettings, prefix: Path, settings: Sequence[str]) -> Counter[str]:
    """Write the pairs worth keeping to PREFIX.source and PREFIX.target; count what became of the others."""
    values: dict[str, Any] = {}
    for item in settings:
        override(values, item)
    counts: Counter[str] = Counter()
    chosen = build(CleanSettings, values)
    report = Report()
    pairs = clean(report.counted(read_pairs(corpus), "cleaning"), chosen, counts)
    write_columns(prefix, SIDES, ((pair.source, pair.target) for pair in pairs), report)
    return counts


def split_files(corpus: CorpusSettings, prefix: Path, *, dev: int, test: int, seed: int) -> Counter[str]:
    """Three parts of a corpus that share no source: PREFIX.dev.*, PREFIX.test.* and the rest in PREFIX.train.*.

    Dev and test have one pair of each source that is drawn for them; its other translations are left out.
    """
    report = Report()
    sizes = {"train": 1, "dev": dev, "test": test}
    parts = {name: [f"{name}.{side}" for side in SIDES] for name, size in sizes.items() if size}
    outputs(prefix, [*chain(*parts.values())])
    sources = list(dict.fromkeys(digest(pair.source) for pair in report.counted(read_pairs(corpus), "reading")))
    if dev + test >= len(sources):
        raise UserError(
            f"{corpus.shown} has {len(sources):,} different sources, too few for {dev:,} of dev and {test:,} of test"
        )
    drawn = Random(seed).sample(sources, dev + test)
    part_of = dict.fromkeys(drawn[:dev], "dev") | dict.fromkeys(drawn[dev:], "test")
    taken: set[int] = set()
    counts: Counter[str] = Counter()

    def part(name: str) -> Iterator[tuple[str, str]]:
        for pair in read_pairs(corpus):
            source = digest(pair.source)
            if part_of.get(source, "train") != name:
                continue
            if source in taken:
                counts["further translations of dev and test"] += 1
                continue
            if name != "train":
                taken.add(source)
            counts[name] += 1
            yield pair.source, pair.target

    for name, endings in parts.items():
        write_columns(prefix, endings, part(name), report)
    return counts


def write_phrasebook(prefix: Path, *, count: int, split: str, seed: int, gold: bool, conllu: bool) -> None:
    report = Report()
    columns: dict[str, Callable[[Phrase], str]] = {"en": lambda p: p.source, "de": lambda p: p.target}
    if gold:
        columns["jsonl"] = lambda p: json.dumps(asdict(p), ensure_ascii=False)
    if conllu:
        columns["en.conllu"] = lambda p: as_conllu(p.source, p.tree)
        columns["de.conllu"] = lambda p: as_conllu(p.target, p.reversed().tree)
    phrases = report.counted(phrasebook.phrases(split, count, seed=seed), "writing")
    write_columns(prefix, list(columns), ([made(p) for made in columns.values()] for p in phrases), report)


def outputs(prefix: Path, endings: Sequence[str]) -> list[Path]:
    """The files PREFIX.ENDING. That they cannot be written is said before anything is read."""
    if prefix.name in ("", ".."):
        raise UserError(f"--out {str(prefix)!r} is a folder; give the beginning of a file name, such as corpus/clean")
    paths = [prefix.with_name(f"{prefix.name}.{ending}") for ending in endings]
    try:
        for path in paths:
            if path.is_dir():
                raise UserError(f"cannot write {str(path)!r}, which is a folder; remove it or choose another --out")
        with TemporaryFile(dir=next(folder for folder in prefix.absolute().parents if folder.exists())):
            return paths
    except OSError as error:
        raise unwritable(prefix, error) from None


def unwritable(prefix: Path, error: OSError) -> UserError:
    return UserError(f"cannot write {str(prefix)!r} ({error.strerror}); choose another --out")


def write_columns(prefix: Path, endings: Sequence[str], rows: Iterable[Sequence[str]], report: Report) -> None:
    """Write one file for each column; all are renamed together at the end. A row of CoNLL-U is several lines.

    Their folder is made when there is a row to write.
    """
    paths = outputs(prefix, endings)
    broken = 0
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        raise UserError(f"no pair is left, so {str(prefix)!r} was not written; see which settings drop them all")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            made = [held.enter_context(temporary_beside(path)) for path in paths]
            with ExitStack() as stack:
                files = [stack.enter_context(path.open("w", encoding="utf-8", newline="\n")) for path in made]
                for row in chain([first], rows):
                    for file, ending, text in zip(files, endings, row, strict=True):
                        line = text if ending.endswith("conllu") else BREAK.sub(" ", text)
                        broken += line is not text
                        file.write(line + "\n")
            for new, path in zip(made, paths, strict=True):
                move_into_place(new, path)
    except OSError as error:
        raise unwritable(prefix, error) from None
    if broken:
        report.say(f"{broken} texts held line breaks, which a plain file cannot hold: they are spaces now")
