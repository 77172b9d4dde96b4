"""Words of a text as character spans, and the alignment of the words of a translation with those of its source.

A word is a run of letters and digits, or a punctuation mark. In scripts without spaces, such as Chinese or Thai, words
begin where tokens begin. Tokens are located in the text by their bytes: one character may have several tokens (bytes),
and one token may have several words. Spans count characters (code points), and the end is exclusive.

Shapes   T target words   S source words
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.data.subwords import SPACE_MARK
from dragoman.data.tokenizers import WORD_OR_MARK
from dragoman.inference.constraints import SPACELESS_LETTER
from dragoman.types import SPECIALS, UNK, Hypothesis

MAX_GAP = 16  # maximum number of bytes before a token that no other token spells
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
ByteSpan = tuple[int, int]
WordSpan = tuple[int, int]  # first character of a word, and the one after its last


class AlignedText(NamedTuple):
    """A translation with the words of both texts and, if known, the weights of its words on those of the source."""

    text: str
    source_words: list[WordSpan]
    words: list[WordSpan]
    weight_TS: NDArray[np.float64] | None  # rows sum to at most one


def read_token(token: str) -> bytes:
    """Return the bytes of a token, without the spaces around it."""
    if match := BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)]).strip()
    return "".join(token.replace(SPACE_MARK, " ").split()).encode()


def locate_token_bytes(text: str, tokens: Sequence[str]) -> list[ByteSpan]:
    """Return where each token stands in the bytes of a text without its white space.

    Some tokens do not spell the text, because characters were unknown or normalized. They have empty spans; the tokens
    after them are found again if they are not far away. <unk> has the bytes before the next token that is found.
    """
    letters = "".join(text.split()).encode()
    spans: list[ByteSpan] = []
    position, unknown = 0, -1  # end of the last token that was found; index of an <unk> after it
    for token in tokens:
        is_unknown = token.replace(SPACE_MARK, "") == SPECIALS[UNK]
        content = b"" if is_unknown else read_token(token)
        limit = len(letters) if unknown >= 0 else position + len(content) + MAX_GAP
        start = letters.find(content, position, limit) if content else -1
        if start < 0:
            unknown = len(spans) if is_unknown else unknown
            spans.append((position, position))
            continue
        if unknown >= 0:
            spans[unknown] = (spans[unknown][0], start)
            unknown = -1
        position = start + len(content)
        spans.append((start, position))
    if unknown >= 0:
        spans[unknown] = (spans[unknown][0], len(letters))
    return spans


def find_words(text: str, token_starts: set[int]) -> list[WordSpan]:
    """Return the words of a text. `token_starts` are the characters with which tokens begin."""
    words: list[WordSpan] = []
    for match in WORD_OR_MARK.finditer(text):
        start = match.start()
        for position in range(start + 1, match.end()):
            is_spaceless = SPACELESS_LETTER.match(text[position]) or SPACELESS_LETTER.match(text[position - 1])
            is_mark = unicodedata.category(text[position])[0] == "M"  # belongs to the letter before
            if is_spaceless and position in token_starts and not is_mark:
                words.append((start, position))
                start = position
        words.append((start, match.end()))
    return words


def align_side(text: str, tokens: Sequence[str]) -> tuple[list[WordSpan], NDArray[np.float64]]:
    """Return the words of a text and, for each token and word, the fraction of the token's bytes in the word."""
    spans = locate_token_bytes(text, tokens)
    positions = [position for position, character in enumerate(text) if not character.isspace()]
    sizes = [len(text[position].encode()) for position in positions]
    starts = [0, *np.cumsum(sizes, dtype=int).tolist()]  # first byte of each letter, and the end
    token_starts = {positions[bisect_right(starts, start) - 1] for start, end in spans if start < end}
    words = find_words(text, token_starts)
    byte_of = dict(zip([*positions, len(text)], starts))
    ends = [byte_of[start] for start, _ in words]  # words are adjacent, so each ends where the next one begins
    fractions = np.zeros((len(tokens), len(words)))
    for index, (start, end) in enumerate(spans):
        word = bisect_right(ends, start) - 1
        while start < end:
            stop = min(end, ends[word + 1] if word + 1 < len(words) else end)
            fractions[index, word] = (stop - start) / (spans[index][1] - spans[index][0])
            start, word = stop, word + 1
    for index in range(len(tokens) - 2, -1, -1):  # a space that is a token by itself belongs to the word after it
        if tokens[index].strip(SPACE_MARK) == "":
            fractions[index] = fractions[index + 1]
    return words, fractions


def align_words(source: str, hypothesis: Hypothesis) -> AlignedText:
    """Return the translation of a source with the weights between their words.

    Weights are summed over the tokens of a source word and averaged over the tokens of a target word.
    """
    source_words, source_fractions = align_side(source, hypothesis.source_tokens)
    words, fractions = align_side(hypothesis.text, hypothesis.tokens)
    if not hypothesis.alignment:
        return AlignedText(hypothesis.text, source_words, words, None)
    token_weights = np.array(hypothesis.alignment) @ source_fractions
    weight_TS = fractions.T @ token_weights / np.maximum(fractions.sum(0)[:, None], 1e-9)
    return AlignedText(hypothesis.text, source_words, words, weight_TS)
