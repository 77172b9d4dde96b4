"""Pairs of sources and translations from TMX, XLIFF and PO files, for training.

TMX and XLIFF files are parsed as they are read, so they may be of any size. Inline tags are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn
from xml.parsers import expat

from dragoman.documents.markup_language import CODES, is_same_language
from dragoman.documents.po import parse_messages, read_plural_forms
from dragoman.documents.xliff import MACHINE_STATE, UNIT_ELEMENTS, UNTRANSLATED_STATES
from dragoman.errors import UserError

# Of texts without a translation, and of those by a machine: it would learn its own mistakes.
REFUSED_STATES = UNTRANSLATED_STATES | {MACHINE_STATE}
Texts = list[tuple[str, str]]  # the texts of a unit: language, or source or target, and text


class UnitCollector:
    """Handles the events of an XML parser, and collects the texts of the units of TMX or XLIFF."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.units: list[Texts] = []  # complete ones that have not been read yet
        self.texts: Texts = []
        self.key = self.source_language = ""
        self.pieces: list[str] | None = None  # of the text that is being read
        self.ignored = 0  # number of open elements whose content is no text
        self.in_unit = self.is_refused = False
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
        if self.ignored or name in CODES or name == "alt-trans":
            self.ignored += 1
        elif name == "header":
            self.source_language = attributes.get("srclang", "")
        elif name == "tu" or name in UNIT_ELEMENTS:
            self.texts, self.in_unit = [], True
            self.is_refused = self.forbidden[-1] or attributes.get("state") in REFUSED_STATES
        elif name == "tuv":
            self.key = attributes.get("xml:lang") or attributes.get("lang", "")
        elif name in ("seg", "source", "target") and self.in_unit:
            self.key = self.key if name == "seg" else name
            self.pieces = []
            self.is_refused |= attributes.get("state") in REFUSED_STATES

    def end(self, element: str) -> None:
        name = element.rpartition(":")[2]
        self.forbidden.pop()
        if self.ignored:
            self.ignored -= 1
        elif name in ("seg", "source", "target") and self.pieces is not None:
            self.texts.append((self.key, " ".join("".join(self.pieces).split())))
            self.pieces = None
        elif name == "tu" or name in UNIT_ELEMENTS:
            if not self.is_refused:
                self.units.append(self.texts)
            self.texts, self.in_unit = [], False

    def add_text(self, text: str) -> None:
        if self.pieces is not None and not self.ignored:
            self.pieces.append(text)

    def read(self, lines: Iterable[str]) -> Iterator[Texts]:
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
        if not identifier.text:
            count, form = read_plural_forms(translations[0].text, name)
            singular = form if count > 1 else -1
            continue
        for translation in translations:
            is_singular = not plural or translation.number == singular
            source = identifier.text if is_singular or not plural else plural.text
            if source.strip() and translation.text.strip():
                yield " ".join(source.split()), " ".join(translation.text.split())
