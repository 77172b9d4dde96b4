"""DOCX: the paragraphs of a document, its headers, footers, notes and text boxes; changes of format are inline tags.

A text of a paragraph stands in runs, each with a format. The format of most of the text is the base; a run of another
format is a pair of tags that end the base run and begin the other one, and the other way round. So a translation is
spliced into the XML of the paragraph, and everything else keeps its bytes. The paragraphs of a text box are units of
their own, and the text box is a tag of the paragraph around it.

What must stay in its order is one tag: a field up to its result, and a content control or smart tag up to its content.
A range, such as a bookmark or a comment, is a pair of tags like a container, unless it overlaps another or a container.
"""

from __future__ import annotations

import html
import io
import re
import zipfile
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dragoman.documents.document import (
    Document,
    MarkedText,
    Splice,
    TextFile,
    UnitBuilder,
    UnitWriter,
)
from dragoman.documents.markup_language import (
    MarkupToken,
    add_escaped,
    check_xml,
    find_element_end,
    list_children,
    read_xml,
    render_xml,
    tokenize_markup,
    unescape_xml,
)
from dragoman.errors import UserError
from dragoman.language_codes import is_same_language

TEXT_PARTS = re.compile(r"word/(?:document|header\d*|footer\d*|footnotes|endnotes|comments)\.xml")
UNTRANSLATED_PARTS = re.compile(r"word/(?:charts/chart(?:Ex)?|diagrams/data)\d*\.xml")  # charts and SmartArt
ALTERNATIVE_TEXT = re.compile(r"<wp:docPr\s[^<>]*?\b(?:descr|title)\s*=\s*(?:\"[^\"]|'[^'])")  # of a picture
RUN_LANGUAGE = re.compile(r"(<w:lang\s(?:[^<>]*?\s)?w:val\s*=\s*[\"'])([^\"'<>]*)")  # for the spelling checker
MAIN_PART = "word/document.xml"
STYLES = "word/styles.xml"  # has the language of runs that name none
# What zipfile raises for damaged files; ValueError for offsets before the beginning.
DAMAGE = (
    zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, OSError, NotImplementedError, RuntimeError, ValueError,
)  # fmt: skip
MAX_UNPACKED_BYTES = 256 << 20  # of all members, unpacked
MAX_TEXT_BYTES = 32 << 20  # of those with text
MAX_TAGS = 1_000_000  # of those with text: a tag of four characters becomes a record of some 250 bytes
MAX_MEMBERS = 20_000
# Of paragraphs in text boxes of paragraphs, and of containers; what is deeper is not translated.
MAX_PARAGRAPH_NESTING = 40
# Markers of spelling and saving, and soft hyphens: they are left out where a paragraph is written anew.
IGNORED = {"proofErr", "lastRenderedPageBreak", "softHyphen"}
HYPHEN = "\u2011"  # of <w:noBreakHyphen/>, which stands inside of words
CONTAINERS = {"hyperlink", "ins", "smartTag", "sdt", "customXml", "fldSimple", "moveTo", "dir", "bdo"}
CONTAINER_PROPERTIES = {"sdtPr", "sdtEndPr", "smartTagPr", "customXmlPr", "fldData"}  # stand before the content
MAX_OPEN_RANGES = 200  # of ranges that begin one after another, only the last ones are pairs of tags
RANGE_END = re.compile(r"(\w+)(Start|End)")  # of a bookmark, a comment, a permission or a change
MAIN_NAMESPACE = re.compile(
    r"xmlns(?::([\w.\-]+))?\s*=\s*[\"']http://(?:schemas\.openxmlformats\.org|purl\.oclc\.org/ooxml)"
    r"/wordprocessingml(?:/2006)?/main[\"']"
)
# The properties of a run. At their end, the record of a change of format has its former properties.
INSIDE = r"(?:(?!</w:rPr\s*+>|<w:r[ >]).)*+"
RUN_PROPERTIES = rf"<w:rPr\s*+>{INSIDE}(?:</w:rPr\s*+>\s*+</w:rPrChange\s*+>{INSIDE})?</w:rPr\s*+>|<w:rPr\s*+/>"
EMPTY_RUN = re.compile(rf"<w:r(?: [^<>]*)?>(?:{RUN_PROPERTIES})?<w:t(?: [^<>]*)?></w:t></w:r>", re.S)
RUN_START = re.compile(rf"<w:r>({RUN_PROPERTIES})(<w:t[ >])?", re.S)
CHANGE_RECORD = re.compile(r"<w:rPrChange\b(?:[^<]*/>|.*</w:rPrChange\s*+>)", re.S)
SPLIT_WARNING = "a tracked change of format covers only a part of its text"


