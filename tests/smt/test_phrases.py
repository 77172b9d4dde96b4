"""Phrase extraction follows its definition; probabilities and tables hold together."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from dragoman.errors import UserError
from dragoman.smt.alignment import make_side
from dragoman.smt.mapped_tensors import save_tensors_with_digest
from dragoman.smt.phrases import PhraseTable, build_table, extract_spans
from dragoman.smt.trie import ROOT

LINKS = st.sets(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=9)


def extract(links: set[tuple[int, int]], I: int, J: int, longest: int) -> np.ndarray:
    flat = np.array(sorted(links), np.int64).reshape(-1, 2)
    arguments = np.array([0, I]), np.array([0, J]), np.array([0, len(flat)]), flat[:, 0], flat[:, 1], longest
    out = np.empty((extract_spans(*arguments, np.empty((0, 6), np.int64)), 6), np.int64)
    extract_spans(*arguments, out)
    return out


def list_phrase_pairs(links: set[tuple[int, int]], longest: int) -> list[tuple[int, int, int, int]]:
    """Return all spans with a link inside and none that leaves, up to a length, of sentences of 5 and 6 words."""
    found = []
    for i, end, j, stop in product(range(5), range(1, 6), range(6), range(1, 7)):
        if not (0 < end - i <= longest and 0 < stop - j <= longest):
            continue
        inside = [(i <= a < end, j <= b < stop) for a, b in links]
        if any(a and b for a, b in inside) and all(a == b for a, b in inside):
            found.append((i, end, j, stop))
    return found


@given(LINKS, st.integers(1, 6))
def test_extraction_is_its_definition(links: set[tuple[int, int]], longest: int) -> None:
    found = [tuple(row[:4]) for row in extract(links, 5, 6, longest).tolist()]
    assert sorted(found) == list_phrase_pairs(links, longest)


@given(LINKS, st.integers(1, 6))
def test_orientation_is_its_definition(links: set[tuple[int, int]], longest: int) -> None:
    """Monotone or swapped if there is a phrase pair of any length beside this one, or the end of both sentences."""
    pairs = list_phrase_pairs(links, 6)
    starts_at, ends_at = (
        {(i, j) for i, _, j, _ in pairs} | {(5, 6)},
        {(end, stop) for _, end, _, stop in pairs} | {(0, 0)},
    )
    for i, end, j, stop, before, after in extract(links, 5, 6, longest).tolist():
        swapped_before = any(other == end and other_stop == j for other, _, _, other_stop in pairs)
        swapped_after = any(other_end == i and other_j == stop for _, other_end, other_j, _ in pairs)
        assert before == (0 if (i, j) in ends_at else 1 if swapped_before else 2)
        assert after == (0 if (end, stop) in starts_at else 1 if swapped_after else 2)


def test_a_worked_example() -> None:
    """`er geht ja nicht` and `he does not go`: does and ja have no link, geht and nicht are swapped."""
    rows = extract({(0, 0), (1, 3), (3, 2)}, 4, 4, 4).tolist()
    spans = {tuple(row[:4]): (row[4], row[5]) for row in rows}
    assert (0, 1, 0, 1) in spans
    assert (0, 1, 0, 2) in spans  # he does
    assert (1, 2, 3, 4) in spans
    assert (1, 4, 2, 4) in spans
    assert (1, 3, 2, 4) not in spans  # not comes from outside
    assert spans[0, 1, 0, 1][0] == 0  # monotone: the beginnings of both sentences belong together
    assert spans[2, 4, 2, 3][1] == 1  # swapped: what follows in the target stands before it in the source


def build_random_table(limit: int = 10**6, min_count: int = 1) -> PhraseTable:
    """Return a table of 40 random pairs of five words, linked one to one with some words swapped."""
    rng = np.random.default_rng(1)
    source = make_side([rng.integers(0, 6, 5).tolist() for _ in range(40)])
    target = make_side([rng.integers(0, 7, 5).tolist() for _ in range(40)])
    ordered, swapped = np.tile(np.arange(5), 40), np.tile([1, 0, 2, 4, 3], 40)
    starts = np.arange(0, 205, 5)
    return build_table(source, target, (6, 7), (starts, ordered, swapped), longest=2, limit=limit, min_count=min_count)


def test_probabilities_sum_to_one() -> None:
    table = build_random_table()
    node = np.repeat(np.arange(len(table.options) - 1), np.diff(table.options))
    # Smoothing gives a little to translations that a phrase was never seen with, so sums stay below one.
    sums = np.bincount(node, np.exp(table.features[:, 0].astype(np.float64)))[np.unique(node)]
    assert (sums <= 1 + 1e-3).all()
    np.testing.assert_allclose(np.exp(table.reordering).reshape(-1, 2, 3).sum(2), 1.0, rtol=1e-5)
    assert table.reordering_of.max() + 1 == len(table.reordering) < len(table.target)


def test_a_saved_table_is_mapped(tmp_path: Path) -> None:
    table = build_random_table()
    table.save(tmp_path / "table", {})
    mapped = PhraseTable.load(tmp_path / "table")
    words = [str(index) for index in range(7)]
    assert list(mapped.list_lines(words, words)) == list(table.list_lines(words, words))
    for name, value in vars(mapped).items():
        if name != "source":
            assert not value.flags.owndata
            np.testing.assert_array_equal(value, getattr(table, name))


@pytest.mark.parametrize("kept", [0, 4, 20, 0.3, 0.99])
def test_a_table_that_was_cut_is_refused(kept: float, tmp_path: Path) -> None:
    build_random_table().save(tmp_path / "table", {})
    whole = (tmp_path / "table").read_bytes()
    (tmp_path / "table").write_bytes(whole[: int(kept * len(whole)) if kept < 1 else int(kept)])
    with pytest.raises(UserError, match="is damaged"):
        PhraseTable.load(tmp_path / "table")


def test_other_bad_tables_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table"
    with pytest.raises(UserError, match="cannot read"):
        PhraseTable.load(path)
    save_file({"words": np.arange(3)}, path)
    with pytest.raises(UserError, match="is damaged"):
        PhraseTable.load(path)
    save_tensors_with_digest(path, {"words": np.arange(3)}, {})
    with pytest.raises(UserError, match="no phrase table of this version"):
        PhraseTable.load(path)
    table = build_random_table()
    replace(table, target=table.target[:-1].copy()).save(path, {})
    with pytest.raises(UserError, match="do not fit together"):
        PhraseTable.load(path)
    side, nothing = make_side([[0]]), np.zeros(0, np.int64)
    with pytest.raises(UserError, match="no phrase pairs"):
        build_table(side, side, (1, 1), (np.zeros(2, np.int64), nothing, nothing))


def test_the_trie_has_only_phrases_of_the_table() -> None:
    """Every node has options, or is the beginning of a phrase that has."""
    table = build_random_table(min_count=3)
    needed = np.zeros(len(table.source.words), bool)
    for node in np.flatnonzero(np.diff(table.options)).tolist():
        while node != ROOT:
            needed[node] = True
            node = table.source.parents[node]
    assert needed[1:].all()


def test_rare_pairs_are_left_out_unless_a_word_would_become_unknown() -> None:
    words = [str(index) for index in range(7)]
    everything, frequent = ([*build_random_table(min_count=n).list_lines(words, words)] for n in (1, 2))
    assert set(frequent) < set(everything)
    assert {line for line in everything if line.index(" ") == line.index(" ||| ")} < set(frequent)


def test_the_table_is_limited_to_the_likeliest() -> None:
    source, target = make_side([[0]] * 9), make_side([[0]] * 5 + [[1]] * 3 + [[2]])
    table = build_table(source, target, (1, 3), (np.arange(10), np.zeros(9, np.int64), np.zeros(9, np.int64)), limit=2)
    kept = [table.target_words[table.target_starts[phrase]] for phrase in table.target]
    assert kept == [0, 1]
    assert table.features[0, 0] == pytest.approx(table.features[:, 0].max())


def test_the_table_as_text() -> None:
    """`das haus` and `the house`, linked word by word: three phrase pairs with their links, all of them certain."""
    side = make_side([[0, 1]])
    table = build_table(side, side, (2, 2), (np.array([0, 2]), np.array([0, 1]), np.array([0, 1])))
    lines = [line.split(" ||| ") for line in table.list_lines(["das", "haus"], ["the", "house"])]
    assert {(source, target, links) for source, target, _, links in lines} == {
        ("das", "the", "0-0"),
        ("haus", "house", "0-0"),
        ("das haus", "the house", "0-0 1-1"),
    }
    assert all(0 < float(value) <= 1 + 1e-6 for _, _, values, _ in lines for value in values.split())
