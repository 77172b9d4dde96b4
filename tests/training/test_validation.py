"""Tests of validation: which result is better, how it is saved, and the choice of the best model by any metric."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from dragoman.config.settings import TrainSettings
from dragoman.inference.model_card import rank_validation
from dragoman.metrics.metrics import METRICS
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder
from dragoman.training.checkpoint import TrainState
from dragoman.training.execution import ExecutionPlan
from dragoman.training.validation import Validation
from toy_run import Call, make_sentences, read_run_events, train_quietly, translate_toy, write_lines

READ = TypeAdapter(Validation).validate_python  # as part of state.json


@pytest.mark.parametrize("name", METRICS)
def test_higher_goodness_is_better_for_every_metric(name: str) -> None:
    low, high = Validation(9.0, 20.0, name), Validation(1.0, 30.0, name)
    best, worst = (high, low) if METRICS[name].higher_is_better else (low, high)
    assert best.goodness(name) > worst.goodness(name)
    assert high.goodness("loss") > low.goodness("loss")
    assert Validation(1.0, 20.0, name).goodness(name) > Validation(2.0, 20.0, name).goodness(name)


@pytest.mark.parametrize("metric", ["loss", "auto"])
def test_nan_is_the_worst_validation(metric: str) -> None:
    assert Validation(math.nan).goodness(metric) < Validation(1e9).goodness(metric)


def test_only_sequences_have_a_perplexity() -> None:
    """A classifier predicts one label."""
    for metric in ("accuracy", "wer", "bleu"):
        one = Validation(1.5, 20.0, metric, "how")
        assert "perplexity 4.48" in one.describe("translate")
        assert "perplexity" not in one.describe("classify")


@pytest.mark.parametrize(
    "one", [Validation(1.5), Validation(1.5, 20.0, "wer", "how"), Validation(0.7, metric="loss", bits=1.0)]
)
def test_validation_is_saved_and_loaded_unchanged(one: Validation) -> None:
    assert READ(json.loads(json.dumps(asdict(one)))) == one
    assert one.to_metrics()["loss"] == one.loss
    assert str(round(one.loss, 4)) in str(one)


@pytest.mark.parametrize("tag", ["", "one for all"])
def test_every_dev_corpus_is_translated(small: Path, tmp_path: Path, tag: str) -> None:
    """Each corpus gives as many lines, if it has them, and has the same score as when it is translated alone."""
    corpora = {}
    for name, count, seed in (("long", 20, 7), ("short", 3, 8)):
        source = write_lines(tmp_path / f"{name}.src", make_sentences(count, seed))
        target = write_lines(tmp_path / f"{name}.trg", map(translate_toy, make_sentences(count, seed)))
        corpora[name] = f"{{source: {source}, target: {target}, tag: '{tag}'}}"

    def judged(lines: int, *names: str) -> dict[str, Any]:
        asked: tuple[str, ...] = (
            f"data.dev=[{', '.join(corpora[name] for name in names)}]",
            f"train.validate_lines={lines}",
        )
        asked = (*asked, f"data.train.tag={tag}") if tag else asked
        run = train_quietly(small, tmp_path / "-".join(names), *asked, "train.steps=6", "train.metric=chrf")
        [event] = [event for event in read_run_events(run) if event["event"] == "validate"]
        return event

    both, other_way = judged(11, "long", "short"), judged(11, "short", "long")
    assert both["chrf"] == other_way["chrf"]
    for name, lines in (("long", 8), ("short", 3)):
        [score] = [score for shown, score in both["chrf_by_corpus"].items() if name in shown]
        assert score == judged(lines, name)["chrf"]


def test_all_references_are_used(small: Path, tmp_path: Path, call: Call) -> None:
    lines = make_sentences(6, 9)
    rows = ({"source": line.split(), "target": ["x", translate_toy(line)]} for line in lines)
    dev = write_lines(tmp_path / "dev.jsonl", map(json.dumps, rows))
    corpora = [f"data.{split}={{jsonl: {dev}}}" for split in ("train", "dev")]
    answer = call("train", small, "--out", tmp_path / "run", *corpora, "train.steps=6", "train.metric=chrf")
    [event] = [event for event in read_run_events(tmp_path / "run") if event["event"] == "validate"]
    assert event["signature"].startswith("nrefs:2|")
    assert "train: 6 further targets are left out; only the first of a pair is learned" in answer.err
    assert "dev: 6 further" not in answer.err


def test_validation_of_format_1_is_read() -> None:
    assert READ({"loss": 1.0, "bleu": 2.0, "signature": "s"}) == Validation(1.0, 2.0, "bleu", "s")
    assert READ({"loss": 1.0, "bleu": None, "signature": ""}) == Validation(1.0)


@pytest.mark.parametrize("metric", ["wer", "exact", "loss", "auto"])
def test_best_model_is_chosen_by_the_metric(small: Path, tmp_path: Path, metric: str) -> None:
    run = train_quietly(small, tmp_path / "run", f"train.metric={metric}", "train.validate_every=3", "train.steps=12")
    name = {"loss": "bleu", "auto": "bleu"}.get(metric, metric)
    found = {event["step"]: event for event in read_run_events(run) if event["event"] == "validate"}
    assert len(found) == 4
    assert all(event[name] is not None and event["signature"] for event in found.values())

    def worth(step: int) -> tuple[float, float]:
        event, floor = found[step], METRICS[name].floor if metric == "auto" else -math.inf
        score = -event["loss"] if metric == "loss" else METRICS[name].goodness(event[name])
        return max(score, floor), -event["loss"]

    best = [step for _, step in RunFolder(run).load_state()["best"]]
    assert best[0] == max(found, key=worth)


@pytest.mark.parametrize(
    ("name", "early", "late", "best"),
    [
        ("bleu", (0.57, 6.42), (0.31, 6.20), "late"),  # both have hardly learned: by the loss
        ("bleu", (0.57, 6.42), (1.2, 6.9), "late"),  # a score that says something is ahead of one that does not
        ("bleu", (1.5, 6.42), (1.2, 6.20), "early"),  # from there on by the score
        ("wer", (104.0, 3.0), (130.0, 2.0), "late"),
        ("wer", (90.0, 3.0), (95.0, 2.0), "early"),
    ],
)
def test_loss_decides_while_scores_are_near_zero(
    name: str, early: tuple[float, float], late: tuple[float, float], best: str
) -> None:
    """This holds only for train.metric=auto. The model card ranks validations in the same way."""
    found = [Validation(loss, score, name) for score, loss in (early, late)]
    by_score = max(found, key=lambda one: one.goodness(name))
    for metric, expected in (("auto", found[best == "late"]), (name, by_score)):
        progress = TrainState(ExecutionPlan("cpu", "float32", False, 1), {})
        for step, validation in enumerate(found):
            progress = replace(progress, step=step).add_validation(validation, metric, 2)
        assert found[progress.best[0].step] is expected
        recipe = Recipe(train=TrainSettings(metric=metric))
        assert max(found, key=lambda one: rank_validation(one.to_metrics(), recipe)) is expected


def test_auto_is_the_first_metric_of_the_recipe(small: Path, tmp_path: Path) -> None:
    """A run that is resumed with other metrics keeps it."""
    run = train_quietly(small, tmp_path / "run", "data.metrics=[chrf, bleu]", "train.steps=6")
    train_quietly(small, run, "data.metrics=[bleu]", "train.steps=12", resume=True)
    validated = [event for event in read_run_events(run) if event["event"] == "validate"]
    assert len(validated) == 2
    assert all("chrf" in event and "bleu" not in event for event in validated)
