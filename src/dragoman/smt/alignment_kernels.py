"""The compiled loops of word alignment: expectations of a block of sentence pairs, and the passes over its cells.

A block is a run of sentence pairs. Its cells are all (source position, target position) combinations, pair after pair:
cell = first[pair] + i * J + j. Two passes touch every cell once per iteration. The *row pass* goes through the block
word by word, so that one row of the translation table is at hand while all of its cells are filled or counted. The
*pair pass* goes sentence by sentence and turns translation probabilities into posteriors. Neither needs a hash table,
and both read and write memory in runs.

Everything here is compiled without the GIL; callers run it in threads, on disjoint rows or disjoint pairs.

Shapes   O observations (the words that are generated)   S states (the words that they are generated from)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dragoman.smt.compiled import Array, compiled
from dragoman.smt.symmetrization import Heuristic, symmetrize

MODEL1, MODEL2, DIAGONAL, HMM = range(4)
WINDOW = 8  # jumps of the HMM up to this distance have a probability each; longer ones share one per side
BUCKETS = 2 * WINDOW + 3
MISSING = np.float32(1e-9)  # probability of a pair of words that is not in the table


class Side(NamedTuple):
    """All sentences of one language as word ids, one after the other."""

    ids: Array
    starts: Array  # of every sentence, and the end of the last


class WordTable(NamedTuple):
    """p(target | source) and p(source | target) of every two words that occur in one pair, in rows by source word."""

    starts: Array
    columns: Array
    forward: Array
    backward: Array
    null_target: Array  # p(target | no source word), and last that of unknown words
    null_source: Array


class Block(NamedTuple):
    """Some sentence pairs, with their source words grouped so that each row of the table is visited once."""

    source: Side
    target: Side
    first_cell: Array
    rows: Array  # source words that occur
    row_starts: Array  # where the occurrences of each start in the next two
    pairs: Array
    positions: Array
    longest: int  # sentence


class Positions(NamedTuple):
    """How positions are chosen, with the parameters of both directions."""

    kind: int
    p_null: float  # probability that a word comes from none
    parameters: Array  # probabilities of jumps, or in the first column the tension towards the diagonal
    priors: Array  # p(i | j, I) of IBM Model 2


class PositionCounts(NamedTuple):
    """What is counted for the next `Positions`, and for words that come from none."""

    null_target: Array
    null_source: Array
    parameters: Array  # by direction: expected jumps and what they are divided by, or moments of the distance
    priors: Array


@compiled
def list_cooccurrences(
    row_starts: Array, row_pairs: Array, target: Side, words: int, first: int, last: int, counts: Array, columns: Array
) -> None:
    """Count, or write down in order of first sight, the distinct target words beside each source word in [first, last).

    `row_pairs[row_starts[e] : row_starts[e + 1]]` are the pairs in which source word e occurs. With an empty `columns`
    they are counted; else `counts` has where each row starts.
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

    One row of the table is spread over all words of the language at a time, so that a cell is found by its word alone.
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
def infer_independent(
    kind: int, emission: Array, null: Array, O: int, S: int, p_null: float, prior: Array, tension: float, gamma: Array,
    null_gamma: Array, prior_counts: Array, moments: Array,
) -> float:  # fmt: skip
    """Fill the posteriors of IBM Models 1 and 2, in which each word is generated by itself; return the log-likelihood.

    `prior[S, o, s]` is Model 2's probability that observation o comes from state s of S. The diagonal variant has
    exp(-tension |o / O - s / S|) instead, normalised over s; `moments` gets what a Newton step on the tension needs.
    """
    total = 0.0
    limit = prior.shape[1]
    for o in range(O):
        norm = mean = square = 0.0
        for s in range(S):
            weight = 1.0
            if kind == DIAGONAL:
                distance = abs((o + 0.5) / O - (s + 0.5) / S)
                weight = np.exp(-tension * distance)
                mean += weight * distance
                square += weight * distance * distance
            elif kind == MODEL2 and o < limit and limit > S:
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
            elif kind == MODEL2 and o < limit and limit > S and len(prior_counts):
                prior_counts[S, o, s] += gamma[o, s]
    return total


