"""Projection of inline tags from a source to its translation, by the alignment of their words.

A pair of tags goes around the run of target words that are aligned best to the words it encloses in the source; other
tags go beside the word that is aligned to their neighbour. Pairs stay nested as they are: a pair is placed within the
words of the pair around it, and beside those of its siblings. Single tags that must keep their order, such as the ends
of a range, do so. White space beside tags is a matter of markup_spacing.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dragoman.documents.document import MarkedText, Markup, Unit
from dragoman.inference.markup_spacing import insert_tags
from dragoman.inference.word_alignment import AlignedText, WordSpan

UNALIGNED_WARNING = "tags placed by position, since the model has no alignment"
NO_WORDS_WARNING = "a pair of tags without words"
NOT_NESTED_WARNING = "tags placed by position, since they are not nested or nested very deeply"
ORDER_WARNING = "tags that must keep their order are in another one"
LONG_WARNING = "tags placed by position, since the text is very long"
MAX_WEIGHTS = 1 << 22  # weights of words on each other; for those of a longer text, memory and time would be squared
MAX_TAG_NESTING = 200  # pairs in pairs that are placed by alignment, which takes a few calls of a function for each


@dataclass(slots=True)
class TagNode:
    """A pair of tags, or one tag, with the tags inside the pair. `start` and `end` are words of the source."""

    tag: Markup
    closing: Markup | None = None
    children: list[TagNode] = field(default_factory=list)
    span: tuple[int, int] = (0, 0)  # first target word and the one after the last; for a single tag both are equal


def join_aligned(parts: Sequence[tuple[int, int, AlignedText]], source: str) -> AlignedText:
    """Join the translations of parts of a source, (start, end, translation), with the text between them as it is."""
    pieces, position, length = [], 0, 0
    source_words: list[WordSpan] = []
    words: list[WordSpan] = []
    blocks = []
    for start, end, part in parts:
        pieces += [source[position:start], part.text]
        length += start - position
        source_words += [(a + start, b + start) for a, b in part.source_words]
        words += [(a + length, b + length) for a, b in part.words]
        length += len(part.text)
        position = end
        blocks.append(part)
    text = "".join([*pieces, source[position:]])
    target = AlignedText(text, source_words, words, None)
    if is_too_long(target) or any(part.weight_TS is None and part.source_words and part.words for part in blocks):
        return target
    weight_TS = np.zeros((len(words), len(source_words)))
    row = column = 0
    for part in blocks:
        if part.weight_TS is not None:
            height, width = part.weight_TS.shape
            weight_TS[row : row + height, column : column + width] = part.weight_TS
        row, column = row + len(part.words), column + len(part.source_words)
    return target._replace(weight_TS=weight_TS)


def is_too_long(target: AlignedText) -> bool:
    """Return whether a text has too many words for their alignment."""
    return len(target.words) * len(target.source_words) > MAX_WEIGHTS


def place_markup(source: Unit | MarkedText, target: AlignedText) -> tuple[MarkedText, list[str]]:
    """Return the target with the tags of the source, each exactly once, and warnings."""
    if not source.markup or target.text == source.text:
        return MarkedText(target.text, source.markup), []
    roots = nest_tags(source.markup)
    if roots is None or is_too_long(target):
        scale = len(target.text) / max(len(source.text), 1)
        markup = [
            tag._replace(position=find_word_boundary(round(tag.position * scale), target)) for tag in source.markup
        ]
        return MarkedText(target.text, tuple(markup)), [NOT_NESTED_WARNING if roots is None else LONG_WARNING]
    placement = Placement(source, target)
    placement.place(roots, (0, len(target.words)), (0, len(source.text)))
    markup = order_sequences(placement.emit(roots))
    ids: dict[int, int] = {}  # of the last tag of each sequence
    for tag in markup:
        if tag.sequence is not None:
            if ids.get(tag.sequence, -1) > tag.id:
                placement.warnings[ORDER_WARNING] = None
            ids[tag.sequence] = tag.id
    return insert_tags(source, target, markup), list(placement.warnings)


def find_word_boundary(position: int, target: AlignedText) -> int:
    """Return the nearest position that is not inside a word."""
    index = bisect_left(target.words, position, key=lambda word: word[0]) - 1  # the last word that begins before it
    start, end = target.words[index] if index >= 0 else (0, 0)
    if position < end:
        return start if position - start <= end - position else end
    return min(position, len(target.text))


def nest_tags(markup: Sequence[Markup]) -> list[TagNode] | None:
    """Return the tags as trees; None if pairs are not nested, or too deeply."""
    roots: list[TagNode] = []
    stack: list[TagNode] = []
    for tag in markup:
        siblings = stack[-1].children if stack else roots
        if tag.kind == "open" and tag.partner is not None:
            node = TagNode(tag)
            siblings.append(node)
            stack.append(node)
            if len(stack) > MAX_TAG_NESTING:
                return None
        elif tag.kind == "close" and tag.partner is not None:
            if not stack or stack[-1].tag.id != tag.partner:
                return None
            stack.pop().closing = tag
        else:
            siblings.append(TagNode(tag))
    return None if stack else roots


class Placement:
    """Places the tags of a source in its translation."""

    def __init__(self, source: Unit | MarkedText, target: AlignedText) -> None:
        if target.weight_TS is not None:  # rows sum to one, also where some source tokens are in no word
            totals = target.weight_TS.sum(-1, keepdims=True)
            target = target._replace(weight_TS=target.weight_TS / np.maximum(totals, 1e-9))
        self.source, self.target, self.warnings = source, target, dict[str, None]()
        self.source_starts = [start for start, _ in target.source_words]
        self.source_ends = [end for _, end in target.source_words]
        trimmed = source.text.rstrip()
        self.first, self.last = len(source.text) - len(source.text.lstrip()), len(trimmed)

    def find_source_words(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of source words that lie between two characters, at least in part."""
        return bisect_right(self.source_ends, start), bisect_left(self.source_starts, end)

    def place(self, nodes: Sequence[TagNode], limits: tuple[int, int], outer: tuple[int, int]) -> None:
        """Place the pairs among siblings, those with most words first, then tags without words, within target words.

        `outer` are the first and the last character of the source between which all of them stand.
        """
        free = np.zeros(len(self.target.words) + 1, dtype=bool)
        free[limits[0] : limits[1]] = True
        pairs = [node for node in nodes if node.closing]
        is_alone = len(pairs) == 1
        for node in sorted(pairs, key=lambda node: node.tag.position - node.closing.position):  # type: ignore[union-attr]
            node.span = self.place_pair(node, limits, free, is_alone=is_alone)
            free[slice(*node.span)] = False
        filled = sorted(node.span for node in pairs if node.span[0] < node.span[1])
        for node in nodes:
            if node.span[0] == node.span[1]:
                self.place_single(node, filled, limits, outer)
        for node in pairs:
            assert node.closing
            self.place(node.children, node.span, (node.tag.position, node.closing.position))

    def place_pair(
        self, node: TagNode, limits: tuple[int, int], free: NDArray[np.bool_], *, is_alone: bool
    ) -> tuple[int, int]:
        """Return the target words of a pair: the run of free words with the greatest weight on its source words.

        The run is empty if there are no words for the pair.
        """
        assert node.closing
        start, end = node.tag.position, node.closing.position
        first, last = self.find_source_words(start, end)
        if is_alone and start <= self.first and end >= self.last and limits == (0, len(self.target.words)):
            return limits  # around the whole text
        candidates = np.flatnonzero(free[limits[0] : limits[1]]) + limits[0]
        if first >= last or not len(candidates):
            if first < last:
                self.warnings[NO_WORDS_WARNING] = None
            return limits[0], limits[0]
        if self.target.weight_TS is None:
            self.warnings[UNALIGNED_WARNING] = None
            total = len(self.target.words) / max(len(self.source_starts), 1)
            mass = np.zeros(len(free))
            mass[int(first * total) : max(int(last * total), int(first * total) + 1)] = 1.0
        else:
            mass = np.append(self.target.weight_TS[:, first:last].sum(-1), 0.0)
        return find_best_run(mass - 0.5, free, limits)

    def guess_word(self, position: int, limits: tuple[int, int], outer: tuple[int, int]) -> int:
        """Return the target word before which a tag at a character of the source belongs, within limits.

        A tag at an end of the source, or of the pair around it, stays there.
        """
        for word, part in ((limits[0], (outer[0], position)), (limits[1], (position, outer[1]))):
            first, last = self.find_source_words(*part)
            if first >= last:  # no words on this side
                return word
        index = bisect_left(self.source_starts, position)
        weight_TS = self.target.weight_TS
        if weight_TS is None:
            self.warnings[UNALIGNED_WARNING] = None
        if weight_TS is None or not len(weight_TS):
            share = len(self.target.words) / max(len(self.source_starts), 1)
            return min(max(round(index * share), limits[0]), limits[1])
        if index > 0 and (index >= len(self.source_starts) or position == self.source_ends[index - 1]):
            word = int(weight_TS[:, index - 1].argmax()) + 1  # right behind the word before it
        else:
            word = int(weight_TS[:, index].argmax()) if index < weight_TS.shape[1] else limits[1]
        return min(max(word, limits[0]), limits[1])

    def place_single(
        self, node: TagNode, filled: Sequence[WordSpan], limits: tuple[int, int], outer: tuple[int, int]
    ) -> None:
        """Place a tag or a pair without words: at an end of the text, or beside the word aligned to its neighbour.

        `filled` are the target words of its sibling pairs, which do not overlap, in their order.
        """
        word = self.guess_word(node.tag.position, limits, outer)
        index = bisect_left(filled, (word,)) - 1  # the last pair that begins before the word
        if index >= 0 and word < filled[index][1]:  # not into a pair that does not enclose it
            start, end = filled[index]
            word = start if word - start < end - word else end
        node.span = (word, word)

    def emit(self, roots: Sequence[TagNode]) -> list[Markup]:
        """Return the tags in their order in the translation; their position is the number of words before them."""
        markup: list[Markup] = []
        text = self.source.text

        def find_order(node: TagNode) -> tuple[int, int]:
            """Put tags that stand right behind a word before others, and those before the start of a pair of words."""
            position = node.tag.position
            is_behind_word = position > 0 and not text[position - 1].isspace()
            return node.span[0], 2 if node.span[0] < node.span[1] else 1 - is_behind_word

        def emit_nodes(nodes: Sequence[TagNode], limits: tuple[int, int]) -> None:
            position = limits[0]
            for node in sorted(nodes, key=find_order):
                start, end = (min(max(word, position), limits[1]) for word in node.span)
                markup.append(node.tag._replace(position=start))
                if node.closing:
                    emit_nodes(node.children, (start, end))
                    markup.append(node.closing._replace(position=end))
                position = end

        emit_nodes(roots, (0, len(self.target.words)))
        return markup


def order_sequences(markup: list[Markup]) -> list[Markup]:
    """Return the tags, where the single tags of each sequence have exchanged positions to stand in their order."""
    indices_by_sequence: dict[int, list[int]] = {}
    for index, tag in enumerate(markup):
        if tag.sequence is not None and tag.kind == "standalone":
            indices_by_sequence.setdefault(tag.sequence, []).append(index)
    ordered = list(markup)
    for indices in indices_by_sequence.values():
        tags = sorted((markup[index] for index in indices), key=lambda tag: tag.id)
        for index, tag in zip(indices, tags, strict=True):
            ordered[index] = tag._replace(position=markup[index].position)
    return ordered


def find_best_run(gain: NDArray[np.float64], free: NDArray[np.bool_], limits: tuple[int, int]) -> tuple[int, int]:
    """Return the run of free positions with the greatest sum of gains: at least one position."""
    best, best_run = -np.inf, (limits[0], limits[0])
    total, start = 0.0, limits[0]
    for index in range(*limits):
        if not free[index]:
            total, start = 0.0, index + 1
            continue
        if total < 0:
            total, start = 0.0, index
        total += gain[index]
        if total > best:
            best, best_run = total, (start, index + 1)
    return best_run
