"""Every format: a translation changes the translated text and nothing else."""

from __future__ import annotations

import io
import re
import runpy
import zipfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from document_files import GENERATORS, SENTENCE, WORD, GeneratedFile, pack_docx, translate_unit
from dragoman.documents.document import Document, MarkedText, Unit
from dragoman.documents.formats import DOCUMENT_FORMATS, find_format, open_document
from dragoman.documents.html import read_fragment
from dragoman.errors import UserError
from dragoman.inference.markup_projection import place_markup
from dragoman.inference.word_alignment import AlignedText, find_words


def open_generated(file: GeneratedFile) -> Document:
    return open_document(file.data, file.name)


MARKS = st.text(st.sampled_from("<>&;\"'`*_[]()#-|\n\\ a!/=1:,"), max_size=80)


def list_in_place(document: Document) -> list[MarkedText | None]:
    """Return the sources as translations, where translations replace them."""
    return [
        unit.content if writer.in_place else None for unit, writer in zip(document.units, document.writers, strict=True)
    ]


def read_members(data: bytes) -> list[tuple[object, ...]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [
            (m.filename, m.date_time, m.external_attr, m.compress_type, archive.read(m)) for m in archive.infolist()
        ]


def test_every_format_is_generated() -> None:
    assert set(GENERATORS) == set(DOCUMENT_FORMATS)


@pytest.mark.parametrize("name", DOCUMENT_FORMATS)
def test_identity(name: str) -> None:
    @settings(max_examples=200)
    @given(GENERATORS[name]())
    def check(file: GeneratedFile) -> None:
        document = open_generated(file)
        assert document.write([None] * len(document.units)) == file.data
        assert document.write(list_in_place(document)) == file.data
        assert find_format(file.data, file.name) is DOCUMENT_FORMATS[name]

    check()


@pytest.mark.parametrize("name", DOCUMENT_FORMATS)
def test_everything_but_the_text_keeps_its_bytes(name: str) -> None:
    @settings(max_examples=200)
    @given(GENERATORS[name]())
    def check(file: GeneratedFile) -> None:
        document = open_generated(file)
        translated = document.write([translate_unit(unit) for unit in document.units])
        if name == "docx":
            assert read_members(translated) == read_members(file.translated)
        else:
            assert translated == file.translated

    check()


MARKER = "\ue000"  # no file has it


def mark_unit(unit: Unit) -> MarkedText:
    """Translate a text by a marker behind its first letter, so that it is written anew."""
    position = next(i for i, letter in enumerate(unit.text) if letter.isalpha()) + 1
    markup = tuple(tag._replace(position=tag.position + (tag.position >= position)) for tag in unit.markup)
    return MarkedText(unit.text[:position] + MARKER + unit.text[position:], markup)


def list_texts(document: Document, data: bytes) -> list[str]:
    """Return the texts of a file: those of the XML in a DOCX file."""
    if not data.startswith(b"PK"):
        return [data.removeprefix(document.file.mark).decode(document.file.encoding)]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [archive.read(name).decode() for name in archive.namelist() if name.endswith(".xml")]


@pytest.mark.parametrize("name", DOCUMENT_FORMATS)
def test_a_marker_is_all_that_changes(name: str) -> None:
    """Every unit is written anew, and without the markers the file is what it was, byte for byte."""

    @settings(max_examples=200)
    @given(GENERATORS[name]())
    def check(file: GeneratedFile) -> None:
        document = open_generated(file)
        marked = list_texts(document, document.write([mark_unit(unit) for unit in document.units]))
        filled = document.write([unit.content for unit in document.units])
        assert [text.replace(MARKER, "") for text in marked] == list_texts(document, filled)
        assert sum(text.count(MARKER) for text in marked) >= len(document.units)
        if all(writer.in_place for writer in document.writers):
            assert filled == file.data

    check()


def reverse_words(unit: Unit) -> MarkedText:
    """Translate a text by the reverse order of its words, with a perfect alignment."""
    spans = find_words(unit.text, set())
    words, targets, length = [], [], 0
    for start, end in reversed(spans):
        words.append(unit.text[start:end])
        targets.append((length, length + end - start))
        length += end - start + 1
    return place_markup(unit, AlignedText(" ".join(words), spans, targets, np.eye(len(spans))[::-1]))[0]


def list_letters(content: Unit | MarkedText) -> list[str]:
    return [letter for letter in content.text if not letter.isspace() and letter != "*"]


def count_tags(content: Unit | MarkedText) -> Counter[str]:
    """Count the tags of each kind, without comments: before the first word they stand outside of the text."""
    return Counter(tag.kind for tag in content.markup if not tag.raw.startswith("<!--"))


@pytest.mark.parametrize("name", DOCUMENT_FORMATS)
def test_another_word_order_keeps_the_units(name: str) -> None:
    """A file is read again after its translation, with the translated units."""

    @settings(max_examples=200)
    @given(GENERATORS[name]())
    def check(file: GeneratedFile) -> None:
        document = open_generated(file)
        contents = [reverse_words(unit) for unit in document.units]
        again = open_document(document.write(contents), file.name)
        if all(writer.in_place for writer in document.writers):
            found, expected = map(list_letters, again.units), map(list_letters, contents)
            if name == "docx":  # where text boxes may change places, and spaces make another base format
                assert sorted(found) == sorted(expected)
            else:
                assert list(found) == list(expected)
                assert [count_tags(unit) for unit in again.units] == [count_tags(content) for content in contents]
        else:
            assert not again.units

    check()


FIELD = '<w:r><w:fldChar w:fldCharType="{}"/></w:r>'
DOCX_PAIRS = [
    (FIELD.format("begin") + "<w:r><w:instrText>REF x</w:instrText></w:r>" + FIELD.format("separate"),
     FIELD.format("end")),
    ("<w:sdt><w:sdtPr/><w:sdtEndPr/><w:sdtContent>", "</w:sdtContent></w:sdt>"),
    ("<w:smartTag><w:smartTagPr/>", "</w:smartTag>"),
    ('<w:customXml w:element="x"><w:customXmlPr/>', "</w:customXml>"),
    ("<w:hyperlink>", "</w:hyperlink>"),
]  # fmt: skip
DOCX_SINGLES = [
    "<w:r><w:tab/></w:r>", "<w:r><w:t>co</w:t><w:softHyphen/><w:t>op</w:t></w:r>", "<!-- c -->", "<?pi <a> > b?>",
    FIELD.format("begin") + "<w:r><w:instrText>PAGE</w:instrText></w:r>" + FIELD.format("end"),
]  # fmt: skip


@st.composite
def docx_structures(draw: st.DrawFn) -> str:
    """Return a paragraph with nested fields, content controls and links, and ranges that may overlap them."""
    runs = SENTENCE.map(lambda text: f"<w:r><w:t>{text} </w:t></w:r>")
    pairs = st.sampled_from(DOCX_PAIRS)
    content = st.recursive(
        st.lists(runs | st.sampled_from(DOCX_SINGLES), min_size=1, max_size=3),
        lambda inner: st.tuples(pairs, st.lists(inner, min_size=1, max_size=3)).map(
            lambda each: [each[0][0], *(piece for pieces in each[1] for piece in pieces), each[0][1]]
        ),
        max_leaves=6,
    )
    pieces = [piece for part in draw(st.lists(content, min_size=1, max_size=3)) for piece in part]
    for number in range(draw(st.integers(0, 3))):
        first, last = sorted((draw(st.integers(0, len(pieces))), draw(st.integers(0, len(pieces)))))
        kind = draw(st.sampled_from(["bookmark", "commentRange", "perm"]))
        pieces.insert(last, f'<w:{kind}End w:id="{number}"/>')
        pieces.insert(first, f'<w:{kind}Start w:id="{number}"/>')
    return f"<w:p><w:pPr/>{''.join(pieces)}<w:r><w:t>{draw(WORD)}</w:t></w:r></w:p>"


def check_structure(element: ElementTree.Element) -> None:
    """Check that every field is closed in its container, and that properties stand before the content."""
    children = [child for child in element if isinstance(child.tag, str)]
    for number, child in enumerate(children):
        if child.tag.endswith("Pr"):
            assert all(before.tag.endswith("Pr") for before in children[:number])
    fields: list[str | None] = []
    for child in children:
        for run in (part for part in child if child.tag == "{w}r" and part.tag == "{w}fldChar"):
            kind = run.get("{w}fldCharType")
            assert kind == "begin" or fields.pop() in (("begin",) if kind == "separate" else ("begin", "separate"))
            fields += [kind] if kind != "end" else []
        check_structure(child)
    assert not fields


@settings(max_examples=300)
@given(docx_structures())
def test_another_word_order_keeps_the_structure_of_a_paragraph(paragraph: str) -> None:
    """Fields, content controls and ranges are what they were, around other words."""
    document = open_document(pack_docx(f'<w:document xmlns:w="w">{paragraph}</w:document>', "<a/>"), "a.docx")
    [text] = [
        text
        for text in list_texts(document, document.write([reverse_words(unit) for unit in document.units]))
        if "w:document" in text
    ]
    root = ElementTree.fromstring(text)
    check_structure(root)
    names = [
        (element.tag.removesuffix("Start").removesuffix("End"), element.get("{w}id"), element.tag.endswith("Start"))
        for element in root.iter()
        if element.get("{w}id")
    ]
    starts: set[tuple[str, str | None]] = set()
    for name, identifier, is_start in names:
        assert ((name, identifier) in starts) != is_start
        starts.add((name, identifier))
    ignored = ("{w}r", "{w}t", "{w}softHyphen")
    tags = [element.tag for element in root.iter() if element.tag not in ignored]
    before = ElementTree.fromstring(f'<w:document xmlns:w="w">{paragraph}</w:document>')
    assert Counter(tags) == Counter(element.tag for element in before.iter() if element.tag not in ignored)
    assert text.count("<!-- c -->") == paragraph.count("<!-- c -->")
    assert text.count("<?pi <a> > b?>") == paragraph.count("<?pi <a> > b?>")


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ('a [b](http://x.org\n"title") c\n', ["a b c"]),
        ("a [b][some\nlabel] c\n\n[some label]: x\n", ["a b c"]),
        ("<details>\n<summary>x</summary>\n\na\n</details>\n\nb\n", ["a", "b"]),
        ("a\n<!-- x\n\ny -->\nb\n", ["a", "b"]),
        ("a\n<custom> b\n", ["a  b"]),
        ("> <div>\n> x\n>\n> a\n", ["a"]),
        ("> [!NOTE]\n> a\n", ["a"]),
        ("> a\n>> b\nc\n", ["a", "b c"]),
        ("Term\n: a\n: b\n", ["Term", "a", "b"]),
        ("a\n\n$$\nx = y\n$$\n\n$$z$$\n\nb $x_i$ c $$d$$ costs $5 or $6\n", ["a", "b  c  costs $5 or $6"]),
        ("> ```\n> x\n\na\n", ["a"]),
        ("> ```\n> x\n> ```\n> a\n", ["a"]),
        ("1. ```bash\n   x\n   ```\n\na\n\n```\nx\n```\n\nb\n", ["a", "b"]),
        ("- ~~~\n  x\n\n  y\n  ~~~\n\na\n", ["a"]),
        ("- $$\n  x\n  $$\n\na\n", ["a"]),
        ("- # a\n  b\n- > c\n  > d\n\n  e\n", ["a", "b", "c d", "e"]),
        ("1. a\n\n    > b\n    > c\n", ["a", "b c"]),
        ("!!! note\n    > a\n    > b\n\n    c\n\n        code\n", ["a b", "c"]),
        ("!!! note\n    ## a\n    b\n", ["a", "b"]),
        ("- a\n\n    <pre>\n    x  y\n    </pre>\n\n    b\n", ["a", "b"]),
        ("- a\n\n  <!-- x\n\n  y -->\n  b\n", ["a", "b"]),
        ("- a\n\n    - b\n\n        c\n\n            code\n\n    d\n\n        code\n", ["a", "b", "c", "d"]),
        ("1.\ta\n\n\t- b\n\n\t\tc\n", ["a", "b", "c"]),
        ("- [ ] a\n\n      code\n", ["a"]),
        ("- a\n# b\n\n    code\n", ["a", "b"]),
        ("- a\n***\n    code\n", ["a"]),
        ("- a\nb\n\n  c\n", ["a b", "c"]),
        ("- a | b\n  --|--\n  c | d\n", ["a", "b", "c", "d"]),
        ("> a\n\n>     code\n\n- >     - code\n", ["a"]),
        ("a\n====\n\n    code\n", ["a"]),
        ('=== "x"\n    a\n', ["a"]),
        ("/// note | x\na\n///\n\nb\n", ["a", "b"]),
        ("a\n{: .note }\n\n{:toc}\n", ["a"]),
        ("[^1]: a\n\n    b\n\n        code\n", ["a", "b"]),
        ("Term\n\n: a\n\n    b\n", ["Term", "a", "b"]),
        ("<div> <!-- x -->\ny\n</div>\n\na\n", ["a"]),
        ("a [b c][] d ![e][] f [g][]\n\n- x\n\n  [b  C]: y\n\n[e]: z\n", ["a  d  f [g][]", "x"]),
        (f"a ![b](data:image/png;base64,{'x' * 3000}) c\n", ["a b c"]),
        ("a [b](x_(y)_(z)) c\n", ["a b c"]),
        ("![](x) a ![](y) b [![](z)](w) c ![d](v) e ![]\n", [" a  b  c d e ![]"]),
    ],
)
def test_blocks_of_markdown(text: str, units: list[str]) -> None:
    document = open_document(text.encode(), "a.md")
    assert [unit.text for unit in document.units] == units
    marked = document.write([mark_unit(unit) for unit in document.units]).decode()
    without_quotes = str.maketrans("", "", MARKER + ">")  # the lines of a quote are joined
    assert marked.translate(without_quotes).split() == text.translate(without_quotes).split()


