"""The languages that a model translates between, and the language of a text.

    translator = dragoman.load("runs/many")
    direction = choose_direction(translator, "de", "en")
    translator.translate(["Ein Hund schläft."], tag=direction.tag)

A recipe names its languages in data.source_language and data.target_language. Where it does not, they follow from the
phrasebook's direction or the names of files (train.en, train.de). With several directions, each corpus has a tag that
names its target language, and a translation is asked for with that tag.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from threading import Lock
from typing import TYPE_CHECKING

from dragoman.data.cleaning import NO_EVIDENCE, LanguageGuesser
from dragoman.data.corpus import CorpusSettings, DataSettings, phrasebook_direction
from dragoman.data.sentencepiece_tokenizer import SentencePieceTokenizer
from dragoman.data.tokenizers import TARGET_MARK, Tokenizers
from dragoman.errors import UserError
from dragoman.language_codes import LANGUAGE_NAMES as LANGUAGE_NAMES  # for those who show languages
from dragoman.language_codes import find_code, list_scripts, match_language, name_language
from dragoman.recipe import Recipe

if TYPE_CHECKING:
    from dragoman.inference.translator import Translator

FILE_LANGUAGE = re.compile(r"\.([A-Za-z0-9_-]+?)(?:\.(?:gz|xz|zst))?$")  # "en" in names of files such as train.en.gz
LISTED_DIRECTIONS = 12  # that are listed one by one
DETECTED_CHARACTERS = 2000  # of a text: more make the answer slower, not surer
# py3langid adds up the log-probabilities of overlapping n-grams as if they were independent, which makes it too sure of
# itself. Divided by 1.5, they are calibrated best over short texts of the phrasebook and names in 45 languages.
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


@dataclass(frozen=True, slots=True, order=True)
class Direction:
    """A source and a target language, "" if unknown, and the tag with which a model translates between them."""

    source: str
    target: str
    tag: str = ""

    def __str__(self) -> str:
        return f"{self.source or '?'}-{self.target or '?'}"

    @property
    def title(self) -> str:
        """The direction in words, such as "English to German"."""
        return " to ".join(name_language(code) if code else "unknown" for code in (self.source, self.target))


def list_directions(recipe: Recipe, tokenizers: Tokenizers | None = None) -> tuple[Direction, ...]:
    """Return the directions that a recipe trains, in the order of its corpora; none if it does not train a translator.

    A model of unknown languages has directions with the languages "". A published model translates between all
    languages that its tokenizer has tokens for, also after it was trained further.
    """
    if recipe.model.task != "translate":
        return ()
    data = recipe.data
    if tokenizers and isinstance(tokenizers.source, SentencePieceTokenizer) and tokenizers.source.languages:
        languages = tuple(tokenizers.source.languages.items())
        return pair_languages(languages, data.source_language, begins_targets=tokenizers.source.begins_targets)
    if not data.train:
        return (Direction(data.source_language, data.target_language),)
    return tuple(dict.fromkeys(direction for corpus in data.train for direction in find_directions(corpus, data)))


@lru_cache(maxsize=8)
def pair_languages(
    languages: tuple[tuple[str, str], ...], source_language: str, *, begins_targets: bool
) -> tuple[Direction, ...]:
    """Return the directions of a published model, whose languages are given with their tokens.

    Either both sides begin with the token of their language, or the source begins with that of the target.
    """
    if not begins_targets:
        return tuple(Direction(source_language, code, token) for code, token in languages)
    return tuple(
        Direction(source, target, f"{token} {TARGET_MARK}{target_token}")
        for source, token in languages
        for target, target_token in languages
        if source != target
    )


def find_directions(corpus: CorpusSettings, data: DataSettings) -> Iterator[Direction]:
    """Yield the direction of a corpus and, with data.both_ways, its reverse."""
    named_by_files = [code for name in (corpus.source, corpus.target) if (code := find_file_language(name))]
    if corpus.phrasebook:
        source, target = phrasebook_direction(corpus, data.direction).split("-")
        if corpus.view != "translation":  # its targets are made of its sources: a tree or other words
            target = source
    else:
        source, target = named_by_files if len(named_by_files) == 2 else ("", "")
        source, target = data.source_language or source, data.target_language or target
        if corpus.reverse:
            source, target = target, source
    tagged = next((code for word in corpus.tag.split() if (code := find_code(word)) in LANGUAGE_NAMES), "")
    if tagged and tagged == source:
        source, target = target, source
    yield Direction(source, tagged or target, corpus.tag)
    if data.both_ways:
        yield Direction(target, source, corpus.tag)


def find_file_language(name: str) -> str:
    """Return the language that the name of a file ends with, such as pt-BR for train.pt_BR.gz; "" if there is none.

    Suffixes that are not in the table of languages, such as src, are no languages.
    """
    match = FILE_LANGUAGE.search(name)
    code = find_code(match[1]) if match else ""
    return code if code in LANGUAGE_NAMES else ""


def describe_directions(directions: Sequence[Direction]) -> str:
    """Return directions as text, such as "English to German (en-de)"; the numbers of languages if there are many."""
    known = list(dict.fromkeys((direction.source, direction.target) for direction in directions if direction.source))
    if len(known) > LISTED_DIRECTIONS:
        return f"{len({source for source, _ in known})} languages to {len({target for _, target in known})}"
    return ", ".join(f"{Direction(*pair).title} ({Direction(*pair)})" for pair in known)


def choose_direction(translator: Translator, source: str = "", target: str = "") -> Direction:
    """Return the direction of a translator from one language to another; raise a UserError if it has none.

    "" stands for any language. A language that differs in its region only will do: pt for pt-BR. A model of unknown
    languages takes all.
    """
    fitting = list(translator.directions)
    for side, code in (("source", source), ("target", target)):
        if not code:
            continue
        if not find_code(code):
            raise UserError(f"{code!r} is not a language code, such as en or pt-BR")
        known = dict.fromkeys(language for direction in fitting if (language := getattr(direction, side)))
        matched = match_language(code, known)
        chosen = [direction for direction in fitting if getattr(direction, side) in (matched or "", "")]
        if not chosen:
            origin = f" from {name_language(source)}" if side == "target" and source else ""
            verb = "from" if side == "source" else "to"
            raise UserError(
                f"this model does not translate{origin} {verb} {describe_code(code)}; "
                f"it translates {verb} {', '.join(map(describe_code, known))}"
            )
        fitting = chosen
    if len({direction.tag for direction in fitting}) > 1 and len({(d.source, d.target) for d in fitting}) > 1:
        side = "source" if not source and len({direction.source for direction in fitting}) > 1 else "target"
        choices = ", ".join(map(describe_code, dict.fromkeys(getattr(direction, side) for direction in fitting)))
        raise UserError(f"this model translates in several directions; choose its {side} language: {choices}")
    return fitting[0]


def describe_code(code: str) -> str:
    """Return a language for a message, such as "de (German)"."""
    name = name_language(code)
    return code or "?" if name == code else f"{code} ({name})"


def load_guesser() -> LanguageGuesser:
    """Return the guesser. The first call loads its model; threads that call at the same time wait for that."""
    with GUESSER_LOCK:
        return make_guesser()


make_guesser = lru_cache(maxsize=1)(LanguageGuesser)


def detect_language(text: str, candidates: Sequence[str] = ()) -> list[tuple[str, float]]:
    """Return the candidates, best first, each with the probability that the text is in this language.

    Without candidates, all languages that py3langid knows are considered. The probabilities of the candidates add up
    to less than 1 if the text may be in another language. They are 0 for a text without letters.

    assert detect_language("Der Hund schläft.", ["en", "de"])[0][0] == "de"
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
    """Return the weight of each candidate and of each other language that py3langid knows, of any sum.

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
        share_chinese(text, weights)
    return weights


def share_chinese(text: str, weights: dict[str, float]) -> None:
    """Divide the weight of Chinese by the characters that only simplified or only traditional texts have."""
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
