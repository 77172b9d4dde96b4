"""The inline tags of Markdown: emphasis, links, code, HTML and addresses, paired as CommonMark pairs them."""

from __future__ import annotations

import html
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from dragoman.documents.document import Kind, UnitBuilder

# A part of an address; the expressions of templates may have spaces.
ADDRESS = r"\{\{[^{}\n]*+\}\}|\{%[^%\n]*+%\}|[^\x00-\x20\x7f()\\]|\\[()\\]?"
DESTINATION = (
    r"(?:<(?:[^<>\n\\]|\\[^\n])*+>"
    rf"|(?!<)(?:{ADDRESS}|\((?:{ADDRESS}|\((?:{ADDRESS})*+\))*+\))++)"
)
TITLE = r"""(?:"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|\((?:[^()\\]|\\.)*+\))"""
# As in CommonMark; an address with spaces, which is none there, may have pairs of parentheses.
LINK_END = rf"\(\s*+(?:{DESTINATION}(?:\s++{TITLE})?+)?+\s*+\)|\((?:[^()]|\([^()]*\))*+\)"
# Behind a link, a span or code, as Pandoc and others write them: {.class key="value"}, {=html}.
ATTRIBUTES = re.compile(r"\{(?=[ ]*(?:[:.\#=]|[\w\-]{1,40}=))[^{}]{0,1000}\}")
INLINE_TOKEN = re.compile(
    rf"""
      (?P<hard>(?<![ ])[ ]{{2,}}+\n|\\\n)
    | \\(?P<escaped>[!-/:-@\[-`{{-~])
    | (?P<tex>\\[A-Za-z]{{2,40}}(?:\[[^\[\]\n]{{0,200}}\])?\{{[^{{}}\n]{{0,500}}\}})
    | (?P<code>`++)
    | (?P<link><(?:[A-Za-z][A-Za-z0-9+.\-]{{1,31}}:[^\s<>]*|[^\s<>@]{{1,64}}@[^\s<>]{{1,255}})>)
    | (?P<other><!--|<\?|<!\[CDATA\[|<!(?=[A-Za-z]))
    | (?P<html></?(?P<name>[A-Za-z][\w\-]*)(?:\s(?:[^<>"']|"[^"]*"|'[^']*')*+|/)?>)
    | (?P<footnote>\[\^[^\]\s]{{1,100}}\])
    | (?P<math>\$\$[^$]{{1,3000}}+\$\$ | (?<![\w$])\$(?=[^\s$])[^$\n]{{1,500}}+(?<=\S)\$(?![\d$]))
    | (?P<opening>!?\[)
    | (?P<closing>\]
        (?:{LINK_END}|\[(?P<label>(?:[^\[\]\\]|\\.){{0,500}}+)\])?(?:{ATTRIBUTES.pattern})?)
    | (?P<emphasis>\*+|_+|~+)
    | (?P<address>(?:https?|ftp)://[^\s<>()\[\]*`|]*[^\s<>()\[\]*`|.,;:!?'"])
    | (?P<entity>&(?:\#\d{{1,7}}|\#[xX][0-9a-fA-F]{{1,6}}|[A-Za-z]\w{{0,31}});)
    """,
    re.VERBOSE | re.DOTALL,
)
OTHER_ENDS = {"<!--": "-->", "<?": "?>", "<![CDATA[": "]]>", "<!": ">"}
MAX_REFERENCE_LABEL = 1000  # characters of a reference with its white space
SPECIAL_MARKS = "\\`*_[]<"  # escaped in a translation unless the source has them as text


class MarkdownToken(NamedTuple):
    """A part of a paragraph that is not plain text, or may not be."""

    kind: str  # the name of its group in INLINE_TOKEN
    start: int
    end: int
    raw: str
    name: str = ""  # of an HTML tag


@dataclass(slots=True)
class DelimiterRun:
    """A run of *, _ or ~. Its first characters may close emphasis, its last ones open it, and the others are text."""

    index: int  # of its token
    mark: str
    length: int
    can_open: bool
    can_close: bool
    left: int = 0  # characters that neither open nor close anything yet
    closing: list[tuple[str, str]] = field(default_factory=list)  # delimiters and keys, from left to right
    opening: list[tuple[str, str]] = field(default_factory=list)  # from right to left


