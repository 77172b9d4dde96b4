"""Word alignment: compiled models equal plain ones, likelihood never falls, probabilities sum to one."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.errors import UserError
from dragoman.smt import alignment_kernels as kernels
from dragoman.smt.alignment import KINDS, Aligner, IterationReport, split_long_pair, train_aligner
from dragoman.smt.settings import MAX_LENGTH, AlignerSettings
from dragoman.smt.symmetrization import SYMMETRIZATIONS
from toy_pairs import SOURCE, TARGET

PAIRS = [("das haus", "the house"), ("das buch", "the book"), ("ein buch", "a book")]
NOTHING: dict[str, Any] = dict.fromkeys(KINDS, 0)


def train_plain_ibm1(pairs: list[tuple[str, str]], iterations: int, null: float) -> dict[tuple[str, str], float]:
    """Return p(target | source) after some iterations of IBM Model 1, written to be read."""
    sources = {word for source, _ in pairs for word in source.split()} | {""}
    targets = {word for _, target in pairs for word in target.split()}
    table = {(f, e): 1 / len(targets) for f in sources for e in targets}
    for _ in range(iterations):
        counts: dict[tuple[str, str], float] = defaultdict(float)
        totals: dict[str, float] = defaultdict(float)
        for source, target in pairs:
            words = source.split()
            for e in target.split():
                weights = {("", -1): null * table["", e]}
                weights |= {(f, i): (1 - null) / len(words) * table[f, e] for i, f in enumerate(words)}
                for (f, _), weight in weights.items():
                    counts[f, e] += weight / sum(weights.values())
                    totals[f] += weight / sum(weights.values())
        table = {(f, e): counts[f, e] / totals[f] for f, e in table}
    return table


def probability(aligner: Aligner, source: str, target: str) -> float:
    table, row, column = aligner.table, aligner.words[0][source], aligner.words[1][target]
    entries = range(table.starts[row], table.starts[row + 1])
    return sum(float(table.forward[entry]) for entry in entries if table.columns[entry] == column)


def test_model_1_on_three_pairs() -> None:
    settings = AlignerSettings(**{**NOTHING, "ibm1": 4}, agree=False, null=0.2)
    aligner = train_aligner([one for one, _ in PAIRS], [two for _, two in PAIRS], settings)
    for (source, target), expected in train_plain_ibm1(PAIRS, 4, 0.2).items():
        if source:
            assert probability(aligner, source, target) == pytest.approx(expected, rel=1e-5)
    assert probability(aligner, "das", "the") > 0.6


@pytest.mark.parametrize("kind", KINDS)
def test_likelihood_never_falls(kind: str) -> None:
    reports: list[IterationReport] = []
    train_aligner(
        SOURCE, TARGET, AlignerSettings(**{**NOTHING, "ibm1": 2, kind: 8}, agree=False), report=reports.append
    )
    found = [report.log_likelihood for report in reports if report.kind == kind]
    assert len(found) == 8
    assert all(later >= earlier - 1e-6 for earlier, later in pairwise(found))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("agree", [True, False])
def test_probabilities_sum_to_one(kind: str, agree: bool) -> None:
    aligner = train_aligner(SOURCE, TARGET, AlignerSettings(**{**NOTHING, "ibm1": 1, kind: 3}, agree=agree))
    table = aligner.table
    rows = np.repeat(np.arange(len(table.starts) - 1), np.diff(table.starts))
    np.testing.assert_allclose(np.bincount(rows, table.forward), 1.0, atol=1e-5)
    np.testing.assert_allclose(np.bincount(table.columns, table.backward), 1.0, atol=1e-5)
    assert table.null_target.sum() == pytest.approx(1.0)


def make_hmm(rng: np.random.Generator, O: int, S: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    jumps = rng.random(kernels.BUCKETS)
    return rng.random((O, S)), rng.random(O), jumps / jumps.sum()


def score_path(
    path: tuple[int, ...], emission: np.ndarray, null: np.ndarray, jumps: np.ndarray, p_null: float
) -> float:
    """Return the probability of a path; position 0 is before the sentence, and -1 means that a word comes from none."""
    S, last, total = emission.shape[1], 0, 1.0
    for o, state in enumerate(path):
        if state < 0:
            total *= p_null * null[o]
            continue
        reachable = [
            jumps[min(max(to - last, -kernels.WINDOW - 1), kernels.WINDOW + 1) + kernels.WINDOW + 1]
            for to in range(1, S + 1)
        ]
        total *= (1 - p_null) * emission[o, state] * reachable[state] / sum(reachable)
        last = state + 1
    return total


@pytest.mark.parametrize(("O", "S"), [(1, 1), (3, 2), (4, 3), (2, 12)])
def test_hmm_against_all_paths(O: int, S: int) -> None:
    """Posteriors, likelihood and best path are those of an enumeration; 12 positions need jumps beyond the window."""
    emission, null, jumps = make_hmm(np.random.default_rng(O * 100 + S), O, S)
    gamma, null_gamma = np.empty((O, S)), np.empty(O)
    counts = np.zeros((2, kernels.BUCKETS))
    size = max(O, S)
    tables, vectors = np.empty((3, size + 1, size + 2)), np.empty((6, size + 2 * kernels.WINDOW + 2))
    found = kernels.infer_hmm(emission, null, O, S, 0.2, jumps, gamma, null_gamma, counts, tables, vectors)
    paths = {path: score_path(path, emission, null, jumps, 0.2) for path in product(range(-1, S), repeat=O)}
    total = sum(paths.values())
    assert found == pytest.approx(math.log(total), rel=1e-9)
    for o in range(O):
        for s in range(S):
            expected = sum(value for path, value in paths.items() if path[o] == s) / total
            assert gamma[o, s] == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(gamma.sum(1) + null_gamma, 1.0)
    made = sum(value * sum(state >= 0 for state in path) for path, value in paths.items()) / total
    assert counts[0].sum() == pytest.approx(made)
    links = np.empty(O, np.int64)
    kernels.find_best_path(
        emission, null, O, S, 0.2, jumps, links, tables[0], np.empty((size, size + 1), np.int64), vectors
    )
    assert tuple(links) == max(paths, key=paths.__getitem__)


def test_agreement_finds_the_translations() -> None:
    aligner = train_aligner(SOURCE, TARGET)
    assert next(aligner.align(["der kleine hund schläft"], ["the small dog sleeps"])) == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
    ]


@pytest.mark.parametrize("method", ["agreement", *SYMMETRIZATIONS])
@pytest.mark.parametrize("kind", KINDS)
def test_every_model_aligns_any_pair(method: str, kind: str) -> None:
    """Unknown words, an empty side, and lines longer than those that it learned from."""
    settings = AlignerSettings(**{**NOTHING, "ibm1": 2, kind: 2}, symmetrize=method)
    aligner = train_aligner(SOURCE, TARGET, settings)
    pairs = [
        ("der hund", "the dog"),
        ("", "the dog"),
        ("der hund", ""),
        ("xx yy", "zz"),
        ("der hund " * 60, "the dog " * 60),
    ]
    found = list(aligner.align(*zip(*pairs, strict=True)))
    assert len(found) == len(pairs)
    assert found[1] == found[2] == []
    for (source, target), links in zip(pairs, found, strict=True):
        assert all(i < len(source.split()) and j < len(target.split()) for i, j in links)


def test_jumps_longer_than_any_training_sentence_are_rare() -> None:
    """Sentences of up to six words have no jumps by nine, whose expected counts are divided by zero."""
    for jumps in train_aligner(SOURCE, TARGET, AlignerSettings(agree=False)).positions.parameters:
        assert jumps[-1] == jumps[0] == jumps.min()
        assert jumps[kernels.WINDOW + 2] == jumps.max()  # a jump by one


@pytest.mark.parametrize("lengths", [(3, 5), (1000, 1000), (2500, 800), (3, 4001), (0, 5)])
def test_parts_of_long_pairs_cover_all_words(lengths: tuple[int, int]) -> None:
    parts = split_long_pair(*lengths)
    assert all(last - first <= MAX_LENGTH for part in parts for first, last in part)
    for side, length in enumerate(lengths):
        assert [n for part in parts for n in range(*part[side])] == list(range(length))


def test_saved_is_loaded(tmp_path: Path) -> None:
    aligner = train_aligner(SOURCE, TARGET)
    aligner.save(tmp_path)
    again = Aligner.load(tmp_path)
    assert list(again.align(SOURCE, TARGET)) == list(aligner.align(SOURCE, TARGET))
    (tmp_path / "aligner.json").write_text("{")
    with pytest.raises(UserError, match="has no alignment model"):
        Aligner.load(tmp_path)


def test_training_does_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    for threads in (1, 3):
        monkeypatch.setattr("dragoman.smt.alignment.usable_cores", lambda threads=threads: threads)
        trained.append(train_aligner(SOURCE, TARGET))
    for one, other in zip(*((*each.table, *each.positions) for each in trained), strict=True):
        np.testing.assert_array_equal(one, other)


def test_nothing_to_learn_from() -> None:
    with pytest.raises(UserError, match="no pair to train on"):
        train_aligner(["", "a b c"], ["x", "y"], AlignerSettings(max_length=2))
    with pytest.raises(UserError, match="grow-diag"):
        train_aligner(SOURCE, TARGET, AlignerSettings(symmetrize="grow-dia"))
