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
from dragoman.documents.document import MarkedText, Markup
from dragoman.documents.formats import open_document
from dragoman.documents.html import read_fragment
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
    monkeypatch.setattr(docx, "MAX_UNPACKED_BYTES", 1000)
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
    assert 0 <= len(document.units) <= docx.MAX_PARAGRAPH_NESTING
    document.write([MarkedText(unit.text + "x", unit.markup) for unit in document.units])


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("a.xlf", b"<xliff><file>", "well-formed"),
        ("a.xlf", b"<other/>", "no element <xliff>"),
        ("a.po", b'msgid "a\n', "does not end"),
        ("a.po", b"nonsense\n", "line 1"),
        ("a.srt", b"hello\n", "line 1 belongs to no subtitle"),
        ("a.srt", b"1\n00:00:01,000 --> 00:00:02,000\na\n\nb\n", "line 5 belongs to no subtitle"),
        ("a.srt", b"1\n00:00:01,000 --> 00:00:02,000\na\n2\n00:00:03 --> 00:00:04\nb\n", "line 4 belongs to no"),
        ("a.po", b'msgid "a"\n\nmsgid "b"\nmsgstr ""\n', "line 3 has a second msgid"),
        ("a.po", b'msgid "a"\nmsgstr ""\nmsgstr "b"\n', "line 3 has a second msgstr"),
        ("a.po", b'msgid "a"\nmsgstr ""\n\nmsgid "b"\n', "line 4 begins a message without a msgstr"),
        ("a.po", b'msgid "a" "b\nmsgstr ""\n', "line 1 has a string that does not end"),
        ("a.po", b'msgid "a\\377"\nmsgstr ""\n', "line 1 has escaped bytes that are not utf-8"),
        ("a.po", b'# x\nmsgstr "b"\n', "line 2 has a msgstr without a msgid"),
        ("a.txt", b"a\n\xff\xfa", "line 2 is not valid UTF-8"),
        ("a.txt", "a".encode("utf-16-le"), "has null characters"),
        ("a.pdf", b"%PDF", "suffix of a known format"),
        ("a.pptx", b"PK\3\4 ppt/presentation.xml", r"a\.pptx does not have the suffix .* one of \.docx, "),
        ("upload", b"PK\3\4 xl/workbook.xml", "upload does not have the suffix of a known format"),
        ("a.html", b'<meta charset="nope">', "unknown encoding"),
        ("a.html", b'<meta charset="punycode">a-b', "unknown encoding"),
        ("a.xlf", b'<?xml version="1.0" encoding="unicode_escape"?><xliff/>', "unknown encoding"),
        ("a.po", b'msgid "a"\nmsgstr[' + b"1" * 5000 + b'] ""\n', "line 2"),
        ("a.po", b'msgid ""\nmsgstr "Plural-Forms: nplurals=2; plural=n/0;\\n"\n', "Plural-Forms"),
        ("a.po", b'msgid ""\nmsgstr "Plural-Forms: nplurals=2; plural=n == !n;\\n"\n', "Plural-Forms"),
        ("a.po", b'msgid "a"\nmsgid_plural[0] "b"\nmsgstr[0] ""\n', "line 2"),
        ("a.tmx", b'<!DOCTYPE tmx SYSTEM "a><tu>"><tmx/>', "no other language"),
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
    ("x.md", "x " + "<?" * 100_000),
    ("x.md", "x " + "<!--" * 50_000),
    ("x.md", "x " + "<!a" * 60_000),
    ("x.md", "x " + "\\`` a" * 40_000),
    ("x.md", "x " + "<!a ><![CDATA[" * 15_000),
    ("x.md", "x " + " ".join("`" * length for length in range(1, 630))),
    ("x.md", "[a]: b\n\n" + "[" * 20_000 + "a" * 10_000 + "]" * 20_000),
    ("x.srt", f"{SUBTITLE}\n" + "a " * 200_000 + "\nb"),
    ("x.srt", f"{SUBTITLE}\n" + "a b\n" * 50_000),
    ("x.tmx", "<tmx>" + "<tu>" * 50_000 + "</tu>" * 50_000 + "</tmx>"),
    ("x.po", 'msgid ""\n' * 50_000),
    ("x.docx", "<w:p>" + '<w:bookmarkStart w:id="1"/>' * 30_000 + "<w:r><w:t>a</w:t></w:r></w:p>"),
    ("x.docx", "<w:p>" + "".join(f'<w:bookmarkStart w:id="{i}"/>' for i in range(30_000)) + "</w:p>"),
    ("x.html", "<p>a" + "<?" * 100_000),
    ("x.html", "<p>a" + "<!a" * 100_000),
    ("x.po", 'msgid "a"\nmsgid_plural "b"\n' + 'msgstr[0] ""\n' * 20_000),
    (
        "x.po",
        "".join(f'msgid_plural[{i}] "a"\n' for i in range(20_000))
        + 'msgid "b"\n'
        + "".join(f'msgstr[{i}] ""\n' for i in range(20_000)),
    ),
    ("x.md", "- " * 100_000 + "a"),
    ("x.md", "> " * 50_000 + "a\n" + "> " * 50_000 + "b"),
    ("x.md", "- " * 500 + "a\n" + "\n" * 100_000 + " " * 100_000 + "b"),
    ("x.md", "](" * 100_000 + "[a](b" * 20_000),
    ("x.html", "<a " + '="<a" ' * 50_000),
    ("x.html", "<a " + "='<a' " * 50_000 + '=">"'),
    ("x.html", '<a b="' * 50_001),
    ("x.html", "<script><!--" + "<script></script>" * 20_000),
    ("x.md", "<a " + "='<a\" " * 50_000),
    ("x.md", "a <?" * 20_000),
    ("x.md", "[a]: b\n" * 20_000 + "[a]: " + "(" * 50_000),
    ("x.md", "[a]: b 'c\n" * 20_000),
    ("x.md", "***a**_b_" * 20_000 + "*a **b" * 20_000),
    ("x.md", "[*" * 20_000 + "a](u)" * 20_000),
]


