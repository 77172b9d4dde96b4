"""Texts with several lines: what is translated of them, and what is between.

Models translate lines. Line breaks, empty lines and white space at the ends of lines are copied, and so are lines
without anything to translate, such as emoji. If a request wants it, each sentence is a line.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dragoman.inference.postprocess import has_words, join_hypotheses, locate_sentences
from dragoman.types import Hypothesis

BREAKS = "\n\r\x0b\x0c\x85\u2028\u2029"
LINE = re.compile(rf"\S(?:[^{BREAKS}]*\S)?")  # without white space at its ends
TEXT = re.compile(r"\S(?:.*\S)?", re.DOTALL)
SYMBOLS = {"So", "Sk", "Cf", "Mn", "Me", "Zs", "Co", "Cn"}  # Unicode categories of which emoji consist


@dataclass(frozen=True, slots=True)
class LineLayout:
    """A text as gaps[0] + lines[0] + gaps[1] + lines[1] + ... + gaps[-1]. Only the lines are translated."""

    lines: tuple[str, ...]
    gaps: tuple[str, ...]

    @classmethod
    def split(
        cls, text: str, *, keep_breaks: bool = True, split_sentences: bool = False, copy_wordless: bool = False
    ) -> LineLayout:
        """Split a text into lines. Without `keep_breaks`, all of it is one line, in which breaks become spaces.

        With `split_sentences`, each sentence is a line of its own. With `copy_wordless`, what has no words, such as a
        number or a placeholder, is copied.
        """
        spans = [match.span() for match in (LINE if keep_breaks else TEXT).finditer(text)]
        if split_sentences:
            spans = [span for start, stop in spans for span in locate_sentences(text, start, stop)]
        lines, gaps, end = list[str](), list[str](), 0
        for start, stop in spans:
            part = text[start:stop]
            if not is_symbolic(part) and (has_words(part) or not copy_wordless):
                gaps.append(text[end:start])
                lines.append(part if keep_breaks else " ".join(part.split()))
                end = stop
        return cls(tuple(lines), (*gaps, text[end:]))

    def join(self, lines: Sequence[str]) -> str:
        """Return the text with these lines in place of its own."""
        parts = [part for gap, line in zip(self.gaps, lines, strict=False) for part in (gap, line)]
        return "".join([*parts, self.gaps[-1]])

    def join_nbest(self, nbest_lists: Sequence[Sequence[Hypothesis]], count: int) -> list[Hypothesis]:
        """Return the `count` best hypotheses of the text, given those of its lines.

        The second best one consists of the second best ones of the lines, or the best one where there is no second.
        """
        length = max((len(nbest) for nbest in nbest_lists), default=1)
        joined = []
        for rank in range(min(length, count)):
            parts = [nbest[min(rank, len(nbest) - 1)] for nbest in nbest_lists]
            hypothesis = join_hypotheses(parts)
            if len(parts) > 1:  # drops 'translated in N parts', since the lines were separate texts
                warnings = tuple(dict.fromkeys(warning for part in parts for warning in part.warnings))
                hypothesis = replace(hypothesis, warnings=warnings)
            joined.append(replace(hypothesis, text=self.join([part.text for part in parts])))
        return joined


def is_symbolic(text: str) -> bool:
    """Return whether a text consists of emoji and other symbols, which mean the same in all languages."""
    return all(unicodedata.category(character) in SYMBOLS or character.isspace() for character in text)
