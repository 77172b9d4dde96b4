"""Corpora: their settings, and readers of files (parallel, TSV, JSONL, dialogues, plain text) and of the phrasebook.

Files are read line by line and never held whole; .gz, .xz and .zst are read as they are. Only a newline (or a carriage
return and a newline) ends a line, so that line n is the same line n in every tool that counts newlines.

To add a kind of file: a field of CorpusSettings that names the file, a function that reads it, a line in READERS.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator

from dragoman.config.settings import (
    Amount,
    Count,
    Listed,
    MetricName,
    Seed,
    Settings,
    Share,
    build,
    prefix_errors,
    read_values,
    setting,
)
from dragoman.errors import UserError
from dragoman.io import LONGEST_LINE, WatchPosition, digest_bytes, read_lines
from dragoman.phrasebook.generate import generate_pairs, hash_package
from dragoman.types import Pair

ReadLines = Callable[[Path], Iterator[str]]  # of a file
LINE_BREAK = re.compile(r"\s*[\r\n]\s*")  # inside a text of a list, which is joined
TURN_SEPARATOR = " | "  # between the turns of a dialogue
MAX_TURN_DIGITS = 9  # of a turn's number
QUOTED_ROWS = 5  # rows that a complaint quotes
IRRELEVANT_TO_PAIRS = ("weight", "references", "phrasebook", "split", "seed")  # settings that change no pair of a file


def wrap_in_list(value: Any) -> Any:
    """Return one corpus or several as a list. A file name alone is refused: it does not tell what is in the file."""
    for name in value if isinstance(value, list) else [value]:
        if isinstance(name, str):
            kind = "jsonl" if ".jsonl" in name else "tsv"
            raise ValueError(f"a corpus, such as {{{kind}: {name}}} or {{source: FILE, target: FILE}}")
    return [value] if isinstance(value, dict) else value


def convert_to_text(value: Any) -> Any:
    """Return a mapping with scalars as text: {0: train} names a column by its number, and 1 or true may be words."""

    def convert(word: Any) -> Any:
        if isinstance(word, dict | list):
            return word
        return "" if word is None else str(word).lower() if isinstance(word, bool) else str(word)

    return {convert(key): convert(word) for key, word in value.items()} if isinstance(value, dict) else value


class CorpusSettings(Settings):
    """Where pairs come from: two plain files, one TSV or JSONL file, dialogues, or the built-in phrasebook.

    A language model takes plain text, or the targets of pairs. READERS says which files and options belong together.
    """

    source: str = setting("", "text file with one source sentence per line")
    target: str = setting("", "text file with one target sentence per line, aligned with `source`")
    tsv: str = setting("", "file with tab-separated columns (see `columns`)")
    jsonl: str = setting("", "file with one JSON object per line (see `keys`)")
    dialogue: str = setting("", 'file with numbered turns, "3 question<tab>answer"; the source is the dialogue so far')
    text: str = setting("", "text file for a language model")
    conllu: str = setting("", "file with the dependency trees of all non-empty sources; for model.position=tree")
    part: Annotated[tuple[Share, Share], Listed] = setting(
        (0.0, 1.0), "start and end of the part of `text` that is used, as fractions of its characters"
    )
    columns: Annotated[tuple[Amount, Amount], Listed] = setting((0, 1), "TSV columns of source and target, from 0")
    keys: Annotated[tuple[str, str], Listed] = setting(("source", "target"), "JSON keys of source and target")
    references: Annotated[tuple[str, ...], Listed] = setting(
        (), "JSON keys of all reference translations, for a test set"
    )
    where: Annotated[dict[str, str], BeforeValidator(convert_to_text)] = setting(
        {}, "read only rows with these values, {TSV column or JSON key: value}"
    )
    source_words: Amount = setting(0, "truncate each source to this number of words; 0: do not truncate")
    phrasebook: Amount = setting(0, "number of pairs to generate from the built-in phrasebook; 0: none")
    split: str = setting("", "phrasebook: split to generate; by default train, dev or test, where the corpus is listed")
    seed: Seed = setting(1, "phrasebook: seed of the generator")
    weight: float = setting(1.0, "passes over the corpus per epoch; 0.5 uses half of its pairs", gt=0, le=1000)
    reverse: bool = setting(False, "swap source and target")
    tag: str = setting("", "tag put before every source, such as de for the target language; several with spaces")

    @property
    def reader(self) -> CorpusReader | None:
        """The reader of its files; the phrasebook has none."""
        return next((reader for kind, reader in READERS.items() if getattr(self, kind)), None)

    @property
    def has_sources(self) -> bool:
        return self.reader is None or self.reader.has_sources

    @property
    def named_files(self) -> dict[str, str]:
        """The files of the corpus by the names of their settings."""
        return {name: path for name in FILES if (path := getattr(self, name))}

    @property
    def files(self) -> list[str]:
        return list(self.named_files.values())

    def map_paths(self, change: Callable[[str], str]) -> CorpusSettings:
        """Return the settings with every path changed by a function."""
        return self.model_copy(update={name: change(path) for name, path in self.named_files.items()})

    @property
    def shown(self) -> str:
        """The name of the corpus in messages."""
        return (" and ".join(self.files) or f"phrasebook: {self.phrasebook}, seed: {self.seed}") + self.selection_text

    @property
    def selection_text(self) -> str:
        """A suffix for the name of the corpus: the selected rows, part, direction and tag; empty if all is used."""
        rows = [f"{name}: {word}" for name, word in self.where.items()]
        rows += [f"part {list(self.part)}"] if self.part != (0.0, 1.0) else []
        rows += ["reverse"] if self.reverse else []
        rows += [f"tag {self.tag}"] if self.tag else []
        return f" ({', '.join(rows)})" if rows else ""

    def check(self, key: str) -> None:
        """Refuse a corpus that is not of exactly one kind, or options that its kind does not have."""
        given = [name for name in (*READERS, "phrasebook") if getattr(self, name)]
        files = self.reader.files if self.reader else ()
        if len(given) != 1 or {*self.named_files} - {"conllu"} != {*files}:
            kinds = ", ".join(f"{{{', '.join(f'{name}: F' for name in one.files)}}}" for one in READERS.values())
            raise UserError(
                f"{key} needs one of {kinds} or {{phrasebook: N}}, "
                f"got {self.model_dump(exclude_defaults=True) or 'nothing'}"
            )
        for name in ("where", "references", "conllu", "source_words", "part"):
            works_with = [kind for kind, one in READERS.items() if name in one.options]
            if getattr(self, name) != type(self).model_fields[name].default and given[0] not in works_with:
                hint = "; dragoman data split makes files of parts" if name == "part" else ""
                raise UserError(f"{key}: {name} works with {' and '.join(works_with)}, not with {given[0]}{hint}")
        if self.part[0] >= self.part[1]:
            raise UserError(
                f"{key}: part goes from a lower share to a higher, such as [0.0, 0.9], got {list(self.part)}"
            )
        if self.reverse and (not self.has_sources or self.references or self.conllu):
            other = given[0] if not self.has_sources else "references" if self.references else "conllu"
            raise UserError(f"{key}: reverse turns pairs round, which {other} does not allow; leave one of them out")
        if self.tag != " ".join(self.tag.split()):
            raise UserError(f"{key}: tag is a word, or words with one space between them, got {self.tag!r}")
        if self.tag and not self.has_sources:
            raise UserError(f"{key}: tag stands before a source, and {given[0]} has none; leave it out")


SPLITS = ("train", "dev", "test")
Corpora = Annotated[tuple[CorpusSettings, ...], Listed, BeforeValidator(wrap_in_list)]


class DataSettings(Settings):
    train: Corpora = setting((), "corpora to train on")
    dev: Corpora = setting((), "corpora to validate on")
    test: Corpora = setting((), "corpora that `dragoman evaluate RUN` scores, each separately")
    metrics: Annotated[tuple[MetricName, ...], Listed] = setting((), "evaluation metrics; by default those of the task")
    direction: str = setting("en-de", "phrasebook: source and target language")
    both_ways: bool = setting(False, "train on every pair in both directions, to pretrain for another run")
    documents: Literal["file", "line"] = setting("file", "language model: a text is a whole file or a single line")
    max_length: Count = setting(512, "maximum number of tokens per side; longer pairs are not used in training")
    cache: str = setting("~/.cache/dragoman", "folder that caches the token ids of each corpus and tokenizer")

    def check(self) -> None:
        """Refuse corpora that name no files, or files and options that do not go together."""
        for split in SPLITS:
            for corpus in getattr(self, split):
                corpus.check(f"data.{split}")

    def resolve_paths(self, folder: Path) -> DataSettings:
        """Return the same with absolute paths: a file is looked up in the working directory, then in `folder`."""

        def resolve(name: str) -> str:
            here = Path(os.path.expanduser(name))
            beside = folder / here
            return str((beside if not os.path.exists(here) and os.path.exists(beside) else here).absolute())

        resolved = {split: tuple(corpus.map_paths(resolve) for corpus in getattr(self, split)) for split in SPLITS}
        return self.model_copy(update=resolved)

    @property
    def training_corpora(self) -> tuple[CorpusSettings, ...]:
        """The corpora that a model is trained on: `train` and, with `both_ways`, each of them reversed."""
        turned = (c.model_copy(update={"reverse": not c.reverse}) for c in self.train if self.both_ways)
        return (*self.train, *turned)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that sources of training have; "" where a corpus has none."""
        return tuple(dict.fromkeys(corpus.tag for corpus in self.train))


