"""A document as units to translate, each with its inline tags, and the writing of translations into the same file.

A reader finds the units with their offsets in the text of the file, and a translation is spliced in at these offsets:
nothing else is parsed and written again, so everything but the translated text keeps its bytes.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from dragoman.errors import UserError
from dragoman.language_codes import is_same_language

MAX_DOCUMENT_BYTES = 256 << 20
# Encodings of text, by the names of their codecs: others, such as punycode, can take very long to decode.
TEXT_ENCODING = re.compile(
    r"utf-(?:8|16|32)(?:-[lb]e)?|ascii|iso8859-\d+|iso2022_\w+|cp\d+|mac-\w+|koi8-[rtu]|kz1048|ptcp154|tis-620|"
    r"gb2312|gbk|gb18030|hz|big5(?:hkscs)?|euc_\w+|shift_jisx?\w*|johab"
)
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
# A message of ICU, such as {count, plural, one {# file} other {# files}}: its text stands inside of its syntax.
ICU_MESSAGE = re.compile(r"\{\s*[\w.\-]{1,100}\s*,\s*(?:plural|select|selectordinal)\s*,")
Kind = Literal["open", "close", "standalone"]


class Markup(NamedTuple):
    """An inline tag before the character `position` of a text; tags at one position stand in the order of the tuple.

    `raw` is how the file writes it. `id` numbers the tags of a unit, and `partner` is the id of the other tag of a
    pair, or of the other end of a range, both of which stand alone. Tags with the same `sequence` must keep their
    order, as the ends of a range do.
    """

    position: int
    raw: str
    kind: Kind = "standalone"
    id: int = 0
    partner: int | None = None
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text without its inline tags, and these tags."""

    text: str
    markup: tuple[Markup, ...] = ()


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a document that is translated: a paragraph, a heading, a message, a subtitle."""

    text: str
    markup: tuple[Markup, ...] = ()
    note: str = ""  # what the file says about the unit, such as its id or context
    wraps: bool = True  # a line break in the text is like a space; otherwise it may separate sentences
    warning: str = ""  # what is wrong with the unit in the file

    @property
    def content(self) -> MarkedText:
        """The text of the unit with its tags, as a translation that changes nothing."""
        return MarkedText(self.text, self.markup)


class Splice(NamedTuple):
    """Text that replaces a part of the text of a file."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class UnitWriter:
    """How the translation of a unit is written.

    `inner` has, for tags that contain units of their own (such as the title of a link), the offset of the tag in the
    file and the indices of these units.
    """

    make_splices: Callable[[MarkedText], list[Splice]]
    in_place: bool = True  # the translation replaces the source, so a translation equal to it changes nothing
    inner: Mapping[int, tuple[int, list[int]]] = field(default_factory=dict)


class TextFile(NamedTuple):
    """The text of a file, and what is needed to write it with the same bytes."""

    name: str
    text: str
    encoding: str = "utf-8"
    mark: bytes = b""

    def encode(self, text: str, errors: str = "strict") -> bytes:
        try:
            return self.mark + text.encode(self.encoding, errors)
        except UnicodeEncodeError as error:
            character = error.object[error.start]
            raise UserError(
                f"{self.name} is written in {self.encoding}, which lacks {character!r}; convert it to UTF-8"
            ) from None


