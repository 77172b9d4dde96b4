"""The directions that a model translates in: from one language to another.

    translator = dragoman.load("runs/many")
    direction = choose_direction(translator, "de", "en")
    translator.translate(["Ein Hund schläft."], tag=direction.tag)

A recipe names its languages in data.source_language and data.target_language. Where it does not, they follow from the
phrasebook's direction or the names of files (train.en, train.de). With several directions, each corpus has a tag that
names its target language, and a translation is asked for with that tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dragoman.data.corpus import CorpusSettings, DataSettings, phrasebook_direction
from dragoman.data.sentencepiece_tokenizer import SentencePieceTokenizer
from dragoman.data.tokenizers import TARGET_MARK, Tokenizers
from dragoman.errors import UserError
from dragoman.language_codes import LANGUAGE_NAMES, find_code, match_language, name_language
from dragoman.recipe import Recipe

if TYPE_CHECKING:
    from dragoman.inference.translator import Translator

FILE_LANGUAGE = re.compile(r"\.([A-Za-z0-9_-]+?)(?:\.(?:gz|xz|zst))?$")  # "en" in names of files such as train.en.gz
LISTED_DIRECTIONS = 12  # that are listed one by one


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
