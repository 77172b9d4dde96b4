"""Placeholders as inline tags, for models that translate or drop them: tags are placed by the alignment and never lost.

A unit is translated without its placeholders, which are put where their tags were placed:

    unit, placeholders = hide_placeholders(unit)  # "Hello %s." becomes "Hello ." with a tag
    content = restore_placeholders(translated.content, placeholders)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dragoman.documents.document import MarkedText, Markup, Unit
from dragoman.inference.postprocess import find_placeholders


def hide_placeholders(unit: Unit) -> tuple[Unit, dict[int, str]]:
    """Return the unit with tags in place of the placeholders of its text, and each placeholder by the id of its tag."""
    spans = find_placeholders(unit.text)
    first_id = max((tag.id for tag in unit.markup), default=-1) + 1
    placeholders = {first_id + index: unit.text[start:end] for index, (start, end) in enumerate(spans)}
    text, markup, tags = "", list[Markup](), iter([*unit.markup, None])
    tag, done = next(tags), 0
    for (start, end), (number, placeholder) in zip(spans, placeholders.items(), strict=True):
        while tag and tag.position <= start:
            markup.append(tag._replace(position=len(text) + tag.position - done))
            tag = next(tags)
        text += unit.text[done:start]
        markup.append(Markup(len(text), placeholder, id=number))
        while tag and tag.position < end:  # a tag within a placeholder follows it
            markup.append(tag._replace(position=len(text)))
            tag = next(tags)
        done = end
    while tag:
        markup.append(tag._replace(position=len(text) + tag.position - done))
        tag = next(tags)
    return replace(unit, text=text + unit.text[done:], markup=tuple(markup)), placeholders


def restore_placeholders(content: MarkedText, placeholders: Mapping[int, str]) -> MarkedText:
    """Return a translation with its placeholders as text again, where their tags were placed."""
    text, markup, done = "", list[Markup](), 0
    for tag in content.markup:
        text += content.text[done : tag.position]
        done = tag.position
        if tag.id in placeholders:
            text += placeholders[tag.id]
        else:
            markup.append(tag._replace(position=len(text)))
    return MarkedText(text + content.text[done:], tuple(markup))
