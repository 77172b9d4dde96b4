"""Context: the sentences before a sentence in its document, which the model reads before the sentence itself.

    [tag] previous sentence <next sentence> previous sentence <next sentence> sentence

Only the last sentence is translated (Tiedemann and Scherrer, 2017). The separator is an id of its own after the ids of
the source vocabulary, like a tag, so no text is tokenized into it. An empty line starts a new document, and so does
another document id, if the corpus has such ids. If a source would be too long, its oldest context sentences are left
out first, and the sentence itself is never truncated.

Workers of `sampling_workers.py` import this module, so it may import neither numpy nor torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from dragoman.data.tokenizers import Tokenizers
from dragoman.types import Line, Pair

CONTEXT_SEPARATOR = "next sentence"  # among the tags; a recipe cannot have this tag, since tags contain no spaces
STORED_SEPARATOR = b"\xff"  # between the sentences of a stored text: a byte that UTF-8 does not use


class ContextWindow:
    """The last `count` sentences of a document, while its sentences are read in order."""

    def __init__(self, count: int) -> None:
        self.sentences: deque[str] = deque(maxlen=count)
        self.document = ""

    def advance(self, sentence: str, document: str = "") -> tuple[str, ...]:
        """Return the context of the next sentence, oldest first, and add the sentence to the window.

        An empty sentence, or another document id than before, starts a new document.
        """
        if document != self.document or not sentence.strip():
            self.sentences.clear()
        self.document = document
        context = tuple(self.sentences)
        if sentence.strip():
            self.sentences.append(sentence)
        return context


def attach_to_pairs(pairs: Iterable[Pair], count: int) -> Iterator[Pair]:
    """Yield the pairs of a corpus, each with up to `count` previous sources of its document."""
    window = ContextWindow(count)
    return (replace(pair, context=window.advance(pair.source, pair.document)) for pair in pairs)


def attach_to_lines(lines: Sequence[str | Line], count: int) -> list[str | Line]:
    """Return the lines, each with up to `count` lines before it as its context, unless it has one already."""
    if not count:
        return list(lines)
    window, attached = ContextWindow(count), list[str | Line]()
    for item in lines:
        line = Line(item) if isinstance(item, str) else item
        context = window.advance(line.text)
        attached.append(replace(line, context=context) if line.context is None else line)
    return attached


def encode_contexts(
    tokenizers: Tokenizers, contexts: Sequence[Sequence[str]], max_tokens: Sequence[int]
) -> list[list[int]]:
    """Return the ids that precede each sentence, given its context and the maximum number of these ids."""
    texts = list(dict.fromkeys(chain.from_iterable(contexts)))  # neighbours share most of their context
    if not texts:
        return [[] for _ in contexts]
    ids = dict(zip(texts, tokenizers.source.encode_all(texts), strict=True))
    separator = find_separator(tokenizers)
    return [
        join_context([ids[text] for text in context], separator, limit)
        for context, limit in zip(contexts, max_tokens, strict=True)
    ]


def join_context(sentences: Sequence[list[int]], separator: int, max_tokens: int) -> list[int]:
    """Return as many of the last sentences as fit into `max_tokens`, each followed by the separator."""
    joined: list[int] = []
    for ids in reversed(sentences):
        if len(ids) + 1 + len(joined) > max_tokens:
            break
        joined = [*ids, separator, *joined]
    return joined


def find_separator(tokenizers: Tokenizers) -> int:
    """Return the id of the separator."""
    return tokenizers.source.size + tokenizers.tags.index(CONTEXT_SEPARATOR)


def extract_sentence(tokenizers: Tokenizers, ids: Sequence[int]) -> Sequence[int]:
    """Return the ids of the sentence itself: those after the tag and the last separator, which are not of text."""
    starts = [index + 1 for index, token in enumerate(ids) if token >= tokenizers.source.size]
    return ids[starts[-1] :] if starts else ids
