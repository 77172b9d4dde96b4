"""The compiled loops of phrase-based decoding: language model queries and search with stacks.

A hypothesis covers some of the source words and has the target words that translate them. Stack k has hypotheses that
cover k words. Each is extended by every option (a source span with one translation of it) that fits, until the last
stack, whose hypotheses cover the whole sentence, has the translations.

Which source words are covered is stored as `gap`, the first uncovered position, and `mask`, whose bit b is set if the
position gap + b is covered. The score of the uncovered words is estimated from the best translation of every uncovered
span by itself (`future`). Two hypotheses with the same possible continuations and scores of these are recombined: only
the better one is extended, and the other is kept as an alternative for the n-best list.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from dragoman.smt.compiled import Array, compiled
from dragoman.smt.trie import ROOT

LM_SLACK = 2.0  # an option is not scored exactly if its estimate is below the stack's floor by more than this
LOWEST = -1e300  # below every finite score; a score of minus infinity means that a part cannot be translated
WIDEST = 64  # bits of a coverage mask: no word further than this after the first uncovered one is translated


class NgramTrie(NamedTuple):
    """An n-gram model as a trie (trie.py), in natural logarithms."""

    children: Array
    words: Array
    log_prob: Array
    backoff: Array
    suffix: Array  # node of the longest proper suffix that the model has, for backing off
    first_longest: int  # the first node of the highest order, whose n-grams are no contexts
    begin: int  # the node of <s>
    end_word: int


class Options(NamedTuple):
    """The options of a sentence: source spans with one translation each.

    Options of the span (start, size) are span_starts[start, size] up to span_starts[start, size + 1], the best first.
    """

    span_starts: Array
    word_starts: Array  # where the target words of each option start
    words: Array  # ids of the target words, which tell apart words that the language model does not know
    lm_words: Array  # their ids in the language model
    static: Array  # weighted score of the features that depend on the option alone
    estimate: Array  # the same plus the language model's score of the words by themselves
    reorder: Array  # weighted scores by orientation: three towards the phrase before, three towards the one after
    reordering_rows: Array  # row of `reordering` in the phrase table: options with the same row reorder alike
    features: Array  # options x 10: unweighted features of the phrase table, then the six orientations
    rows: Array  # rows in the phrase table; negative for a word that is copied


class SearchLimits(NamedTuple):
    """The limits of the search, and the weights of features that depend on neighbouring phrases."""

    max_phrase: int
    distortion_limit: int  # -1: none
    stack_size: int
    beam: float
    recombine_phrases: bool  # without reordering features, hypotheses that differ in the last phrase are recombined
    weight_lm: float
    weight_distortion: float


@compiled
def find_child(children: Array, words: Array, node: int, word: int) -> int:
    """Return the child of a trie's node by a word, or -1. Children stand side by side, sorted by word."""
    low, high = children[node], children[node + 1]
    while low < high:
        middle = (low + high) // 2
        if words[middle] < word:
            low = middle + 1
        else:
            high = middle
    return low if low < children[node + 1] and words[low] == word else -1


@compiled
def score_word(lm: NgramTrie, state: int, word: int) -> tuple[float, int]:
    """Return log p(word | state) and the state after it: the longest context that the model can still use."""
    total, node = 0.0, -1
    while state != ROOT:
        node = find_child(lm.children, lm.words, state, word)
        if node >= 0:
            break
        total += lm.backoff[state]
        state = lm.suffix[state]
    if node < 0:
        node = ROOT + 1 + word  # every word is a unigram, and unigrams are sorted by word
    total += lm.log_prob[node]
    while node >= lm.first_longest or (node != ROOT and lm.children[node] == lm.children[node + 1]):
        node = lm.suffix[node]
    return total, node


@compiled
def link_suffixes(children: Array, words: Array, parents: Array, suffix: Array) -> None:
    """Write for every node the node of its longest proper suffix in the trie (see NgramTrie)."""
    for node in range(1, len(words)):
        state = parents[node]
        found = ROOT
        while state != ROOT:
            state = suffix[state]
            child = find_child(children, words, state, words[node])
            if child >= 0:
                found = child
                break
        suffix[node] = found


