"""The compiled part of reading ARPA files: n-grams become nodes of a trie while their bytes are scanned.

Node 0 is the root, node 1 + w is the unigram of word w, and the nodes of longer n-grams follow in the file's order.
A hash table finds the node of (parent, word); another one finds the id of a word by its bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dragoman.smt.compiled import Array, compiled
from dragoman.smt.trie import ROOT

SPACE, TAB, NEWLINE, RETURN, BACKSLASH = (ord(letter) for letter in " \t\n\r\\")
PLUS, MINUS, POINT, ZERO = (ord(letter) for letter in "+-.0")
UPPER_UNKNOWN = np.frombuffer(b"<UNK>", np.uint8)  # as some tools write it
MAX_INTEGER_DIGITS = 18  # of a number that a 64-bit integer holds
FNV_OFFSET, FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3  # of the FNV-1a hash
# Why a line was refused; 0 if it was not.
MALFORMED, UNKNOWN_WORD, NO_PREFIX, REPEATED = range(1, 5)


class Lexicon(NamedTuple):
    """Words by id, as positions in the bytes of the file, and a hash table of them."""

    starts: Array
    ends: Array
    slots: Array  # hash table with linear probing: ids of words, or -1 for a free slot


class NgramTable(NamedTuple):
    """The n-grams of all orders as nodes, and a hash table of nodes."""

    parent: Array  # the node of all words but the last
    word: Array
    log_prob: Array  # NaN where there is no n-gram
    backoff: Array
    slots: Array


@compiled
def skip_spaces(data: Array, at: int) -> int:
    """Return the position of the next byte that is no space, tab or carriage return."""
    while at < len(data) and (data[at] == SPACE or data[at] == TAB or data[at] == RETURN):
        at += 1
    return at


@compiled
def skip_token(data: Array, at: int) -> int:
    while at < len(data) and not (data[at] == SPACE or data[at] == TAB or data[at] == RETURN or data[at] == NEWLINE):
        at += 1
    return at


@compiled
def parse_integer(data: Array, at: int, end: int) -> tuple[int, int, int]:
    """Return an integer without its sign, how many digits it has, and the position after it; digits beyond 18 are 0."""
    value: Any = 0
    digits = 0
    while at < end and ZERO <= data[at] <= ZERO + 9:
        if digits < MAX_INTEGER_DIGITS:
            value = 10 * value + int(data[at]) - ZERO
        digits, at = digits + 1, at + 1
    return value, digits, at


@compiled
def parse_number(data: Array, at: int, end: int) -> float:
    """Return the decimal number of these bytes, with or without an exponent, or NaN if they are none."""
    negative = at < end and data[at] == MINUS
    if at < end and (data[at] == MINUS or data[at] == PLUS):
        at += 1
    whole, whole_digits, at = parse_integer(data, at, end)
    value = np.float64(whole) * 10.0 ** max(whole_digits - MAX_INTEGER_DIGITS, 0)
    digits = 0
    if at < end and data[at] == POINT:
        fraction, digits, at = parse_integer(data, at + 1, end)
        value += fraction / 10.0 ** min(digits, MAX_INTEGER_DIGITS)
    if not whole_digits + digits:
        return np.nan
    if at < end and (data[at] == ord("e") or data[at] == ord("E")):
        negative_exponent = at + 1 < end and data[at + 1] == MINUS
        signed = at + 1 < end and (data[at + 1] == MINUS or data[at + 1] == PLUS)
        exponent, digits, at = parse_integer(data, at + 1 + signed, end)
        if not digits:
            return np.nan
        value = value / 10.0**exponent if negative_exponent else value * 10.0**exponent
    if at != end:
        return np.nan
    return -value if negative else value


@compiled
def same_bytes(one: Array, start: int, end: int, other: Array, other_start: int, other_end: int) -> bool:
    if end - start != other_end - other_start:
        return False
    for offset in range(end - start):  # noqa: SIM110 -- Numba compiles a loop, but no generator
        if one[start + offset] != other[other_start + offset]:
            return False
    return True


@compiled
def find_word_slot(data: Array, start: int, end: int, lexicon: Lexicon) -> Any:
    """Return the slot of a word in the hash table, or the free slot where it belongs."""
    key = np.uint64(FNV_OFFSET)
    for at in range(start, end):
        key = (key ^ np.uint64(data[at])) * np.uint64(FNV_PRIME)
    key ^= key >> np.uint64(29)
    slot: Any = np.int64(key % np.uint64(len(lexicon.slots)))
    while lexicon.slots[slot] >= 0:
        other = lexicon.slots[slot]
        if same_bytes(data, lexicon.starts[other], lexicon.ends[other], data, start, end):
            break
        slot = (slot + 1) % len(lexicon.slots)
    return slot


@compiled
def add_word(data: Array, start: int, end: int, lexicon: Lexicon, words: int) -> tuple[int, int]:
    """Return the id of a word, which is added if it is unknown, and the new number of words."""
    slot = find_word_slot(data, start, end, lexicon)
    if lexicon.slots[slot] < 0:
        lexicon.slots[slot], lexicon.starts[words], lexicon.ends[words] = words, start, end
        words += 1
    return lexicon.slots[slot], words


@compiled
def find_node_slot(table: NgramTable, parent: int, word: int) -> Any:
    """Return the slot of an n-gram in the hash table, or the free slot where it belongs."""
    key = np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(word) * np.uint64(0xBF58476D1CE4E5B9)
    key ^= key >> np.uint64(32)
    slot: Any = np.int64(key % np.uint64(len(table.slots)))
    while table.slots[slot] >= 0:
        node = table.slots[slot]
        if table.parent[node] == parent and table.word[node] == word:
            break
        slot = (slot + 1) % len(table.slots)
    return slot


@compiled
def find_context(data: Array, at: int, length: int, lexicon: Lexicon, table: NgramTable) -> tuple[int, int, int]:
    """Return the node of the first `length` words from a position on, the position after them, and an error code."""
    node, error = ROOT, 0
    for _ in range(length):
        at = skip_spaces(data, at)
        end = skip_token(data, at)
        if end == at:
            return -1, at, MALFORMED
        word = find_id(data, at, end, lexicon)
        if word < 0:
            return -1, at, UNKNOWN_WORD
        if error == 0:
            node = 1 + word if node == ROOT else table.slots[find_node_slot(table, node, word)]
            error = NO_PREFIX if node < 0 else 0
        at = end
    return node, at, error


@compiled
def find_id(data: Array, start: int, end: int, lexicon: Lexicon) -> Any:
    """Return the id of a word, or -1."""
    if same_bytes(data, start, end, UPPER_UNKNOWN, 0, len(UPPER_UNKNOWN)):
        return 0  # the id of <unk>
    return lexicon.slots[find_word_slot(data, start, end, lexicon)]


@compiled
def scan_ngrams(
    data: Array, at: int, order: int, lexicon: Lexicon, words: int, table: NgramTable, used: int
) -> tuple[int, int, int, int, int]:
    """Read n-grams of one order, a line each, up to an empty line, a line with a backslash or the end of the data.

    `used` is the number of nodes so far. Return the position after the n-grams, how many there are, the new numbers of
    words and of nodes, and the error code of the line at that position.
    """
    found = 0
    while True:
        start = at
        at = skip_spaces(data, at)
        if at == len(data) or data[at] == NEWLINE or data[at] == BACKSLASH:
            return start, found, words, used, 0
        end = skip_token(data, at)
        log_prob = parse_number(data, at, end)
        node, at, error = find_context(data, end, order - 1, lexicon, table)
        at = skip_spaces(data, at)
        end = skip_token(data, at)
        if end == at or np.isnan(log_prob):
            return start, found, words, used, MALFORMED
        if error:
            return start, found, words, used, error
        word = find_id(data, at, end, lexicon)
        if order == 1:
            if word < 0:
                word, words = add_word(data, at, end, lexicon, words)
            child = 1 + word
        elif word < 0:
            return start, found, words, used, UNKNOWN_WORD
        else:
            slot = find_node_slot(table, node, word)
            child = used if table.slots[slot] < 0 else table.slots[slot]
            table.slots[slot] = child
        if not np.isnan(table.log_prob[child]):
            return start, found, words, used, REPEATED
        at = skip_spaces(data, end)
        end = skip_token(data, at)
        backoff = parse_number(data, at, end) if end > at else 0.0
        at = skip_spaces(data, end)
        if np.isnan(backoff) or (at < len(data) and data[at] != NEWLINE):
            return start, found, words, used, MALFORMED
        table.parent[child], table.word[child] = node, word
        table.log_prob[child], table.backoff[child] = log_prob, backoff
        found, used, at = found + 1, used + (order > 1), min(at + 1, len(data))