def read_data_section(path: Path) -> DataSettings:
    """Return the data section of a recipe file, with the paths of its corpora resolved."""
    values, lines = read_values(path)
    with prefix_errors(path):
        data = build(DataSettings, values.get("data") or {}, where="data", line_of=lines)
        data.check()
    return data.resolve_paths(path.parent)


def read_pairs(
    corpus: CorpusSettings,
    *,
    split: str = "train",
    direction: str = "en-de",
    trees: bool = False,
    watch: WatchPosition | None = None,
) -> Iterator[Pair]:
    """Yield the pairs of one corpus, in order, with the trees of the sources where `trees` is set and there are any.

    `split` and `direction` matter to the phrasebook alone. `watch` learns how far each file is read (`read_lines`).

    for pair in read_pairs(CorpusSettings(source="train.en", target="train.de")):
        print(pair.source, pair.target)
    """
    if corpus.phrasebook:
        direction = phrasebook_direction(corpus, direction)
        split = corpus.split or split
        pairs = generate_pairs(split, corpus.phrasebook, seed=corpus.seed, direction=direction, trees=trees)
    else:
        reader = corpus.reader
        assert reader is not None
        longest = LONGEST_LINE if reader.has_sources else math.inf
        pairs = reader.read(corpus, partial(read_lines, watch=watch, longest=longest))
        if corpus.reverse:
            pairs = (Pair(pair.target, pair.source) for pair in pairs)
        elif corpus.conllu and trees:
            from dragoman.data.trees import attach_trees

            pairs = attach_trees(pairs, Path(corpus.conllu), corpus.files[0])
    if corpus.source_words:
        beginning = re.compile(rf"\s*(?:\S+\s+){{0,{corpus.source_words - 1}}}\S*")
        pairs = (replace(pair, source=beginning.match(pair.source)[0]) for pair in pairs)  # type: ignore[index]
    return (Pair(p.source, p.target, p.tree, corpus.tag, p.alternatives) for p in pairs) if corpus.tag else pairs