@dataclass(slots=True)
class DocxDocument(Document):
    """The units of the XML parts of a DOCX file, whose texts are joined into one."""

    data: bytes = b""
    parts: dict[str, TextFile] = field(default_factory=dict)  # by name, in the order of the joined text

    def write(self, translations: Sequence[MarkedText | None]) -> bytes:
        """Return the file with the translations; its other members are copied."""
        new_text = self.write_text(translations)
        if new_text == self.file.text:
            return self.data
        new_texts = dict(zip(self.parts, new_text.split(PART_SEPARATOR), strict=True))
        output = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(self.data)) as old, zipfile.ZipFile(output, "w") as new:
            new.comment = old.comment
            for member in old.infolist():
                content = old.read(member)
                if file := self.parts.get(member.filename):
                    text = self.set_language(new_texts[member.filename])
                    check_xml(text, f"the translated {member.filename}")
                    content = file.encode(text, "xmlcharrefreplace")
                elif member.filename == STYLES:  # any other encoding than UTF-8 stays as it is, byte for byte
                    styles = content.decode("utf-8", "surrogateescape")
                    content = self.set_language(styles).encode("utf-8", "surrogateescape")
                new.writestr(member, content, compress_type=member.compress_type)
        return output.getvalue()

    def set_language(self, text: str) -> str:
        """Return the text of a part with the target language where it names the source language."""

        def replace_code(match: re.Match[str]) -> str:
            is_source = self.target_language and is_same_language(match[2], self.source_language)
            return f"{match[1]}{self.target_language}" if is_source else match[0]

        return RUN_LANGUAGE.sub(replace_code, text)


PART_SEPARATOR = "\0"  # cannot be in XML


def read_docx(data: bytes, name: str, source_language: str = "", target_language: str = "") -> DocxDocument:
    """Return the paragraphs of a DOCX file as units."""
    files: dict[str, TextFile] = {}
    text_bytes = tags = untranslated = 0
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if len(members) > MAX_MEMBERS:
                raise UserError(f"{name} has more than {MAX_MEMBERS:,} files inside, which is refused; split it")
            if sum(member.file_size for member in members) > MAX_UNPACKED_BYTES:
                size = MAX_UNPACKED_BYTES >> 20
                raise UserError(f"{name} unpacks to more than {size} MiB, which is refused; split it")
            main = find_main_part(archive)
            if main not in archive.namelist():
                raise UserError(f"{name} has no {main}, so it is no DOCX file; save it as DOCX")
            for member in members:
                content = archive.read(member)  # of all members: damage is found now, not when they are copied
                untranslated += UNTRANSLATED_PARTS.fullmatch(member.filename) is not None
                is_text = member.filename == main or TEXT_PARTS.fullmatch(member.filename)
                if is_text and member.filename not in files:
                    text_bytes += len(content)
                    tags += content.count(b"<")
                    if text_bytes > MAX_TEXT_BYTES or tags > MAX_TAGS:
                        raise UserError(f"{name} has too much text or too many tags for one document; split it")
                    files[member.filename] = read_xml(content, f"{name}: {member.filename}")
                    check_prefix(files[member.filename])
    except UserError:
        raise
    except DAMAGE as error:
        if not data:
            raise UserError(f"{name} is empty; save it again") from None
        raise UserError(f"{name} is no intact DOCX file ({error}); save it again without a password") from None
    except Exception as error:
        if type(error).__name__ not in ("error", "LZMAError"):  # of zlib and lzma
            raise
        raise UserError(f"{name} is damaged ({error}); save it again") from None
    joined = TextFile(name, PART_SEPARATOR.join(file.text for file in files.values()))
    document = DocxDocument(
        joined, source_language=source_language, target_language=target_language, data=data, parts=files
    )
    offset = 0
    for file in files.values():
        add_paragraphs(document, list(tokenize_markup(file.text)), offset)
        untranslated += len(ALTERNATIVE_TEXT.findall(file.text))
        offset += len(file.text) + 1
    document.skipped += untranslated
    return document


