"""Markdown: paragraphs, headings, list items and table cells, with emphasis, links and code as inline tags.

Code blocks, inline code, addresses, front matter, HTML and definitions of references are not translated.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from dragoman.documents.document import (
    Document,
    Kind,
    MarkedText,
    Markup,
    Splice,
    TextFile,
    UnitWriter,
    decode_file,
    render,
)
from dragoman.documents.markdown_inline import DESTINATION, TITLE, make_markdown_escaper, parse_inline

QUOTE = re.compile(r"[ \t]{0,3}>[ \t]?")
LIST_MARKER = re.compile(r"([ \t]*(?:[-*+]|\d{1,9}[.)])[ \t]+)(?:\[[ xX]\][ \t]+)?(?=\S)")
INDENT = re.compile(r"[ \t]*")
FENCE = re.compile(r"[ \t]*(`{3,}(?=[^`]*$)|~{3,})")
HEADING = re.compile(r"[ ]{0,3}#{1,6}[ \t]++")
UNDERLINE = re.compile(r"[ ]{0,3}(?:=+|-+)[ \t]*$")
RULE = re.compile(r"[ ]{0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$")
DELIMITER_ROW = re.compile(r"[ \t]*+\|?[ \t]*+:?-++:?[ \t]*+(?:\|[ \t]*+:?-++:?[ \t]*+)*+\|?[ \t]*+$")
CELL = re.compile(r"(?:[^|\\`]|\\.|`[^`]*`|`|\\$)+")
DEFINITION = re.compile(
    rf"""
    \[(?!\^)(?P<label>(?=\s*+[^\s\]])(?:[^\[\]\\]|\\.){{1,999}}+)\]:[ \t]*+\n?[ \t]*+
    {DESTINATION}
    (?:(?:[ \t]++\n?|\n)[ \t]*+{TITLE})?
    [ \t]*+(?:\n|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
FOOTNOTE = re.compile(r"[ ]{0,3}\[\^[^\]\s]+\]:[ \t]*")
NOTE = re.compile(r"[ \t]*(?:!!!|\?\?\?\+?|===)[ \t]+\S")  # with indented blocks
DIRECTIVE = re.compile(rf"{NOTE.pattern}|[ \t]*:{{3,}}|[ \t]*/{{3,}}|[ \t]*\{{[%:]|\[TOC\]")
# Tables and other blocks of Pandoc.
GRID_BORDER = re.compile(r"[ ]{0,3}\+(?:[-=:]+\+)+[ \t]*$")
DASHES = re.compile(r"[ ]*-{3,}[ \t]*$")  # above and below a table whose rows have several lines
DASH_GROUPS = re.compile(r"[ ]*-{2,}(?:[ ]+-{2,})+[ \t]*$")  # the columns of a table without bars
LINE_BLOCK = re.compile(r"\|[ ]+(?=\S)|\|[ \t]*$")
TEX_ENVIRONMENT = re.compile(r"[ ]{0,3}\\begin\{([^{}]+)\}")
TEX_LINE = re.compile(r"[ ]{0,3}\\[A-Za-z]{2,}")  # a paragraph that begins with a command, such as \newpage
MATH = re.compile(r"[ \t]*\$\$")
ALERT = re.compile(r"[ ]{0,3}\[!\w+\][ \t]*$")  # the first line of a quote, such as [!NOTE]
DESCRIPTION = re.compile(r"[ ]{0,3}:[ \t]+(?=\S)")  # of a term, in a definition list
OTHER_MARKUP = r"!--|\?|![A-Za-z]|(?-i:!\[CDATA\[)"  # what < begins besides a tag
HTML_BLOCK = re.compile(rf"[ ]{{0,3}}<(?:{OTHER_MARKUP}|/?[A-Za-z][\w\-]*(?:[\s/>]|$))")
# How HTML blocks begin that may have empty lines, and how they end; others end at an empty line.
HTML_ENDS = [
    (re.compile(r"[ ]*<(script|pre|style|textarea)\b", re.I), r"</{}>"),
    (re.compile(r"[ ]*<!--"), "-->"),
    (re.compile(r"[ ]*<\?"), "?>"),
    (re.compile(r"[ ]*<!\[CDATA\["), "]]>"),
    (re.compile(r"[ ]*<![A-Za-z]"), ">"),
]
# Tags that end a paragraph; others can stand at the beginning of one of its lines.
BLOCK_TAG_LINE = re.compile(
    rf"[ ]{{0,3}}<(?:{OTHER_MARKUP}|"
    r"/?(?:address|article|aside|base|basefont|blockquote|body|caption|center|col|colgroup|dd|details|"
    r"dialog|dir|div|dl|dt|fieldset|figcaption|figure|footer|form|frame|frameset|h[1-6]|head|header|hr|html|iframe|"
    r"legend|li|link|main|menu|menuitem|nav|noframes|ol|optgroup|option|p|param|pre|script|search|section|style|"
    r"summary|table|tbody|td|textarea|tfoot|th|thead|title|tr|track|ul)(?:[\s/>]|$))", re.I
)  # fmt: skip
INLINE_TAG_LINE = re.compile(
    r"[ ]{0,3}</?(?:a|abbr|b|br|code|em|i|img|kbd|mark|q|s|small|span|strong|sub|sup|u)\b", re.I
)
LINE_START = re.compile(r"[\r\n]+[ \t>]*")  # between lines of a paragraph
JOINED_WARNING = "tags that moved beside other characters may have become text"
BLOCK_WARNING = "tags that moved to the start of a line may have made it another block"
HARD_BREAK = re.compile(r"(?: {2,}|\\)[\r\n]")
# What would make a paragraph a heading, a list item, code or another block.
BLOCK_START = re.compile(
    r"(?:#{1,6}|[-+*:|]|=+|!!!|\?\?\?\+?|:{3,})(?=\s|$)|>|<[A-Za-z/!?]|`{3}|~{3}|\$\$|"
    rf"{RULE.pattern}|{UNDERLINE.pattern}"
)
# What would make it an ordered list or a definition with the character after it.
NUMBER_OR_LABEL = re.compile(r"\d{1,9}(?=[.)](?:\s|$))|\[(?:[^\[\]\\]|\\.){1,999}+\](?=:)", re.DOTALL)
MAX_CONTAINERS = 100  # quotes and list items inside each other; the marks of others are text


def read_markdown(data: bytes, name: str, source_language: str = "", target_language: str = "") -> Document:
    """Return the paragraphs, headings, list items and table cells of a Markdown file as units."""
    file = decode_file(data, name)
    document = Document(file, source_language=source_language, target_language=target_language)
    MarkdownReader(document).read()
    return document


class MarkdownReader:
    """Finds the blocks of a Markdown file line by line."""

    def __init__(self, document: Document) -> None:
        self.document, self.text = document, document.file.text
        self.lines = [match.span() for match in re.finditer(r"[^\r\n]*(?:\r\n|\n|\r|\Z)", self.text)]
        self.paragraph: list[tuple[int, int]] = []  # the parts of lines of the open paragraph
        self.texts: list[tuple[list[tuple[int, int]], bool]] = []  # the parts of lines of each text; is it a cell?
        self.labels: set[str] = set()  # of references, which may stand before their definition
        # The open quotes and list items, from the outside: 0 for a quote, and for what contains indented blocks, such
        # as a list item, the columns of this indentation.
        self.containers: list[int] = []
        self.missing: set[str] = set()  # ends of blocks that do not follow any more

    def read(self) -> None:
        index = self.skip_front_matter()
        while index < len(self.lines):
            index = self.read_block(index)
        self.finish()
        for spans, is_cell in self.texts:
            self.add_unit(spans, is_cell=is_cell)

    def get_line(self, index: int) -> str:
        start, end = self.lines[index]
        return self.text[start:end].rstrip("\r\n")

    def skip_front_matter(self) -> int:
        """Return the index of the first line after a block between two lines of --- or +++ at the start."""
        mark = self.get_line(0).rstrip()
        if mark in ("---", "+++"):
            for index in range(1, len(self.lines)):
                if self.get_line(index).rstrip() in (mark, "..."):
                    return index + 1
        return 0

    def read_block(self, index: int) -> int:
        """Read a line, or a block of several lines; return the index of the line after it."""
        line, start = self.get_line(index), self.lines[index][0]
        position, depth = self.match_containers(line)
        if not line[position:].strip():
            self.finish()
            return index + 1
        if not self.paragraph:
            del self.containers[depth:]
            if count_columns(line, position) >= 4:
                return index + 1  # a code block
        position, opened = find_containers(line, position, MAX_CONTAINERS - depth)
        if opened:
            self.close(depth)
            self.containers += opened
            depth = len(self.containers)
            if count_columns(line, position) >= 4:
                return index + 1
        rest = line[position:]
        if (last := self.find_pandoc_end(index, rest)) > index:
            self.paragraph = []
            self.close(depth)
            self.document.skipped += 1
            return last
        if opening := FENCE.match(rest):
            self.close(depth)
            return self.skip_fence(index, opening[1])
        if MATH.match(rest):
            self.close(depth)
            return self.skip_math(index)
        if (self.paragraph and UNDERLINE.match(rest)) or RULE.match(rest) or DIRECTIVE.match(rest):
            self.close(depth)
            if NOTE.match(rest):
                self.containers.append(count_columns(rest) + 4)
            return index + 1
        if (BLOCK_TAG_LINE if self.paragraph else HTML_BLOCK).match(rest) and not INLINE_TAG_LINE.match(rest):
            self.close(depth)
            return self.skip_html(index, rest)
        if self.containers[-1:] == [0] and ALERT.match(rest):
            self.close(depth)
            return index + 1
        if heading := HEADING.match(rest):
            self.close(depth)
            first, end = heading.end(), find_heading_end(rest, heading.end())
            self.texts.append(([(start + position + first, start + position + end)], False))
            return index + 1
        next_line = self.get_line(index + 1) if index + 1 < len(self.lines) else ""
        if "|" in rest and "|" in next_line and DELIMITER_ROW.match(next_line, self.match_containers(next_line)[0]):
            self.close(depth)
            return self.read_table(index, position)
        if not self.paragraph and (mark := LINE_BLOCK.match(rest)):
            return self.read_line_block(index, position + mark.end())
        position += len(rest) - len(rest.lstrip())
        if position < len(line):
            self.paragraph.append((start + position, start + len(line)))
        return index + 1

    def match_containers(self, line: str) -> tuple[int, int]:
        """Return the offset behind the marks and the indentation of the open containers, and how many have them."""
        position = 0
        for depth, width in enumerate(self.containers):
            if width:
                if count_columns(line, position) < width:
                    return position, depth
                position = skip_columns(line, position, width)
            elif quote := QUOTE.match(line, position):
                position = quote.end()
            else:
                return position, depth
        return position, len(self.containers)

    def close(self, depth: int) -> None:
        """End the open paragraph, and all containers but the outer `depth`."""
        self.finish()
        del self.containers[depth:]

    def skip_fence(self, index: int, fence: str) -> int:
        """Return the index of the line after a fenced code block."""
        closing = re.compile(rf"[ \t]*{re.escape(fence[0])}{{{len(fence)},}}[ \t]*$")
        for last in range(index + 1, len(self.lines)):
            line = self.get_line(last)
            position, depth = self.match_containers(line)
            if 0 in self.containers[depth:]:
                return last  # a quote ends, and with it the code; in a list item, code is often indented too little
            if closing.match(line, position):
                return last + 1
        return len(self.lines)

    def skip_math(self, index: int) -> int:
        """Return the index of the line after a formula between two $$; after the line if there is only one."""
        if self.get_line(index).count("$$") == 1:
            for last in range(index + 1, len(self.lines)):
                if "$$" in self.get_line(last):
                    return last + 1
        return index + 1

    def skip_html(self, index: int, rest: str) -> int:
        """Return the index of the line after a block of HTML."""
        starts = ((start.match(rest), end) for start, end in HTML_ENDS)
        end = next((end.format(*match.groups()).lower() for match, end in starts if match), "")
        if end and end in rest.lower():
            return index + 1
        for last in range(index + 1, len(self.lines)):
            line = self.get_line(last)
            if 0 in self.containers[self.match_containers(line)[1] :]:
                return last  # a quote ends, and with it the block
            if (end and end in line.lower()) or not (end or line.strip(" \t>")):
                return last + 1
        return len(self.lines)

    def read_table(self, index: int, position: int) -> int:
        """Add the cells of a table as units; return the index of the line after it."""
        header = index
        while index < len(self.lines) and "|" in (line := self.get_line(index)):
            start = self.lines[index][0]
            if index != header + 1:
                for cell in CELL.finditer(line, position if index == header else self.match_containers(line)[0]):
                    left = start + cell.start() + len(cell[0]) - len(cell[0].lstrip())
                    self.texts.append(([(left, left + len(cell[0].strip()))], True))
            index += 1
        return index

    def read_line_block(self, index: int, position: int) -> int:
        """Add a line after a bar, with the indented lines that continue it, as a text; return the index after them."""
        start, end = self.lines[index][0] + position, self.lines[index][0] + len(self.get_line(index))
        spans = [(start, end)]
        while index + 1 < len(self.lines) and (line := self.get_line(index + 1)).startswith(" ") and line.strip():
            index += 1
            spans.append((self.lines[index][0] + len(line) - len(line.lstrip()), self.lines[index][0] + len(line)))
        if start < end:
            self.texts.append((spans, False))
        return index + 1

    def find_pandoc_end(self, index: int, rest: str) -> int:
        """Return the index of the line after a table of Pandoc, or after TeX, that ends or begins here; else `index`.

        These blocks are left as they are: a longer text would move the columns of a table. The open paragraph may be
        the header of the table.
        """
        if GRID_BORDER.match(rest) and not self.paragraph:
            return self.find_line(index + 1, lambda line: not line.lstrip(" \t>").startswith(("+", "|")))
        if environment := not self.paragraph and TEX_ENVIRONMENT.match(rest):
            end = f"\\end{{{environment[1]}}}"
            if (last := self.find_line(index, lambda line: end in line, end)) < len(self.lines):
                return last + 1
        if TEX_LINE.match(rest) and not self.paragraph:
            return self.find_line(index + 1, is_blank)
        if not DASH_GROUPS.match(rest) or index + 1 == len(self.lines) or is_blank(self.get_line(index + 1)):
            return index
        if not self.paragraph:  # without a header, a table ends as it begins
            end = rest.strip()
            last = self.find_line(index + 1, lambda line: line.strip(" \t>") == end, end)
        elif DASHES.match(self.get_line(max(index - len(self.paragraph) - 1, 0))):  # rows of several lines
            last = self.find_line(index + 1, lambda line: DASHES.match(line) is not None, "-")
        else:
            return self.find_line(index + 1, is_blank)
        return last + 1 if last < len(self.lines) else index

    def find_line(self, first: int, is_end: Callable[[str], bool], name: str = "") -> int:
        """Return the index of the first line from `first` on that ends a block; the number of lines if there is none.

        What ends it has a `name`: once there is none, it is not searched for again, so that this takes linear time.
        """
        lines = range(first, len(self.lines) if name not in self.missing else first)
        found = next((index for index in lines if is_end(self.get_line(index))), len(self.lines))
        self.missing |= {name} if name and found == len(self.lines) else set()
        return found

    def finish(self) -> None:
        """End the open paragraph: note the definitions that it begins with, and the rest as a text."""
        spans, self.paragraph = self.paragraph, []
        joined, position = "\n".join(self.text[start:end] for start, end in spans), 0
        while definition := DEFINITION.match(joined, position):
            self.labels.add(" ".join(definition["label"].casefold().split()))
            position = definition.end()
        spans = spans[joined.count("\n", 0, position) :] if position < len(joined) else []
        if spans:
            self.texts.append((spans, False))

    def add_unit(self, spans: list[tuple[int, int]], *, is_cell: bool) -> None:
        """Add a text to the units of the document, if it has letters."""
        joined = "\n".join(self.text[start:end] for start, end in spans)
        offsets = list(accumulate((end - start + 1 for start, end in spans), initial=0))

        def get_raw(start: int, end: int) -> str:
            first, last = bisect_right(offsets, start) - 1, bisect_right(offsets, end) - 1
            return self.text[spans[first][0] + start - offsets[first] : spans[last][0] + end - offsets[last]]

        builder, literals = parse_inline(joined, self.labels, get_raw)
        if not builder.has_letters():
            return
        start, end = spans[0][0], spans[-1][1]
        end -= len(self.text[start:end]) - len(self.text[start:end].rstrip())
        escape = make_markdown_escaper(literals, "|" if is_cell else "", builder.spellings)
        number = len(self.document.units) + 1

        def make_splices(translation: MarkedText) -> list[Splice]:
            translation = part_code(drop_outer_breaks(translation))
            text = render_lines(translation, escape, joined)
            flat = LINE_START.sub("\n", text)
            again, _ = parse_inline(flat, self.labels, lambda start, end: flat[start:end])
            if list_tags(again.text, again.markup) != list_tags(translation.text, translation.markup):
                self.document.warnings[number] = JOINED_WARNING
            elif not is_cell and is_paragraph(joined) and not is_paragraph(flat):
                self.document.warnings[number] = BLOCK_WARNING
            return [Splice(start, end, text)]

        self.document.add(builder.build(), UnitWriter(make_splices))


def is_blank(line: str) -> bool:
    return not line.strip(" \t>")


def is_paragraph(text: str) -> bool:
    """Return whether a text is read as one paragraph with all of its lines."""
    reader = MarkdownReader(Document(TextFile("", text)))
    index = 0
    while index < len(reader.lines):
        index = reader.read_block(index)
    reader.finish()
    starts = [spans[0][0] for spans, _ in reader.texts]
    lines = sum(len(spans) for spans, _ in reader.texts)
    return starts == [len(text) - len(text.lstrip())] and lines == text.count("\n") + 1


def count_columns(line: str, position: int = 0) -> int:
    """Return the width of the white space at an offset of a line."""
    return len(INDENT.match(line, position)[0].expandtabs(4))  # type: ignore[index]


def skip_columns(line: str, position: int, width: int) -> int:
    """Return the offset behind white space of a width; a tab that is only in part inside of it is skipped."""
    columns = 0
    while columns < width:
        columns += 4 - columns % 4 if line[position] == "\t" else 1
        position += 1
    return position


def find_containers(line: str, position: int, limit: int) -> tuple[int, list[int]]:
    """Return the offset behind the marks of new containers, and these as `MarkdownReader.containers` has them."""
    found: list[int] = []
    while len(found) < limit and not RULE.match(line[position:]):
        if found and count_columns(line, position) >= 4:
            break  # code
        if quote := QUOTE.match(line, position):
            found.append(0)
            position = quote.end()
        elif marker := LIST_MARKER.match(line, position):
            found.append(len(marker[1].expandtabs(4)))
            position = marker.end()
        elif note := FOOTNOTE.match(line, position) or DESCRIPTION.match(line, position):
            found.append(4)
            position = note.end()
        else:
            break
    return position, found


def find_heading_end(line: str, start: int) -> int:
    """Return the end of the text of a heading, before the attributes in braces and the #s that may close it."""
    content = line.rstrip(" \t")
    brace = content.rfind("{")
    if content.endswith("}") and content[brace + 1 : brace + 2] in ("#", ".", ":") and "}" not in content[brace:-1]:
        content = content[:brace].rstrip(" \t")
    without = content.rstrip("#")
    if without.endswith((" ", "\t")):
        content = without.rstrip(" \t")
    return max(start, len(content))


def drop_outer_breaks(content: MarkedText) -> MarkedText:
    """Return a text without the hard line breaks at its ends: they would be empty lines, which end a paragraph."""
    first, last = len(content.text) - len(content.text.lstrip()), len(content.text.rstrip())
    markup = [tag for tag in content.markup if first < tag.position < last or not HARD_BREAK.match(tag.raw)]
    return MarkedText(content.text, tuple(markup))


def part_code(content: MarkedText) -> MarkedText:
    """Return a text with a space between pieces of code that have moved together: they would join to other code."""
    markup = list(content.markup)
    for number, (tag, following) in enumerate(pairwise(content.markup), 1):
        if tag.position == following.position and tag.raw.endswith("`") and following.raw.startswith("`"):
            markup[number] = following._replace(raw=f" {following.raw}")
    return MarkedText(content.text, tuple(markup))


def list_tags(text: str, markup: Sequence[Markup]) -> list[tuple[Kind, str, int | None]]:
    """Return the kind, the characters and, of a closing tag, the number of its partner, which stay where tags do.

    White space does not count, and a pair with nothing inside is one tag.
    """
    tags: list[tuple[Kind, str, int | None]] = []
    numbers: dict[int, int] = {}  # of the tags in the result, by their ids
    position = 0
    for tag in markup:
        raw = LINE_START.sub("", tag.raw).replace(" ", "")
        partner = numbers.get(tag.partner) if tag.kind == "close" and tag.partner is not None else None
        if partner is not None and partner == len(tags) - 1 and not text[position : tag.position].strip():
            tags[partner] = ("standalone", tags[partner][1] + raw, None)
        else:
            numbers[tag.id] = len(tags)
            tags.append((tag.kind, raw, partner))
        position = tag.position
    return tags


def render_lines(content: MarkedText, escape: Callable[[str], str], source: str) -> str:
    """Return a text with its tags as a file writes it, without other blocks at its start or after hard line breaks."""
    pieces: list[str] = []
    start, tags = 0, list[Markup]()
    for tag in (*content.markup, Markup(len(content.text), "")):
        if tag.raw and not HARD_BREAK.match(tag.raw):
            tags.append(tag._replace(position=tag.position - start))
            continue
        line = render(MarkedText(content.text[start : tag.position], tuple(tags)), escape)
        first = start + tags[0].position if tags else tag.position
        if match := NUMBER_OR_LABEL.match(line, len(line) - len(line.lstrip())):
            line = f"{line[: match.end()]}\\{line[match.end() :]}"
        elif content.text[start:first].strip():  # otherwise a tag begins the line
            line = escape_block_start(line, "" if pieces else source)
        pieces += [line, tag.raw]
        start, tags = tag.position, []
    return "".join(pieces)


def escape_block_start(line: str, source: str) -> str:
    """Escape the start of a line that would make it another block, unless its source begins alike."""
    text = line.lstrip()
    if not BLOCK_START.match(text) or BLOCK_START.match(source):
        return line
    return f"{line[: len(line) - len(text)]}\\{text}"
