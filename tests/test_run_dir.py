"""A run folder: whole files or none, and damage anywhere is noticed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dragoman import io
from dragoman.config.settings import TrainSettings, parse_yaml
from dragoman.data.corpus import DataSettings
from dragoman.errors import UserError
from dragoman.io import HEADER_KEY, write_atomically, write_text
from dragoman.recipe import Recipe
from dragoman.run_dir import (
    CHANGED,
    DIGEST_LINE,
    FORMAT,
    RunFolder,
    average_weights,
    load_tensors,
    read_json,
    save_tensors,
)
from toy_run import files

RECIPE = Recipe(
    data=DataSettings(direction="de-en"), train=TrainSettings(steps=77, lr=1e-5, freeze=("1e5", "ü # digest: x"))
)


def weights() -> dict[str, Tensor]:
    return {
        "matrix": torch.randn(3, 5),
        "half": torch.randn(4, dtype=torch.bfloat16),
        "double": torch.randn(2, 2, dtype=torch.float64),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "nothing": torch.zeros(0, 3),
    }


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create(RECIPE)
    folder.save_model(weights(), tokenizer="abc", longest="30")
    return folder


def complaint(action: object, *args: object) -> str:
    with pytest.raises(UserError) as caught:
        action(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Crash(Exception):
    pass


@pytest.mark.parametrize("error", [Crash(), OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def write(beside: Path) -> None:
        beside.write_text("half of the new")
        raise error

    with pytest.raises(UserError if isinstance(error, OSError) else type(error)) as caught:
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["file"]
    if isinstance(error, OSError):
        assert repr(str(path)) in str(caught.value)
        assert "No space left on device" in str(caught.value)


def test_the_new_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def write(beside: Path) -> None:
        for part in ("half ", "and half"):
            with beside.open("a") as file:
                file.write(part)
            assert path.read_text() == "old"

    write_atomically(path, write)
    assert path.read_text() == "half and half"
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == ["file"]


def test_who_reads_the_old_file_goes_on_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old" * 10_000)
    with path.open() as reader:
        begun = reader.read(5)
        write_text(path, "new")
        assert begun + reader.read() == "old" * 10_000
    assert path.read_text() == "new"


def test_a_folder_appears_whole_and_takes_the_place_of_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "folder"

    def write(*names: str) -> None:
        def fill(beside: Path) -> None:
            beside.mkdir()
            for name in names:
                (beside / name).write_text(name)

        write_atomically(path, fill)

    write("a", "b")
    write("c")
    assert [file.name for file in path.iterdir()] == ["c"]
    assert files(tmp_path) == ["folder"]


def test_files_of_the_user_are_not_used_as_temporaries(tmp_path: Path) -> None:
    """Browsers and downloaders call unfinished files NAME.part."""
    (tmp_path / "folder.part").mkdir()
    (tmp_path / "folder.part" / "thesis").write_text("precious")
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "file.part").symlink_to("victim")
    write_atomically(tmp_path / "folder", lambda made: made.mkdir())
    write_text(tmp_path / "file", "text")
    assert (tmp_path / "folder.part" / "thesis").read_text() == (tmp_path / "victim").read_text() == "precious"
    assert files(tmp_path) == ["file", "file.part", "folder", "folder.part", "victim"]


def test_a_name_as_long_as_the_disk_allows(tmp_path: Path) -> None:
    name = "ä" * 127
    write_text(tmp_path / name, "text")
    assert files(tmp_path) == [name]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "file/inside" in complaint(write_text, tmp_path / "file" / "inside", "text")
    assert "nowhere" in complaint(write_text, tmp_path / "nowhere" / "file", "text")
    assert "nowhere" in complaint(save_tensors, tmp_path / "nowhere" / "file", weights())
    assert "file" in complaint(RunFolder(tmp_path / "file").create, RECIPE)
    assert "file" in complaint(RunFolder(tmp_path / "file" / "run").create, RECIPE)
    assert (tmp_path / "file").read_text() == "x"


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    held = weights()
    held["turned"] = torch.randn(4, 6).T
    save_tensors(tmp_path / "file", held, tokenizer="abc", step="3")
    found, about = load_tensors(tmp_path / "file")
    assert about == {"tokenizer": "abc", "step": "3"}
    assert found.keys() == held.keys()
    for name, tensor in held.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_the_same_tensors_make_the_same_bytes(tmp_path: Path) -> None:
    held = weights()
    for name in ("one", "two"):
        save_tensors(tmp_path / name, held, tokenizer="abc")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("flip", [1, 32, 128])
def test_a_flipped_bit_is_noticed_wherever_it_is(run: RunFolder, flip: int) -> None:
    """Lengths, names, shapes, what is written about the tensors, the tensors themselves."""
    whole = bytearray(run.model_file.read_bytes())
    for place in range(len(whole)):
        whole[place] ^= flip
        run.model_file.write_bytes(whole)
        whole[place] ^= flip
        assert repr(str(run.model_file)) in complaint(load_tensors, run.model_file)
    run.model_file.write_bytes(whole)
    load_tensors(run.model_file)


def test_a_file_cut_short_is_noticed_wherever_it_ends(run: RunFolder) -> None:
    whole = run.model_file.read_bytes()
    for end in range(len(whole)):
        run.model_file.write_bytes(whole[:end])
        assert "cut short or damaged" in complaint(load_tensors, run.model_file)


def test_more_bytes_than_were_written_are_noticed(run: RunFolder) -> None:
    run.model_file.write_bytes(run.model_file.read_bytes() + b"\0")
    complaint(load_tensors, run.model_file)


def test_tensors_without_a_digest_are_refused(tmp_path: Path) -> None:
    for about in (None, {HEADER_KEY: "{}"}, {HEADER_KEY: "[]"}, {HEADER_KEY: "x"}, {HEADER_KEY: '{"digest": 3}'}):
        save_file({"a": torch.ones(2)}, str(tmp_path / "file"), about)
        assert "damaged" in complaint(load_tensors, tmp_path / "file")


def test_what_is_missing_or_no_file_is_said(tmp_path: Path) -> None:
    assert "is missing" in complaint(load_tensors, tmp_path / "none")
    complaint(load_tensors, tmp_path)
    assert "is missing" in complaint(read_json, tmp_path / "none")
    complaint(read_json, tmp_path)


def test_the_digest_can_be_read_without_dragoman(run: RunFolder) -> None:
    with safe_open(str(run.model_file), framework="pt") as file:
        about = json.loads(file.metadata()[HEADER_KEY])
    assert len(bytes.fromhex(about.pop("digest"))) == 16
    assert about == {"tokenizer": "abc", "longest": "30"}


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "nul", '{"a": 1', "\udcff"])
def test_json_that_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_bytes(text.encode(errors="surrogateescape"))
    assert "is damaged" in complaint(read_json, tmp_path / "state.json")


def test_json_comes_back(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None], "b": "ü"}
    write_text(tmp_path / "state.json", json.dumps(value))
    assert read_json(tmp_path / "state.json") == value


def test_a_recipe_comes_back(run: RunFolder) -> None:
    assert run.load_recipe() == RECIPE


def test_a_config_can_be_read_by_any_yaml_reader(run: RunFolder) -> None:
    assert parse_yaml(run.config_file.read_text(encoding="utf-8"), "config.yaml")["train"]["steps"] == 77


def test_a_config_cut_short_is_noticed_wherever_it_ends(run: RunFolder) -> None:
    whole = run.config_file.read_bytes()
    for end in range(len(whole) - 1):  # without its very last newline it says all that it did
        run.config_file.write_bytes(whole[:end])
        message = complaint(run.load_recipe)
        assert repr(str(run.config_file)) in message
        if whole[:end].count(DIGEST_LINE.encode()) == 0:
            assert "is cut short" in message or "damaged" in message


@pytest.mark.parametrize("flip", [1, 32])
def test_a_config_with_a_flipped_bit_is_noticed(run: RunFolder, flip: int) -> None:
    whole = bytearray(run.config_file.read_bytes())
    for place in range(len(whole) - 1):
        whole[place] ^= flip
        run.config_file.write_bytes(whole)
        whole[place] ^= flip
        assert repr(str(run.config_file)) in complaint(run.load_recipe)


def test_a_config_changed_on_purpose_is_read(run: RunFolder) -> None:
    text = run.config_file.read_text(encoding="utf-8").replace("steps: 77", "steps: 78")
    run.config_file.write_text(text, encoding="utf-8")
    message = complaint(run.load_recipe)
    assert repr(DIGEST_LINE + CHANGED) in message
    body = text.rpartition(DIGEST_LINE)[0]
    run.config_file.write_text(f"{body}{DIGEST_LINE}{CHANGED}\n", encoding="utf-8")
    assert run.load_recipe() == RECIPE.model_copy(update={"train": RECIPE.train.model_copy(update={"steps": 78})})
    run.config_file.write_text(f"{body.replace('steps', 'stepz')}{DIGEST_LINE}{CHANGED}\n", encoding="utf-8")
    assert "did you mean 'steps'?" in complaint(run.load_recipe)


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    assert "there is no run folder" in complaint(RunFolder(tmp_path / "none").check_format)
    (tmp_path / "empty").mkdir()
    assert "no FORMAT file" in complaint(RunFolder(tmp_path / "empty").check_format)
    (tmp_path / "empty" / "FORMAT").mkdir()
    assert "no FORMAT file" in complaint(RunFolder(tmp_path / "empty").check_format)
    (tmp_path / "file").write_text("x")
    assert "it is a file; dragoman train makes run folders" in complaint(RunFolder(tmp_path / "file").load_recipe)


def test_a_folder_without_its_config_is_refused(run: RunFolder) -> None:
    run.config_file.unlink()
    assert "is missing or damaged" in complaint(run.load_recipe)


@pytest.mark.parametrize("written", [b"", b"one", b"1.0", b"-1", b"0", b"1 2", b"\xff", b"\xb2"])
def test_a_damaged_format_is_refused(run: RunFolder, written: bytes) -> None:
    run.format_file.write_bytes(written)
    assert "is damaged" in complaint(run.check_format)


def test_every_format_up_to_ours_is_read_and_no_later_one(run: RunFolder) -> None:
    for number in range(1, FORMAT + 1):
        run.format_file.write_text(f"{number}\n")
        run.check_format()
    for number in (FORMAT + 1, FORMAT + 10, 10**30):
        run.format_file.write_text(f"{number}\n")
        assert f"has format {number}, but this Dragoman reads up to {FORMAT}; update" in complaint(run.load_recipe)


def test_checkpoints_may_vanish_while_a_folder_is_checked(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process trains, and keeps only the newest ones."""
    (run.checkpoints_folder / "step-0000000001").mkdir()
    scandir = os.scandir

    def vanish(path: Any = ".") -> Any:
        if Path(path).is_relative_to(run.checkpoints_folder):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanish)
    assert run.check_format() == FORMAT
    assert run.load_recipe() == RECIPE


