"""Corpora: their settings (CorpusSettings, DataSettings) and the readers that turn files into Pairs.

`read_pairs` yields the pairs of a corpus, from the phrasebook or through the reader for its kind of file: parallel
text, TSV, JSONL, TMX, XLIFF, PO, dialogues or plain text (READERS). Files may be compressed (.gz, .xz, .zst) and are
read line by line. Only a newline, or a carriage return and a newline, ends a line, as in other tools that count lines.

To add a kind of file, write a field of CorpusSettings that names the file, a function that reads it, and an entry in
READERS.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator

from dragoman.config.settings import (
    Amount,
    AsTuple,
    Count,
    InclusiveFraction,
    MetricName,
    Seed,
    Settings,
    get_entry,
    parse_settings,
    prefix_errors,
    read_values,
    setting,
)
from dragoman.data.context import attach_to_pairs
from dragoman.documents.bitext import read_po_pairs, read_tmx_pairs, read_xliff_pairs
from dragoman.errors import UserError
from dragoman.io import LONGEST_LINE, WatchPosition, digest_bytes, read_lines
from dragoman.language_codes import LanguageCode
from dragoman.phrasebook.documents import generate_document_pairs
from dragoman.phrasebook.generate import generate_pairs, hash_package
from dragoman.phrasebook.views import VIEWS, generate_views
from dragoman.types import Pair

ReadLines = Callable[[Path], Iterator[str]]
LINE_BREAK = re.compile(r"\s*[\r\n]\s*")  # with the spaces around it
TURN_SEPARATOR = " | "  # between the turns of a dialogue
MAX_TURN_DIGITS = 9  # maximum number of digits in the number of a turn
QUOTED_ROWS = 5  # maximum number of rows that an error message quotes
IRRELEVANT_TO_PAIRS = (
    "weight",
    "references",
    "phrasebook",
    "split",
    "seed",
    "documents",
    "view",
)  # settings that do not change a file's pairs


def wrap_in_list(value: Any) -> Any:
    """Return one corpus or several as a list. A file name alone is refused: it does not show the kind of the file."""
    for name in value if isinstance(value, list) else [value]:
        if isinstance(name, str):
            kind = "jsonl" if ".jsonl" in name else "tsv"
            # `describe_error` puts "should be" before this text.
            raise ValueError(f"a corpus, such as {{{kind}: {name}}} or {{source: FILE, target: FILE}}")
    return [value] if isinstance(value, dict) else value


def convert_to_text(value: Any) -> Any:
    """Return a YAML scalar as text, for the setting `where`: in {0: train} 0 is a column; values may be 1 or true."""
    if isinstance(value, dict | list):
        return value
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


Scalar = Annotated[str, BeforeValidator(convert_to_text)]


class CorpusSettings(Settings):
    """One corpus: two parallel files, one TSV, JSONL, TMX, XLIFF or PO file, dialogues, plain text, or the phrasebook.

    A language model is trained on plain text, or on the targets of pairs. READERS has the options of each kind.
    """

    source: str = setting("", "text file with one source sentence per line")
    target: str = setting("", "text file with one target sentence per line, aligned with `source`")
    tsv: str = setting("", "file with tab-separated columns (see `columns`)")
    jsonl: str = setting("", "file with one JSON object per line (see `keys`)")
    tmx: str = setting("", "translation memory (see `languages`)")
    xliff: str = setting("", "XLIFF file; its translated units are used")
    po: str = setting("", "PO file of gettext; its translated messages are used, except fuzzy ones")
    dialogue: str = setting("", 'file with numbered turns, "3 question<tab>answer"; the source is the dialogue so far')
    text: str = setting("", "text file for a language model")
    conllu: str = setting("", "file with the dependency trees of all non-empty sources; for model.position=tree")
    part: Annotated[tuple[InclusiveFraction, InclusiveFraction], AsTuple] = setting(
        (0.0, 1.0), "start and end of the part of `text` that is used, as fractions of its characters"
    )
    columns: Annotated[tuple[Amount, Amount], AsTuple] = setting((0, 1), "TSV columns of source and target, from 0")
    keys: Annotated[tuple[str, str], AsTuple] = setting(("source", "target"), "JSON keys of source and target")
    languages: Annotated[tuple[str, str], AsTuple] = setting(
        ("", ""), "TMX: source and target language, such as [en, de], if the file has more than two"
    )
    references: Annotated[tuple[str, ...], AsTuple] = setting(
        (), "test set: JSON keys of the references, instead of the second of `keys`"
    )
    where: dict[Scalar, Scalar] = setting({}, "read only rows with these values, {TSV column or JSON key: value}")
    document_id: Scalar = setting("", "TSV column or JSON key of the document id; for data.context")
    source_words: Amount = setting(0, "truncate each source to this number of words; 0: do not truncate")
    phrasebook: Amount = setting(0, "number of pairs to generate from the built-in phrasebook; 0: none")
    split: str = setting("", "phrasebook: split to generate; by default train, dev or test, where the corpus is listed")
    seed: Seed = setting(1, "phrasebook: seed of the generator")
    documents: bool = setting(
        False, "phrasebook: pairs of sentences; a pronoun of the second one refers to a noun of the first"
    )
    view: str = setting("translation", f"phrasebook: the task that its pairs are made for ({', '.join(VIEWS)})")
    weight: float = setting(1.0, "passes over the corpus per epoch; 0.5 uses half of its pairs", gt=0, le=1000)
    reverse: bool = setting(False, "swap source and target")
    tag: str = setting("", "tag put before every source, such as de for the target language; several with spaces")

    @property
    def reader(self) -> CorpusReader | None:
        """The reader for this kind of file; None for the phrasebook."""
        return next((reader for kind, reader in READERS.items() if getattr(self, kind)), None)

    @property
    def has_sources(self) -> bool:
        """Whether there are sources: plain text has only targets."""
        return self.reader is None or self.reader.has_sources

    @property
    def named_files(self) -> dict[str, str]:
        # setting that names the file -> path
        return {name: path for name in FILE_SETTINGS if (path := getattr(self, name))}

    @property
    def files(self) -> list[str]:
        return list(self.named_files.values())

    def map_paths(self, change: Callable[[str], str]) -> CorpusSettings:
        return self.model_copy(update={name: change(path) for name, path in self.named_files.items()})

    @property
    def title(self) -> str:
        return (" and ".join(self.files) or f"phrasebook: {self.phrasebook}, seed: {self.seed}") + self.selection_text

    @property
    def selection_text(self) -> str:
        """A suffix for the name of the corpus: the selected rows and part, the direction and the tag; "" by default."""
        selections = [f"{name}: {value}" for name, value in self.where.items()]
        selections += [f"part {list(self.part)}"] if self.part != (0.0, 1.0) else []
        selections += ["documents"] if self.documents else []
        selections += [f"view {self.view}"] if self.view != "translation" else []
        selections += ["reverse"] if self.reverse else []
        selections += [f"tag {self.tag}"] if self.tag else []
        return f" ({', '.join(selections)})" if selections else ""

    def check(self, key: str) -> None:
        """Refuse a corpus that is not of exactly one kind, or options that its kind does not have.

        `key` is the setting that names the corpus, such as data.train.
        """
        given = [name for name in (*READERS, "phrasebook") if getattr(self, name)]
        files = self.reader.files if self.reader else ()
        if len(given) != 1 or {*self.named_files} - {"conllu"} != {*files}:
            kinds = ", ".join(f"{{{', '.join(f'{name}: F' for name in kind.files)}}}" for kind in READERS.values())
            raise UserError(
                f"{key} needs one of {kinds} or {{phrasebook: N}}, "
                f"got {self.model_dump(exclude_defaults=True) or 'nothing'}"
            )
        if self.documents and not self.phrasebook:
            raise UserError(f"{key}: documents works with phrasebook, not with {given[0]}; leave it out")
        if self.view != "translation" and self.documents:
            raise UserError(f"{key}: only the view translation has documents, not {self.view}; leave one of them out")
        for name in ("where", "references", "document_id", "conllu", "source_words", "part", "languages"):
            works_with = [kind for kind, reader in READERS.items() if name in reader.options]
            if getattr(self, name) != type(self).model_fields[name].default and given[0] not in works_with:
                hint = "; dragoman data split makes files of parts" if name == "part" else ""
                raise UserError(f"{key}: {name} works with {' and '.join(works_with)}, not with {given[0]}{hint}")
        get_entry(VIEWS, self.view, f"view of the phrasebook ({key}.view)")
        if self.view != "translation" and not self.phrasebook:
            raise UserError(f"{key}: view works with phrasebook, not with {given[0]}; leave it out")
        if self.part[0] >= self.part[1]:
            raise UserError(
                f"{key}: part must go from a lower fraction to a higher one, such as [0.0, 0.9], got {list(self.part)}"
            )
        if self.reverse and (not self.has_sources or self.references or self.conllu):
            other = given[0] if not self.has_sources else "references" if self.references else "conllu"
            raise UserError(f"{key}: reverse swaps the sides, which {other} does not allow; leave one of them out")
        if self.tag != " ".join(self.tag.split()):
            raise UserError(f"{key}: tag must be a word, or words separated by single spaces, got {self.tag!r}")
        if self.tag and not self.has_sources:
            raise UserError(f"{key}: tag precedes a source, but {given[0]} has no sources; leave it out")


SPLITS = ("train", "dev", "test")
Corpora = Annotated[tuple[CorpusSettings, ...], AsTuple, BeforeValidator(wrap_in_list)]


class DataSettings(Settings):
    """The `data` section of a recipe."""

    train: Corpora = setting((), "corpora to train on")
    dev: Corpora = setting((), "corpora to validate on")
    test: Corpora = setting((), "corpora that `dragoman evaluate RUN` scores, each separately")
    metrics: Annotated[tuple[MetricName, ...], AsTuple] = setting(
        (), "evaluation metrics; by default those of the task"
    )
    source_language: LanguageCode = setting("", "language of the sources, such as en; by default that of file names")
    target_language: LanguageCode = setting("", "language of the targets, such as de or pt-BR")
    direction: str = setting("en-de", "phrasebook: source and target language")
    both_ways: bool = setting(False, "train on every pair in both directions; for pretraining")
    documents: Literal["file", "line"] = setting("file", "language model: a text is a whole file or a single line")
    context: Amount = setting(
        0, "number of previous sources of the same document that the model reads before each source"
    )
    max_length: Count = setting(512, "maximum number of tokens per side; longer pairs are not used in training")
    cache: str = setting("~/.cache/dragoman", "folder that caches the token ids of each corpus and tokenizer")

    def check(self) -> None:
        """Check all corpora (CorpusSettings.check)."""
        for split in SPLITS:
            for corpus in getattr(self, split):
                corpus.check(f"data.{split}")

    def resolve_paths(self, folder: Path) -> DataSettings:
        """Return the settings with absolute paths: a file is looked up in the working directory, then in `folder`."""
        resolve = partial(resolve_path, folder=folder)
        resolved = {split: tuple(corpus.map_paths(resolve) for corpus in getattr(self, split)) for split in SPLITS}
        return self.model_copy(update=resolved)

    @property
    def train_and_reversed(self) -> tuple[CorpusSettings, ...]:
        """The corpora that a model is trained on: `train` and, with `both_ways`, each of them reversed."""
        swapped = (corpus.model_copy(update={"reverse": not corpus.reverse}) for corpus in self.train if self.both_ways)
        return (*self.train, *swapped)

    @property
    def tags(self) -> tuple[str, ...]:
        """The different tags of the training corpora; "" stands for corpora without a tag."""
        return tuple(dict.fromkeys(corpus.tag for corpus in self.train))


def resolve_path(name: str, folder: Path) -> str:
    """Return the absolute path of a file that is looked up in the working directory, then in `folder`."""
    path = Path(os.path.expanduser(name))
    in_folder = folder / path
    return str((in_folder if not os.path.exists(path) and os.path.exists(in_folder) else path).absolute())


def read_data_section(path: Path) -> DataSettings:
    values, key_lines = read_values(path)
    with prefix_errors(path):
        data = parse_settings(DataSettings, values.get("data") or {}, where="data", key_lines=key_lines)
        data.check()
    return data.resolve_paths(path.parent)


def read_pairs(
    corpus: CorpusSettings,
    *,
    split: str = "train",
    direction: str = "en-de",
    trees: bool = False,
    context: int = 0,
    watch: WatchPosition | None = None,
) -> Iterator[Pair]:
    """Yield the pairs of one corpus in order, with the trees of the sources if `trees` is set and the corpus has trees.

    Only the phrasebook depends on `split` and `direction`. Each pair has up to `context` previous sources of its
    document. `watch` is passed to `read_lines`.

    for pair in read_pairs(CorpusSettings(source="train.en", target="train.de")):
        print(pair.source, pair.target)
    """
    if corpus.phrasebook:
        split, direction = corpus.split or split, phrasebook_direction(corpus, direction)
        if corpus.view == "translation":
            generate = generate_document_pairs if corpus.documents else generate_pairs
            pairs = generate(split, corpus.phrasebook, seed=corpus.seed, direction=direction, trees=trees)
        else:
            phrases = generate_views(corpus.view, split, corpus.phrasebook, seed=corpus.seed, direction=direction)
            pairs = (phrase.pair for phrase in phrases)
    else:
        reader = corpus.reader
        assert reader is not None
        longest = LONGEST_LINE if reader.has_sources else math.inf  # plain text may have lines of any length
        pairs = reader.read(corpus, partial(read_lines, watch=watch, longest=longest))
        if corpus.reverse:
            pairs = (Pair(pair.target, pair.source, document=pair.document) for pair in pairs)
        elif corpus.conllu and trees:
            from dragoman.data.trees import attach_trees

            pairs = attach_trees(pairs, Path(corpus.conllu), corpus.files[0])
    if corpus.source_words:
        first_words = re.compile(rf"\s*(?:\S+\s+){{0,{corpus.source_words - 1}}}\S*")
        pairs = (replace(pair, source=first_words.match(pair.source)[0]) for pair in pairs)  # type: ignore[index]
    if context and (corpus.documents or not corpus.phrasebook):  # other sentences of the phrasebook are unrelated
        pairs = attach_to_pairs(pairs, context)
    return (replace(pair, tag=corpus.tag) for pair in pairs) if corpus.tag else pairs


def collect_references(pairs: Sequence[Pair]) -> list[list[str]]:
    """Return the references of pairs as lists with one reference per pair, as sacreBLEU takes them.

    The number of lists is the maximum number of targets of a pair. A pair with fewer targets repeats its first target,
    which does not change scores.
    """
    targets = [(pair.target, *pair.alternatives) for pair in pairs]
    count = max(map(len, targets), default=1)
    return [[row[i] if i < len(row) else row[0] for row in targets] for i in range(count)]


def phrasebook_direction(corpus: CorpusSettings, direction: str) -> str:
    """Return the direction of a phrasebook corpus, such as de-en if `direction` is en-de and the corpus is reversed."""
    return "-".join(direction.split("-")[::-1]) if corpus.reverse else direction


def read_parallel(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
    """Read two files line by line. They must have the same number of lines."""
    source, target = Path(corpus.source), Path(corpus.target)
    sources, targets = lines_in(source), lines_in(target)
    count = 0
    for count, (s, t) in enumerate(zip_longest(sources, targets), 1):
        if s is None or t is None:  # the end of one file
            source_count, target_count = (  # lines read from each file, and those that remain
                count - (line is None) + sum(1 for _ in rest) for line, rest in ((s, sources), (t, targets))
            )
            if not source_count or not target_count:
                raise UserError(f"{target if source_count else source} is empty")
            raise UserError(
                f"{source} has {source_count} lines but {target} has {target_count}; "
                "line n of one must be the counterpart of line n of the other"
            )
        yield Pair(s, t)
    if not count:
        raise UserError(f"{source} and {target} are empty")


Row = dict[str, list[str]]  # the texts of each field, by TSV column or JSON key; several if the JSON value is a list


def read_tsv(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
    """Read two columns of a table. Columns are separated by tabs; there is no quoting."""
    for name in corpus.where:
        if not name.isdecimal():
            raise UserError(f"{corpus.tsv}: where names the column {name!r}, but columns are numbered, from 0")
    source, target = map(str, corpus.columns)
    if corpus.document_id and not corpus.document_id.isdecimal():
        raise UserError(f"{corpus.tsv}: document_id is {corpus.document_id!r}, but columns are numbered, from 0")
    wanted = list(dict.fromkeys([source, target, *corpus.where, *([corpus.document_id] if corpus.document_id else [])]))

    def parse(line: str, location: str) -> Row:
        fields = line.split("\t")
        if len(fields) <= max(map(int, wanted)):
            raise UserError(
                f"{location} has {len(fields)} column{'s' * (len(fields) != 1)}, "
                f"but columns {' and '.join(wanted)} (counted from 0) are wanted; columns are separated by one tab"
            )
        return {name: [fields[int(name)]] for name in wanted}

    return read_rows(corpus, lines_in, parse, source, target)


def read_jsonl(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
    """Read two keys of one object per line. A list of sources is joined; a list of targets has several references."""
    source, target = corpus.keys

    def parse(line: str, location: str) -> Row:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise UserError(f"{location} is not a JSON object such as {json.dumps(dict.fromkeys(corpus.keys, '...'))}")
        wanted = (source, target, *corpus.where, *([corpus.document_id] if corpus.document_id else []))
        row = {key: read_texts(values, key, location) for key in wanted}
        if not row[target]:
            raise UserError(f"{location}: {target!r} is an empty list; it must contain one or more correct texts")
        return row

    return read_rows(corpus, lines_in, parse, source, target)


def read_texts(values: dict[str, Any], key: str, location: str) -> list[str]:
    """Return the text at a key or, if its value is a list, the texts, each as one line. Errors name the `location`."""
    if key not in values:
        names = ", ".join(values) or "none"
        raise UserError(f"{location} has no key {key!r} (it has: {names}); set keys to the right names")
    is_list = isinstance(values[key], list)
    texts = []
    for value in values[key] if is_list else [values[key]]:
        text = json.dumps(value) if isinstance(value, int | float) else value  # a number may be a label
        if not isinstance(text, str):
            got = json.dumps(value)[:40]
            raise UserError(f"{location}: {key!r} must be a string, a number or a list of them, got {got}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"  # as JSON writes it
            raise UserError(
                f"{location}: {key!r} contains {half}, half of a surrogate pair, which is no text"
            ) from None
        texts.append(LINE_BREAK.sub(" ", text.strip()) if is_list else text)
    return texts


def read_rows(
    corpus: CorpusSettings, lines_in: ReadLines, parse: Callable[[str, str], Row], source: str, target: str
) -> Iterator[Pair]:
    """Yield a pair for each row of a file that matches `corpus.where`.

    `parse` returns the row of a line; `source` and `target` are the fields of a pair.
    """
    path = Path(corpus.tsv or corpus.jsonl)
    number = matching = 0
    others: dict[str, None] = {}  # ordered set of values in rows that do not match, for the error message
    for number, line in enumerate(lines_in(path), 1):
        row = parse(line, f"{path} line {number}")
        if all(row[name] == [value] for name, value in corpus.where.items()):
            matching += 1
            document = " ".join(row[corpus.document_id]) if corpus.document_id else ""
            yield Pair(" ".join(row[source]), row[target][0], alternatives=tuple(row[target][1:]), document=document)
        elif len(others) < QUOTED_ROWS:
            others[", ".join(f"{name}: {' | '.join(row[name])[:40]}" for name in corpus.where)] = None
    if not number:
        raise UserError(f"{path} is empty")
    if not matching:
        wanted = ", ".join(f"{name}: {value[:40]}" for name, value in corpus.where.items())
        raise UserError(f"{path} has no line with {wanted} (setting `where`); its lines have {'; '.join(others)}")


def read_memory(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
    """Read the pairs of a TMX, XLIFF or PO file."""
    name = corpus.tmx or corpus.xliff or corpus.po
    lines = lines_in(Path(name))
    if corpus.tmx:
        pairs = read_tmx_pairs(lines, name, corpus.languages)
    else:
        pairs = read_xliff_pairs(lines, name) if corpus.xliff else read_po_pairs(lines, name)
    pair = None
    for pair in pairs:
        yield Pair(*pair)
    if pair is None:
        of_languages = f" of the languages {' and '.join(corpus.languages)}" if any(corpus.languages) else ""
        raise UserError(f"{name} has no pair of a source and a translation{of_languages}; translate it first")


def read_dialogues(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
    """Yield a pair for every answer. Its source is the dialogue so far: all turns and facts before the answer.

    A line is "3 utterance<tab>answer" or "4 fact". Lines are numbered from 1 in every dialogue.
    """
    path = Path(corpus.dialogue)
    history: list[str] = []
    answers = previous = 0
    for number, line in enumerate(lines_in(path), 1):
        if not line.strip():
            continue
        turn, _, text = line.partition(" ")
        if not turn.isdecimal() or len(turn) > MAX_TURN_DIGITS:
            raise UserError(
                f"{path} line {number} must begin with the number of the turn, such as '1 hello', not {turn!r}"
            )
        if int(turn) <= previous:  # a new dialogue
            history = []
        previous = int(turn)
        utterance, tab, answer = text.partition("\t")
        history.append(utterance)
        if tab:
            answers += 1
            yield Pair(TURN_SEPARATOR.join(history), answer.strip())
            history.append(answer.strip())
    if not answers:
        raise UserError(f"{path} has no line with an answer; an answer follows its utterance after a tab")


def read_text_lines(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
    """Yield every line of a text, including empty ones, as a target without a source.

    A line belongs to the part of the text that contains its first character, so adjacent parts share no line.
    """
    path = Path(corpus.text)
    has_all = corpus.part == (0.0, 1.0)
    characters = math.inf if has_all else sum(len(line) + 1 for line in read_lines(path, longest=math.inf))
    start, end = (fraction and fraction * characters for fraction in corpus.part)  # 0 * inf would be nan
    position, found = 0, False
    for line in lines_in(path):
        if start <= position < end:
            found = True
            yield Pair("", line)
        position += len(line) + 1
    if not found:
        raise UserError(f"{path} has no line in part {list(corpus.part)}" if position else f"{path} is empty")


def fingerprint_corpus(corpus: CorpusSettings, *, split: str = "train", direction: str = "en-de") -> str:
    """Return a digest that identifies the pairs of a corpus, without reading the corpus.

    It covers the settings that change pairs and, for each file, the path, size and time of modification. For the
    phrasebook, it covers the source files of its package.
    """
    parts: list[Any] = []
    if corpus.phrasebook:
        parts = ["phrasebook", corpus.phrasebook, corpus.split or split, corpus.seed, direction, hash_package()]
        parts += [corpus.view, corpus.reverse, corpus.tag, *(["documents"] if corpus.documents else [])]
    else:
        for setting_name, name in corpus.named_files.items():
            try:
                path = Path(name).resolve()
                stat = path.stat()
            except (OSError, ValueError) as error:
                raise UserError(f"{name!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
            if not (path.is_file() or path.is_dir()):
                raise UserError(
                    f"{name!r} is a pipe or device; training reads a corpus more than once, so save it to a file"
                )
            parts.append((setting_name, (str(path), stat.st_size, stat.st_mtime_ns)))
        # Earlier releases did not have these settings; without them, the digest is the same as theirs.
        absent = {name for name in ("document_id", "languages") if not any(getattr(corpus, name))}
        parts.append(corpus.model_dump(mode="json", exclude={*FILE_SETTINGS, *IRRELEVANT_TO_PAIRS, *absent}))
    return digest_bytes(json.dumps(parts).encode())


class CorpusReader(NamedTuple):
    """The reader for one kind of file."""

    read: Callable[[CorpusSettings, ReadLines], Iterator[Pair]]
    files: tuple[str, ...]  # settings that name its files; the first is also the name of the kind
    options: tuple[str, ...] = ("conllu", "source_words")  # settings of this kind that not all kinds have
    has_sources: bool = True  # False: the pairs have only targets


READERS = {
    reader.files[0]: reader
    for reader in (
        CorpusReader(read_parallel, ("source", "target")),
        CorpusReader(read_tsv, ("tsv",), ("where", "document_id", "conllu", "source_words")),
        CorpusReader(read_jsonl, ("jsonl",), ("where", "references", "document_id", "conllu", "source_words")),
        CorpusReader(read_memory, ("tmx",), ("languages", "conllu", "source_words")),
        CorpusReader(read_memory, ("xliff",)),
        CorpusReader(read_memory, ("po",)),
        CorpusReader(read_dialogues, ("dialogue",)),
        CorpusReader(read_text_lines, ("text",), ("part",), has_sources=False),
    )
}
FILE_SETTINGS = (*(name for reader in READERS.values() for name in reader.files), "conllu")  # settings that name a file
