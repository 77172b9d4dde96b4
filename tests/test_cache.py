"""`dragoman cache` shows and removes what Dragoman made, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from toy_run import Call, one_sentence, quietly

pytest_plugins = ["toy_fixtures"]


def shown(call: Call, folder: Path, *options: str) -> dict[str, dict[str, int]]:
    answer = call("cache", "--folder", folder, "--json", *options)
    assert answer.code == 0
    about = json.loads(answer.out)
    assert about["folder"] == str(folder)
    kinds: dict[str, dict[str, int]] = about["kinds"]
    return kinds


def test_what_training_keeps_is_shown_and_removed(small: Path, call: Call) -> None:
    quietly(small, small.parent / "run", "train.steps=1")
    folder = small.parent / "cache"
    kinds = shown(call, folder)
    assert kinds["token ids"]["entries"] == 2
    assert kinds["tokenizer"]["entries"] == 1
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert sum(kind["bytes"] for kind in kinds.values()) == size
    assert call("cache", "--folder", folder).out.startswith(f"{folder}\n")
    assert any(folder.iterdir())
    assert shown(call, folder, "--clear") == kinds
    assert list(folder.iterdir()) == []
    quietly(small, small.parent / "again", "train.steps=1")


def test_nothing_else_is_removed(tmp_path: Path, call: Call) -> None:
    """Neither what has another name, nor what a link leads to."""
    folder, outside = tmp_path / "cache", tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / ("0" * 24)).symlink_to(outside)
    assert shown(call, folder, "--clear")["token ids"]["entries"] == 1
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert (outside / "mine").read_text() == "mine"


def test_a_cache_that_is_not_there_is_empty(tmp_path: Path, call: Call) -> None:
    assert shown(call, tmp_path / "none", "--clear") == {}
    one_sentence(call("cache", "extra"), "extra")
