"""Word tokenizers: punctuation marks record missing spaces, and a word has the same id beside any mark."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.data.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    CodeTokenizer,
    SpaceTokenizer,
    TokenizerSettings,
    WordTokenizer,
)

MARKED = st.lists(st.sampled_from(["dog", "größer", "don't", "well-known", "हिन्दी", *".,!?()„“\"'-–…。", " "]))


@pytest.mark.parametrize("cls", [WordTokenizer, CodeTokenizer])
@given(text=MARKED.map(lambda parts: " ".join("".join(parts).split())))
def test_known_words_and_marks_decode_with_their_spaces(cls: type[WordTokenizer], text: str) -> None:
    tokenizer = cls.train([text], TokenizerSettings(kind="word"))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("He walks, then stops.", ["He", "walks", "￭,", "then", "stops", "￭."]),
        ('"Hi," (he) said', ['"￭', "Hi", "￭,", '￭"', "(￭", "he", "￭)", "said"]),
        ("don't a/b  well-known", ["don't", "a", "￭/￭", "b", "well-known"]),
        ("Grüße हिन्दी", ["Grüße", "हिन्दी"]),
    ],
)
def test_punctuation_marks_have_the_joiners(text: str, tokens: list[str]) -> None:
    assert WordTokenizer.split(text) == tokens


def test_a_value_of_a_query_is_the_word_of_the_question() -> None:
    query = 'SELECT MAX( CITYalias0.CITY_NAME ) FROM CITY WHERE name = "salt lake city" ;'
    tokens = ["SELECT", "MAX", "￭(", "CITYalias0.CITY_NAME", ")", "FROM", "CITY", "WHERE", "name", "="]
    assert CodeTokenizer.split(query) == [*tokens, '"￭', *CodeTokenizer.split("salt lake city"), '￭"', ";"]
    assert CodeTokenizer.split('f("x_1",y.z)') == ["f", "￭(", '￭"￭', "x_1", '￭"', "￭,￭", "y.z", "￭)"]


@pytest.mark.parametrize("cls", [CharTokenizer, WordTokenizer])
def test_size_keeps_the_most_frequent_and_ties_do_not_depend_on_order(
    cls: type[CharTokenizer] | type[WordTokenizer],
) -> None:
    settings = TokenizerSettings(kind="word", size=8, byte_fallback=False)
    lines = ["c c c", "b b", "a", "d e f g h i j k"]
    tokenizer = cls.train(lines, settings)
    assert tokenizer.size == 4 + 8
    assert tokenizer.content == cls.train(lines[::-1], settings).content
    assert "c" in "".join(tokenizer.ids_to_tokens([4, 5]))


def test_bytes_are_utf8() -> None:
    assert ByteTokenizer().encode("aé") == [4 + byte for byte in "aé".encode()]
    assert ByteTokenizer().ids_to_tokens(ByteTokenizer().encode("a é")) == ["a", "▁", "<0xC3>", "<0xA9>"]
    assert ByteTokenizer().size == 260


@given(st.lists(st.text(max_size=5).map(lambda text: "".join(text.split())).filter(bool)))
def test_space_tokenizer_splits_only_at_spaces(tokens: list[str]) -> None:
    tokenizer = SpaceTokenizer.train([" ".join(tokens)], TokenizerSettings(kind="space"))
    assert tokenizer.decode(tokenizer.encode("  ".join(tokens))) == " ".join(tokens)
    assert tokenizer.ids_to_tokens(tokenizer.encode(" ".join(tokens))) == ["▁" + token for token in tokens]
