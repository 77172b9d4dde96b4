"""Terms: where they stand, how they are written, and that every one asked for is met or reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.errors import UserError
from dragoman.inference.constraints import (
    MAX_TERMS,
    Glossary,
    output_contains,
    read_dictionary,
    read_glossary,
    select_terms,
    source_contains,
)
from dragoman.inference.postprocess import get_warning_kind
from dragoman.inference.translator import Translator
from dragoman.types import Line
from toy_run import WORDS, Call, Toy, make_sentences, translate_toy, write_lines

MISSING, PRESENT, OTHERWISE = (
    "without a term that was asked for",
    "with a term to be avoided",
    "not beginning as it was asked to",
)


@pytest.mark.parametrize(
    ("term", "text", "source", "answer"),
    [
        ("dog", "a dog.", True, True),
        ("dog", "Dog!", True, True),
        ("dog", "DOG", True, False),
        ("Dog", "a dog", True, False),
        ("dog", "hotdogs", False, False),
        ("hot dog", "a hot dog", True, True),
        ("hot dog", "hot, dog", False, False),
        ("犬", "私の犬です", True, True),
        ("C++", "(C++)", True, True),
        (".", "a.", True, True),
        ("ß", "Straße", False, False),
    ],
)
def test_where_a_term_stands(term: str, text: str, source: bool, answer: bool) -> None:
    assert source_contains(term, text) == source
    assert output_contains(term, text) == answer
    assert output_contains(term, text, all_caps=True) or not answer


def test_terms_of_a_line_and_of_its_parts() -> None:
    terms = ("always", ("dog", "Hund"), ("cat", "Katze"), ("dog", "Hund"))
    assert select_terms(terms, "the dog", unconditional=True) == ["always", "Hund"]
    assert select_terms(terms, "the cat", unconditional=False) == ["Katze"]
    with pytest.raises(UserError, match="must not be empty"):
        select_terms((" ",), "the dog", unconditional=True)


def test_a_glossary_file(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "g.tsv",
        [
            "dog\tHund",
            "hot dog\t!Hund",
            "",
            "!Köter",
            "Windows\t",
            "犬\tdog",
            "cat \t Katze",
            "guinea pig\tMeerschweinchen",
        ],
    )
    glossary = read_glossary(file)
    assert glossary.add_terms(Line("A Dog runs.")) == Line("A Dog runs.", (("dog", "Hund"),), ("Köter",))
    assert glossary.add_terms(Line("one hot dog", ("x",))).terms == ("x", ("dog", "Hund"))
    assert glossary.add_terms(Line("one hot dog")).avoid == ("Köter", ("hot dog", "Hund"))
    assert glossary.add_terms(Line("windows")).avoid == ("Köter", ("Windows", "Windows"))
    assert glossary.add_terms(Line("私の犬です")).terms == (("犬", "dog"),)
    assert glossary.add_terms(Line("one hot cat")).avoid == ("Köter",)
    assert glossary.add_terms(Line("a guinea fowl")).terms == ()
    assert glossary.add_terms(Line("the cat")).terms == (("cat", "Katze"),)
    assert glossary.add_terms(Line("hotdogs")) == Line("hotdogs", (), ("Köter",))


@pytest.mark.parametrize("line", ["dog", "\tHund", "a\tb\tc", "dog\t!", "!", "!a\tb"])
def test_a_line_that_is_none(tmp_path: Path, line: str) -> None:
    file = write_lines(tmp_path / "g.tsv", ["dog\tHund", line])
    with pytest.raises(UserError, match=r"g.tsv, line 2: should be 'source<tab>target'"):
        read_glossary(file)


def test_more_than_a_search_can_bear_is_refused(tmp_path: Path) -> None:
    """Before it begins, where a file says so; each term is a machine with a row for every letter of it."""
    most = [f"!x{number}" for number in range(MAX_TERMS)]
    assert len(read_glossary(write_lines(tmp_path / "g", most)).never) == MAX_TERMS
    with pytest.raises(
        UserError, match=f"g: {MAX_TERMS + 1} terms are too many for one translation; name {MAX_TERMS} at most"
    ):
        read_glossary(write_lines(tmp_path / "g", [*most, "!y"]))
    for line in (f"dog\t{'x' * 201}", f"dog\t!{'x' * 201}", "!" + "x" * 201, "x" * 201 + "\t"):
        with pytest.raises(UserError, match=r"g, line 2: a term has 200 characters at most, and '.+'\.\.\. has 20"):
            read_glossary(write_lines(tmp_path / "g", ["cat\tKatze", line]))
    with pytest.raises(UserError, match=r"the line 'the dog': 129 terms"):
        select_terms([("dog", str(number)) for number in range(MAX_TERMS + 1)], "the dog", unconditional=True)


def test_a_dictionary_file(tmp_path: Path) -> None:
    assert read_dictionary(write_lines(tmp_path / "d", ["a\tb", "", "a\tc", "d\te f"])) == {"a": "b", "d": "e f"}
    for line in ("a", "a\t", "\tb"):
        with pytest.raises(UserError, match="line 1: should be 'word<tab>translation'"):
            read_dictionary(write_lines(tmp_path / "d", [line]))


@settings(max_examples=12)
@given(
    number=st.integers(0, 200),
    terms=st.lists(st.sampled_from([*WORDS.values(), "xylo", "ak zu", "Wex", "ün", "🎉"]), max_size=2, unique=True),
    avoid=st.lists(st.sampled_from(list(WORDS.values())), max_size=2, unique=True),
    prefix=st.sampled_from(["", "sa", "Zu ak", "ö"]),
)
def test_what_is_asked_is_met_or_reported(
    translator: Translator, number: int, terms: list[str], avoid: list[str], prefix: str
) -> None:
    line = Line(make_sentences(201, seed=31)[number], tuple(terms), tuple(avoid), prefix)
    [one] = translator.translate([line])
    assert one.text
    missing = [term for term in terms if not output_contains(term, one.text)]
    present = [term for term in avoid if output_contains(term, one.text, all_caps=True)]
    assert sum(warning.startswith(MISSING) for warning in one.warnings) == len(missing)
    assert sum(warning.startswith(PRESENT) for warning in one.warnings) == len(present)
    assert one.text.startswith(prefix) or any(warning.startswith(OTHERWISE) for warning in one.warnings)
    if not set(terms) & set(avoid):
        assert not missing or "cut" in map(get_warning_kind, one.warnings)
    if not prefix and not terms:
        assert not present or "cut" in map(get_warning_kind, one.warnings)


def test_a_line_without_terms_has_its_usual_answer_beside_one_with_terms(translator: Translator) -> None:
    lines = make_sentences(9, seed=32)
    plain = translator.translate(lines)
    mixed = translator.translate([Line(line, ("yim",)) if i % 3 == 1 else line for i, line in enumerate(lines)])
    for i, (one, other) in enumerate(zip(plain, mixed, strict=True)):
        assert (i % 3 == 1) or one == other
        assert (i % 3 != 1) or output_contains("yim", other.text)


def test_a_term_that_is_there_anyway_changes_nothing_for_the_worse(translator: Translator) -> None:
    for line in make_sentences(10, seed=33):
        word = translate_toy(line).rstrip(".!?").split()[0]
        assert translator.translate([Line(line, (word,))])[0].text == translate_toy(line)


def test_parts_of_a_long_line_have_the_terms_of_their_own_words(translator: Translator) -> None:
    parts = make_sentences(12, seed=34)
    [one] = translator.translate([Line(" ".join(parts), (("ne", "wex"), ("nowhere", "xx"), "zu"))])
    assert MISSING not in map(get_warning_kind, one.warnings)
    [other] = translator.translate([Line(" ".join(parts), (), ("ebi",))])
    assert "ebi" not in other.text.rstrip(".!?").split()


def test_a_glossary_on_the_command_line(toy: Toy, tmp_path: Path, call: Call) -> None:
    glossary = write_lines(tmp_path / "g.tsv", ["ba\tyim", "del\t!ebi"])
    lines = ["ba fo.", "", "del mun!", "gri?"]
    answer = call("translate", toy.run, "--glossary", glossary, stdin="\n".join(lines).encode())
    assert answer.code == 0
    out = answer.out.split("\n")
    assert out[0] == translate_toy("ba fo.").replace("ak", "yim")
    assert "ebi" not in out[2].rstrip("!").split()
    assert (out[1], out[3]) == ("", translate_toy("gri?"))
    refused = call("translate", toy.run, "--glossary", tmp_path / "none", stdin=b"ba.\n")
    assert (refused.code, refused.out) == (2, "")
    assert "none" in refused.err


def test_a_prefix_on_the_command_line(toy: Toy, tmp_path: Path, call: Call) -> None:
    """Every line starts with it, also with a glossary, word by word and from shards that had another prefix."""
    lines = [*make_sentences(4, seed=9), ""]
    file, glossary = write_lines(tmp_path / "lines", lines), write_lines(tmp_path / "g.tsv", ["!zzz"])
    expected = [h.text for h in toy.translator.translate([Line(line, prefix="Zu ak") for line in lines])]
    assert all(text.startswith("Zu ak") for text in expected[:-1])
    for options in ([], ["--stream"], ["--glossary", glossary]):
        answer = call("translate", toy.run, "--input", file, "--prefix", "Zu ak", *options)
        assert answer.out.splitlines() == expected, options
    for prefix in ("", "Zu ak"):
        arguments = ("--input", file, "--output", tmp_path / "out", "--resume")
        assert call("translate", toy.run, *arguments, "--prefix", prefix).code == 0
        texts = (tmp_path / "out").read_text().splitlines()
        assert (texts == expected) == bool(prefix)


def test_a_line_counts_once_however_many_terms_it_lacks() -> None:
    assert [*map(get_warning_kind, (f"{MISSING}: 'a'", f"{MISSING} (b)", "cut at 9 tokens"))] == [
        MISSING,
        MISSING,
        "cut",
    ]


def test_no_glossary_asks_nothing() -> None:
    assert Glossary([], [], []).add_terms(Line("a dog")) == Line("a dog")


def test_a_glossary_adds_terms_and_changes_nothing_else() -> None:
    line = Line("the dog", ("x",), ("y",), "Der", "de")
    assert Glossary([("dog", "Hund")], [], ["Köter"]).add_terms(line) == Line(
        "the dog", ("x", ("dog", "Hund")), ("y", "Köter"), "Der", "de"
    )
