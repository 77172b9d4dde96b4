"""Words of texts as spans, and the alignment between them: exact for every tokenizer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.data.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    TokenizerSettings,
    UnigramTokenizer,
    WordTokenizer,
)
from dragoman.inference.word_alignment import align_side, align_words, locate_token_bytes
from dragoman.types import Hypothesis

LINES = ["Der alte Mann liest, was er will: ein Buch!", "今日は天気がいいですね。", "नमस्ते दुनिया", "don't go"] * 3
TOKENIZERS: dict[str, Tokenizer] = {
    "bytes": ByteTokenizer(),
    "characters": CharTokenizer.train(LINES, TokenizerSettings(kind="char", size=40)),
    "bpe": BpeTokenizer.train(LINES, TokenizerSettings(size=330)),
    "unigram": UnigramTokenizer.train(LINES, TokenizerSettings(kind="unigram", size=307)),
    "words": WordTokenizer.train(LINES, TokenizerSettings(kind="word", size=100)),
}


def find_words(tokenizer: Tokenizer, text: str) -> list[str]:
    tokens = tokenizer.ids_to_tokens(tokenizer.encode(text))
    return [text[start:end] for start, end in align_side(text, tokens)[0]]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_words_with_spaces_do_not_depend_on_the_tokenizer(name: str) -> None:
    text = "  Der alte Mann: don't go!  (नमस्ते, Ärger…)"
    expected = ["Der", "alte", "Mann", ":", "don't", "go", "!", "(", "नमस्ते", ",", "Ärger", "…", ")"]
    assert find_words(TOKENIZERS[name], text) == expected


@pytest.mark.parametrize("name", ["bytes", "characters", "bpe", "unigram"])
def test_words_without_spaces_begin_with_tokens(name: str) -> None:
    text = "今日は天気です。"
    words = find_words(TOKENIZERS[name], text)
    assert "".join(words) == text
    assert len(words) > 1
    assert words[-1] == "。"


TEXTS = st.text(st.sampled_from("aäzß今は天นี้ ्नस 🙂👩‍👩‍👧-'.,\t\u00a0<>▁0x4E"), max_size=30)


@settings(deadline=None)
@given(TEXTS, st.sampled_from(["bytes", "characters", "bpe", "unigram"]))
def test_each_token_lies_in_its_words(text: str, name: str) -> None:
    """Spans of words are disjoint, ordered and cover all letters; fractions of located tokens add up to one."""
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.ids_to_tokens(tokenizer.encode(text))
    words, fractions = align_side(text, tokens)
    ends = [0, *(position for span in words for position in span)]
    assert ends == sorted(ends)
    assert "".join(text[start:end] for start, end in words) == "".join(text.split())
    assert ((fractions.sum(1) < 1e-9) | (np.abs(fractions.sum(1) - 1) < 1e-9)).all()
    if not set(text) & set("▁\u00a0"):  # their tokens are not distinguished from spaces
        spans = locate_token_bytes(text, tokens)
        assert spans[-1:] == [] or spans[-1][1] == len("".join(text.split()).encode())
        assert all(before[1] == after[0] for before, after in pairwise(spans))


def test_unknown_words_have_the_text_between_their_neighbours() -> None:
    text = "Der grüne Mann liest"
    words, fractions = align_side(text, ["▁Der", "▁<unk>", "▁Mann", "▁liest"])
    assert [text[start:end] for start, end in words] == ["Der", "grüne", "Mann", "liest"]
    assert fractions.tolist() == np.eye(4).tolist()


def test_bytes_are_located() -> None:
    tokens = ["▁a", "b", "▁", "<0xC3>", "<0xA9>", "x"]
    assert locate_token_bytes("ab éx", tokens) == [(0, 1), (1, 2), (2, 2), (2, 3), (3, 4), (4, 5)]


def test_tokens_that_are_not_in_the_text_are_passed_over() -> None:
    text = "½ Haus ﬁnden"  # a tokenizer that normalizes writes 1⁄2 and fi
    words, fractions = align_side(text, ["▁1", "⁄", "2", "▁Haus", "▁fi", "nden"])
    assert [text[start:end] for start, end in words] == ["½", "Haus", "ﬁnden"]
    assert fractions[3].tolist() == [0, 1, 0]
    assert fractions[5].tolist() == [0, 0, 1]
    assert fractions[:3].sum() == 0


def test_weights_are_summed_over_source_tokens_and_averaged_over_target_tokens() -> None:
    hypothesis = Hypothesis(
        text="Hunde bellen",
        score=0.0,
        tokens=["▁Hund", "e", "▁bellen"],
        alignment=[[0.5, 0.25, 0.25], [0.1, 0.9, 0.0], [0.0, 0.0, 1.0]],
        source_tokens=["▁do", "gs", "▁bark"],
        logp=0.0,
    )
    aligned = align_words("dogs bark", hypothesis)
    assert (aligned.source_words, aligned.words) == ([(0, 4), (5, 9)], [(0, 5), (6, 12)])
    assert aligned.weight_TS is not None
    np.testing.assert_allclose(aligned.weight_TS, [[0.875, 0.125], [0.0, 1.0]])


def test_a_space_belongs_to_the_word_after_it() -> None:
    _, fractions = align_side("ein Ei", ["▁", "ein", "▁", "Ei", "▁"])
    assert fractions.tolist() == [[1, 0], [1, 0], [0, 1], [0, 1], [0, 0]]