def test_beginning_again_keeps_what_is_there(run: RunFolder) -> None:
    before = run.model_file.read_bytes()
    (run.checkpoints_folder / "kept").touch()
    run.create(RECIPE)
    assert run.model_file.read_bytes() == before
    assert (run.checkpoints_folder / "kept").exists()


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), min_size=1, max_size=5))
def test_mean_is_the_mean(rows: list[list[float]]) -> None:
    sets = [{"a": torch.tensor(row), "b": torch.tensor(row, dtype=torch.bfloat16)} for row in rows]
    found = average_weights(iter(sets))
    for name in ("a", "b"):
        stacked = torch.stack([tensors[name].double() for tensors in sets])
        assert found[name].dtype == sets[0][name].dtype
        assert torch.equal(found[name], stacked.mean(0).to(found[name].dtype))


def test_mean_leaves_its_givers_alone_and_sums_in_double() -> None:
    tiny = [{"a": torch.tensor([1.0])}, *({"a": torch.tensor([2.0**-24])} for _ in range(2**10))]
    exact = (1.0 + 2**10 * 2.0**-24) / (2**10 + 1)
    assert average_weights(tiny)["a"].item() == pytest.approx(exact, rel=1e-7)
    assert tiny[0]["a"].item() == 1.0


def test_a_full_disk_while_syncing_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "file", "old")

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(io, "_sync", full)
    assert "--resume" in complaint(write_text, tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
