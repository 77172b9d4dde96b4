"""Read sentence pairs from files (two parallel files, TSV, JSONL, dialogues, plain text) or from the phrasebook.

Files are read line by line and never held whole; .gz, .xz and .zst are read as they are. Only a newline (or a carriage
return and a newline) ends a line, so that line n is the same line n in every tool that counts newlines.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from dragoman.config.settings import FILES, CorpusSettings
from dragoman.errors import UserError
from dragoman.io import LONGEST_LINE, Watch, digest_bytes, read_lines
from dragoman.phrasebook.generate import generate_pairs, hash_package
from dragoman.types import Pair

ReadLines = Callable[[Path], Iterator[str]]  # of a file
RowField = TypeVar("RowField", str, list[str])  # of a row: its text, or several
LINE_BREAK = re.compile(r"\s*[\r\n]\s*")  # inside a text of a list, which is joined
TURN_SEPARATOR = " | "  # between the turns of a dialogue
MAX_TURN_DIGITS = 9  # of a turn's number
QUOTED_ROWS = 5  # rows that a complaint quotes
IRRELEVANT_TO_PAIRS = ("weight", "references", "phrasebook", "split", "seed")  # settings that change no pair of a file


def read_pairs(
    corpus: CorpusSettings,
    *,
    split: str = "train",
    direction: str = "en-de",
    trees: bool = False,
    watch: Watch | None = None,
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
        pairs = _from_files(corpus, trees, watch)
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


def _from_files(corpus: CorpusSettings, trees: bool, watch: Watch | None) -> Iterator[Pair]:
    kind = next(kind for kind in READERS if getattr(corpus, kind))
    lines_in = partial(read_lines, watch=watch, longest=math.inf if kind == "text" else LONGEST_LINE)
    pairs = READERS[kind](corpus, lines_in)
    if corpus.reverse:
        return (Pair(pair.target, pair.source) for pair in pairs)
    if corpus.conllu and trees:
        from dragoman.data.trees import attach_trees

        pairs = attach_trees(pairs, Path(corpus.conllu), getattr(corpus, kind))
    return pairs


def _side_by_side(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
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


def _tsv(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
    """Read two columns of a table. Fields are what stands between tabs; there is no quoting."""
    path = Path(corpus.tsv)
    for name in corpus.where:
        if not name.isdecimal():
            raise UserError(f"{path}: where names the column {name!r}, but columns are numbered, from 0")
    wanted = list(dict.fromkeys([*map(str, corpus.columns), *corpus.where]))

    def row(line: str, place: str) -> dict[str, str]:
        fields = line.split("\t")
        if len(fields) <= max(map(int, wanted)):
            raise UserError(
                f"{place} has {len(fields)} column{'s' * (len(fields) != 1)}, "
                f"but columns {' and '.join(wanted)} (counted from 0) are wanted; columns are separated by one tab"
            )
        return {name: fields[int(name)] for name in wanted}

    left, right = map(str, corpus.columns)
    return (Pair(found[left], found[right]) for found in _chosen(lines_in(path), path, row, corpus.where))


def _jsonl(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
    """Read two keys of an object a line. A list of sources is joined; a list of targets is several references."""
    path = Path(corpus.jsonl)

    left, right = corpus.keys

    def row(line: str, place: str) -> dict[str, list[str]]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{place} is not a JSON object such as {json.dumps(dict.fromkeys(corpus.keys, '...'))}")
        found = {key: _texts(record, key, place) for key in (left, right, *corpus.where)}
        if not found[right]:
            raise UserError(f"{place}: {right!r} is an empty list; it must hold a text, or several right ones")
        return found

    return (
        Pair(" ".join(found[left]), found[right][0], alternatives=tuple(found[right][1:]))
        for found in _chosen(lines_in(path), path, row, {key: [word] for key, word in corpus.where.items()})
    )


def _chosen(
    lines: Iterable[str], path: Path, row: Callable[[str, str], dict[str, RowField]], where: dict[str, RowField]
) -> Iterator[dict[str, RowField]]:
    """Yield the rows of a file whose fields are those that `where` asks for."""
    number = kept = 0
    others: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        found = row(line, f"{path} line {number}")
        held = {name: found[name] for name in where}
        if held == where:
            kept += 1
            yield found
        elif len(others) < QUOTED_ROWS:
            others[", ".join(f"{name}: {_shown(field)}" for name, field in held.items())] = None
    if not number:
        raise UserError(f"{path} is empty")
    if not kept:
        asked = ", ".join(f"{name}: {_shown(field)}" for name, field in where.items())
        raise UserError(f"{path} has no line with {asked}, as where asks; its lines have such as {'; '.join(others)}")


def _dialogue(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
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


def _plain(corpus: CorpusSettings, lines_in: ReadLines) -> Iterator[Pair]:
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


def _shown(field: str | list[str]) -> str:
    return (field if isinstance(field, str) else " | ".join(field))[:40]


def _texts(record: dict[str, Any], key: str, where: str) -> list[str]:
    """Return the text of a key, or the texts where it holds a list of them."""
    if key not in record:
        names = ", ".join(record) or "none"
        raise UserError(f"{where} has no key {key!r} (it has: {names}); set keys to the right names")
    value = record[key]
    if not isinstance(value, list):
        return [_text(value, key, where)]
    return [LINE_BREAK.sub(" ", _text(item, key, where).strip()) for item in value]


def _text(value: Any, key: str, where: str) -> str:
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
        files = [(name, _identity(getattr(corpus, name))) for name in FILES if getattr(corpus, name)]
        parts = [*files, corpus.model_dump(mode="json", exclude={*FILES, *IRRELEVANT_TO_PAIRS})]
    return digest_bytes(json.dumps(parts).encode())


def _identity(name: str) -> tuple[str, int, int]:
    try:
        path = Path(name).resolve()
        stat = path.stat()
    except (OSError, ValueError) as error:
        raise UserError(f"{name!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not (path.is_file() or path.is_dir()):
        raise UserError(f"{name!r} is not a plain file; training reads a corpus more than once, so write it to one")
    return str(path), stat.st_size, stat.st_mtime_ns


READERS: dict[str, Callable[[CorpusSettings, ReadLines], Iterator[Pair]]] = {
    "source": _side_by_side,
    "tsv": _tsv,
    "jsonl": _jsonl,
    "dialogue": _dialogue,
    "text": _plain,
}
