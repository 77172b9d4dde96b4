"""SentencePiece at the edges: impossible sizes, texts that are hard to learn from, characters it keeps for itself."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.data.subwords import ESCAPES, escape, unescape
from dragoman.data.tokenizers import TokenizerSettings, train_tokenizer
from dragoman.errors import UserError
from toy_text import LINES, ODD

kinds = pytest.mark.parametrize("kind", ["bpe", "unigram"])


@given(st.lists(st.sampled_from([*ESCAPES, *"012a "])).map("".join))
def test_escaping_can_be_undone_and_hides_what_it_must(text: str) -> None:
    hidden = escape(text)
    assert unescape(hidden) == text
    assert not {"▁", "▅"} & set(hidden)


@kinds
def test_too_large_a_size_is_answered_with_the_largest_that_works(kind: str) -> None:
    with pytest.raises(
        UserError, match=r"tokenizer\.size 5000 is more than .* largest that works here is \d+"
    ) as fault:
        train_tokenizer(LINES, TokenizerSettings(kind=kind, size=5000))
    largest = int(re.findall(r"\d+", str(fault.value))[-1])
    assert train_tokenizer(LINES, TokenizerSettings(kind=kind, size=largest)).size == largest
    with pytest.raises(UserError):
        train_tokenizer(LINES, TokenizerSettings(kind=kind, size=largest + 1))


@kinds
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_too_small_a_size_is_answered_with_the_bound(kind: str, byte_fallback: bool) -> None:
    settings = TokenizerSettings(kind=kind, size=20, byte_fallback=byte_fallback)
    with pytest.raises(UserError, match=r"tokenizer\.size 20 is too small for the \d+ .*; set it above \d+") as fault:
        train_tokenizer(LINES, settings)
    bound = int(re.findall(r"\d+", str(fault.value))[-1])
    assert train_tokenizer(LINES, settings.model_copy(update={"size": bound + 1})).size == bound + 1


@kinds
@pytest.mark.parametrize("lines", [[], [""], ["", ""]])
def test_no_text_is_a_mistake(kind: str, lines: list[str]) -> None:
    with pytest.raises(UserError, match="no text"):
        train_tokenizer(lines, TokenizerSettings(kind=kind))


@kinds
@pytest.mark.parametrize("odd", ODD)
def test_odd_texts_can_be_learned_from(kind: str, odd: str) -> None:
    tokenizer = train_tokenizer([*LINES, *[f"a{odd}b {odd}"] * 50], TokenizerSettings(kind=kind, size=330))
    assert tokenizer.decode(tokenizer.encode(f"a{odd}b {odd}")) == f"a{odd}b {odd}"


@kinds
def test_long_lines_are_learned_from(kind: str) -> None:
    """A word of a single long line needs fewer subwords than without that line. How few depends on rounding."""
    settings = TokenizerSettings(kind=kind, size=400)
    without, tokenizer = train_tokenizer(LINES, settings), train_tokenizer([*LINES, "zebra " * 1000], settings)
    assert len(tokenizer.encode("zebra")) < len(without.encode("zebra"))