def find_main_part(archive: zipfile.ZipFile) -> str:
    """Return the name of the part with the body, which the relationships of the file say."""
    relationships = "_rels/.rels"
    text = archive.read(relationships).decode("utf-8", "replace") if relationships in archive.namelist() else ""
    related = (token for token in tokenize_markup(text) if token.name == "Relationship")
    main = (token.get("Target") for token in related if token.get("Type").endswith("/officeDocument"))
    return next(main, MAIN_PART).lstrip("/")


def check_prefix(file: TextFile) -> None:
    """Refuse XML that writes its paragraphs with another prefix than all programs do: they would not be found."""
    prefixes = [match[1] or "" for match in MAIN_NAMESPACE.finditer(file.text)]
    if prefixes and "w" not in prefixes:
        written = f"<{prefixes[0]}:p>" if prefixes[0] else "<p>"
        raise UserError(f"{file.name} writes paragraphs as {written} instead of <w:p>; save it again with an editor")


def add_paragraphs(document: DocxDocument, tokens: Sequence[MarkupToken], offset: int) -> None:
    """Add the paragraphs of a part of the file, which begins at `offset`, to the units."""
    around: list[Paragraph] = []  # from the outermost to the innermost paragraph
    for index, token in enumerate(tokens):
        if token.kind != "open" or token.name != "p" or not token.raw.startswith("<w:p"):
            continue
        while around and around[-1].last < index:
            around.pop()
        if len(around) == MAX_PARAGRAPH_NESTING:
            continue
        outer = next((paragraph for paragraph in reversed(around) if paragraph.objects is not None), None)
        units = outer.find_object(token.start + offset) if outer else []
        around.append(Paragraph(document, tokens, index, offset))
        if units is not None:
            units += around[-1].add()


class Piece(NamedTuple):
    """A part of a paragraph.

    `kind` is text; object (in a run) or element (beside the runs), which are written as they are; open or close, the
    start or the end of a container or a field.
    """

    kind: str
    raw: str
    format: str = ""  # the properties of the run
    start: int = 0  # in the text of the document
    end: int = 0
    field: str = ""  # begin, separate (before its result) or end
    range: str = ""  # name and id of the range of which this is an end


class TagObject(NamedTuple):
    """An object in a paragraph, and the units of the paragraphs inside it."""

    start: int
    end: int
    tag: int
    tag_start: int  # where the tag would begin if the file had it before `start`
    units: list[int]


