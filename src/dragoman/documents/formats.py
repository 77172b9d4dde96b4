"""The formats of documents, and the choice of one by the name of a file, else by its content."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePath
from typing import NamedTuple

from dragoman.documents.document import Document
from dragoman.documents.docx import read_docx
from dragoman.documents.html import read_html
from dragoman.documents.markdown import read_markdown
from dragoman.documents.plain_text import read_plain_text
from dragoman.documents.po import read_po
from dragoman.documents.srt import read_srt
from dragoman.documents.tmx import read_tmx
from dragoman.documents.xliff import read_xliff
from dragoman.errors import UserError


class DocumentFormat(NamedTuple):
    """A format of documents. `signature` matches the first bytes of a file, without null bytes."""

    name: str
    title: str
    suffixes: tuple[str, ...]
    read: Callable[[bytes, str, str, str], Document]
    signature: re.Pattern[bytes] | None = None


def open_document(data: bytes, name: str, *, source_language: str = "", target_language: str = "") -> Document:
    """Return a file as a document; `name` decides on its format, and stands in messages.

    document = open_document(Path("page.html").read_bytes(), "page.html")
    """
    return find_format(data, name).read(data, name, source_language, target_language)


def find_format(data: bytes, name: str) -> DocumentFormat:
    """Return the format of a file, by the suffix of its name or, if that says nothing, by its content."""
    suffix = PurePath(name).suffix.lower()
    for document_format in DOCUMENT_FORMATS.values():
        if suffix in document_format.suffixes:
            return document_format
    is_archive = data.startswith(b"PK\x03")  # as presentations, spreadsheets and books are, too
    if is_archive and b"word/document" in data:  # the names of members are not compressed
        return DOCUMENT_FORMATS["docx"]
    start = b"" if is_archive else data[:4096].replace(b"\0", b"").removeprefix(b"\xef\xbb\xbf")
    for document_format in DOCUMENT_FORMATS.values():
        if document_format.signature and document_format.signature.search(start):
            return document_format
    if suffix or is_archive:
        known = ", ".join(list_suffixes())
        raise UserError(f"{name} does not have the suffix of a known format; rename or convert it to one of {known}")
    return DOCUMENT_FORMATS["text"]


def list_suffixes() -> list[str]:
    """Return the suffixes of the names of all documents that can be translated."""
    return [suffix for document_format in DOCUMENT_FORMATS.values() for suffix in document_format.suffixes]


# Nothing that matched is tried again, so that no sequence of comments takes long.
XML_START = rb"\A(?:\xff\xfe|\xfe\xff)?\s*+(?:<\?xml[^>]*+>)?+\s*+(?:<!--(?:(?!-->).)*+-->\s*+|<!DOCTYPE[^>]*+>\s*+)*+"
DOCUMENT_FORMATS = {
    document_format.name: document_format
    for document_format in (
        DocumentFormat(
            "docx",
            "Word",
            (".docx", ".docm"),
            read_docx,
        ),
        DocumentFormat(
            "xliff",
            "XLIFF",
            (".xliff", ".xlf", ".sdlxliff", ".mqxliff"),
            read_xliff,
            re.compile(XML_START + rb"<(?:\w+:)?xliff\b", re.DOTALL),
        ),
        DocumentFormat(
            "tmx",
            "TMX",
            (".tmx",),
            read_tmx,
            re.compile(XML_START + rb"<tmx\b", re.DOTALL),
        ),
        DocumentFormat(
            "po",
            "PO",
            (".po", ".pot"),
            read_po,
            re.compile(rb'^msgid\s+"', re.M),
        ),
        DocumentFormat(
            "srt",
            "SRT subtitles",
            (".srt",),
            read_srt,
            re.compile(rb"^\d+:\d\d:\d\d[,.]\d+[ \t]+-->", re.M),
        ),
        DocumentFormat(
            "html",
            "HTML",
            (".html", ".htm", ".xhtml"),
            read_html,
            re.compile(XML_START + rb"<(?:html|head|body)\b|\A\s*<!doctype html", re.DOTALL | re.IGNORECASE),
        ),
        DocumentFormat("markdown", "Markdown", (".md", ".markdown"), read_markdown),
        DocumentFormat("text", "plain text", (".txt", ".text"), read_plain_text),
    )
}