@compiled
def score_phrases(lm: NgramTrie, starts: Array, target: Array) -> Array:
    """Return the log-probability of every phrase by itself, without the words before it."""
    out = np.zeros(len(starts) - 1)
    for phrase in range(len(out)):
        state = ROOT
        for position in range(starts[phrase], starts[phrase + 1]):
            logp, state = score_word(lm, state, target[position])
            out[phrase] += logp
    return out


@compiled
def find_spans(children: Array, words: Array, ids: Array, max_phrase: int) -> Array:
    """Return the trie's node of every span (start, size - 1), or -1."""
    out = np.full((len(ids), max_phrase), -1, np.int64)
    for start in range(len(ids)):
        node = ROOT
        for size in range(1, min(max_phrase, len(ids) - start) + 1):
            node = find_child(children, words, node, ids[start + size - 1])
            if node < 0:
                break
            out[start, size - 1] = node
    return out


@compiled
def match_required(options: Options, option: int, required: Array, position: int, ends: bool) -> int:
    """Return the position in the required words after an option's words, or -1 if they are not the next required.

    If the option `ends` the sentence, the required words must end as well. If none are required, return 0.
    """
    if not len(required):
        return 0
    first, last = options.word_starts[option], options.word_starts[option + 1]
    after: int = position + last - first
    if after > len(required) or (ends and after != len(required)):
        return -1
    for index in range(last - first):
        if options.words[first + index] != required[position + index]:
            return -1
    return after


@compiled
def occur_in(required: Array, word_starts: Array, words: Array) -> Array:
    """Return which phrases occur in the required words."""
    out = np.zeros(len(word_starts) - 1, np.bool_)
    for phrase in range(len(out)):
        size = word_starts[phrase + 1] - word_starts[phrase]
        for position in range(len(required) - size + 1):
            matched = 0
            while matched < size and words[word_starts[phrase] + matched] == required[position + matched]:
                matched += 1
            if matched == size:
                out[phrase] = True
                break
    return out


@compiled
def estimate_future(length: int, span_starts: Array, estimate: Array, max_phrase: int) -> Array:
    """Return the best estimate of every span's translation by itself: of one option, or of two parts."""
    future = np.full((length + 1, length + 1), -np.inf)
    for i in range(length + 1):
        future[i, i] = 0.0
    for size in range(1, length + 1):
        for i in range(length - size + 1):
            best = -np.inf
            if size <= max_phrase and span_starts[i, size] < span_starts[i, size + 1]:
                best = estimate[span_starts[i, size]]  # options are sorted, the best first
            for middle in range(i + 1, i + size):
                best = max(best, future[i, middle] + future[middle, i + size])
            future[i, i + size] = best
    return future


@compiled
def is_covered(mask: Any, bit: int) -> Any:
    """Return whether the position `bit` words after the gap is covered."""
    return (mask >> np.uint64(bit)) & np.uint64(1) != 0


@compiled
def cover(gap: int, mask: Any, start: int, end: int) -> tuple[int, Any]:
    """Return the gap and the mask after the span from `start` to `end` is covered too."""
    if start > gap:
        return gap, mask | (((np.uint64(1) << np.uint64(end - start)) - np.uint64(1)) << np.uint64(start - gap))
    mask = mask >> np.uint64(end - gap)
    gap = end
    while mask & np.uint64(1):
        mask, gap = mask >> np.uint64(1), gap + 1
    return gap, mask


@compiled
def sum_future(future: Array, length: int, gap: int, mask: Any) -> Any:
    """Return the estimate of all uncovered spans."""
    total, begin, position = 0.0, gap, gap
    while mask:
        if mask & np.uint64(1):
            total += future[begin, position]
            begin = position + 1
        mask, position = mask >> np.uint64(1), position + 1
    return total + future[begin, length]


