"""Tests of the page of `evaluate --page`: complete, self-contained, and safe for any output of systems."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import UserError
from dragoman.evaluation.report import (
    LINES_SHOWN,
    TOKEN,
    Span,
    compute_line_chrf,
    find_common_tokens,
    find_differing_lines,
    mark_differences,
    render_evaluation,
    shorten_names,
)
from dragoman.evaluation.systems import EvaluationSet, Scorer, SystemOutput
from dragoman.metrics.metrics import METRICS
from toy_run import Call, make_sentences, translate_toy, write_lines

SOURCES = make_sentences(120, seed=81, longest=6)
RIGHT = [translate_toy(line) for line in SOURCES]
TEXT = st.text("ab <&\">'.ä漢\u202e\n", max_size=20)
VOID_TAGS = {"meta", "input", "br"}


class PageParser(HTMLParser):
    """Parse a page: check that all tags are closed, and collect tags and visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)


def score_systems(*systems: tuple[str, list[str]]) -> Scorer:
    """Score systems, given as pairs of a name and its output."""
    scorer = Scorer(recipes={})
    for name, texts in systems:
        scorer.score(name, SystemOutput(EvaluationSet(SOURCES, [RIGHT]), texts, (), {"warnings": {}}))
    return scorer


def corrupt_every(interval: int) -> list[str]:
    """Return the references with every n-th line replaced by a wrong translation."""
    return ["zu" if index % interval == 0 else line for index, line in enumerate(RIGHT)]


def test_page_has_scores_charts_and_lines() -> None:
    """The page has scores with significance tests, both charts, and all texts of every chosen line."""
    page = render_evaluation(
        score_systems(
            ("runs/one", corrupt_every(3)), ("runs/two", corrupt_every(5)), ("x/three", RIGHT)
        ).systems_by_test
    )
    parser = PageParser(page)
    tags = [tag for tag, _ in parser.seen]
    words = "".join(parser.words)
    assert tags.count("svg") == 2
    assert all(
        text in words
        for text in ("one", "two", "three", "BLEU by source length", "Word F1 by frequency", "10,000 trials")
    )
    lines = [int(n) - 1 for n in re.findall(r"<header>line (\d+)", page)]
    assert tags.count("article") == len(lines) == len(set(lines))
    assert all(SOURCES[line] in words for line in lines)
    assert [attrs["data-gaps"].count(" ") for tag, attrs in parser.seen if tag == "article"] == [1] * len(lines)
    names = [attrs.get("name") for tag, attrs in parser.seen if tag == "select"]
    assert names == ["system", "kind"]


def test_page_has_no_external_resources() -> None:
    page = render_evaluation(score_systems(("one", corrupt_every(3)), ("two", RIGHT)).systems_by_test)
    assert not re.search(r"https?://|@import|url\(|src=|href=\"[^#]|<link", page)


HOSTILE = "</script><script>alert(1)</script><b onclick='x'>\" & \u202e"


def test_texts_and_names_are_escaped() -> None:
    """Tags, quotes and control characters in texts, sources and names are shown as text."""
    scorer = Scorer(recipes={})
    sources, right = [*SOURCES[:9], HOSTILE], [*RIGHT[:9], f"right {HOSTILE}"]
    test = EvaluationSet(sources, [right], HOSTILE)
    for name, text in ((HOSTILE, HOSTILE), ("two", "nothing")):
        scorer.score(name, SystemOutput(test, [*RIGHT[:9], text], (), {"warnings": {}}))
    page = render_evaluation(scorer.systems_by_test)
    parser = PageParser(page)
    assert [tag for tag, _ in parser.seen].count("script") == 1
    assert not any(tag == "b" or "onclick" in attrs for tag, attrs in parser.seen)
    assert "".join(parser.words).count(HOSTILE) >= 3


def test_page_of_one_system_shows_its_worst_lines() -> None:
    page = render_evaluation(score_systems(("one", corrupt_every(10))).systems_by_test)
    parser = PageParser(page)
    assert "Lines with the lowest scores" in page
    assert [attrs["class"] for tag, attrs in parser.seen if tag == "mark" and "own" in str(attrs["class"])] == []
    first = int(re.search(r"<header>line (\d+)", page)[1]) - 1
    assert first % 10 == 0


