"""N-gram language models of any order with modified Kneser-Ney smoothing (Chen and Goodman 1998), trained here.

    model = train_ngrams(lines, order=5)
    write_arpa(model, file)

An n-gram is stored as two integers, the index of its prefix among the (n-1)-grams and its last word, so n-grams are
counted by sorting integers. The interpolated probabilities are written in the ARPA format, which has a log-probability
and a back-off weight for each n-gram, and which KenLM can read.

At all orders but the highest, counts are *continuation counts*: how many different words stand before an n-gram, not
how often it occurs. N-grams that begin with <s> have no word before them and keep their counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np

from dragoman.errors import UserError
from dragoman.smt import arpa_kernels as kernels
from dragoman.smt.arpa_kernels import Lexicon, NgramTable
from dragoman.smt.compiled import Array

UNKNOWN, BEGIN, END = 0, 1, 2  # ids of the words below
SPECIAL_WORDS = ("<unk>", "<s>", "</s>")
MISSING_UNKNOWN = -100.0  # log10 p(<unk>) where a file has none, as in KenLM
DEFAULT_DISCOUNTS = (0.5, 1.0, 1.5)  # of counts 1, 2 and 3 or more, where a text is too small to estimate them
MIN_PROBABILITY = 1e-99  # ARPA files have the logarithm -99 for zero


@dataclass(frozen=True)
class Order:
    """All n-grams of one length, the unigrams in the order of word ids. Logarithms are to base 10, as in ARPA files."""

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
    """Estimate a model from tokenised lines. `prune` has the highest count to drop per order.

    Its last value applies to all higher orders. Unigrams are never dropped. Discounts come from the counts before
    pruning; what is dropped adds to the weight of backing off, so that probabilities still sum to one.
    """
    words = {word: index for index, word in enumerate(SPECIAL_WORDS)}
    ids = [index for line in lines for index in (BEGIN, *_encode(line, words), END)]
    if len(ids) == 0:
        raise UserError("a language model needs at least one line of text")
    text = np.array(ids, np.int64)
    # The position of every word in its line: the distance from the last <s>.
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
    index = np.zeros(1, np.int64)  # of each (n-1)-gram, among those that are kept
    lower = np.full(1, 1.0 / (len(words) - 1))  # p of each (n-1)-gram; at first uniform over all words but <s>
    for n, grams in enumerate(raw, 1):
        # `mass` is the probability that discounts free in each context; it goes to the shorter n-grams.
        discounts = estimate_discounts(counts[n - 1])[np.minimum(counts[n - 1], 3)]
        reduced = np.where(keep[n - 1], counts[n - 1] - discounts, 0.0)
        contexts = int(grams.prefix.max(initial=0)) + 1
        total = np.maximum(np.bincount(grams.prefix, counts[n - 1], contexts), 1e-300)
        mass = 1.0 - np.bincount(grams.prefix, reduced, contexts) / total
        probability = reduced / total[grams.prefix] + mass[grams.prefix] * lower[grams.suffix]
        if n == 1:
            probability[BEGIN] = MIN_PROBABILITY
        else:
            used = np.unique(grams.prefix[keep[n - 1]])
            orders[-1].backoff[index[used]] = np.log10(np.maximum(mass[used], MIN_PROBABILITY))
        kept = np.flatnonzero(keep[n - 1])
        parents = index[grams.prefix[kept]]
        orders.append(Order(parents, grams.word[kept], np.log10(probability[kept]), np.zeros(len(kept))))
        index = np.cumsum(keep[n - 1]) - 1
        lower = probability
    return NgramModel(list(words), orders)


def _encode(line: str, words: dict[str, int]) -> Iterator[int]:
    for token in line.split():
        if token in SPECIAL_WORDS:
            token = SPECIAL_WORDS[UNKNOWN]
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
        ends = np.flatnonzero(position >= n - 1)
        keys, where, count = np.unique(
            ending[ends - 1] * vocabulary + text[ends], return_inverse=True, return_counts=True
        )
        first = np.zeros(len(keys), np.int64)
        first[where] = ends  # any occurrence
        result.append(RawOrder(keys // vocabulary, keys % vocabulary, ending[first], count))
        following = np.full(len(text), -1, np.int64)
        following[ends] = where
        ending = following
    return result


def _continuation_counts(grams: RawOrder, longer: RawOrder) -> Array:
    """Return how many different words stand before each n-gram; those that begin with <s> keep their counts."""
    counts = np.bincount(longer.suffix, minlength=len(grams.count))
    # An n-gram that never ends a longer one begins with <s>: nothing else stands at the start of a line.
    begins_line = counts == 0
    counts[begins_line] = grams.count[begins_line]
    return counts


def estimate_discounts(counts: Array) -> Array:
    """Return the discounts of counts 0, 1, 2 and 3 or more, by the formulas of Chen and Goodman."""
    n1, n2, n3, n4 = (int((counts == value).sum()) for value in (1, 2, 3, 4))
    if not (n1 and n2 and n3):
        return np.array([0.0, *DEFAULT_DISCOUNTS])
    base = n1 / (n1 + 2 * n2)
    found = [1 - 2 * base * n2 / n1, 2 - 3 * base * n3 / n2, 3 - 4 * base * n4 / n3]
    valid = [d if 0 < d < count else default for count, d, default in zip((1, 2, 3), found, DEFAULT_DISCOUNTS)]
    return np.array([0.0, *valid])


def write_arpa(model: NgramModel, file: IO[str]) -> None:
    file.write("\\data\\\n")
    for n, order in enumerate(model.orders, 1):
        file.write(f"ngram {n}={len(order.word)}\n")
    texts: list[str] = [""]
    for n, order in enumerate(model.orders, 1):
        file.write(f"\n\\{n}-grams:\n")
        words = (model.words[word] for word in order.word.tolist())
        texts = [f"{texts[prefix]} {word}" for prefix, word in zip(order.prefix.tolist(), words, strict=True)]
        last = n == len(model.orders)
        for text, log_prob, backoff in zip(texts, order.log_prob.tolist(), order.backoff.tolist(), strict=True):
            file.write(f"{log_prob:.7g}\t{text[1:]}" + ("\n" if last else f"\t{backoff:.7g}\n"))
    file.write("\n\\end\\\n")


def read_arpa(path: Path) -> NgramModel:
    """Read a model from an ARPA file, written by this or another tool; a damaged file is refused.

    Words may be separated by tabs or spaces. Back-off weights may be missing; they are then 0 (a factor of 1). If <unk>
    is missing, it gets the same probability as in KenLM.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror}") from error
    # A line with the special words is added before the file's bytes, so that they get the first ids. Because of it, the
    # number of newlines before a position is its line number in the file.
    text = " ".join(SPECIAL_WORDS).encode() + b"\n" + content
    data = np.frombuffer(text, np.uint8)
    sizes, at = _read_sizes(text, path)
    lexicon, table = _make_tables(text, sizes)
    words, used, firsts = len(SPECIAL_WORDS), 0, [1]  # numbers of words and nodes, and the first node of every order
    for order, size in enumerate(sizes, 1):
        at = _expect_line(text, at, f"\\{order}-grams:", path)
        at, found, words, used, error_code = kernels.scan_ngrams(data, at, order, lexicon, words, table, used)
        if error_code:
            raise _ngram_error(text, at, order, error_code, path)
        if found != size:
            raise _incomplete(path, f"it has {found:,} {order}-grams up to line {_line_number(text, at)}, not {size:,}")
        used = 1 + words if order == 1 else used
        firsts.append(used)
    _expect_line(text, at, "\\end\\", path)
    for word in (BEGIN, END):
        if np.isnan(table.log_prob[1 + word]):
            raise UserError(f"{str(path)!r} has no 1-gram {SPECIAL_WORDS[word]}, which every language model needs")
    if np.isnan(table.log_prob[1 + UNKNOWN]):
        table.log_prob[1 + UNKNOWN] = MISSING_UNKNOWN
    return NgramModel(_decode_words(text, lexicon, words, path), _split_orders(table, firsts))


