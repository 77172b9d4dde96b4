"""Codes of languages: their notations and names, and the match of one with those available."""

from __future__ import annotations

import pytest

from dragoman.language_codes import (
    LANGUAGE_NAMES,
    LANGUAGES,
    find_code,
    is_same_language,
    match_language,
    name_language,
    normalize_code,
)


def test_codes_have_one_notation() -> None:
    same = {"DE": "de", "deu_Latn": "de", "ger": "de", "zh": "zh-Hans", "zh-CN": "zh-Hans", "zho_Hant": "zh-Hant",
            "iw": "he", "en_us": "en-US", "srp_Cyrl": "sr", "sr-Latn": "sr-Latn", "": "", "tlh": "tlh"}  # fmt: skip
    assert {code: normalize_code(code) for code in same} == same
    assert [find_code(code) for code in LANGUAGES] == list(LANGUAGES)
    assert [name_language(code) for code in ("de", "de-AT", "zh-Hant", "tlh")] == [
        "German",
        "German (AT)",
        "Chinese (traditional)",
        "tlh",
    ]
    assert LANGUAGE_NAMES["pt-BR"] == "Portuguese (Brazil)"


def test_the_nearest_language_is_matched() -> None:
    assert match_language("pt-BR", ["en", "pt"]) == "pt"
    assert match_language("pt", ["en", "pt-BR", "pt-PT"]) == "pt-BR"
    assert match_language("PT-pt", ["pt", "pt-BR", "pt-PT"]) == "pt-PT"
    assert match_language("zh", ["zh-Hant", "zh-Hans"]) == "zh-Hans"
    assert match_language("fr", ["en", "de"]) is None
    assert match_language("nb", ["no"]) == "no"
    assert match_language("no", ["nn", "nb"]) == "nb"
    assert match_language("nb", ["no", "nb-NO"]) == "nb-NO"
    assert match_language("nn", ["no"]) is None
    assert match_language("tl", ["fil"]) == "fil"
    assert match_language("fil", ["en", "tl"]) == "tl"


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("en", "en-US", True), ("de-AT", "de_DE", True), ("ENG", "en", True), ("eng_Latn", "en", True),
        ("no", "nb", True), ("fil", "tl-PH", True), ("nb-NO", "no", True), ("nn", "nb", False),
        ("zh-CN", "zh-Hans", True), ("zh", "zh-CN", True), ("zh-TW", "zh-Hant", True), ("zh-CN", "zh-Hant", False),
        ("sr-Cyrl", "sr", True), ("sr-Latn", "sr-Cyrl", False), ("sr@latin", "sr-Latn", True),
        ("de_DE@euro", "de", True), ("en", "de", False), ("", "", False), ("tlh", "tlh-Latn", True), ("*", "en", False),
    ],
)  # fmt: skip
def test_codes_of_one_language_and_script_are_one(first: str, second: str, *, same: bool) -> None:
    assert is_same_language(first, second) == is_same_language(second, first) == same
