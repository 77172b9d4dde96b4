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
    FLAG_ADDED,
    FLAG_COPY,
    FLAG_LONG,
    FLAG_LOST,
    FLAG_REPEATS,
    FLAG_SHORT,
    FLAG_UNKNOWN,
    MAX_LOOP_WORDS,
    PairStatistics,
    check_placeholders,
    count_loops,
    count_placeholders,
    extract_casefolded_words,
    find_flags,
    is_copy,
)
from dragoman.phrasebook.generate import DIRECTIONS, generate_phrases
from toy_run import Call, Toy, write_lines

USUAL = PairStatistics(0.6, 1.5, 0.0)


def flags(source: str, answer: str, usual: PairStatistics | None = USUAL) -> tuple[str, ...]:
    return find_flags(source, answer, (len(source.split()), len(answer.split())), usual)


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
    assert (FLAG_REPEATS in flags("a man walks his dog", answer)) == odd


@pytest.mark.parametrize("flag", [FLAG_REPEATS, FLAG_LONG, FLAG_SHORT, FLAG_COPY, FLAG_UNKNOWN, FLAG_LOST, FLAG_ADDED])
def test_flags_are_said_of_one_line_and_of_many(flag: str) -> None:
    """They stand behind a count: no word in them has a number."""
    assert not {"is", "are", "it", "its", "itself", "they", "their", "themselves"} & set(flag.split())


def test_a_source_that_repeats_itself_may_be_answered_so() -> None:
    assert FLAG_REPEATS not in flags("no no no no", "nein nein nein nein")
    assert FLAG_REPEATS in flags("no no no", "nein nein nein nein nein nein und nein nein nein")


def test_lengths_are_judged_by_those_of_training() -> None:
    source = "one two three four five six seven eight nine ten"
    assert flags(source, "eins") == (FLAG_SHORT,)
    assert flags(source, " ".join(map(str, range(40)))) == (FLAG_LONG,)
    assert flags(source, " ".join(map(str, range(12)))) == ()
    assert flags(source, "eins", None) == ()
    assert flags("one", "eins zwei") == ()


def test_copies() -> None:
    source = "a man in a blue shirt is standing on a ladder"
    assert flags(source, source.upper()) == (FLAG_COPY,)
    assert flags(source, source.replace("blue", "blauen")) == (FLAG_COPY,)
    assert flags(source, source, USUAL._replace(copies=0.3)) == ()  # of a task where answers often do
    assert flags("Windows 11 Pro", "Windows 11 Pro") == ()  # too short to tell
    assert flags(source, "ein Mann in einem blauen Hemd steht auf einer Leiter") == ()


def test_what_is_usual_is_learnt_and_written_down() -> None:
    lengths = [(10, 9 + i % 3) for i in range(5000)] + [(10, 400)]
    usual = PairStatistics.measure(lengths, [("a " * 6, "a " * 6)] + [("a " * 6, "b " * 6)] * 9)
    assert [usual.min_ratio, usual.max_ratio] == pytest.approx([13 / 14, 15 / 14])  # one odd pair moves nothing
    assert usual.copies == pytest.approx(0.1)
    assert PairStatistics(*json.loads(usual.to_json())) == pytest.approx(usual, abs=1e-4)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ordinary_pairs_raise_none(direction: str) -> None:
    pairs = [(one.source, one.target) for one in generate_phrases("train", 2000, direction=direction)]
    lengths = [(len(source.split()), len(target.split())) for source, target in pairs[:1000]]
    usual = PairStatistics.measure(lengths, pairs[:1000])
    assert [pair for pair in pairs if flags(*pair, usual)] == []
    assert [pair for pair in pairs if check_placeholders(*pair, usual)] == []
    broken = [flags(source, f"{target} {target} {target}", usual) for source, target in pairs]
    assert all(broken)
    long = [source for source, _ in pairs if len(extract_casefolded_words(source)) >= 6]
    assert all(FLAG_COPY in flags(source, source, usual) for source in long)


def test_a_run_knows_what_is_usual(toy: Toy) -> None:
    usual = load(toy.run, device="cpu").statistics
    assert 0.5 < usual.min_ratio <= 1 <= usual.max_ratio < 2
    assert usual.copies == 0
    assert all(one.flags == () for one in toy.translator.translate(["ba del fo.", "gri mun ne pol!"]))


@given(st.lists(st.sampled_from("abcdef"), max_size=40))
@example(list("abcdabcd"))
def test_loops_are_found_wherever_words_repeat(said: list[str]) -> None:
    """As when every period is looked at, whether there are words enough for it or not."""
    found = 0
    for period in range(1, MAX_LOOP_WORDS + 1):
        same = 0
        for place in range(period, len(said)):
            same = same + 1 if said[place] == said[place - period] else 0
            found += same == (period if period >= 4 else 2 * period)
    assert count_loops(said) == found


def test_loops_and_copies_of_nothing() -> None:
    assert count_loops([]) == 0
    assert not is_copy([], [])


# placeholders, tags and links

