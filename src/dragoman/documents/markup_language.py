"""The tokens of XML and HTML with their offsets, attributes, entities, and the check that XML is harmless.

Entities are never declared nor fetched: a document with declarations of its own is refused.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn
from xml.parsers import expat

from dragoman.documents.document import Document, MarkedText, TextFile, UnitBuilder, decode_file, render
from dragoman.errors import UserError

# Linear on any text: every alternative is decided by its first characters, and nothing that failed is tried again.
MARKUP_TOKENS = r"""
      (?P<comment> <!--(?:EMPTY|.*?(?:-->|\Z)) )
    | (?P<cdata> <!\[CDATA\[.*?(?:\]\]>|\Z) )
    | (?P<instruction> <\?.*?(?:END|\Z) )
    | (?P<doctype> <!DECLARED(?:>|\Z) )
    | <(?P<close>/?)(?P<name>[^\s/>!?<&"'=][^\s/><"'=]*)(?P<attributes>ATTRIBUTES)>
    | (?P<text> [^<]+ | </?[^\s/>!?<&"'=]ATTRIBUTES | < )                            # a tag without an end is text
    """


def compile_tokens(*, comment: str, instruction_end: str, declared: str) -> re.Pattern[str]:
    """Return the pattern of a token, given a further comment, and the rest of what differs between XML and HTML."""
    # A value in quotes follows an equals sign; elsewhere HTML may have quotes that mean nothing.
    attributes = r"""(?:[^<>=]|=\s*+(?:"[^"]*"|'[^']*')?+)*+"""
    parts = {"EMPTY": comment, "END": instruction_end, "DECLARED": declared, "ATTRIBUTES": attributes}
    return re.compile(re.sub("|".join(parts), lambda match: parts[match[0]], MARKUP_TOKENS), re.VERBOSE | re.DOTALL)


XML_TOKEN = compile_tokens(comment="(?!)", instruction_end=r"\?>", declared="""(?:[^>"']|"[^"]*"|'[^']*')*+""")
HTML_TOKEN = compile_tokens(comment="-?>", instruction_end=r"\?>", declared="[^>]*")
# Behind the last ?> of HTML, a processing instruction ends like a tag.
LAST_HTML_TOKEN = compile_tokens(comment="-?>", instruction_end=">", declared="[^>]*")
SCRIPT_MARK = re.compile(r"<!--(?!-?>)|-->|</?script(?=[\s/>])", re.IGNORECASE)
ATTRIBUTE = re.compile(r"""([^\s"'<>/=]+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>][^\s>]*+)))?""")
ENTITY = re.compile(r"&(?:#[0-9]{1,8}|#[xX][0-9a-fA-F]{1,7}|[A-Za-z_][\w.\-]{0,40});")
SPACES = re.compile(r"[ \t\r\n]+")
# White space whose tabs and line ends may be written as numbers.
SPELLED_SPACES = re.compile(r"(?:[ \t\r\n]|&#(?:0{0,5}(?:9|1[03])|[xX]0{0,5}[9aAdD]);)+")
# The start of a document rather than of the content of an element.
COMPLETE_XML = re.compile(r"<\?xml\s|(?:\s|<!--.*?-->|<\?.*?\?>)*+<!DOCTYPE\s", re.DOTALL)
DECLARED_ENCODING = re.compile(rb"""^\s*<\?xml\s[^>]*?encoding\s*=\s*["']([A-Za-z0-9._:\-]+)["']""")
XML_ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'"}


class MarkupToken(NamedTuple):
    """A tag, a text or another token of a markup language; `name` is that of a tag, without its prefix."""

    kind: str  # text, cdata, comment, instruction, doctype, open, close, empty
    start: int
    end: int
    raw: str
    name: str = ""
    attribute_start: int = 0

    @property
    def written_name(self) -> str:
        """The name with its prefix."""
        return self.raw[1 + (self.kind == "close") : self.attribute_start - self.start]

    @property
    def attributes(self) -> dict[str, tuple[str, int, int]]:
        """The values of the attributes as the file writes them, with their start and end in the file."""
        found: dict[str, tuple[str, int, int]] = {}
        for match in ATTRIBUTE.finditer(self.raw, self.attribute_start - self.start, len(self.raw) - 1):
            group = next((group for group in (2, 3, 4) if match[group] is not None), 0)
            if group:
                start, end = match.span(group)
                found.setdefault(match[1], (match[group], self.start + start, self.start + end))
        return found

    def get(self, name: str) -> str:
        """Return the value of an attribute, without entities; "" if the tag does not have it."""
        value = self.attributes.get(name)
        return html.unescape(value[0]) if value else ""


def tokenize_markup(text: str, raw_elements: frozenset[str] = frozenset()) -> Iterator[MarkupToken]:
    """Yield the tokens of XML or, with `raw_elements`, HTML; together they are the text.

    The content of `raw_elements`, such as script, is one token of text.
    """
    position, last, pattern = 0, text.rfind("?>"), HTML_TOKEN if raw_elements else XML_TOKEN
    while match := pattern.match(text, position):
        kind, start, position, raw = match.lastgroup or "", match.start(), match.end(), match[0]
        if kind != "attributes":
            yield MarkupToken(kind, start, position, raw)
            continue
        kind = "close" if match["close"] else "empty" if raw.endswith("/>") else "open"
        name = match["name"].rpartition(":")[2]
        yield MarkupToken(kind, start, position, raw, name, match.end("name"))
        if raw_elements and kind == "open" and name.lower() in raw_elements:
            end = find_raw_end(text, position, name)
            if end > position:
                yield MarkupToken("text", position, end, text[position:end])
            position = end
        if raw_elements and position > last:
            pattern = LAST_HTML_TOKEN


def find_raw_end(text: str, position: int, name: str) -> int:
    """Return where the content of an element such as script ends, that begins at an offset."""
    if name.lower() != "script":
        closing = re.compile(rf"</{re.escape(name)}\b", re.IGNORECASE).search(text, position)
        return closing.start() if closing else len(text)
    depth = 0  # 1 in a comment, 2 in a script in a comment, whose end is not that of the element
    for mark in SCRIPT_MARK.finditer(text, position):
        if mark[0] == "-->":
            depth = 0
        elif mark[0] == "<!--":
            depth = max(depth, 1)
        elif mark[0][1] != "/":
            depth = 2 if depth else 0
        elif depth < 2:
            return mark.start()
        else:
            depth = 1
    return len(text)


@dataclass(slots=True)
class XmlDocument(Document):
    """The units of an XML file."""

    errors: str = "xmlcharrefreplace"
    original: str = ""  # the text of the file, if its reader has added elements that translations need

    def write_text(self, translations: Sequence[MarkedText | None]) -> str:
        """Return the text of the file with the translations; raise a UserError rather than write broken XML."""
        text = super(XmlDocument, self).write_text(translations)  # a class with slots is created twice
        if text == self.file.text:
            return self.original or text
        check_xml(text, f"the translated {self.file.name}")
        return text


def read_xml(data: bytes, name: str) -> TextFile:
    """Return the text of an XML file; raise a UserError if it is not well-formed or declares entities."""
    declared = DECLARED_ENCODING.match(data.removeprefix(b"\xef\xbb\xbf")[:400])
    guess = "utf-16" if data[:2] in (b"<\0", b"\0<") else ""
    file = decode_file(data, name, declared[1].decode() if declared else guess)
    check_xml(file.text, name)
    return file


class MalformedXml(UserError):
    """Raised for XML that is not well-formed."""


def check_xml(text: str, name: str, *, is_fragment: bool = False) -> None:
    """Raise a MalformedXml if XML is not well-formed, a UserError if it has declarations of its own: they can be bombs.

    A fragment is the content of an element.
    """
    root = "_" * (text.count("_") + 1)  # a name that is not in the text, which might close the element
    before, after = (f"<{root}>", f"</{root}>") if is_fragment else ("", "")
    parser = expat.ParserCreate("utf-8")

    def refuse(*_: object) -> NoReturn:
        raise UserError(f"{name} has declarations of its own (<!DOCTYPE ... [...]>), which are refused; remove them")

    def check_doctype(_name: str, _system: str | None, _public: str | None, has_declarations: bool) -> None:
        if has_declarations:
            refuse()

    parser.StartDoctypeDeclHandler = check_doctype
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(f"{before}{text}{after}".encode(), True)
    except expat.ExpatError as error:
        where = f"in line {error.lineno}, column {error.offset + 1 - len(before) * (error.lineno == 1)}"
        if is_fragment and parser.ErrorByteIndex >= len(f"{before}{text}".encode()):
            where = "at the end"
        reason = expat.ErrorString(error.code)
        raise MalformedXml(f"{name} is not well-formed XML: {reason} {where}; correct it") from None


def unescape_xml(raw: str) -> str:
    """Return the text of an XML text without entities; what only looks like a character reference stays."""

    def replace_entity(match: re.Match[str]) -> str:
        if match[0] in XML_ENTITIES:
            return XML_ENTITIES[match[0]]
        return html.unescape(match[0]) if match[0][1] == "#" else match[0]

    return ENTITY.sub(replace_entity, raw) if "&" in raw else raw


def add_escaped(
    builder: UnitBuilder, raw: str, unescape: Callable[[str], str], entity: re.Pattern[str] = ENTITY
) -> None:
    """Add a text with entities, and remember how it writes its characters. Unknown entities are tags.

    White space is remembered as a whole: a carriage return may be a number, or one with a line feed the end of a line.
    """
    position = 0
    for match in SPELLED_SPACES.finditer(raw) if "&#" in raw else ():
        if "&" in match[0]:
            builder.spellings.setdefault(unescape(match[0]), match[0])
    for match in entity.finditer(raw) if "&" in raw else ():
        builder.add_text(raw[position : match.start()])
        character = unescape(match[0])
        if character == match[0]:
            builder.add_tag(match[0])
        else:
            builder.add_text(character)
            if not character.isspace() or character == "\xa0":
                builder.spellings.setdefault(character, match[0].removesuffix(";") + ";")  # which HTML may lack
        position = match.end()
    builder.add_text(raw[position:])


# Characters that XML 1.0 does not allow, which a model may nevertheless produce.
FORBIDDEN_CHARACTER = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


def make_escaper(spellings: Mapping[str, str], *, always: str = "&<>") -> Callable[[str], str]:
    """Return a function that escapes text for XML or HTML, with the spellings of the source where it has them."""
    spaces = {key: value for key, value in spellings.items() if SPACES.fullmatch(key)}
    defaults = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"}
    table = {ord(key): defaults[key] for key in always}
    table |= {ord(key): value for key, value in spellings.items() if len(key) == 1 and key not in spaces}
    has_returns = any("\r" in key for key in spaces)

    def spell_spaces(match: re.Match[str]) -> str:
        # In other white space than that of the source, a return that ends no line is one that was a number.
        return spaces.get(match[0]) or (re.sub(r"\r(?!\n)", "&#13;", match[0]) if has_returns else match[0])

    def escape(text: str) -> str:
        text = FORBIDDEN_CHARACTER.sub("", text).translate(table)
        return SPACES.sub(spell_spaces, text) if spaces else text

    return escape


def render_xml(content: MarkedText, spellings: Mapping[str, str]) -> str:
    """Return a text with its tags as XML."""
    return render(content, make_escaper(spellings))


def find_element_end(tokens: Sequence[MarkupToken], start: int) -> int:
    """Return the index of the token that closes the element which begins at index `start`; `start` if it is empty."""
    depth, index = 0, start
    while True:
        depth += {"open": 1, "close": -1}.get(tokens[index].kind, 0)
        if not depth:
            return index
        index += 1


def has_text(tokens: Sequence[MarkupToken]) -> bool:
    """Return whether there is text other than white space."""
    return any(token.kind == "cdata" or (token.kind == "text" and not token.raw.isspace()) for token in tokens)


def close_empty(token: MarkupToken, content: str) -> str:
    """Return an empty element, such as <a/>, with a content."""
    return f"{token.raw[:-2].rstrip()}>{content}</{token.written_name}>"


def list_children(tokens: Sequence[MarkupToken], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last index of each child element of the element from index `start` to `end`."""
    index = start + 1
    while index < end:
        last = index
        if tokens[index].kind in ("open", "empty"):
            last = find_element_end(tokens, index)
            yield index, last
        index = last + 1


def set_attribute(token: MarkupToken, name: str, value: str) -> str:
    """Return a tag with an attribute set, and everything else as it is."""
    if name in token.attributes:
        _, start, end = token.attributes[name]
        return token.raw[: start - token.start] + value + token.raw[end - token.start :]
    position = token.attribute_start - token.start
    return f'{token.raw[:position]} {name}="{value}"{token.raw[position:]}'
