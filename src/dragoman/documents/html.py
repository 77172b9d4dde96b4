"""HTML: the text of blocks with its inline tags, and attributes that are shown or read out."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Collection, Sequence
from html.entities import html5

from dragoman.documents.document import (
    Document,
    MarkedText,
    Splice,
    TextFile,
    UnitBuilder,
    UnitWriter,
    decode_file,
    render,
)
from dragoman.documents.markup_language import (
    COMPLETE_XML,
    DECLARED_ENCODING,
    ENTITY,
    MalformedXml,
    MarkupToken,
    add_escaped,
    check_xml,
    make_escaper,
    tokenize_markup,
)

# Some old entities, such as &copy, and all numbers do without a semicolon; in attributes only before other characters.
OLD_ENTITIES = "|".join(sorted((name for name in html5 if not name.endswith(";")), key=len, reverse=True))
HTML_ENTITY = re.compile(rf"{ENTITY.pattern}|&(?:#[0-9]{{1,8}}|#[xX][0-9a-fA-F]{{1,7}}|{OLD_ENTITIES})")
ATTRIBUTE_ENTITY = re.compile(rf"{HTML_ENTITY.pattern}(?![=0-9A-Za-z])")
META_CHARSET = re.compile(rb"<meta\s[^>]*?charset\s*=\s*[\"']?([\w.:\-]+)", re.IGNORECASE)
# What browsers read under these labels, as WHATWG's Encoding Standard says.
ENCODINGS = {
    **dict.fromkeys(("iso-8859-1", "iso8859-1", "iso_8859-1", "latin1", "l1", "ascii", "us-ascii"), "windows-1252"),
    **dict.fromkeys(("iso-8859-9", "iso8859-9", "latin5"), "windows-1254"),
    **dict.fromkeys(("iso-8859-11", "tis-620"), "cp874"),
    **dict.fromkeys(("gb2312", "gb_2312-80", "gbk", "x-gbk", "chinese"), "gb18030"),
    **dict.fromkeys(("shift_jis", "shift-jis", "sjis", "x-sjis", "ms_kanji", "windows-31j"), "cp932"),
    **dict.fromkeys(("euc-kr", "ks_c_5601-1987", "ksc5601", "korean"), "cp949"),
    **dict.fromkeys(("big5", "big5-hkscs", "x-x-big5"), "big5hkscs"),
    "iso-8859-8-i": "iso-8859-8",
}
UNDEFINED_BYTES = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")  # of windows-1252 for Python, control characters for browsers
INLINE = re.compile(
    "a|abbr|acronym|b|bdi|bdo|big|br|cite|del|dfn|em|font|i|img|ins|input|kbd|label|mark|q|ruby|rb|rp|rt|s|samp|small|"
    "span|strike|strong|sub|sup|time|tt|u|var|wbr|code|svg|math|data|output|meter|progress"
)
VOID = re.compile("area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr")
LINE_BREAK = re.compile(r"([\r\n]\s*)")
NO_NAME = re.compile("(?!)")  # XML has no void elements
RAW_TEXT = frozenset({"script", "style", "textarea", "title", "xmp"})
PROTECTED_ELEMENTS = re.compile("script|style|code|pre|textarea|xmp|svg|math|kbd|samp|var|tt|template")
SHOWN_ATTRIBUTES = ("alt", "title", "placeholder", "aria-label", "summary")
META_NAMES = {"description", "keywords", "og:title", "og:description", "twitter:title", "twitter:description"}
BUTTONS = {"button", "submit", "reset"}


def read_html(data: bytes, name: str, source_language: str = "", target_language: str = "") -> Document:
    """Return the blocks of an HTML page as units, and its attributes with text, such as alt and title."""
    head = data[:4096]
    declared = META_CHARSET.search(head) or DECLARED_ENCODING.match(head)
    encoding = declared[1].decode().lower() if declared else ""
    if not data.isascii() and (ENCODINGS.get(encoding) != "windows-1252" or not UNDEFINED_BYTES.search(data)):
        encoding = ENCODINGS.get(encoding, encoding)
    # What can be read as ASCII up to here is not in UTF-16: browsers take it as UTF-8.
    file = decode_file(data, name, "" if encoding.startswith(("utf-16", "utf-32")) else encoding)
    document = Document(file, source_language=source_language, target_language=target_language)
    document.errors = "xmlcharrefreplace"
    read_blocks(HtmlBlock(document), is_block=is_html_block)
    return document


def read_fragment(
    text: str,
    kind: str,
    ignored: Collection[str] = (),
    splitting: Collection[str] = (),
    *,
    keep_breaks: bool = False,
    is_strict: bool = True,
) -> Document:
    """Return a text with tags of kind "html" or "xml" as a document. The elements `ignored` are not translated.

    In XML every tag is inline, except those of the elements `splitting`. Names have their prefixes. A document with a
    declaration or a document type is translated inside of its root element. With `keep_breaks`, line breaks separate
    what is translated, so that they are kept. XML that is not well-formed is refused or, without `is_strict`, read as a
    text with tags: what is no complete tag or entity is text, and is written as it was.
    """
    document = Document(TextFile("the text", text))
    if kind == "xml":
        is_complete = COMPLETE_XML.match(text) is not None
        escaped = "&<>"
        try:
            check_xml(text, "the text", is_fragment=not is_complete)
        except MalformedXml:
            if is_strict:
                raise
            escaped = ""
        tags = [token.start for token in tokenize_markup(text) if token.name] if is_complete else []
        root = {*tags[:1], *tags[-1:]}

        def is_block(token: MarkupToken) -> bool:
            return token.start in root or token.written_name in splitting

        block = HtmlBlock(document, is_html=False, escaped=escaped)
        read_blocks(block, is_block=is_block, ignored=ignored, keep_breaks=keep_breaks)
    else:
        ignored = {name.lower() for name in ignored}
        read_blocks(HtmlBlock(document), is_block=is_html_block, ignored=ignored, keep_breaks=keep_breaks)
    return document


def is_html_block(token: MarkupToken) -> bool:
    return not INLINE.fullmatch(token.name.lower())


def read_blocks(
    block: HtmlBlock,
    *,
    is_block: Callable[[MarkupToken], bool],
    ignored: Collection[str] = (),
    keep_breaks: bool = False,
) -> None:
    """Add the texts between block tags to the units of a document, and the attributes that are shown."""
    document, is_html = block.document, block.is_html
    tokens = list(tokenize_markup(document.file.text, RAW_TEXT if is_html else frozenset()))
    if is_html and not document.file.text.lstrip().startswith("<?xml") and not document.file.name.endswith(".xhtml"):
        tokens = [open_element(token) for token in tokens]
    ends = match_elements(tokens, VOID if is_html else NO_NAME)
    index = 0
    while index < len(tokens):
        token = tokens[index]
        name = token.name.lower() if is_html else token.name
        if name == "html" and token.kind == "open":
            set_page_language(document, token)
        written_name = token.written_name.lower() if is_html else token.written_name
        protected = token.kind == "open" and (written_name in ignored or (is_html and is_protected(token)))
        end = ends.get(index, index) if protected else index
        if protected and is_html and end == index and not VOID.fullmatch(name):  # not closed: up to the next block
            while end + 1 < len(tokens) and not (tokens[end + 1].name and is_block(tokens[end + 1])):
                end += 1
        attributes = list_shown_attributes(token) if is_html and token.kind in ("open", "empty") else []
        attributes = [] if attributes and is_marked(token) else attributes
        units = [add_attribute(document, *span) for span in attributes]
        if token.kind == "text" and keep_breaks:
            block.add_lines(token)
        elif token.kind == "text" or (token.kind == "cdata" and not is_html):
            block.add_text(token)
        elif token.name and is_block(token):
            block.finish()
        elif token.name or block.is_open:  # a comment inside a paragraph is like a tag, and so is CDATA in HTML
            block.add_tag(token, tokens[end].end, units)
        index = end + 1
    block.finish()


def open_element(token: MarkupToken) -> MarkupToken:
    """Return a tag that ends with /> as an opening tag, which it is in HTML, unless it is void or a drawing."""
    name = token.name.lower()
    is_opening = token.kind == "empty" and not VOID.fullmatch(name) and name not in ("svg", "math")
    return token._replace(kind="open") if is_opening else token


def match_elements(tokens: Sequence[MarkupToken], void: re.Pattern[str]) -> dict[int, int]:
    """Return the index of the closing tag for that of each opening tag; elements with names in `void` have none."""
    ends: dict[int, int] = {}
    open_tags: dict[str, list[int]] = {}
    for index, token in enumerate(tokens):
        name = token.written_name.lower()
        if token.kind == "open" and not void.fullmatch(name):
            open_tags.setdefault(name, []).append(index)
        elif token.kind == "close" and open_tags.get(name):
            ends[open_tags[name].pop()] = index
    return ends


def is_protected(token: MarkupToken) -> bool:
    """Return whether an opening tag begins an element that is not translated."""
    if token.kind != "open":
        return False
    if PROTECTED_ELEMENTS.fullmatch(token.name.lower()):
        return True
    return is_marked(token)


def is_marked(token: MarkupToken) -> bool:
    """Return whether the page says that an element must not be translated."""
    if "translate" not in token.raw.lower():
        return False
    attributes = {name.lower(): value for name, (value, _, _) in token.attributes.items()}
    return attributes.get("translate", "").lower() == "no" or "notranslate" in attributes.get("class", "").split()


def set_page_language(document: Document, token: MarkupToken) -> None:
    """Take the source language from <html lang="...">, and set the target language there."""
    for attribute in ("lang", "xml:lang"):
        if attribute in token.attributes:
            value, start, end = token.attributes[attribute]
            document.source_language = document.source_language or value
            if document.target_language:
                document.extra_splices.append(Splice(start, end, document.target_language))


def list_shown_attributes(token: MarkupToken) -> list[tuple[str, int, int]]:
    """Return the values of attributes that are shown or read out, with their offsets."""
    if "=" not in token.raw:
        return []
    attributes = {name.lower(): value for name, value in token.attributes.items()}
    names, name = list(SHOWN_ATTRIBUTES), token.name.lower()
    if name == "meta" and (token.get("name") or token.get("property")).lower() in META_NAMES:
        names.append("content")
    if name == "input" and token.get("type").lower() in BUTTONS:
        names.append("value")
    if name in ("option", "optgroup", "track"):
        names.append("label")
    found = [attributes[attribute] for attribute in names if attribute in attributes]
    return sorted((value for value in found if any(map(str.isalpha, value[0]))), key=lambda value: value[1])


def add_attribute(document: Document, value: str, start: int, end: int) -> int:
    """Add the value of an attribute to the units of a document; return its index."""
    builder = UnitBuilder()
    add_escaped(builder, value, html.unescape, ATTRIBUTE_ENTITY)
    quote = "" if document.file.text[start - 1] in "\"'" else '"'
    escape = make_escaper(builder.spellings, always="&<\"'")

    def make_splices(translation: MarkedText) -> list[Splice]:
        return [Splice(start, end, quote + render(translation, escape) + quote)]

    return document.add(builder.build(note="attribute"), UnitWriter(make_splices))


class HtmlBlock:
    """The unit that is being read: the texts and inline tags between two block tags."""

    def __init__(self, document: Document, *, is_html: bool = True, escaped: str = "&<>") -> None:
        self.document, self.is_html, self.escaped = document, is_html, escaped
        self.reset()

    def reset(self) -> None:
        self.builder, self.start, self.end = UnitBuilder(collapse=self.is_html), -1, -1
        self.inner: dict[int, tuple[int, list[int]]] = {}

    @property
    def is_open(self) -> bool:
        return self.start >= 0

    def add_text(self, token: MarkupToken) -> None:
        text = token.raw
        if token.kind == "cdata":
            self.start, self.end = self.start if self.start >= 0 else token.start, token.end
            self.builder.add_text(text[9:-3])
            return
        blank = " \t\r\n\f" if self.is_html else ""  # no-break spaces are text
        if not blank or text.strip(blank):
            if self.start < 0:
                self.start = token.start + len(text) - len(text.lstrip(blank) if blank else text)
            self.end = token.start + len(text.rstrip(blank) if blank else text)
        add_escaped(self.builder, text, html.unescape, HTML_ENTITY if self.is_html else ENTITY)

    def add_lines(self, token: MarkupToken) -> None:
        """Add a text whose line breaks, with the white space after them, end units."""
        start = token.start
        for part in LINE_BREAK.split(token.raw):
            if part[:1] in ("\r", "\n"):
                self.finish()
            elif part:
                self.add_text(token._replace(raw=part, start=start, end=start + len(part)))
            start += len(part)

    def add_tag(self, token: MarkupToken, end: int, units: list[int]) -> None:
        """Add an inline tag, or an element that is not translated and ends at offset `end`."""
        if self.start < 0:
            self.start = token.start
        self.end = end
        name = token.name.lower()
        is_void = self.is_html and bool(VOID.fullmatch(name))
        is_whole = end > token.end or token.kind == "empty" or is_void
        kind = "close" if token.kind == "close" else "open" if token.kind == "open" and not is_whole else "standalone"
        number = self.builder.add_tag(self.document.file.text[token.start : end], kind, name)  # type: ignore[arg-type]
        if name == "br" and self.is_html:  # white space beside it means nothing
            self.builder.add_break()
        if units:
            self.inner[number] = (token.start, units)

    def finish(self) -> None:
        """Add the text since the last block tag to the units of the document, if it has letters."""
        if self.builder.has_letters():
            start, end, escape = self.start, self.end, make_escaper(self.builder.spellings, always=self.escaped)

            def make_splices(translation: MarkedText) -> list[Splice]:
                return [Splice(start, end, render(translation, escape))]

            self.document.add(self.builder.build(), UnitWriter(make_splices, inner=self.inner))
        if self.is_open or self.builder.length:
            self.reset()
