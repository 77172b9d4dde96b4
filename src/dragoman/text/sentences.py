"""Where sentences end: a line that is too long for a model is cut there."""

from __future__ import annotations

import re

END = re.compile(r"[.!?…]+[\"'“”’«»‹›)\]]*(?=\s)|[。！？]+[”’」』)\]]*")
WORD = re.compile(r"\S+")
LETTER = re.compile(r"\S")


def sentences(line: str) -> list[str]:
    """A line cut after marks that end sentences. Nothing is lost but the space between them."""
    found, begun = [], 0
    cased = line != line.lower()
    for mark in END.finditer(line):
        if ends(line, mark, cased):
            found.append(line[begun : mark.end()])
            begun = mark.end()
    return [sentence.strip() for sentence in (*found, line[begun:]) if sentence.strip()]


def ends(line: str, mark: re.Match[str], cased: bool) -> bool:
    """Whether a mark ends a sentence: not after "Dr.", "z. B.", "e.g." or "3.", nor where small letters go on.

    In doubt it does not: two sentences together do less harm than half of one.
    """
    after = WORD.search(line, mark.end())
    if cased and after and after[0][0].islower():
        return False
    before = line[max(0, mark.start() - 20) : mark.start()].split(" ")[-1].lstrip("\"'“„«(")
    short = before.isdigit() or len(before) == 1 or "." in before or (len(before) <= 3 and before.istitle())
    return mark[0] != "." or not short
