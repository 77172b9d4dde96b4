"""N-gram language models of any order with modified Kneser-Ney smoothing (Chen and Goodman 1998), trained here.

    model = train_ngrams(lines, order=5)
    write_arpa(model, path)

An n-gram is the number of its prefix among the (n-1)-grams, and its last word: so all n-grams of a text are one column
of integers per order, and counting is sorting. The interpolated probabilities are written in ARPA's form, which stores
a probability for each n-gram and a weight for backing off from it; `KenLM` reads that form and answers queries.

Counts above the first order's are *continuation counts* at all orders but the highest: how many different words stand
before an n-gram, not how often it occurs. N-grams that begin with <s> have no word before them and keep their counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.errors import UserError
from dragoman.smt.compiled import Array

UNKNOWN, BEGIN, END = 0, 1, 2  # ids of the words below
SPECIAL = ("<unk>", "<s>", "</s>")
NO_DISCOUNT = (0.5, 1.0, 1.5)  # where a text is too small or too regular to estimate discounts from


@dataclass(frozen=True)
class Order:
    """All n-grams of one length, sorted by (prefix, word). Logarithms are to base 10, as in ARPA files."""

    prefix: Array  # index of the first n-1 words among the n-grams one shorter
    word: Array
    log_prob: Array
    backoff: Array


@dataclass(frozen=True)
class NgramModel:
    """A language model: its words by id, and its n-grams by order."""

    words: list[str]
    orders: list[Order]


def train_ngrams(lines: Iterable[str], order: int = 5, *, prune: Sequence[int] = ()) -> NgramModel:
    """Estimate a model from tokenised lines. `prune` has the highest count to drop, by order; the last goes on.

    N-grams of the first order are never dropped. Discounts come from the counts before pruning; what is dropped adds to
    the weight of backing off, so that probabilities still sum to one.
    """
    words = {word: index for index, word in enumerate(SPECIAL)}
    ids = [index for line in lines for index in (BEGIN, *_encode(line, words), END)]
    if len(ids) == 0:
        raise UserError("a language model needs at least one line of text")
    text = np.array(ids, np.int64)
    position = np.arange(len(text)) - np.maximum.accumulate(np.where(text == BEGIN, np.arange(len(text)), 0))
    raw = _count_orders(text, position, len(words), order)
    thresholds = [0, *list(prune)[1:]] if prune else [0]
    thresholds += thresholds[-1:] * (order - len(thresholds))
    counts = [grams.count if n == order else _continuation_counts(grams, raw[n]) for n, grams in enumerate(raw, 1)]
    counts[0][BEGIN] = 0  # it is never predicted
    keep = [count > threshold for count, threshold in zip(counts, thresholds, strict=True)]
    keep[0][:] = True
    for n in range(order - 1, 0, -1):
        keep[n - 1][raw[n].prefix[keep[n]]] = True  # no n-gram without its first words
    orders: list[Order] = []
    index = np.zeros(1, np.int64)  # of the n-grams one shorter, among those that are kept
    lower = np.full(1, 1.0 / (len(words) - 1))  # uniform over all words but <s>
    for n, grams in enumerate(raw, 1):
        # What is left of the counts after discounts, by context; what is taken away weights the shorter n-grams.
        discounts = estimate_discounts(counts[n - 1])[np.minimum(counts[n - 1], 3)]
        reduced = np.where(keep[n - 1], counts[n - 1] - discounts, 0.0)
        contexts = int(grams.prefix.max(initial=0)) + 1
        total = np.maximum(np.bincount(grams.prefix, counts[n - 1], contexts), 1e-300)
        mass = 1.0 - np.bincount(grams.prefix, reduced, contexts) / total
        probability = reduced / total[grams.prefix] + mass[grams.prefix] * lower[grams.suffix]
        if n == 1:
            probability[BEGIN] = 1e-99
        else:
            used = np.unique(grams.prefix[keep[n - 1]])
            orders[-1].backoff[index[used]] = np.log10(np.maximum(mass[used], 1e-99))
        kept = np.flatnonzero(keep[n - 1])
        parents = index[grams.prefix[kept]]
        orders.append(Order(parents, grams.word[kept], np.log10(probability[kept]), np.zeros(len(kept))))
        index = np.cumsum(keep[n - 1]) - 1
        lower = probability
    return NgramModel(list(words), orders)


def _encode(line: str, words: dict[str, int]) -> Iterator[int]:
    for token in line.split():
        if token in SPECIAL:
            token = SPECIAL[UNKNOWN]
        yield words.setdefault(token, len(words))


@dataclass(frozen=True)
class RawOrder:
    """The distinct n-grams of a text before smoothing. `suffix` is the index of all words but the first."""

    prefix: Array
    word: Array
    suffix: Array
    count: Array


def _count_orders(text: Array, position: Array, vocabulary: int, order: int) -> list[RawOrder]:
    """Return the n-grams of every order; none reaches across the start of a line."""
    unigrams = RawOrder(
        np.zeros(vocabulary, np.int64), np.arange(vocabulary), np.zeros(vocabulary, np.int64),
        np.bincount(text, minlength=vocabulary),
    )  # fmt: skip
    result, ending = [unigrams], text  # ending[t]: index of the n-gram that ends at t
    for n in range(2, order + 1):
        place = np.flatnonzero(position >= n - 1)
        keys, where, count = np.unique(
            ending[place - 1] * vocabulary + text[place], return_inverse=True, return_counts=True
        )
        first = np.zeros(len(keys), np.int64)
        first[where] = place  # any occurrence of each
        result.append(RawOrder(keys // vocabulary, keys % vocabulary, ending[first], count))
        following = np.full(len(text), -1, np.int64)
        following[place] = where
        ending = following
    return result


def _continuation_counts(grams: RawOrder, longer: RawOrder) -> Array:
    """Return how many different words stand before each n-gram; those that begin with <s> keep their counts."""
    counts = np.bincount(longer.suffix, minlength=len(grams.count))
    # An n-gram that never ends a longer one begins with <s>: nothing else stands at the start of a line.
    alone = counts == 0
    counts[alone] = grams.count[alone]
    return counts


def estimate_discounts(counts: Array) -> Array:
    """Return what is taken from counts of 0, 1, 2 and 3 or more, by the counts of counts."""
    n1, n2, n3, n4 = (int((counts == value).sum()) for value in (1, 2, 3, 4))
    if not (n1 and n2 and n3):
        return np.array([0.0, *NO_DISCOUNT])
    base = n1 / (n1 + 2 * n2)
    found = [1 - 2 * base * n2 / n1, 2 - 3 * base * n3 / n2, 3 - 4 * base * n4 / n3]
    good = [value if 0 < value < number else usual for number, value, usual in zip((1, 2, 3), found, NO_DISCOUNT)]
    return np.array([0.0, *good])


def write_arpa(model: NgramModel, lines: Any) -> None:
    """Write the model in ARPA's form to a text file that is open."""
    lines.write("\\data\\\n")
    for n, order in enumerate(model.orders, 1):
        lines.write(f"ngram {n}={len(order.word)}\n")
    texts: list[str] = [""]
    for n, order in enumerate(model.orders, 1):
        lines.write(f"\n\\{n}-grams:\n")
        words = (model.words[word] for word in order.word.tolist())
        texts = [f"{texts[prefix]} {word}" for prefix, word in zip(order.prefix.tolist(), words, strict=True)]
        last = n == len(model.orders)
        for text, log_prob, backoff in zip(texts, order.log_prob.tolist(), order.backoff.tolist(), strict=True):
            lines.write(f"{log_prob:.7g}\t{text[1:]}" + ("\n" if last else f"\t{backoff:.7g}\n"))
    lines.write("\n\\end\\\n")


