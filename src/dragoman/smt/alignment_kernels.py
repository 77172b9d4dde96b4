"""The compiled loops of word alignment: the E-step of EM for a block of sentence pairs.

A block is a sequence of sentence pairs. Its cells are all combinations of a source and a target position, pair after
pair: cell = first_cell[pair] + i * J + j, where J is the number of target words of the pair. Each iteration makes two
kinds of passes over the cells. `visit_rows` goes through the block by source word, so that one row of the translation
table is in the CPU's cache while all of its cells are read or counted. `infer_pairs` goes through it by sentence pair
and turns translation probabilities into posteriors. Neither needs a hash table; both read memory mostly in order.

The functions run without the GIL; callers run them in threads, on disjoint ranges of rows or pairs.

Shapes   O observations (the words that are generated)   S states (the words that they are generated from)
         I source words of a pair   J target words
In both directions, emission[o, s] is p(observation | state), null[o] is p(observation | NULL), gamma[o, s] and
null_gamma[o] are the posteriors of the same. `tables`, `vectors`, `score` and `back` are buffers, allocated once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dragoman.smt.compiled import Array, compiled
from dragoman.smt.symmetrization import Heuristic, symmetrize

MODEL1, MODEL2, DIAGONAL, HMM = range(4)
WINDOW = 8  # jumps of the HMM up to this distance have a probability each; all longer ones to a side share one
BUCKETS = 2 * WINDOW + 3  # number of jump probabilities: from -WINDOW - 1 or less to WINDOW + 1 or more
SMALLEST_SUM = 1e-30  # avoids divisions by zero
MISSING = np.float32(1e-9)  # probability of a pair of words that is not in the table


class Side(NamedTuple):
    """All sentences of one language as word ids, concatenated."""

    ids: Array
    starts: Array  # where every sentence starts, and where the last one ends


class WordTable(NamedTuple):
    """p(target | source) and p(source | target) of all words that occur in the same pair, as sparse matrices (CSR).

    A row is a source word, a column a target word. The last row, which is empty, is that of unknown words.
    """

    starts: Array
    columns: Array
    forward: Array
    backward: Array
    null_target: Array  # p(target | NULL); the last entry is that of unknown words
    null_source: Array  # p(source | NULL)


class Block(NamedTuple):
    """Sentence pairs, and where each of their source words occurs, so that each row of the table is visited once."""

    source: Side
    target: Side
    first_cell: Array
    rows: Array  # source words that occur in the block
    row_starts: Array  # where the occurrences of each of them start in `pairs` and `positions`
    pairs: Array
    positions: Array
    longest: int  # length of the longest sentence of either side


class Positions(NamedTuple):
    """The probabilities of positions, with the parameters of both directions."""

    kind: int
    p_null: Array  # per direction: probability that a word is aligned to NULL
    parameters: Array  # per direction: probabilities of jumps, or in the first column the tension towards the diagonal
    priors: Array  # p(i | j, I) of IBM Model 2


class PositionCounts(NamedTuple):
    """Expected counts, from which the next `Positions` and the probabilities given NULL are computed."""

    null_target: Array
    null_source: Array
    p_null: Array  # per direction: expected number of words that are aligned to NULL
    parameters: Array  # per direction: expected jumps and their divisors, or gradient and curvature of the tension
    priors: Array


@compiled
def list_cooccurrences(
    row_starts: Array, row_pairs: Array, target: Side, words: int, first: int, last: int, counts: Array, columns: Array
) -> None:
    """Count or list the distinct target words that occur in a pair with each source word in [first, last).

    `row_pairs[row_starts[e] : row_starts[e + 1]]` are the pairs in which source word e occurs. If `columns` is empty,
    the numbers of target words are written to `counts`. Otherwise the target words of each row are written to
    `columns`, in the order of their first occurrence, from index `counts[row]` on.
    """
    seen = np.full(words, -1, np.int64)
    for row in range(first, last):
        found = 0
        for occurrence in range(row_starts[row], row_starts[row + 1]):
            pair = row_pairs[occurrence]
            for word in target.ids[target.starts[pair] : target.starts[pair + 1]]:
                if seen[word] != row:
                    seen[word] = row
                    if len(columns):
                        columns[counts[row] + found] = word
                    found += 1
        if not len(columns):
            counts[row] = found


@compiled
def visit_rows(
    block: Block, table: WordTable, add: bool, first: int, last: int, forward: Array, backward: Array
) -> None:
    """Copy probabilities from the table into the cells of the block's rows [first, last), or add cells to the table.

    Each row of the table is first expanded to a dense vector over all target words, which the cells index directly.
    """
    dense = np.full((len(table.null_target), 2), np.float64(MISSING))
    for number in range(first, last):
        entries = range(table.starts[block.rows[number]], table.starts[block.rows[number] + 1])
        for entry in entries:
            word = table.columns[entry]
            dense[word, 0] = 0.0 if add else table.forward[entry]
            dense[word, 1] = 0.0 if add else table.backward[entry]
        for occurrence in range(block.row_starts[number], block.row_starts[number + 1]):
            pair = block.pairs[occurrence]
            begin, end = block.target.starts[pair], block.target.starts[pair + 1]
            cell = block.first_cell[pair] + block.positions[occurrence] * (end - begin) - begin
            if add:
                for j in range(begin, end):
                    word = block.target.ids[j]
                    dense[word, 0] += forward[cell + j]
                    dense[word, 1] += backward[cell + j]
            else:
                for j in range(begin, end):
                    word = block.target.ids[j]
                    forward[cell + j], backward[cell + j] = dense[word, 0], dense[word, 1]
        for entry in entries:
            word = table.columns[entry]
            if add:
                table.forward[entry] += dense[word, 0]
                table.backward[entry] += dense[word, 1]
            else:
                dense[word, 0] = dense[word, 1] = MISSING


@compiled
def normalise_rows_and_columns(table: WordTable) -> None:
    """Divide expected counts by their sums: p(target | source) over rows, p(source | target) over columns."""
    column_sums = np.zeros(len(table.null_target))
    for row in range(len(table.starts) - 1):
        total = 0.0
        for entry in range(table.starts[row], table.starts[row + 1]):
            total += table.forward[entry]
            column_sums[table.columns[entry]] += table.backward[entry]
        for entry in range(table.starts[row], table.starts[row + 1]):
            table.forward[entry] /= max(total, SMALLEST_SUM)
    for entry in range(len(table.columns)):
        table.backward[entry] /= max(column_sums[table.columns[entry]], SMALLEST_SUM)


@compiled
def infer_independent(
    kind: int, emission: Array, null: Array, O: int, S: int, p_null: float, prior: Array, tension: float, gamma: Array,
    null_gamma: Array, prior_counts: Array, moments: Array,
) -> float:  # fmt: skip
    """Fill the posteriors of IBM Models 1 and 2, in which each word is generated by itself; return the log-likelihood.

    `prior[S, o, s]` is Model 2's probability that observation o comes from state s of S. The diagonal variant has
    exp(-tension |o / O - s / S|) instead, normalised over s; `moments` gets what a Newton step on the tension needs.
    """
    total = 0.0
    prior_length = prior.shape[1]
    for o in range(O):
        norm = mean = square = 0.0
        for s in range(S):
            weight = 1.0
            if kind == DIAGONAL:
                distance = abs((o + 0.5) / O - (s + 0.5) / S)
                weight = np.exp(-tension * distance)
                mean += weight * distance
                square += weight * distance * distance
            elif kind == MODEL2 and o < prior_length and prior_length > S:
                weight = prior[S, o, s]
            gamma[o, s] = weight
            norm += weight
        mass = p_null * null[o]
        null_gamma[o] = mass
        for s in range(S):
            gamma[o, s] *= (1 - p_null) / norm * emission[o, s]
            mass += gamma[o, s]
        total += np.log(mass)
        null_gamma[o] /= mass
        for s in range(S):
            gamma[o, s] /= mass
            if kind == DIAGONAL:
                distance = abs((o + 0.5) / O - (s + 0.5) / S)
                moments[0] += gamma[o, s] * (mean / norm - distance)
                moments[1] += gamma[o, s] * (square / norm - (mean / norm) ** 2)
            elif kind == MODEL2 and o < prior_length and prior_length > S and len(prior_counts):
                prior_counts[S, o, s] += gamma[o, s]
    return total


@compiled
def convolve_jumps(taps: Array, message: Array, S: int, sums: Array, out: Array) -> None:
    """Write out[s] = sum over all positions t of taps(t - s) message[t].

    Positions run from 0, the virtual one before the sentence, to S; `message` has WINDOW zeros before and after them.
    `taps` are the probabilities of jumps, or in reverse order those of jumps in the other direction. Jumps longer than
    WINDOW share a probability per side, so their part is a difference of prefix sums.
    """
    sums[0] = 0.0
    for s in range(S + 1 + 2 * WINDOW):
        sums[s + 1] = sums[s] + message[s]
    total = sums[S + 1 + 2 * WINDOW]
    for s in range(S + 1):
        reached = taps[0] * sums[s] + taps[BUCKETS - 1] * (total - sums[s + 2 * WINDOW + 1])
        for k in range(2 * WINDOW + 1):
            reached += taps[k + 1] * message[s + k]
        out[s] = reached


@compiled
def count_jumps(leaving: Array, message: Array, S: int, sums: Array, counts: Array) -> None:
    """Add leaving[s] message[t] to the bucket of every jump from s to t; `sums` is what `convolve_jumps` wrote."""
    total = sums[S + 1 + 2 * WINDOW]
    left = right = 0.0
    for s in range(S + 1):
        left += leaving[s] * sums[s]
        right += leaving[s] * (total - sums[s + 2 * WINDOW + 1])
    counts[0] += left
    counts[BUCKETS - 1] += right
    for k in range(2 * WINDOW + 1):
        near = 0.0
        for s in range(S + 1):
            near += leaving[s] * message[s + k]
        counts[k + 1] += near


@compiled
def run_forward(
    emission: Array, null: Array, O: int, S: int, p_null: float, jumps: Array, jump_scales: Array, tables: Array,
    scales: Array, vectors: Array,
) -> float:  # fmt: skip
    """Fill the probabilities of the forward algorithm, scaled to sum to one at each word; return the log-likelihood.

    Jumps from a position, multiplied by its `jump_scales`, sum to 1 - p_null. `moved` is the part of `alpha`, before
    scaling, in which a word is generated from a position.
    """
    alpha, moved = tables[0], tables[1]
    message, out, sums = vectors[0], vectors[1], vectors[2]
    inside, back = message[WINDOW : WINDOW + S + 1], jumps[::-1].copy()
    alpha[0, 0] = 1.0
    alpha[0, 1 : S + 1] = 0.0
    total = 0.0
    for o in range(O):
        for s in range(S + 1):
            inside[s] = alpha[o, s] * jump_scales[s]
        convolve_jumps(back, message, S, sums, out)
        stay, scale = p_null * null[o], p_null * null[o] * alpha[o, 0]
        alpha[o + 1, 0] = scale
        for s in range(1, S + 1):
            moved[o, s] = emission[o, s - 1] * out[s]
            alpha[o + 1, s] = moved[o, s] + stay * alpha[o, s]
            scale += alpha[o + 1, s]
        total += np.log(scale)
        scales[o] = 1 / scale
        for s in range(S + 1):
            alpha[o + 1, s] *= scales[o]
    return total


@compiled
def infer_hmm(
    emission: Array, null: Array, O: int, S: int, p_null: float, jumps: Array, gamma: Array, null_gamma: Array,
    counts: Array, tables: Array, vectors: Array,
) -> float:  # fmt: skip
    """Fill the posteriors of the HMM by the forward-backward algorithm; return the log-likelihood.

    A state is the last position that generated a word, from 0 (none yet) to S. With probability `p_null` a word is
    aligned to NULL and the position stays; otherwise it jumps, by p(jump) normalised over the S positions.
    Adds the expected number of every jump to `counts[0]`, and the divisors of their new probabilities to `counts[1]`.
    """
    alpha, moved, beta = tables[0], tables[1], tables[2]
    message, out, sums, jump_scales, leaving, all_leaving = vectors
    jump_sums = np.zeros((2, BUCKETS))
    scales = null_gamma  # the same memory: each scale is read before its posterior is written
    message[: S + 1 + 2 * WINDOW] = 0.0
    inside = message[WINDOW : WINDOW + S + 1]
    inside[1:] = 1.0
    convolve_jumps(jumps, message, S, sums, jump_scales)
    for s in range(S + 1):
        jump_scales[s] = (1 - p_null) / jump_scales[s]
    total = run_forward(emission, null, O, S, p_null, jumps, jump_scales, tables, scales, vectors)
    beta[O, : S + 1] = 1.0
    all_leaving[: S + 1] = 0.0
    for o in range(O - 1, -1, -1):
        scale = scales[o]
        stay, stays = p_null * null[o] * scale, 0.0
        inside[0] = 0.0
        for s in range(1, S + 1):
            inside[s] = emission[o, s - 1] * beta[o + 1, s] * scale
            gamma[o, s - 1] = moved[o, s] * beta[o + 1, s] * scale
        convolve_jumps(jumps, message, S, sums, out)
        for s in range(S + 1):
            leaving[s] = alpha[o, s] * jump_scales[s]
            all_leaving[s] += leaving[s] * out[s] * jump_scales[s]
            beta[o, s] = out[s] * jump_scales[s] + stay * beta[o + 1, s]
            stays += alpha[o, s] * stay * beta[o + 1, s]
        count_jumps(leaving, message, S, sums, jump_sums[0])
        null_gamma[o] = stays
    inside[0] = 0.0
    inside[1:] = 1.0
    convolve_jumps(jumps, message, S, sums, out)
    count_jumps(all_leaving, message, S, sums, jump_sums[1])
    for bucket in range(BUCKETS):
        counts[0, bucket] += jump_sums[0, bucket] * jumps[bucket]
        counts[1, bucket] += jump_sums[1, bucket] / (1 - p_null)
    return total


@compiled
def find_best_path(
    emission: Array, null: Array, O: int, S: int, p_null: float, jumps: Array, links: Array, score: Array, back: Array,
    vectors: Array,
) -> None:  # fmt: skip
    """Write the state of each observation on the most probable path through the HMM, or -1 for NULL (Viterbi).

    Jumps longer than WINDOW have the same probability on each side, so the best state to start them from is a running
    maximum: first over the states far to the left of s, then over those far to the right.
    """
    reachable, norm, sums, leaving = vectors[0], vectors[1], vectors[2], vectors[3]
    reachable[: S + 1 + 2 * WINDOW] = 0.0
    reachable[WINDOW + 1 : WINDOW + S + 1] = 1.0
    convolve_jumps(jumps, reachable, S, sums, norm)
    log_jumps = np.log(jumps)
    for s in range(S + 1):
        score[0, s] = 0.0 if s == 0 else -np.inf
    for o in range(O):
        stay = np.log(p_null * null[o])
        for s in range(S + 1):
            leaving[s] = score[o, s] - np.log(norm[s])
            score[o + 1, s], back[o, s] = -np.inf, -1
        best = -1  # the best state more than WINDOW positions to the left of s
        for s in range(WINDOW + 1, S + 1):
            if best < 0 or leaving[s - WINDOW - 1] > leaving[best]:
                best = s - WINDOW - 1
            score[o + 1, s], back[o, s] = leaving[best] + log_jumps[BUCKETS - 1], best
        for s in range(1, S + 1):
            for before in range(max(s - WINDOW, 0), min(s + WINDOW, S) + 1):
                reached = leaving[before] + log_jumps[WINDOW + 1 + s - before]
                if reached > score[o + 1, s]:
                    score[o + 1, s], back[o, s] = reached, before
        best = -1  # the best state more than WINDOW positions to the right of s
        for s in range(S - WINDOW - 1, 0, -1):
            if best < 0 or leaving[s + WINDOW + 1] > leaving[best]:
                best = s + WINDOW + 1
            if leaving[best] + log_jumps[0] > score[o + 1, s]:
                score[o + 1, s], back[o, s] = leaving[best] + log_jumps[0], best
        for s in range(S + 1):
            if s > 0:
                score[o + 1, s] += np.log((1 - p_null) * emission[o, s - 1])
            if s == 0 or score[o, s] + stay >= score[o + 1, s]:
                score[o + 1, s], back[o, s] = score[o, s] + stay, -1
    state = 0
    for s in range(S + 1):
        if score[O, s] > score[O, state]:
            state = s
    for o in range(O - 1, -1, -1):
        if back[o, state] < 0:
            links[o] = -1
        else:
            links[o] = state - 1
            state = back[o, state]


@compiled
def copy_cells(
    block: Block, table: WordTable, pair: int, direction: int, cells: Array, emission: Array, null: Array
) -> None:
    """Copy the probabilities of a pair into a matrix (observation, state) of one direction."""
    i0, I = block.source.starts[pair], block.source.starts[pair + 1] - block.source.starts[pair]
    j0, J = block.target.starts[pair], block.target.starts[pair + 1] - block.target.starts[pair]
    cell = block.first_cell[pair]
    if direction == 0:
        for j in range(J):
            null[j] = table.null_target[block.target.ids[j0 + j]]
            for i in range(I):
                emission[j, i] = cells[cell + i * J + j]
    else:
        for i in range(I):
            null[i] = table.null_source[block.source.ids[i0 + i]]
            for j in range(J):
                emission[i, j] = cells[cell + i * J + j]


@compiled
def infer_pairs(
    block: Block, table: WordTable, positions: Positions, agree: bool, first: int, last: int, forward: Array,
    backward: Array, counts: PositionCounts,
) -> float:  # fmt: skip
    """Replace the translation probabilities of pairs [first, last) by posteriors, in both directions.

    With `agree`, both directions get the product of the two posteriors (Liang, Taskar and Klein 2006), which is large
    only if both models predict the link. Returns the log-likelihood of both directions.
    """
    longest = block.longest
    tables, vectors = np.empty((3, longest + 1, longest + 2)), np.empty((6, longest + 2 * WINDOW + 2))
    emission, gamma = np.empty((longest, longest)), np.empty((2, longest, longest))
    null, null_gamma = np.empty(longest), np.empty((2, longest))
    total = 0.0
    for pair in range(first, last):
        i0, I = block.source.starts[pair], block.source.starts[pair + 1] - block.source.starts[pair]
        j0, J = block.target.starts[pair], block.target.starts[pair + 1] - block.target.starts[pair]
        cell = block.first_cell[pair]
        for direction in range(2):
            O, S = (J, I) if direction == 0 else (I, J)
            copy_cells(block, table, pair, direction, forward if direction == 0 else backward, emission, null)
            if positions.kind == HMM:
                total += infer_hmm(
                    emission, null, O, S, positions.p_null[direction], positions.parameters[direction],
                    gamma[direction], null_gamma[direction], counts.parameters[direction], tables, vectors,
                )  # fmt: skip
            else:
                total += infer_independent(
                    positions.kind, emission, null, O, S, positions.p_null[direction], positions.priors[direction],
                    positions.parameters[direction, 0], gamma[direction], null_gamma[direction],
                    counts.priors[direction], counts.parameters[direction, 0],
                )  # fmt: skip
            for o in range(O):
                counts.p_null[direction] += null_gamma[direction, o]
        if agree:
            null_gamma[:] = 1.0
        for i in range(I):
            for j in range(J):
                p_forward, p_backward = gamma[0, j, i], gamma[1, i, j]
                if agree:
                    p_forward = p_backward = p_forward * p_backward
                    null_gamma[0, j] -= p_forward
                    null_gamma[1, i] -= p_forward
                forward[cell + i * J + j], backward[cell + i * J + j] = p_forward, p_backward
        for j in range(J):
            counts.null_target[block.target.ids[j0 + j]] += max(null_gamma[0, j], 0.0)
        for i in range(I):
            counts.null_source[block.source.ids[i0 + i]] += max(null_gamma[1, i], 0.0)
    return total


@compiled
def link_pairs(
    block: Block, table: WordTable, positions: Positions, heuristic: Heuristic, first: int, last: int, forward: Array,
    backward: Array, out: Array,
) -> None:  # fmt: skip
    """Find the most probable alignment of pairs [first, last) in each direction; write the symmetrised links."""
    longest = block.longest
    score, vectors = np.empty((longest + 1, longest + 2)), np.empty((6, longest + 2 * WINDOW + 2))
    back = np.empty((longest, longest + 1), np.int64)
    emission, gamma = np.empty((longest, longest)), np.empty((longest, longest))
    null, null_gamma, moments = np.empty(longest), np.empty(longest), np.empty(BUCKETS)
    links = np.empty(longest, np.int64)
    for pair in range(first, last):
        I = block.source.starts[pair + 1] - block.source.starts[pair]
        J = block.target.starts[pair + 1] - block.target.starts[pair]
        linked = np.zeros((2, I, J), np.bool_)
        for direction in range(2):
            O, S = (J, I) if direction == 0 else (I, J)
            copy_cells(block, table, pair, direction, forward if direction == 0 else backward, emission, null)
            if positions.kind == HMM:
                jumps = positions.parameters[direction]
                find_best_path(emission, null, O, S, positions.p_null[direction], jumps, links, score, back, vectors)
            else:
                infer_independent(
                    positions.kind, emission, null, O, S, positions.p_null[direction], positions.priors[direction],
                    positions.parameters[direction, 0], gamma, null_gamma, np.empty((0, 0, 0)), moments,
                )  # fmt: skip
                for o in range(O):
                    best = np.argmax(gamma[o, :S]) if S else 0
                    links[o] = best if S and gamma[o, best] > null_gamma[o] else -1
            for o in range(O):
                if links[o] >= 0 and direction == 0:
                    linked[0, links[o], o] = True
                elif links[o] >= 0:
                    linked[1, o, links[o]] = True
        cell = block.first_cell[pair]
        symmetrize(linked[0], linked[1], heuristic, out[cell : cell + I * J].reshape((I, J)))
