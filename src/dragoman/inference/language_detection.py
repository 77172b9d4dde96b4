"""The language of a text: the probabilities of candidate languages, by its letters and by py3langid.

assert detect_language("Der Hund schläft.", ["en", "de"])[0][0] == "de"
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from threading import Lock

from dragoman.data.cleaning import NO_EVIDENCE, LanguageGuesser
from dragoman.language_codes import find_code, list_scripts, match_language

DETECTED_CHARACTERS = 2000  # of a text: longer texts are slower, not more certain
# py3langid adds up the log-probabilities of overlapping n-grams as if they were independent, which makes it
# overconfident. Divided by 1.5, they are calibrated best over short texts of the phrasebook and names in 45 languages.
EVIDENCE_SCALE = 1.5
GUESSER_LOCK = Lock()
UNEXPECTED_LOGP = -4.0  # log-probability that a text is in a given language other than the candidates
# Scripts by the first word of the Unicode names of their characters, where it is not the beginning of the ISO code.
SCRIPT_BY_UNICODE_NAME = {
    "LATIN": "Latn", "FULLWIDTH": "Latn", "CYRILLIC": "Cyrl", "ARMENIAN": "Armn", "TAMIL": "Taml",
    "CJK": "Hani", "HIRAGANA": "Kana", "KATAKANA": "Kana", "KATAKANA-HIRAGANA": "Kana", "HANGUL": "Hang",
    "DEVANAGARI": "Deva", "GURMUKHI": "Guru", "GUJARATI": "Gujr", "KANNADA": "Knda", "MALAYALAM": "Mlym",
    "MYANMAR": "Mymr", "ORIYA": "Orya", "GREEK": "Grek", "TIBETAN": "Tibt", "KHMER": "Khmr", "CANADIAN": "Cans",
    "OL": "Olck", "LAO": "Laoo", "TIFINAGH": "Tfng", "YI": "Yiii",
}  # fmt: skip
SCRIPT_PARTS = {"Jpan": ("Hani", "Kana"), "Kore": ("Hang",), "Hans": ("Hani",), "Hant": ("Hani",)}  # where not itself


def load_guesser() -> LanguageGuesser:
    """Return the guesser. The first call loads its model; threads that call at the same time wait for that."""
    with GUESSER_LOCK:
        return make_guesser()


make_guesser = lru_cache(maxsize=1)(LanguageGuesser)


def detect_language(text: str, candidates: Sequence[str] = ()) -> list[tuple[str, float]]:
    """Return the candidates, best first, each with the probability that the text is in this language.

    Without candidates, all languages that py3langid knows are considered. The probabilities of the candidates add up
    to less than 1 if the text may be in another language. They are 0 for a text without letters.
    """
    codes = list(dict.fromkeys(candidates))
    text = text[:DETECTED_CHARACTERS]
    scripts = count_scripts(text)
    if not scripts:
        return [(code, 0.0) for code in codes]
    by_script = [code for code in codes if is_written_in(code, scripts)]
    main_script = scripts.most_common(1)[0][0]
    if len(by_script) == 1 and main_script != "Latn" and scripts[main_script] == scripts.total():
        # Hardly a text in Greek letters is in another language than Greek.
        return [(by_script[0], 0.99), *((code, 0.0) for code in codes if code != by_script[0])]
    weights = weigh_languages(text, by_script, scripts)
    total = math.fsum(weights.values())
    found = [(code, weights.get(code, 0.0) / total if total else 0.0) for code in codes or weights]
    return sorted(found, key=lambda item: -item[1])


@cache
def find_known_code(code: str) -> str:
    return find_code(code) or code


def weigh_languages(text: str, candidates: Sequence[str], scripts: Counter[str]) -> dict[str, float]:
    """Return the weight of each candidate and of each other language that py3langid knows; not normalized.

    A candidate that it does not know by its code, such as pt-BR, has the weight of the language without region and
    script.
    """
    ranked = {find_known_code(code): score for code, score in load_guesser().langid.rank(text)}
    ranked.pop("zxx", None)  # no language
    best = max(ranked.values())
    if best <= NO_EVIDENCE:
        return {}
    scaled = {code: (score - best) / EVIDENCE_SCALE for code, score in ranked.items() if score > NO_EVIDENCE}
    weights: dict[str, float] = {}
    expected = {candidate: match_language(candidate, ranked) for candidate in candidates}
    sharing = Counter(filter(None, expected.values()))
    for candidate, known in expected.items():
        if known and known in scaled:
            weights[candidate] = math.exp(scaled[known]) / sharing[known]
    suits: dict[tuple[str, ...], bool] = {}  # by the scripts of languages, which most share with others
    for code, logp in scaled.items():
        names = list_scripts(code)
        if names not in suits:
            suits[names] = is_written_in(code, scripts)
        if suits[names] and code not in sharing:
            weights[code] = math.exp(logp + (UNEXPECTED_LOGP if candidates else 0.0))
    if {"zh-Hans", "zh-Hant"} <= set(candidates):
        split_chinese_by_script(text, weights)
    return weights


def split_chinese_by_script(text: str, weights: dict[str, float]) -> None:
    """Split the weight of Chinese by the characters that only simplified or only traditional texts have."""
    characters = [character for character in text if unicodedata.name(character, "").startswith("CJK")]
    counts = [sum(bool(c.encode(name, errors="ignore")) for c in characters) for name in ("gb2312", "big5")]
    weight = weights.get("zh-Hans", 0.0) + weights.get("zh-Hant", 0.0)
    odds = math.exp(max(-5, min(5, 2 * (counts[0] - counts[1]))))
    weights["zh-Hans"], weights["zh-Hant"] = weight * odds / (1 + odds), weight / (1 + odds)


def count_scripts(text: str) -> Counter[str]:
    """Return how many letters of the text each script has; symbols, digits and emoji are no letters."""
    names = (unicodedata.name(character, "").split() for character in text if character.isalpha())
    return Counter(SCRIPT_BY_UNICODE_NAME.get(name[0], name[0][:4].title()) for name in names if name)


def is_written_in(code: str, scripts: Counter[str]) -> bool:
    """Return whether a text with these scripts may be in a language: most of its letters are of the language's scripts.

    Names and loan words are often in other letters, so a third of the text suffices. A language of unknown scripts may
    have any.
    """
    parts = {part for script in list_scripts(code) for part in SCRIPT_PARTS.get(script, (script,))}
    if "Kore" in list_scripts(code):
        return scripts["Hang"] > 0
    if "Jpan" in list_scripts(code) and not scripts["Kana"] and scripts.total() > 8:
        return False  # no Japanese sentence is without kana
    if "Hani" in parts and "Kana" not in parts and scripts["Kana"]:
        return False
    return not parts or sum(scripts[part] for part in parts) * 3 >= scripts.total()