@compiled
def spread(taps: Array, message: Array, S: int, sums: Array, out: Array) -> None:
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
    """Add leaving[s] message[t] to the bucket of every jump from s to t; `sums` is what `spread` wrote."""
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
    emission: Array, null: Array, O: int, S: int, p_null: float, jumps: Array, reach: Array, tables: Array,
    scales: Array, vectors: Array,
) -> float:  # fmt: skip
    """Fill the probabilities of the forward algorithm, scaled to sum to one at each word; return the log-likelihood.

    `reach` is what all jumps from a position are multiplied by to sum to one. `moved` are the parts of `alpha`, before
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
            inside[s] = alpha[o, s] * reach[s]
        spread(back, message, S, sums, out)
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

    A state is the last position that generated a word, from 0 (none yet) to S. With probability `p_null` a word comes
    from nowhere and the position stays; otherwise it jumps, by p(jump) normalised over the S positions.
    Adds the expected number of every jump to `counts[0]`, and to `counts[1]` what they are divided by for new ones.
    """
    alpha, moved, beta = tables[0], tables[1], tables[2]
    message, out, sums, reach, leaving, left = vectors
    crossings, scales = np.zeros((2, BUCKETS)), null_gamma
    message[: S + 1 + 2 * WINDOW] = 0.0
    inside = message[WINDOW : WINDOW + S + 1]
    inside[1:] = 1.0
    spread(jumps, message, S, sums, reach)
    for s in range(S + 1):
        reach[s] = (1 - p_null) / reach[s]
    total = run_forward(emission, null, O, S, p_null, jumps, reach, tables, scales, vectors)
    beta[O, : S + 1] = 1.0
    left[: S + 1] = 0.0
    for o in range(O - 1, -1, -1):
        scale = scales[o]
        stay, stays = p_null * null[o] * scale, 0.0
        inside[0] = 0.0
        for s in range(1, S + 1):
            inside[s] = emission[o, s - 1] * beta[o + 1, s] * scale
            gamma[o, s - 1] = moved[o, s] * beta[o + 1, s] * scale
        spread(jumps, message, S, sums, out)
        for s in range(S + 1):
            leaving[s] = alpha[o, s] * reach[s]
            left[s] += leaving[s] * out[s] * reach[s]
            beta[o, s] = out[s] * reach[s] + stay * beta[o + 1, s]
            stays += alpha[o, s] * stay * beta[o + 1, s]
        count_jumps(leaving, message, S, sums, crossings[0])
        null_gamma[o] = stays
    inside[0] = 0.0
    inside[1:] = 1.0
    spread(jumps, message, S, sums, out)
    count_jumps(left, message, S, sums, crossings[1])
    for bucket in range(BUCKETS):
        counts[0, bucket] += crossings[0, bucket] * jumps[bucket]
        counts[1, bucket] += crossings[1, bucket] / (1 - p_null)
    return total


@compiled
def find_best_path(
    emission: Array,
    null: Array,
    O: int,
    S: int,
    p_null: float,
    jumps: Array,
    links: Array,
    score: Array,
    back: Array,
    vectors: Array,
) -> None:
    """Write the state of each observation on the likeliest path through the HMM, or -1 for none (Viterbi)."""
    reachable, norm, sums = vectors[0], vectors[1], vectors[2]
    reachable[: S + 1 + 2 * WINDOW] = 0.0
    reachable[WINDOW + 1 : WINDOW + S + 1] = 1.0
    spread(jumps, reachable, S, sums, norm)
    for s in range(S + 1):
        score[0, s] = 0.0 if s == 0 else -np.inf
    for o in range(O):
        for s in range(S + 1):
            stay = score[o, s] + np.log(p_null * null[o])
            score[o + 1, s], back[o, s] = stay, -1
            if s == 0:
                continue
            emit = np.log((1 - p_null) * emission[o, s - 1])
            for before in range(S + 1):
                d = min(max(s - before, -WINDOW - 1), WINDOW + 1)
                reached = score[o, before] + np.log(jumps[WINDOW + 1 + d] / norm[before]) + emit
                if reached > score[o + 1, s]:
                    score[o + 1, s], back[o, s] = reached, before
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

    With `agree`, both directions get the product of the two posteriors (Liang, Taskar and Klein 2006): a link counts as
    far as both models believe in it. Returns the log-likelihood of both directions.
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
                    emission, null, O, S, positions.p_null, positions.parameters[direction], gamma[direction],
                    null_gamma[direction], counts.parameters[direction], tables, vectors,
                )  # fmt: skip
            else:
                total += infer_independent(
                    positions.kind, emission, null, O, S, positions.p_null, positions.priors[direction],
                    positions.parameters[direction, 0], gamma[direction], null_gamma[direction],
                    counts.priors[direction], counts.parameters[direction, 0],
                )  # fmt: skip
        if agree:
            null_gamma[:] = 1.0
        for i in range(I):
            for j in range(J):
                here, there = gamma[0, j, i], gamma[1, i, j]
                if agree:
                    here = there = here * there
                    null_gamma[0, j] -= here
                    null_gamma[1, i] -= here
                forward[cell + i * J + j], backward[cell + i * J + j] = here, there
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
    """Find the likeliest alignment of pairs [first, last) in each direction; write which cells are links of both."""
    longest = block.longest
    score, vectors = np.empty((longest + 1, longest + 2)), np.empty((6, longest + 2 * WINDOW + 2))
    back = np.empty((longest, longest + 1), np.int64)
    emission, gamma = np.empty((longest, longest)), np.empty((longest, longest))
    null, null_gamma, moments = np.empty(longest), np.empty(longest), np.empty(BUCKETS)
    for pair in range(first, last):
        I = block.source.starts[pair + 1] - block.source.starts[pair]
        J = block.target.starts[pair + 1] - block.target.starts[pair]
        to_source, to_target = np.empty(J, np.int64), np.empty(I, np.int64)
        for direction in range(2):
            O, S, links = (J, I, to_source) if direction == 0 else (I, J, to_target)
            copy_cells(block, table, pair, direction, forward if direction == 0 else backward, emission, null)
            if positions.kind == HMM:
                jumps = positions.parameters[direction]
                find_best_path(emission, null, O, S, positions.p_null, jumps, links, score, back, vectors)
                continue
            infer_independent(
                positions.kind, emission, null, O, S, positions.p_null, positions.priors[direction],
                positions.parameters[direction, 0], gamma, null_gamma, np.empty((0, 0, 0)), moments,
            )  # fmt: skip
            for o in range(O):
                best = np.argmax(gamma[o, :S]) if S else 0
                links[o] = best if S and gamma[o, best] > null_gamma[o] else -1
        cell = block.first_cell[pair]
        symmetrize(to_source, to_target, heuristic, out[cell : cell + I * J].reshape((I, J)))
