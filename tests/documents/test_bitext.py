"""Training pairs from files of translations: finished translations only, each with its own source."""

from __future__ import annotations

import pytest

from dragoman.documents.bitext import read_po_pairs, read_xliff_pairs
from dragoman.documents.document import MarkedText
from dragoman.documents.formats import open_document


def list_xliff_pairs(*units: str, version: str = "1.2") -> list[tuple[str, str]]:
    text = f'<xliff version="{version}" xmlns:sdl="s"><file>{"".join(units)}</file></xliff>'
    return list(read_xliff_pairs([text], "a.xlf"))


def make_segmented(target: str, definitions: str = "") -> str:
    segments = '<mrk mtype="seg" mid="1">One <g id="1">house</g>.</mrk> <mrk mtype="seg" mid="2">Two.</mrk>'
    definitions = f"<sdl:seg-defs>{definitions}</sdl:seg-defs>" if definitions else ""
    return (
        f"<trans-unit><source>One house. Two.</source><seg-source>{segments}</seg-source>"
        f"<target>{target}</target>{definitions}</trans-unit>"
    )


FULL = '<mrk mtype="seg" mid="1">Ein <mrk mtype="term">Haus</mrk>.</mrk> <mrk mtype="seg" mid="2">Zwei.</mrk>'
HALF = '<mrk mtype="seg" mid="1"/> <mrk mtype="seg" mid="2">Zwei.</mrk>'
SWAPPED = '<mrk mtype="seg" mid="2">Zwei.</mrk> <mrk mtype="seg" mid="1">Ein Haus.</mrk>'
BOTH = [("One house.", "Ein Haus."), ("Two.", "Zwei.")]


@pytest.mark.parametrize(
    ("unit", "pairs"),
    [
        (make_segmented(FULL), BOTH),
        (make_segmented(SWAPPED), BOTH),
        (make_segmented(HALF), BOTH[1:]),
        (make_segmented("Ein Haus. Zwei."), [("One house. Two.", "Ein Haus. Zwei.")]),
        (make_segmented(FULL, '<sdl:seg id="1" conf="Translated"/><sdl:seg id="2" conf="Draft"/>'), BOTH[:1]),
        (make_segmented(FULL, '<sdl:seg id="1" conf="Translated" origin="mt"/><sdl:seg id="2"/>'), BOTH[1:]),
        (make_segmented(FULL, '<sdl:seg id="1" conf="RejectedTranslation"/>'), BOTH[1:]),
    ],
)
def test_segments_are_pairs_of_their_own(unit: str, pairs: list[tuple[str, str]]) -> None:
    assert list_xliff_pairs(unit) == pairs


@pytest.mark.parametrize(
    ("attributes", "is_read"),
    [
        ("", True),
        ('state="translated"', True),
        ('state="final"', True),
        ('state="new"', False),
        ('state="needs-adaptation"', False),
        ('state="needs-review-l10n"', False),
        ('state="needs-review-translation"', False),
        ('state="translated" state-qualifier="mt-suggestion"', False),
    ],
)
def test_states_that_need_work_are_left_out(attributes: str, *, is_read: bool) -> None:
    unit = f"<trans-unit><source>One.</source><target {attributes}>Eins.</target></trans-unit>"
    assert list_xliff_pairs(unit) == [("One.", "Eins.")] * is_read


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('one<ph id="1">&lt;br/&gt;</ph>two', "one two"),
        ('one<x id="1"/>two', "one two"),
        ('one<x id="1"/><x id="2"/>two.', "one two."),
        ('one <x id="1"/> two<x id="2"/>.', "one two."),
        ('<bpt id="1">b</bpt>o<ept id="1">/b</ept>ne<g id="2"> two</g>', "one two"),
    ],
)
def test_a_code_between_two_words_is_a_space(content: str, text: str) -> None:
    unit = f"<trans-unit><source>{content}</source><target>x</target></trans-unit>"
    assert list_xliff_pairs(unit) == [(text, "x")]


@pytest.mark.parametrize(
    ("version", "unit"),
    [
        ("1.2", "<trans-unit><source>One.</source></trans-unit>"),
        ("1.2", make_segmented("")),
        ("2.0", '<unit><segment state="initial"><source>One.</source></segment></unit>'),
    ],
)
def test_our_own_translations_are_not_read_again(version: str, unit: str) -> None:
    file = f'<xliff version="{version}"><file>{unit}</file></xliff>'
    document = open_document(file.encode(), "a.xlf")
    written = document.write([MarkedText("Eins.") for _ in document.units]).decode()
    assert written.count("Eins.") == len(document.units)
    assert not [*read_xliff_pairs([written], "a.xlf")]
    assert not open_document(written.encode(), "a.xlf").units
    reviewed = written.replace('state="translated"', 'state="reviewed"').replace("needs-review-translation", "final")
    assert len([*read_xliff_pairs([reviewed], "a.xlf")]) == len(document.units)


def test_an_empty_message_with_a_context_is_no_header() -> None:
    header = 'msgid ""\nmsgstr "Plural-Forms: nplurals=2; plural=(n == 1);\\n"\n'  # the singular is form 1
    empty = 'msgctxt "a"\nmsgid ""\nmsgstr "Plural-Forms: nplurals=2; plural=(n != 1);\\n"\n'
    plural = 'msgid "one"\nmsgid_plural "many"\nmsgstr[0] "viele"\nmsgstr[1] "eins"\n'
    lines = "\n".join([header, empty, plural]).split("\n")
    assert [*read_po_pairs(lines, "a.po")] == [("many", "viele"), ("one", "eins")]
