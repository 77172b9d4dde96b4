"""Replacement of words of a translation by the terms of a glossary.

A search in which the target term of a pair is required adds the term to the word that the model prefers ("Der Mann
schläft. Kerl."). So a line is translated without its pairs, and then the words that are aligned to a source term give
way to the target term. All other words stay as they are, also an article that does not agree with the term.

Shapes   T words of the translation   S words of the source
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, takewhile

import numpy as np

from dragoman.data.tokenizers import Tokenizer
from dragoman.inference.constraints import TermMatch, compile_term, list_case_variants
from dragoman.inference.word_alignment import AlignedText, WordSpan, align_words
from dragoman.types import Hypothesis


def replace_terms(hypothesis: Hypothesis, source: str, matches: Sequence[TermMatch], target: Tokenizer) -> Hypothesis:
    """Return the hypothesis with each target term in place of the words that are aligned to its source term.

    Nothing is replaced if the hypothesis has no alignment, or if no word is aligned best to the source term.
    """
    if not hypothesis.alignment:
        return hypothesis
    aligned = align_words(source, hypothesis)
    edits: list[tuple[WordSpan, str]] = []
    for match in matches:
        span = find_translated_words(source, aligned, match)
        patterns = map(compile_term, list_case_variants(match.target))
        written = [found.span() for pattern in patterns for found in pattern.finditer(aligned.text)]
        if span and not any(start < span[1] and span[0] < end for start, end in written):
            edits.append((span, match.target))
    for span, term in sorted(edits, reverse=True):  # the last one first, so that the other spans remain valid
        hypothesis = replace_span(hypothesis, span, term, target)
    return hypothesis


def find_translated_words(source: str, aligned: AlignedText, match: TermMatch) -> WordSpan | None:
    """Return the words that stand for a source term: a run of words that are aligned best to it.

    A word to which another source word gives more weight than to any other word may well be its translation ("nicht",
    in "nicht besuchen" for "visit"), so it is not among them.
    """
    assert aligned.weight_TS is not None
    weight_TS, words, source_words = aligned.weight_TS, aligned.words, aligned.source_words
    for start, end in source_words:
        if (start < match.start < end or start < match.end < end) and "-" in source[start:end]:
            return None  # the translation of a compound would be lost
    in_term_S = np.array([start < match.end and match.start < end for start, end in source_words], dtype=bool)
    weight_T = weight_TS[:, in_term_S].sum(-1).tolist()
    is_text = [any(map(str.isalnum, aligned.text[start:end])) for start, end in words]
    chosen = [t for t, row_S in enumerate(weight_TS) if is_text[t] and weight_T[t] > 0 and in_term_S[row_S.argmax()]]
    if not chosen:
        return None
    claimed = set(weight_TS[:, ~in_term_S].argmax(0).tolist())
    chosen = [t for t in chosen if t not in claimed] or [max(chosen, key=weight_T.__getitem__)]
    runs = [[t for _, t in run] for _, run in groupby(enumerate(chosen), key=lambda pair: pair[1] - pair[0])]
    best = max(runs, key=lambda run: sum(weight_T[t] for t in run))
    return words[best[0]][0], words[best[-1]][1]


def replace_span(hypothesis: Hypothesis, span: WordSpan, term: str, target: Tokenizer) -> Hypothesis:
    """Return the hypothesis with a term in place of the characters of a span.

    The tokens of the term have the mean attention of those that they replace.
    """
    before, after = hypothesis.text[: span[0]], hypothesis.text[span[1] :]
    if hypothesis.text[span[0]].isupper() and not any(map(str.isalnum, before)):
        term = term[0].upper() + term[1:]
    text, rows = before + term + after, hypothesis.alignment
    old, new = hypothesis.tokens, target.ids_to_tokens(target.encode(text))
    first = count_equal(old, new)
    last = count_equal(old[first:][::-1], new[first:][::-1])
    replaced = rows[first : len(old) - last] or rows[max(first - 1, 0) :][:1]  # none if "a" becomes "a a"
    mean = np.mean(replaced, axis=0).tolist()
    alignment = [*rows[:first], *[mean] * (len(new) - first - last), *rows[len(old) - last :]]
    return replace(hypothesis, text=text, tokens=new, alignment=alignment)


def count_equal(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the number of tokens with which both sequences begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second)))
