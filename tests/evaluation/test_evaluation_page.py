"""The page of where systems differ: complete, of one piece, and safe whatever systems wrote."""

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
from toy_run import Call, sentences, translated, write_lines

SOURCES = sentences(120, seed=81, longest=6)
RIGHT = [translated(line) for line in SOURCES]
TEXT = st.text("ab <&\">'.ä漢\u202e\n", max_size=20)
VOID = {"meta", "input", "br"}


class Reader(HTMLParser):
    """Tags that open and close as they should, and the words between them."""

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
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)


def scorer(*systems: tuple[str, list[str]]) -> Scorer:
    made = Scorer(recipes={})
    for name, texts in systems:
        made.score(name, SystemOutput(EvaluationSet(SOURCES, [RIGHT]), texts, (), {"warnings": {}}))
    return made


def worse(every: int, what: str = "zu") -> list[str]:
    return [what if at % every == 0 else line for at, line in enumerate(RIGHT)]


def test_all_of_it_is_there() -> None:
    """Scores with tests, both charts, every chosen line with all that was said to it."""
    page = render_evaluation(scorer(("runs/one", worse(3)), ("runs/two", worse(5)), ("x/three", RIGHT)).tests)
    reader = Reader(page)
    tags = [tag for tag, _ in reader.seen]
    words = "".join(reader.words)
    assert tags.count("svg") == 2
    assert all(
        said in words
        for said in ("one", "two", "three", "BLEU by source length", "Word F1 by frequency", "10,000 trials")
    )
    lines = [int(n) - 1 for n in re.findall(r"<header>line (\d+)", page)]
    assert tags.count("article") == len(lines) == len(set(lines))
    assert all(SOURCES[line] in words for line in lines)
    assert [attrs["data-gaps"].count(" ") for tag, attrs in reader.seen if tag == "article"] == [1] * len(lines)
    names = [attrs.get("name") for tag, attrs in reader.seen if tag == "select"]
    assert names == ["system", "kind"]


def test_nothing_comes_from_outside() -> None:
    page = render_evaluation(scorer(("one", worse(3)), ("two", RIGHT)).tests)
    assert not re.search(r"https?://|@import|url\(|src=|href=\"[^#]|<link", page)


HOSTILE = "</script><script>alert(1)</script><b onclick='x'>\" & \u202e"


def test_what_systems_write_is_text() -> None:
    """Tags, quotes and marks in texts, sources and names come out as what they are."""
    made = Scorer(recipes={})
    sources, right = [*SOURCES[:9], HOSTILE], [*RIGHT[:9], f"right {HOSTILE}"]
    test = EvaluationSet(sources, [right], HOSTILE)
    for name, text in ((HOSTILE, HOSTILE), ("two", "nothing")):
        made.score(name, SystemOutput(test, [*RIGHT[:9], text], (), {"warnings": {}}))
    page = render_evaluation(made.tests)
    reader = Reader(page)
    assert [tag for tag, _ in reader.seen].count("script") == 1
    assert not any(tag == "b" or "onclick" in attrs for tag, attrs in reader.seen)
    assert "".join(reader.words).count(HOSTILE) >= 3


def test_one_system_shows_its_worst() -> None:
    page = render_evaluation(scorer(("one", worse(10))).tests)
    reader = Reader(page)
    assert "Lines with the lowest scores" in page
    assert [attrs["class"] for tag, attrs in reader.seen if tag == "mark" and "own" in str(attrs["class"])] == []
    first = int(re.search(r"<header>line (\d+)", page)[1]) - 1
    assert first % 10 == 0


def test_who_gave_no_answers_has_no_page() -> None:
    made = Scorer()
    made.score("lm", SystemOutput(EvaluationSet(["a"], []), [], about={"warnings": {}}))
    with pytest.raises(UserError, match="language model"):
        render_evaluation(made.tests)


def test_the_lines_that_differ_most() -> None:
    value_SN = np.array([[50.0, 50, 50, 50, 50], [90, 50, 49, 20, 60], [50, 50, 50, 50, 50]])
    assert find_differing_lines(value_SN, 1) == [0, 3]
    assert find_differing_lines(value_SN, 5) == [0, 3, 4, 2]
    assert find_differing_lines(value_SN[1:2], 1) == [3, 2]
    assert find_differing_lines(value_SN[:1].repeat(2, 0), 3) == []


def test_lines_are_judged_by_their_own_chrf() -> None:
    texts = worse(4)
    [value_N] = compute_line_chrf([texts], [RIGHT])
    for at in (0, 1, 4):
        assert value_N[at] == pytest.approx(METRICS["chrf"]([texts[at]], [[RIGHT[at]]]).value)


@given(TEXT, TEXT, TEXT)
def test_marks_leave_the_text_as_it_is(text: str, reference: str, other: str) -> None:
    assert "".join(span.text for span in mark_differences(text, [reference], [other])) == text
    assert not any(span.kind for span in mark_differences(text, [text], [text]))


@given(TEXT, TEXT)
def test_what_is_common_is_in_both(one: str, other: str) -> None:
    pieces = TOKEN.findall(one)
    assert "".join(pieces) == one
    found = [pieces[at] for at in sorted(find_common_tokens(pieces, TOKEN.findall(other)))]
    rest = iter(TOKEN.findall(other))
    assert all(piece in rest for piece in found)  # in this order


def test_marks_by_hand() -> None:
    spans = mark_differences("A red dog ran home.", ["A red dog runs home."], ["A blue dog ran home."])
    assert spans == [Span("A ", ""), Span("red", "own"), Span(" dog ", ""), Span("ran", "off"), Span(" home.", "")]
    assert mark_differences("b c d", ["a"], ["a"]) == [Span("b c d", "off own")]
    assert mark_differences("他跑。", ["他看。"], []) == [Span("他", ""), Span("跑", "off"), Span("。", "")]


def test_names_are_short_where_they_can_be() -> None:
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


def test_the_page_through_the_command(tmp_path: Path, call: Call) -> None:
    files = {"s": SOURCES, "r": RIGHT, "one": worse(3), "two": worse(7)}
    s, r, one, two = (write_lines(tmp_path / name, lines) for name, lines in files.items())
    page = tmp_path / "page.html"
    told = call("evaluate", "--source", s, "--reference", r, "--hypotheses", one, two, "--page", page)
    assert told.code == 0, told.err
    reader = Reader(page.read_text())
    assert 0 < [tag for tag, _ in reader.seen].count("article") <= 2 * LINES_SHOWN
    assert not list(tmp_path.glob(".*.tmp"))