@pytest.mark.parametrize(("name", "text"), HOSTILE_FILES, ids=range(len(HOSTILE_FILES)))
def test_hostile_files_take_linear_time(name: str, text: str) -> None:
    """Files that a quadratic or exponential reader or writer would need minutes for."""
    try:
        data = pack_docx(f'<a xmlns:w="w">{text}</a>', "<a/>") if name == "x.docx" else text.encode()
        document = open_document(data, name, source_language="en", target_language="de")
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
    text = ">" * 10_000 + "a\n" + ">" * 10_000 + "b\n" + "c  \n" * 100 + "d"
    [unit] = open_document(text.encode(), "x.md").units
    assert sum(len(tag.raw) for tag in unit.markup) < len(text) * 2


@pytest.mark.parametrize("page", ['<script>var x = "hello"', '<p translate="no">Keep<p>', "<p translate=no>Keep"])
def test_protected_elements_without_an_end_are_not_translated(page: str) -> None:
    assert [unit.text for unit in open_document(f"<p>a</p>{page}".encode(), "a.html").units] == ["a"]


HEADER = 'msgid ""\nmsgstr "Content-Type: text/plain; charset={}\\n"\n"Plural-Forms: nplurals=2; plural=n!=1;\\n"\n\n'


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ('msgid "a" "b"\nmsgstr ""\n', 'msgid "a" "b"\nmsgstr "AB"\n'),
        ('msgid\n  "a"\n"b"\nmsgstr\n""\n', 'msgid\n  "a"\n"b"\nmsgstr\n"AB"\n'),
        ('msgid "caf\\303\\xa9"\nmsgstr ""', 'msgid "caf\\303\\xa9"\nmsgstr "CAFÉ"'),
        (
            '#, fuzzy\n#~ msgid "x"\n#~ msgstr "y"\n\nmsgid "a"\nmsgstr ""\n',
            '#, fuzzy\n#~ msgid "x"\n#~ msgstr "y"\n\nmsgid "a"\nmsgstr "A"\n',
        ),
        ('#, no-fuzzy\nmsgid "a"\nmsgstr ""\n', '#, no-fuzzy\nmsgid "a"\nmsgstr "A"\n'),
        ('#, c-format, fuzzy\nmsgid "a"\nmsgstr ""\n', '#, c-format, fuzzy\nmsgid "a"\nmsgstr ""\n'),
        (
            'msgid "a"\nmsgid_plural "b"\nmsgstr[0] "x"\nmsgstr[1] ""\n',
            'msgid "a"\nmsgid_plural "b"\nmsgstr[0] "x"\nmsgstr[1] "B"\n',
        ),
    ],
)
def test_messages_of_po(message: str, expected: str) -> None:
    document = open_document((HEADER.format("UTF-8") + message).encode(), "a.po")
    written = document.write([MarkedText(unit.text.upper()) for unit in document.units])
    assert written.decode() == HEADER.format("UTF-8") + expected


