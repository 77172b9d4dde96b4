"""Plain text: every line is a unit."""

from __future__ import annotations

import re

from dragoman.documents.document import Document, MarkedText, Splice, Unit, UnitWriter, decode_file

OTHER_BREAKS = re.compile(r"\r(?!\n)|[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
TEXT_LINE = re.compile(r"[^\r\n\x0b\x0c\x1c-\x1e\x85\u2028\u2029]+")


def read_plain_text(data: bytes, name: str, source_language: str = "", target_language: str = "") -> Document:
    """Return the lines of a text that are not empty as its units."""
    document = Document(decode_file(data, name), source_language=source_language, target_language=target_language)
    for line in TEXT_LINE.finditer(document.file.text):
        if text := line[0].strip():
            start = line.start() + len(line[0]) - len(line[0].lstrip())
            document.add(Unit(text), make_line_writer(start, start + len(text)))
    return document


def make_line_writer(start: int, end: int) -> UnitWriter:
    """Return what writes the translation of a line: as one line."""

    def make_splices(translation: MarkedText) -> list[Splice]:
        return [Splice(start, end, OTHER_BREAKS.sub(" ", translation.text).replace("\n", " "))]

    return UnitWriter(make_splices)
