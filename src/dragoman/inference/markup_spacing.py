"""White space beside the inline tags of a translation: it stays on the side of a tag where the source has it.

The translation has some white space between each two words, and the source tells in which slots between the tags there
it belongs (`share_space`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from dragoman.documents.document import MarkedText, Markup, Unit
from dragoman.inference.word_alignment import AlignedText


class Surroundings(NamedTuple):
    """The white space in the source right before and right after a tag: between it and the next tag or word."""

    before: str
    after: str
    is_behind_word: bool
    is_loose: bool  # it encloses no words, and there is white space on both sides, apart from other tags
    is_object: bool  # it stands like a word by itself, such as inline code


def find_surroundings(source: Unit | MarkedText) -> dict[int, Surroundings]:
    """Return what surrounds each tag of a source, by its id."""
    text, found = source.text, dict[int, Surroundings]()
    borders = [0, *(tag.position for tag in source.markup), len(text)]
    position_of = {tag.id: tag.position for tag in source.markup}
    for tag, first, last in zip(source.markup, borders, borders[2:], strict=False):
        left, right = text[first : tag.position], text[tag.position : last]
        previous, following = text[max(tag.position - 1, 0) : tag.position], text[tag.position : tag.position + 1]
        is_apart = not previous or previous.isspace() or unicodedata.category(previous) in ("Ps", "Pi")
        has_words = tag.partner is not None and position_of[tag.partner] != tag.position
        found[tag.id] = Surroundings(
            before=left[len(left.rstrip()) :],
            after=right[: len(right) - len(right.lstrip())],
            is_behind_word=bool(previous) and not previous.isspace(),
            is_loose=previous.isspace() and following.isspace() and not has_words,
            is_object=is_apart and not following.isalnum() and not has_words,
        )
    return found


def find_neighbours(source: Unit | MarkedText) -> dict[int, list[int]]:
    """Return the ids of all tags between two words of a source, by the id of the first one."""
    neighbours, position, first = dict[int, list[int]](), 0, -1
    for tag in source.markup:
        if first < 0 or source.text[position : tag.position].strip():
            first = tag.id
        neighbours.setdefault(first, []).append(tag.id)
        position = tag.position
    return neighbours


def insert_tags(source: Unit | MarkedText, target: AlignedText, markup: Sequence[Markup]) -> MarkedText:
    """Return the target with tags; the position of each is given as the number of words before it.

    White space stands on that side of a tag where the source has it.
    """
    surroundings, neighbours = find_surroundings(source), find_neighbours(source)
    text, count = target.text, len(target.words)
    starts, ends = [*(start for start, _ in target.words), len(text)], [0, *(end for _, end in target.words)]
    head, tail = source.text[: source.markup[0].position], source.text[source.markup[-1].position :]
    pieces, length, copied, placed = list[str](), 0, 0, list[Markup]()
    for gap, tags in groupby(markup, key=lambda tag: tag.position):
        group = list(tags)
        near = [surroundings[tag.id] for tag in group]
        wanted = [near[0].before, *(each.after for each in near)]  # before each tag, and after the last
        for i in range(1, len(near)):
            wanted[i] = wanted[i] or near[i].before
        if gap == 0:
            wanted[0] = head[: len(head) - len(head.lstrip())]
        if gap == count:
            wanted[-1] = tail[len(tail.rstrip()) :]
        space = text[ends[gap] : starts[gap]]
        are_neighbours = neighbours.get(group[0].id) == [tag.id for tag in group]
        if not (are_neighbours and "".join(wanted) == space):
            ends_of_text = gap == 0, gap == count
            wanted = share_space(space, wanted, group, near, ends_of_text, are_neighbours=are_neighbours)
        pieces += [text[copied : ends[gap]], wanted[0]]
        length, copied = length + ends[gap] - copied + len(wanted[0]), starts[gap]
        for tag, after in zip(group, wanted[1:], strict=True):
            placed.append(tag._replace(position=length))
            pieces.append(after)
            length += len(after)
    return MarkedText("".join([*pieces, text[copied:]]), tuple(placed))


def share_space(
    space: str,
    wanted: Sequence[str],
    tags: Sequence[Markup],
    near: Sequence[Surroundings],
    ends_of_text: tuple[bool, bool],
    *,
    are_neighbours: bool,
) -> list[str]:
    """Return the white space of each slot: before each of the tags between two words, and after the last one.

    `space` is that between the words, and `wanted` that of the source in each slot. `ends_of_text` says whether there
    is no word before or after the tags, `are_neighbours` whether they are those between two words of the source.

    1. A slot at an end inside a pair, where the source has no white space, gets none.
    2. The space goes to the outermost slot where it is wanted. If it is wanted nowhere, it goes behind the tags that
       belong to the word before, or to the nearest outermost slot before that.
    3. If `are_neighbours`, further slots where it is wanted get a part of it.
    4. So do slots beside a single tag with white space on both sides in the source, and beside an object. The latter
       get a space even if there is none between the words, as before a full stop.
    """
    (is_first, is_last), depths, default = ends_of_text, [0], 0
    for i, (tag, each) in enumerate(zip(tags, near, strict=True), 1):
        depths.append(depths[-1] + (tag.kind == "open") - (tag.kind == "close"))
        if tag.kind == "close" or (tag.kind == "standalone" and each.is_behind_word):
            default = i
    default = 0 if is_first else len(tags) if is_last else default
    forbidden = {i for i, tag in enumerate(tags) if tag.kind == "close" and not near[i].before}
    forbidden |= {i for i, tag in enumerate(tags, 1) if tag.kind == "open" and not near[i - 1].after}
    candidates = [i for i, each in enumerate(wanted) if each and i not in forbidden]
    lowest = min(depths)
    outermost = [i for i in range(default, -1, -1) if depths[i] == lowest]
    main = min(candidates or outermost, key=depths.__getitem__)
    further = {i for i, each in enumerate(wanted) if each and space and are_neighbours}
    for i, each in enumerate(near):
        if each.is_object or (space and each.is_loose):
            further |= {i} if each.before and not (is_first and i == 0) else set()
            further |= {i + 1} if each.after and not (is_last and i == len(near) - 1) else set()
    shared = [""] * len(wanted)
    for i in sorted(further - forbidden - {main}):
        shared[i] = space[-1] if len(space) > 1 else " "
        space = space[:-1] if len(space) > 1 else space
    shared[main] = space or (" " if main in further else "")
    return shared
