"""Glossaries that clients store on the server, to use them in translations.

A glossary belongs to the API key with which it was made; nobody else sees it. Without keys, all share them. In a folder
(ServerSettings.glossary_folder), each is a JSON file that several servers can share; otherwise they are lost when the
server stops.
"""

from __future__ import annotations

import csv
import io
import json
import re
import threading
import unicodedata
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from dragoman.errors import UserError
from dragoman.inference.constraints import MAX_TERM_CHARACTERS, Glossary, TermPair
from dragoman.io import format_json, write_text
from dragoman.serving.errors import RequestError

MAX_GLOSSARIES = 1000  # per API key
MAX_GLOSSARY_NAME = 1024  # characters
MAX_STORED = 200_000_000  # memory of all glossaries of the server, roughly in bytes
ENTRY_SIZE = 150  # bytes that an entry takes besides its characters
GLOSSARY_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True)
class StoredGlossary:
    """Terms of a source language and their translations."""

    id: str
    name: str
    source: str
    target: str
    entries: tuple[TermPair, ...]
    owner: str  # name of the API key; "" without keys
    created: str  # in ISO format, with fractional seconds and time zone

    @cached_property
    def glossary(self) -> Glossary:
        """The terms as constraints on translations."""
        return Glossary(self.entries, (), ())

    @cached_property
    def size(self) -> int:
        """The memory that the glossary takes, roughly in bytes."""
        return len(self.name) + sum(ENTRY_SIZE + len(source) + len(target) for source, target in self.entries)