@pytest.mark.parametrize(
    ("text", "translation", "expected"),
    [
        ("&lt;script&gt; a\n", "<script> b", "&lt;script> b\n"),
        ("a &amp;copy; b\n", "b &copy; a", "b &amp;copy; a\n"),
        ("a ` b\n", "``` a", "\\``` a\n"),
        ("a\n", "$$ b", "\\$$ b\n"),
        ("a\n", ": b", "\\: b\n"),
        ("#a b\n", "# b", "\\# b\n"),
    ],
)
def test_text_of_markdown_stays_text(text: str, translation: str, expected: str) -> None:
    document = open_document(text.encode(), "a.md")
    assert document.write([MarkedText(translation)]).decode() == expected
    assert [unit.text for unit in open_document(expected.encode(), "b.md").units] == [translation]


def test_references_over_two_lines_stay_indented() -> None:
    text = "- a [b\n  c] d\n\n[b c]: x\n"
    document = open_document(text.encode(), "a.md")
    assert document.write([mark_unit(unit) for unit in document.units]).decode().replace(MARKER, "") == text


@pytest.mark.parametrize("line_break", ["  \n", "\\\n"])
def test_hard_line_breaks_at_the_ends_are_left_out(line_break: str) -> None:
    document = open_document(f"- a{line_break}  b\n".encode(), "a.md")
    [tag] = document.units[0].markup
    for position in (0, 3):
        assert document.write([MarkedText("b a", (tag._replace(position=position),))]) == b"- b a\n"
    assert document.write([MarkedText("b a", (tag._replace(position=1),))]) == f"- b{line_break}   a\n".encode()


