"""PO files of gettext: messages without a translation get one, in all plural forms.

The header, obsolete messages, fuzzy ones and those with a translation are left alone.
"""

from __future__ import annotations

import gettext
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from dragoman.documents.document import (
    ICU_MESSAGE,
    Document,
    MarkedText,
    Splice,
    Unit,
    UnitWriter,
    check_languages,
    decode_file,
)
from dragoman.errors import UserError
from dragoman.language_codes import find_code

CHARSET = re.compile(rb"Content-Type:[^\n\"]{0,200}?charset=([\w.:\-]+)", re.IGNORECASE)
DECLARED_CHARSET = re.compile(r"(Content-Type:[^\n\"]{0,200}?charset=)([\w.:\-]+)", re.IGNORECASE)
PLURAL_FORMS = re.compile(r"nplurals\s*=\s*(\d+)\s*;\s*plural\s*=\s*([^;\n]+)")
HEADER_LANGUAGE = re.compile(r"^Language:[ \t]*([\w@.\-]*)", re.MULTILINE)
EMPTY_LANGUAGE = re.compile(r'(?<="Language:)[ \t]*(?=\\n")')  # in a file
FUZZY_FLAG = re.compile(
    r"^#,[ \t]*fuzzy[ \t]*\r?\n|(?<=^#,)[ \t]*fuzzy[ \t]*,|,[ \t]*fuzzy(?=[ \t]*(?:,|\r?$))", re.MULTILINE
)
# How gettext names languages whose scripts or regions are other ones than usual, by our codes.
LOCALES = {"zh-Hans": "zh_CN", "zh-Hant": "zh_TW"}
MODIFIERS = {"Latn": "@latin", "Cyrl": "@cyrillic", "Deva": "@devanagari", "Arab": "@arabic"}
KEYWORD = re.compile(
    r'[ \t]*+(msgctxt|msgid_plural|msgid|msgstr)(?:(?<=msgstr)\[(\d{1,9})\])?[ \t]*+(?:\r?\n[ \t]*+)?(?=")'
)
QUOTED_STRING = re.compile(r'[ \t]*+"((?:[^"\\\r\n]|\\.)*+)"[ \t]*+(?:\r?\n|\r?\Z|(?="))')
ESCAPES_OF_PO = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
ESCAPE_SEQUENCE = re.compile(r"((?:\\(?:[0-7]{1,3}|x[0-9a-fA-F]{1,2}))++)|\\(.)")
# A line with escaped bytes, which is no comment, but may be of an obsolete message.
ESCAPED_LINE = re.compile(r"^(?!#(?![~|])).*\\[0-7x].*", re.MULTILINE)
ESCAPED_BYTE = re.compile(r"\\(?:x([0-9a-fA-F]+)|([0-7]+))")
MAX_LINE = 77  # characters of a line, as gettext writes them


@dataclass(slots=True)
class Field:
    """One string of a message, such as its msgstr, and its position in the file."""

    keyword: str
    number: int
    start: int  # of the first quotation mark
    end: int  # after the last one
    text: str
    line: int


@dataclass(slots=True)
class PoMessage:
    """A message of a PO file."""

    fields: list[Field] = field(default_factory=list)
    translations: list[Field] = field(default_factory=list)  # each msgstr, which is not among the fields
    keys: set[tuple[str, int]] = field(default_factory=set)  # keywords and numbers of all of them
    is_fuzzy: bool = False

    @property
    def is_header(self) -> bool:
        identifier = self.find("msgid")
        return identifier is not None and not identifier.text and not self.find("msgctxt")

    def find(self, keyword: str) -> Field | None:
        return next((entry for entry in self.fields if entry.keyword == keyword), None)


@dataclass(slots=True)
class PoDocument(Document):
    """The messages of a PO file without a translation."""

    def write(self, translations: Sequence[MarkedText | None]) -> bytes:
        """Return the file with the translations: in UTF-8, with a warning, if its encoding lacks a character."""
        text = self.write_text(translations)
        try:
            return self.file.mark + text.encode(self.file.encoding)
        except UnicodeEncodeError as error:
            character = error.object[error.start]
            number = next((i for i, each in enumerate(translations, 1) if each and character in each.text), 1)
            self.warnings[number] = f"the file is written in UTF-8, since {self.file.encoding} lacks {character!r}"
            text = ESCAPED_LINE.sub(self.convert_escapes, text)
            return DECLARED_CHARSET.sub(r"\1UTF-8", text, count=1).encode()

    def convert_escapes(self, line: re.Match[str]) -> str:
        """Return a line with its escaped bytes in UTF-8: in the old encoding they would be other characters."""

        def convert(match: re.Match[str]) -> str:
            text = "" if match[2] else replace_escape(match, self.file.encoding)
            new = text.encode()
            return match[0] if text.encode(self.file.encoding) == new else "".join(f"\\{byte:03o}" for byte in new)

        try:
            return ESCAPE_SEQUENCE.sub(convert, line[0])
        except UnicodeDecodeError:  # in an obsolete message, or of a character that is split over two strings
            encoding, shown = self.file.encoding, line[0].strip()[:80]
            raise UserError(
                f"{self.file.name} must be written in UTF-8, since {encoding} lacks a character of a translation, but "
                f"{shown} has escaped bytes that are not {encoding}; convert it with msgconv -t UTF-8"
            ) from None


