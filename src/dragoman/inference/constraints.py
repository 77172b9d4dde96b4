"""Terms that must or must not appear: where they stand, how they may be written, and lists of them in files.

A glossary is a file of lines with a tab:

    dog<tab>Hund        where "dog" stands in the source, "Hund" must appear in the answer
    dog<tab>!Köter      where "dog" stands in the source, "Köter" must not appear
    dog<tab>            where "dog" stands in the source, "dog" itself must not appear: it must be translated
    !Köter              must never appear

What is asked of answers, from the words of users to what search understands, and whether the answers have it.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dragoman.config.settings import SearchSettings, build, override, pick
from dragoman.data.tokenizers import Tokenizer, Tokenizers
from dragoman.decoding.methods import METHODS, apply_fixed_settings, check_search_settings
from dragoman.decoding.request import UNREACHABLE, DecodingConstraints, SpellingTable, Term
from dragoman.decoding.sentence_beam import count_needed_tokens
from dragoman.errors import UserError
from dragoman.inference.postprocess import UNKNOWN_WORD_METHODS
from dragoman.io import read_lines
from dragoman.types import Line

MAX_TERMS = 128  # terms that one answer may be asked to have, or not to have
MAX_TERM_CHARACTERS = 200  # characters of a term
CACHED_TERMS = 2 * MAX_TERMS  # terms of a vocabulary whose machines are kept: those of one line, and others
NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\ua4cf\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
SPACELESS_LETTER = re.compile(f"[{NO_SPACES}]")  # letters of scripts that put no spaces between words
FIRST_WORD = re.compile(rf"[{NO_SPACES}]|[^\W{NO_SPACES}]+|\S")


class TermEdges(NamedTuple):
    """Whether something that is no letter must stand before and after a term."""

    before: bool
    after: bool


def term_edges(term: str) -> TermEdges:
    """Letters at its edges must not run on; but there are scripts that write no spaces between words."""
    return TermEdges(*(each.isalnum() and not SPACELESS_LETTER.match(each) for each in (term[0], term[-1])))


@lru_cache(maxsize=4096)
def compile_term(term: str) -> re.Pattern[str]:
    """Where a term stands in a text."""
    before, after = term_edges(term)
    return re.compile((r"(?<!\w)" if before else "") + re.escape(term) + (r"(?!\w)" if after else ""))


def source_contains(term: str, text: str) -> bool:
    """Whether a source has a term, in capital letters or small ones."""
    return bool(compile_term(term.casefold()).search(text.casefold()))


def output_contains(term: str, text: str, *, loud: bool = False) -> bool:
    """Whether an answer has a term, in one of the ways to write it."""
    return any(compile_term(way).search(text) for way in spell_term(term, loud=loud))


def spell_term(term: str, *, loud: bool = False) -> list[str]:
    """As it is, and as at the beginning of a sentence; with `loud`, also in capital letters."""
    return list(dict.fromkeys([term, term[0].upper() + term[1:], *([term.upper()] if loud else [])]))


class TermCompiler:
    """Makes machines of terms for one vocabulary, and keeps those that were asked for last."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.spelt = tokenizer, tokenizer.spellings()
        self.spelling = SpellingTable(self.spelt)
        self.held: OrderedDict[tuple[str, bool], Term] = OrderedDict()

    def term(self, text: str, *, loud: bool = False) -> Term:
        key = (text, loud)
        if key not in self.held:
            self.held[key] = self.made(text, loud=loud)
            if len(self.held) > CACHED_TERMS:
                self.held.popitem(last=False)
        self.held.move_to_end(key)
        return self.held[key]

    def made(self, text: str, *, loud: bool) -> Term:
        """A term that holds what the vocabulary does not know is one that cannot be said."""
        spelt = [way for way in spell_term(text, loud=loud) if self.tokenizer.decode(self.tokenizer.encode(way)) == way]
        if not spelt:
            never_SV = np.zeros((2, len(self.spelt)), dtype=np.int16)
            return Term(text, never_SV, np.array([UNREACHABLE, 0], dtype=np.int32), np.array([False, True]))
        bodies = [b"".join(self.spelt[i] for i in self.tokenizer.encode(way)).lstrip(b" ") for way in spelt]
        before, after = term_edges(text)
        return self.spelling.term(text, bodies, before=before, after=after)


@lru_cache(maxsize=2)
def term_compiler(tokenizer: Tokenizer) -> TermCompiler:
    return TermCompiler(tokenizer)


def select_terms(terms: Sequence[str | tuple[str, str]], text: str, *, first: bool) -> list[str]:
    """The terms that are asked of the answer to a text; those without a place of their own, where it is the first."""
    found = [term for term in terms if isinstance(term, str)] if first else []
    found += [
        term for place, term in (pair for pair in terms if not isinstance(pair, str)) if source_contains(place, text)
    ]
    for term in found:
        if not term.strip():
            raise UserError("a term must not be empty; leave it out, or write what must appear")
    return check_terms(list(dict.fromkeys(term.strip() for term in found)), f"the line {text[:40]!r}")


def check_terms(terms: list[str], place: str) -> list[str]:
    """The terms, unless they are more or longer than a search comes to an end with."""
    if len(terms) > MAX_TERMS:
        raise UserError(f"{place}: {len(terms)} terms cannot all be asked of one answer; name {MAX_TERMS} at most")
    for term in terms:
        if len(term) > MAX_TERM_CHARACTERS:
            raise UserError(
                f"{place}: a term has {MAX_TERM_CHARACTERS} characters at most, and {term[:40]!r}... has {len(term)}"
            )
    return terms