SEGMENTED = """<xliff version="1.2"><file source-language="en" target-language="de"><body><trans-unit id="1">
 <source>a. b. c.</source><seg-source>{}<g id="1"> {}</g></seg-source>{}</trans-unit></body></file></xliff>"""
SEGMENTS = ('<mrk mtype="seg" mid="1">a.</mrk>', '<mrk mtype="seg" mid="2">b <x id="9"/>c.</mrk>')
MADE = '<target state="needs-review-translation"><mrk mtype="seg" mid="1">A.</mrk><g id="1"> <mrk mtype="seg" mid="2">'


@pytest.mark.parametrize(
    ("target", "units", "written"),
    [
        ("", 2, MADE + 'B <x id="9"/>C.</mrk></g></target>'),
        ("<target/>", 2, MADE + 'B <x id="9"/>C.</mrk></g></target>'),
        ('<target state="new">x</target>', 2, MADE + 'B <x id="9"/>C.</mrk></g></target>'),
        (
            '<target><mrk mtype="seg" mid="2"/> <mrk mtype="seg" mid="1"> </mrk></target>',
            2,
            '<target state="needs-review-translation"><mrk mtype="seg" mid="2">B <x id="9"/>C.</mrk> '
            '<mrk mtype="seg" mid="1">A.</mrk></target>',
        ),
        (
            '<target state="x"><mrk mtype="seg" mid="1">X</mrk><mrk mtype="seg" mid="2" ></mrk></target>',
            1,
            '<target state="needs-review-translation"><mrk mtype="seg" mid="1">X</mrk>'
            '<mrk mtype="seg" mid="2" >B <x id="9"/>C.</mrk></target>',
        ),
        ("<target>X</target>", 0, "<target>X</target>"),
        ('<target state="final"/>', 0, '<target state="final"/>'),
    ],
)
def test_segments_of_xliff_are_units(target: str, units: int, written: str) -> None:
    """Each translation stands in the segment with the same id, in a target that is made if it is missing."""
    text = SEGMENTED.format(*SEGMENTS, target)
    document = open_document(text.encode(), "a.xlf")
    assert (len(document.units), document.skipped) == (units, 2 - units)
    assert document.write([None] * units) == text.encode()
    upper = [MarkedText(unit.text.upper(), unit.markup) for unit in document.units]
    assert document.write(upper).decode() == SEGMENTED.format(*SEGMENTS, written)


