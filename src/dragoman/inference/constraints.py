"""Constraints on translations: glossaries, and terms that must or must not appear.

A glossary is a file of lines with a tab:

    dog<tab>Hund        if "dog" is in the source, "Hund" must be in the translation
    dog<tab>!Köter      if "dog" is in the source, "Köter" must not be in the translation
    dog<tab>            if "dog" is in the source, "dog" itself must not be in the translation: it must be translated
    !Köter              must never be in a translation
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from dragoman.data.tokenizers import Tokenizer, Tokenizers
from dragoman.decoding.methods import SearchSettings
from dragoman.decoding.protocol import UNREACHABLE, DecodingConstraints, SpellingTable, Term
from dragoman.errors import UserError
from dragoman.io import read_lines
from dragoman.types import Line

MAX_TERMS = 128  # terms that one translation must have, or must not have
MAX_TERM_CHARACTERS = 200
CACHED_TERMS = 2 * MAX_TERMS  # compiled terms kept per vocabulary: those of one line, and others
NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\ua4cf\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
SPACELESS_LETTER = re.compile(f"[{NO_SPACES}]")  # letters of scripts that put no spaces between words
FIRST_WORD = re.compile(rf"[{NO_SPACES}]|[^\W{NO_SPACES}]+|\S")


def needs_boundaries(term: str) -> tuple[bool, bool]:
    """Return whether a term needs a word boundary before and after it.

    It does at letters, except in scripts without spaces between words.
    """
    before, after = (each.isalnum() and not SPACELESS_LETTER.match(each) for each in (term[0], term[-1]))
    return before, after


@lru_cache(maxsize=4096)
def compile_term(term: str) -> re.Pattern[str]:
    """Return a pattern that finds a term in a text."""
    before, after = needs_boundaries(term)
    return re.compile((r"(?<!\w)" if before else "") + re.escape(term) + (r"(?!\w)" if after else ""))


def source_contains(term: str, text: str) -> bool:
    """Return whether a source contains a term, in any case."""
    return bool(compile_term(term.casefold()).search(text.casefold()))


def output_contains(term: str, text: str, *, all_caps: bool = False) -> bool:
    """Return whether an output contains a term in one of its spellings."""
    return any(compile_term(spelling).search(text) for spelling in spell_term(term, all_caps=all_caps))


def spell_term(term: str, *, all_caps: bool = False) -> list[str]:
    """Return the term as it is and capitalised; with `all_caps`, also in capitals."""
    return list(dict.fromkeys([term, term[0].upper() + term[1:], *([term.upper()] if all_caps else [])]))


class TermCompiler:
    """Compiles terms to automata over the tokens of one vocabulary; `term` caches the latest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.spelt = tokenizer, tokenizer.spellings()
        self.spelling = SpellingTable(self.spelt)
        self.term = lru_cache(maxsize=CACHED_TERMS)(self.compile)

    def compile(self, text: str, *, all_caps: bool = False) -> Term:
        """Return the automaton of a term; one that cannot be reached if the vocabulary cannot spell the term."""
        encode, decode = self.tokenizer.encode, self.tokenizer.decode
        spelt = [way for way in spell_term(text, all_caps=all_caps) if decode(encode(way)) == way]
        if not spelt:
            never_SV = np.zeros((2, len(self.spelt)), dtype=np.int16)
            return Term(text, never_SV, np.array([UNREACHABLE, 0], dtype=np.int32), np.array([False, True]))
        bodies = [b"".join(self.spelt[i] for i in encode(way)).lstrip(b" ") for way in spelt]
        before, after = needs_boundaries(text)
        return self.spelling.build_term(text, bodies, before=before, after=after)


get_term_compiler = lru_cache(maxsize=2)(TermCompiler)  # the vocabularies of two models


