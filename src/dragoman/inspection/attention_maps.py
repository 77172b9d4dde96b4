"""Alignments (cross-attention weights) as a coloured matrix for the terminal.

`merge_into_words` turns weights between tokens into weights between words; `render_matrix` renders them.

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

from dragoman.types import BOS, EOS, PAD, SPECIALS, Hypothesis

SHADES = " ░▒▓█"  # characters for increasing weights, for terminals without colours
DARK, BRIGHT = (38, 44, 70), (250, 200, 70)  # red, green and blue of the weights 0 and 1
CONTRAST = 0.7  # exponent of the weights; an exponent below 1 makes small weights easier to see
MARKS = {SPECIALS[PAD], SPECIALS[BOS], SPECIALS[EOS]}  # <unk> may be part of a word
MAX_LETTERS = 14  # maximum number of letters of a source word above its column


def merge_into_words(hypothesis: Hypothesis) -> tuple[list[str], list[str], NDArray[np.float64]]:
    """Return source words, target words, and the attention weight_TS of target words on source words.

    Weights are summed over the tokens of a source word and averaged over the tokens of a target word.
    """
    source_numbers = number_words(hypothesis.source_tokens)
    target_numbers = number_words(hypothesis.tokens)
    token_weights = np.zeros((len(target_numbers), len(source_numbers)))
    if hypothesis.alignment:  # a long line that was translated in parts has none
        token_weights[:] = hypothesis.alignment
    word_weights = np.zeros((len(token_weights), max(source_numbers, default=-1) + 1))  # tokens by words
    np.add.at(word_weights.T, source_numbers, token_weights.T)
    weight_TS = np.zeros((max(target_numbers, default=-1) + 1, word_weights.shape[1]))
    np.add.at(weight_TS, target_numbers, word_weights)
    weight_TS /= np.bincount(target_numbers, minlength=len(weight_TS))[:, None] if len(weight_TS) else 1
    source_words = join_words(hypothesis.source_tokens, source_numbers)
    return source_words, join_words(hypothesis.tokens, target_numbers), weight_TS


def number_words(tokens: Sequence[str]) -> list[int]:
    """Return the word index of each token.

    A word begins at a space (▁) or between letters and punctuation. BOS, EOS and padding are words of their own.
    """
    numbers: list[int] = []
    previous = ""
    for token in tokens:
        is_apart = is_punctuation(token) or is_punctuation(previous) or not {token, previous}.isdisjoint(MARKS)
        is_start = token.startswith("▁") or not numbers or is_apart
        numbers.append((numbers[-1] if numbers else -1) + bool(is_start))
        previous = token
    return numbers


def is_punctuation(token: str) -> bool:
    """Return whether a token has characters, but neither letters nor digits."""
    characters = token.lstrip("▁")
    return bool(characters) and not any(character.isalnum() for character in characters)


def join_words(tokens: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """Return the words of a text, given its tokens and the word index of each token."""
    words = [""] * (max(numbers, default=-1) + 1)
    for token, number in zip(tokens, numbers, strict=True):
        words[number] += "".join(letter if letter.isprintable() else "·" for letter in token.replace("▁", ""))
    return words


def render_alignment(hypothesis: Hypothesis) -> Text:
    """Render the alignment as a coloured matrix: source words above, target words on the left."""
    return render_matrix(*merge_into_words(hypothesis))


def render_matrix(source: Sequence[str], target: Sequence[str], weight_TS: NDArray[np.float64]) -> Text:
    """Render weights between 0 and 1 as a coloured matrix of words."""
    labels = [list(word if len(word) <= MAX_LETTERS else word[: MAX_LETTERS - 1] + "…") for word in source]
    height = max(map(len, labels), default=0)  # source words are written downwards, one letter per line
    margin = max(map(cell_len, target), default=0)
    text = Text()
    for line in range(height):
        letters = (" " if line < height - len(label) else label[line - height] for label in labels)
        header = "".join(" " + set_cell_size(letter, 2) for letter in letters)  # three terminal columns per word
        text.append(" " * (margin + 2) + header.rstrip() + "\n", style="dim")
    for word, weight_S in zip(target, weight_TS, strict=True):
        text.append(" " * (margin - cell_len(word)) + word + "  ")
        for weight in weight_S.tolist():
            brightness = min(weight, 1.0) ** CONTRAST
            red, green, blue = (round(low + (high - low) * brightness) for low, high in zip(DARK, BRIGHT, strict=True))
            style = Style(color=Color.from_rgb(red, green, blue), bgcolor=Color.from_rgb(*DARK))
            text.append(SHADES[min(int(weight * len(SHADES)), len(SHADES) - 1)] * 3, style=style)
        text.append("\n")
    return text