@pytest.mark.parametrize(
    ("target", "written"),
    [
        ("", MADE + '<ph id="8">c</ph></mrk></g></target>'),
        (
            '<target><mrk mtype="seg" mid="1"/> <mrk mtype="seg" mid="2"/></target>',
            '<target state="needs-review-translation"><mrk mtype="seg" mid="1">A.</mrk> '
            '<mrk mtype="seg" mid="2"><ph id="8">c</ph></mrk></target>',
        ),
        (
            '<target><mrk mtype="seg" mid="1"/> <mrk mtype="seg" mid="2"><x id="7"/></mrk></target>',
            '<target state="needs-review-translation"><mrk mtype="seg" mid="1">A.</mrk> '
            '<mrk mtype="seg" mid="2"><x id="7"/></mrk></target>',
        ),
    ],
)
def test_segments_of_tags_are_copied(target: str, written: str) -> None:
    segments = SEGMENTS[0], '<mrk mtype="seg" mid="2"><ph id="8">c</ph></mrk>'
    text = SEGMENTED.format(*segments, target)
    document = open_document(text.encode(), "a.xlf")
    assert document.write([None]) == text.encode()
    assert document.write([MarkedText("A.")]).decode() == SEGMENTED.format(*segments, written)


@pytest.mark.parametrize(
    ("source", "text", "tags"),
    [
        (
            'a <sm id="1" translate="no"/>Keep<em startRef="1"/> b', "a  b",
            ['<sm id="1" translate="no"/>Keep<em startRef="1"/>'],
        ),
        ('a <sm id="1" translate="no"/>Keep <x/>it', "a ", ['<sm id="1" translate="no"/>Keep <x/>it']),
        ('a <sm id="1"/>b<em startRef="1"/> c', "a b c", ['<sm id="1"/>', '<em startRef="1"/>']),
    ],
)  # fmt: skip
def test_protected_ranges_of_xliff_are_tags(source: str, text: str, tags: list[str]) -> None:
    file = f'<xliff version="2.0"><file><unit><segment><source>{source}</source></segment></unit></file></xliff>'
    [unit] = open_document(file.encode(), "a.xlf").units
    assert (unit.text, [tag.raw for tag in unit.markup]) == (text, tags)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.xlf", '<xliff><file source-language="fr" target-language="es"></file></xliff>'),
        ("a.xlf", '<xliff version="2.0" srcLang="en" trgLang="es"></xliff>'),
        ("a.po", 'msgid ""\nmsgstr "Language: es\\n"\n'),
        ("a.tmx", '<tmx><tu><tuv xml:lang="fr"><seg>a</seg></tuv></tu></tmx>'),
    ],
)
def test_files_in_other_languages_are_refused(name: str, text: str) -> None:
    problem = "has no text in en" if name == "a.tmx" else r"e?s?, but the model translates en to de; choose with --from"
    with pytest.raises(UserError, match=rf"a\.\w+ .*{problem}"):
        open_document(text.encode(), name, source_language="en", target_language="de")
    for source, target in (("fr-CA", "es_MX"), ("", "")) if text.count("fr") else (("eng", "es-419"), ("", "es")):
        open_document(text.encode(), name, source_language=source, target_language=target or "es")


