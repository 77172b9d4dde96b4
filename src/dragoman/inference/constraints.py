"""Constraints on translations: glossaries, and terms that must or must not appear.

`Glossary` adds the terms that apply to a line, `make_constraints` compiles the terms of a line for the search, and
`list_unmet_constraints` checks the translation. The terms that `match_terms` finds replace words after the search
(term_replacement.py) if possible. A line that is longer than any source in training is translated in several segments
(`Translator.split_line`). Each line of a glossary file has one of these forms:

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
from typing import NamedTuple

import numpy as np

from dragoman.data.tokenizers import Tokenizer, Tokenizers
from dragoman.decoding.methods import SearchSettings
from dragoman.decoding.protocol import UNREACHABLE, DecodingConstraints, Term, TokenByteTable
from dragoman.errors import UserError
from dragoman.io import read_lines
from dragoman.types import Line

TermPair = tuple[str, str]  # a term of the source and its translation
MAX_TERMS = 128  # maximum number of required terms of a line, and of forbidden ones
MAX_TERM_CHARACTERS = 200
CACHED_TERMS = 2 * MAX_TERMS  # number of compiled terms in the cache of a vocabulary: enough for any line
# Scripts without spaces between words, such as Thai, Lao, Burmese, Khmer and CJK.
NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\ua4cf\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
SPACELESS_LETTER = re.compile(f"[{NO_SPACES}]")
INDEX_WORD = re.compile(rf"[{NO_SPACES}]|[^\W{NO_SPACES}]+|\S")  # a letter of such a script, a word, or a symbol


def needs_boundaries(term: str) -> tuple[bool, bool]:
    """Return whether a term matches only after a word boundary, and whether only before one.

    A term that starts (ends) with a letter or digit needs a boundary there, except in scripts without spaces.
    """
    before, after = (letter.isalnum() and not SPACELESS_LETTER.match(letter) for letter in (term[0], term[-1]))
    return before, after


@lru_cache(maxsize=4096)
def compile_term(term: str) -> re.Pattern[str]:
    before, after = needs_boundaries(term)
    return re.compile((r"(?<!\w)" if before else "") + re.escape(term) + (r"(?!\w)" if after else ""))


def source_contains(term: str, text: str) -> bool:
    """Return whether a source contains a term, in upper or lower case."""
    return bool(compile_term(term.casefold()).search(text.casefold()))


def output_contains(term: str, text: str, *, all_caps: bool = False) -> bool:
    """Return whether an output contains a term in one of its case variants."""
    return any(compile_term(variant).search(text) for variant in list_case_variants(term, all_caps=all_caps))


def list_case_variants(term: str, *, all_caps: bool = False) -> list[str]:
    """Return the term unchanged and with a capital first letter; with `all_caps`, also in capitals."""
    return list(dict.fromkeys([term, term[0].upper() + term[1:], *([term.upper()] if all_caps else [])]))


class TermCompiler:
    """Compiles terms to finite automata that read tokens of a vocabulary. `get` is `compile` with a cache.

    Shapes   S states   V vocabulary
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.token_bytes = tokenizer, tokenizer.token_bytes()
        self.byte_table = TokenByteTable(self.token_bytes)
        self.get = lru_cache(maxsize=CACHED_TERMS)(self.compile)

    def compile(self, text: str, *, all_caps: bool = False) -> Term:
        """Return the automaton that accepts all case variants of a term.

        If the vocabulary cannot spell the term, the accepting state is unreachable.
        """
        encode, decode = self.tokenizer.encode, self.tokenizer.decode
        variants = [term for term in list_case_variants(text, all_caps=all_caps) if decode(encode(term)) == term]
        if not variants:
            next_state_SV = np.zeros((2, len(self.token_bytes)), dtype=np.int16)  # never reaches state 1, which accepts
            missing_S = np.array([UNREACHABLE, 0], dtype=np.int32)  # tokens until the term is complete
            complete_at_end_S = np.array([False, True])  # whether a text that ends in this state contains the term
            return Term(text, next_state_SV, missing_S, complete_at_end_S)
        encoded = [b"".join(self.token_bytes[i] for i in encode(variant)).lstrip(b" ") for variant in variants]
        before, after = needs_boundaries(text)
        return self.byte_table.build_term(text, encoded, before=before, after=after)


get_term_compiler = lru_cache(maxsize=2)(TermCompiler)  # keeps the compilers of two vocabularies


def select_terms(terms: Sequence[str | TermPair], text: str, *, unconditional: bool) -> list[str]:
    """Return the terms that apply to a segment of a line, `text`, without duplicates.

    A pair applies if its source term is in the text. Terms without a source term apply only if `unconditional`.
    """
    selected = [term for term in terms if isinstance(term, str)] if unconditional else []
    selected += [pair[1] for pair in terms if not isinstance(pair, str) and source_contains(pair[0], text)]
    if not all(term.strip() for term in selected):
        raise UserError("a term must not be empty; leave it out, or write what must (not) appear")
    return check_terms(list(dict.fromkeys(term.strip() for term in selected)), f"the line {text[:40]!r}")


def check_terms(terms: list[str], location: str) -> list[str]:
    """Return the terms; raise a UserError if there are too many, or if one is too long."""
    if len(terms) > MAX_TERMS:
        raise UserError(f"{location}: {len(terms)} terms are too many for one translation; name {MAX_TERMS} at most")
    for term in terms:
        if len(term) > MAX_TERM_CHARACTERS:
            raise UserError(
                f"{location}: a term has {MAX_TERM_CHARACTERS} characters at most, and {term[:40]!r}... has {len(term)}"
            )
    return terms


