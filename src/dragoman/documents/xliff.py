"""XLIFF 1.2 and 2.x: the target of each unit is filled in, and created if it is missing.

Units that must not be translated, and those with a translation, are left alone: `translate="no"`, `approved="yes"`, a
target with text whose state is not new.
"""

from __future__ import annotations

from collections.abc import Sequence

from dragoman.documents.document import Document, MarkedText, Slot, Splice
from dragoman.documents.markup_language import (
    Token,
    XmlDocument,
    find_element_end,
    list_children,
    read_inline,
    read_xml,
    render_xml,
    set_attribute,
    tokenize_markup,
)
from dragoman.errors import UserError

UNTRANSLATED_STATES = {"new", "needs-translation", "initial"}
MACHINE_STATE = "needs-review-translation"  # of our translations in XLIFF 1.2
UNIT_ELEMENTS = {"trans-unit", "segment"}


def read_xliff(data: bytes, name: str, source_language: str = "", target_language: str = "") -> Document:
    """Return the units of an XLIFF file: those of its trans-units (1.2) or segments (2.x)."""
    file = read_xml(data, name)
    document = XmlDocument(file, source_language=source_language, target_language=target_language)
    tokens = list(tokenize_markup(file.text))
    if not any(token.name == "xliff" for token in tokens[:20]):
        raise UserError(f"{name} has no element <xliff>, so it is not XLIFF; rename it after its format")
    forbidden: list[bool] = [False]  # whether translation is forbidden, for each open element
    preserved, unit_id, index, language_element = [False], "", 0, "file"
    while index < len(tokens):
        token = tokens[index]
        if token.kind in ("open", "empty"):
            if token.name == "xliff":
                language_element = "xliff" if token.get("version").startswith("2") else "file"
            if token.name == language_element:
                read_languages(document, token)
            translate = token.get("translate")
            forbids = forbidden[-1] if not translate else translate == "no"
            preserves = token.get("xml:space") == "preserve" or preserved[-1]
            unit_id = token.get("id") if token.name in ("unit", "trans-unit") else unit_id
            if token.kind == "open" and token.name in UNIT_ELEMENTS:
                end = find_element_end(tokens, index)
                add_segment(document, tokens, (index, end), unit_id, is_fixed=forbids, preserves=preserves)
                index = end
            elif token.kind == "open":
                forbidden.append(forbids)
                preserved.append(preserves)
        elif token.kind == "close":
            forbidden.pop()
            preserved.pop()
        index += 1
    return document


def read_languages(document: Document, token: Token) -> None:
    """Take the languages from <file> (1.2) or <xliff> (2.x); if it has no target language, have it filled in."""
    is_first_version = token.name == "file"
    names = ("source-language", "target-language") if is_first_version else ("srcLang", "trgLang")
    source, target = map(token.get, names)
    document.source_language = document.source_language or source
    if target:
        document.target_language = document.target_language or target
    elif document.target_language:
        tag = set_attribute(token, names[1], document.target_language)
        document.settled.append(Splice(token.start, token.end, tag))


def add_segment(
    document: Document, tokens: Sequence[Token], span: tuple[int, int], note: str, *, is_fixed: bool, preserves: bool
) -> None:
    """Add a trans-unit or a segment to the units of a document, unless its source is empty or has a translation."""
    unit, text = tokens[span[0]], document.file.text
    children = {tokens[start].name: (start, end) for start, end in list_children(tokens, *span)}
    if "source" not in children or tokens[children["source"][0]].kind == "empty":
        return
    source = children.get("seg-source", children["source"])
    builder = read_inline(tokens[source[0] + 1 : source[1]], text)
    if not builder.text.strip():
        return
    target = children.get("target")
    is_first_version = unit.name == "trans-unit"
    state = tokens[target[0]].get("state") if target and is_first_version else unit.get("state")
    content = tokens[target[0] + 1 : target[1]] if target else ()
    has_text = any(token.kind == "cdata" or (token.kind == "text" and not token.raw.isspace()) for token in content)
    if is_fixed or unit.get("approved") == "yes" or state == "final" or (has_text and state not in UNTRANSLATED_STATES):
        document.skipped += 1
        return
    new_state = MACHINE_STATE if is_first_version else "translated"

    def make_splices(translation: MarkedText) -> list[Splice]:
        inner = render_xml(translation, builder.spellings)
        splices = [] if is_first_version else [Splice(unit.start, unit.end, set_attribute(unit, "state", new_state))]
        if target is None:
            first, last = tokens[source[0]], tokens[source[1]]
            indent = tokens[source[0] - 1].raw if tokens[source[0] - 1].raw.isspace() else ""
            element = first.raw[1 : first.attribute_start - first.start].removesuffix(first.name) + "target"
            element = element.replace("seg-target", "target")
            attributes = f' state="{new_state}"' if is_first_version else ""
            return [*splices, Splice(last.end, last.end, f"{indent}<{element}{attributes}>{inner}</{element}>")]
        opening, closing = tokens[target[0]], tokens[target[1]]
        tag = set_attribute(opening, "state", new_state) if is_first_version else opening.raw
        if opening.kind == "empty":
            element = opening.raw[1 : opening.attribute_start - opening.start]
            tag = tag[:-2].rstrip() + f">{inner}</{element}>"
            return [*splices, Splice(opening.start, opening.end, tag)]
        return [*splices, Splice(opening.start, closing.start, tag + inner)]

    document.add(builder.build(note=note, wraps=not preserves), Slot(make_splices, in_place=False))