def _read_sizes(text: bytes, path: Path) -> tuple[list[int], int]:
    """Return the number of n-grams of every order, from the head of the file, and the position after it."""
    head = re.compile(rb"^\\data\\[ \t\r]*$", re.MULTILINE).search(text)
    if head is None:
        raise UserError(f"{str(path)!r} is no ARPA file: it has no line \\data\\")
    sizes: list[int] = []
    at = head.end()
    entry = re.compile(rb"\s*ngram[ \t]+(\d+)[ \t]*=[ \t]*(\d+)[ \t\r]*(?=\n)")
    while found := entry.match(text, at):
        order, size = int(found[1]), int(found[2])
        if order != len(sizes) + 1 or size * (2 + 2 * order) > len(text):  # minimum bytes of a line
            raise _incomplete(path, f"line {_line_number(text, found.end())} says that it has {size:,} {order}-grams")
        sizes.append(size)
        at = found.end()
    if not sizes:
        raise _incomplete(path, "it does not say how many n-grams it has")
    return sizes, at


def _make_tables(text: bytes, sizes: list[int]) -> tuple[Lexicon, NgramTable]:
    """Return empty tables for `sizes` n-grams by order, with the special words in the lexicon."""
    words, nodes = sizes[0] + len(SPECIAL_WORDS), 1 + len(SPECIAL_WORDS) + sum(sizes)
    lexicon = Lexicon(np.zeros(words, np.int64), np.zeros(words, np.int64), np.full(2 * words, -1, np.int32))
    at = 0
    for index, word in enumerate(SPECIAL_WORDS):
        kernels.add_word(np.frombuffer(text, np.uint8), at, at + len(word), lexicon, index)
        at += len(word) + 1
    table = NgramTable(
        np.zeros(nodes, np.int32), np.zeros(nodes, np.int32), np.full(nodes, np.nan), np.zeros(nodes),
        np.full(2 * nodes, -1, np.int32),
    )  # fmt: skip
    table.word[1 : 1 + words] = np.arange(words)
    return lexicon, table