class Paragraph:
    """A paragraph as a list of pieces, and as a unit."""

    def __init__(self, document: DocxDocument, tokens: Sequence[MarkupToken], index: int, offset: int) -> None:
        self.document, self.tokens, self.offset = document, tokens, offset
        self.first, self.last = index, find_element_end(tokens, index)
        self.pieces: list[Piece] = []
        self.objects: list[TagObject] | None = None  # in their order; None if the paragraph is no unit
        self.recorded: Counter[str] = Counter()  # properties with the record of a change, and the number of their runs
        self.start = self.end = -1  # tokens of the first and the last run or container

    def raw(self, first: int, last: int) -> str:
        return "".join(token.raw for token in self.tokens[first : last + 1])

    def find_object(self, offset: int) -> list[int] | None:
        """Return the units of the object that contains an offset of the document; None if no object does."""
        objects = self.objects or []
        before = bisect(objects, offset, key=lambda each: each.start)
        return objects[before - 1].units if before and offset < objects[before - 1].end else None

    def add(self) -> list[int]:
        """Add the paragraph to the units of the document, if it has letters and its structure is known.

        Return its index, or nothing.
        """
        if not self.add_pieces(self.first + 1, self.last):
            return []
        pieces = join_fields(self.pieces, self.document.file.text)
        if pieces is None:
            self.document.skipped += any(piece.kind == "text" and not piece.raw.isspace() for piece in self.pieces)
            return []
        pieces = nest_ranges(pieces)
        texts: Counter[str] = Counter()
        depth = 0
        for piece in pieces:
            depth += {"open": 1, "close": -1}.get(piece.kind, 0)
            if piece.kind == "text" and not depth:
                texts[piece.format] += len(piece.raw)
        base = texts.most_common(1)[0][0] if texts else ""
        builder, objects = build_paragraph(pieces, base)
        if not builder.has_letters():
            return []
        self.objects = objects
        start = self.tokens[self.start].start + self.offset
        end = self.tokens[self.end].end + self.offset
        opening, closing = make_run_tags(base)
        number = len(self.document.units) + 1

        def make_splices(translation: MarkedText) -> list[Splice]:
            runs = EMPTY_RUN.sub("", opening + render_xml(translation, builder.spellings) + closing)
            if self.recorded:
                runs, is_lost = drop_copied_records(runs, self.recorded)
                self.document.warnings |= {number: SPLIT_WARNING} if is_lost else {}
            return [Splice(start, end, runs)]

        inner = {each.tag: (each.tag_start, each.units) for each in objects}  # the units are added later
        return [self.document.add(builder.build(), UnitWriter(make_splices, inner=inner))]

    def add_pieces(self, first: int, last: int, depth: int = 0) -> bool:
        """Add the pieces of the tokens from `first` to before `last`; return whether the structure is known."""
        for index, end in iterate_elements(self.tokens, first, last):
            token = self.tokens[index]
            is_known = bool(token.name) or token.kind in ("comment", "instruction")
            if not is_known and token.kind != "text":
                return False
            if is_known and token.name not in IGNORED | {"pPr", "rPr"}:
                self.start = index if self.start < 0 else self.start
                self.end = end
                if token.name == "r" and token.kind == "open":
                    self.add_run(index, end)
                elif token.name not in CONTAINERS or token.kind != "open":
                    self.pieces.append(self.make_piece("element", index, end))
                elif depth == MAX_PARAGRAPH_NESTING or not self.add_container(index, end, depth):
                    return False
                self.end = end  # not the last element inside
        self.end = max(self.end, self.start)
        return True

    def add_container(self, first: int, last: int, depth: int) -> bool:
        """Add the pieces of a container: its start with its properties, its content and its end."""
        start, end = find_content(self.tokens, first, last)
        self.pieces.append(self.make_piece("open", first, start - 1))
        is_known = self.add_pieces(start, end, depth + 1)
        self.pieces.append(self.make_piece("close", end, last))
        return is_known

    def add_run(self, first: int, last: int) -> None:
        """Add the pieces of a run: its texts, and objects such as tabs, pictures and references to notes."""
        properties = ""
        for index, end in iterate_elements(self.tokens, first + 1, last):
            token = self.tokens[index]
            if token.name == "rPr":
                properties = self.raw(index, end)
                if "<w:rPrChange" in properties:
                    self.recorded[properties] += 1
            elif token.name == "t" and token.kind == "open":
                self.add_text(index + 1, end, properties)
            elif token.name == "noBreakHyphen":
                self.pieces.append(Piece("text", HYPHEN, properties))
            elif token.kind != "text" and token.name not in IGNORED and token.name != "t":
                self.pieces.append(self.make_piece("object", index, end, properties))

    def add_text(self, first: int, last: int, properties: str) -> None:
        """Add the text in <w:t>, where comments stand between texts."""
        for index, end in iterate_elements(self.tokens, first, last):
            token = self.tokens[index]
            if token.kind in ("text", "cdata"):
                raw = token.raw if token.kind == "text" else html.escape(token.raw[9:-3], quote=False)
                self.pieces.append(Piece("text", raw, properties))
            else:
                self.pieces.append(self.make_piece("object", index, end, properties))

    def make_piece(self, kind: str, first: int, last: int, properties: str = "") -> Piece:
        """Return the tokens from `first` to `last` as a piece that is written as it is."""
        token = self.tokens[first]
        field = token.get("w:fldCharType") if token.name == "fldChar" else ""
        match = RANGE_END.fullmatch(token.name)
        range_key = f"{match[1]} {token.get('w:id')}" if match and kind == "element" else ""
        start, end = token.start + self.offset, self.tokens[last].end + self.offset
        return Piece(kind, self.raw(first, last), properties, start, end, field, range_key)


