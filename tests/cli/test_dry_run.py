"""Tests of `train --dry-run`: it prints the same numbers as training, and writes nothing."""

from __future__ import annotations

import re
from pathlib import Path

from dragoman.training.trainer import dry_run
from toy_run import Call, assert_user_error, train_quietly


def everything(folder: Path) -> list[tuple[Path, int]]:
    return sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*") if "home" not in path.parts)


def test_nothing_is_written(small: Path, call: Call) -> None:
    before = everything(small.parent)
    answer = call("train", small, "-o", small.parent / "run", "--dry-run")
    assert answer.code == 0
    assert everything(small.parent) == before
    assert re.search(r"^model +transformer, [\d,]+ parameters$", answer.out, re.MULTILINE)
    assert re.search(r"^train +200 examples, [\d,]+ tokens$", answer.out, re.MULTILINE)
    assert "until 24 steps" in answer.out


def test_dry_run_prints_the_numbers_of_training(small: Path, call: Call) -> None:
    found = dry_run(small, out=small.parent / "run")
    output = call("train", small, "-o", small.parent / "run").err
    assert f"{found['parameters']:,} parameters" in output
    assert f"train: {found['train_examples']:,} pairs" in output
    assert f"dev: {found['dev_examples']:,} pairs" in output
    assert f"{found['execution']}; until {found['until']}" in output


def test_dry_run_refuses_what_training_refuses(small: Path, call: Call) -> None:
    train_quietly(small, run := small.parent / "run", "train.steps=1")
    assert_user_error(call("train", small, "-o", run, "--dry-run"), "already holds a run")
    assert_user_error(call("train", small, "-o", small.parent / "new", "model.heads=3", "--dry-run"), "heads")
    assert_user_error(call("train", small, "-o", run, "--dry-run", "--resume"), "--resume")
    wide = call("train", small, "-o", small.parent / "new", "tokenizer.size=50000", "--dry-run")
    assert_user_error(wide, "tokenizer.size 50000", working=True)


def test_dry_run_uses_the_settings_of_the_parent_run(small: Path, call: Call) -> None:
    train_quietly(small, run := small.parent / "run", "train.steps=1")
    assert dry_run(small, out=small.parent / "new", init_from=run)["vocabulary"]
    answer = call("train", small, "-o", small.parent / "new", "--init-from", run, "model.width=32", "--dry-run")
    assert_user_error(answer, "does not fit", working=True)
