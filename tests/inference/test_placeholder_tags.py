"""Placeholders of documents are never lost: where a model drops them, the alignment places them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.documents.document import Markup, Unit
from dragoman.inference.document_translation import translate_document, translate_units
from dragoman.inference.placeholder_tags import hide_placeholders, restore_placeholders
from dragoman.inference.postprocess import count_placeholders, find_placeholders
from dragoman.inference.translator import Translator

PART = st.sampled_from(["ba", " ", "  ", "%s", "{name}", "%(n)d", "http://a.b/c", ", ", ".", "(", ")", "\n"])


@given(st.lists(PART, max_size=12).map("".join), st.lists(st.integers(0, 40), max_size=5))
def test_hidden_placeholders_come_back(text: str, positions: list[int]) -> None:
    """Without a translation in between, text and placeholders are as before, and tags within one follow it."""
    spans = find_placeholders(text)
    tags = [Markup(min(position, len(text)), "<br>", id=index) for index, position in enumerate(sorted(positions))]
    unit, placeholders = hide_placeholders(Unit(text, tuple(tags)))
    assert Counter(placeholders.values()) == count_placeholders(text)
    assert len({tag.id for tag in unit.markup}) == len(tags) + len(placeholders)

    def leave_span(position: int) -> int:
        return next((end for start, end in spans if start < position < end), position)

    content = restore_placeholders(unit.content, placeholders)
    assert content.text == text
    assert content.markup == tuple(tag._replace(position=leave_span(tag.position)) for tag in tags)


@pytest.mark.parametrize("text", ["ba {name} del.", "%s ba del.", "ba del (%d).", "ba http://a.b/c del. mun {x} ne."])
def test_no_placeholder_is_lost(translator: Translator, text: str) -> None:
    """The toy model has never seen a placeholder, and other units are translated as without them."""
    units = [Unit("ba del."), Unit(text), Unit("mun ne.")]
    translated = translate_units(translator, [units], translator.make_options())
    assert count_placeholders(translated[1].content.text) == count_placeholders(text)
    assert not translated[1].content.markup
    assert not [warning for warning in translated[1].warnings if "placeholders" in warning]
    alone = translate_units(translator, [[units[0], units[2]]], translator.make_options())
    assert [translated[0], translated[2]] == alone


def test_placeholders_are_escaped_as_the_file_requires(translator: Translator) -> None:
    page = b"<p>ba <b>mun</b> http://a.b/?c=d&amp;e=f del.</p>"
    result = translate_document(translator, page, "page.html")
    assert result.data.count(b"http://a.b/?c=d&amp;e=f") == result.data.count(b"<b>") == 1
