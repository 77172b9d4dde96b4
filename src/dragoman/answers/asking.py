"""What is asked of answers, from the words of users to what search understands, and whether the answers have it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dragoman.answers.glossary import said, speller, wanted
from dragoman.answers.hypotheses import UNKNOWN
from dragoman.config import SearchSettings, build, override, pick
from dragoman.search.constrained import needed
from dragoman.search.methods import check
from dragoman.search.request import Wish
from dragoman.text.tokenizer import Tokenizers
from dragoman.types import Line, UserError


def settings_for(
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
    check(settings)
    pick(UNKNOWN, settings.unknown, "search.unknown")
    return settings.model_copy(update={"beam": 1, "stop": "enough"}) if settings.method == "greedy" else settings


def as_line(line: str | Line, tag: str) -> Line:
    """Return a line with its own tag, or else with this one."""
    if isinstance(line, str):
        return Line(line, tag=tag)
    return line if line.tag or not tag else replace(line, tag=tag)


def search_changes(overrides: Sequence[str], begun: Mapping[str, Any]) -> dict[str, Any]:
    """`search.a=b` laid over what was begun; what else a run was trained with cannot be changed any more."""
    values: dict[str, Any] = {"search": dict(begun)}
    for item in overrides:
        if not item.startswith("search."):
            raise UserError(f"{item!r} cannot be changed here; only settings of search can, such as search.beam=8")
        override(values, item)
    changes: dict[str, Any] = values["search"]
    return changes


def to_find(settings: SearchSettings) -> SearchSettings:
    """The same for the search itself, which must find more answers where some will have the same text, or be ranked
    anew."""
    more = settings.method == "beam" and (settings.nbest > 1 or settings.coverage > 0)
    return settings.model_copy(update={"nbest": settings.beam}) if more else settings


def wish_of(line: Line, text: str, tokens: int, tokenizers: Tokenizers, search: SearchSettings, *, first: bool) -> Wish:
    """What is asked of the answer to a part of a line, of so many tokens, or to all of it. How the answer begins, and
    terms without a place of their own, are asked of the first part."""
    if not (line.terms or line.avoid or line.begin or search.min_ratio):
        return Wish(text=text)
    terms, avoid = wanted(line.terms, text, first=first), wanted(line.avoid, text, first=True)
    spell = speller(tokenizers.target).term if terms or avoid else None
    return Wish(
        prefix=tuple(tokenizers.target.encode(line.begin.rstrip())) if first and line.begin.strip() else (),
        must=tuple(spell(term) for term in terms) if spell else (),
        avoid=tuple(spell(term, loud=True) for term in avoid) if spell else (),
        minimum=math.ceil(search.min_ratio * tokens),
        text=text,
    )


def limit_of(wish: Wish, tokens: int, search: SearchSettings, places: int) -> int:
    """The most tokens that an answer may have, its end mark counted: what was asked for needs room of its own."""
    usual = int(search.max_ratio * tokens) + search.max_extra + 1
    return min(max(usual, wish.minimum + 1) + len(wish.prefix) + needed(wish), places)


def unmet(line: Line, wish: Wish, text: str) -> list[str]:
    """What an answer does not have, by its text, as warnings."""
    found = [f"without a term that was asked for: {term.text!r}" for term in wish.must if not said(term.text, text)]
    found += [f"with a term to be avoided: {term.text!r}" for term in wish.avoid if said(term.text, text, loud=True)]
    if wish.prefix and not text.startswith(line.begin.rstrip()):
        found.append(f"not beginning as it was asked to: {line.begin!r}")
    return found
