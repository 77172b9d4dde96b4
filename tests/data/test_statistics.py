"""Corpus statistics: the numbers are right, and faulty corpora get warnings."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dragoman.data.statistics import (
    compute_histogram,
    compute_percentiles,
    compute_statistics,
    render_sparkline,
    render_statistics,
)
from dragoman.errors import UserError
from dragoman.types import Pair

SIDES = ("the dog", "a big house"), ("der Hund", "ein großes Haus")
WHEN = (
    ("in the old town", "on Monday morning with all of my friends and their children"),
    ("in der Altstadt", "am Montagmorgen mit allen meinen Freunden und ihren Kindern"),
)
PAIRS = [
    Pair(
        f"I see {SIDES[0][n % 2]} {WHEN[0][n // 2 % 2]} {n}.", f"Ich sehe {SIDES[1][n % 2]} {WHEN[1][n // 2 % 2]} {n}."
    )
    for n in range(200)
]
TEXT = st.text(st.sampled_from("ab é日"), max_size=8)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.data.statistics.LANGUAGE_SAMPLE", 20)


@given(st.lists(st.builds(Pair, TEXT, TEXT), min_size=1, max_size=40))
def test_counts_are_those_of_a_list(pairs: list[Pair]) -> None:
    found = compute_statistics(pairs)
    sources, targets = [p.source for p in pairs], [p.target for p in pairs]
    assert found.pairs == len(pairs)
    assert found.repeated_pairs == len(pairs) - len(set(pairs))
    assert found.equal_sides == sum(s == t for s, t in zip(sources, targets))
    for side, texts in ((found.source, sources), (found.target, targets)):
        lengths = [len(text) for text in texts]
        assert side.total_words == sum(len(text.split()) for text in texts)
        assert side.total_characters == sum(lengths)
        assert side.characters.mean == pytest.approx(np.mean(lengths))
        assert side.characters.max == max(lengths) == lengths[side.longest_line - 1]
        assert side.characters.median == np.percentile(lengths, 50, method="inverted_cdf")
        assert side.empty == sum(not text.strip() for text in texts)
        assert side.repeated == len(texts) - len(set(texts))
        assert sum(side.histogram) == sum(found.ratio_histogram) == len(texts)
    assert json.loads(json.dumps(asdict(found)))["pairs"] == len(pairs)


def test_length_correlation_and_ratios() -> None:
    found = compute_statistics(PAIRS)
    logs = np.log([[len(p.source.encode()) for p in PAIRS], [len(p.target.encode()) for p in PAIRS]])
    assert found.length_correlation == pytest.approx(np.corrcoef(logs)[0, 1])
    assert found.ratio.mean == pytest.approx(np.exp(logs[1] - logs[0]).mean(), rel=0.01)
    assert found.ratio.max == pytest.approx(np.exp(logs[1] - logs[0]).max(), rel=0.011)


@given(st.lists(st.integers(0, 20), min_size=1), st.lists(st.floats(0.01, 1), min_size=1).map(sorted))
def test_percentiles_are_those_of_a_list(values: list[int], shares: list[float]) -> None:
    def smallest(share: float) -> int:
        return min(v for v in values if sum(w <= v for w in values) >= share * len(values))

    assert compute_percentiles(Counter(map(float, values)), shares) == [smallest(share) for share in shares]


def test_only_faulty_corpora_get_warnings() -> None:
    assert compute_statistics(PAIRS).notes == ["source looks like en (100%), target looks like de (100%)"]
    swapped = compute_statistics(Pair(p.target, p.source) for p in PAIRS).notes
    assert swapped == ["source looks like de (100%), target looks like en (100%)"]
    same = compute_statistics(Pair(p.source, p.source + "!") for p in PAIRS).notes
    assert any("both sides look like en" in note for note in same)
    shuffled = [Pair(p.source, q.target) for p, q in zip(PAIRS, PAIRS[1:] + PAIRS[:1])]
    assert any("belong together" in note for note in compute_statistics(shuffled).notes)
    faulty = [*PAIRS, PAIRS[0], Pair("x", ""), Pair("3", "3")]
    assert {"empty targets: 1", "pairs with two equal sides: 1", "repeated pairs: 1"} <= set(
        compute_statistics(faulty).notes
    )


def test_without_the_extra_statistics_have_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py3langid", None)
    found = compute_statistics(PAIRS)
    assert found.source.languages == {}
    assert any("dragoman[clean]" in note for note in found.notes)


def test_a_corpus_without_pairs_is_an_error() -> None:
    with pytest.raises(UserError, match="no pairs"):
        compute_statistics([])


@given(st.lists(st.integers(-50, 50), min_size=1), st.integers(-60, 60), st.integers(0, 60))
def test_a_histogram_counts_every_value_once(values: list[int], low: int, width: int) -> None:
    found = compute_histogram(Counter(map(float, values)), low, low + width)
    assert sum(found) == len(values)
    figure = render_sparkline(found)
    assert [mark == " " for mark in figure] == [count == 0 for count in found]
    assert figure[found.index(max(found))] == "█"


def test_the_table_shows_the_numbers() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render_statistics(compute_statistics(PAIRS)))
    text = console.export_text()
    assert "200 pairs" in text
    assert "length correlation" in text
    assert "target characters" in text
    assert "source looks like en" in text
    assert f"{sum(len(p.target.split()) for p in PAIRS):,}" in text