@compiled
def find_orientation(last_start: int, last_end: int, start: int, end: int) -> int:
    """Return 0 if a phrase follows the one before it (monotone), 1 if they are swapped, else 2 (discontinuous)."""
    if start == last_end:
        return 0
    return 1 if end == last_start else 2


# Columns of `info`, the integer table of hypotheses, and of `score`, the table of their scores. GAP: see the top;
# LAST_START, LAST_END: source span of the last phrase; STATE: of the language model; POSITION: see `match_required`.
PARENT, GAP, OPTION, REORDERING, LAST_START, LAST_END, STATE, POSITION, NEXT_IN_STACK, MERGED, SIBLING = range(11)
SCORE, TOTAL, LM_SCORE = range(3)


@compiled
def score_option(lm: NgramTrie, state: int, options: Options, option: int, ends: bool) -> tuple[float, int]:
    """Return the log-probability of an option's words after a state, and the state after them."""
    total = 0.0
    for position in range(options.word_starts[option], options.word_starts[option + 1]):
        logp, state = score_word(lm, state, options.lm_words[position])
        total += logp
    if ends:
        logp, state = score_word(lm, state, lm.end_word)
        total += logp
    return total, state


@compiled
def list_spans(span_starts: Array, gap: int, mask: Any, last_end: int, max_phrase: int, max_jump: int) -> Array:
    """Return the uncovered spans (start, end) with options that a hypothesis may translate next."""
    length, found = len(span_starts), 0
    spans = np.empty((min(length - gap, WIDEST) * max_phrase, 2), np.int64)
    for start in range(max(gap, last_end - max_jump), min(length, gap + WIDEST, last_end + max_jump + 1)):
        for end in range(start + 1, min(start + max_phrase, length, gap + WIDEST) + 1):
            # A span must be uncovered, and after it the gap must still be within the distortion limit.
            if is_covered(mask, end - 1 - gap) or (start > gap and end - gap > max_jump):
                break
            if span_starts[start, end - start] < span_starts[start, end - start + 1]:
                spans[found, 0], spans[found, 1] = start, end
                found += 1
    return spans[:found]


@compiled
def sort_stack(info: Array, score: Array, row: int, limit: int, floor: float) -> Array:
    """Return the hypotheses of a stack to extend, the best first: not recombined, at most `limit`, above `floor`."""
    size, first = 0, row
    while row >= 0:
        size += info[row, MERGED] < 0
        row = info[row, NEXT_IN_STACK]
    rows, totals = np.empty(size, np.int64), np.empty(size)
    row, size = first, 0
    while row >= 0:
        if info[row, MERGED] < 0:
            rows[size], totals[size] = row, -score[row, TOTAL]
            size += 1
        row = info[row, NEXT_IN_STACK]
    order = np.argsort(totals, kind="mergesort")[:limit]
    good = len(order)
    while good > 1 and totals[order[good - 1]] > -floor:
        good -= 1
    return rows[order[:good]]


@compiled
def prune_stack(info: Array, score: Array, head: int, limit: int, floor: float) -> tuple[int, int, float]:
    """Prune a stack; return the first hypothesis that is left, how many there are, and the new floor."""
    rows = sort_stack(info, score, head, limit, floor)
    head = -1
    for row in rows:
        info[row, NEXT_IN_STACK], head = head, row
    return head, len(rows), score[head, TOTAL] if len(rows) == limit else floor