KEPT = [
    "{name}", "{0}", "{}", "{{ user.name }}", "${x}", "%{count}", "%s", "%d", "%(x)s", "%1$s", "%.2f", "%-5d", "%@",
    "<b>", "</b>", "<br/>", "<br />", '<a href="https://a.b/c?d=e">', "https://example.org/a_(b)?c=%20d#e",
    "%n", "%name%", ":name", "$name", "$user_id", "www.example.org", "ftp://a.b", "jane.doe+x@mail.example.org",
]  # fmt: skip
PLAIN = [
    "100 % sure", "100%s", "50%ige", "5 < 6", "a<b", "<3", "x > y", "@name", "a @ b", "{not a name}", "%", "{", "}}",
    "e.g.", "$5", "US$", "$AUD", "5$a", "a:b", "12:30", ":)", ":D", "::std", "note: this",
    "5 %of a%", "3.5%", "www", "http:", "%%s",
]  # fmt: skip


@pytest.mark.parametrize("span", KEPT)
def test_what_a_translation_keeps(span: str) -> None:
    assert count_placeholders(span) == Counter([span])
    assert count_placeholders(f"Hello ({span}), and {span}.") == {span: 2}
    assert check_placeholders(f"a {span}.", f"ein {span}!", USUAL) == []
    assert check_placeholders(f"a {span}.", "ein Hund.", USUAL) == [f"{FLAG_LOST}: {span}"]
    assert check_placeholders("a dog.", f"ein {span}.", USUAL) == [f"{FLAG_ADDED}: {span}"]
    assert check_placeholders(f"a {span}.", f"ein {span} {span}.", None) == [f"{FLAG_ADDED}: {span}"]


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_placeholder(text: str) -> None:
    assert count_placeholders(text) == {}


# Without the brackets that make a placeholder or a tag together with other words.
WORDS = [*KEPT, *(text for text in PLAIN if not {*"{}<>"} & {*text}), "a", "dog", "日本語", "."]


@given(st.lists(st.sampled_from(WORDS), max_size=12), st.data())
def test_placeholders_that_are_taken_away_are_named(words: list[str], data: st.DataObject) -> None:
    left = [word for word in words if word not in KEPT or data.draw(st.booleans())]
    source, answer = " ".join(words), " ".join(left)
    assert check_placeholders(source, source, None) == []
    lost = Counter(words) - Counter(left)
    assert count_placeholders(source) - count_placeholders(answer) == lost
    assert [one.partition(":")[0] for one in check_placeholders(source, answer, None)] == [FLAG_LOST] * bool(lost)
    assert [one.partition(":")[0] for one in check_placeholders(answer, source, None)] == [FLAG_ADDED] * bool(lost)


@given(st.text("{}<>%$@ab1.:/()s", max_size=60))
def test_any_text_may_be_kept(text: str) -> None:
    assert check_placeholders(text, text, None) == []
    assert all(span in text for span in count_placeholders(text))


@pytest.mark.parametrize(
    "part", ["{", "{{", "${", "<a ", "<a", "</", "a@", "a.", "@a.", "%(", "%(a", "%1", "http://", "www."]
)
def test_a_hostile_line_is_read_in_linear_time(part: str) -> None:
    """With quadratic time, these would take minutes."""
    text = part * 200_000
    assert check_placeholders(text, text, None) == []


def test_many_placeholders_make_no_long_warning() -> None:
    [warning] = check_placeholders(" ".join(f"{{n{i}}}" for i in range(25)), "", None)
    assert warning.endswith("{n9} and 15 more")


def test_tasks_that_rewrite_placeholders_are_left_alone() -> None:
    """A summary has not all the links of its text."""
    lengths = [(5, 5)] * 20
    summaries = PairStatistics.measure(lengths, [(f"read https://a.b/{i} now", "read it") for i in range(20)])
    assert check_placeholders("read https://a.b/c", "read it", summaries) == []
    kept = PairStatistics.measure(
        lengths, [(f"read https://a.b/{i}", f"lies https://a.b/{i}") for i in range(19)] + [("{x}", "")]
    )
    assert check_placeholders("read https://a.b/c", "lies es", kept) == [f"{FLAG_LOST}: https://a.b/c"]
    rare = PairStatistics.measure(lengths, [("a dog", "ein Hund")] * 19 + [("{x}", "")])  # one odd pair says little
    assert check_placeholders("{x}", "", rare)
    assert PairStatistics(0.5, 1.5, 0.0).rewritten == 0  # what earlier releases wrote


def test_lost_placeholders_are_told_and_counted(toy: Toy, tmp_path: Path, call: Call) -> None:
    file = write_lines(tmp_path / "in", ["ba {name} fo.", "del fo.", "gri <b>mun</b> ne!"])
    answer = call("translate", toy.run, "--input", file, "--engine", "torch")
    assert len(answer.out.splitlines()) == 3
    assert f"line 1: {FLAG_LOST}: {{name}}" in answer.err
    assert f"line 3: {FLAG_LOST}: <b>, </b>" in answer.err
    assert f"2 lines {FLAG_LOST}" in answer.err
    assert answer.err.count(f"lines {FLAG_LOST}") == 1
    told = [json.loads(line) for line in call("translate", toy.run, "--input", file, "--json").out.splitlines()]
    assert [FLAG_LOST in one["flags"] for one in told] == [True, False, True]
    assert f"{FLAG_LOST}: {{name}}" in told[0]["warnings"]
    kept = call("translate", toy.run, "--input", file, "--output", tmp_path / "out", "--resume", "--engine", "torch")
    assert kept.err.count(f"2 lines {FLAG_LOST}") == 1
