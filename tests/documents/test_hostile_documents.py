"""Files that are made to do harm, and corpora of documents."""

from __future__ import annotations

import gzip
import io
import re
import zipfile
from pathlib import Path

import pytest

from document_files import pack_docx
from dragoman.data.corpus import CorpusSettings, read_pairs
from dragoman.documents import docx
from dragoman.documents.document import MarkedText
from dragoman.documents.formats import open_document
from dragoman.errors import UserError
from dragoman.types import Pair

BOMB = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>'
OUTSIDE = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]>'


@pytest.mark.parametrize("declaration", [BOMB, OUTSIDE])
@pytest.mark.parametrize("name", ["a.xlf", "a.tmx", "a.docx"])
def test_declared_entities_are_refused(declaration: str, name: str) -> None:
    data = f"{declaration}<x>&a;</x>".encode()
    with pytest.raises(UserError, match="declar"):
        open_document(pack_docx(data.decode()) if name == "a.docx" else data, name)


def test_zip_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docx, "MAX_PART_BYTES", 1000)
    with pytest.raises(UserError, match="unpacks to more than"):
        open_document(pack_docx("<a>" + " " * 2000 + "</a>"), "a.docx")


def test_other_archives_are_refused() -> None:
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        archive.writestr("a.txt", "x")
    for data in (output.getvalue(), b"PK\x03\x04", b"text"):
        with pytest.raises(UserError, match=r"a\.docx"):
            open_document(data, "a.docx")