def read_po(data: bytes, name: str, source_language: str = "", target_language: str = "") -> Document:
    """Return the messages of a PO file that have no translation."""
    declared = CHARSET.search(data[: 1 << 16])
    charset = declared[1].decode() if declared and declared[1] != b"CHARSET" else ""
    document = PoDocument(
        decode_file(data, name, charset), source_language=source_language, target_language=target_language
    )
    messages = parse_messages(document.file.text, name, document.file.encoding)
    count, singular = 2, 0  # number of plural forms, and the form of the number 1
    has_header = has_count = False
    for message in messages:
        identifier, translations = message.find("msgid"), message.translations
        if not identifier or not translations:
            continue
        if message.is_header:
            count, singular = read_plural_forms(translations[0].text, name)
            has_count = PLURAL_FORMS.search(translations[0].text) is not None
            language = HEADER_LANGUAGE.search(translations[0].text)
            named = language[1] if language else ""
            check_languages(name, ("", named), (source_language, target_language))
            document.target_language = document.target_language or named
            has_header = True
            fill_header(document, identifier.start, translations[0])
        elif (
            message.is_fuzzy
            or all(entry.text for entry in translations)
            or not identifier.text.strip()
            or ICU_MESSAGE.search(identifier.text)
        ):
            document.skipped += 1
        else:
            warning = ""
            if message.find("msgid_plural") and has_count and len(translations) != count:
                warning = f"{len(translations)} plural forms, but the header of the file names {count}"
            elif message.find("msgid_plural") and has_header and not has_count:
                warning = "plural forms, but the header of the file has no Plural-Forms of its language; fill them in"
            add_message(document, message, singular, warning)
    return document


def fill_header(document: Document, start: int, header: Field) -> None:
    """Have the encoding and the empty language of a template filled in, and its header no longer be fuzzy.

    The string of the msgid begins at `start`.
    """
    text = document.file.text
    splices = list[Splice]()
    charset = DECLARED_CHARSET.search(text, header.start, header.end)
    if charset and charset[2] == "CHARSET":
        splices.append(Splice(*charset.span(2), "UTF-8"))
    if document.target_language and (empty := EMPTY_LANGUAGE.search(text, header.start, header.end)):
        splices.append(Splice(*empty.span(), f" {name_locale(document.target_language)}"))
    flags = [match.span() for match in FUZZY_FLAG.finditer(text, 0, start)] if splices else []
    document.extra_splices += [*splices, *(Splice(*span, "") for span in flags)]


def name_locale(code: str) -> str:
    """Return a language code as gettext writes it: pt_BR, zh_CN or sr@latin."""
    code = find_code(code) or code
    language, _, rest = code.partition("-")
    return LOCALES.get(code) or f"{language}{MODIFIERS.get(rest) or (rest and f'_{rest}')}"


def parse_messages(text: str, name: str, encoding: str = "utf-8") -> list[PoMessage]:
    """Return the messages of a PO file in their order, without obsolete ones.

    `encoding` is that of the file, and of the bytes that it writes as numbers.
    """
    messages, position, line = [PoMessage()], 0, 1
    while position < len(text):
        end = text.find("\n", position) + 1 or len(text)
        row = text[position:end]
        match = KEYWORD.match(text, position)
        if match:
            if match[1] in ("msgid", "msgctxt") and messages[-1].translations:
                messages.append(PoMessage())
            position, line = parse_strings(messages[-1], match, text, line, name, encoding)
            continue
        if row.startswith("#"):
            if messages[-1].translations:
                messages.append(PoMessage())
            if row.startswith("#~") and not messages[-1].fields:
                messages[-1].is_fuzzy = False  # the flag before belongs to the obsolete message
            elif row.startswith("#,") and "fuzzy" in re.split(r"[,\s]+", row[2:]):
                messages[-1].is_fuzzy = True
        elif row.strip():
            raise UserError(f"{name} line {line} is not a comment, keyword or string of a PO file; correct it")
        position, line = end, line + 1
    if messages[-1].fields and not messages[-1].translations:
        line = messages[-1].fields[0].line
        raise UserError(f"{name} line {line} begins a message without a msgstr; add the msgstr, or remove the message")
    return messages


