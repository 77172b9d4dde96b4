"""XML and HTML: what a parser sees after a translation is what it saw before, but for the translated text."""

from __future__ import annotations

import io
import re
import zipfile

import pytest

from document_files import pack_docx
from dragoman.documents.document import Document, MarkedText, Markup
from dragoman.documents.formats import open_document
from dragoman.documents.html import read_fragment
from dragoman.errors import UserError


def write_text(document: Document, translations: list[MarkedText]) -> str:
    """Return the text of a translated file: the XML of the body of a DOCX file."""
    data = document.write(list(translations))
    if not data.startswith(b"PK"):
        return data.decode()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("word/document.xml").decode()


def open_text(name: str, text: str) -> Document:
    if name == "fragment":
        return read_fragment(text, "xml")
    data = pack_docx(text, "<a/>") if name == "a.docx" else text.encode()
    return open_document(data, name, source_language="en", target_language="de")


FORMATS_OF_XML = {
    "a.xlf": "<xliff><file><trans-unit><source>{}</source></trans-unit></file></xliff>",
    "a.tmx": '<tmx><tu><tuv xml:lang="en"><seg>{}</seg></tuv></tu></tmx>',
    "a.docx": '<a xmlns:w="w"><w:p><w:r><w:t>{}</w:t></w:r></w:p></a>',
    "fragment": "<a>{}</a>",
}


@pytest.mark.parametrize(
    "source",
    [
        "ba.&#13;\nfo",
        "ba.&#xD;&#xA;fo",
        "ba.&#13;\r\nfo.\r\nra&#13;",
        "ba.&#10;fo.&#x0D;&#9; ra.\n&#010; ne.\tmun",
        "ba.\r\nfo",
        "ba&#13;\nfo<x/>&#13;\r\n<x/>ra",
    ],
)
@pytest.mark.parametrize("name", FORMATS_OF_XML)
def test_white_space_that_is_written_as_numbers_stays(name: str, source: str) -> None:
    """A parser makes a line feed of a return, or of one with a line feed, unless it is written as a number."""
    content = source.replace("<x/>", "</w:t><w:tab/><w:t>") if name == "a.docx" else source
    document = open_text(name, FORMATS_OF_XML[name].format(content))
    [unit] = document.units
    markup = tuple(tag._replace(position=tag.position + (tag.position > 0)) for tag in unit.markup)
    written = write_text(document, [MarkedText("|" + unit.text, markup)])
    assert re.sub("<[^>]+>", "", written).endswith("|" + source.replace("<x/>", ""))


def test_returns_of_another_order_stay_numbers() -> None:
    """White space that a translation has made anew keeps the returns that were numbers, and no others."""
    document = open_text("fragment", "<a>ba.\r\nfo&#13;</a>")
    [unit] = document.units
    [opening, closing] = unit.markup
    content = MarkedText("FO \r BA\r\n\r", (opening, closing._replace(position=10)))
    assert write_text(document, [content]) == "<a>FO &#13; BA\r\n&#13;</a>"


@pytest.mark.parametrize("name", ["a.html", "a.xhtml"])
def test_line_ends_of_attributes_stay_numbers(name: str) -> None:
    """In an attribute of XHTML, only a number is a line end: others are spaces to a parser."""
    page = '<p title="ba.&#10;fo&#13;&#9;ra&#xa;\n ne">mun</p>'
    document = open_text(name, page)
    written = write_text(document, [MarkedText(unit.text.upper(), unit.markup) for unit in document.units])
    assert written == '<p title="BA.&#10;FO&#13;&#9;RA&#xa;\n NE">MUN</p>'


def test_unknown_entities_of_docx_stay_entities() -> None:
    text = '<!DOCTYPE a SYSTEM "a.dtd"><a xmlns:w="w"><w:p><w:r><w:t>ba &x; fo &quot;</w:t></w:r></w:p></a>'
    document = open_text("a.docx", text)
    [unit] = document.units
    assert unit.markup == (Markup(3, "&x;"),)
    assert "BA &x; FO &quot;<" in write_text(document, [MarkedText(unit.text.upper(), unit.markup)])


CHANGE = '<w:rPrChange w:id="{}" w:author="A > B"><w:rPr>{}</w:rPr></w:rPrChange>'