@pytest.mark.parametrize("charset", ["ISO-8859-1", "ASCII", "CHARSET"])
def test_po_files_become_utf_8_if_their_charset_lacks_a_letter(charset: str) -> None:
    text = HEADER.format(charset) + 'msgid "a"\nmsgstr ""\n\nmsgid "b"\nmsgstr ""\n'
    document = open_document(text.encode(), "a.po")
    assert document.write([None, None]) == text.encode()
    written = document.write([MarkedText("x"), MarkedText("ł")])
    assert written.decode() == text.replace(charset, "UTF-8").replace('"a"\nmsgstr ""', '"a"\nmsgstr "x"').replace(
        '"b"\nmsgstr ""', '"b"\nmsgstr "ł"'
    )
    assert list(document.warnings) == ([2] if charset != "CHARSET" else [])


@pytest.mark.parametrize(
    ("charset", "source", "key"),
    [("ISO-8859-1", r"caf\351\\351\x20x", "café\\351 x"), ("Shift_JIS", r"\x93\372\226{ \12", "日本 \n")],
)
def test_escaped_bytes_become_utf_8_with_their_file(charset: str, source: str, key: str) -> None:
    """They keep their characters, in obsolete messages too; comments stay."""
    source = source.replace("{", "\\173")
    message = f'# {source}\nmsgctxt "{source}"\nmsgid "{source}"\nmsgstr ""\n\n#~ msgid "{source}"\n#~ msgstr "b"\n'
    document = open_document((HEADER.format(charset) + message).encode(), "a.po")
    [unit] = document.units
    assert document.write([MarkedText("x")]).decode() == HEADER.format(charset) + message.replace('""', '"x"')
    written = document.write([MarkedText("ł")]).decode()
    assert written.startswith(f"{HEADER.format('UTF-8')}# {source}\n")
    again = open_document(re.sub('"[łb]"', '""', written.replace("#~ ", "")).encode(), "a.po")
    assert [unit.text for unit in again.units] == [key, key]
    assert (again.units[0].note, unit.text) == (key, key)
    assert (r"\x20" in written) == (r"\x20" in source)  # bytes that mean the same are left alone


@pytest.mark.parametrize("message", ['msgid "\\226"\n"\\173"\nmsgstr ""\n', '#~ msgid "\\377"\nmsgid "a"\nmsgstr ""\n'])
def test_escaped_bytes_that_cannot_be_utf_8_are_refused(message: str) -> None:
    document = open_document((HEADER.format("Shift_JIS") + message).encode(), "a.po")
    with pytest.raises(UserError, match=r'a\.po must be .* UTF-8, .*"\\\d+" has escaped .* msgconv'):
        document.write([MarkedText("ł")])


