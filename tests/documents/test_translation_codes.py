"""Inline codes of XLIFF and TMX: those that belong together stay a pair, whatever they are called."""

from __future__ import annotations

import numpy as np
import pytest

from dragoman.documents.document import Unit, render
from dragoman.documents.formats import open_document
from dragoman.inference.document_translation import MOVED_WARNING, join_unit, split_unit
from dragoman.inference.markup_projection import place_markup
from dragoman.inference.word_alignment import AlignedText, find_words
from dragoman.types import Hypothesis


def read_unit(content: str, version: str = "1.2") -> Unit:
    unit = f"<trans-unit><source>{content}</source></trans-unit>"
    if version.startswith("2"):
        unit = f"<unit><segment><source>{content}</source></segment></unit>"
    [unit_read] = open_document(f'<xliff version="{version}"><file>{unit}</file></xliff>'.encode(), "a.xlf").units
    return unit_read


def reverse(unit: Unit) -> str:
    """Return the translation by the reverse order of the words."""
    spans = find_words(unit.text, set())
    words = [unit.text[start:end] for start, end in reversed(spans)]
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    targets = [(int(start), int(start) + len(word)) for start, word in zip(starts, words, strict=False)]
    content, _ = place_markup(unit, AlignedText(" ".join(words), spans, targets, np.eye(len(spans))[::-1]))
    return render(content, str)


PAIRS = {
    "angular": ('<x id="START_BOLD_TEXT"/>', '<x id="CLOSE_BOLD_TEXT"/>'),
    "angular, numbered": ('<x id="START_LINK_1"/>', '<x id="CLOSE_LINK"/>'),
    "angular, tag": (
        '<x id="START_TAG_SPAN" equiv-text="&lt;span class=&quot;a&quot;&gt;"/>',
        '<x id="CLOSE_TAG_SPAN" equiv-text="&lt;/span&gt;"/>',
    ),
    "equiv": ('<ph id="1" equiv="START_ITALIC_TEXT"/>', '<ph id="2" equiv="CLOSE_ITALIC_TEXT"/>'),
    "isolated, 1.2": ('<it id="1" pos="open">[</it>', '<it id="2" pos="close">]</it>'),
    "isolated, rid": ('<it id="1" rid="7" pos="open">[</it>', '<it id="2" rid="7" pos="close">]</it>'),
    "isolated, TMX": ('<it x="1" pos="begin">[</it>', '<it x="1" pos="end">]</it>'),
    "content": ('<ph id="1">&lt;b&gt;</ph>', '<ph id="2">&lt;/b&gt;</ph>'),
    "equiv-text": ('<x id="1" equiv-text="&lt;b&gt;"/>', '<x id="2" equiv-text="&lt;/b&gt;"/>'),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_codes_that_pair_by_their_meaning_stay_around_their_words(pair: str) -> None:
    opening, closing = PAIRS[pair]
    unit = read_unit(f"one {opening}two{closing} three")
    assert reverse(unit) == f"three {opening}two{closing} one"
    assert [tag.kind for tag in unit.markup] == ["open", "close"]


@pytest.mark.parametrize(
    "code",
    ['<ph id="1">&lt;br&gt;</ph>', '<x id="START_A"/>', '<it pos="open">a</it>', "<ph>{0}</ph>", '<x id="1"/>'],
)
def test_a_code_without_a_partner_stands_alone(code: str) -> None:
    assert [tag.kind for tag in read_unit(f"one {code} two").markup] == ["standalone"]


@pytest.mark.parametrize(
    ("first", "second", "warns"),
    [
        ('<x id="1"/>', '<x id="2"/>', True),
        ('<ph id="1">[</ph>', '<ph id="2">]</ph>', True),
        ("<ph>{0}</ph>", "<ph>{1}</ph>", False),
        ('<x id="INTERPOLATION"/>', '<x id="INTERPOLATION_1"/>', False),
    ],
)
def test_single_codes_in_another_order_are_warned_about(first: str, second: str, *, warns: bool) -> None:
    unit = read_unit(f"eins {first}zwei {second}drei")
    words = ["▁eins", "▁zwei", "▁drei"]
    hypothesis = Hypothesis("drei zwei eins", 0.0, words[::-1], np.eye(3)[::-1].tolist(), words, 0.0)
    translated = join_unit(unit, [(0, len(unit.text))], [hypothesis])
    assert (MOVED_WARNING in translated.warnings) == warns
    assert sorted(tag.raw for tag in translated.content.markup) == sorted([first, second])


@pytest.mark.parametrize(
    ("code", "is_break"),
    [
        ('<ph id="1">&lt;br/&gt;</ph>', True),
        ('<x id="LINE_BREAK" equiv-text="&lt;br /&gt;"/>', True),
        ('<x id="1" ctype="lb"/>', True),
        ('<ph id="0" equiv="LINE_BREAK" type="fmt"/>', True),
        ('<ph id="0" subType="xlf:lb" type="fmt"/>', True),
        ('<ph id="1">&lt;b&gt;</ph>', False),
        ('<x id="1"/>', False),
    ],
)
def test_a_line_break_separates_two_words(code: str, *, is_break: bool) -> None:
    unit = read_unit(f"one{code}two")
    assert split_unit(unit) == ([(0, 3), (3, 6)] if is_break else [(0, 6)])
