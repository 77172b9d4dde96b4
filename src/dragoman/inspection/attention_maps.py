"""Attention as an alignment matrix for the terminal.

Shapes   T target words   S source words
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.style import Style
from rich.text import Text

from dragoman.types import Hypothesis

SHADES = " ░▒▓█"
DARK, BRIGHT = (38, 44, 70), (250, 200, 70)  # red, green and blue of the weights 0 and 1
LONGEST_NAME = 14  # letters of a source word above its column


def merge_into_words(hypothesis: Hypothesis) -> tuple[list[str], list[str], NDArray[np.float64]]:
    """Return source words, target words and weight_TS: summed over a source word's tokens, averaged over a target's."""
    source_of = number_words(hypothesis.source_tokens)
    target_of = number_words(hypothesis.tokens)
    weight = np.zeros((len(target_of), len(source_of)))
    if hypothesis.alignment:  # a line that was split into many parts has none
        weight[:] = hypothesis.alignment
    columns = np.zeros((len(weight), max(source_of, default=-1) + 1))
    np.add.at(columns.T, source_of, weight.T)
    weight_TS = np.zeros((max(target_of, default=-1) + 1, columns.shape[1]))
    np.add.at(weight_TS, target_of, columns)
    weight_TS /= np.bincount(target_of, minlength=len(weight_TS))[:, None] if len(weight_TS) else 1
    return join_words(hypothesis.source_tokens, source_of), join_words(hypothesis.tokens, target_of), weight_TS


def number_words(tokens: Sequence[str]) -> list[int]:
    """Return the word index of each token. A word begins at a space (▁) or between letters and punctuation."""
    numbers: list[int] = []
    before = ""
    for token in tokens:
        begins = token.startswith("▁") or not numbers or is_punctuation(token) or is_punctuation(before)
        numbers.append((numbers[-1] if numbers else -1) + bool(begins))
        before = token
    return numbers


def is_punctuation(token: str) -> bool:
    """Return whether a token has characters, but neither letters nor digits."""
    bare = token.lstrip("▁")
    return bool(bare) and not any(letter.isalnum() for letter in bare)


def join_words(tokens: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """Return the words that tokens make up, given the word index of each token."""
    words = [""] * (max(numbers, default=-1) + 1)
    for token, number in zip(tokens, numbers, strict=True):
        words[number] += "".join(letter if letter.isprintable() else "·" for letter in token.replace("▁", ""))
    return words


def render_alignment(hypothesis: Hypothesis) -> Text:
    """Render the alignment as a coloured matrix: source words above, target words on the left."""
    return render_matrix(*merge_into_words(hypothesis))


def render_matrix(source: Sequence[str], target: Sequence[str], weight_TS: NDArray[np.float64]) -> Text:
    """Render weights between 0 and 1 as a coloured matrix of words."""
    names = [list(word if len(word) <= LONGEST_NAME else word[: LONGEST_NAME - 1] + "…") for word in source]
    height = max(map(len, names), default=0)
    margin = max(map(cell_len, target), default=0)
    grid = Text()
    for line in range(height):
        letters = (" " if line < height - len(name) else name[line - height] for name in names)
        above = "".join(" " + set_cell_size(letter, 2) for letter in letters)
        grid.append(" " * (margin + 2) + above.rstrip() + "\n", style="dim")
    for word, weight_S in zip(target, weight_TS, strict=True):
        grid.append(" " * (margin - cell_len(word)) + word + "  ")
        for weight in weight_S.tolist():
            share = min(weight, 1.0) ** 0.7
            red, green, blue = (round(a + (b - a) * share) for a, b in zip(DARK, BRIGHT, strict=True))
            style = Style(color=Color.from_rgb(red, green, blue), bgcolor=Color.from_rgb(*DARK))
            grid.append(SHADES[min(int(weight * len(SHADES)), len(SHADES) - 1)] * 3, style=style)
        grid.append("\n")
    return grid
