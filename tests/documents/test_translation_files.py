"""Files of translations: XLIFF, TMX and PO as tools for translators write and read them."""

from __future__ import annotations

import pytest

from dragoman.documents.bitext import read_tmx_pairs
from dragoman.documents.document import Document, MarkedText
from dragoman.documents.formats import open_document
from dragoman.errors import UserError


def open_text(text: str, name: str, source: str = "en", target: str = "de") -> Document:
    return open_document(text.encode(), name, source_language=source, target_language=target)


def translate(document: Document, text: str = "neu") -> str:
    return document.write([MarkedText(text) for _ in document.units]).decode()


def make_memory(*units: dict[str, str]) -> str:
    variants = ("".join(f'<tuv xml:lang="{code}"><seg>{text}</seg></tuv>' for code, text in u.items()) for u in units)
    return f'<tmx><header srclang="en"/><body>{"".join(f"<tu>{unit}</tu>" for unit in variants)}</body></tmx>'


def test_a_memory_is_filled_in_the_spelling_of_the_file() -> None:
    memory = make_memory({"en-US": "One", "de-DE": "Eins"}, {"en-US": "Two"}, {"en-US": "Three", "de-DE": "Drei"})
    document = open_text(memory, "a.tmx")
    assert (len(document.units), document.skipped) == (1, 2)
    assert '<tuv xml:lang="de-DE"><seg>neu</seg>' in translate(document)
    assert '<tuv xml:lang="de">' in translate(open_text(make_memory({"en": "One"}), "a.tmx"))


def test_a_memory_in_another_script_has_no_translation() -> None:
    memory = make_memory({"en": "One", "zh-CN": "一"})
    assert open_text(memory, "a.tmx", target="zh-Hans").skipped == 1
    document = open_text(memory, "a.tmx", target="zh-Hant")
    assert '<tuv xml:lang="zh-Hant"><seg>neu</seg>' in translate(document)
    assert [*read_tmx_pairs([memory], "a.tmx", ("en", "zh-Hans"))] == [("One", "一")]
    assert not [*read_tmx_pairs([memory], "a.tmx", ("en", "zh-Hant"))]


@pytest.mark.parametrize(
    ("named", "wanted", "is_read"),
    [("zh-CN", "zh-Hans", True), ("zh-CN", "zh-Hant", False), ("sr-Cyrl", "sr-Latn", False), ("de-AT", "de", True)],
)
def test_a_file_in_another_script_is_refused(named: str, wanted: str, *, is_read: bool) -> None:
    text = f'<xliff><file target-language="{named}"><trans-unit><source>a</source></trans-unit></file></xliff>'
    if is_read:
        assert open_text(text, "a.xlf", target=wanted).units
        return
    with pytest.raises(UserError, match=f"is from .*to {named}|is to {named}"):
        open_text(text, "a.xlf", target=wanted)


ICU = "{VAR_PLURAL, plural, =0 {just now} other {{n} minutes ago}}"


@pytest.mark.parametrize("message", [ICU, "Since {n,select, a {one} other {two}}", "{ n , selectordinal, one {#st}}"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.xlf", "<xliff><file><trans-unit><source>{}</source></trans-unit></file></xliff>"),
        (
            "a.xlf",
            '<xliff><file><trans-unit><source/><seg-source><mrk mtype="seg" mid="1">{}</mrk></seg-source>'
            '<target><mrk mtype="seg" mid="1"/></target></trans-unit></file></xliff>',
        ),
        ("b.xlf", '<xliff version="2.0"><file><unit><segment><source>{}</source></segment></unit></file></xliff>'),
        ("a.po", 'msgid "{}"\nmsgstr ""\n'),
        ("a.tmx", '<tmx><body><tu><tuv xml:lang="en"><seg>{}</seg></tuv></tu></body></tmx>'),
    ],
)
def test_messages_of_icu_are_left_alone(name: str, text: str, message: str) -> None:
    document = open_text(text.replace("{}", message), name)
    assert (len(document.units), document.skipped) == (0, 1)
    document = open_text(text.replace("{}", "A {name, number} or {a}"), name)
    assert (len(document.units), document.skipped) == (1, 0)


