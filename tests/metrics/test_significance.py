"""Tests of confidence intervals and significance tests: equal to those of sacreBLEU."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.significance import PairedTest

from dragoman.metrics import significance
from dragoman.metrics.metrics import METRICS
from dragoman.metrics.significance import (
    Counts,
    bootstrap_scores,
    compare_with_first,
    compute_interval,
    compute_p_value,
    run_randomisation_test,
    split_into_chunks,
)
from toy_run import make_sentences, translate_toy

NAMES = ("bleu", "chrf", "ter")
REFERENCE = [translate_toy(line) for line in make_sentences(120, seed=3, longest=9)]


def corrupt(fraction: float, seed: int) -> list[str]:
    """Return the reference with this fraction of the words replaced at random."""
    random = Random(seed)
    words = sorted({word for line in REFERENCE for word in line.split()})
    return [
        " ".join(random.choice(words) if random.random() < fraction else word for word in line.split())
        for line in REFERENCE
    ]


def count_metrics(lines: list[str], names: tuple[str, ...] = NAMES, times: int = 1) -> Counts:
    return {name: METRICS[name].check_and_count(lines * times, [REFERENCE * times]) for name in names}


@pytest.fixture(scope="module")
def pair() -> tuple[Counts, Counts]:
    return count_metrics(corrupt(0.3, 1)), count_metrics(corrupt(0.3, 4))


LINES = st.lists(st.text("ab c.", max_size=12), min_size=3, max_size=3)


@pytest.mark.parametrize("name", METRICS)
@given(found=LINES, wanted=LINES)
@hypothesis_settings(max_examples=60)
def test_scores_are_functions_of_summed_counts(name: str, found: list[str], wanted: list[str]) -> None:
    """`compute_scores` on summed counts gives the score of all lines, and on single counts that of each line."""
    metric = METRICS[name]
    whole = metric.check_and_count(found, [wanted])
    alone = [metric.check_and_count([line], [[right]]) for line, right in zip(found, wanted, strict=True)]
    np.testing.assert_array_equal(whole.count_NK, np.concatenate([one.count_NK for one in alone]))
    sums_TK = np.stack([whole.count_NK.sum(0), *whole.count_NK])
    np.testing.assert_allclose(metric.compute_scores(sums_TK), [whole.value, *(one.value for one in alone)], atol=1e-9)


@given(found=LINES, wanted=LINES)
def test_components_of_bleu_equal_sacrebleu(found: list[str], wanted: list[str]) -> None:
    """Also for empty lines and without any match."""
    metric = METRICS["bleu"]
    assert metric.decompose is not None
    parts = metric.decompose(metric.check_and_count(found, [wanted]).count_NK.sum(0))
    right = BLEU(force=True).corpus_score(found, [wanted])
    assert parts["precisions"] == right.precisions
    assert parts["brevity_penalty"] == right.bp
    assert (parts["hypothesis_length"], parts["reference_length"]) == (right.sys_len, right.ref_len)


def test_p_values_equal_sacrebleu(pair: tuple[Counts, Counts]) -> None:
    """The bootstrap is exactly equal, since the samples are the same; randomisation is equal within sampling error.

    sacreBLEU does not count trials that equal the observed difference. TER counts edits, so such ties are frequent.
    """
    first, second = pair
    found = compare_with_first(first, second, bootstrap_scores(first), bootstrap_scores(second))
    systems: list[tuple[str, Sequence[str]]] = [("first", corrupt(0.3, 1)), ("second", corrupt(0.3, 4))]
    sacrebleu_metrics = {
        name: metric(references=[REFERENCE]) for name, metric in (("bleu", BLEU), ("chrf", CHRF), ("ter", TER))
    }
    _, bootstrap = PairedTest(systems, sacrebleu_metrics, None, test_type="bs")()
    _, randomisation = PairedTest(systems, sacrebleu_metrics, None, test_type="ar")()
    for name, shown, error in (("bleu", "BLEU", 0.02), ("chrf", "chrF2", 0.02), ("ter", "TER", 0.06)):
        assert found[name].p_bootstrap == pytest.approx(bootstrap[shown][1].p_value, abs=1e-9)
        assert found[name].p_randomisation == pytest.approx(randomisation[shown][1].p_value, abs=error)
        assert 0.01 < found[name].p_bootstrap < found[name].p_randomisation < 0.5


@pytest.mark.parametrize("name", METRICS)
def test_system_compared_with_itself(name: str) -> None:
    """The difference is 0, p is 1, and the interval contains the score."""
    one = count_metrics(corrupt(0.3, 1), (name,))
    values = bootstrap_scores(one, trials=400)
    [found] = compare_with_first(one, one, values, values).values()
    assert found == (0, 1, 1)
    assert not found.significant
    low, high = compute_interval(values[name])
    assert low <= one[name].value <= high


def test_order_of_systems_changes_only_the_sign(pair: tuple[Counts, Counts]) -> None:
    first, second = pair
    one, other = bootstrap_scores(first), bootstrap_scores(second)
    forth, back = compare_with_first(first, second, one, other), compare_with_first(second, first, other, one)
    for name in NAMES:
        assert forth[name].difference == -back[name].difference != 0
        assert forth[name].p_bootstrap == back[name].p_bootstrap
        assert forth[name].p_randomisation == pytest.approx(back[name].p_randomisation, abs=1e-12)


def test_more_lines_reduce_uncertainty() -> None:
    """Four times the lines halve the interval; nine times the lines make a difference significant."""
    few, many = (count_metrics(corrupt(0.3, 1), times=times) for times in (1, 4))
    for name in NAMES:
        wide, narrow = (np.ptp(compute_interval(bootstrap_scores(one)[name])) for one in (few, many))
        assert narrow == pytest.approx(wide / 2, rel=0.15)
    close = [count_metrics(corrupt(0.3, seed), times=times) for times in (1, 9) for seed in (1, 2)]
    unsure, sure = (run_randomisation_test(*two, trials=1000)["bleu"] for two in (close[:2], close[2:]))
    assert unsure > 0.05 > sure


def test_equal_systems_are_rarely_significant() -> None:
    """For equally good systems, p is below 0.1 in about one of ten comparisons."""
    lines = 60
    rng = np.random.default_rng(0)

    def system() -> Counts:
        right = ["a" if good else "b" for good in rng.random(lines) < 0.6]
        return {"exact": METRICS["exact"].check_and_count(right, [["a"] * lines])}

    found = [run_randomisation_test(system(), system(), trials=300)["exact"] for _ in range(300)]
    assert 0.04 < np.mean(np.array(found) <= 0.1) < 0.13


def test_samples_depend_only_on_the_seed(monkeypatch: pytest.MonkeyPatch, pair: tuple[Counts, Counts]) -> None:
    first, second = pair
    values = bootstrap_scores(first, trials=50)
    assert values["bleu"].tolist() == bootstrap_scores(first, trials=50)["bleu"].tolist()
    assert values["ter"].tolist() == bootstrap_scores({"ter": first["ter"]}, trials=50)["ter"].tolist()
    assert run_randomisation_test(first, second, trials=200) == run_randomisation_test(first, second, trials=200)
    monkeypatch.setattr(significance, "SEED", 2)
    assert values["bleu"].tolist() != bootstrap_scores(first, trials=50)["bleu"].tolist()


def test_results_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch, pair: tuple[Counts, Counts]) -> None:
    assert sum(split_into_chunks(103, 10)) == 103
    whole, p_whole = bootstrap_scores(pair[0], trials=103), run_randomisation_test(*pair, trials=103)
    monkeypatch.setattr(significance, "MAX_RANDOM_NUMBERS", 10 * len(REFERENCE))
    in_chunks = bootstrap_scores(pair[0], trials=103)
    for name in NAMES:
        np.testing.assert_allclose(in_chunks[name], whole[name])
    progress: list[int] = []
    assert run_randomisation_test(*pair, trials=103, on_progress=progress.append) == p_whole
    assert progress == [*range(10, 101, 10), 103]


def test_only_common_metrics_are_compared(pair: tuple[Counts, Counts]) -> None:
    first, second = {"bleu": pair[0]["bleu"]}, {name: pair[1][name] for name in ("bleu", "ter")}
    assert set(compare_with_first(first, second, bootstrap_scores(first), bootstrap_scores(second))) == {"bleu"}
    assert compare_with_first(first, {"ter": pair[1]["ter"]}, bootstrap_scores(first), bootstrap_scores(second)) == {}


def test_p_value_counts_the_observation() -> None:
    assert compute_p_value(np.zeros(99), 5.0) == pytest.approx(1 / 100)
    assert compute_p_value(np.full(99, 5.0), 5.0) == 1
