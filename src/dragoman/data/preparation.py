"""The commands of `dragoman data`: statistics, cleaning and splitting of corpora, and export of the phrasebook.

`parse_corpora` reads descriptions of corpora from the command line. One function per command does the work. They all
write through `write_columns`: either every output file is complete, or none is written. Nothing here needs PyTorch.
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

from dragoman.config.settings import apply_override, get_entry, parse_settings, parse_yaml
from dragoman.data.cleaning import CleanSettings, clean_pairs
from dragoman.data.corpus import SPLITS, CorpusSettings, DataSettings, read_data_section, read_pairs
from dragoman.data.overlap import MeasureShift, OverlapCounter
from dragoman.data.statistics import CorpusStatistics, compute_statistics
from dragoman.data.trees import format_conllu
from dragoman.errors import UserError
from dragoman.io import hash_stably, move_into_place, report_write_errors, temporary_beside
from dragoman.phrasebook.documents import DocumentSentence, generate_sentences
from dragoman.phrasebook.generate import Phrase, generate_phrases
from dragoman.phrasebook.views import ViewedPhrase, generate_views
from dragoman.progress import WARNING, ProgressBar, log
from dragoman.types import Pair, Tree

CORPUS_SIDES = ("source", "target")  # also the endings of the files
OUT_ADVICE = "choose another --out"
# A line break inside a text, which JSONL allows. In a plain file it would shift all following lines.
LINE_BREAK_IN_TEXT = re.compile(r"\r?\n|\r\Z")
RECIPE_SPLIT = re.compile(r"([^{\[]\S*\.ya?ml)(?::(\w+))?")  # RECIPE.yaml or RECIPE.yaml:dev


@dataclass(frozen=True)
class CorpusList:
    """Corpora that are read one after the other, as if they were one corpus."""

    corpora: tuple[CorpusSettings, ...]

    @property
    def title(self) -> str:
        return ", ".join(corpus.title for corpus in self.corpora)

    def progress(self, label: str, *, passes: int = 1) -> ProgressBar:
        """Return a progress bar that estimates the remaining time from the sizes of the files.

        `passes` is the number of times that the files are read.
        """
        files = [path for corpus in self.corpora for path in corpus.files if path != corpus.conllu]
        generated = 0 if files else sum(corpus.phrasebook for corpus in self.corpora)
        return ProgressBar(label, files=files, passes=passes, total=generated)

    def read(self, progress: ProgressBar) -> Iterator[Pair]:
        """Yield the pairs of all corpora and update the progress bar."""
        pairs = (read_pairs(corpus, watch=progress.watch) for corpus in self.corpora)
        return progress.iterate(chain.from_iterable(pairs))

    def check_pairs(self, command: str, *, twice: bool = False) -> None:
        """Refuse plain text, which has no pairs, and, if the files are read `twice`, also pipes."""
        for corpus in self.corpora:
            if not corpus.has_sources:
                raise UserError(f"data {command} needs sentence pairs, but {corpus.title} has only targets")
            for name in corpus.files if twice else ():
                if Path(name).exists() and not Path(name).is_file():
                    raise UserError(f"{name!r} is not a plain file; data {command} reads it twice, so save it first")


def parse_corpora(text: str, option: str) -> CorpusList:
    """Return the corpora that a user describes as in a recipe, or as RECIPE.yaml:train (or dev, or test).

    parse_corpora("{tsv: pairs.tsv, columns: [1, 0]}", "--corpus")
    """
    if match := RECIPE_SPLIT.fullmatch(text):
        recipe, split = match[1], match[2] or "train"
        data = read_data_section(Path(recipe))
        corpora = get_entry({name: getattr(data, name) for name in SPLITS}, split, f"part of {recipe}")
        if not corpora:
            raise UserError(f"{recipe} has no data.{split}")
        # Direction and split matter only to the phrasebook; another direction than en-de swaps its sides.
        swapped = data.direction != DataSettings().direction
        return CorpusList(
            tuple(
                corpus.model_copy(update={"split": corpus.split or split, "reverse": corpus.reverse != swapped})
                if corpus.phrasebook
                else corpus
                for corpus in corpora
            )
        )
    values = parse_yaml(text, option)
    values = values if isinstance(values, list) else [values]
    if not values or not all(isinstance(value, dict) for value in values):
        raise UserError(
            f"{option} takes a corpus as a recipe describes it, such as '{{tsv: pairs.tsv, columns: [1, 0]}}', "
            f"or a part of a recipe, such as recipe.yaml:train, got {text!r}"
        )
    described = [parse_settings(CorpusSettings, value, where=option) for value in values]
    for corpus in described:
        corpus.check(option)
    return CorpusList(tuple(corpus.map_paths(os.path.expanduser) for corpus in described))


def compute_corpus_statistics(
    corpora: CorpusList, against: Sequence[str] = (), measure_shift: MeasureShift | None = None
) -> CorpusStatistics:
    """Return the statistics of corpora, and their overlap with the corpora that `against` describes."""
    others = CorpusList(tuple(corpus for text in against for corpus in parse_corpora(text, "--against").corpora))
    counter = None
    if others.corpora:
        counter = OverlapCounter(others.read(others.progress("reading the other corpora")), others.title, measure_shift)
    return compute_statistics(corpora.read(corpora.progress("reading")), against=counter)


def write_cleaned(corpora: CorpusList, prefix: Path, settings: Sequence[str]) -> Counter[str]:
    """Write the pairs that cleaning keeps to PREFIX.source and PREFIX.target.

    Return how many pairs were kept, and how many were dropped for each reason.
    """
    values: dict[str, Any] = {}
    for item in settings:
        if "=" not in item:
            raise UserError(f"{item!r} is not a setting; write name=value, such as max_ratio=3, and files as --tsv F")
        apply_override(values, item)
    rules = parse_settings(CleanSettings, values)
    corpora.check_pairs("clean")
    counts: Counter[str] = Counter()
    pairs = clean_pairs(corpora.read(corpora.progress("cleaning")), rules, counts)
    write_columns(prefix, CORPUS_SIDES, (dict(zip(CORPUS_SIDES, texts)) for texts in take_first_targets(pairs)))
    return counts


def write_split(corpora: CorpusList, prefix: Path, *, dev: int, test: int, seed: int) -> Counter[str]:
    """Write three splits that share no source: PREFIX.dev.*, PREFIX.test.* and the other pairs to PREFIX.train.*.

    Return the number of pairs in each. Sources are sampled for dev and test, which get the first pair of each of these
    sources; further translations of them are left out.
    """
    corpora.check_pairs("split", twice=True)
    is_written = {"train": True, "dev": bool(dev), "test": bool(test)}
    endings = {name: [f"{name}.{side}" for side in CORPUS_SIDES] for name in SPLITS if is_written[name]}
    counts: Counter[str] = Counter(dict.fromkeys(endings, 0))

    def generate_rows() -> Iterator[dict[str, str]]:
        progress = corpora.progress("splitting", passes=2)
        sources = list(dict.fromkeys(hash_stably(pair.source.encode()) for pair in corpora.read(progress)))
        if dev + test >= len(sources):
            raise UserError(
                f"{corpora.title} has {len(sources):,} different sources, "
                f"too few for {dev:,} in dev and {test:,} in test"
            )
        sampled = Random(seed).sample(sources, dev + test)
        split_of = dict.fromkeys(sampled[:dev], "dev") | dict.fromkeys(sampled[dev:], "test")
        written: set[int] = set()
        for source, target in take_first_targets(corpora.read(progress)):
            key = hash_stably(source.encode())
            if key in written:
                counts["further translations of dev and test"] += 1
                continue
            name = split_of.get(key, "train")
            if name != "train":
                written.add(key)
            counts[name] += 1
            yield dict(zip(endings[name], (source, target)))

    write_columns(prefix, [*chain(*endings.values())], generate_rows())
    return counts


def take_first_targets(pairs: Iterable[Pair]) -> Iterator[tuple[str, str]]:
    """Yield the source and the first target of each pair; at the end, log how many pairs have further targets."""
    with_alternatives = 0
    for pair in pairs:
        with_alternatives += bool(pair.alternatives)
        yield pair.source, pair.target
    if with_alternatives:
        log(f"{with_alternatives:,} pairs have several targets; the first of each is written", WARNING)


def write_phrasebook(
    prefix: Path,
    *,
    count: int,
    split: str,
    seed: int,
    gold: bool,
    conllu: bool,
    links: bool = False,
    documents: bool = False,
) -> None:
    """Write pairs of the phrasebook to PREFIX.en and PREFIX.de.

    With `gold`, their analyses are written to PREFIX.jsonl; with `conllu`, their trees to PREFIX.{en,de}.conllu; with
    `links`, their words to PREFIX.words.{en,de} and the gold links between these words to PREFIX.align. With
    `documents`, the pairs are those of documents: an empty line follows each document in the files with one line per
    sentence, and an analysis has the number of its document and the references to the previous sentence.
    """
    columns: dict[str, Callable[[Phrase], str]] = {"en": lambda p: p.source, "de": lambda p: p.target}
    if gold:
        columns["jsonl"] = lambda p: json.dumps(asdict(p), ensure_ascii=False)
    if conllu:
        columns["en.conllu"] = lambda p: format_conllu(p.source, p.tree)
        columns["de.conllu"] = lambda p: format_conllu(p.target, Tree(p.target_words, p.target_heads))
    if links:
        columns["words.en"] = lambda p: " ".join(p.source_words)
        columns["words.de"] = lambda p: " ".join(p.target_words)
        columns["align"] = lambda p: " ".join(f"{i}-{j}" for i, j in p.alignment)
    bar = ProgressBar("writing", total=count)
    if documents:
        sentences = bar.iterate(generate_sentences(split, count, seed=seed))
        write_columns(prefix, list(columns), render_documents(sentences, columns))
        return
    phrases = bar.iterate(generate_phrases(split, count, seed=seed))
    write_columns(prefix, list(columns), ({ending: render(p) for ending, render in columns.items()} for p in phrases))


def render_documents(
    sentences: Iterable[DocumentSentence], columns: Mapping[str, Callable[[Phrase], str]]
) -> Iterator[dict[str, str]]:
    """Yield a row of texts for each sentence, and between documents a row of empty lines.

    JSONL and CoNLL-U have no empty lines: an object names its document, and an empty line of text has no tree.
    """
    boundary = {ending: "" for ending in columns if not ending.endswith(("jsonl", "conllu"))}
    document = 0
    for sentence in sentences:
        if sentence.document != document:
            yield boundary
            document = sentence.document
        row = {ending: render(sentence.phrase) for ending, render in columns.items()}
        if "jsonl" in row:
            gold = asdict(sentence)
            row["jsonl"] = json.dumps({**gold.pop("phrase"), **gold}, ensure_ascii=False)
        yield row


def write_view(
    prefix: Path, *, view: str, count: int, split: str, seed: int, direction: str, gold: bool = False
) -> None:
    """Write pairs of a view of the phrasebook to PREFIX.source and PREFIX.target; with `gold` also PREFIX.jsonl."""
    columns: dict[str, Callable[[ViewedPhrase], str]] = {
        "source": lambda phrase: phrase.pair.source,
        "target": lambda phrase: phrase.pair.target,
    }
    if gold:
        columns["jsonl"] = lambda phrase: json.dumps(asdict(phrase), ensure_ascii=False)
    phrases = generate_views(view, split, count, seed=seed, direction=direction)
    phrases = ProgressBar("writing", total=count).iterate(phrases)
    write_columns(prefix, list(columns), ({ending: render(p) for ending, render in columns.items()} for p in phrases))


def write_columns(prefix: Path, endings: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    """Write one file PREFIX.ENDING for each column; all files are renamed to their final names at the end.

    A row has texts for some or all of the columns, by ending. Before the first row is read, files that cannot be
    written are refused. The folder of PREFIX is created when there is a row to write.
    """
    if prefix.name in ("", ".."):
        raise UserError(f"--out {str(prefix)!r} is a folder; give the beginning of a file name, such as corpus/clean")
    paths = [prefix.with_name(f"{prefix.name}.{ending}") for ending in endings]
    with report_write_errors(prefix, OUT_ADVICE):
        if folder := next((path for path in paths if path.is_dir()), None):
            raise UserError(f"cannot write {str(folder)!r}, which is a folder; remove it or choose another --out")
        with TemporaryFile(dir=next(folder for folder in prefix.absolute().parents if folder.exists())):
            pass  # raises an OSError unless the folder is writable
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        raise UserError(f"no pair is left, so {str(prefix)!r} was not written; check which settings drop all pairs")
    joined = 0  # texts in which line breaks were replaced by spaces
    with report_write_errors(prefix, OUT_ADVICE), ExitStack() as cleanup:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        temporary = [cleanup.enter_context(temporary_beside(path)) for path in paths]
        with ExitStack() as stack:
            opened = (stack.enter_context(path.open("w", encoding="utf-8", newline="\n")) for path in temporary)
            files = dict(zip(endings, opened, strict=True))
            for row in chain([first], rows):
                for ending, text in row.items():
                    line = text
                    # A sentence in CoNLL-U format has several lines.
                    if ("\n" in text or text.endswith("\r")) and not ending.endswith("conllu"):
                        line, joined = LINE_BREAK_IN_TEXT.sub(" ", text), joined + 1
                    files[ending].write(line + "\n")
        for new, path in zip(temporary, paths, strict=True):
            move_into_place(new, path)
    if joined:
        log(f"{joined} texts had line breaks, which a plain file cannot contain; they were replaced by spaces", WARNING)