class Glossary:
    """Pairs of a term in the source and one in the answer, found by the first word of the former."""

    def __init__(self, must: Sequence[tuple[str, str]], avoid: Sequence[tuple[str, str]], never: Sequence[str]) -> None:
        self.must, self.avoid, self.never = index_by_first_word(must), index_by_first_word(avoid), tuple(never)

    def line(self, line: Line) -> Line:
        """Return the line with the glossary's terms added to its own; its tag and all else stay as they are."""
        words = {match[0].casefold() for match in FIRST_WORD.finditer(line.text)}
        must = [pair for word in words for pair in self.must.get(word, ()) if source_contains(pair[0], line.text)]
        avoid = [pair for word in words for pair in self.avoid.get(word, ()) if source_contains(pair[0], line.text)]
        return replace(line, terms=(*line.terms, *sorted(must)), avoid=(*line.avoid, *self.never, *sorted(avoid)))


def index_by_first_word(pairs: Sequence[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    found = defaultdict(list)
    for source, target in pairs:
        found[FIRST_WORD.findall(source)[0].casefold()].append((source, target))
    return found


def read_glossary(path: Path) -> Glossary:
    must, avoid, never = [], [], []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        source, *rest = (part.strip() for part in line.split("\t"))
        target = rest[0] if rest else ""
        fine = len(rest) == 1 and source and target != "!" and not (source[0] == "!" and target)
        if not rest and source[0] == "!" and len(source) > 1:
            never.append(source[1:].strip())
        elif not fine:
            raise UserError(
                f"{path}, line {number}: should be 'source<tab>target', 'source<tab>!target' or '!target', got {line!r}"
            )
        elif target.startswith("!"):
            avoid.append((source, target[1:].strip()))
        elif target:
            must.append((source, target))
        else:
            avoid.append((source, source))
        check_terms([target or source], f"{path}, line {number}")
    return Glossary(must, avoid, check_terms(never, str(path)))


def read_dictionary(path: Path) -> dict[str, str]:
    """Words and their translations, a tab between them; the first of several counts."""
    return dict(reversed(list(_entries(path))))


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(read_lines(path), 1):
        word, tab, translation = line.partition("\t")
        if not line.strip():
            continue
        if not tab or not word.strip() or not translation.strip():
            raise UserError(f"{path}, line {number}: should be 'word<tab>translation', got {line!r}")
        yield word.strip(), translation.strip()


def merge_search(
    own: SearchSettings, changes: Mapping[str, Any] | None = None, *, beam: int | None = None, count: int | None = None
) -> SearchSettings:
    """The run's own settings with changes laid over them, all of them checked."""
    asked = {"beam": beam, "nbest": count}
    values = {
        **own.model_dump(),
        **(changes or {}),
        **{name: value for name, value in asked.items() if value is not None},
    }
    settings = build(SearchSettings, values, where="search")
    check_search_settings(settings)
    pick(UNKNOWN_WORD_METHODS, settings.unknown, "search.unknown")
    return apply_fixed_settings(settings)


def parse_search_overrides(overrides: Sequence[str], begun: Mapping[str, Any]) -> dict[str, Any]:
    """`search.a=b` laid over what was begun; what else a run was trained with cannot be changed any more."""
    values: dict[str, Any] = {"search": dict(begun)}
    for item in overrides:
        if not item.startswith("search."):
            raise UserError(f"{item!r} cannot be changed here; only settings of search can, such as search.beam=8")
        override(values, item)
    changes: dict[str, Any] = values["search"]
    return changes


def widen_nbest(settings: SearchSettings) -> SearchSettings:
    """The same for the search itself, which must find more answers where some will have the same text, or be ranked
    anew."""
    more = METHODS[settings.method].reranks and (settings.nbest > 1 or settings.coverage > 0)
    return settings.model_copy(update={"nbest": settings.beam}) if more else settings


def make_constraints(
    line: Line, text: str, tokens: int, tokenizers: Tokenizers, search: SearchSettings, *, first: bool
) -> DecodingConstraints:
    """What is asked of the answer to a part of a line, of so many tokens, or to all of it. How the answer begins, and
    terms without a place of their own, are asked of the first part."""
    if not (line.terms or line.avoid or line.begin or search.min_ratio):
        return DecodingConstraints(text=text)
    terms, avoid = select_terms(line.terms, text, first=first), select_terms(line.avoid, text, first=True)
    spell = term_compiler(tokenizers.target).term if terms or avoid else None
    return DecodingConstraints(
        prefix=tuple(tokenizers.target.encode(line.begin.rstrip())) if first and line.begin.strip() else (),
        must=tuple(spell(term) for term in terms) if spell else (),
        avoid=tuple(spell(term, loud=True) for term in avoid) if spell else (),
        minimum=math.ceil(search.min_ratio * tokens),
        text=text,
    )


def limit_length(wish: DecodingConstraints, tokens: int, search: SearchSettings, places: int) -> int:
    """The most tokens that an answer may have, its end mark counted: what was asked for needs room of its own."""
    usual = int(search.max_ratio * tokens) + search.max_extra + 1
    return min(max(usual, wish.minimum + 1) + len(wish.prefix) + count_needed_tokens(wish), places)


def list_unmet(line: Line, wish: DecodingConstraints, text: str) -> list[str]:
    """What an answer does not have, by its text, as warnings."""
    found = [
        f"without a term that was asked for: {term.text!r}"
        for term in wish.must
        if not output_contains(term.text, text)
    ]
    found += [
        f"with a term to be avoided: {term.text!r}"
        for term in wish.avoid
        if output_contains(term.text, text, loud=True)
    ]
    if wish.prefix and not text.startswith(line.begin.rstrip()):
        found.append(f"not beginning as it was asked to: {line.begin!r}")
    return found
