"""Tests of `dragoman demo`: a fixed number of steps, example sentences, and report.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dragoman.cli import demo
from dragoman.recipe import find_recipes_folder, read_recipe
from toy_run import Call

TINY = ["data.train={phrasebook: 300}", "tokenizer.size=400", "train.steps=4", "model.width=32", "train.threads=1"]


def test_quality_does_not_depend_on_the_clock() -> None:
    folder = find_recipes_folder()
    assert folder
    settings = read_recipe(folder / demo.RECIPE).train
    assert settings.steps > 0
    assert not settings.minutes
    assert not settings.patience


@pytest.mark.parametrize("direction", ["en-de", "de-en"])
def test_each_sentence_shows_another_phenomenon(direction: str) -> None:
    chosen = demo.choose_phrases(direction)
    assert set(chosen) <= set(demo.PHENOMENA)
    assert len({phrase.source for phrase in chosen.values()}) == len(chosen) >= 4
    assert all(point in {one.name for one in phrase.phenomena} for point, phrase in chosen.items())


def test_report_is_written_once(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TEST_SENTENCES", 5)
    out = tmp_path / "run"
    first = call("demo", "--out", out, *TINY)
    assert first.code == 0, first.err
    assert "for 4 steps" in first.out
    report = json.loads((out / "report.json").read_text())
    assert set(report) >= {"bleu", "chrf", "train_seconds", "parameters"}
    assert set(report["bleu"]) == set(report["chrf"]) == {"test", "unseen"}
    written = (out / "report.json").stat().st_mtime_ns
    again = call("demo", "--out", out)
    assert again.code == 0
    assert "trained before" in again.out
    assert (out / "report.json").stat().st_mtime_ns == written
    assert call("demo", "--out", out, "train.steps=5").code == 2
