"""DOCX: what stands beside the text, such as hyphens, languages and parts under other names."""

from __future__ import annotations

import io
import zipfile

import pytest

from document_files import pack_docx
from dragoman.documents import docx
from dragoman.documents.document import Document, MarkedText
from dragoman.documents.formats import open_document
from dragoman.errors import UserError

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


def test_the_language_of_the_text_is_set() -> None:
    body = make_body(
        '<w:r><w:rPr><w:lang w:val="en-US" w:bidi="en-US"/></w:rPr><w:t>one</w:t></w:r>'
        '<w:r><w:rPr><w:lang w:eastAsia="en-GB" w:val="fr-FR"/></w:rPr><w:t> deux</w:t></w:r>'
    )
    data = pack_docx(body, "<a/>", word__styles=f'<w:styles {MAIN}><w:lang w:eastAsia="en" w:val="en-GB"/></w:styles>')
    written = translate(open_document(data, "a.docx", source_language="en", target_language="de"))
    assert '<w:lang w:val="de" w:bidi="en-US"/>' in read_member(written)
    assert '<w:lang w:eastAsia="en-GB" w:val="fr-FR"/>' in read_member(written)
    assert '<w:lang w:eastAsia="en" w:val="de"/>' in read_member(written, "word/styles.xml")
    assert "en-US" in read_member(translate(open_document(data, "a.docx")))


def test_alternative_texts_charts_and_smartart_are_counted() -> None:
    picture = '<w:drawing><wp:docPr id="1" name="a" {}/><pic:cNvPr descr="A dog"/></w:drawing>'
    pictures = picture.format('descr="A dog"') + picture.format("") + picture.format('descr=""')
    parts = {"word__charts__chart1": "<c/>", "word__diagrams__data1": "<d/>", "word__diagrams__colors1": "<d/>"}
    data = pack_docx(make_body(f"<w:r><w:t>one</w:t>{pictures}</w:r>"), "<a/>", **parts)
    document = open_document(data, "a.docx")
    assert (len(document.units), document.skipped) == (1, 3)


def test_the_relationships_name_the_body() -> None:
    body = make_body("<w:r><w:t>one</w:t></w:r>")
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        archive.writestr(
            "_rels/.rels",
            '<Relationships><Relationship Type="http://x/relationships/styles" Target="word/styles.xml"/>'
            '<Relationship Id="a" Type="http://x/relationships/officeDocument" Target="/word/document2.xml"/>'
            "</Relationships>",
        )
        archive.writestr("word/document2.xml", body)
    document = open_document(output.getvalue(), "a.docx")
    assert [unit.text for unit in document.units] == ["one"]
    assert ">one!<" in read_member(translate(document), "word/document2.xml")


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [("MAX_MEMBERS", 3, "has more than 3 files inside"), ("MAX_UNPACKED_BYTES", 9, "unpacks to more than 0 MiB")],
)
def test_large_files_are_refused_by_what_is_large(
    limit: str, value: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docx, limit, value)
    with pytest.raises(UserError, match=message):
        open_document(pack_docx(make_body("<w:r><w:t>one</w:t></w:r>"), "<a/>"), "a.docx")