class TermMatch(NamedTuple):
    """Where the source term of a pair occurs in a text, from character `start` to `end`, and its translation."""

    start: int
    end: int
    source: str
    target: str


def match_terms(terms: Sequence[str | TermPair], text: str) -> list[TermMatch]:
    """Return where source terms occur in a text, in upper or lower case; of those that overlap, only the longest.

    Of two pairs with the same source term, only the first has matches.
    """
    pairs = [term for term in terms if not isinstance(term, str)]
    if not pairs:
        return []
    folded = text.casefold()
    starts = [index for index, letter in enumerate(text) for _ in letter.casefold()]  # "ß" becomes "ss"
    matches: list[TermMatch] = []
    for source, target in sorted(pairs, key=lambda pair: -len(pair[0])):
        for found in compile_term(source.casefold()).finditer(folded):
            start, end = starts[found.start()], starts[found.end() - 1] + 1
            if not any(start < match.end and match.start < end for match in matches):
                matches.append(TermMatch(start, end, source, target.strip()))
    return matches


class Glossary:
    """Pairs of a source term and a target term that must (or must not) be in the translation, and forbidden terms.

    `never` has the forbidden terms. The pairs are indexed by the first word of the source term, for fast lookup.
    """

    def __init__(self, required: Sequence[TermPair], avoid: Sequence[TermPair], never: Sequence[str]) -> None:
        self.never = tuple(never)
        self.required: dict[str, list[TermPair]] = defaultdict(list)
        self.avoid: dict[str, list[TermPair]] = defaultdict(list)
        for index, pairs in ((self.required, required), (self.avoid, avoid)):
            for source, target in pairs:
                index[INDEX_WORD.findall(source)[0].casefold()].append((source, target))

    def add_terms(self, line: Line) -> Line:
        """Return the line with the terms of the glossary that apply to it, in addition to its other constraints."""
        words = dict.fromkeys(match[0].casefold() for match in INDEX_WORD.finditer(line.text))
        required, avoid = (
            [pair for word in words for pair in index.get(word, ()) if source_contains(pair[0], line.text)]
            for index in (self.required, self.avoid)
        )
        return replace(line, terms=(*line.terms, *required), avoid=(*line.avoid, *self.never, *avoid))


def read_glossary(path: Path) -> Glossary:
    """Read a glossary file; the docstring of this module describes the format."""
    required, avoid, never = [], [], []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        source, *targets = (part.strip() for part in line.split("\t"))
        target = targets[0] if targets else ""
        is_pair = len(targets) == 1 and source and target != "!" and not (source[0] == "!" and target)
        if not targets and source[0] == "!" and len(source) > 1:
            never.append(source[1:].strip())
        elif not is_pair:
            raise UserError(
                f"{path}, line {number}: should be 'source<tab>target', 'source<tab>!target' or '!target', got {line!r}"
            )
        elif target.startswith("!"):
            avoid.append((source, target[1:].strip()))
        elif target:
            required.append((source, target))
        else:
            avoid.append((source, source))
        check_terms([target or source], f"{path}, line {number}")
    return Glossary(required, avoid, check_terms(never, str(path)))


def read_dictionary(path: Path) -> dict[str, str]:
    """Read a file with a word, a tab and a translation per line; return the first translation of each word.

    With search.unknown=dictionary, the translation of a source word replaces the <unk> aligned to it in the output.
    """
    translations: dict[str, str] = {}
    for number, line in enumerate(read_lines(path), 1):
        word, _, translation = (part.strip() for part in line.partition("\t"))
        if line.strip() and not (word and translation):
            raise UserError(f"{path}, line {number}: should be 'word<tab>translation', got {line!r}")
        if word:
            translations.setdefault(word, translation)
    return translations


def make_constraints(
    line: Line, text: str, tokens: int, tokenizers: Tokenizers, search: SearchSettings, *, is_first_segment: bool
) -> DecodingConstraints:
    """Return the constraints on the translation of a segment of a line, with its `text` and number of `tokens`.

    The forced prefix and required terms without a source term apply only to the first segment of the line.
    """
    pairs = [(match.source, match.target) for match in match_terms(line.terms, text)]
    unconditional = [term for term in line.terms if isinstance(term, str)]
    required = select_terms([*unconditional, *pairs], text, unconditional=is_first_segment)
    avoid = select_terms(line.avoid, text, unconditional=True)
    return DecodingConstraints(
        prefix=tuple(tokenizers.target.encode(line.prefix.rstrip()))
        if is_first_segment and line.prefix.strip()
        else (),
        required=tuple(get_term_compiler(tokenizers.target).get(term) for term in required),
        avoid=tuple(get_term_compiler(tokenizers.target).get(term, all_caps=True) for term in avoid),
        min_tokens=math.ceil(search.min_ratio * tokens),
        seed_text=text,  # sampling derives its random numbers from it
    )


def list_unmet_constraints(line: Line, constraints: DecodingConstraints, text: str) -> list[str]:
    """Return a warning for each constraint that the text does not meet."""
    required, avoid = ([term.text for term in terms] for terms in (constraints.required, constraints.avoid))
    missing = [term for term in required if not output_contains(term, text)]
    unwanted = [term for term in avoid if output_contains(term, text, all_caps=True)]
    warnings = [f"without a term that was asked for: {term!r}" for term in missing]
    warnings += [f"with a term to be avoided: {term!r}" for term in unwanted]
    if constraints.prefix and not text.startswith(line.prefix.rstrip()):
        warnings.append(f"not beginning as it was asked to: {line.prefix!r}")
    return warnings