@pytest.mark.parametrize("former", ["<w:b/>", ""])
@pytest.mark.parametrize(
    ("runs", "expected", "is_warned"),
    [
        (["<w:ins>", ("", "<w:t>a </w:t>"), "</w:ins>", ("1", "<w:t>b</w:t>")],
         ["<w:ins>", ("", "<w:t>A </w:t>"), "</w:ins>", ("1", "<w:t>B</w:t>")], False),
        ([("1", "<w:t>a b</w:t><w:tab/>")], [("1", "<w:t>A B</w:t>"), ("-", "<w:tab/>")], False),
        ([("1", "<w:tab/><w:t>a b</w:t>")], [("-", "<w:tab/>"), ("1", "<w:t>A B</w:t>")], False),
        ([("1", "<w:tab/>"), ("", "<w:t>a b</w:t>")], [("1", "<w:tab/>"), ("", "<w:t>A B</w:t>")], False),
        ([("1", "<w:t>a </w:t><w:tab/><w:t>b c</w:t>")],
         [("1", "<w:t>A </w:t>"), ("-", "<w:tab/>"), ("-", "<w:t>B C</w:t>")], True),
        ([("1", "<w:t>a </w:t>"), ("2", "<w:t>b c</w:t>"), ("1", "<w:t> d</w:t>")],
         [("1", "<w:t>A </w:t>"), ("2", "<w:t>B C</w:t>"), ("1", "<w:t> D</w:t>")], False),
    ],
)  # fmt: skip
def test_a_record_of_a_change_is_written_once(
    runs: list[str | tuple[str, str]], expected: list[str | tuple[str, str]], is_warned: bool, former: str
) -> None:
    """A run that is written in parts has its record in the first part with a text, and no run is empty."""

    def write_runs(runs: list[str | tuple[str, str]]) -> str:
        records = {number: CHANGE.format(number, former) for number in "12"} | {"-": ""}
        return "".join(
            run if isinstance(run, str)
            else f"<w:r>{run[0] and f'<w:rPr><w:i/>{records[run[0]]}</w:rPr>'}{run[1]}</w:r>"
            for run in runs
        )  # fmt: skip

    document = open_text("a.docx", f'<a xmlns:w="w"><w:p>{write_runs(runs)}</w:p></a>')
    [unit] = document.units
    written = write_text(document, [MarkedText(unit.text.upper(), unit.markup)])
    assert written.replace(' xml:space="preserve"', "") == f'<a xmlns:w="w"><w:p>{write_runs(expected)}</w:p></a>'
    assert bool(document.warnings) == is_warned


@pytest.mark.parametrize(
    ("kind", "text", "ignored", "expected"),
    [
        ("xml", '<k:i xmlns:k="u">ba</k:i> fo', ["k:i"], " fo"),
        ("xml", '<k:i xmlns:k="u">ba <i>fo</i> <l:i xmlns:l="u">ra</l:i></k:i>', ["i"], "ba  ra"),
        ("xml", "<I>ba</I> <i>fo</i>", ["I"], " fo"),
        ("html", "<B>ba</B> <b>fo</b> <i>ra</i>", ["B"], "  ra"),
        ("html", "<b>ba</b> <K:B>fo</K:B> <i>ra</i>", ["k:b"], "ba  ra"),
    ],
)
def test_names_of_ignored_elements_have_prefixes(kind: str, text: str, ignored: list[str], expected: str) -> None:
    """Names are compared as they are written; in HTML, case does not matter."""
    assert [unit.text for unit in read_fragment(text, kind, ignored).units] == [expected]


def test_names_of_splitting_elements_have_prefixes() -> None:
    text = '<k:p xmlns:k="u">ba <p>fo</p></k:p>'
    assert [unit.text for unit in read_fragment(text, "xml", splitting=["k:p"]).units] == ["ba fo"]
    assert [unit.text for unit in read_fragment(text, "xml", splitting=["p"]).units] == ["ba ", "fo"]


