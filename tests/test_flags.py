"""Flags: raised by what is odd, and by nothing else."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dragoman.answers.flags import (
    COPIES,
    LONG,
    LONGEST_LOOP,
    REPEATS,
    SHORT,
    UNKNOWN_WORDS,
    Usual,
    copies,
    flags_of,
    loops,
    words_of,
)
from dragoman.loading import load
from dragoman.text import phrasebook
from toy_run import Toy

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


@pytest.mark.parametrize("flag", [REPEATS, LONG, SHORT, COPIES, UNKNOWN_WORDS])
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
    usual = Usual.of(lengths, [(["a"] * 6, ["a"] * 6)] + [(["a"] * 6, ["b"] * 6)] * 9)
    assert (usual.least, usual.most) == (pytest.approx(13 / 14), pytest.approx(15 / 14))  # one odd pair moves nothing
    assert usual.copies == pytest.approx(0.1)
    assert Usual.read(usual.text()) == pytest.approx(usual, abs=1e-4)


@pytest.mark.parametrize("direction", phrasebook.DIRECTIONS)
def test_ordinary_pairs_raise_none(direction: str) -> None:
    pairs = [(one.source, one.target) for one in phrasebook.phrases("train", 2000, direction=direction)]
    lengths = [(len(source.split()), len(target.split())) for source, target in pairs[:1000]]
    usual = Usual.of(lengths, [(words_of(source), words_of(target)) for source, target in pairs[:1000]])
    assert [pair for pair in pairs if flags(*pair, usual)] == []
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