def test_another_number_of_plural_forms_is_a_warning() -> None:
    message = 'msgid "a"\nmsgid_plural "b"\nmsgstr[0] ""\nmsgstr[1] ""\nmsgstr[2] ""\n'
    units = open_document((HEADER.format("UTF-8") + message).encode(), "a.po").units
    assert [unit.warning for unit in units] == ["3 plural forms, but the header of the file names 2"] * 2


@pytest.mark.parametrize(
    ("page", "texts"),
    [
        ("<p>&copy 2020 &amp b &#233 &notit; &bogus x</p>", ["© 2020 & b é ¬it; &bogus x"]),
        ("<p><img title='a&copy=b &copy'>", ["a&copy=b ©"]),
        ('<p translate="NO" title="a">b</p><img alt="c" TRANSLATE=no><b class="x notranslate" title=d>e</b>', []),
        ('<textarea placeholder="a">b</textarea>', ["a"]),
        ("<p>See <a href=foo/>link</a> <b/>now</b></p>", ["See link now"]),
        ('<?xml version="1.0"?><p>a <code/>b</p>', ["a b"]),
        ('<meta charset="utf-16"><p>a</p>', ["a"]),
        ('<p>a <img src=x alt="5" screen"> <b title=Bob\'s>b</b>', ["Bob's", "a  b"]),
        ("<p>a <i class=icon></i> b <a><img></a> c <i> </i></p>", ["a  b  c "]),
        ("<p>a <b title='x>y' data-x=a=b>c</b></p>", ["x>y", "a c"]),
        ("<p>a <b c='d <i>e</i></p>", ["a <b c='d e"]),
        ("<p>\xa0<b>a</b> b\u3000</p><p>\xa0 <b>c</b> \u3000</p>", ["\xa0a b\u3000", "\xa0 c \u3000"]),
        ("<!--><p>a</p><!-- x --><p>b<!---><i>c</i></p>", ["a", "bc"]),
        ("<script>a='<!--<script>b</script>-->'; c('</sc'+'ript>')</script><p>d</p>", ["d"]),
        ("<script><!-- <script x='y'> </script> a </script><p>b</p>", ["b"]),
        ("<script><!-- a --> <script></script><p>b</p>", ["b"]),
        ("<script><!--> <script> a </script><p>b</p>", ["b"]),
    ],
)
def test_html_is_read_as_browsers_do(page: str, texts: list[str]) -> None:
    document = open_document(page.encode(), "a.html")
    assert [unit.text for unit in document.units] == texts
    if "<a " in page:
        assert [tag.kind for tag in document.units[0].markup] == ["open", "close"] * 2
    again = open_document(document.write([MarkedText(f"{u.text};", u.markup) for u in document.units]), "a.html")
    assert [unit.text for unit in again.units] == [f"{text};" for text in texts]


@pytest.mark.parametrize("page", [
    "<p>See <a href=/o'brien>it</a></p>", '<p>a <img title="5" screen"> b</p>', "<p>\xa0<b>a</b> b\xa0</p>",
    "<p><b>\xa0</b>a<b>\u3000</b></p>",
    "<p>a <i title='b'></i> c <i></i><i></i> d</p><p><a id=e></a> f", "<!--><p>a</p><!-- x -->",
    '<script>var a="<!--<script>b</script>-->"; alert("hi")</script><p>a</p>',
])  # fmt: skip
def test_only_the_text_of_html_changes(page: str) -> None:
    document = open_document(page.encode(), "a.html")
    written = document.write(
        [MarkedText(unit.text, (*unit.markup, Markup(len(unit.text), "|", id=99))) for unit in document.units]
    )
    assert written.decode().replace("|", "") == page


def test_unquoted_values_with_quotes_are_quoted() -> None:
    document = open_document(b"<b title=Bob's>", "a.html")
    assert document.write([MarkedText("Eve's")]) == b'<b title="Eve&#39;s">'