@dataclass(slots=True)
class Document:
    """The units of a file in their order; `write` returns the file with translations."""

    file: TextFile
    units: list[Unit] = field(default_factory=list)
    writers: list[UnitWriter] = field(default_factory=list)
    skipped: int = 0  # units that are not translated: they have a translation, or their translation is forbidden
    source_language: str = ""  # as far as the file or the caller says
    target_language: str = ""
    extra_splices: list[Splice] = field(default_factory=list)  # of a translated file, such as its language
    warnings: dict[int, str] = field(default_factory=dict)  # of `write`, by the number of a unit, from 1
    errors: str = "strict"  # "xmlcharrefreplace" for formats that can write any character in any encoding

    def add(self, unit: Unit, writer: UnitWriter) -> int:
        """Add a unit; return its index."""
        self.units.append(unit)
        self.writers.append(writer)
        return len(self.units) - 1

    def write(self, translations: Sequence[MarkedText | None]) -> bytes:
        """Return the file with one translation for each unit; None leaves a unit as it is."""
        return self.file.encode(self.write_text(translations), self.errors)

    def write_text(self, translations: Sequence[MarkedText | None]) -> str:
        """Return the text of the file with the translations."""
        changed = {
            index: translation
            for index, (unit, writer, translation) in enumerate(
                zip(self.units, self.writers, translations, strict=True)
            )
            if translation is not None and not (writer.in_place and translation == unit.content)
        }
        if not changed:
            return self.file.text
        embedded = {i for writer in self.writers for _, inner in writer.inner.values() for i in inner}
        outermost = (i for i in range(len(self.units)) if i not in embedded)
        splices = [splice for i in outermost for splice in self._make_splices(i, changed)]
        return apply_splices(self.file.text, [*splices, *self.extra_splices])

    def _make_splices(self, index: int, changed: Mapping[int, MarkedText]) -> list[Splice]:
        """Return the splices of a unit, with the translations of the units inside its tags."""
        writer = self.writers[index]
        if index not in changed:
            inside = (i for _, inner in writer.inner.values() for i in inner)
            return [splice for i in inside for splice in self._make_splices(i, changed)]
        content = changed[index]
        markup = list(content.markup)
        for number, tag in enumerate(markup):
            if tag.id in writer.inner:
                offset, inner = writer.inner[tag.id]
                splices = [splice for i in inner for splice in self._make_splices(i, changed)]
                moved = [Splice(start - offset, end - offset, text) for start, end, text in splices]
                markup[number] = tag._replace(raw=apply_splices(tag.raw, moved))
        return writer.make_splices(replace(content, markup=tuple(markup)))


def apply_splices(text: str, splices: Sequence[Splice]) -> str:
    """Return a text with parts replaced. The parts do not overlap."""
    pieces, position = [], 0
    for start, end, new in sorted(splices, key=lambda splice: splice[:2]):
        assert start >= position
        pieces += [text[position:start], new]
        position = end
    return "".join([*pieces, text[position:]])


def render(content: MarkedText, escape: Callable[[str], str]) -> str:
    """Return a text with its tags as a file writes it; `escape` is applied to the text between tags."""
    pieces, position = [], 0
    for tag in content.markup:
        pieces += [escape(content.text[position : tag.position]), tag.raw]
        position = tag.position
    return "".join([*pieces, escape(content.text[position:])])


class UnitBuilder:
    """Collects the text and the tags of a unit from left to right, and pairs opening with closing tags.

    With `collapse`, runs of white space become one space, and white space at the start is left out.
    """

    def __init__(self, *, collapse: bool = False) -> None:
        self.collapse = collapse
        self.pieces: list[str] = []
        self.length = 0
        self.ends_in_space = collapse
        self.markup: list[Markup] = []
        self.open: list[tuple[str, int]] = []  # key and id of opening tags that are not closed yet
        self.spellings: dict[str, str] = {}  # how the file writes characters: {"é": "&eacute;"}

    def add_text(self, text: str) -> None:
        if self.collapse:
            text = WHITE_SPACE.sub(" ", text)
            if self.ends_in_space:
                text = text.removeprefix(" ")
        if text:
            self.ends_in_space = self.collapse and text.endswith(" ")
            self.pieces.append(text)
            self.length += len(text)

    def add_tag(self, raw: str, kind: Kind = "standalone", key: str = "") -> int:
        """Add a tag and return its id. A closing tag is the partner of the last open one with the same key.

        With `collapse`, a pair with nothing inside, such as an icon or an image without a text, is one tag.
        """
        number = len(self.markup)
        tag = Markup(self.length, raw, id=number)
        if kind == "open":
            self.open.append((key, number))
        elif kind == "close":
            for index in range(len(self.open) - 1, max(-1, len(self.open) - 200), -1):
                if self.open[index][0] == key:
                    partner = self.open.pop(index)[1]
                    if self.collapse and partner == number - 1 and self.markup[partner].position == self.length:
                        self.markup[partner] = tag._replace(raw=self.markup[partner].raw + raw, id=partner)
                        self.ends_in_space = False
                        return partner
                    self.markup[partner] = self.markup[partner]._replace(kind="open", partner=number)
                    tag = tag._replace(kind="close", partner=partner)
                    break
        self.markup.append(tag)
        if kind == "standalone":
            self.ends_in_space = False  # an object between two spaces keeps both
        return number

    def join_range(self, start: int, end: int) -> None:
        """Make two tags the ends of a range. Unlike pairs, ranges may overlap."""
        self.markup[start] = self.markup[start]._replace(partner=end)
        self.markup[end] = self.markup[end]._replace(partner=start)
        self.keep_order((start, end))

    def keep_order(self, numbers: Sequence[int]) -> None:
        """Have tags, given by their ids, keep their order in the translation."""
        for number in numbers:
            self.markup[number] = self.markup[number]._replace(sequence=numbers[0])

    def add_break(self) -> None:
        """Separate the words on both sides of a line break, which is a tag."""
        self.add_text(" ")
        self.ends_in_space = self.collapse

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def has_letters(self) -> bool:
        return any(any(map(str.isalpha, piece)) for piece in self.pieces)

    def build(self, *, note: str = "", wraps: bool = True) -> Unit:
        """Return the unit; with `collapse`, white space at its end is left out."""
        text = self.text
        if self.collapse:  # a space before a tag is inside the unit
            text = text[: max(len(text.rstrip(" ")), self.markup[-1].position if self.markup else 0)]
        return Unit(text, tuple(self.markup), note, wraps)


