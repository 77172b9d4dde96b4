"""A run that was killed, stopped or resumed ends exactly as one that never was: the same bytes, the same records."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from dragoman.errors import UserError
from dragoman.inference.loading import load
from dragoman.io import lock_folder
from dragoman.process_group import DEFAULT_START_MINUTES
from dragoman.recipe import Recipe, read_recipe
from dragoman.run_dir import RunFolder
from dragoman.training import checkpoint as provenance
from dragoman.training import start, trainer
from dragoman.training.optim import OPTIMIZERS
from toy_run import (
    SMALL,
    Call,
    assert_same_runs,
    assert_user_error,
    read_last_step,
    read_run_events,
    read_tensor_files,
    start_process,
    train_quietly,
    wait_until,
    write_corpus,
    write_lines,
    write_recipe,
)

EVERYTHING: dict[str, dict[str, object]] = {
    **SMALL,
    "tokenizer": {"kind": "unigram", "size": 300, "sampling": 0.3},
    "train": {**SMALL["train"], "ema": 0.8, "average": 2, "keep": 2, "schedule": "inverse_sqrt"},
}


def choose_kill_moments(run: Path, random: Random) -> list[tuple[str, Callable[[], bool]]]:
    """Return five random moments at which to kill a run, one from each phase of it."""
    wake = time.monotonic() + random.uniform(0.01, 0.1)
    early, late = random.randint(1, 8), random.randint(16, 21)
    return [
        ("starting", lambda: time.monotonic() > wake),
        ("preparing", lambda: (run / "FORMAT").exists()),
        ("training", lambda: read_last_step(run) >= early),
        ("saving", lambda: read_last_step(run) > 8 and any((run / "checkpoints").glob(".*.tmp"))),
        ("training late", lambda: read_last_step(run) >= late),
    ]


def test_run_killed_five_times_is_bit_identical(tmp_path: Path, call: Call) -> None:
    random = Random(2017)
    write_corpus(tmp_path)
    small = write_recipe(tmp_path / "recipe.yaml", **EVERYTHING)
    run, whole = tmp_path / "run", tmp_path / "whole"
    for name, moment in choose_kill_moments(run, random):
        with start_process(
            "train", small, "--out", run, "--resume", f"data.cache={tmp_path / 'other cache'}"
        ) as running:
            wait_until(moment, running)
            time.sleep(random.uniform(0, 0.02))
            assert running.poll() is None, name
            running.kill()
            running.communicate()  # waits until nobody holds its streams
            assert running.returncode == -signal.SIGKILL
    ended = call("train", small, "--out", run, "--resume", f"data.cache={tmp_path / 'other cache'}")
    assert ended.code == 0, ended.err
    assert "resuming from step" in ended.err
    train_quietly(small, whole)
    assert_same_runs(run, whole)
    assert [event["step"] for event in read_run_events(run) if event["event"] == "train"] == list(range(1, 25))
    assert [event["step"] for event in read_run_events(run) if event["event"] == "validate"] == [6, 12, 18, 24]


def test_stopped_by_signals(small: Path, tmp_path: Path) -> None:
    """The step is finished, a checkpoint is saved, and the exit code is 128 + signal."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    for number, step in ((signal.SIGTERM, 5), (signal.SIGINT, 14)):
        with start_process("train", small, "--out", run, "--resume") as running:
            wait_until(lambda step=step: read_last_step(run) >= step, running)  # type: ignore[misc]
            running.send_signal(number)
            _, errors = running.communicate()
        assert running.returncode == 128 + number, errors
        assert f"stopped by {number.name} at step" in errors.decode().splitlines()[-1]
        assert b"Traceback" not in errors
        [newest] = (run / "checkpoints").glob("step-*")
        assert int(newest.name.removeprefix("step-")) == read_last_step(run)
    train_quietly(small, run, resume=True)
    train_quietly(small, whole)
    assert_same_runs(run, whole)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_run_is_bit_identical(small: Path, tmp_path: Path, optimizer: str) -> None:
    settings = (f"train.optimizer={optimizer}", "train.schedule=constant", "train.log_every=5")
    train_quietly(small, tmp_path / "run", *settings, "train.steps=6")
    train_quietly(small, tmp_path / "run", *settings, "train.steps=12", resume=True)
    train_quietly(small, tmp_path / "whole", *settings, "train.steps=12")
    assert_same_runs(tmp_path / "run", tmp_path / "whole")


