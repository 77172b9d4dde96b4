"""Tests of `dragoman align`: links of every pair, saved models, error rates, and messages for bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from toy_run import Call, assert_user_error, write_lines

SOURCE = ["das haus", "das buch", "ein buch", "", "ein haus"]
TARGET = ["the house", "the book", "a book", "nothing", "a house"]


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    return write_lines(tmp_path / "source", SOURCE), write_lines(tmp_path / "target", TARGET)


def test_align_prints_one_line_per_pair(texts: tuple[Path, Path], call: Call) -> None:
    answer = call("align", *texts)
    assert answer.code == 0
    assert answer.out.split("\n") == ["0-0 1-1", "0-0 1-1", "0-0 1-1", "", "0-0 1-1", ""]
    assert "log-likelihood" in answer.err
    assert "1 of 5 pairs are empty" in answer.err


def test_alignment_model_is_saved_and_loaded(texts: tuple[Path, Path], tmp_path: Path, call: Call) -> None:
    kept = tmp_path / "aligner"
    first = call("align", *texts, "--save", kept, "symmetrize=grow-diag")
    again = call("align", *texts, "--model", kept)
    assert (again.code, again.out) == (0, first.out)
    assert_user_error(call("align", *texts, "--model", kept, "--save", kept), "--model", "--save")
    assert_user_error(call("align", *texts, "--model", tmp_path), "no alignment model")


def test_gold_links_give_error_rates(texts: tuple[Path, Path], tmp_path: Path, call: Call) -> None:
    gold = write_lines(tmp_path / "gold", ["0-0 1-1", "0-0 1?1", "0-0 1-1", "", "0-0"])
    answer = call("align", *texts, "--gold", gold, "--output", tmp_path / "links")
    assert "AER 7.1, precision 87.5, recall 100.0 (8 links)" in answer.err
    assert (tmp_path / "links").read_text().startswith("0-0 1-1\n")


@pytest.mark.parametrize(
    ("gold", "culprit"),
    [
        (["0-0", "0-0", "0-5", "", ""], "line 3: the link 0-5 is out of range"),
        (["0-0", "0:0", "", "", ""], "line 2: '0:0' is not a link"),
        (["0-0"], "has 1 lines but there are 5 pairs"),
    ],
)
def test_bad_gold_links(texts: tuple[Path, Path], tmp_path: Path, call: Call, gold: list[str], culprit: str) -> None:
    assert_user_error(call("align", *texts, "--gold", write_lines(tmp_path / "gold", gold)), culprit)


def test_bad_input(texts: tuple[Path, Path], tmp_path: Path, call: Call) -> None:
    shorter = write_lines(tmp_path / "shorter", TARGET[:-1])
    assert_user_error(call("align", texts[0], shorter), "5 lines", "4")
    assert_user_error(call("align", *texts, "hm=5"), "hm", "hmm")
    assert_user_error(call("align", *texts, "symmetrize=grow-dag"), "grow-diag")
