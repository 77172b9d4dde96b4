"""What `dragoman data` reads and writes: corpora as recipes describe them, cleaned, split or made from the phrasebook.

Each file is written as a whole or not at all. Nothing here needs PyTorch.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from random import Random
from tempfile import TemporaryFile
from typing import Any

from dragoman.config.settings import build, override, parse_yaml, pick
from dragoman.data.cleaning import CleanSettings, OverlapCounter, clean_pairs
from dragoman.data.corpus import SPLITS, CorpusSettings, DataSettings, read_data_section, read_pairs
from dragoman.data.statistics import CorpusStatistics, add_overlap, compute_statistics
from dragoman.data.trees import format_conllu
from dragoman.errors import UserError
from dragoman.io import hash_stably, move_into_place, report_write_errors, temporary_beside
from dragoman.phrasebook.generate import Phrase, generate_phrases
from dragoman.progress import WARNING, ProgressBar, log
from dragoman.types import Pair, Tree

CORPUS_SIDES = ("source", "target")
OUT_ADVICE = "choose another --out"
LINE_END = re.compile(r"\r?\n|\r\Z")  # inside a text, as JSONL allows, it would shift every line that follows


@dataclass(frozen=True)
class CorpusList:
    """Corpora that are read as one."""

    corpora: tuple[CorpusSettings, ...]

    @property
    def shown(self) -> str:
        return ", ".join(corpus.shown for corpus in self.corpora)

    def progress(self, what: str, *, passes: int = 1) -> ProgressBar:
        """Return a progress bar that estimates the remaining time from the sizes of the files."""
        files = [path for corpus in self.corpora for path in corpus.files if path != corpus.conllu]
        made = 0 if files else sum(corpus.phrasebook for corpus in self.corpora)
        return ProgressBar(what, files=files, passes=passes, total=made)

    def read(self, progress: ProgressBar) -> Iterator[Pair]:
        """Yield the pairs of all corpora, one after the other, and tell how far that is."""
        pairs = (read_pairs(corpus, watch=progress.watch) for corpus in self.corpora)
        return progress.iterate(chain.from_iterable(pairs))

    def check_pairs(self, command: str, *, twice: bool = False) -> None:
        """Refuse plain text, which has no pairs, and pipes where files are read twice."""
        for corpus in self.corpora:
            if not corpus.has_sources:
                raise UserError(f"data {command} works on pairs of a source and a target, and {corpus.shown} has none")
            for name in corpus.files if twice else ():
                if Path(name).exists() and not Path(name).is_file():
                    raise UserError(f"{name!r} is not a plain file; data {command} reads it twice, so write it to one")


def parse_corpora(text: str, option: str) -> CorpusList:
    """Return the corpora that a user describes as in a recipe, or as RECIPE.yaml:train (or dev, or test).

    parse_corpora("{tsv: pairs.tsv, columns: [1, 0]}", "--corpus")
    """
    if named := re.fullmatch(r"([^{\[]\S*\.ya?ml)(?::(\w+))?", text):
        data, part = read_data_section(Path(named[1])), named[2] or "train"
        found = pick({name: getattr(data, name) for name in SPLITS}, part, f"part of {named[1]}")
        if not found:
            raise UserError(f"{named[1]} has no data.{part}")
        turned = data.direction != DataSettings().direction  # the phrasebook goes by the recipe's split and direction
        updates = ({"split": one.split or part, "reverse": one.reverse != turned} for one in found)
        return CorpusList(
            tuple(one.model_copy(update=update) if one.phrasebook else one for one, update in zip(found, updates))
        )
    values = parse_yaml(text, option)
    listed = values if isinstance(values, list) else [values]
    if not listed or not all(isinstance(each, dict) for each in listed):
        raise UserError(
            f"{option} takes a corpus as a recipe describes it, such as '{{tsv: pairs.tsv, columns: [1, 0]}}', "
            f"or a part of a recipe, such as recipe.yaml:train, got {text!r}"
        )
    corpora = []
    for corpus in (build(CorpusSettings, each, where=option) for each in listed):
        corpus.check(option)
        paths = {name: os.path.expanduser(path) for name, path in corpus.named_files.items()}
        corpora.append(corpus.model_copy(update=paths))
    return CorpusList(tuple(corpora))


def compute_corpus_statistics(corpora: CorpusList, against: Sequence[str] = ()) -> CorpusStatistics:
    """Return the statistics of corpora, and what they share with those that `against` describes."""
    others = [corpus for text in against for corpus in parse_corpora(text, "--against").corpora]
    if not others:
        return compute_statistics(corpora.read(corpora.progress("reading")))
    other = CorpusList(tuple(others))
    counter = OverlapCounter(other.read(other.progress("reading what to compare with")), other.shown)
    found = compute_statistics(counter.watch(corpora.read(corpora.progress("reading"))))
    return add_overlap(found, counter.result())


def write_cleaned(corpora: CorpusList, prefix: Path, settings: Sequence[str]) -> Counter[str]:
    """Write the pairs worth keeping to PREFIX.source and PREFIX.target; count what became of the others."""
    values: dict[str, Any] = {}
    for item in settings:
        if "=" not in item:
            raise UserError(f"{item!r} is not a setting; write name=value, such as max_ratio=3, and files as --tsv F")
        override(values, item)
    chosen = build(CleanSettings, values)
    corpora.check_pairs("clean")
    counts: Counter[str] = Counter()
    pairs = clean_pairs(corpora.read(corpora.progress("cleaning")), chosen, counts)
    write_columns(prefix, CORPUS_SIDES, (dict(zip(CORPUS_SIDES, texts)) for texts in take_first_targets(pairs)))
    return counts


def write_split(corpora: CorpusList, prefix: Path, *, dev: int, test: int, seed: int) -> Counter[str]:
    """Write three parts that share no source: PREFIX.dev.*, PREFIX.test.* and the rest in PREFIX.train.*.

    Dev and test have one pair of each source that is sampled for them; its other translations are left out.
    """
    corpora.check_pairs("split", twice=True)
    sizes = {"train": 1, "dev": dev, "test": test}
    endings = {name: [f"{name}.{side}" for side in CORPUS_SIDES] for name, size in sizes.items() if size}
    columns = [*chain(*endings.values())]
    check_outputs(prefix, columns)
    progress = corpora.progress("splitting", passes=2)
    sources = list(dict.fromkeys(hash_stably(pair.source.encode()) for pair in corpora.read(progress)))
    if dev + test >= len(sources):
        raise UserError(
            f"{corpora.shown} has {len(sources):,} different sources, too few for {dev:,} of dev and {test:,} of test"
        )
    sampled = Random(seed).sample(sources, dev + test)
    part_of = dict.fromkeys(sampled[:dev], "dev") | dict.fromkeys(sampled[dev:], "test")
    counts: Counter[str] = Counter(dict.fromkeys(endings, 0))

    def rows() -> Iterator[dict[str, str]]:
        taken: set[int] = set()
        for source, target in take_first_targets(corpora.read(progress)):
            key = hash_stably(source.encode())
            name = part_of.get(key, "train")
            if key in taken:
                counts["further translations of dev and test"] += 1
                continue
            if name != "train":
                taken.add(key)
            counts[name] += 1
            yield dict(zip(endings[name], (source, target)))

    write_columns(prefix, columns, rows())
    return counts


def take_first_targets(pairs: Iterable[Pair]) -> Iterator[tuple[str, str]]:
    """Yield the source and the first target of pairs, and log how many have further targets, which are not written."""
    several = 0
    for pair in pairs:
        several += bool(pair.alternatives)
        yield pair.source, pair.target
    if several:
        log(f"{several:,} pairs have several targets; the first of each is written", WARNING)


def write_phrasebook(prefix: Path, *, count: int, split: str, seed: int, gold: bool, conllu: bool) -> None:
    """Write pairs of the phrasebook to PREFIX.en and PREFIX.de, and their analyses where these are asked for."""
    columns: dict[str, Callable[[Phrase], str]] = {"en": lambda p: p.source, "de": lambda p: p.target}
    if gold:
        columns["jsonl"] = lambda p: json.dumps(asdict(p), ensure_ascii=False)
    if conllu:
        columns["en.conllu"] = lambda p: format_conllu(p.source, p.tree)
        columns["de.conllu"] = lambda p: format_conllu(p.target, Tree(p.target_words, p.target_heads))
    phrases = ProgressBar("writing", total=count).iterate(generate_phrases(split, count, seed=seed))
    write_columns(prefix, list(columns), ({ending: made(p) for ending, made in columns.items()} for p in phrases))


def check_outputs(prefix: Path, endings: Sequence[str]) -> list[Path]:
    """Return the files PREFIX.ENDING; refuse those that cannot be written, before anything is read."""
    if prefix.name in ("", ".."):
        raise UserError(f"--out {str(prefix)!r} is a folder; give the beginning of a file name, such as corpus/clean")
    paths = [prefix.with_name(f"{prefix.name}.{ending}") for ending in endings]
    with report_write_errors(prefix, OUT_ADVICE):
        for path in paths:
            if path.is_dir():
                raise UserError(f"cannot write {str(path)!r}, which is a folder; remove it or choose another --out")
        with TemporaryFile(dir=next(folder for folder in prefix.absolute().parents if folder.exists())):
            return paths


def write_columns(prefix: Path, endings: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    """Write one file PREFIX.ENDING for each column; all are renamed together at the end.

    A row holds texts for some or all of the columns; one of CoNLL-U has several lines. The folder is made when there is
    a row to write.
    """
    paths = check_outputs(prefix, endings)
    broken = 0
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        raise UserError(f"no pair is left, so {str(prefix)!r} was not written; see which settings drop them all")
    with report_write_errors(prefix, OUT_ADVICE), ExitStack() as held:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        made = [held.enter_context(temporary_beside(path)) for path in paths]
        with ExitStack() as stack:
            opened = (stack.enter_context(path.open("w", encoding="utf-8", newline="\n")) for path in made)
            files = dict(zip(endings, opened, strict=True))
            for row in chain([first], rows):
                for ending, text in row.items():
                    line = text
                    if ("\n" in text or text.endswith("\r")) and not ending.endswith("conllu"):
                        line, broken = LINE_END.sub(" ", text), broken + 1
                    files[ending].write(line + "\n")
        for new, path in zip(made, paths, strict=True):
            move_into_place(new, path)
    if broken:
        log(f"{broken} texts held line breaks, which a plain file cannot hold: they are spaces now", WARNING)