@compiled
def search_stacks(options: Options, lm: NgramTrie, limits: SearchLimits, required: Array) -> tuple[Array, Array, int]:
    """Search for translations of a sentence; return all hypotheses, their scores, and the first complete one.

    Hypotheses of a stack are linked by NEXT_IN_STACK, from its `heads` on. A recombined one has in MERGED the row that
    it was merged into; those with the same continuations are linked by SIBLING. Whenever a stack has twice as many
    hypotheses as are extended, the worse half is dropped, and its floor, below which no hypothesis is added, rises.

    If target words are `required`, only translations with exactly these are found (see `match_required`).
    """
    length = len(options.span_starts)
    future = estimate_future(length, options.span_starts, options.estimate, limits.max_phrase)
    capacity, used = 4096, 1
    info, masks, score = np.empty((capacity, 11), np.int64), np.empty(capacity, np.uint64), np.empty((capacity, 3))
    slots = np.full(4 * capacity, -1, np.int64)  # hash table of hypotheses that were not recombined
    heads, sizes, floor = np.full(length + 1, -1), np.zeros(length + 1, np.int64), np.full(length + 1, LOWEST)
    info[0] = (-1, 0, -1, -1, 0, 0, lm.begin, 0, -1, -1, -1)
    masks[0] = np.uint64(0)
    score[0] = (0.0, future[0, length], 0.0)
    heads[0] = 0
    max_jump = limits.distortion_limit if limits.distortion_limit >= 0 else length
    slack = LM_SLACK * limits.weight_lm
    for covered in range(length):
        for row in sort_stack(info, score, heads[covered], limits.stack_size, floor[covered]):
            gap, mask, last_option = info[row, GAP], masks[row], info[row, OPTION]
            last_start, last_end = info[row, LAST_START], info[row, LAST_END]
            for start, end in list_spans(options.span_starts, gap, mask, last_end, limits.max_phrase, max_jump):
                size, stack = end - start, covered + end - start
                new_gap, new_mask = cover(gap, mask, start, end)
                rest = sum_future(future, length, new_gap, new_mask)
                orientation = find_orientation(last_start, last_end, start, end)
                reordered_score = score[row, SCORE] - limits.weight_distortion * abs(start - last_end)
                if last_option >= 0:
                    reordered_score += options.reorder[last_option, 3 + orientation]
                for option in range(options.span_starts[start, size], options.span_starts[start, size + 1]):
                    score_without_phrase = reordered_score + options.reorder[option, orientation]
                    position = match_required(options, option, required, info[row, POSITION], stack == length)
                    if position < 0 or score_without_phrase + options.estimate[option] + rest < floor[stack] - slack:
                        continue
                    lm_score, state = score_option(lm, info[row, STATE], options, option, stack == length)
                    new_score = score_without_phrase + options.static[option] + limits.weight_lm * lm_score
                    if new_score + rest < floor[stack]:
                        continue
                    if used == capacity:
                        capacity *= 2
                        info, masks, score = grow(info), grow(masks), grow(score)
                        slots = rehash(info, masks, used, 4 * capacity, limits.recombine_phrases)
                    distribution = options.reordering_rows[option]
                    info[used] = (row, new_gap, option, distribution, start, end, state, position, -1, -1, -1)
                    masks[used] = new_mask
                    score[used] = (new_score, new_score + rest, lm_score)
                    if recombine(info, masks, score, slots, used, limits.recombine_phrases):
                        info[used, NEXT_IN_STACK], heads[stack] = heads[stack], used
                        floor[stack] = max(floor[stack], new_score + rest - limits.beam)
                        sizes[stack] += 1
                    used += 1
                    if sizes[stack] == 2 * limits.stack_size:
                        heads[stack], sizes[stack], floor[stack] = prune_stack(
                            info, score, heads[stack], limits.stack_size, floor[stack]
                        )
    return info[:used], score[:used], heads[length]


@compiled
def find_slot(info: Array, masks: Array, slots: Array, row: int, recombine_phrases: bool) -> Any:
    """Return the slot of a hypothesis in the hash table, whose keys are what continuations depend on."""
    first = LAST_END if recombine_phrases else REORDERING  # the columns from here to POSITION are the key
    key = np.uint64(info[row, GAP]) * np.uint64(0x9E3779B97F4A7C15) ^ masks[row]
    for column in range(first, POSITION + 1):
        key = (key ^ np.uint64(info[row, column])) * np.uint64(0xBF58476D1CE4E5B9)
        key ^= key >> np.uint64(29)
    slot: Any = np.int64(key % np.uint64(len(slots)))
    while slots[slot] >= 0:
        other = slots[slot]
        same = masks[other] == masks[row] and info[other, GAP] == info[row, GAP]
        for column in range(first, POSITION + 1):
            same = same and info[other, column] == info[row, column]
        if same:
            break
        slot = (slot + 1) % len(slots)
    return slot


