"""Dependency trees in CoNLL-U files: reading, checking and writing.

The n-th sentence of a CoNLL-U file is the tree of the n-th line of text that is not empty. The columns ID, FORM and
HEAD are read. A multiword token ("3-4  zum", followed by the words 3 "zu" and 4 "dem") may differ from its joined
words; then its form is assigned to the word nearest the root, and the other words get the form "". So the concatenated
forms of a tree are always the text. Empty nodes ("5.1") are not part of the basic tree and are skipped.
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
# The column ID: a word (3), a multiword token (3-4) or an empty node (3.1).
WORD_NUMBER = re.compile(r"(?P<word>[1-9]\d{0,8})|(?P<first>[1-9]\d{0,8})-(?P<last>[1-9]\d{0,8})|\d+\.\d+", re.ASCII)
HEAD_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


class ConlluRow(NamedTuple):
    """A word or, if `last` is greater than `first`, a multiword token."""

    first: int  # number of the (first) word
    last: int  # number of the (last) word
    form: str
    head: int  # 0 for a root, and for a multiword token


def read_conllu(path: Path) -> Iterator[Tree]:
    """Yield the trees of a CoNLL-U file, compressed or not.

    for tree in read_conllu(Path("train.en.conllu.gz")):
        print(tree.words, tree.heads)
    """
    rows: list[ConlluRow] = []
    start = number = 0  # `start` is the line where the sentence begins
    for number, line in enumerate(chain(read_lines(path), [""]), 1):  # an empty line also ends the last sentence
        if line.strip() and not line.startswith("#"):
            start = start if rows else number
            rows += parse_row(line, f"{path} line {number}")
        elif not line.strip() and rows:
            yield build_tree(rows, f"{path}: the sentence from line {start} on")
            rows = []
    if number == 1:
        raise UserError(f"{path} is empty")


def parse_row(line: str, location: str) -> list[ConlluRow]:
    """Return a list with the row of a line; it is empty for an empty node. `location` is used in error messages."""
    columns = line.split("\t")
    if len(columns) != CONLLU_COLUMNS:
        raise UserError(
            f"{location} has {len(columns)} column{'s' * (len(columns) != 1)}, "
            f"but CoNLL-U has {CONLLU_COLUMNS}, separated by one tab"
        )
    match = WORD_NUMBER.fullmatch(columns[0])
    if not match or (match["first"] and int(match["first"]) >= int(match["last"])):
        raise UserError(f"{location} must begin with the number of a word, such as 3, 3-4 or 3.1, not {columns[0]!r}")
    if match["first"]:
        return [ConlluRow(int(match["first"]), int(match["last"]), columns[1], 0)]
    if not match["word"]:
        return []
    if not HEAD_NUMBER.fullmatch(columns[6]):
        raise UserError(f"{location}: the head, in column 7, must be the number of a word, or 0, not {columns[6]!r}")
    return [ConlluRow(int(match["word"]), int(match["word"]), columns[1], int(columns[6]))]


def build_tree(rows: Sequence[ConlluRow], location: str) -> Tree:
    """Return the tree of a sentence, after checking it. `location` is used in error messages."""
    words = [row for row in rows if row.first == row.last]
    if [row.first for row in words] != list(range(1, len(words) + 1)):
        raise UserError(
            f"{location} must have words numbered 1, 2, 3, ..., not {', '.join(str(w.first) for w in words[:9])}"
        )
    heads = tuple(row.head for row in words)
    if error := find_tree_error(Tree(("",) * len(heads), heads)):  # only the heads matter
        raise UserError(f"{location} has no tree: {error}")

    def compute_depth(word: int) -> int:
        """Return the number of words from this word to its root, both included."""
        depth = 0
        while word:
            word, depth = heads[word - 1], depth + 1
        return depth

    forms = [row.form for row in words]
    for row in rows:
        if row.last > len(words):
            raise UserError(f"{location} has a token {row.first}-{row.last} but only {len(words)} words")
        span = slice(row.first - 1, row.last)
        if row.last > row.first and remove_spaces("".join(forms[span])) != remove_spaces(row.form):
            numbers = range(row.first, row.last + 1)
            nearest_root = min(numbers, key=compute_depth)
            forms[span] = [row.form if word == nearest_root else "" for word in numbers]
    return Tree(tuple(forms), heads)


def find_tree_error(tree: Tree) -> str:
    """Return a description of the error in a tree, or "" if it is valid. Several roots are allowed."""
    words, heads = tree
    if len(words) != len(heads):
        return f"there are {len(words)} words but {len(heads)} heads"
    valid = {0}  # words from which the heads lead to a root
    for word in range(1, len(heads) + 1):
        path: set[int] = set()
        current = word
        while current not in valid:
            if current in path:
                return f"the heads of word {current} lead back to it"
            path.add(current)
            if not 0 <= heads[current - 1] <= len(heads):
                return f"word {current} has the head {heads[current - 1]}, but there are {len(heads)} words"
            current = heads[current - 1]
        valid |= path
    return ""


class TreeReader:
    """The trees of a file for the lines of a text, which error messages call `text_name`."""

    def __init__(self, path: Path, text_name: str) -> None:
        self.path, self.text_name, self.count = path, text_name, 0
        self.trees = read_conllu(path)

    def read_next(self, line: str) -> Tree | None:
        """Return the tree of the next line, or None if the line is empty."""
        if not line.strip():
            return None
        tree = next(self.trees, None)
        if tree is None:
            raise UserError(
                f"{self.path} has {self.count} sentences, but {self.text_name} has more lines that are not empty"
            )
        self.count += 1
        return tree

    def check_end(self) -> None:
        """Check after the last line that no trees remain in the file."""
        if remaining := sum(1 for _ in self.trees):
            raise UserError(
                f"{self.path} has {self.count + remaining} sentences, but {self.text_name} has {self.count} lines "
                "that are not empty"
            )


def attach_trees(pairs: Iterable[Pair], path: Path, text_name: str) -> Iterator[Pair]:
    reader = TreeReader(path, text_name)
    for pair in pairs:
        yield replace(pair, tree=reader.read_next(pair.source))
    reader.check_end()


def remove_spaces(text: str) -> str:
    return "".join(text.split())


def format_conllu(text: str, tree: Tree) -> str:
    """Format a sentence and its tree as lines of a CoNLL-U file."""
    lines, end = [f"# text = {text}"], 0
    for number, (word, head) in enumerate(zip(*tree, strict=True), 1):
        end = text.index(word, end) + len(word)
        space = "SpaceAfter=No" if text[end : end + 1].strip() else "_"
        columns = [str(number), word, "_", "_", "_", "_", str(head), "dep" if head else "root", "_", space]
        lines.append("\t".join(columns))
    return "\n".join(lines) + "\n"
