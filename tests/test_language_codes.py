"""Codes of languages: their notations and names, and the match of one with those available."""

from __future__ import annotations

from dragoman.language_codes import (
    LANGUAGE_NAMES,
    LANGUAGES,
    find_code,
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