def read_arpa(path: Path) -> NgramModel:
    """Read a model from a file in ARPA's form; a file that was cut short is refused."""
    words: dict[str, int] = {}
    orders: list[Order] = []
    index = {"": 0}  # of the n-grams one shorter, by their text
    sizes: list[int] = []
    with path.open(encoding="utf-8") as lines:
        rows: list[tuple[int, int, float, float]] = []
        fresh: dict[str, int] = {}
        n, ended = 0, False
        for number, line in enumerate(lines, 1):
            line = line.rstrip("\n")
            if line.startswith("ngram "):
                sizes.append(int(line.split("=")[1]))
            elif line.startswith("\\"):
                if n:
                    orders.append(_as_order(rows))
                    index, rows, fresh = fresh, [], {}
                n, ended = n + 1, line == "\\end\\"
                if line == "\\data\\":
                    n = 0
            elif line and n:
                try:
                    log_prob, text, *backoff = line.split("\t")
                    prefix, _, word = text.rpartition(" ")
                    if n == 1:
                        words.setdefault(word, len(words))
                    rows.append((index[prefix], words[word], float(log_prob), float(backoff[0]) if backoff else 0.0))
                except (KeyError, ValueError) as error:
                    raise UserError(f"{path}, line {number}: not an n-gram of this model: {line!r}") from error
                fresh[text] = len(fresh)
    if not ended or sizes != [len(order.word) for order in orders]:
        raise UserError(f"{path} is no complete ARPA file; it may have been cut short")
    return NgramModel(list(words), orders)


def _as_order(rows: list[tuple[int, int, float, float]]) -> Order:
    prefix, word, log_prob, backoff = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Order(np.array(prefix, np.int64), np.array(word, np.int64), np.array(log_prob), np.array(backoff))
