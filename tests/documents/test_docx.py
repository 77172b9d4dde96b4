"""DOCX: what stands beside the text, such as hyphens, languages and parts under other names."""

from __future__ import annotations

import io
import zipfile

from document_files import pack_docx
from dragoman.documents.document import Document, MarkedText
from dragoman.documents.formats import open_document

MAIN = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def make_body(content: str) -> str:
    return f"<w:document {MAIN}><w:body><w:p>{content}</w:p></w:body></w:document>"


def read_member(data: bytes, name: str = "word/document.xml") -> str:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(name).decode()


def translate(document: Document) -> bytes:
    return document.write([MarkedText(f"{unit.text}!", unit.markup) for unit in document.units])


def test_hyphens_are_no_objects_between_words() -> None:
    body = make_body(
        '<w:r><w:t xml:space="preserve">a co</w:t><w:noBreakHyphen/><w:t xml:space="preserve">op hy</w:t>'
        "<w:softHyphen/><w:t>phen</w:t></w:r>"
    )
    document = open_document(pack_docx(body, "<a/>"), "a.docx")
    [unit] = document.units
    assert (unit.text, unit.markup) == ("a co\u2011op hyphen", ())
    written = read_member(translate(document))
    assert '>a co</w:t><w:noBreakHyphen/><w:t xml:space="preserve">op hyphen!</w:t></w:r></w:p>' in written
