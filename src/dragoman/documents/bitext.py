"""Pairs of sources and translations from TMX, XLIFF and PO files, for training.

TMX and XLIFF files are parsed as they are read, so they may be of any size. Inline tags are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NoReturn
from xml.parsers import expat

from dragoman.documents.po import parse_messages, read_plural_forms
from dragoman.documents.translation_codes import CODES
from dragoman.documents.xliff import MACHINE_SUBSTATE, UNIT_ELEMENTS, UNTRANSLATED_STATES
from dragoman.errors import UserError
from dragoman.language_codes import is_same_language

# Of texts without a translation, and of those by a machine: it would learn its own mistakes.
REFUSED_STATE = re.compile(rf"{'|'.join(UNTRANSLATED_STATES)}|needs-.*")
MACHINE_QUALIFIERS = {"mt-suggestion", "leveraged-mt"}
# Of the segments of SDLXLIFF: not confirmed or rejected, and translated by a machine without a change.
REFUSED_CONFIRMATIONS = {"Draft", "RejectedTranslation", "RejectedSignOff"}
MACHINE_ORIGINS = {"mt", "nmt", "amt"}
SINGLE_CODES = {"ph", "x", "ut"}  # which may be line breaks or values, while others begin or end a format
CODE_MARK = "\0"  # in a text: a single code stood here
UnitTexts = list[tuple[str, str]]  # the texts of a unit: language, or source or target, and text


class UnitCollector:
    """Handles the events of an XML parser, and collects the texts of the units of TMX or XLIFF."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.units: list[UnitTexts] = []  # complete ones that have not been read yet
        self.texts: UnitTexts = []
        self.key = self.source_language = ""
        self.pieces: list[str] | None = None  # of the text that is being read
        # The segments of a unit of XLIFF 1.2: source or target and mid -> pieces.
        self.segments: dict[tuple[str, str], list[str]] = {}
        self.marks: list[list[str]] = []  # for each open <mrk>, the pieces of the segment that it is or stands in
        self.refused: set[str] = set()  # the segments that are not confirmed
        self.ignored = 0  # number of open elements whose content is no text
        self.in_unit = self.in_variant = self.is_refused = False
        self.forbidden = [False]  # whether translation is forbidden, for each open element
        self.parser = expat.ParserCreate("utf-8")
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self.start
        self.parser.EndElementHandler = self.end
        self.parser.CharacterDataHandler = self.add_text
        self.parser.EntityDeclHandler = self.refuse

    def refuse(self, *_: object) -> NoReturn:
        raise UserError(f"{self.name} declares entities of its own, which is refused; remove its declarations")

    def start(self, element: str, attributes: dict[str, str]) -> None:
        name = element.rpartition(":")[2]
        translate = attributes.get("translate")
        self.forbidden.append(self.forbidden[-1] if not translate else translate == "no")
        if name in SINGLE_CODES:
            self.add_text(CODE_MARK)
        if self.ignored or name in CODES or name == "alt-trans":
            self.ignored += 1
        elif name == "header":
            self.source_language = attributes.get("srclang", "")
        elif name == "tu" or name in UNIT_ELEMENTS:
            self.texts, self.segments, self.refused, self.in_unit = [], {}, set(), True
            self.is_refused = self.forbidden[-1] or is_unconfirmed(attributes)
        elif name == "tuv":
            self.key, self.in_variant = attributes.get("xml:lang") or attributes.get("lang", ""), True
        elif name == "seg" and not self.in_variant:  # <sdl:seg> of SDLXLIFF, which describes a segment
            if is_unconfirmed(attributes):
                self.refused.add(attributes.get("id", ""))
        elif name in TEXT_ELEMENTS and self.in_unit:
            self.key = self.key if name == "seg" else name.removeprefix("seg-")
            self.pieces, self.marks = [], []
            self.is_refused |= is_unconfirmed(attributes)
        elif name == "mrk" and self.pieces is not None:
            outer = self.marks[-1] if self.marks else []
            if attributes.get("mtype") == "seg":
                outer = self.segments.setdefault((self.key, attributes.get("mid", "")), [])
            self.marks.append(outer)

    def end(self, element: str) -> None:
        name = element.rpartition(":")[2]
        self.forbidden.pop()
        if self.ignored:
            self.ignored -= 1
        elif name == "mrk" and self.marks:
            self.marks.pop()
        elif name == "tuv":
            self.in_variant = False
        elif name in TEXT_ELEMENTS and self.pieces is not None:
            if name != "seg-source":  # the source again
                self.texts.append((self.key, join_pieces(self.pieces)))
            self.pieces = None
        elif name == "tu" or name in UNIT_ELEMENTS:
            if not self.is_refused:
                self.units += self.list_segments() or [self.texts]
            self.texts, self.in_unit = [], False

    def list_segments(self) -> list[UnitTexts]:
        """Return the texts of each segment of a unit; nothing if its target is not segmented."""
        if not any(side == "target" for side, _ in self.segments):
            return []
        identifiers = dict.fromkeys(mid for _, mid in self.segments if mid not in self.refused)
        return [
            [(side, join_pieces(self.segments.get((side, mid), []))) for side in ("source", "target")]
            for mid in identifiers
        ]

    def add_text(self, text: str) -> None:
        if self.pieces is not None and not self.ignored:
            self.pieces.append(text)
            if self.marks:
                self.marks[-1].append(text)

    def read(self, lines: Iterable[str]) -> Iterator[UnitTexts]:
        """Yield the texts of each unit as soon as its lines have been read."""
        try:
            for line in lines:
                self.parser.Parse(line.encode() + b"\n", False)
                yield from self.units
                self.units.clear()
            self.parser.Parse(b"", True)
        except expat.ExpatError as error:
            reason = expat.ErrorString(error.code)
            raise UserError(f"{self.name} is no well-formed XML: {reason} in line {error.lineno}; correct it") from None
        yield from self.units


