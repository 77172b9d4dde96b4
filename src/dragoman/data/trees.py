"""Dependency trees in CoNLL-U files.

The n-th sentence of a CoNLL-U file belongs to the n-th line of text that is not empty. The columns ID, FORM and HEAD
are read. Where one token stands for several words ("3-4  zum", then "zu" and "dem") and these do not spell it, its
letters belong to the word nearest the root. Empty nodes ("5.1") are not part of the basic tree and are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from dragoman.errors import UserError
from dragoman.io import read_lines
from dragoman.types import Pair, Tree

CONLLU_COLUMNS = 10
WORD_NUMBER = re.compile(r"(?P<word>[1-9]\d{0,8})|(?P<first>[1-9]\d{0,8})-(?P<last>[1-9]\d{0,8})|\d+\.\d+", re.ASCII)
HEAD_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


class ConlluRow(NamedTuple):
    """A word or, where `last` is beyond `first`, one token that stands for several."""

    first: int
    last: int
    form: str
    head: int


def read_conllu(path: Path) -> Iterator[Tree]:
    """Yield the trees of a CoNLL-U file, compressed or not.

    for tree in read_conllu(Path("train.en.conllu.gz")):
        print(tree.words, tree.heads)
    """
    rows: list[ConlluRow] = []
    begun = number = 0
    for number, line in enumerate(chain(read_lines(path), [""]), 1):  # an empty line ends the last sentence, too
        if line.strip() and not line.startswith("#"):
            begun = begun if rows else number
            rows += parse_row(line, f"{path} line {number}")
        elif not line.strip() and rows:
            yield build_tree(rows, f"{path}: the sentence from line {begun} on")
            rows = []
    if number == 1:
        raise UserError(f"{path} is empty")


def parse_row(line: str, place: str) -> list[ConlluRow]:
    """Return the row of a line; an empty node has none."""
    columns = line.split("\t")
    if len(columns) != CONLLU_COLUMNS:
        raise UserError(
            f"{place} has {len(columns)} column{'s' * (len(columns) != 1)}, "
            f"but CoNLL-U has {CONLLU_COLUMNS}, separated by one tab"
        )
    found = WORD_NUMBER.fullmatch(columns[0])
    if not found or (found["first"] and int(found["first"]) >= int(found["last"])):
        raise UserError(f"{place} must begin with the number of a word, such as 3, 3-4 or 3.1, not {columns[0]!r}")
    if found["first"]:
        return [ConlluRow(int(found["first"]), int(found["last"]), columns[1], 0)]
    if not found["word"]:
        return []
    if not HEAD_NUMBER.fullmatch(columns[6]):
        raise UserError(f"{place}: the head, in column 7, must be the number of a word, or 0, not {columns[6]!r}")
    return [ConlluRow(int(found["word"]), int(found["word"]), columns[1], int(columns[6]))]


def build_tree(rows: Sequence[ConlluRow], place: str) -> Tree:
    """Return the tree of a sentence; the letters of a token that stands for several words are divided among them."""
    words = [row for row in rows if row.first == row.last]
    if [row.first for row in words] != list(range(1, len(words) + 1)):
        raise UserError(
            f"{place} must have words numbered 1, 2, 3, ..., not {', '.join(str(w.first) for w in words[:9])}"
        )
    heads = tuple(row.head for row in words)
    if wrong := find_tree_fault(Tree(("",) * len(heads), heads)):
        raise UserError(f"{place} has no tree: {wrong}")

    def compute_depth(word: int) -> int:
        depth = 0
        while word:
            word, depth = heads[word - 1], depth + 1
        return depth

    forms = [row.form for row in words]
    for row in rows:
        if row.last > len(words):
            raise UserError(f"{place} has a token {row.first}-{row.last} but only {len(words)} words")
        span = slice(row.first - 1, row.last)
        if row.last > row.first and remove_spaces("".join(forms[span])) != remove_spaces(row.form):
            highest = min(range(row.first, row.last + 1), key=compute_depth)
            forms[span] = [row.form if word == highest else "" for word in range(row.first, row.last + 1)]
    return Tree(tuple(forms), heads)


def find_tree_fault(tree: Tree) -> str:
    """Return what is wrong with a tree, or "". Several roots are allowed."""
    words, heads = tree
    if len(words) != len(heads):
        return f"there are {len(words)} words but {len(heads)} heads"
    rooted = {0}
    for word in range(1, len(heads) + 1):
        path: dict[int, None] = {}
        at = word
        while at not in rooted:
            if at in path:
                return f"the heads of word {at} lead back to it"
            path[at] = None
            if not 0 <= heads[at - 1] <= len(heads):
                return f"word {at} has the head {heads[at - 1]}, but there are {len(heads)} words"
            at = heads[at - 1]
        rooted.update(path)
    return ""


class TreeReader:
    """The trees of a file, line by line; error messages call the lines `what`."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what, self.given = path, what, 0
        self.trees = read_conllu(path)

    def tree_of(self, line: str) -> Tree | None:
        """Return the tree of the next line, None for an empty line."""
        if not line.strip():
            return None
        tree = next(self.trees, None)
        if tree is None:
            raise UserError(
                f"{self.path} has {self.given} sentences, but {self.what} has more lines that are not empty"
            )
        self.given += 1
        return tree

    def end(self) -> None:
        """Check after the last line that no tree is left."""
        if rest := sum(1 for _ in self.trees):
            raise UserError(
                f"{self.path} has {self.given + rest} sentences, but {self.what} has {self.given} lines "
                "that are not empty"
            )


def attach_trees(pairs: Iterable[Pair], path: Path, what: str) -> Iterator[Pair]:
    """Yield the pairs, each with the tree of its source."""
    reader = TreeReader(path, what)
    for pair in pairs:
        yield replace(pair, tree=reader.tree_of(pair.source))
    reader.end()


def remove_spaces(text: str) -> str:
    """Return the text without whitespace."""
    return "".join(text.split())


def format_conllu(text: str, tree: Tree) -> str:
    """Format a sentence as lines of a CoNLL-U file."""
    lines, end = [f"# text = {text}"], 0
    for number, (word, head) in enumerate(zip(*tree, strict=True), 1):
        end = text.index(word, end) + len(word)
        space = "SpaceAfter=No" if text[end : end + 1].strip() else "_"
        columns = [str(number), word, "_", "_", "_", "_", str(head), "dep" if head else "root", "_", space]
        lines.append("\t".join(columns))
    return "\n".join(lines) + "\n"
