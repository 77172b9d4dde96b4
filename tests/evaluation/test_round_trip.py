"""Round trips: scores are those of the metrics, and lines that lose most come first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dragoman.evaluation.round_trip import WORST_LINES, score_round_trip
from dragoman.metrics.metrics import METRICS
from dragoman.phrasebook.generate import generate_pairs
from toy_run import Call, Toy, assert_user_error, pairs, write_lines

PAIRS = list(generate_pairs("test", 50))
SOURCES, TARGETS = [pair.source for pair in PAIRS], [pair.target for pair in PAIRS]


def test_what_comes_back_unchanged_is_perfect() -> None:
    result = score_round_trip(SOURCES, TARGETS, SOURCES)
    assert [result[name]["value"] for name in ("chrf", "bleu")] == pytest.approx([100, 100])
    assert (result["lines"], result["copies"]) == (50, 0)
    assert score_round_trip(SOURCES, SOURCES, SOURCES)["copies"] == 50


def test_lines_that_lose_most_come_first() -> None:
    """The more words are lost on the way, the lower are the scores."""
    values = []
    for lost in range(4):
        returned = [" ".join(line.split()[:-lost]) if lost and n % 2 else line for n, line in enumerate(SOURCES)]
        result = score_round_trip(SOURCES, TARGETS, returned)
        values.append(result["chrf"]["value"])
        worst = result["worst"]
        assert len(worst) == WORST_LINES
        assert [line["chrf"] for line in worst] == sorted(line["chrf"] for line in worst)
        for line in worst:
            n = line["number"] - 1
            assert (line["source"], line["translation"], line["back"]) == (SOURCES[n], TARGETS[n], returned[n])
            assert line["chrf"] == pytest.approx(METRICS["chrf"]([returned[n]], [[SOURCES[n]]]).value)
            assert n % 2 or not lost
    assert values == sorted(values, reverse=True)
    assert values[0] > values[1]


def test_on_the_command_line(toy: Toy, tmp_path: Path, call: Call) -> None:
    sources = [pair.source for pair in pairs(12, seed=5)]
    file = write_lines(tmp_path / "sources", sources)
    way = ("evaluate", toy.run, "--source", file, "--round-trip", toy.run, "--device", "cpu")
    found = json.loads(call(*way, "--json").out)
    there = [hypothesis.text for hypothesis in toy.translator.translate(sources)]
    back = [hypothesis.text for hypothesis in toy.translator.translate(there)]
    assert (found["run"], found["back"], found["lines"]) == (str(toy.run), str(toy.run), 12)
    for name in ("chrf", "bleu"):
        assert found[name]["value"] == pytest.approx(METRICS[name].compute(back, [sources]).value)
    text = call(*way).out
    assert f"{found['chrf']['value']:.2f}" in text
    assert found["worst"][0]["back"] in text
    for option in ("--reference", "--hypotheses", "--conllu", "--page"):
        assert_user_error(call(*way, option, file), f"--round-trip cannot be combined with {option}; leave one")
    assert_user_error(call(*way, "--breakdown"), "--round-trip cannot be combined with --breakdown")
    assert_user_error(call("evaluate", "--source", file, "--round-trip", toy.run), "--round-trip needs RUN")
    assert_user_error(call(*way[:-3], tmp_path / "none"), tmp_path / "none")