class LanguageMismatch(UserError):
    """A file names other languages than requested. The message is for the command line; servers have other advice."""

    def __init__(self, name: str, named: tuple[str, str], requested: tuple[str, str]) -> None:
        found, wanted = (
            " ".join(f"{word} {code}" for word, code in zip(("from", "to"), pair, strict=True) if code)
            for pair in (named, requested)
        )
        self.problem = f"{name} is {found}, but would be translated {wanted}"
        model = " to ".join(filter(None, requested))
        advice = "choose with --from and --to, or another model"
        super().__init__(f"{name} is {found}, but the model translates {model}; {advice}")


def check_languages(name: str, named: tuple[str, str], requested: tuple[str, str]) -> None:
    """Raise a LanguageMismatch if a file names other languages or scripts than requested; de and de-DE are one."""
    if any(
        theirs and ours and not is_same_language(theirs, ours) for theirs, ours in zip(named, requested, strict=True)
    ):
        raise LanguageMismatch(name, named, requested)


WHITE_SPACE = re.compile(r"[ \t\r\n\f]+")  # as in HTML and XML: no-break spaces are not among them


def decode_file(data: bytes, name: str, declared: str = "") -> TextFile:
    """Decode a file by its byte order mark, else by the encoding that it declares, else as UTF-8."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise UserError(f"{name} has more than the {MAX_DOCUMENT_BYTES >> 20} MiB allowed; split it")
    mark = next((mark for mark in BYTE_ORDER_MARKS if data.startswith(mark)), b"")
    encoding = BYTE_ORDER_MARKS.get(mark) or declared.lower() or "utf-8"
    body = data.removeprefix(mark)
    try:
        codec = codecs.lookup(encoding).name
        if not TEXT_ENCODING.fullmatch(codec):
            raise LookupError
        if codec == "utf-16":  # without a mark, as XML does not allow it
            encoding = "utf-16-be" if data[:1] == b"\0" else "utf-16-le"
        text = body.decode(encoding)
        is_exact = text.encode(encoding) == body
    except LookupError:
        raise UserError(f"{name} declares the unknown encoding {encoding!r}; convert it to UTF-8") from None
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        hint = "save it again" if mark or declared else "convert it, e.g. with iconv -t UTF-8"
        raise UserError(f"{name} line {line} is not valid {encoding.upper()}; {hint}") from None
    except (UnicodeError, ValueError):
        raise UserError(f"{name} is not valid {encoding.upper()}; save it again") from None
    if not is_exact:  # encodings with shift states have several spellings of a text
        raise UserError(f"{name} is written in {encoding} in an unusual way; convert it to UTF-8")
    if "\0" in text:
        raise UserError(f"{name} has null characters, as UTF-16 read as {encoding.upper()} has; convert it to UTF-8")
    return TextFile(name, text, encoding, mark)
