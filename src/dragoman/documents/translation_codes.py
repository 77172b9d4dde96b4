"""Inline codes of XLIFF and TMX: how texts of files of translations write the markup of the files they come from."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dragoman.documents.document import Kind, UnitBuilder
from dragoman.documents.markup_language import MarkupToken, add_escaped, find_element_end, unescape_xml

# Elements that contain markup of another format, which is not translated.
CODES = {"bpt", "ept", "ph", "it", "ut"}
OPENING, CLOSING = {"bpt", "bx", "sc", "sm"}, {"ept", "ex", "ec", "em"}
PAIR_KEYS = ("startRef", "rid", "i", "id")  # attributes that name the pair of an opening or a closing code
ISOLATED_KINDS: dict[str, Kind] = {"begin": "open", "open": "open", "end": "close", "close": "close"}  # pos of <it>
PROTECTED = {"protected": "no"}  # value of mtype -> value of translate
MEANINGS = ("equiv-text", "equiv", "disp", "id")  # attributes that may say what a single code stands for
CODE_TAG = re.compile(r"\s*<\s*+(/?)([A-Za-z][\w:.\-]*)(?:\s[^<>]*)?>\s*")
NAMED_TAG = re.compile(r"(START|CLOSE)_(\w+?)(?:_\d+)?")  # as Angular calls tags: START_LINK_1 ends with CLOSE_LINK


def read_inline(tokens: Sequence[MarkupToken], text: str) -> UnitBuilder:
    """Return the content of an element of XLIFF or TMX: its text and inline tags.

    In XLIFF 2, the codes from one with canReorder="firstNo" to the last one with "no" keep their order.
    """
    builder, index, sequences = UnitBuilder(), 0, list[list[int]]()
    while index < len(tokens):
        token = tokens[index]
        end = index
        if token.kind == "text":
            add_escaped(builder, token.raw, unescape_xml)
        elif token.kind == "cdata":
            builder.add_text(token.raw[9:-3])
        elif token.kind in ("open", "empty"):
            is_protected = "no" in (token.get("translate"), PROTECTED.get(token.get("mtype")))
            is_range = is_protected and token.name == "sm"
            if is_range:  # up to its <em>, or to the end of the text
                ends = (i for i in range(index, len(tokens)) if tokens[i].get("startRef") == token.get("id"))
                end = next((i for i in ends if tokens[i].name == "em"), len(tokens) - 1)
            elif token.name in CODES or (is_protected and token.kind == "open"):
                end = find_element_end(tokens, index)
            raw, key = text[token.start : tokens[end].end], next(filter(None, map(token.get, PAIR_KEYS)), "")
            if is_range:
                number = builder.add_tag(raw)
            elif token.name in OPENING:
                number = builder.add_tag(raw, "open", key)
            elif token.name in CLOSING:
                number = builder.add_tag(raw, "close", key)
            elif token.kind == "open" and end == index:
                number = builder.add_tag(raw, "open", f"<{token.name}>")
            else:
                content = "".join(each.raw for each in tokens[index + 1 : end] if each.kind == "text")
                number = builder.add_tag(raw, *find_meaning(token, unescape_xml(content)))
            order = token.get("canReorder")
            if order == "firstNo" or (order == "no" and not sequences):
                sequences.append([])
            if order in ("firstNo", "no"):
                sequences[-1].append(number)
        elif token.kind == "close":
            builder.add_tag(token.raw, "close", f"<{token.name}>")
        else:
            builder.add_tag(token.raw)
        index = end + 1
    for sequence in sequences:
        builder.keep_order(sequence)
    return builder


def find_meaning(token: MarkupToken, content: str) -> tuple[Kind, str]:
    """Return the kind and the key of a single code, such as <ph>, <x> or <it>.

    Two of them can be the ends of a pair by what they stand for: an opening and a closing tag.
    """
    names = [content, *map(token.get, MEANINGS)] if token.name in ("ph", "x", "it", "ut") else []
    for name in names:
        if match := CODE_TAG.fullmatch(name):
            return "close" if match[1] else "open", f"tag {match[2]}"
        if match := NAMED_TAG.fullmatch(name):
            return "open" if match[1] == "START" else "close", f"name {match[2]}"
    if token.name == "it":
        return ISOLATED_KINDS.get(token.get("pos"), "standalone"), f"isolated {token.get('rid') or token.get('x')}"
    return "standalone", ""
