"""Attention by words, and its picture in a terminal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from dragoman.inspection.attention_maps import SHADES, merge_into_words, number_words, render_alignment
from dragoman.types import Hypothesis
from toy_run import WORDS, Toy, make_sentences


def answer(source: list[str], target: list[str], alignment: list[list[float]]) -> Hypothesis:
    return Hypothesis("", 0.0, target, alignment, source, 0.0)


def drawn(hypothesis: Hypothesis) -> list[str]:
    return render_alignment(hypothesis).plain.split("\n")[:-1]


@pytest.mark.parametrize(
    ("pieces", "numbers"),
    [
        ([], []),
        (["▁a"], [0]),
        (["a", "b", "▁c"], [0, 0, 1]),
        (["▁walk", "s", "."], [0, 0, 1]),
        (["▁", "walk", "s", "!", "?"], [0, 0, 0, 1, 2]),
        (["▁(", "a", ")", "▁b"], [0, 1, 2, 3]),
        (["▁don", "'", "t"], [0, 1, 2]),
        (["<0xF0>", "<0x9F>"], [0, 0]),
        (["<s>", "walk", "<unk>", "s", "</s>", "<pad>", "<pad>"], [0, 1, 1, 1, 2, 3, 4]),
    ],
)
def test_where_words_begin(pieces: list[str], numbers: list[int]) -> None:
    assert number_words(pieces) == numbers


def test_source_pieces_add_up_and_target_pieces_average() -> None:
    one = answer(["▁wal", "ks", "."], ["▁ge", "ht", "."], [[0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [0.125, 0.125, 0.75]])
    source, target, weight_TS = merge_into_words(one)
    assert source == ["walks", "."]
    assert target == ["geht", "."]
    np.testing.assert_array_equal(weight_TS, [[0.875, 0.125], [0.25, 0.75]])


PIECES = st.lists(st.sampled_from(["▁a", "b", ".", "▁", "▁x", "日", "!"]), max_size=8)


@given(source=PIECES.filter(bool), target=PIECES, data=st.data())
def test_shares_stay_shares(source: list[str], target: list[str], data: st.DataObject) -> None:
    """Rows that sum to one still do, and no letter is lost."""
    weights = st.lists(st.integers(1, 9), min_size=len(source), max_size=len(source))
    rows = [data.draw(weights) for _ in target]
    one = answer(source, target, [[weight / sum(row) for weight in row] for row in rows])
    source_words, target_words, weight_TS = merge_into_words(one)
    assert weight_TS.shape == (len(target_words), len(source_words))
    np.testing.assert_allclose(weight_TS.sum(1), 1)
    assert "".join(source_words) == "".join(source).replace("▁", "")
    assert "".join(target_words) == "".join(target).replace("▁", "")


def test_the_picture() -> None:
    one = answer(["▁the", "▁dog"], ["▁der", "▁Hund", "."], [[1.0, 0.0], [0.3, 0.7], [0.5, 0.5]])
    assert drawn(one) == [
        "       t  d",
        "       h  o",
        "       e  g",
        " der  ███   ",
        "Hund  ░░░▓▓▓",
        "   .  ▒▒▒▒▒▒",
    ]


@pytest.mark.parametrize("words", [["▁dog", "▁cat"], ["▁日本", "▁語"], ["▁🎉", "▁a"], ["▁e\u0301", "▁\0"]])
def test_columns_stand_under_their_words(words: list[str]) -> None:
    """Also where a letter is two cells wide, or none."""
    *above, first, second = drawn(answer(words, words, [[1.0, 0.0], [0.0, 1.0]]))
    full = SHADES[-1]
    assert cell_len(first) == cell_len(second)
    assert first.endswith(full * 3 + "   ")
    assert second.endswith("   " + full * 3)
    for line in above:
        assert cell_len(line) <= cell_len(first)
    last = above[-1]
    assert cell_len(last[: last.rindex(words[1].lstrip("▁")[-1] if words[1] != "▁\0" else "·")]) == cell_len(first) - 2


def test_long_words_are_shortened() -> None:
    above = drawn(answer(["▁" + "a" * 40], ["▁b"], [[1.0]]))
    assert len(above) == 15
    assert above[-2].strip() == "…"


def test_nothing_to_draw() -> None:
    assert drawn(answer([], [], [])) == []
    source, target, weight_TS = merge_into_words(answer(["▁a"], ["▁b"], []))  # a line of so many parts that it has none
    assert (source, target, weight_TS.tolist()) == (["a"], ["b"], [[0.0]])


def test_words_look_at_their_counterparts(toy: Toy) -> None:
    """Words of the toy language come out in reverse order, and where the model looks shows that."""
    found = right = 0
    for one in toy.translator.translate(make_sentences(40, seed=12)):
        source, target, weight_TS = merge_into_words(one)
        np.testing.assert_allclose(weight_TS.sum(1), 1, atol=1e-5)
        for word, weight_S in zip(target, weight_TS, strict=True):
            if word in WORDS.values():
                found += 1
                right += WORDS.get(source[int(weight_S.argmax())]) == word
    assert right > 0.6 * found > 50
