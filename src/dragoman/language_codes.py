"""Codes of languages, such as en, pt-BR and zh-Hans (BCP 47), and the English names of common languages.

Other notations of the same language are converted: `EN`, `eng` and `eng_Latn` (as in NLLB) are en; `zh` is zh-Hans.
The table is language_codes.tsv. A code that is not in it is valid too if it is well-formed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator


class Language(NamedTuple):
    """A row of the table of languages."""

    code: str
    scripts: tuple[str, ...]  # in which it is written (ISO 15924, such as Latn), the usual one first
    name: str


def read_language_table() -> tuple[dict[str, Language], dict[str, str]]:
    """Return the languages by code, and the code that each other notation, in lower case, stands for."""
    languages: dict[str, Language] = {}
    codes: dict[str, str] = {}
    for line in Path(__file__).with_name("language_codes.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            code, scripts, others, name = line.split("\t")
            languages[code] = Language(code, tuple(scripts.split()), name)
            codes |= dict.fromkeys([code.lower(), *others.split()], code)
    return languages, codes


LANGUAGES, CODE_BY_NOTATION = read_language_table()
LANGUAGE_NAMES = {language.code: language.name for language in LANGUAGES.values()}  # code -> English name
# Codes of the language that another code also stands for: Bokmål is what `no` usually means, Filipino standard Tagalog.
WIDER_CODES = {"nb": "no", "fil": "tl"}
SCRIPTS_OF_LOCALES = {"latin": "Latn", "cyrillic": "Cyrl", "devanagari": "Deva", "arabic": "Arab"}  # sr@latin
CODE = re.compile(r"(?P<language>[a-z]{2,3})(-(?P<script>[a-z]{4}))?(-(?P<region>[a-z]{2}|\d{3}))?", re.I)


def find_code(text: str) -> str:
    """Return the usual notation of a language code, such as zh-Hans for ZH_CN; "" if it is not well-formed."""
    given = text.strip().replace("_", "-")
    if code := CODE_BY_NOTATION.get(given.lower()):
        return code
    match = CODE.fullmatch(given)
    if not match:
        return ""
    language, script, region = match["language"].lower(), (match["script"] or "").title(), (match["region"] or "")
    base = CODE_BY_NOTATION.get(language, language)
    main = base.partition("-")[0]  # zh of zh-Hans
    if script and f"{main}-{script}" in LANGUAGES:
        base, script = f"{main}-{script}", ""
    elif script and base in LANGUAGES and script == LANGUAGES[base].scripts[0]:
        script = ""  # the script in which the language is usually written
    return "-".join(filter(None, [main if script else base, script, region.upper()]))


def normalize_code(text: str) -> str:
    """Return the usual notation of a language code; raise a ValueError if it is none. "" stays "": unknown.

    assert [normalize_code(code) for code in ("DE", "por-br", "eng_Latn", "zh")] == ["de", "pt-BR", "en", "zh-Hans"]
    """
    code = find_code(text)
    if text.strip() and not code:
        by_name = {name.lower(): code for code, name in LANGUAGE_NAMES.items()}
        meant = by_name.get(text.strip().lower())
        hint = f"{meant} for {text.strip()}" if meant else "en, de or pt-BR"
        # `describe_error` puts "should be" before this text.
        raise ValueError(f"a language code, such as {hint}")
    return code


LanguageCode = Annotated[str, AfterValidator(normalize_code)]


def name_language(code: str) -> str:
    """Return the English name of a language, such as "German" or "German (AT)"; the code itself if it is not known."""
    if code in LANGUAGE_NAMES:
        return LANGUAGE_NAMES[code]
    main, _, rest = code.partition("-")
    return f"{LANGUAGE_NAMES[main]} ({rest})" if main in LANGUAGE_NAMES else code


def list_scripts(code: str) -> tuple[str, ...]:
    """Return the scripts that a language is written in, the usual one first; none for an unknown language."""
    if code in LANGUAGES:
        return LANGUAGES[code].scripts
    main, _, rest = code.partition("-")
    script = rest.partition("-")[0]
    if len(script) == 4:
        return (script,)
    return LANGUAGES[main].scripts if main in LANGUAGES else ()


def get_wider_code(code: str) -> str:
    """Return the language of a code without script and region, as the more general one of two codes for it."""
    main = code.partition("-")[0]
    return WIDER_CODES.get(main, main)


@lru_cache(4096)  # files of translations ask for every unit
def find_locale_code(text: str) -> str:
    """Return the usual notation of a language code or a locale, such as sr@latin; in lower case if it is neither."""
    main, _, modifier = text.strip().partition("@")
    script = SCRIPTS_OF_LOCALES.get(modifier.lower())
    return (find_code(f"{main}-{script}") if script else "") or find_code(main) or main.lower()


def is_same_language(first: str, second: str) -> bool:
    """Return whether two codes, in any notation, differ in their regions only, so that a text needs no translation.

    Those of one language in two scripts, such as zh-CN and zh-TW, do not.
    """
    codes = [find_locale_code(first), find_locale_code(second)]
    scripts = [list_scripts(code)[:1] for code in codes]
    is_same = get_wider_code(codes[0]) == get_wider_code(codes[1])
    return is_same and all(codes) and (scripts[0] == scripts[1] or not all(scripts))


def match_language(code: str, available: Iterable[str]) -> str | None:
    """Return the one of the available codes that suits `code` best, or None.

    That is the same code, or else one that differs in its region only (pt for pt-BR), or else in its script. Codes of
    the same language (no and nb, tl and fil) match as well.
    """
    choices = list(available)
    wanted = find_code(code) or code
    main, scripts = wanted.partition("-")[0], list_scripts(wanted)[:1]
    related = [choice for choice in choices if get_wider_code(choice) == get_wider_code(wanted)]
    related.sort(key=lambda choice: choice.partition("-")[0] != main)
    same_script = [choice for choice in related if list_scripts(choice)[:1] == scripts]
    exact = [wanted] if wanted in choices else []
    return next(iter([*exact, *([main] if main in same_script else []), *same_script, *related]), None)