@pytest.mark.parametrize("tag", ["<w:p><w:r><w:t>a</w:t></w:r>", "<w:p>", "<w:p><w:r><w:t>a", "<w:ins>"])
def test_paragraphs_in_paragraphs_are_read(tag: str) -> None:
    """Word nests them once, in text boxes; a file may nest them in any way."""
    names = re.findall("<(?!/)([^>]+)>", tag)
    end = "".join(f"</{name}>" for name in reversed(names) if tag.count(f"</{name}>") == 0)
    text = f"{tag * 500}<w:p><w:r><w:t>b</w:t></w:r></w:p>{end * 500}"
    document = open_document(pack_docx(f'<a xmlns:w="w"><w:p>{text}</w:p></a>', "<a/>"), "a.docx")
    assert 0 <= len(document.units) <= docx.MAX_NESTING
    document.write([MarkedText(unit.text + "x", unit.markup) for unit in document.units])


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("a.xlf", b"<xliff><file>", "well-formed"),
        ("a.xlf", b"<other/>", "no element <xliff>"),
        ("a.po", b'msgid "a\n', "does not end"),
        ("a.po", b"nonsense\n", "line 1"),
        ("a.srt", b"hello\n", "no subtitle"),
        ("a.txt", b"\xff\xfa", "not valid UTF-8"),
        ("a.pdf", b"%PDF", "suffix of a known format"),
        ("a.html", b'<meta charset="nope">', "unknown encoding"),
        ("a.html", b'<meta charset="punycode">a-b', "unknown encoding"),
        ("a.xlf", b'<?xml version="1.0" encoding="unicode_escape"?><xliff/>', "unknown encoding"),
        ("a.po", b'msgid "a"\nmsgstr[' + b"1" * 5000 + b'] ""\n', "line 2"),
        ("a.po", b'msgid ""\nmsgstr "Plural-Forms: nplurals=2; plural=n/0;\\n"\n', "Plural-Forms"),
    ],
)
def test_bad_files_are_refused(name: str, data: bytes, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        open_document(data, name)


@pytest.mark.parametrize("name", ["x.html", "x.md", "x.srt", "x.txt"])
@pytest.mark.parametrize("mark", ["<a ", "<!--", "*a", "[", "`", "<b>", "](", "1\n00:00:01,000 --> ", "&a", '<a b="'])
def test_reading_takes_linear_time(name: str, mark: str) -> None:
    """A long run of one mark is read or refused; quadratic readers would need minutes for larger ones."""
    try:
        document = open_document((mark * (20_000 // len(mark))).encode(), name)
    except UserError:
        return
    assert document.write([None] * len(document.units))


SUBTITLE = "1\n00:00:01,000 --> 00:00:02,000"
HOSTILE_FILES = [
    ("upload", "<!---->" * 500 + "x"),
    ("upload", "<!DOCTYPE a>" * 300 + "x"),
    ("x.md", "# a" + " " * 100_000 + "b"),
    ("x.md", "a|b\n" + " " * 100_000 + "x|"),
    ("x.md", "a" + " " * 200_000 + "b"),
    ("x.md", "`" * 200_000),
    ("x.md", "[a]: b\n\n" + "[" * 20_000 + "a" * 10_000 + "]" * 20_000),
    ("x.srt", f"{SUBTITLE}\n" + "a " * 200_000 + "\nb"),
    ("x.srt", f"{SUBTITLE}\n" + "a b\n" * 50_000),
    ("x.tmx", "<tmx>" + "<tu>" * 50_000 + "</tu>" * 50_000 + "</tmx>"),
    ("x.po", 'msgid ""\n' * 50_000),
    ("x.po", 'msgid "a"\nmsgid_plural "b"\n' + 'msgstr[0] ""\n' * 20_000),
]


@pytest.mark.parametrize(("name", "text"), HOSTILE_FILES, ids=range(len(HOSTILE_FILES)))
def test_hostile_files_take_linear_time(name: str, text: str) -> None:
    """Files that a quadratic or exponential reader or writer would need minutes for."""
    try:
        document = open_document(text.encode(), name, source_language="en", target_language="de")
    except UserError:
        return
    assert document.write([MarkedText(unit.text + "!", unit.markup) for unit in document.units])


@pytest.mark.parametrize(
    "encoding", ["windows-1252", "ISO-8859-15", "latin1", "Shift_JIS", "GB18030", "KOI8-R", "Big5"]
)
def test_encodings_of_text_are_read(encoding: str) -> None:
    data = f'<meta charset="{encoding}"><p>a</p>'.encode()
    assert open_document(data, "a.html").write([MarkedText("b")]) == data.replace(b"<p>a", b"<p>b")


def test_quotes_before_hard_line_breaks_do_not_multiply() -> None:
    """What stands before the second line is repeated at each hard line break, but not if it is very long."""
    text = "a\n" + ">" * 10_000 + "b\n" + "c  \n" * 100 + "d"
    [unit] = open_document(text.encode(), "x.md").units
    assert sum(len(tag.raw) for tag in unit.markup) < len(text) * 2


@pytest.mark.parametrize("page", ['<script>var x = "hello"', '<p translate="no">Keep<p>', "<p translate=no>Keep"])
def test_protected_elements_without_an_end_are_not_translated(page: str) -> None:
    assert [unit.text for unit in open_document(f"<p>a</p>{page}".encode(), "a.html").units] == ["a"]


def test_corpora_of_documents(tmp_path: Path) -> None:
    unit = '<tu><tuv xml:lang="en"><seg>a <bpt i="1">x</bpt>b</seg></tuv>{}</tu>'
    unit = unit.replace("{}", '<tuv xml:lang="DE"><seg>c &amp;\nd</seg></tuv>{}')
    third = '<tuv xml:lang="fr"><seg>e</seg></tuv>'
    text = '<tmx><header srclang="en"/><body>{}</body></tmx>'
    (tmp_path / "a.tmx.gz").write_bytes(gzip.compress(text.format(unit.format("")).encode()))
    (tmp_path / "b.tmx").write_text(text.format(unit.format(third)))
    (tmp_path / "c.tmx").write_text(f"{BOMB}<tmx/>")
    assert list(read_pairs(CorpusSettings(tmx=str(tmp_path / "a.tmx.gz")))) == [Pair("a b", "c & d")]
    memory = CorpusSettings(tmx=str(tmp_path / "b.tmx"))
    with pytest.raises(UserError, match="several languages"):
        list(read_pairs(memory))
    assert list(read_pairs(memory.model_copy(update={"languages": ("fr", "en")}))) == [Pair("e", "a b")]
    with pytest.raises(UserError, match="declares entities"):
        list(read_pairs(CorpusSettings(tmx=str(tmp_path / "c.tmx"))))
    (tmp_path / "d.xlf").write_text(
        "<xliff><file><body><trans-unit><source>a</source><target>b</target><alt-trans><target>x</target></alt-trans>"
        "</trans-unit><trans-unit><source>c</source><target state='new'>d</target></trans-unit></body></file></xliff>"
    )
    assert list(read_pairs(CorpusSettings(xliff=str(tmp_path / "d.xlf")))) == [Pair("a", "b")]