def parse_inline(text: str, labels: set[str], get_raw: Callable[[int, int], str]) -> tuple[UnitBuilder, set[str]]:
    """Return the text and the tags of a paragraph, and the special characters that stand in it as text.

    `get_raw` returns how the file writes a part of the text: between two lines of it, there may be marks of quotes.
    """
    tokens = find_tokens(text, labels)
    kinds, runs = pair_delimiters(tokens, text, labels)
    builder, literals, position = UnitBuilder(collapse=True), set[str](), 0
    index = 0
    while index < len(tokens):
        token = tokens[index]
        before = text[position : token.start]
        builder.add_text(before)
        literals.update(mark for mark in SPECIAL_MARKS if mark in before)
        position = token.end
        kind, key, last = kinds.get(index, ("standalone", "", index))
        if last > index:  # a reference such as [label], with everything in it
            position = tokens[last].end
            builder.add_tag(get_raw(token.start, position))
            index = last
        elif token.kind == "hard":
            builder.add_tag(get_raw(token.start, token.end))
            builder.add_break()
        elif token.kind == "escaped":
            builder.add_text(token.raw[1])
            builder.spellings.setdefault(token.raw[1], token.raw)
        elif token.kind == "entity":
            character = html.unescape(token.raw)
            builder.add_text(character)
            if character != token.raw and (not character.isascii() or character in "&<"):
                builder.spellings.setdefault(character, token.raw)
        elif run := runs.get(index):
            for delimiter, key in run.closing:
                builder.add_tag(delimiter, "close", key)
            builder.add_text(run.mark * run.left)
            literals.update(run.mark * run.left)
            for delimiter, key in reversed(run.opening):
                builder.add_tag(delimiter, "open", key)
        elif index in kinds or token.kind not in ("opening", "closing"):
            builder.add_tag(get_raw(token.start, token.end), kind, key)
        else:
            builder.add_text(token.raw)
            literals.update(token.raw)
        index += 1
    builder.add_text(text[position:])
    literals.update(mark for mark in SPECIAL_MARKS if mark in text[position:])
    return builder, literals - {*builder.spellings}


def find_tokens(text: str, labels: set[str]) -> list[MarkdownToken]:
    """Return the tokens of a paragraph.

    The ends of code and of HTML that is no tag are searched for once, so that beginnings without one take linear time.
    """
    tokens: list[MarkdownToken] = []
    runs: dict[int, list[int]] = {}  # where the runs of backticks begin, by their lengths
    for ticks in re.finditer("`+", text):
        runs.setdefault(len(ticks[0]), []).append(ticks.start())
    missing: set[str] = set()  # ends that do not follow any more
    position = 0
    while match := INLINE_TOKEN.search(text, position):
        start, position, kind = match.start(), match.end(), match.lastgroup or ""
        if kind == "code":  # up to the next run of the same length; without one, the backticks are text
            length = position - start
            ends = runs.get(length, [])
            following = bisect_left(ends, position)
            if following == len(ends):
                continue
            position = ends[following] + length
            attributes = ATTRIBUTES.match(text, position)
            position = attributes.end() if attributes else position
        elif kind == "other":
            end = OTHER_ENDS[match[0]]
            found = -1 if end in missing else text.find(end, start + 2)  # also in <!-->
            if found < 0:
                missing.add(end)
                position = start + 1
                continue
            position = found + len(end)
        elif (
            match["label"]
            and text[position : position + 1] in ("(", "[")
            and " ".join(match["label"].casefold().split()) not in labels
        ):  # [label](address) or [label][reference], beside a bracket that is text
            position = start + 1
        tokens.append(MarkdownToken(kind, start, position, text[start:position], match["name"] or ""))
    return tokens


