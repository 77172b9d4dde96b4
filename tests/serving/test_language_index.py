"""The choice of a model by languages, and the lines of texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.inference.directions import Direction
from dragoman.serving.errors import RequestError
from dragoman.serving.language_index import LanguageIndex
from dragoman.serving.text_lines import LineLayout
from dragoman.types import Hypothesis

MANY = [Direction(source, target, target) for source in ("en", "de", "fr") for target in ("en", "de", "fr")]
INDEX = LanguageIndex(
    {"a": [Direction("en", "de")], "many": [d for d in MANY if d.source != d.target], "b": [Direction("pt-BR", "en")]}
)


@pytest.mark.parametrize(
    ("source", "target", "model", "chosen"),
    [
        ("en", "de", "", ("a", "")),
        ("en", "de", "many", ("many", "de")),
        ("de", "en", "", ("many", "en")),
        ("pt", "en-GB", "", ("b", "")),
        ("pt", "", "", ("b", "")),
        ("en", "", "a", ("a", "")),
    ],
)
def test_the_first_model_with_the_languages_is_chosen(
    source: str, target: str, model: str, chosen: tuple[str, str]
) -> None:
    route = INDEX.find_route(source, target, model)
    assert (route.model, route.direction.tag) == chosen


@pytest.mark.parametrize(
    ("source", "target", "model", "code", "named"),
    [
        ("it", "en", "", "unsupported_source", "it (Italian)"),
        ("en", "it", "", "unsupported_target", "fr (French)"),
        ("en", "fr", "a", "unsupported_target", "de (German)"),
        ("pt", "de", "", "unsupported_pair", "en (English)"),
        ("en", "", "", "missing_target", "de (German), fr (French)"),
    ],
)
def test_errors_name_what_there_is(source: str, target: str, model: str, code: str, named: str) -> None:
    with pytest.raises(RequestError) as error:
        INDEX.find_route(source, target, model)
    assert error.value.code == code
    assert named in error.value.message


def test_a_text_in_the_target_language_needs_no_model() -> None:
    index = LanguageIndex({"a": [Direction("en", "de"), Direction("zh-Hans", "de")]})
    for source, target in (("en", "en"), ("en", "en-GB"), ("en-US", "en-GB"), ("zh-Hans", "zh-Hans"), ("de", "de-AT")):
        assert index.find_route_unless_same(source, target, "") is None
    for source, target in (("zh-Hans", "zh-Hant"), ("fr", "fr"), ("en", "fr"), ("de", "en")):
        with pytest.raises(RequestError):
            index.find_route_unless_same(source, target, "")


def test_a_model_of_unknown_languages_comes_last() -> None:
    index = LanguageIndex({"unknown": [Direction("", "")], "known": [Direction("en", "de")]})
    assert index.find_route("en", "de", "").model == "known"
    assert index.find_route("en", "fr", "").model == "unknown"
    assert index.find_route("it", "de", "").model == "unknown"
    assert index.list_sources("de", "") == ["", "en"]
    assert [language.code for language in index.list_languages()] == ["en", "und"]


def test_lists_of_languages() -> None:
    assert {language.code: language.targets for language in INDEX.list_languages()} == {
        "de": ("en", "fr"),
        "en": ("de", "fr"),
        "fr": ("de", "en"),
        "pt-BR": ("en",),
    }
    assert INDEX.list_sources("en", "") == ["de", "fr", "pt-BR"]


@given(st.text(alphabet=" \t\n\r\u2028abé.\U0001f600\ufe0f\u00a0"), st.booleans(), st.booleans())
def test_the_lines_and_gaps_of_a_text_are_the_text(text: str, keep_breaks: bool, split_sentences: bool) -> None:
    layout = LineLayout.split(text, keep_breaks=keep_breaks, split_sentences=split_sentences, copy_wordless=True)
    assert all(line == line.strip() and any(map(str.isalpha, line)) for line in layout.lines)
    if keep_breaks:
        assert layout.join(layout.lines) == text
        assert all(len(line.splitlines()) == 1 for line in layout.lines)
    else:
        assert len(layout.lines) <= 1 or split_sentences
        assert layout.join(layout.lines).split() == text.split()


@pytest.mark.parametrize(
    ("options", "lines", "gaps"),
    [
        ({}, ("First. Two", "three.", "4.  {n}"), ("", "\n", " \n\n", "")),
        ({"copy_wordless": True}, ("First. Two", "three."), ("", "\n", " \n\n4.  {n}")),
        ({"split_sentences": True}, ("First.", "Two", "three.", "4.  {n}"), ("", " ", "\n", " \n\n", "")),
        ({"split_sentences": True, "keep_breaks": False}, ("First.", "Two three.", "4. {n}"), ("", " ", " \n\n", "")),
        ({"keep_breaks": False}, ("First. Two three. 4. {n}",), ("", "")),
    ],
)
def test_texts_are_split_into_lines_or_sentences(
    options: dict[str, bool], lines: tuple[str, ...], gaps: tuple[str, ...]
) -> None:
    layout = LineLayout.split("First. Two\nthree. \n\n4.  {n}", **options)
    assert (layout.lines, layout.gaps) == (lines, gaps)


def test_nbest_lists_of_lines_are_joined() -> None:
    def guess(*texts: str) -> list[Hypothesis]:
        return [Hypothesis(text, -1.0, [text], [], [], -1.0) for text in texts]

    layout = LineLayout.split(" a\n\nb ")
    joined = layout.join_nbest([guess("A", "AA"), guess("B")], 3)
    assert [hypothesis.text for hypothesis in joined] == [" A\n\nB ", " AA\n\nB "]
    assert [hypothesis.text for hypothesis in LineLayout.split("\n").join_nbest([], 3)] == ["\n"]