@pytest.mark.parametrize(("name", "text"), [
    ("a.xlf", '<!DOCTYPE x SYSTEM "a></b>"><xliff><file><trans-unit><source>a</source></trans-unit></file></xliff>'),
    ("a.tmx", '<!DOCTYPE tmx SYSTEM "a><tu>"><tmx><tu><tuv xml:lang="en"><seg>a</seg></tuv></tu></tmx>'),
])  # fmt: skip
def test_tags_in_a_document_type_are_none(name: str, text: str) -> None:
    [unit] = open_document(text.encode(), name, source_language="en", target_language="de").units
    assert unit.text == "a"


INSTRUCTION = "<?x > </b> <c> ?>"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.xlf", f"<xliff>{INSTRUCTION}<file><trans-unit>{INSTRUCTION}<source>a</source></trans-unit></file></xliff>"),
        ("a.tmx", f'<tmx>{INSTRUCTION}<tu>{INSTRUCTION}<tuv xml:lang="en"><seg>a{INSTRUCTION}</seg></tuv></tu></tmx>'),
        ("a.docx", f'<a xmlns:w="w"><w:p>{INSTRUCTION}<w:r><w:t>a{INSTRUCTION}</w:t>{INSTRUCTION}</w:r></w:p></a>'),
        ("a.html", "<p>a<?php echo $this->title; ?>b</p>"),
        ("a.html", "<p>a<?old>b</p>"),
    ],
)  # fmt: skip
def test_processing_instructions_are_kept(name: str, text: str) -> None:
    """They end with ?>, whatever they contain; in HTML the first > ends them if no ?> follows."""
    data = pack_docx(text, "<a/>") if name == "a.docx" else text.encode()
    document = open_document(data, name, source_language="en", target_language="de")
    [unit] = document.units
    assert unit.text in ("a", "ab")
    written = document.write([MarkedText(unit.text.upper(), unit.markup)])
    if name == "a.docx":
        with zipfile.ZipFile(io.BytesIO(written)) as archive:
            written = archive.read("word/document.xml")
    for instruction in re.findall(r"<\?.*?\?>|<\?old>", text):
        assert written.decode().count(instruction) >= text.count(instruction)


def test_broken_xml_is_never_written() -> None:
    document = open_document(
        b"<xliff><file><body><trans-unit><source>a</source></trans-unit></body></file></xliff>", "a.xlf"
    )
    with pytest.raises(UserError, match=r"the translated a\.xlf is not well-formed"):
        document.write([MarkedText("a", (Markup(0, "<b>"),))])


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("a.docx", '<a xmlns:w="w"><w:p><w:r><w:t><![CDATA[a & b]]></w:t></w:r></w:p></a>', "a & b"),
    ("a.xlf", "<xliff><file><trans-unit><source><![CDATA[a & b]]></source></trans-unit></file></xliff>", "a & b"),
    ("a.html", "<p>a<![CDATA[x <b>]]>b</p>", "ab"),
])  # fmt: skip
def test_cdata_is_text_in_xml_only(name: str, text: str, expected: str) -> None:
    [unit] = open_document(pack_docx(text, "<a/>") if name == "a.docx" else text.encode(), name).units
    assert unit.text == expected


def test_cdata_of_a_fragment_is_text() -> None:
    document = read_fragment("<b>x</b> <![CDATA[a & <b>]]>", "xml")
    assert [unit.text for unit in document.units] == ["x a & <b>"]
    assert document.write_text([MarkedText("a < b")]) == "a &lt; b"


def test_paragraphs_with_another_prefix_are_refused() -> None:
    namespace = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    text = f'<x:document xmlns:x="{namespace}"><x:p><x:r><x:t>a</x:t></x:r></x:p></x:document>'
    with pytest.raises(UserError, match="<x:p> instead of <w:p>"):
        open_document(pack_docx(text, "<a/>"), "a.docx")
    assert len(open_document(pack_docx(text.replace("x:", "w:").replace(":x=", ":w="), "<a/>"), "a.docx").units) == 1