TEXT_ELEMENTS = {"seg", "source", "seg-source", "target"}


def is_unconfirmed(attributes: dict[str, str]) -> bool:
    """Return whether a unit or a segment is marked as not translated, not reviewed, or translated by a machine."""
    return bool(
        REFUSED_STATE.fullmatch(attributes.get("state", ""))
        or attributes.get("state-qualifier") in MACHINE_QUALIFIERS
        or (attributes.get("subState") == MACHINE_SUBSTATE and attributes.get("state") == "translated")
        or attributes.get("conf") in REFUSED_CONFIRMATIONS
        or attributes.get("origin") in MACHINE_ORIGINS
    )


def join_pieces(pieces: list[str]) -> str:
    """Return a text with single spaces, and with one for a code between two words."""
    text = re.sub(rf"(?<=\w){CODE_MARK}+(?=\w)", " ", "".join(pieces)).replace(CODE_MARK, "")
    return " ".join(text.split())


def read_tmx_pairs(lines: Iterable[str], name: str, languages: tuple[str, str] = ("", "")) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a TMX file. `languages` can be left empty if the file has two."""
    collector = UnitCollector(name)
    source_language, target_language = languages
    for texts in collector.read(lines):
        header = collector.source_language
        source_language = source_language or (header if header != "*all*" else "") or (texts[0][0] if texts else "")
        others = [language for language, _ in texts if not is_same_language(language, source_language)]
        if not languages[1] and others:
            target_language = target_language or others[0]
            if more := [language for language in others if not is_same_language(language, target_language)]:
                raise UserError(
                    f"{name} has several languages besides {source_language}: {target_language}, {more[0]}; choose "
                    f"with languages: [{source_language}, {target_language}]"
                )
        source = next((text for language, text in texts if is_same_language(language, source_language)), "")
        target = next((text for language, text in texts if is_same_language(language, target_language)), "")
        if source and target:
            yield source, target


def read_xliff_pairs(lines: Iterable[str], name: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs of an XLIFF file.

    Units without a translation are left out, and those that need a review or must not be translated.
    """
    for texts in UnitCollector(name).read(lines):
        sides = dict(texts)
        if sides.get("source") and sides.get("target"):
            yield sides["source"], sides["target"]


def read_po_pairs(lines: Iterable[str], name: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a PO file; fuzzy messages and those without a translation are left out."""
    singular = 0
    for message in parse_messages("\n".join(lines), name):
        identifier, plural, translations = message.find("msgid"), message.find("msgid_plural"), message.translations
        if not identifier or not translations or message.is_fuzzy:
            continue
        if message.is_header:
            _, singular = read_plural_forms(translations[0].text, name)
            continue
        for translation in translations:
            is_singular = not plural or translation.number == singular
            source = identifier.text if is_singular or not plural else plural.text
            if source.strip() and translation.text.strip():
                yield " ".join(source.split()), " ".join(translation.text.split())