def iterate_elements(tokens: Sequence[MarkupToken], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last index of each element and other token from `first` to before `last`."""
    index = first
    while index < last:
        end = find_element_end(tokens, index) if tokens[index].kind in ("open", "empty") else index
        yield index, end
        index = end + 1


def find_content(tokens: Sequence[MarkupToken], first: int, last: int) -> tuple[int, int]:
    """Return the first token of the content of a container, and the one after it.

    Its properties come before; the content of a content control is that of another element, <w:sdtContent>.
    """
    for start, end in list_children(tokens, first, last):
        if tokens[start].name == "sdtContent" and tokens[start].kind == "open":
            return start + 1, end
        if tokens[start].name not in CONTAINER_PROPERTIES:
            break
        first = end
    return first + 1, last


def join_fields(pieces: Sequence[Piece], text: str) -> list[Piece] | None:
    """Make each field a container: its code up to its result is the start. A field without a result is one object.

    Return None if a field does not begin and end in one container of the paragraph, as in a table of contents.
    """
    joined: list[Piece] = []
    fields: list[tuple[int, int, bool]] = []  # index in `joined`, depth of containers, and whether it has a result
    depth = 0
    for piece in pieces:
        depth += {"open": 1, "close": -1}.get(piece.kind, 0)
        joined.append(piece)
        if fields and depth < fields[-1][1]:
            return None
        if piece.field == "begin":
            fields.append((len(joined) - 1, depth, False))
        elif piece.field:
            start, level, has_result = fields.pop() if fields else (0, -1, False)
            if level != depth or (piece.field == "separate" and has_result):
                return None
            if piece.field == "separate":
                fields.append((start, level, True))
            elif has_result:
                joined[-1] = Piece("close", f"<w:r>{piece.format}{piece.raw}</w:r>")
                continue
            code = joined[start]._replace(raw=text[joined[start].start : piece.end], end=piece.end)
            if piece.field == "separate":
                code = Piece("open", f"<w:r>{code.format}{code.raw}</w:r>")
            joined[start:] = [code._replace(field="")]
    return None if fields else joined


def nest_ranges(pieces: Sequence[Piece]) -> list[Piece]:
    """Make those ranges containers that do not overlap others."""
    nested = list(pieces)
    starts: list[tuple[str, int]] = []  # range and index; "" for the start of a container
    for index, piece in enumerate(pieces):
        if piece.kind == "open":
            starts.append(("", index))
        elif piece.kind == "close":
            while starts.pop()[0]:
                pass
        elif piece.range:
            levels = range(len(starts) - 1, max(-1, len(starts) - MAX_OPEN_RANGES), -1)
            level = next((i for i in levels if starts[i][0] in ("", piece.range)), -1)
            if level >= 0 and starts[level][0]:
                first = starts[level][1]
                del starts[level:]
                nested[first] = nested[first]._replace(kind="open")
                nested[index] = piece._replace(kind="close")
            else:
                starts.append((piece.range, index))
    return nested


def make_run_tags(properties: str) -> tuple[str, str]:
    """Return the start and the end of a run with a text."""
    return f'<w:r>{properties}<w:t xml:space="preserve">', "</w:t></w:r>"


def drop_copied_records(runs: str, recorded: Mapping[str, int]) -> tuple[str, bool]:
    """Leave out records of changes of format where they would be written again; return whether a text has lost its own.

    A record has an id of its own, but a run may be written in parts. `recorded` has the properties with a record, and
    how many runs of the source have them. Runs with a text come first.
    """
    texts = Counter(match[1] for match in RUN_START.finditer(runs) if match[2])
    left = {(each, True): count for each, count in recorded.items()}
    left |= {(each, False): count - texts[each] for each, count in recorded.items()}
    is_lost = False

    def write_start(match: re.Match[str]) -> str:
        nonlocal is_lost
        key = match[1], bool(match[2])
        if key not in left:
            return match[0]
        left[key] -= 1
        if left[key] >= 0:
            return match[0]
        is_lost = is_lost or key[1]
        return f"<w:r>{CHANGE_RECORD.sub('', match[1])}{match[2] or ''}"

    return RUN_START.sub(write_start, runs), is_lost


def build_paragraph(pieces: Sequence[Piece], base: str) -> tuple[UnitBuilder, list[TagObject]]:
    """Return the text of a paragraph, with tags where the format changes and where an object stands, and the objects.

    Inside a container, such as a link, its first format is the base.
    """
    builder, bases, current = UnitBuilder(), [base], base
    count, objects, ranges = 0, list[TagObject](), dict[str, int]()

    def change_format(new: str) -> None:
        """End the pair of the current format, and begin one of the new format."""
        nonlocal current, count
        if new == current:
            return
        if current != bases[-1]:
            builder.add_tag(make_run_tags("")[1] + make_run_tags(bases[-1])[0], "close", str(count))
        if new != bases[-1]:
            count += 1
            builder.add_tag(make_run_tags("")[1] + make_run_tags(new)[0], "open", str(count))
        current = new

    following = [base]  # the format of the next text, from the last piece to the first
    for piece in reversed(pieces):
        following.append(piece.format if piece.kind == "text" else following[-1])
    containers: list[str] = []
    for index, piece in enumerate(pieces):
        if piece.kind == "text":
            change_format(piece.format)
            add_escaped(builder, piece.raw, unescape_xml)
            if piece.raw == HYPHEN:
                opening, closing = make_run_tags("")
                start, end = opening.removeprefix("<w:r>"), closing.removesuffix("</w:r>")
                builder.spellings[HYPHEN] = f"{end}<w:noBreakHyphen/>{start}"
            continue
        change_format(bases[-1])
        if piece.kind == "open":
            inside = following[len(pieces) - index]
            containers.append(f"container {index}")
            builder.add_tag(make_run_tags("")[1] + piece.raw + make_run_tags(inside)[0], "open", containers[-1])
            bases.append(inside)
            current = inside
        elif piece.kind == "close":
            bases.pop()
            current = bases[-1]
            builder.add_tag(make_run_tags("")[1] + piece.raw + make_run_tags(current)[0], "close", containers.pop())
        else:
            before, after = ("<w:r>" + piece.format, "</w:r>") if piece.kind == "object" else ("", "")
            before, after = make_run_tags("")[1] + before, after + make_run_tags(bases[-1])[0]
            tag = builder.add_tag(before + piece.raw + after)
            objects.append(TagObject(piece.start, piece.end, tag, piece.start - len(before), []))
            if piece.range and piece.range in ranges:
                builder.join_range(ranges.pop(piece.range), tag)
            elif piece.range:
                ranges[piece.range] = tag
    change_format(bases[-1])
    return builder, objects