def test_units_of_tmx_in_other_languages_are_counted() -> None:
    """They are not translated, and an empty text of the target language is filled in."""
    variant = '<tuv xml:lang="{}"><seg>{}</seg></tuv>'
    text = f"<tmx><tu>{variant.format('fr', 'a')}</tu><tu>{variant.format('en', 'b')}<tuv xml:lang='de' /></tu></tmx>"
    document = open_document(text.encode(), "a.tmx", source_language="en", target_language="de")
    assert (len(document.units), document.skipped) == (1, 1)
    assert document.write([MarkedText("B")]).decode() == text.replace(
        "<tuv xml:lang='de' />", "<tuv xml:lang='de'><seg>B</seg></tuv>"
    )


@settings(max_examples=300)
@given(st.recursive(
    SENTENCE | st.sampled_from([" ", "\n  ", "<br/>", "<img a='b'/>", "&lt;", "<!-- c -->"]),
    lambda inner: st.lists(inner, max_size=4).map("".join)
    | st.tuples(st.sampled_from(["p", "br", "link", "x"]), inner).map(lambda pair: f"<{pair[0]}>{pair[1]}</{pair[0]}>"),
    max_leaves=12,
))  # fmt: skip
def test_names_and_white_space_of_xml_mean_nothing(text: str) -> None:
    """Tags named as in HTML are like others; a marker in every unit is all that changes."""
    document = read_fragment(text, "xml", splitting=["p"])
    assert document.write_text([mark_unit(unit) for unit in document.units]).replace(MARKER, "") == text
    plain = re.sub("br|link", "x", text)
    assert [unit.text for unit in document.units] == [
        unit.text for unit in read_fragment(plain, "xml", (), ["p"]).units
    ]