def test_no_element_of_xml_is_void() -> None:
    """Names such as link mean nothing in XML, and a space beside <br/> would be text."""
    [unit] = read_fragment("<link>ba</link><br/>fo <source>ra</source>", "xml", ignored=["source"]).units
    assert unit.text == "bafo "
    assert [(tag.raw, tag.kind) for tag in unit.markup] == [
        ("<link>", "open"), ("</link>", "close"), ("<br/>", "standalone"), ("<source>ra</source>", "standalone"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<?xml version="1.0"?><a>ba <b>del</b>.</a>', '<?xml version="1.0"?><a>x</a>'),
        ('<?xml version="1.0" encoding="latin-1"?>\n<!-- c -->\n<!DOCTYPE a>\n<a>ba ł</a>\n<?d e?>\n',
         '<?xml version="1.0" encoding="latin-1"?>\n<!-- c -->\n<!DOCTYPE a>\n<a>x</a>\n<?d e?>\n'),
        ('<!-- c --><!DOCTYPE a SYSTEM "<a>"> <a>ba <a>fo</a></a><!-- d -->',
         '<!-- c --><!DOCTYPE a SYSTEM "<a>"> <a>x</a><!-- d -->'),
        ('<?xml version="1.0"?><a/>', '<?xml version="1.0"?><a/>'),
        ("<!-- c --><?d e?> ba <a>fo</a> ra", "<!-- c --><?d e?>x"),
        ("<?xml-stylesheet e?><a>ba</a>", "<?xml-stylesheet e?>x"),
    ],
)  # fmt: skip
def test_xml_texts_are_documents_or_fragments(text: str, expected: str) -> None:
    """What stands outside of the root element of a document is in no unit, so it stays in its place."""
    document = read_fragment(text, "xml")
    assert document.write_text([MarkedText("x") for _ in document.units]) == expected


@pytest.mark.parametrize(
    ("text", "unit_text", "written"),
    [
        ("<b>ba</b> & fo", "ba & fo", "ba & fo"),
        ("ba<br>fo &amp; R&D", "bafo & R&D", "bafo &amp; R&amp;D"),
        ("ba < fo > ra <", "ba < fo > ra <", "ba < fo > ra <"),
        ("ba?a=1&copy=2 &copy;", "ba?a=1&copy=2 ©", "ba?a=1&copy=2 &copy;"),
        ("ba &unknown; </b>fo", "ba  fo", "ba  fo"),
        ('<?xml version="1.0"?><a>ba & fo</b>', "ba & fo", '<?xml version="1.0"?><a>ba & fo</b>'),
    ],
)
def test_malformed_xml_can_be_read_as_text_with_tags(text: str, unit_text: str, written: str) -> None:
    document = read_fragment(text, "xml", is_strict=False)
    [unit] = document.units
    assert unit.text == unit_text
    assert document.write_text([MarkedText(unit_text)]) == written
    assert document.write_text([unit.content]) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<b>ba</c>", "mismatched tag in line 1, column 8"),
        ("ba</text> fo", "mismatched tag in line 1, column 5"),
        ("ba</text><text>fo", "mismatched tag in line 1, column 5"),
        ("ba</_> fo</__>", "mismatched tag in line 1, column 5"),
        ("ba\n</b> fo", "mismatched tag in line 2, column 3"),
        ("ba\n<b>ba", "mismatched tag at the end"),
        ("ba &amp", r"not well-formed \(invalid token\) at the end"),
        ('<?xml version="1.0"?><a>ba</b>', "mismatched tag in line 1, column 29"),
        (' <?xml version="1.0"?><a>ba</a>', "XML or text declaration not at start of entity in line 1, column 2"),
        ('<?xml version="1.0"?><a>ba</a> fo', "junk after document element in line 1, column 32"),
        ('<?xml version="1.0"?>ba', "syntax error in line 1, column 22"),
        ('<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>', "has declarations of its own"),
    ],
)
def test_bad_xml_texts_are_refused_at_their_place(text: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"^the text .*{problem}"):
        read_fragment(text, "xml")


@pytest.mark.parametrize(
    ("label", "codec", "text"),
    [
        ("iso-8859-1", "cp1252", "“Quoted” – 5 €"),
        ("US-ASCII", "cp1252", "“Quoted” – 5 €"),
        ("latin1", "latin-1", "caf\xe9 \x81"),
        ("iso-8859-9", "cp1254", "“Iğdır”"),
        ("gb2312", "gb18030", "朱镕基 €"),
        ("shift_jis", "cp932", "①髙橋～"),
        ("euc-kr", "cp949", "똠방각하"),
        ("big5", "big5hkscs", "香港啫"),
        ("iso-8859-2", "iso-8859-2", "žluť"),
    ],
)
def test_encodings_of_html_are_those_of_browsers(label: str, codec: str, text: str) -> None:
    page = f'<meta charset="{label}"><p>{text}</p>'.encode(codec)
    document = open_document(page, "a.html")
    assert document.units[-1].text == text
    assert document.write([MarkedText(f"{unit.text}!") for unit in document.units]) == page.replace(b"</p>", b"!</p>")