def pair_delimiters(
    tokens: list[MarkdownToken], text: str, labels: set[str]
) -> tuple[dict[int, tuple[Kind, str, int]], dict[int, DelimiterRun]]:
    """Return the kind and the key of each bracket and HTML tag with a partner, and the runs of emphasis, by token.

    The first result has also the last token of each reference. What is in neither has no partner. Links bind tighter
    than emphasis, and HTML does not bind at all: its pairs may overlap others.
    """
    kinds: dict[int, tuple[Kind, str, int]] = {}
    runs: dict[int, DelimiterRun] = {}
    waiting: list[DelimiterRun] = []  # the runs that are in no link yet
    brackets: list[tuple[int, int]] = []  # the open ones, and how many runs waited before them
    tags: dict[str, list[int]] = {}  # the open HTML tags of a name
    for index, token in enumerate(tokens):
        if token.kind == "opening":
            brackets.append((index, len(waiting)))
        elif token.kind == "closing" and brackets:
            partner, outside = brackets.pop()
            if token.raw not in ("]", "][]"):
                kinds[partner], kinds[index] = ("open", f"{partner}", partner), ("close", f"{partner}", index)
                pair_emphasis(waiting[outside:])
                del waiting[outside:]
            elif (
                labels
                and token.start - tokens[partner].end <= MAX_REFERENCE_LABEL
                and " ".join(text[tokens[partner].end : token.start].casefold().split()) in labels
            ):
                kinds[partner] = ("standalone", "", index)
                del waiting[outside:]
        elif token.name and not token.raw.endswith("/>"):
            opened = tags.setdefault(token.name.lower(), [])
            if token.raw[1] != "/":
                opened.append(index)
            elif opened:
                partner = opened.pop()
                kinds[partner], kinds[index] = ("open", f"{partner}", partner), ("close", f"{partner}", index)
        elif token.kind == "emphasis":
            runs[index] = make_delimiter_run(index, text, token.start, token.end)
            waiting.append(runs[index])
    pair_emphasis(waiting)
    return kinds, runs


def make_delimiter_run(index: int, text: str, start: int, end: int) -> DelimiterRun:
    """Return the run of delimiters at an offset; whether it opens or closes depends on the characters beside it."""
    mark, before, after = text[start], text[start - 1 : start], text[end : end + 1]
    space_before, space_after = not before.strip(), not after.strip()
    mark_before, mark_after = (unicodedata.category(char or " ")[0] in "PS" for char in (before, after))
    can_open = not space_after and (not mark_after or space_before or mark_before)
    can_close = not space_before and (not mark_before or space_after or mark_after)
    if mark == "_":  # not inside of words
        can_open, can_close = can_open and (not can_close or mark_before), can_close and (not can_open or mark_after)
    if mark == "~" and end - start != 2:
        can_open = can_close = False
    return DelimiterRun(index, mark, end - start, can_open, can_close, end - start)


def pair_emphasis(runs: list[DelimiterRun]) -> None:
    """Pair the delimiters of runs that stand in one link, or in none, by the rules of CommonMark.

    Runs that cannot close a run in question are not tried again, so the time is linear.
    """
    openers: list[DelimiterRun] = []
    exhausted: dict[tuple[str, bool, int], int] = {}  # the token before which nothing fits a kind of closer
    for closer in runs:
        kind = (closer.mark, closer.can_open, closer.length % 3)
        while closer.can_close and closer.left:
            found = len(openers) - 1
            while found >= 0 and openers[found].index >= exhausted.get(kind, 0) and not fits(openers[found], closer):
                found -= 1
            if found < 0 or openers[found].index < exhausted.get(kind, 0):
                exhausted[kind] = closer.index
                break
            opener = openers[found]
            width = min(opener.left, closer.left, 2)
            pair = (closer.mark * width, f"{opener.index}.{len(opener.opening)}")
            opener.opening.append(pair)
            closer.closing.append(pair)
            opener.left -= width
            closer.left -= width
            del openers[found + (opener.left > 0) :]  # what stands between the two is text
        if closer.can_open and closer.left:
            openers.append(closer)


def fits(opener: DelimiterRun, closer: DelimiterRun) -> bool:
    """Return whether a run can open what another closes, by the rule of three, which keeps **a*b** from a pair at *."""
    return opener.mark == closer.mark and not (
        (opener.can_close or closer.can_open) and closer.length % 3 != 0 and (opener.length + closer.length) % 3 == 0
    )


def make_markdown_escaper(literals: set[str], always: str, spellings: dict[str, str]) -> Callable[[str], str]:
    """Return a function that escapes the special characters of a text, except those that the source has as text."""
    table = {ord(mark): f"\\{mark}" for mark in SPECIAL_MARKS if mark not in literals or mark == "\\"}
    table |= {ord(key): value for key, value in spellings.items() if len(key) == 1}
    table |= {ord(mark): f"\\{mark}" for mark in always}
    inside_word = re.compile(r"(?<=\w)\\_(?=\w)")
    # Before a letter, a backslash needs no escape, and begins a command of TeX in Pandoc.
    before_letter = re.compile(r"(?!)" if "\\" in spellings else r"\\\\(?=[A-Za-z])")

    def escape(text: str) -> str:
        text = inside_word.sub("_", text.replace("\n", " ").replace("\r", " ").translate(table))
        return before_letter.sub(r"\\", text)

    return escape
