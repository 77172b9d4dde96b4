"""Truecasing: write the first word of a sentence in its usual case; recasing undoes it.

A sentence begins with a capital letter whatever its first word is. Truecasing writes that word as it is written most
often elsewhere, so that `The` and `the` are one word to the models; afterwards the first word of the output gets its
capital letter back.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

WORD = re.compile(r"\w")
SENTENCE_FINAL_TOKEN = re.compile(r"[.!?:]\W?$")  # the tokenizer may have added a mark that joins it to the next token


@dataclass(frozen=True)
class Truecaser:
    """The usual spelling of every word, and whether sentences begin with a capital letter."""

    forms: tuple[str, ...]
    capitals: bool

    @classmethod
    def train(cls, sentences: Iterable[Sequence[str]]) -> Truecaser:
        """Count how words are written; those at the beginning of a sentence count only where there are no others."""
        counts: Counter[tuple[str, bool]] = Counter()
        capitals = sentences_seen = 0
        for tokens in sentences:
            starts = set(find_sentence_starts(tokens))
            counts.update((token, index not in starts) for index, token in enumerate(tokens))
            sentences_seen += len(starts)
            capitals += sum(tokens[index][0].isupper() for index in starts)
        best: dict[str, tuple[bool, int, str]] = {}  # (seen inside a sentence, count, spelling) by lowercase word
        for (token, inside), count in counts.items():
            key = token.lower()
            best[key] = max(best.get(key, (False, 0, "")), (inside, count, token))
        return cls(tuple(sorted(token for _, _, token in best.values())), 2 * capitals > sentences_seen)

    @cached_property
    def form_of(self) -> dict[str, str]:
        return {form.lower(): form for form in self.forms}

    def truecase(self, tokens: Sequence[str]) -> list[str]:
        """Return the tokens with the usual spelling of those that begin a sentence; unknown words stay as they are."""
        result = list(tokens)
        for index in find_sentence_starts(tokens):
            result[index] = self.form_of.get(tokens[index].lower(), tokens[index])
        return result

    def recase(self, tokens: Sequence[str]) -> list[str]:
        """Return the tokens with capital letters at the beginning of sentences, if the training text has them."""
        result = list(tokens)
        for index in find_sentence_starts(tokens) if self.capitals else ():
            result[index] = tokens[index][0].upper() + tokens[index][1:]
        return result


def find_sentence_starts(tokens: Sequence[str]) -> Iterator[int]:
    """Yield the positions of the first word and of the first word after the end of a sentence."""
    waiting = True
    for index, token in enumerate(tokens):
        if WORD.search(token):
            if waiting:
                yield index
            waiting = False
        elif SENTENCE_FINAL_TOKEN.search(token):
            waiting = True