def parse_strings(
    message: PoMessage, match: re.Match[str], text: str, line: int, name: str, encoding: str
) -> tuple[int, int]:
    """Add a keyword and its strings to a message; return the position and the line after them."""
    position, first, strings, last = match.end(), line, [], match.end()
    line += match[0].count("\n")
    while string := QUOTED_STRING.match(text, position):
        strings.append(string[1])
        last = string.start() + string[0].rindex('"') + 1
        position, line = string.end(), line + string[0].count("\n")
    if not strings or (position < len(text) and text[position - 1] != "\n"):
        raise UserError(f"{name} line {line} has a string that does not end, or text after it; correct it")
    key = match[1], int(match[2] or 0)
    if key in message.keys:  # otherwise the translation of the next message would become that of this one
        keyword = match[0].strip()
        raise UserError(f"{name} line {first} has a second {keyword} in one message; add a msgstr before it")
    if match[1] == "msgstr" and not message.find("msgid"):
        raise UserError(f"{name} line {first} has a msgstr without a msgid; add the msgid before it")
    message.keys.add(key)
    try:
        value = ESCAPE_SEQUENCE.sub(lambda match: replace_escape(match, encoding), "".join(strings))
    except UnicodeDecodeError:
        raise UserError(f"{name} line {first} has escaped bytes that are not {encoding}; correct them") from None
    entry = Field(*key, match.end(), last, value, first)
    (message.translations if entry.keyword == "msgstr" else message.fields).append(entry)
    return position, line


def replace_escape(match: re.Match[str], encoding: str) -> str:
    """Return the character of an escape sequence, or the text of several that are bytes."""
    if match[2]:
        return ESCAPES_OF_PO.get(match[2], match[2])
    values = (int(byte[1], 16) if byte[1] else int(byte[2], 8) & 255 for byte in ESCAPED_BYTE.finditer(match[1]))
    return bytes(values).decode(encoding)


def read_plural_forms(header: str, name: str) -> tuple[int, int]:
    """Return the number of plural forms, and the form that the number 1 takes; -1 if it has none of its own."""
    match = PLURAL_FORMS.search(header)
    if not match:
        return 2, 0
    try:
        count, singular = int(match[1]), int(gettext.c2py(match[2])(1))
    except (ValueError, SyntaxError, OverflowError, ZeroDivisionError, RecursionError):
        raise UserError(
            f"{name} has Plural-Forms that cannot be computed: {match[2][:80]}; correct its header"
        ) from None
    return count, singular if count > 1 else -1


def add_message(document: Document, message: PoMessage, singular: int, warning: str) -> None:
    """Add a message to the units of a document, and its plural form as another unit: their forms that are empty.

    `singular` is the number of the plural form that has the translation of the singular; -1 if there is none.
    """
    identifier, plural, context = message.find("msgid"), message.find("msgid_plural"), message.find("msgctxt")
    assert identifier
    note = context.text if context else f"line {identifier.line}"
    translations = [entry for entry in message.translations if not entry.text]
    of_singular = [entry for entry in translations if not plural or entry.number == singular]
    of_plural = [entry for entry in translations if plural and entry.number != singular]
    for source, fields in ((identifier, of_singular), (plural, of_plural)):
        if source and fields and source.text.strip():
            unit = Unit(source.text, (), note, wraps=False, warning=warning)
            document.add(unit, make_message_writer(document, source, fields))


def make_message_writer(document: Document, source: Field, fields: list[Field]) -> UnitWriter:
    newline = "\r\n" if "\r\n" in document.file.text[source.start : source.end + 2] else "\n"

    def make_splices(translation: MarkedText) -> list[Splice]:
        strings = format_po(translation.text, newline)
        return [Splice(entry.start, entry.end, strings) for entry in fields]

    return UnitWriter(make_splices, in_place=False)


PO_ESCAPES = str.maketrans({'"': r"\"", "\\": r"\\", **{char: f"\\{key}" for key, char in ESCAPES_OF_PO.items()}})


def format_po(text: str, newline: str = "\n") -> str:
    """Return a text as strings of a PO file, on several lines if it has several or is long, as gettext writes it."""
    lines = [line.translate(PO_ESCAPES) for line in re.findall(r"[^\n]*\n|[^\n]+", text)]
    if len(lines) <= 1 and len(lines[0] if lines else "") <= MAX_LINE - len('msgstr ""'):
        return f'"{lines[0] if lines else ""}"'
    rows = [""]
    for line in lines:
        row = ""
        for word in re.findall(r"[^ ]* +|[^ ]+", line):
            if row and len(row) + len(word.rstrip()) > MAX_LINE - 2:
                rows.append(row)
                row = ""
            row += word
        rows += [row] if row else []
    return newline.join(f'"{row}"' for row in rows)
