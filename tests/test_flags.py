"""Flags: raised by what is odd, and by nothing else."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dragoman.inference.loading import load
from dragoman.inference.postprocess import (
    ADDED,
    COPIES,
    LONG,
    LONGEST_LOOP,
    LOST,
    REPEATS,
    SHORT,
    UNKNOWN_WORDS,
    Usual,
    copies,
    flags_of,
    loops,
    placeholder_warnings,
    placeholders,
    words_of,
)
from dragoman.phrasebook.generate import DIRECTIONS, generate_phrases
from toy_run import Call, Toy, write_lines

pytest_plugins = ["toy_fixtures"]
USUAL = Usual(0.6, 1.5, 0.0)


def flags(source: str, answer: str, usual: Usual | None = USUAL) -> tuple[str, ...]:
    return flags_of(source, answer, (len(source.split()), len(answer.split())), usual)


@pytest.mark.parametrize(
    ("answer", "odd"),
    [
        ("ein Mann geht geht geht", True),
        ("ein Mann, ein Mann, ein Mann.", True),
        ("ein Mann mit Hut, ein Mann mit Hut", True),
        ("ein Mann ein Mann", False),
        ("nein nein", False),
        ("der Mann, der der Frau hilft", False),
        ("hahaha! ... !!! 1 000 000", False),
        ("狗狗狗狗跑", True),
        ("", False),
    ],
)
def test_what_repeats_itself(answer: str, odd: bool) -> None:
    assert (REPEATS in flags("a man walks his dog", answer)) == odd


@pytest.mark.parametrize("flag", [REPEATS, LONG, SHORT, COPIES, UNKNOWN_WORDS, LOST, ADDED])
def test_flags_are_said_of_one_line_and_of_many(flag: str) -> None:
    """They stand behind a count: no word in them has a number."""
    assert not {"is", "are", "it", "its", "itself", "they", "their", "themselves"} & set(flag.split())


def test_a_source_that_repeats_itself_may_be_answered_so() -> None:
    assert REPEATS not in flags("no no no no", "nein nein nein nein")
    assert REPEATS in flags("no no no", "nein nein nein nein nein nein und nein nein nein")


def test_lengths_are_judged_by_those_of_training() -> None:
    source = "one two three four five six seven eight nine ten"
    assert flags(source, "eins") == (SHORT,)
    assert flags(source, " ".join(map(str, range(40)))) == (LONG,)
    assert flags(source, " ".join(map(str, range(12)))) == ()
    assert flags(source, "eins", None) == ()
    assert flags("one", "eins zwei") == ()


def test_copies() -> None:
    source = "a man in a blue shirt is standing on a ladder"
    assert flags(source, source.upper()) == (COPIES,)
    assert flags(source, source.replace("blue", "blauen")) == (COPIES,)
    assert flags(source, source, USUAL._replace(copies=0.3)) == ()  # of a task where answers often do
    assert flags("Windows 11 Pro", "Windows 11 Pro") == ()  # too short to tell
    assert flags(source, "ein Mann in einem blauen Hemd steht auf einer Leiter") == ()


def test_what_is_usual_is_learnt_and_written_down() -> None:
    lengths = [(10, 9 + i % 3) for i in range(5000)] + [(10, 400)]
    usual = Usual.of(lengths, [("a " * 6, "a " * 6)] + [("a " * 6, "b " * 6)] * 9)
    assert (usual.least, usual.most) == (pytest.approx(13 / 14), pytest.approx(15 / 14))  # one odd pair moves nothing
    assert usual.copies == pytest.approx(0.1)
    assert Usual.read(usual.text()) == pytest.approx(usual, abs=1e-4)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ordinary_pairs_raise_none(direction: str) -> None:
    pairs = [(one.source, one.target) for one in generate_phrases("train", 2000, direction=direction)]
    lengths = [(len(source.split()), len(target.split())) for source, target in pairs[:1000]]
    usual = Usual.of(lengths, pairs[:1000])
    assert [pair for pair in pairs if flags(*pair, usual)] == []
    assert [pair for pair in pairs if placeholder_warnings(*pair, usual)] == []
    broken = [flags(source, f"{target} {target} {target}", usual) for source, target in pairs]
    assert all(broken)
    long = [source for source, _ in pairs if len(words_of(source)) >= 6]
    assert all(COPIES in flags(source, source, usual) for source in long)


def test_a_run_knows_what_is_usual(toy: Toy) -> None:
    usual = load(toy.run, device="cpu").usual
    assert 0.5 < usual.least <= 1 <= usual.most < 2
    assert usual.copies == 0
    assert all(one.flags == () for one in toy.translator.translate(["ba del fo.", "gri mun ne pol!"]))


@given(st.lists(st.sampled_from("abcdef"), max_size=40))
@example(list("abcdabcd"))
def test_loops_are_found_wherever_words_repeat(said: list[str]) -> None:
    """As when every period is looked at, whether there are words enough for it or not."""
    found = 0
    for period in range(1, LONGEST_LOOP + 1):
        same = 0
        for place in range(period, len(said)):
            same = same + 1 if said[place] == said[place - period] else 0
            found += same == (period if period >= 4 else 2 * period)
    assert loops(said) == found


def test_loops_and_copies_of_nothing() -> None:
    assert loops([]) == 0
    assert not copies([], [])


# placeholders, tags and links

KEPT = [
    "{name}", "{0}", "{}", "{{ user.name }}", "${x}", "%{count}", "%s", "%d", "%(x)s", "%1$s", "%.2f", "%-5d", "%@",
    "<b>", "</b>", "<br/>", "<br />", '<a href="https://a.b/c?d=e">', "https://example.org/a_(b)?c=%20d#e",
    "www.example.org", "ftp://a.b", "jane.doe+x@mail.example.org",
]  # fmt: skip
PLAIN = [
    "100 % sure", "100%s", "50%ige", "5 < 6", "a<b", "<3", "x > y", "@name", "a @ b", "{not a name}", "%", "{", "}}",
    "e.g.", "3.5%", "www", "http:", "%%s",
]  # fmt: skip


@pytest.mark.parametrize("span", KEPT)
def test_what_a_translation_keeps(span: str) -> None:
    assert placeholders(span) == Counter([span])
    assert placeholders(f"Hello ({span}), and {span}.") == {span: 2}
    assert placeholder_warnings(f"a {span}.", f"ein {span}!", USUAL) == []
    assert placeholder_warnings(f"a {span}.", "ein Hund.", USUAL) == [f"{LOST}: {span}"]
    assert placeholder_warnings("a dog.", f"ein {span}.", USUAL) == [f"{ADDED}: {span}"]
    assert placeholder_warnings(f"a {span}.", f"ein {span} {span}.", None) == [f"{ADDED}: {span}"]


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_placeholder(text: str) -> None:
    assert placeholders(text) == {}


@given(st.lists(st.sampled_from([*KEPT, *PLAIN, "a", "dog", "日本語", "."]), max_size=12), st.data())
def test_placeholders_that_are_taken_away_are_named(words: list[str], data: st.DataObject) -> None:
    left = [word for word in words if word not in KEPT or data.draw(st.booleans())]
    source, answer = " ".join(words), " ".join(left)
    assert placeholder_warnings(source, source, None) == []
    lost = Counter(words) - Counter(left)
    assert placeholders(source) - placeholders(answer) == lost
    assert [one.partition(":")[0] for one in placeholder_warnings(source, answer, None)] == [LOST] * bool(lost)
    assert [one.partition(":")[0] for one in placeholder_warnings(answer, source, None)] == [ADDED] * bool(lost)


@given(st.text("{}<>%$@ab1.:/()s", max_size=60))
def test_any_text_may_be_kept(text: str) -> None:
    assert placeholder_warnings(text, text, None) == []
    assert all(span in text for span in placeholders(text))


@pytest.mark.parametrize(
    "part", ["{", "{{", "${", "<a ", "<a", "</", "a@", "a.", "@a.", "%(", "%(a", "%1", "http://", "www."]
)
def test_a_hostile_line_is_read_in_linear_time(part: str) -> None:
    """With quadratic time, these would take minutes."""
    text = part * 200_000
    assert placeholder_warnings(text, text, None) == []


def test_many_placeholders_make_no_long_warning() -> None:
    [warning] = placeholder_warnings(" ".join(f"{{n{i}}}" for i in range(25)), "", None)
    assert warning.endswith("{n9} and 15 more")


def test_tasks_that_rewrite_placeholders_are_left_alone() -> None:
    """A summary has not all the links of its text."""
    lengths = [(5, 5)] * 20
    summaries = Usual.of(lengths, [(f"read https://a.b/{i} now", "read it") for i in range(20)])
    assert placeholder_warnings("read https://a.b/c", "read it", summaries) == []
    kept = Usual.of(lengths, [(f"read https://a.b/{i}", f"lies https://a.b/{i}") for i in range(19)] + [("{x}", "")])
    assert placeholder_warnings("read https://a.b/c", "lies es", kept) == [f"{LOST}: https://a.b/c"]
    rare = Usual.of(lengths, [("a dog", "ein Hund")] * 19 + [("{x}", "")])  # one odd pair says little
    assert placeholder_warnings("{x}", "", rare)
    assert Usual.read("[0.5, 1.5, 0.0]").rewritten == 0  # what earlier releases wrote


def test_lost_placeholders_are_told_and_counted(toy: Toy, tmp_path: Path, call: Call) -> None:
    file = write_lines(tmp_path / "in", ["ba {name} fo.", "del fo.", "gri <b>mun</b> ne!"])
    answer = call("translate", toy.run, "--input", file, "--engine", "torch")
    assert len(answer.out.splitlines()) == 3
    assert f"line 1: {LOST}: {{name}}" in answer.err
    assert f"line 3: {LOST}: <b>, </b>" in answer.err
    assert f"2 lines {LOST}" in answer.err
    assert answer.err.count(f"lines {LOST}") == 1
    told = [json.loads(line) for line in call("translate", toy.run, "--input", file, "--json").out.splitlines()]
    assert [LOST in one["flags"] for one in told] == [True, False, True]
    assert f"{LOST}: {{name}}" in told[0]["warnings"]
    kept = call("translate", toy.run, "--input", file, "--output", tmp_path / "out", "--resume", "--engine", "torch")
    assert kept.err.count(f"2 lines {LOST}") == 1