@pytest.mark.parametrize("name", DOCUMENT_FORMATS)
def test_damaged_files_are_read_or_refused(name: str) -> None:
    """A truncated or altered file gives a UserError, or a document that writes itself."""

    @settings(max_examples=100)
    @given(GENERATORS[name](), st.data())
    def check(file: GeneratedFile, data: st.DataObject) -> None:
        damaged = bytearray(file.data)
        position = data.draw(st.integers(0, len(damaged) - 1))
        if data.draw(st.booleans()):
            del damaged[position:]
        else:
            damaged[position] = data.draw(st.integers(0, 255))
        try:
            document = open_document(bytes(damaged), file.name)
            document.write([translate_unit(unit) for unit in document.units])
        except UserError:
            pass

    check()


@pytest.mark.parametrize("name", DOCUMENT_FORMATS)
def test_any_bytes_are_read_or_refused(name: str) -> None:
    @settings(max_examples=100)
    @given(
        st.binary(max_size=200) | st.text(st.sampled_from("<>&;\"'`*_[]()#-|\n\\ a!/=1:,"), max_size=80).map(str.encode)
    )
    def check(data: bytes) -> None:
        try:
            document = open_document(data, f"x{DOCUMENT_FORMATS[name].suffixes[0]}")
            assert document.write(list_in_place(document)) == data
            document.write([translate_unit(unit) for unit in document.units])
        except UserError:
            pass

    check()


def test_the_check_of_documents_sees_no_difference_in_translated_memories(tmp_path: Path) -> None:
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "check_documents.py"))
    variants = [f'<tuv xml:lang="{code}"><seg>One <ph>x</ph></seg></tuv>' for code in ("en", "de-DE")]
    memory = f'<tmx><header srclang="en"/><body><tu>{variants[0]}</tu><tu>{"".join(variants)}</tu></body></tmx>'
    (tmp_path / "a.tmx").write_text(memory)
    (tmp_path / "b.xlf").write_text(
        '<xliff version="2.0"><file><unit><segment><source>One</source></segment></unit></file></xliff>'
    )
    for path in tmp_path.iterdir():
        assert tool["check_document"](path)[1:] == (Counter(files=1, units=1, same=1), "")


def test_an_empty_docx_file_is_called_empty() -> None:
    with pytest.raises(UserError, match=r"a\.docx is empty"):
        open_document(b"", "a.docx")