def test_language_model_has_no_page() -> None:
    scorer = Scorer()
    scorer.score("lm", SystemOutput(EvaluationSet(["a"], []), [], details={"warnings": {}}))
    with pytest.raises(UserError, match="language model"):
        render_evaluation(scorer.systems_by_test)


def test_find_differing_lines() -> None:
    value_SN = np.array([[50.0, 50, 50, 50, 50], [90, 50, 49, 20, 60], [50, 50, 50, 50, 50]])
    assert find_differing_lines(value_SN, 1) == [0, 3]
    assert find_differing_lines(value_SN, 5) == [0, 3, 4, 2]
    assert find_differing_lines(value_SN[1:2], 1) == [3, 2]
    assert find_differing_lines(value_SN[:1].repeat(2, 0), 3) == []


def test_line_scores_are_sentence_level_chrf() -> None:
    texts = corrupt_every(4)
    [value_N] = compute_line_chrf([texts], [RIGHT])
    for at in (0, 1, 4):
        assert value_N[at] == pytest.approx(METRICS["chrf"]([texts[at]], [[RIGHT[at]]]).value)


@given(TEXT, TEXT, TEXT)
def test_marked_spans_join_to_the_text(text: str, reference: str, other: str) -> None:
    assert "".join(span.text for span in mark_differences(text, [reference], [other])) == text
    assert not any(span.kind for span in mark_differences(text, [text], [text]))


@given(TEXT, TEXT)
def test_common_tokens_are_in_both_texts_in_order(one: str, other: str) -> None:
    pieces = TOKEN.findall(one)
    assert "".join(pieces) == one
    found = [pieces[at] for at in sorted(find_common_tokens(pieces, TOKEN.findall(other)))]
    rest = iter(TOKEN.findall(other))
    assert all(piece in rest for piece in found)  # in this order


def test_marks_of_small_examples() -> None:
    spans = mark_differences("A red dog ran home.", ["A red dog runs home."], ["A blue dog ran home."])
    assert spans == [Span("A ", ""), Span("red", "own"), Span(" dog ", ""), Span("ran", "off"), Span(" home.", "")]
    assert mark_differences("b c d", ["a"], ["a"]) == [Span("b c d", "off own")]
    assert mark_differences("他跑。", ["他看。"], []) == [Span("他", ""), Span("跑", "off"), Span("。", "")]


def test_names_are_shortened_but_stay_different() -> None:
    def short(*names: str) -> list[str]:
        found = shorten_names(names)
        assert list(found) == list(dict.fromkeys(names))
        return list(found.values())

    assert short("runs/a", "other/b") == ["a", "b"]
    assert short("runs/a", "other/a") == ["runs/a", "other/a"]
    assert short("..", ".") == ["..", "."]
    assert short("a/b/c", "x/b/c", "a/b/c") == ["a/b/c", "x/b/c"]
    assert short("/d/e/one/t.en and /d/e/one/t.de (tag de)", "/d/e/two/t.en and /d/e/two/t.de (tag de)") == [
        "one/t.en and one/t.de (tag de)",
        "two/t.en and two/t.de (tag de)",
    ]


def test_evaluate_writes_the_page(tmp_path: Path, call: Call) -> None:
    files = {"s": SOURCES, "r": RIGHT, "one": corrupt_every(3), "two": corrupt_every(7)}
    s, r, one, two = (write_lines(tmp_path / name, lines) for name, lines in files.items())
    page = tmp_path / "page.html"
    answer = call("evaluate", "--source", s, "--reference", r, "--hypotheses", one, two, "--page", page)
    assert answer.code == 0, answer.err
    parser = PageParser(page.read_text())
    assert 0 < [tag for tag, _ in parser.seen].count("article") <= 2 * LINES_SHOWN
    assert not list(tmp_path.glob(".*.tmp"))
