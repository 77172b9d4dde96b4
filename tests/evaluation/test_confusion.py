"""Tests of the confusion matrix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.evaluation.report import format_confusion
from dragoman.metrics.metrics import count_confusion

LABELS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abcd")), min_size=1, max_size=40)


def test_confusion_matrix_of_a_small_example() -> None:
    table = count_confusion(["a", "a", "b", "a"], ["a", "b", "b", "c"])
    assert table["labels"] == ["a", "b", "c"]
    assert table["counts"] == [[1, 0, 0], [1, 1, 0], [1, 0, 0]]
    assert table["each"]["a"] == {"precision": pytest.approx(100 / 3), "recall": 100.0, "f1": 50.0, "texts": 1}
    assert table["each"]["c"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "texts": 1}
    assert table["f1"] == pytest.approx((50 + 200 / 3 + 0) / 3)
    assert format_confusion(table).split("\n")[2].split() == ["b", "1", "1", "0", "100.00", "50.00", "66.67"]


@given(pairs=LABELS)
def test_every_text_is_counted_once(pairs: list[tuple[str, str]]) -> None:
    expected, predicted = zip(*pairs, strict=True)
    table = count_confusion(predicted, expected)
    assert sum(map(sum, table["counts"])) == len(pairs)
    assert [sum(row) for row in table["counts"]] == [expected.count(label) for label in table["labels"]]
    right = sum(table["counts"][i][i] for i in range(len(table["labels"])))
    recalled = sum(scores["recall"] * scores["texts"] / 100 for scores in table["each"].values())
    assert recalled == pytest.approx(right)
    assert len({len(line.rstrip()) for line in format_confusion(table).split("\n")}) == 1
