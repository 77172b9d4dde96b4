"""SubRip subtitles (SRT): every cue is a unit, apart from lines of other speakers."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence

from dragoman.documents.document import (
    Document,
    Kind,
    MarkedText,
    Splice,
    TextFile,
    UnitBuilder,
    UnitWriter,
    decode_file,
    render,
)
from dragoman.documents.plain_text import OTHER_BREAKS, TEXT_LINE
from dragoman.errors import UserError

CUE = re.compile(
    r"""
    ^[ \t]*+ (?:\d++ [ \t]*+ \r?\n [ \t]*+)?                       # the number of the cue
    (?P<time>\d{1,3}:\d{2}:\d{2}[,.]\d{1,3}[ \t]*-->[^\r\n]*) (?:\r?\n|\Z)
    (?P<text>(?:                                                  # up to an empty line or the next cue
        (?!(?:[ \t]*+ \d++ [ \t]*+ \r?\n)?+ [ \t]*+ \d[\d:.,]*+ [ \t]*+ -->)
        [ \t]*+ [^ \t\r\n] [^\r\n]*+ (?:\r?\n|\Z)
    )*+)
    """,
    re.VERBOSE | re.MULTILINE,
)
SUBTITLE_TAG = re.compile(r"<(/?)(i|b|u|s|font|c|v)\b[^<>\r\n]*>|\{\\[^{}\r\n]*\}", re.IGNORECASE)
TOGGLE = re.compile(r"\\([ibus])([0-9]+)(?=[\\}])")  # switches a style on or off, in an override such as {\i1\b1}
SPEAKER_LINE = re.compile(r"[ \t]*(?:<[^<>]*>)*[-–—‐][ \t]*")  # a line of one of several speakers


def read_srt(data: bytes, name: str, source_language: str = "", target_language: str = "") -> Document:
    """Return the cues of subtitles as units; a line that begins with a dash, of another speaker, is its own unit."""
    document = Document(decode_file(data, name), source_language=source_language, target_language=target_language)
    text, position = document.file.text, 0
    for match in CUE.finditer(text):
        check_between(document.file, position, match.start())
        position = match.end()
        start, time = match.start("text"), match["time"]
        for line in TEXT_LINE.finditer(match["text"]):
            if line.start() and SPEAKER_LINE.match(line[0]):
                add_cue(document, start, match.start("text") + line.start(), time)
                start = match.start("text") + line.start()
        add_cue(document, start, match.end("text"), time)
    check_between(document.file, position, len(text))
    return document


def check_between(file: TextFile, start: int, end: int) -> None:
    """Raise a UserError if there is text between two cues: it would not be translated."""
    rest = file.text[start:end].lstrip()
    if rest:
        line = file.text.count("\n", 0, end - len(rest)) + 1
        raise UserError(
            f"{file.name} line {line} belongs to no subtitle; put a time such as 00:00:01,000 --> 00:00:02,000 before "
            "it, or remove the empty line between it and its subtitle"
        )


def add_cue(document: Document, start: int, end: int, time: str) -> None:
    """Add a part of a cue, without the dash before it, as a unit."""
    text = document.file.text
    dash = SPEAKER_LINE.match(text, start, end)
    if dash and "<" not in dash[0]:
        start = dash.end()
    add_lines(document, start, end, time)


def add_lines(document: Document, start: int, end: int, note: str) -> None:
    """Add the lines of a cue, without the white space around them, as a unit.

    Its line breaks are kept; a translation is broken into as many lines.
    """
    raw = document.file.text[start:end]
    start, end = start + len(raw) - len(raw.lstrip()), end - len(raw) + len(raw.rstrip())
    raw = raw.strip()
    builder, position, overrides = UnitBuilder(), 0, list[int]()
    for tag in SUBTITLE_TAG.finditer(raw):
        builder.add_text(raw[position : tag.start()])
        position = tag.end()
        if tag[2]:
            builder.add_tag(tag[0], "close" if tag[1] else "open", tag[2].lower())
            continue
        switches = {letter: bool(value.strip("0")) for letter, value in TOGGLE.findall(tag[0])}
        is_pair = len(set(switches.values())) == 1  # all on or all off
        kind: Kind = "standalone" if not is_pair else "open" if any(switches.values()) else "close"
        overrides.append(builder.add_tag(tag[0], kind, f"\\{''.join(sorted(switches))}"))
    builder.add_text(raw[position:])
    order_overrides(builder, overrides)
    if not builder.text.strip():
        return
    line_break = "\r\n" if "\r\n" in raw else "\n"
    lines = raw.count("\n") + 1

    def make_splices(translation: MarkedText) -> list[Splice]:
        content = MarkedText(OTHER_BREAKS.sub(" ", translation.text), translation.markup)
        new = break_lines(render(content, str), lines, line_break) if lines > 1 else render(content, str)
        return [Splice(start, end, new if lines > 1 else new.replace("\n", " "))]

    document.add(builder.build(note=note), UnitWriter(make_splices))


def order_overrides(builder: UnitBuilder, overrides: Sequence[int]) -> None:
    """Have the overrides of a cue keep their order, apart from pairs that switch a style on and off.

    Those that switch styles are no pairs if one of them has no partner, or not all tags of the cue are nested.
    """
    stack: list[int] = []
    is_nested = True
    for tag in builder.markup:
        if tag.kind == "open":
            stack.append(tag.id)
        elif tag.kind == "close":
            is_nested = is_nested and stack.pop() == tag.partner
        elif TOGGLE.search(tag.raw):
            is_nested = False
    for number in overrides if not is_nested else ():
        builder.markup[number] = builder.markup[number]._replace(kind="standalone", partner=None)
    builder.keep_order([number for number in overrides if builder.markup[number].partner is None])


def break_lines(text: str, count: int, line_break: str) -> str:
    """Break a text without line breaks into up to `count` lines of similar length, at spaces outside tags."""
    if "\n" in text:
        return text
    spaces = [match.start() for match in re.finditer(r"<[^<>]*>|\{\\[^{}]*\}| ", text) if match[0] == " "]
    pieces, position = [], 0
    for number in range(1, count):
        ideal = len(text) * number / count
        first, nearest = bisect_right(spaces, position), bisect_right(spaces, ideal)
        candidates = spaces[max(first, nearest - 1) : max(first, nearest) + 1]
        if not candidates:
            break
        best = min(candidates, key=lambda space: abs(space - ideal))
        pieces.append(text[position:best])
        position = best + 1
    return line_break.join([*pieces, text[position:]])