def test_locked_segments_stay_as_they_are() -> None:
    segments = "".join(f'<mrk mtype="seg" mid="{i}">{text}</mrk>' for i, text in enumerate(("One.", "Two.")))
    targets = '<mrk mtype="seg" mid="0"/><mrk mtype="seg" mid="1"/>'
    definitions = '<sdl:seg-defs><sdl:seg id="0" locked="true"/><sdl:seg id="1"/></sdl:seg-defs>'
    unit = f"<seg-source>{segments}</seg-source><target>{targets}</target>{definitions}"
    document = open_text(f'<xliff xmlns:sdl="s"><file><trans-unit>{unit}</trans-unit></file></xliff>', "a.sdlxliff")
    assert ([unit.text for unit in document.units], document.skipped) == (["Two."], 1)
    assert '<mrk mtype="seg" mid="0"/><mrk mtype="seg" mid="1">neu</mrk>' in translate(document)


@pytest.mark.parametrize(("value", "is_locked"), [("locked", True), ("true", True), ("false", False)])
def test_locked_units_of_memoq_stay_as_they_are(value: str, *, is_locked: bool) -> None:
    unit = f'<trans-unit mq:locked="{value}"><source>One.</source></trans-unit>'
    document = open_text(f'<xliff xmlns:mq="m"><file>{unit}</file></xliff>', "a.mqxliff")
    assert (len(document.units), document.skipped) == (1 - is_locked, is_locked)


TEMPLATE = """\
# SOME TITLE
#
#, fuzzy
msgid ""
msgstr ""
"Language: \\n"
"Content-Type: text/plain; charset=CHARSET\\n"
"Plural-Forms: nplurals=INTEGER; plural=EXPRESSION;\\n"

#, c-format, fuzzy
msgid "Old"
msgstr "Alt"

msgid "One"
msgstr ""

msgid "One file"
msgid_plural "%d files"
msgstr[0] ""
msgstr[1] ""
"""


def test_a_template_becomes_a_valid_file() -> None:
    document = open_text(TEMPLATE, "a.pot")
    written = translate(document)
    assert '"Language: de\\n"\n' in written
    assert "charset=UTF-8" in written
    assert "#\n#, fuzzy\nmsgid" not in written
    assert written.count("fuzzy") == 1  # of the message
    assert [bool(unit.warning) for unit in document.units] == [False, True, True]
    assert "Plural-Forms" in document.units[1].warning
    assert document.write([None] * 3) == TEMPLATE.encode()


@pytest.mark.parametrize(
    ("code", "locale"),
    [("de", "de"), ("pt-BR", "pt_BR"), ("zh-Hans", "zh_CN"), ("zh-Hant", "zh_TW"), ("sr-Latn", "sr@latin")],
)
@pytest.mark.parametrize("header", ["Language: ", 'Language:\\n"\n"A: b'])
def test_the_language_of_a_header_is_that_of_gettext(code: str, locale: str, header: str) -> None:
    text = f'#, fuzzy, x\nmsgid ""\nmsgstr ""\n"{header}\\n"\n\nmsgid "One"\nmsgstr ""\n'
    written = translate(open_text(text, "a.po", target=code))
    assert f"Language: {locale}\\n" in written
    assert written.startswith("#, x\nmsgid")
    assert open_text(written, "a.po", target=code).skipped == 1
    assert "Plural" not in str(open_text(text, "a.po").units[0].warning)


def test_a_header_with_a_language_stays() -> None:
    for header in ("Language: de", "Content-Type: text/plain; charset=UTF-8"):
        text = f'#, fuzzy\nmsgid ""\nmsgstr "{header}\\n"\n\nmsgid "One"\nmsgstr ""\n'
        assert translate(open_text(text, "a.po")) == text[:-3] + '"neu"\n'