def _split_orders(table: NgramTable, firsts: list[int]) -> list[Order]:
    """Return the n-grams of every order; `firsts` are the first nodes of each, and the number of nodes."""
    orders = []
    for n, (first, end) in enumerate(pairwise(firsts)):
        prefix = table.parent[first:end].astype(np.int64) - (firsts[n - 1] if n else 0)
        word = table.word[first:end].astype(np.int64)
        orders.append(Order(prefix, word, table.log_prob[first:end].copy(), table.backoff[first:end].copy()))
    return orders


def _decode_words(text: bytes, lexicon: Lexicon, words: int, path: Path) -> list[str]:
    spans = zip(lexicon.starts[:words].tolist(), lexicon.ends[:words].tolist(), strict=True)
    result = []
    for start, end in spans:
        try:
            result.append(text[start:end].decode())
        except UnicodeDecodeError as error:
            raise UserError(f"{str(path)!r}, line {_line_number(text, start)}: this is not UTF-8") from error
    return result


def _expect_line(text: bytes, at: int, expected: str, path: Path) -> int:
    """Return the position after the next line that is not empty, which must be this one."""
    found = re.compile(rb"\s*([^\n]*)").match(text, at)
    assert found is not None
    line = found[1].decode(errors="replace").rstrip()
    if line != expected:
        number = _line_number(text, found.start(1))
        raise _incomplete(path, f"line {number} should be {expected}" + (f", not {line[:80]!r}" if line else ""))
    return min(found.end() + 1, len(text))


def _ngram_error(text: bytes, at: int, order: int, error_code: int, path: Path) -> UserError:
    line = text[at:].split(b"\n", 1)[0].decode(errors="replace").rstrip()[:80]
    reason = {
        kernels.MALFORMED: f"is no {order}-gram: a logarithm, {order} words and perhaps a weight for backing off",
        kernels.UNKNOWN_WORD: "has a word that is no 1-gram of this model",
        kernels.NO_PREFIX: f"has a context that is no {order - 1}-gram of this model",
        kernels.REPEATED: "is there twice",
    }[error_code]
    return UserError(f"{str(path)!r}, line {_line_number(text, at)}: {line!r} {reason}; the file may be damaged")


def _incomplete(path: Path, reason: str) -> UserError:
    return UserError(f"{str(path)!r} is no complete ARPA file; it may have been cut short: {reason}")


def _line_number(text: bytes, at: int) -> int:
    """Return the number of the line that a position is on; the first line of the text is not part of the file."""
    return text.count(b"\n", 0, at)