def collect_references(pairs: Sequence[Pair]) -> list[list[str]]:
    """Return the targets of pairs as references: one list, or as many as the pair with the most targets has.

    A pair with fewer has its first target again, which counts as if it were there once.
    """
    most = max((len(pair.alternatives) for pair in pairs), default=0)
    rows = [(pair.target, *pair.alternatives) for pair in pairs]
    return [[row[i] if i < len(row) else row[0] for row in rows] for i in range(1 + most)]


def phrasebook_direction(corpus: CorpusSettings, direction: str) -> str:
    """Return the direction in which a corpus uses the phrasebook."""
    return "-".join(direction.split("-")[::-1]) if corpus.reverse else direction


def read_parallel(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
    source, target = Path(corpus.source), Path(corpus.target)
    sources, targets = lines_in(source), lines_in(target)
    number = 0
    for s, t in zip_longest(sources, targets):
        if s is None or t is None:
            rest = sum(1 for _ in (targets if s is None else sources)) + 1
            s_count, t_count = (number, number + rest) if s is None else (number + rest, number)
            if not number:
                raise UserError(f"{source if s is None else target} is empty")
            raise UserError(
                f"{source} has {s_count} lines but {target} has {t_count}; "
                "line n of one must be the counterpart of line n of the other"
            )
        yield Pair(s, t)
        number += 1
    if not number:
        raise UserError(f"{source} and {target} are empty")


def read_tsv(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
    """Read two columns of a table. Fields are what stands between tabs; there is no quoting."""
    path = Path(corpus.tsv)
    for name in corpus.where:
        if not name.isdecimal():
            raise UserError(f"{path}: where names the column {name!r}, but columns are numbered, from 0")
    wanted = list(dict.fromkeys([*map(str, corpus.columns), *corpus.where]))

    def parse(line: str, place: str) -> dict[str, list[str]]:
        fields = line.split("\t")
        if len(fields) <= max(map(int, wanted)):
            raise UserError(
                f"{place} has {len(fields)} column{'s' * (len(fields) != 1)}, "
                f"but columns {' and '.join(wanted)} (counted from 0) are wanted; columns are separated by one tab"
            )
        return {name: [fields[int(name)]] for name in wanted}

    left, right = map(str, corpus.columns)
    return read_rows(lines_in(path), path, parse, corpus.where, left, right)


def read_jsonl(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
    """Read two keys of an object a line. A list of sources is joined; a list of targets is several references."""
    path = Path(corpus.jsonl)
    left, right = corpus.keys

    def parse(line: str, place: str) -> dict[str, list[str]]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{place} is not a JSON object such as {json.dumps(dict.fromkeys(corpus.keys, '...'))}")
        row = {key: read_texts_of_key(record, key, place) for key in (left, right, *corpus.where)}
        if not row[right]:
            raise UserError(f"{place}: {right!r} is an empty list; it must hold a text, or several right ones")
        return row

    return read_rows(lines_in(path), path, parse, corpus.where, left, right)


def read_rows(
    lines: Iterable[str],
    path: Path,
    parse: Callable[[str, str], dict[str, list[str]]],
    where: dict[str, str],
    left: str,
    right: str,
) -> Iterator[Pair]:
    """Yield a pair for each row of a file whose fields have the words in `where`. A field has one text or several."""
    number = kept = 0
    others: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        row = parse(line, f"{path} line {number}")
        if all(row[name] == [word] for name, word in where.items()):
            kept += 1
            yield Pair(" ".join(row[left]), row[right][0], alternatives=tuple(row[right][1:]))
        elif len(others) < QUOTED_ROWS:
            others[", ".join(f"{name}: {' | '.join(row[name])[:40]}" for name in where)] = None
    if not number:
        raise UserError(f"{path} is empty")
    if not kept:
        wanted = ", ".join(f"{name}: {word[:40]}" for name, word in where.items())
        raise UserError(f"{path} has no line with {wanted}, as where asks; its lines have such as {'; '.join(others)}")


def read_dialogues(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
    """Yield a pair for every answer: all turns and facts before it, and the answer.

    A line is "3 what they say<tab>the answer" or "4 a fact"; the numbers begin anew with every dialogue.
    """
    path = Path(corpus.dialogue)
    said: list[str] = []
    answers = before = 0
    for number, line in enumerate(lines_in(path), 1):
        if not line.strip():
            continue
        turn, _, text = line.partition(" ")
        if not turn.isdecimal() or len(turn) > MAX_TURN_DIGITS:
            raise UserError(
                f"{path} line {number} must begin with the number of the turn, such as '1 hello', not {turn!r}"
            )
        if int(turn) <= before:
            said = []
        before = int(turn)
        utterance, tab, answer = text.partition("\t")
        said.append(utterance)
        if tab:
            answers += 1
            yield Pair(TURN_SEPARATOR.join(said), answer.strip())
            said.append(answer.strip())
    if not answers:
        raise UserError(f"{path} has no line with an answer, which stands behind a tab")


def read_text_lines(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
    """Yield every line of a text, empty ones too, as a target without a source.

    A line is in the part of the text that its first character is in, so that parts that meet share no line.
    """
    path = Path(corpus.text)
    whole = corpus.part == (0.0, 1.0)
    total = math.inf if whole else sum(len(line) + 1 for line in read_lines(path, longest=math.inf))
    first, last = (share and share * total for share in corpus.part)
    at, found = 0, False
    for line in lines_in(path):
        if first <= at < last:
            found = True
            yield Pair("", line)
        at += len(line) + 1
    if not found:
        raise UserError(f"{path} has no line in part {list(corpus.part)}" if at else f"{path} is empty")


def read_texts_of_key(record: dict[str, Any], key: str, where: str) -> list[str]:
    """Return the text of a key, or the texts if its value is a list."""
    if key not in record:
        names = ", ".join(record) or "none"
        raise UserError(f"{where} has no key {key!r} (it has: {names}); set keys to the right names")
    value = record[key]
    if not isinstance(value, list):
        return [read_text_value(value, key, where)]
    return [LINE_BREAK.sub(" ", read_text_value(item, key, where).strip()) for item in value]


def read_text_value(value: Any, key: str, where: str) -> str:
    if isinstance(value, int | float):  # a label, such as 1
        return json.dumps(value)
    if not isinstance(value, str):
        got = json.dumps(value)[:40]
        raise UserError(f"{where}: {key!r} must be a string, a number or a list of them, got {got}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise UserError(f"{where}: {key!r} holds {half}, half of a surrogate pair, which is not text") from None
    return value


def fingerprint_corpus(corpus: CorpusSettings, *, split: str = "train", direction: str = "en-de") -> str:
    """Return a digest of a corpus without reading it, from its files and the settings that change its pairs.

    A file counts by its path, size and time of change; the phrasebook by its settings and the files of its package.
    """
    parts: list[Any]
    if corpus.phrasebook:
        parts = ["phrasebook", corpus.phrasebook, corpus.split or split, corpus.seed, direction, hash_package()]
        parts += [corpus.reverse, corpus.tag]
    else:
        parts = []
        for setting_name, name in corpus.named_files.items():
            try:
                path = Path(name).resolve()
                stat = path.stat()
            except (OSError, ValueError) as error:
                raise UserError(f"{name!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
            if not (path.is_file() or path.is_dir()):
                raise UserError(
                    f"{name!r} is not a plain file; training reads a corpus more than once, so write it to one"
                )
            parts.append((setting_name, (str(path), stat.st_size, stat.st_mtime_ns)))
        parts.append(corpus.model_dump(mode="json", exclude={*FILES, *IRRELEVANT_TO_PAIRS}))
    return digest_bytes(json.dumps(parts).encode())


class CorpusReader(NamedTuple):
    """A kind of corpus in files."""

    read: Callable[[CorpusSettings, ReadLines], Iterator[Pair]]
    files: tuple[str, ...]  # settings that name its files; the first is the name of the kind
    options: tuple[str, ...] = ("conllu", "source_words")  # settings that not all kinds have
    has_sources: bool = True  # plain text has targets alone, and lines of any length


READERS = {
    reader.files[0]: reader
    for reader in (
        CorpusReader(read_parallel, ("source", "target")),
        CorpusReader(read_tsv, ("tsv",), ("where", "conllu", "source_words")),
        CorpusReader(read_jsonl, ("jsonl",), ("where", "references", "conllu", "source_words")),
        CorpusReader(read_dialogues, ("dialogue",)),
        CorpusReader(read_text_lines, ("text",), ("part",), has_sources=False),
    )
}
FILES = (*(name for reader in READERS.values() for name in reader.files), "conllu")  # settings that name a file