def select_terms(terms: Sequence[str | tuple[str, str]], text: str, *, first: bool) -> list[str]:
    """Return the terms that apply to a text. Those without a source term apply to the first segment of a line."""
    found = [term for term in terms if isinstance(term, str)] if first else []
    found += [pair[1] for pair in terms if not isinstance(pair, str) and source_contains(pair[0], text)]
    if not all(term.strip() for term in found):
        raise UserError("a term must not be empty; leave it out, or write what must appear")
    return check_terms(list(dict.fromkeys(term.strip() for term in found)), f"the line {text[:40]!r}")


def check_terms(terms: list[str], place: str) -> list[str]:
    """Return the terms; refuse more or longer ones than a search can handle."""
    if len(terms) > MAX_TERMS:
        raise UserError(f"{place}: {len(terms)} terms cannot all be asked of one answer; name {MAX_TERMS} at most")
    for term in terms:
        if len(term) > MAX_TERM_CHARACTERS:
            raise UserError(
                f"{place}: a term has {MAX_TERM_CHARACTERS} characters at most, and {term[:40]!r}... has {len(term)}"
            )
    return terms


class Glossary:
    """Pairs of source and target terms, indexed by the first word of the source term."""

    def __init__(self, must: Sequence[tuple[str, str]], avoid: Sequence[tuple[str, str]], never: Sequence[str]) -> None:
        self.never = tuple(never)
        self.must: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self.avoid: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for index, pairs in ((self.must, must), (self.avoid, avoid)):
            for pair in pairs:
                index[FIRST_WORD.findall(pair[0])[0].casefold()].append(pair)

    def line(self, line: Line) -> Line:
        """Return the line with the glossary's terms added to its own; its tag and all else stay as they are."""
        words = {match[0].casefold() for match in FIRST_WORD.finditer(line.text)}
        must, avoid = (
            sorted(pair for word in words for pair in index.get(word, ()) if source_contains(pair[0], line.text))
            for index in (self.must, self.avoid)
        )
        return replace(line, terms=(*line.terms, *must), avoid=(*line.avoid, *self.never, *avoid))


def read_glossary(path: Path) -> Glossary:
    """Read a glossary file, see the top of this module."""
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
    """Read lines of a word, a tab and its translation; the first of several for a word counts."""
    found: dict[str, str] = {}
    for number, line in enumerate(read_lines(path), 1):
        word, _, translation = (part.strip() for part in line.partition("\t"))
        if line.strip() and not (word and translation):
            raise UserError(f"{path}, line {number}: should be 'word<tab>translation', got {line!r}")
        if word:
            found.setdefault(word, translation)
    return found


def make_constraints(
    line: Line, text: str, tokens: int, tokenizers: Tokenizers, search: SearchSettings, *, first: bool
) -> DecodingConstraints:
    """Return the constraints on the translation of a line's segment, `text`, of so many tokens.

    The prefix and terms without a source term apply to the first segment.
    """
    terms, avoid = select_terms(line.terms, text, first=first), select_terms(line.avoid, text, first=True)
    return DecodingConstraints(
        prefix=tuple(tokenizers.target.encode(line.begin.rstrip())) if first and line.begin.strip() else (),
        must=tuple(get_term_compiler(tokenizers.target).term(term) for term in terms),
        avoid=tuple(get_term_compiler(tokenizers.target).term(term, all_caps=True) for term in avoid),
        minimum=math.ceil(search.min_ratio * tokens),
        text=text,
    )


def list_unmet(line: Line, constraints: DecodingConstraints, text: str) -> list[str]:
    """Return a warning for each constraint that the text does not meet."""
    must, avoid = ([term.text for term in terms] for terms in (constraints.must, constraints.avoid))
    found = [f"without a term that was asked for: {term!r}" for term in must if not output_contains(term, text)]
    avoid = [term for term in avoid if output_contains(term, text, all_caps=True)]
    found += [f"with a term to be avoided: {term!r}" for term in avoid]
    if constraints.prefix and not text.startswith(line.begin.rstrip()):
        found.append(f"not beginning as it was asked to: {line.begin!r}")
    return found