def test_fields_over_several_paragraphs_are_left_alone() -> None:
    """A table of contents is a field that begins in its first paragraph."""
    field = '<w:r><w:fldChar w:fldCharType="{}"/></w:r>'
    text = "<w:r><w:t>{}</w:t></w:r>"
    first = field.format("begin") + field.format("separate") + text.format("one")
    inside = f"{field.format('begin')}<w:hyperlink>{field.format('end')}</w:hyperlink>{text.format('three')}"
    paragraphs = [first, text.format("two"), field.format("end"), inside]
    body = "".join(f"<w:p>{paragraph}</w:p>" for paragraph in paragraphs)
    document = open_document(pack_docx(f'<a xmlns:w="w">{body}</a>', "<a/>"), "a.docx")
    assert [unit.text for unit in document.units] == ["two"]
    assert document.skipped == 2


def test_subtitles_without_an_empty_line_between_them() -> None:
    text = (
        "1\n00:00:01,000 --> 00:00:02,000\na\n1984\n2\n00:00:03,000 --> 00:00:04,000\nb\n00:00:05.0 --> 00:00:06.0\nc"
    )
    document = open_document(text.encode(), "a.srt")
    assert [unit.text for unit in document.units] == ["a\n1984", "b", "c"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.txt", "a\x0cb\r\n\x0cc d\r\n", "A\x0cB\r\n\x0cC D\r\n"),
        ("a.txt", "a\x0c", "A\x0c"),
        ("a.txt", "\u3000a\x85b\u2028c\xa0", "\u3000A\x85B\u2028C\xa0"),
        ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\n\u3000a\n\xa0b\n", None),
        ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\n{\\pos(192, 230)}Hi\nyou\n", None),
        ("a.srt", "1\n00:00:01,000 --> 00:00:02,000\n\xa0\n\n2\n00:00:03,000 --> 00:00:04,000\na\n", None),
    ],
)
def test_white_space_and_tags_of_lines_are_kept(name: str, text: str, expected: str | None) -> None:
    document = open_document(text.encode(), name)
    written = document.write(
        [
            MarkedText(unit.text.upper() if name == "a.txt" else unit.text.replace("\n", " ") + "!", unit.markup)
            for unit in document.units
        ]
    )
    if expected is None:
        assert written.decode().replace("!", "").split() == text.split()
        assert "{\\pos(192, 230)}" in written.decode() or "{" not in text
    else:
        assert written.decode() == expected


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


@pytest.mark.parametrize("line_end", ["", "\n"])
def test_pairs_of_xliff_do_not_depend_on_line_ends(tmp_path: Path, line_end: str) -> None:
    """Not even where several units stand in one line, and others than segments have sources."""
    pair = "<source>{0}</source><target>{0}{0}</target>"
    parts = [
        '<xliff version="2.0"><file><unit>', "<segment>", pair.format("a"), "</segment>", "<ignorable>",
        pair.format("i"), "</ignorable>", "<segment>", pair.format("b"), "</segment>", "<matches>", pair.format("m"),
        '</matches></unit><unit translate="no"><segment>', pair.format("n"), "</segment></unit></file></xliff>",
    ]  # fmt: skip
    (tmp_path / "a.xlf").write_text(line_end.join(parts))
    assert list(read_pairs(CorpusSettings(xliff=str(tmp_path / "a.xlf")))) == [Pair("a", "aa"), Pair("b", "bb")]


def test_machine_translations_are_no_training_data(tmp_path: Path) -> None:
    unit = "<trans-unit{}><source>{}</source>{}</trans-unit>"
    text = unit.format("", "a", "") + unit.format(' translate="no"', "b", "<target>c</target>")
    text += unit.format("", "d", "<target>e</target>")
    document = open_document(f"<xliff><file><body>{text}</body></file></xliff>".encode(), "a.xlf")
    (tmp_path / "a.xlf").write_bytes(document.write([MarkedText("x")]))
    assert list(read_pairs(CorpusSettings(xliff=str(tmp_path / "a.xlf")))) == [Pair("d", "e")]