def test_batch_norm_statistics_are_resumed(small: Path, tmp_path: Path) -> None:
    """Batch norm has buffers that are not parameters."""
    settings = ("model.norm=batch", "train.ema=0.8", "train.schedule=constant")
    train_quietly(small, tmp_path / "run", *settings, "train.steps=6")
    train_quietly(small, tmp_path / "run", *settings, "train.steps=12", resume=True)
    train_quietly(small, tmp_path / "whole", *settings, "train.steps=12")
    assert_same_runs(tmp_path / "run", tmp_path / "whole")


def test_finished_run_is_not_trained_further(small: Path, tmp_path: Path, call: Call) -> None:
    run = tmp_path / "run"
    train_quietly(small, run, "train.steps=3")
    before = read_tensor_files(run)
    (run / "model.safetensors").unlink()  # as if killed between the last checkpoint and this
    again = call("train", small, "--out", run, "--resume", "train.steps=3")
    assert again.code == 0
    assert "already finished: train.steps=3 is reached" in again.err
    assert read_tensor_files(run) == before


def test_resume_without_a_checkpoint_starts_a_new_run(small: Path, tmp_path: Path, call: Call) -> None:
    answer = call("train", small, "--out", tmp_path / "run", "--resume", "train.steps=1")
    assert answer.code == 0
    assert "nothing" in answer.err.splitlines()[0]


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ("train.lr=0.5", "train.lr=0.004"),
        ("train.seed=2", "train.seed=1"),
        ("train.accumulate=1", "train.accumulate=2"),
        ("model.width=32", "model.width=16"),
        ("model.dropout=0.0", "model.dropout=0.2"),
        ("tokenizer.kind=char", "tokenizer.kind='bpe'"),
        ("data.max_length=9", "data.max_length=512"),
        ("data.train.tsv=x", "data.train"),
    ],
)
def test_changed_setting_is_refused_on_resume(started_run: Path, call: Call, change: str, culprit: str) -> None:
    before = read_tensor_files(started_run)
    assert_user_error(
        call("train", started_run.parent / "recipe.yaml", "--out", started_run, "--resume", change), culprit
    )
    assert read_tensor_files(started_run) == before


@pytest.fixture(scope="module")
def started_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two steps that tests may read but not change."""
    folder = tmp_path_factory.mktemp("started_run")
    write_corpus(folder)
    small = write_recipe(folder / "recipe.yaml", **SMALL)
    return train_quietly(small, folder / "run", "train.steps=2")


def test_existing_run_is_not_overwritten(started_run: Path, call: Call) -> None:
    before = read_tensor_files(started_run)
    assert_user_error(call("train", started_run.parent / "recipe.yaml", "--out", started_run), started_run, "--resume")
    assert read_tensor_files(started_run) == before


def test_second_process_in_a_run_folder_is_refused(small: Path, tmp_path: Path, call: Call) -> None:
    """Two processes would overwrite each other's checkpoints."""
    run = tmp_path / "run"
    with start_process("train", small, "--out", run, "train.steps=100000", "train.schedule=constant") as running:
        wait_until(lambda: read_last_step(run) > 0, running)
        again = call("train", small, "--out", run, "train.steps=100000", "train.schedule=constant", "--resume")
        assert_user_error(again, "another process", run)
    assert call("train", small, "--out", run, "train.steps=1", "train.schedule=constant", "--resume").code == 0


