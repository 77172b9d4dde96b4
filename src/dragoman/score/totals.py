"""From sums over lines to scores, for many sums at once: what makes a thousand resamples cheap.

Every metric counts something in each line (line_NK) and its score is a function of the sums of these counts. The
functions here say the same as sacreBLEU's own, which take one sum at a time.

Shapes   T sums, one for each trial   K counts of a metric   N orders of n-grams
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ORDERS = 4  # of BLEU
TINY = 1e-300  # whose logarithm is still a number
BETA = 2.0  # of chrF: what is covered counts so much more than what is right


def ratio(part: Array, whole: Array, otherwise: Array | float = 0.0) -> Array:
    """part / whole, and `otherwise` where there is nothing to divide by."""
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), otherwise)


def shares(total_TK: Array) -> Array:
    """Two counts: so many in a hundred. Something of nothing is all of it."""
    part_T, whole_T = total_TK[..., 0], total_TK[..., 1]
    return 100 * ratio(part_T, whole_T, np.where(part_T > 0, 1.0, 0.0))


def bleus(total_TK: Array) -> Array:
    """Counts: length, length of the reference, then n-grams that are right, then all n-grams, of each order.

    An order without a hit counts as half a hit, the next such one as a quarter, and so on.
    """
    length_T, wanted_T = total_TK[..., 0], total_TK[..., 1]
    right_TN, all_TN = total_TK[..., 2 : 2 + ORDERS], total_TK[..., 2 + ORDERS :]
    missed_TN = np.cumsum(right_TN == 0, -1)
    hits_TN = np.where(right_TN == 0, 0.5**missed_TN, right_TN)
    short_T = np.where(length_T < wanted_T, 1 - ratio(wanted_T, length_T), 0.0)
    log_T = np.log(np.maximum(ratio(hits_TN, all_TN), TINY)).mean(-1)
    some_T = (right_TN > 0).any(-1) & (all_TN > 0).all(-1)
    return np.where(some_T, 100 * np.exp(log_T + short_T), 0.0)


def bleu_parts(total_K: Array) -> dict[str, Any]:
    """Return what BLEU is the product of, from the same counts, as sacreBLEU prints it: n-gram precisions in per cent,
    smoothed where an order has no match, and the brevity penalty, with the lengths in tokens behind it."""
    length, wanted = int(total_K[0]), int(total_K[1])
    right_N, all_N = total_K[2 : 2 + ORDERS], total_K[2 + ORDERS :]
    hits_N = np.where(right_N == 0, 0.5 ** np.cumsum(right_N == 0), right_N)
    precision_N = 100 * ratio(hits_N, all_N) * bool(right_N.any())
    penalty = 1.0 if length >= wanted else math.exp(1 - wanted / length) if length else 0.0
    return {
        "precisions": precision_N.tolist(),
        "brevity_penalty": penalty,
        "hypothesis_length": length,
        "reference_length": wanted,
    }


def chrfs(total_TK: Array) -> Array:
    """Counts of each order: n-grams, n-grams of the reference, n-grams in both. Orders that one side lacks are out."""
    given_TN, wanted_TN, both_TN = (total_TK[..., n::3] for n in range(3))
    orders_T = np.maximum(((given_TN > 0) & (wanted_TN > 0)).sum(-1), 1)
    right_T, covered_T = (ratio(both_TN, side_TN).sum(-1) / orders_T for side_TN in (given_TN, wanted_TN))
    return 100 * ratio((1 + BETA**2) * right_T * covered_T, BETA**2 * right_T + covered_T)
