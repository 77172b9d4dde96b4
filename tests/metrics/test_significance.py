"""Intervals and tests of differences: those of sacreBLEU, quicker, and true to what they claim."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as trying
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


def spoilt(share: float, seed: int) -> list[str]:
    """The reference with so many of its words changed."""
    random = Random(seed)
    words = sorted({word for line in REFERENCE for word in line.split()})
    return [
        " ".join(random.choice(words) if random.random() < share else word for word in line.split())
        for line in REFERENCE
    ]


def counted(lines: list[str], names: tuple[str, ...] = NAMES, times: int = 1) -> Counts:
    return {name: METRICS[name].check_and_count(lines * times, [REFERENCE * times]) for name in names}


@pytest.fixture(scope="module")
def pair() -> tuple[Counts, Counts]:
    return counted(spoilt(0.3, 1)), counted(spoilt(0.3, 4))


LINES = st.lists(st.text("ab c.", max_size=12), min_size=3, max_size=3)


@pytest.mark.parametrize("name", METRICS)
@given(found=LINES, wanted=LINES)
@trying(max_examples=60)
def test_scores_of_sums_are_the_scores(name: str, found: list[str], wanted: list[str]) -> None:
    """What a metric says of lines is a function of the sums of what it counts in each; the fast twin says the same."""
    metric = METRICS[name]
    whole = metric.check_and_count(found, [wanted])
    alone = [metric.check_and_count([line], [[right]]) for line, right in zip(found, wanted, strict=True)]
    np.testing.assert_array_equal(whole.line_NK, np.concatenate([one.line_NK for one in alone]))
    sums_TK = np.stack([whole.line_NK.sum(0), *whole.line_NK])
    np.testing.assert_allclose(metric.compute_scores(sums_TK), [whole.value, *(one.value for one in alone)], atol=1e-9)


@given(found=LINES, wanted=LINES)
def test_parts_of_bleu_are_those_of_sacrebleu(found: list[str], wanted: list[str]) -> None:
    """Whatever is missing: lines, words or matches."""
    metric = METRICS["bleu"]
    assert metric.decompose is not None
    parts = metric.decompose(metric.check_and_count(found, [wanted]).line_NK.sum(0))
    right = BLEU(force=True).corpus_score(found, [wanted])
    assert parts["precisions"] == right.precisions
    assert parts["brevity_penalty"] == right.bp
    assert (parts["hypothesis_length"], parts["reference_length"]) == (right.sys_len, right.ref_len)


def test_p_values_are_those_of_sacrebleu(pair: tuple[Counts, Counts]) -> None:
    """The bootstrap to the last digit, for the draws are the same; randomisation within the error of its coins.

    sacreBLEU leaves out trials that equal the real difference. TER counts whole edits, so that there are many of them.
    """
    first, second = pair
    found = compare_with_first(first, second, bootstrap_scores(first), bootstrap_scores(second))
    systems: list[tuple[str, Sequence[str]]] = [("first", spoilt(0.3, 1)), ("second", spoilt(0.3, 4))]
    theirs = {name: metric(references=[REFERENCE]) for name, metric in (("bleu", BLEU), ("chrf", CHRF), ("ter", TER))}
    _, bootstrap = PairedTest(systems, theirs, None, test_type="bs")()
    _, randomisation = PairedTest(systems, theirs, None, test_type="ar")()
    for name, shown, error in (("bleu", "BLEU", 0.02), ("chrf", "chrF2", 0.02), ("ter", "TER", 0.06)):
        assert found[name].p_bootstrap == pytest.approx(bootstrap[shown][1].p_value, abs=1e-9)
        assert found[name].p_randomisation == pytest.approx(randomisation[shown][1].p_value, abs=error)
        assert 0.01 < found[name].p_bootstrap < found[name].p_randomisation < 0.5


@pytest.mark.parametrize("name", METRICS)
def test_a_system_against_itself(name: str) -> None:
    """Nothing is the same as nothing: p is 1, and the interval holds the score."""
    one = counted(spoilt(0.3, 1), (name,))
    values = bootstrap_scores(one, trials=400)
    [found] = compare_with_first(one, one, values, values).values()
    assert found == (0, 1, 1)
    assert not found.significant
    low, high = compute_interval(values[name])
    assert low <= one[name].value <= high


def test_who_comes_first_turns_the_sign_alone(pair: tuple[Counts, Counts]) -> None:
    first, second = pair
    one, other = bootstrap_scores(first), bootstrap_scores(second)
    forth, back = compare_with_first(first, second, one, other), compare_with_first(second, first, other, one)
    for name in NAMES:
        assert forth[name].difference == -back[name].difference != 0
        assert forth[name].p_bootstrap == back[name].p_bootstrap
        assert forth[name].p_randomisation == pytest.approx(back[name].p_randomisation, abs=1e-12)


def test_more_lines_make_surer() -> None:
    """Four times the lines: half the interval, and a difference that is no longer chance."""
    few, many = (counted(spoilt(0.3, 1), times=times) for times in (1, 4))
    for name in NAMES:
        wide, narrow = (np.ptp(compute_interval(bootstrap_scores(one)[name])) for one in (few, many))
        assert narrow == pytest.approx(wide / 2, rel=0.15)
    close = [counted(spoilt(0.3, seed), times=times) for times in (1, 9) for seed in (1, 2)]
    unsure, sure = (run_randomisation_test(*two, trials=1000)["bleu"] for two in (close[:2], close[2:]))
    assert unsure > 0.05 > sure


def test_chance_is_rarely_called_significant() -> None:
    """Systems that are equally good: p below 0.1 comes up about one time in ten."""
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
    assert run_randomisation_test(*pair, trials=103, tick=progress.append) == p_whole
    assert progress == [*range(10, 101, 10), 103]


def test_metrics_that_only_one_has_are_not_compared(pair: tuple[Counts, Counts]) -> None:
    first, second = {"bleu": pair[0]["bleu"]}, {name: pair[1][name] for name in ("bleu", "ter")}
    assert set(compare_with_first(first, second, bootstrap_scores(first), bootstrap_scores(second))) == {"bleu"}
    assert compare_with_first(first, {"ter": pair[1]["ter"]}, bootstrap_scores(first), bootstrap_scores(second)) == {}


def test_p_counts_the_real_one_too() -> None:
    assert compute_p_value(np.zeros(99), 5.0) == pytest.approx(1 / 100)
    assert compute_p_value(np.full(99, 5.0), 5.0) == 1
