"""Texts with several lines: what is translated of them, and what is between.

Models translate lines. Line breaks, empty lines and white space at the ends of lines are copied, and so are lines
without anything to translate, such as emoji.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dragoman.inference.postprocess import join_hypotheses
from dragoman.types import Hypothesis

BREAKS = "\n\r\x0b\x0c\x85\u2028\u2029"
LINE = re.compile(rf"\S(?:[^{BREAKS}]*\S)?")  # without white space at its ends
SYMBOLS = {"So", "Sk", "Cf", "Mn", "Me", "Zs", "Co", "Cn"}  # Unicode categories of which emoji consist


@dataclass(frozen=True, slots=True)
class LineLayout:
    """A text as gaps[0] + lines[0] + gaps[1] + lines[1] + ... + gaps[-1]. Only the lines are translated."""

    lines: tuple[str, ...]
    gaps: tuple[str, ...]

    @classmethod
    def split(cls, text: str, *, keep_breaks: bool = True) -> LineLayout:
        """Split a text into lines. Without `keep_breaks`, all of it is one line, in which breaks become spaces."""
        if not keep_breaks:
            stripped = text.strip()
            start = text.find(stripped)
            matches = [(start, start + len(stripped))] if stripped else []
        else:
            matches = [match.span() for match in LINE.finditer(text)]
        lines, gaps, end = list[str](), list[str](), 0
        for start, stop in matches:
            if not is_symbolic(text[start:stop]):
                gaps.append(text[end:start])
                lines.append(text[start:stop] if keep_breaks else " ".join(text[start:stop].split()))
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
