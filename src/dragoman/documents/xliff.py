"""XLIFF 1.2 and 2.x: the target of each unit is filled in, and created if it is missing.

Units that must not be translated, and those with a translation, are left alone: `translate="no"`, `approved="yes"`, a
target with text whose state is not new. Where a unit of XLIFF 1.2 is divided into segments, in <seg-source>, each of
them is a unit of the document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dragoman.documents.document import (
    ICU_MESSAGE,
    Document,
    MarkedText,
    Splice,
    TextFile,
    UnitBuilder,
    UnitWriter,
    apply_splices,
    check_languages,
)
from dragoman.documents.markup_language import (
    MarkupToken,
    XmlDocument,
    close_empty,
    find_element_end,
    has_text,
    list_children,
    read_xml,
    render_xml,
    set_attribute,
    tokenize_markup,
)
from dragoman.documents.translation_codes import read_inline
from dragoman.errors import UserError

UNTRANSLATED_STATES = {"new", "needs-translation", "initial"}
MACHINE_STATE = "needs-review-translation"  # of our translations in XLIFF 1.2
MACHINE_SUBSTATE = "dragoman:machine"  # of those in XLIFF 2, which has no such state
UNIT_ELEMENTS = {"trans-unit", "segment"}


def read_xliff(data: bytes, name: str, source_language: str = "", target_language: str = "") -> Document:
    """Return the units of an XLIFF file: those of its trans-units or their segments (1.2), or its segments (2.x)."""
    file = read_xml(data, name)
    document, empty_targets = read_units(file, source_language, target_language)
    if empty_targets:
        expanded = file._replace(text=apply_splices(file.text, empty_targets))
        document, _ = read_units(expanded, source_language, target_language)
        document.original = file.text
    return document


def read_units(file: TextFile, source_language: str, target_language: str) -> tuple[XmlDocument, list[Splice]]:
    """Return the units of an XLIFF file, and what must be added to it first: targets with empty segments."""
    name, empty_targets = file.name, list[Splice]()
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
                read_languages(document, token, (source_language, target_language))
            translate = token.get("translate")
            forbids = forbidden[-1] if not translate else translate == "no"
            preserves = token.get("xml:space") == "preserve" or preserved[-1]
            unit_id = token.get("id") if token.name in ("unit", "trans-unit") else unit_id
            if token.kind == "open" and token.name in UNIT_ELEMENTS:
                end = find_element_end(tokens, index)
                unit = BilingualUnit(document, tokens, (index, end), unit_id, is_fixed=forbids, preserves=preserves)
                empty_targets += unit.add()
                index = end
            elif token.kind == "open":
                forbidden.append(forbids)
                preserved.append(preserves)
        elif token.kind == "close":
            forbidden.pop()
            preserved.pop()
        index += 1
    return document, empty_targets


def read_languages(document: Document, token: MarkupToken, requested: tuple[str, str]) -> None:
    """Take the languages from <file> (1.2) or <xliff> (2.x); if it has no target language, have it filled in."""
    is_first_version = token.name == "file"
    names = ("source-language", "target-language") if is_first_version else ("srcLang", "trgLang")
    source, target = map(token.get, names)
    check_languages(document.file.name, (source, target), requested)
    document.source_language = document.source_language or source
    if target:
        document.target_language = document.target_language or target
    elif document.target_language:
        tag = set_attribute(token, names[1], document.target_language)
        document.extra_splices.append(Splice(token.start, token.end, tag))


class BilingualUnit:
    """A trans-unit (1.2) or a segment (2.x) of an XLIFF file: a source and its target."""

    def __init__(
        self,
        document: Document,
        tokens: Sequence[MarkupToken],
        span: tuple[int, int],
        note: str,
        *,
        is_fixed: bool,
        preserves: bool,
    ) -> None:
        self.document, self.tokens, self.note, self.wraps = document, tokens, note, not preserves
        self.element = tokens[span[0]]
        children = {tokens[start].name: (start, end) for start, end in list_children(tokens, *span)}
        self.source = children.get("seg-source") or children.get("source")
        self.target = children.get("target")
        self.is_first_version = self.element.name == "trans-unit"
        state = tokens[self.target[0]].get("state") if self.target and self.is_first_version else ""
        state = state if self.is_first_version else self.element.get("state")
        # Tools for translators lock units (memoQ) or segments (Trados, whose <sdl:seg> describe them).
        is_locked = self.element.get("mq:locked") not in ("", "false", "no")
        self.locked = {
            token.get("id") for token in tokens[slice(*span)] if token.name == "seg" and token.get("locked") == "true"
        }
        self.is_fixed = is_fixed or is_locked or self.element.get("approved") == "yes" or state == "final"
        self.is_untranslated = state in UNTRANSLATED_STATES
        self.new_state = MACHINE_STATE if self.is_first_version else "translated"

    def add(self) -> list[Splice]:
        """Add the source or its segments to the units of the document, unless they are empty or have a translation.

        Return what must be added to the file before: a target with empty segments.
        """
        if not self.source or self.tokens[self.source[0]].kind == "empty":
            return []
        segments = self.find_segments(self.source)
        if not segments:
            self.add_source(self.source)
            return []
        target_segments = self.find_segments(self.target) if self.target else {}
        if not target_segments and not self.is_fixed and (self.is_untranslated or not self.has_text(self.target)):
            return [self.make_empty_target(self.source, segments)]
        count = len(self.document.units)
        for identifier, segment in segments.items():
            self.add_segment(
                segment, target_segments.get(identifier), is_fixed=self.is_fixed or identifier in self.locked
            )
        if self.target and len(self.document.units) > count:
            opening = self.tokens[self.target[0]]
            tag = set_attribute(opening, "state", self.new_state)
            self.document.extra_splices.append(Splice(opening.start, opening.end, tag))
        return []

    def find_segments(self, span: tuple[int, int]) -> dict[str, tuple[int, int]]:
        """Return the first and last tokens of the segments in <seg-source> or <target>, by their ids."""
        if self.tokens[span[0]].name == "source":
            return {}
        segments: dict[str, tuple[int, int]] = {}
        index = span[0] + 1
        while index < span[1]:
            token = self.tokens[index]
            if token.kind in ("open", "empty") and token.name == "mrk" and token.get("mtype") == "seg":
                end = find_element_end(self.tokens, index)
                segments.setdefault(token.get("mid"), (index, end))
                index = end
            index += 1
        return segments

    def has_text(self, span: tuple[int, int] | None) -> bool:
        return bool(span and has_text(self.tokens[span[0] + 1 : span[1]]))

    def read_content(self, span: tuple[int, int]) -> UnitBuilder:
        return read_inline(self.tokens[span[0] + 1 : span[1]], self.document.file.text)

    def make_empty_target(self, source: tuple[int, int], segments: Mapping[str, tuple[int, int]]) -> Splice:
        """Return the splice that makes a target with the segments of the source, but without their texts."""
        pieces, index = list[str](), source[0] + 1
        for first, last in sorted(span for span in segments.values() if self.read_content(span).text.strip()):
            pieces += [token.raw for token in self.tokens[index : first + 1]]
            index = max(last, first + 1)
        pieces += [token.raw for token in self.tokens[index : source[1]]]
        return self.make_target(source, "".join(pieces), "")

    def make_target(self, source: tuple[int, int], inner: str, state: str) -> Splice:
        """Return the splice that fills the target, or adds one after the source."""
        attributes = f' state="{state}"' if state else ""
        if self.target is None:
            first, last = self.tokens[source[0]], self.tokens[source[1]]
            before = self.tokens[source[0] - 1].raw
            indent = before if before.isspace() else ""
            element = first.raw[1 : first.attribute_start - first.start].removesuffix(first.name) + "target"
            return Splice(last.end, last.end, f"{indent}<{element}{attributes}>{inner}</{element}>")
        opening, closing = self.tokens[self.target[0]], self.tokens[self.target[1]]
        opening = opening._replace(raw=set_attribute(opening, "state", state) if state else opening.raw)
        if opening.kind == "empty":
            return Splice(opening.start, opening.end, close_empty(opening, inner))
        return Splice(opening.start, closing.start, opening.raw + inner)

    def add_source(self, source: tuple[int, int]) -> None:
        """Add the source to the units of the document."""
        builder = self.read_content(source)
        if not builder.text.strip():
            return
        is_done = self.has_text(self.target) and not self.is_untranslated
        if self.is_fixed or is_done or ICU_MESSAGE.search(builder.text):
            self.document.skipped += 1
            return
        state = self.new_state if self.is_first_version else ""

        def make_splices(translation: MarkedText) -> list[Splice]:
            splice = self.make_target(source, render_xml(translation, builder.spellings), state)
            tag = set_attribute(self.element, "subState", MACHINE_SUBSTATE)
            tag = set_attribute(self.element._replace(raw=tag), "state", self.new_state)
            return [splice] if state else [Splice(self.element.start, self.element.end, tag), splice]

        self.document.add(builder.build(note=self.note, wraps=self.wraps), UnitWriter(make_splices, in_place=False))

    def add_segment(self, segment: tuple[int, int], target: tuple[int, int] | None, *, is_fixed: bool) -> None:
        """Add a segment of the source to the units of the document; its translation is written to `target`."""
        builder = self.read_content(segment)
        if not builder.text.strip():
            if target and target[1] - target[0] <= 1 and not is_fixed:  # it has no content: it gets the same tags
                self.document.extra_splices.append(
                    self.fill_segment(target, render_xml(builder.build().content, builder.spellings))
                )
            return
        is_done = self.has_text(target) and not self.is_untranslated
        if is_fixed or not target or is_done or ICU_MESSAGE.search(builder.text):
            self.document.skipped += 1
            return

        def make_splices(translation: MarkedText) -> list[Splice]:
            return [self.fill_segment(target, render_xml(translation, builder.spellings))]

        self.document.add(builder.build(note=self.note, wraps=self.wraps), UnitWriter(make_splices, in_place=False))

    def fill_segment(self, target: tuple[int, int], content: str) -> Splice:
        """Return the splice that gives a segment of the target a content."""
        opening, closing = self.tokens[target[0]], self.tokens[target[1]]
        if opening.kind == "empty":
            return Splice(opening.start, opening.end, close_empty(opening, content))
        return Splice(opening.end, closing.start, content)