@compiled
def recombine(info: Array, masks: Array, score: Array, slots: Array, row: int, recombine_phrases: bool) -> bool:
    """Merge a new hypothesis with one that has the same continuations; return whether the new one is the better."""
    slot = find_slot(info, masks, slots, row, recombine_phrases)
    old = slots[slot]
    if old >= 0 and score[old, SCORE] >= score[row, SCORE]:
        info[row, MERGED] = old
        info[row, SIBLING], info[old, SIBLING] = info[old, SIBLING], row
        return False
    if old >= 0:
        info[old, MERGED], info[row, SIBLING] = row, old
    slots[slot] = row
    return True


@compiled
def rehash(info: Array, masks: Array, used: int, size: int, recombine_phrases: bool) -> Array:
    slots = np.full(size, -1, np.int64)
    for row in range(used):
        if info[row, MERGED] < 0:
            slots[find_slot(info, masks, slots, row, recombine_phrases)] = row
    return slots


@compiled
def grow(table: Array) -> Array:
    """Return a table of twice the length with the same beginning."""
    return np.concatenate((table, np.empty_like(table)))


@compiled
def rank_paths(info: Array, score: Array, head: int, count: int, longest: int) -> Array:
    """Return up to `count` paths through the recombined hypotheses, the best first: rows from start to end, then -1.

    Best-first (A*) search from the end of the sentence. The cost of a partial path is that of the phrases on it plus
    the exact cost of the best path to its first hypothesis, so complete paths are found from best to worst.
    """
    # Empty lists, from whose elements Numba infers the types.
    queue = [(0.0, -1, -1) for _ in range(0)]  # (cost, cell of what is behind, hypothesis)
    cells = [(-1, -1) for _ in range(0)]  # (hypothesis, cell of what is behind it)
    while head >= 0:
        if info[head, MERGED] < 0:
            heappush(queue, (-score[head, SCORE], -1, head))
        head = info[head, NEXT_IN_STACK]
    paths, found = np.full((count, longest), -1), 0
    while len(queue) and found < count:
        cost, cell, row = heappop(queue)
        if row == 0:
            size = 0
            while cell >= 0:
                paths[found, size], cell = cells[cell]
                size += 1
            found += 1
            continue
        rest = -cost - score[row, SCORE]  # score of the phrases behind
        variant = row
        while variant >= 0:
            cells.append((variant, cell))
            heappush(queue, (-(rest + score[variant, SCORE]), len(cells) - 1, info[variant, PARENT]))
            variant = info[variant, SIBLING]
    return paths[:found]


@compiled
def sum_features(paths: Array, info: Array, score: Array, options: Options) -> Array:
    """Return the features of every path: those of options, then LM, distortion, words, phrases and unknown words."""
    size = options.features.shape[1]
    phrase_features = size - 6
    out = np.zeros((len(paths), size + 5))
    for path in range(len(paths)):
        last_start = last_end = 0
        last = -1
        for row in paths[path]:
            if row < 0:
                break
            start, end, option = info[row, LAST_START], info[row, LAST_END], info[row, OPTION]
            before = phrase_features + find_orientation(last_start, last_end, start, end)
            if last >= 0:
                out[path, before + 3] += options.features[last, before + 3]
            out[path, :phrase_features] += options.features[option, :phrase_features]
            out[path, before] += options.features[option, before]
            out[path, size] += score[row, LM_SCORE]
            out[path, size + 1] -= abs(start - last_end)
            out[path, size + 2] += options.word_starts[option + 1] - options.word_starts[option]
            out[path, size + 3] += 1
            out[path, size + 4] += options.rows[option] < 0
            last_start, last_end, last = start, end, option
    return out
