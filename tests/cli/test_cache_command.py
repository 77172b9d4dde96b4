"""Tests of `dragoman cache`: it lists and removes the files that Dragoman has written, and no others."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from dragoman.errors import UserError
from dragoman.io import cache_folder, lock_folder, remove_abandoned, temporary_beside, write_atomically
from toy_run import Call, assert_user_error, train_quietly


def shown(call: Call, folder: Path, *options: str) -> dict[str, dict[str, int]]:
    answer = call("cache", "--folder", folder, "--json", *options)
    assert answer.code == 0
    about = json.loads(answer.out)
    assert about["folder"] == str(folder)
    kinds: dict[str, dict[str, int]] = about["kinds"]
    return kinds


def test_cache_of_training_is_listed_and_removed(small: Path, call: Call) -> None:
    train_quietly(small, small.parent / "run", "train.steps=1")
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
    train_quietly(small, small.parent / "again", "train.steps=1")


def test_other_files_are_not_removed(tmp_path: Path, call: Call) -> None:
    """Files with other names and targets of symbolic links are kept."""
    folder, outside = tmp_path / "cache", tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / ("0" * 24)).symlink_to(outside)
    assert shown(call, folder, "--clear")["token ids"]["entries"] == 1
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert (outside / "mine").read_text() == "mine"


def test_missing_cache_is_empty(tmp_path: Path, call: Call) -> None:
    assert shown(call, tmp_path / "none", "--clear") == {}
    assert_user_error(call("cache", "extra"), "extra")


def test_cache_entries_in_use_are_not_removed(tmp_path: Path, call: Call) -> None:
    answers = tmp_path / f"{'0' * 24}-answers"
    with temporary_beside(tmp_path / ("1" * 24)) as made, lock_folder(answers, "locked"):
        made.mkdir()
        answer = call("cache", "--folder", tmp_path, "--clear", "--json")
        about = json.loads(answer.out)
        assert about["kinds"] == {}
        assert sorted(about["in_use"]) == sorted([answers.name, made.parent.name])
        assert made.is_dir()
        assert answers.is_dir()
        assert "not removed" in answer.err
    assert shown(call, tmp_path, "--clear")["answers of a teacher"]["entries"] == 1


@pytest.mark.parametrize("name", ["replaced", "incomplete", "old", "run"])
def test_replaced_folder_is_restored_if_the_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, rename = tmp_path / name, os.rename

    def write(text: str) -> None:
        write_atomically(folder, lambda made: (made.mkdir(), (made / "text").write_text(text)))

    def failing(source: Path, target: Path) -> None:
        if target == folder and source.parent.name.endswith(".dragoman.tmp"):
            raise OSError(errno.EIO, "it fails")
        rename(source, target)

    write("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        with pytest.raises(UserError, match="it fails"):
            write("new")
    assert (folder / "text").read_text() == "old"
    write("new")
    assert (folder / "text").read_text() == "new"
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(("days", "left"), [(0, 1), (2, 0)])
def test_age_decides_on_a_disk_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, left: int
) -> None:
    def flock(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, f"no locks for {handle}, {operation}")

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = tmp_path / ".run.abcdefgh.dragoman.tmp"
    folder.mkdir()
    then = time.time() - days * 86_400
    os.utime(folder, (then, then))
    remove_abandoned(tmp_path, age=0.0)
    assert len(list(tmp_path.iterdir())) == left


def test_cache_is_in_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "dragoman"
    assert cache_folder(str(tmp_path / "own")) == tmp_path / "own"
    for ignored in ("", "relative"):  # the specification wants an absolute path
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == tmp_path / "home" / ".cache" / "dragoman"
