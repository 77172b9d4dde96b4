"""Tuning of the weights of a log-linear model: batch MIRA over n-best lists (Cherry and Foster 2012).

Every round translates the dev set with the current weights, adds the n-best lists to those of earlier rounds, and
updates the weights, sentence by sentence, so that a translation with a good BLEU (*hope*) scores better than one that
the model prefers and BLEU does not (*fear*), by a margin of their difference in BLEU.

The references of a dev set may be some per cent longer or shorter than those of other texts of the same kind, and BLEU
teaches their length. `length_factor` corrects that: it is the ratio of target to source words in the training text,
divided by that ratio in the dev set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dragoman.errors import UserError
from dragoman.smt.compiled import Array
from dragoman.smt.decoder import Derivation

BLEU_ORDER = 4
DECAY = 0.999  # per sentence, of the background statistics (see `optimise_weights`)
STEP = 0.01  # maximum step size of an update, the constant C of MIRA
EPOCHS = 30
COMPARED_DECIMALS = 4  # features are compared to this number of decimal places


def count_overlaps(words: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
    """Return the statistics of BLEU: for each order matched and all n-grams; the length of the closest reference."""
    stats = np.zeros(2 * BLEU_ORDER + 1)
    for n in range(1, BLEU_ORDER + 1):
        found = list_ngrams(words, n)
        best: Counter[tuple[str, ...]] = Counter()
        for reference in references:
            best |= list_ngrams(reference, n)
        stats[2 * n - 2] = sum((found & best).values())
        stats[2 * n - 1] = max(len(words) - n + 1, 0)
    stats[-1] = min((abs(len(reference) - len(words)), len(reference)) for reference in references)[1]
    return stats


def list_ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))


def bleu_from_counts(stats: Array) -> Any:
    """Return BLEU (0 to 1) for each row of statistics, without smoothing."""
    matched, total = stats[..., 0:-1:2], stats[..., 1:-1:2]
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.log(np.where(total > 0, matched / total, 0.0)).mean(-1)
        brevity = np.minimum(0.0, 1.0 - stats[..., -1] / stats[..., 1])
    return np.nan_to_num(np.exp(precision + brevity))


class TuningRound(NamedTuple):
    """The weights that a round of tuning translated with, and how good they are."""

    weights: Array
    bleu: float  # of the dev set, 0 to 1
    objective: float  # the same with the references' length corrected, by which weights are chosen
    candidates: int  # different translations so far


class TuningState(NamedTuple):
    """Everything that the next round needs: the finished rounds, and their candidates as rows of arrays."""

    tried: Array  # weights of finished rounds, a row each
    scores: Array  # their BLEU, objective and number of candidates
    sentences: Array  # index of each candidate's sentence
    features: Array
    stats: Array  # of each candidate, from `count_overlaps`

    @classmethod
    def start(cls, features: int) -> TuningState:
        shapes = (0, features), (0, 3), (0, features), (0, 2 * BLEU_ORDER + 1)
        tried, scores, empty, stats = (np.zeros(shape) for shape in shapes)
        return cls(tried, scores, np.zeros(0, np.int64), empty, stats)

    @classmethod
    def load(cls, path: Path) -> TuningState:
        """Read a state that `save` wrote; a damaged file is refused."""
        try:
            return cls(**load_file(path))
        except (OSError, SafetensorError, TypeError) as error:
            raise UserError(
                f"{str(path)!r} has no state of tuning that can be read ({error}); delete it to start tuning again"
            ) from error

    def save(self, path: Path) -> None:
        save_file(self._asdict(), path)

    @property
    def curve(self) -> list[TuningRound]:
        return [
            TuningRound(weights, float(bleu), float(objective), int(candidates))
            for weights, (bleu, objective, candidates) in zip(self.tried, self.scores, strict=True)
        ]

    @property
    def best(self) -> TuningRound:
        return max(self.curve, key=lambda finished: finished.objective)


def tune_weights(
    translate: Callable[[Array], Sequence[Sequence[Derivation]]],
    references: Sequence[Sequence[str]],
    start: Array,
    *,
    rounds: int,
    length_factor: float = 1.0,
    seed: int = 1,
    state: TuningState | None = None,
    keep: Callable[[TuningState], object] = lambda _: None,
) -> TuningState:
    """Translate with the weights `start`, then tune and translate `rounds` times; `best` of the result has the weights.

    `translate` returns n-best lists of the dev set for given weights. The lengths of references are multiplied by
    `length_factor`. Features whose weight is 0 at the start keep it. `keep` is called with the state after every round;
    given as `state`, tuning continues from it with the same result as without the interruption. Tuning ends early if a
    round finds no new translation.
    """
    state = state or TuningState.start(len(start))
    weights = start
    while len(state.tried) <= rounds and (len(state.tried) < 2 or state.scores[-1, 2] > state.scores[-2, 2]):
        if len(state.tried):
            order = np.argsort(state.sentences, kind="stable")
            list_starts = np.flatnonzero(np.diff(state.sentences[order])) + 1
            stats = state.stats * np.append(np.ones(2 * BLEU_ORDER), length_factor)
            lists = np.split(state.features[order] * (start != 0), list_starts), np.split(stats[order], list_starts)
            weights = optimise_weights(*lists, state.tried[-1], seed + len(state.tried))
            # The scale of the weights does not change which translation is best, but how much the decoder prunes.
            changed = weights != start
            weights[changed] *= np.abs(start[changed]).sum() / max(np.abs(weights[changed]).sum(), 1e-9)
        state = add_candidates(state, weights, translate(weights), references, length_factor)
        keep(state)
    return state


def add_candidates(
    state: TuningState,
    weights: Array,
    lists: Sequence[Sequence[Derivation]],
    references: Sequence[Sequence[str]],
    length_factor: float,
) -> TuningState:
    """Return the state after a round: with its n-best lists, and with the BLEU of their first translations.

    A derivation that has the same features and the same statistics of BLEU as an earlier one of its sentence is left
    out: no update could tell them apart.
    """
    seen: list[set[bytes]] = [set() for _ in references]
    rounded = np.round(state.features, COMPARED_DECIMALS)
    for sentence, row, counts in zip(state.sentences.tolist(), rounded, state.stats, strict=True):
        seen[sentence].add(row.tobytes() + counts.tobytes())
    sentences, features, stats = [], [], []
    total = np.zeros(2 * BLEU_ORDER + 1)
    for sentence, (derivations, reference) in enumerate(zip(lists, references, strict=True)):
        stats_of: dict[tuple[str, ...], Array] = {}
        for rank, derivation in enumerate(derivations):
            words = tuple(derivation.words)
            if words not in stats_of:
                stats_of[words] = count_overlaps(words, [reference])
            key = np.round(derivation.features, COMPARED_DECIMALS).tobytes() + stats_of[words].tobytes()
            if rank == 0:
                total += stats_of[words]
            if key not in seen[sentence]:
                seen[sentence].add(key)
                sentences.append(sentence)
                features.append(derivation.features)
                stats.append(stats_of[words])
    corrected = total * np.append(np.ones(2 * BLEU_ORDER), length_factor)
    count = len(state.features) + len(features)
    scores = np.array([[bleu_from_counts(total), bleu_from_counts(corrected), count]])
    return TuningState(
        np.concatenate([state.tried, weights[None]]),
        np.concatenate([state.scores, scores]),
        np.concatenate([state.sentences, np.array(sentences, np.int64)]),
        np.concatenate([state.features, np.reshape(features, (-1, len(weights)))]),
        np.concatenate([state.stats, np.reshape(stats, (-1, 2 * BLEU_ORDER + 1))]),
    )


def optimise_weights(features: Sequence[Array], stats: Sequence[Array], weights: Array, seed: int) -> Array:
    """Return weights under which good translations of n-best lists score best: the average of the best epoch.

    The BLEU of one translation is computed from its statistics plus those of the hope translations before it, which
    decay (the *background*), and multiplied by the number of reference words. The best epoch is the one whose averaged
    weights choose translations with the best BLEU.
    """
    rng = np.random.default_rng(seed)
    weights = weights.copy()
    background = np.ones(2 * BLEU_ORDER + 1)
    best, best_bleu = weights.copy(), -1.0
    for _ in range(EPOCHS):
        total = np.zeros_like(weights)
        for index in rng.permutation(len(features)):
            candidates, model_score = features[index], features[index] @ weights
            counts = background + stats[index]
            gain = bleu_from_counts(counts) * counts[:, -1]
            hope, fear = int(np.argmax(model_score + gain)), int(np.argmax(model_score - gain))
            difference = candidates[hope] - candidates[fear]
            loss = (gain[hope] - gain[fear]) - (model_score[hope] - model_score[fear])
            norm = float(difference @ difference)
            if loss > 0 and norm > 0:
                weights += min(STEP, loss / norm) * difference
            background = DECAY * counts[hope]
            total += weights
        average = total / len(features)
        chosen = [counts[int(np.argmax(values @ average))] for values, counts in zip(features, stats, strict=True)]
        if (bleu := float(bleu_from_counts(np.sum(chosen, 0)))) > best_bleu:
            best, best_bleu = average, bleu
    return best