class GlossaryStore:
    """The glossaries of a server, in a folder or in memory. The methods may read files, so they are for threads."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self.glossaries: dict[str, StoredGlossary] = {}
        self.size = 0  # of all glossaries
        if folder:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):  # it, or a part of its path, is a file
                raise UserError(f"glossary_folder should be a folder, not {str(folder)!r}; name another one") from None
            self._read_folder()

    def create(self, name: str, source: str, target: str, entries: Iterable[TermPair], owner: str) -> StoredGlossary:
        """Store a glossary; raise a RequestError if its terms are not valid, or if there is no room."""
        if not name.strip() or len(name) > MAX_GLOSSARY_NAME:
            raise RequestError(
                400, "bad_glossary", f"a glossary needs a name of at most {MAX_GLOSSARY_NAME} characters"
            )
        created = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        glossary = StoredGlossary(
            id=str(uuid.uuid4()),
            name=name,
            source=source,
            target=target,
            entries=check_entries(entries),
            owner=owner,
            created=created,
        )
        with self.lock:
            if sum(other.owner == owner for other in self.glossaries.values()) >= MAX_GLOSSARIES:
                message = f"{MAX_GLOSSARIES} glossaries are allowed; delete one first"
                raise RequestError(403, "quota_exceeded", message)
            if self.size + glossary.size > MAX_STORED:
                raise RequestError(403, "quota_exceeded", "the server has no room for more glossaries; delete some")
            if self.folder:
                write_text(self.folder / f"{glossary.id}.json", format_json(asdict(glossary)))
            self._keep(glossary)
        return glossary

    def find(self, identifier: str, owner: str) -> StoredGlossary:
        """Return a glossary; raise a RequestError if the owner has none with this id."""
        with self.lock:
            if self.folder and GLOSSARY_ID.fullmatch(identifier):
                self._read_file(self.folder / f"{identifier}.json")
            glossary = self.glossaries.get(identifier)
        if glossary is None or glossary.owner != owner:
            raise RequestError(404, "unknown_glossary", f"there is no glossary {identifier[:60]!r}")
        return glossary

    def list(self, owner: str) -> list[StoredGlossary]:
        """Return the glossaries of an owner, oldest first."""
        with self.lock:
            if self.folder:
                self._read_folder()
            found = [glossary for glossary in self.glossaries.values() if glossary.owner == owner]
        return sorted(found, key=lambda glossary: glossary.created)

    def delete(self, identifier: str, owner: str) -> None:
        """Remove a glossary; raise a RequestError if the owner has none with this id."""
        glossary = self.find(identifier, owner)
        with self.lock:
            self._forget(glossary.id)
            if self.folder:
                (self.folder / f"{glossary.id}.json").unlink(missing_ok=True)

    def _read_folder(self) -> None:
        """Read the files of other servers, and forget what they have removed."""
        assert self.folder
        files = {path.stem: path for path in self.folder.glob("*.json") if GLOSSARY_ID.fullmatch(path.stem)}
        for identifier, path in files.items():
            if identifier not in self.glossaries:
                self._read_file(path)
        for identifier in self.glossaries.keys() - files.keys():
            self._forget(identifier)

    def _read_file(self, path: Path) -> None:
        """Read the glossary in a file, unless that is known; forget it if the file is gone or damaged."""
        if path.stem in self.glossaries and path.exists():
            return
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            values["entries"] = tuple((source, target) for source, target in values["entries"])
            self._keep(StoredGlossary(**values))
        except (OSError, ValueError, TypeError, KeyError):
            self._forget(path.stem)

    def _keep(self, glossary: StoredGlossary) -> None:
        self.glossaries[glossary.id] = glossary
        self.size += glossary.size

    def _forget(self, identifier: str) -> None:
        glossary = self.glossaries.pop(identifier, None)
        self.size -= glossary.size if glossary else 0


def check_entries(entries: Iterable[TermPair]) -> tuple[TermPair, ...]:
    """Return terms without white space at their ends; raise a RequestError for those that no glossary can have."""
    checked: dict[str, str] = {}
    for number, pair in enumerate(entries, 1):
        source, target = (term.strip() for term in pair)
        problem = ""
        if not source or not target:
            problem = "has an empty term"
        elif max(len(source), len(target)) > MAX_TERM_CHARACTERS:
            problem = f"has a term of more than {MAX_TERM_CHARACTERS} characters"
        elif any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in source + target):
            problem = "has a control character"
        elif source in checked:
            problem = f"is a second one for {source!r}"
        if problem:
            raise RequestError(400, "bad_glossary", f"entry {number} of the glossary {problem}")
        checked[source] = target
    if not checked:
        raise RequestError(400, "bad_glossary", "the glossary has no entries")
    return tuple(checked.items())


def parse_entries(text: str, file_format: str) -> list[TermPair]:
    """Return the pairs of terms in a text, one per line: `source<tab>target` (tsv), or `source,target` (csv)."""
    if file_format == "tsv":
        rows = [line.split("\t") for line in re.split(r"\r\n|\r|\n", text) if line.strip()]
    elif file_format == "csv":
        try:
            rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
        except csv.Error as error:
            raise RequestError(400, "bad_glossary", f"the entries are not valid CSV: {error}") from None
    else:
        raise RequestError(400, "bad_glossary", f"entries_format {file_format[:20]!r} is unknown; it is tsv or csv")
    for number, row in enumerate(rows, 1):
        if len(row) != 2 and not (file_format == "csv" and len(row) == 4):  # 4: with the codes of both languages
            message = f"entry {number} of the glossary should have a source and a target term"
            raise RequestError(400, "bad_glossary", message)
    return [(row[0], row[1]) for row in rows]


def format_entries(glossary: StoredGlossary) -> str:
    """Return the entries as tab-separated values."""
    return "\n".join(f"{source}\t{target}" for source, target in glossary.entries)


def merge_glossaries(glossaries: Iterable[StoredGlossary]) -> Glossary | None:
    """Return the terms of several glossaries; of two translations of a term, that of the first glossary counts."""
    merged: dict[str, str] = {}
    found: Mapping[str, StoredGlossary] = {glossary.id: glossary for glossary in glossaries}
    if len(found) == 1:
        return next(iter(found.values())).glossary
    for glossary in found.values():
        for source, target in glossary.entries:
            merged.setdefault(source, target)
    return Glossary(list(merged.items()), (), ()) if merged else None