def test_folder_of_another_process_is_not_removed(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If two processes start at the same time, the one that is refused removes nothing."""
    folder = RunFolder(tmp_path / "run")
    with ExitStack() as other:

        def overtake(recipe: Recipe) -> None:
            other.enter_context(lock_folder(folder.path, ""))
            folder.create(recipe)

        monkeypatch.setattr(start, "check_files", overtake)
        with pytest.raises(UserError, match="another process"):
            train_quietly(small, folder.path)
        assert folder.check_format()


@pytest.mark.parametrize("made", [False, True])
def test_interrupt_before_training_leaves_no_folder(
    small: Path, tmp_path: Path, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that existed before is kept."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "write_provenance", interrupt)
    if made:
        (tmp_path / "run").mkdir()
    with pytest.raises(KeyboardInterrupt):
        train_quietly(small, tmp_path / "run")
    assert (tmp_path / "run").exists() == made


def test_finished_run_keeps_its_end_date(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    train_quietly(small, folder.path, "train.steps=1")
    before = folder.load_provenance()
    monkeypatch.setattr(provenance, "format_current_time", lambda: "later")
    train_quietly(small, folder.path, "train.steps=1", resume=True)
    assert folder.load_provenance() == before
    train_quietly(small, folder.path, "train.steps=2", resume=True)
    assert folder.load_provenance() == {**before, "ended": "later"}


def test_failed_start_can_be_repeated(small: Path, tmp_path: Path, call: Call) -> None:
    """After the error is corrected, the same command works."""
    run = tmp_path / "run"
    assert_user_error(
        call("train", small, "--out", run, "tokenizer.size=100000"), "tokenizer.size 100000", working=True
    )
    late = call("train", small, "--out", run, "tokenizer.kind=char", "train.freeze=[nothing]")
    assert_user_error(late, "train.freeze", working=True)
    assert call("train", small, "--out", run, "train.steps=1").code == 0
    assert load(run).tokenizers.source.size == 310  # not the characters of the start before


def test_a_changed_corpus_is_refused(small: Path, tmp_path: Path, call: Call) -> None:
    run, source = tmp_path / "run", tmp_path / "train.src"
    train_quietly(small, run, "train.steps=2")
    text = source.read_bytes()
    source.write_bytes(text.replace(b"ba", b"ra", 1))
    assert_user_error(call("train", small, "--out", run, "--resume"), source, "has changed since", working=True)
    source.write_bytes(text)  # the same text at another time is the same corpus
    assert call("train", small, "--out", run, "--resume", "train.steps=3").code == 0


def test_a_changed_dev_set_is_refused(small: Path, tmp_path: Path, call: Call) -> None:
    """Otherwise checkpoints would be compared on different sentences."""
    train_quietly(small, tmp_path / "run", "train.steps=2")
    write_lines(tmp_path / "dev.src", ["ba."] * 20)
    assert_user_error(call("train", small, "--out", tmp_path / "run", "--resume"), tmp_path / "dev.src", working=True)


def test_deleted_corpus_is_reported(small: Path, tmp_path: Path, call: Call) -> None:
    train_quietly(small, tmp_path / "run", "train.steps=2")
    (tmp_path / "train.trg").unlink()
    assert_user_error(call("train", small, "--out", tmp_path / "run", "--resume"), tmp_path / "train.trg")


def test_minutes_count_across_resumes(small: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    minutes = "train.minutes=1000"
    train_quietly(small, run, minutes, "train.steps=2")
    [state] = (run / "checkpoints").glob("step-*/state.json")
    progress = json.loads(state.read_text())
    assert progress["seconds"] > 0
    state.write_text(json.dumps({**progress, "seconds": 1000 * 60 - 1e-3}))
    train_quietly(small, run, minutes, "train.steps=50", resume=True)
    assert read_last_step(run) == 3


def test_changed_execution_plan_is_logged(small: Path, tmp_path: Path, call: Call) -> None:
    train_quietly(small, tmp_path / "run", "train.steps=2")
    answer = call("train", small, "--out", tmp_path / "run", "--resume", "train.steps=3", "train.precision=bf16")
    assert answer.code == 0
    assert "not bit for bit" in answer.err


def test_run_of_format_2_is_resumed(small: Path, tmp_path: Path) -> None:
    run = train_quietly(small, tmp_path / "run", "train.steps=4")
    (run / "FORMAT").write_text("2\n")
    train_quietly(small, run, "train.steps=6", resume=True)
    assert read_last_step(run) == 6
    (run / "FORMAT").write_text("1\n")
    with pytest.raises(UserError, match="started by an earlier Dragoman"):
        train_quietly(small, run, "train.steps=8", resume=True)


def test_a_resumed_run_reads_its_timeout_without_repeating_init_from(tmp_path: Path) -> None:
    """The recipe leaves model.kind to the parent run, so it can be read only with the settings in the run folder."""
    parent, child = tmp_path / "parent.yaml", tmp_path / "child.yaml"
    parent.write_text("data: {train: {phrasebook: 100}}\nmodel: {kind: rnn, cell: gru}\ntrain: {steps: 1}\n")
    child.write_text("data: {train: {phrasebook: 100}}\nmodel: {cell: gru}\ntrain: {steps: 1, timeout: 3.0}\n")
    request = start.TrainRequest(child, RunFolder(tmp_path / "run"), (), resume=True, init_from=None)
    assert request.timeout_minutes() == DEFAULT_START_MINUTES  # nobody can read the recipe
    request.folder.create(read_recipe(parent, ()))
    assert request.timeout_minutes() == 3.0
