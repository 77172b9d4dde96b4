"""Training learns, and keeps its promises when things go wrong."""

from __future__ import annotations

import errno
import json
import math
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dragoman
from dragoman.errors import UserError
from dragoman.inference.loading import load
from dragoman.inference.model_card import read_card
from dragoman.models.base import Model
from dragoman.progress import Report
from dragoman.run_dir import RunFolder, average_weights
from dragoman.training import start
from dragoman.training import step as steps
from dragoman.training.optim import compute_gradient_norm
from dragoman.training.step import Stepper
from dragoman.training.trainer import ROLL_BACK_AFTER, Trainer, train
from dragoman.training.validation import Validation, Validator
from dragoman.types import Batch
from tolerance import assert_same
from toy_batch import examples, in_rows
from toy_run import (
    Call,
    Toy,
    assert_user_error,
    files,
    make_sentences,
    read_run_events,
    read_tensor_files,
    train_quietly,
    translate_toy,
    write_corpus,
    write_lines,
    write_recipe,
)

pytestmark = pytest.mark.slow
LEVEL = ("train.schedule=constant", "train.warmup=0")  # the same rate at every step
PLAIN = ("model.dropout=0.0", "train.accumulate=1")  # nothing random, one batch to a step


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model.safetensors")


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name in one:
        assert_same(one[name], other[name])


def of(run: Path, event: str) -> list[dict[str, Any]]:
    return [record for record in read_run_events(run) if record["event"] == event]


def train_steps(run: Path) -> list[int]:
    return [record["step"] for record in of(run, "train")]


def state(run: Path) -> dict[str, Any]:
    [newest] = (run / "checkpoints").glob("step-*")
    found: dict[str, Any] = json.loads((newest / "state.json").read_text())
    return found


# It learns.


def test_training_learns_a_toy_language(toy: Toy) -> None:
    """Train with the command line, and score on unseen sentences."""
    assert of(toy.run, "validate")[-1]["bleu"] > 80
    seen = set((toy.folder / "train.src").read_text().splitlines())
    new = [line for line in make_sentences(300, seed=7) if line not in seen][:60]
    found = toy.translator.translate(new)
    assert sum(one.text == translate_toy(line) for line, one in zip(new, found, strict=True)) > 0.75 * len(new)


def test_messages_go_to_stderr_only(toy: Toy) -> None:
    assert toy.output.out == ""
    assert "\x1b" not in toy.output.err
    assert "\r" not in toy.output.err
    assert "done: 330 steps" in toy.output.err.splitlines()[-1]


def test_metrics_have_standard_names(toy: Toy) -> None:
    """`nll` is the plain negative log-likelihood; what earlier releases called likelihood and norm is still read."""
    record = of(toy.run, "train")[-1]
    assert {"nll", "grad_norm", "lr", "loss", "epoch", "tokens", "flops"} <= set(record)
    assert not {"likelihood", "norm"} & set(record)
    assert record["epoch"] == pytest.approx(read_card(toy.run)["epochs"], abs=1e-3)


def test_loss_falls_and_records_are_json(toy: Toy) -> None:
    losses = [record["loss"] for record in of(toy.run, "train")]
    assert losses[-1] < 0.2 * losses[0]
    assert train_steps(toy.run) == list(range(10, 331, 10))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_smoothing_is_in_the_loss_but_not_in_the_nll(small: Path, tmp_path: Path, smoothing: float) -> None:
    train_quietly(small, tmp_path / "run", "train.steps=3", f"train.label_smoothing={smoothing}")
    for record in of(tmp_path / "run", "train"):
        assert (record["loss"] == pytest.approx(record["nll"], rel=1e-6)) is (smoothing == 0)


# A batch may come in parts.


def stepper(tmp_path: Path, small: Path, *overrides: str) -> tuple[Stepper, list[Batch]]:
    """Return a new stepper and some batches, as the trainer makes them."""
    seen: list[tuple[Stepper, list[Batch]]] = []

    def update(self: Stepper, batches: list[Batch], _step: int, lr: float) -> steps.PendingStep:
        seen.append((self, list(batches)))
        return steps.PendingStep(torch.ones(4), lr, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "update", update)
        train_quietly(small, tmp_path / "stepper", *overrides, "train.steps=3")
    return seen[0][0], [batch for _, some in seen for batch in some]


def test_parts_with_only_padding_are_left_out() -> None:
    """Batches have few shapes, so some rows are empty. Batch norm cannot process a part without tokens."""
    batch = in_rows([[0], [], [1], [], [], []], examples(2))
    assert [part.source_BS.shape[0] for part in steps.split_batch(batch, 6)] == [1, 1]
    assert torch.equal(torch.cat([part.source_BS for part in steps.split_batch(batch, 3)]), batch.source_BS[:4])


def test_accumulated_batches_equal_one_batch(small: Path, tmp_path: Path) -> None:
    """The gradient of a step does not depend on how its tokens are divided into batches."""
    one, batches = stepper(tmp_path, small, *PLAIN, "train.tokens=1024", "train.optimizer=sgd")
    whole = max(batches, key=lambda batch: batch.pairs)
    counts = [int((half.target_segment_BT > 0).sum()) for half in steps.split_batch(whole, 2)]
    assert counts[0] != counts[1]  # else a mean of means would pass for a mean
    halves = [
        replace(half, target_tokens=count) for half, count in zip(steps.split_batch(whole, 2), counts, strict=True)
    ]
    before = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    results = []
    for some in ([whole], halves):
        steps.load_weights(one.model, before)
        (update,) = steps.fetch_metrics([one.update(some, 1, 0.5)])
        results.append((update, {name: p.detach().clone() for name, p in one.model.named_parameters()}))
    assert results[0][0].loss == pytest.approx(results[1][0].loss, rel=1e-6)
    assert results[0][0].norm == pytest.approx(results[1][0].norm, rel=1e-5)
    moved = {name: results[0][1][name] - before[name] for name in before}
    assert max(float(change.abs().max()) for change in moved.values()) > 1e-2
    for name in before:
        assert_same(results[0][1][name], results[1][1][name])


def limit_memory(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a device with memory for `rows` rows besides gradients; the first batch, without them, fits."""
    backward = Stepper.backward

    def limited(self: Stepper, batch: Batch) -> Tensor:
        if len(batch.source_BS) > rows and (rows == 0 or any(p.grad is not None for p in self.parameters)):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return backward(self, batch)

    monkeypatch.setattr(Stepper, "backward", limited)


def test_validation_out_of_memory_is_tried_again(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, tried = Validator.evaluate, []

    def limited(self: Validator, model: Model) -> Validation:
        tried.append(self)
        if len(tried) % 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return evaluate(self, model)

    monkeypatch.setattr(Validator, "evaluate", limited)
    train_quietly(small, tmp_path / "run", "train.steps=2")
    assert len(tried) == 2


def test_out_of_memory_halves_batches(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("model.dropout=0.0", "train.tokens=1024", "train.optimizer=sgd", "train.lr=0.5", "train.steps=4")
    train_quietly(small, tmp_path / "whole", *settings)
    limit_memory(3, monkeypatch)
    train(small, out=tmp_path / "run", overrides=settings)
    errors = capsys.readouterr().err
    assert "split into 2 parts" in errors
    assert "split into 4 parts" in errors
    assert "train.tokens=256 train.accumulate=8" in errors
    assert state(tmp_path / "run")["choices"]["split"] == 4
    close(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    train_quietly(small, tmp_path / "run", *settings[:-1], "train.steps=6", resume=True)  # it remembers
    assert "out of memory" not in capsys.readouterr().err


def test_row_that_does_not_fit_is_reported(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    limit_memory(0, monkeypatch)
    assert_user_error(call("train", small, "--out", tmp_path / "run"), "memory", "data.max_length", working=True)


def test_optimizer_that_does_not_fit_is_reported(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """The step is not tried again: some weights may have changed."""
    tried = []

    def full(*_: object) -> None:
        tried.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.optim.AdamW, "step", full)
    assert_user_error(call("train", small, "--out", tmp_path / "run"), "optimizer", "train.parallel=fsdp", working=True)
    assert tried == [1]


# Numbers that are none.


def make_steps_nan(what: str, bad: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loss or the gradient of some steps NaN. `bad` gets the number of steps tried so far."""
    tried = iter(range(1, 10_000))

    if what == "gradient":
        norm = compute_gradient_norm
        monkeypatch.setattr(steps, "compute_gradient_norm", lambda p: norm(p) * (math.nan if bad(next(tried)) else 1.0))
        return
    update = Stepper.update

    def spoilt(self: Stepper, batches: list[Batch], step: int, lr: float) -> steps.PendingStep:
        loss, factor = self.learner.loss, math.inf if bad(next(tried)) else 1.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.learner, "loss", lambda *a: tuple(part * factor for part in loss(*a)))
            return update(self, batches, step, lr)

    monkeypatch.setattr(Stepper, "update", spoilt)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    run, once = tmp_path / "run", (*LEVEL, "train.ema=0.5", "data.dev=[]")
    train_quietly(small, tmp_path / "two", *once, "train.steps=2")
    make_steps_nan(what, lambda tried: tried == 3, monkeypatch)
    train(small, out=run, overrides=[*once, "train.steps=3"])
    assert equal(weights(run), weights(tmp_path / "two"))
    assert [record["step"] for record in of(run, "skipped")] == [3]
    assert "step 3 skipped" in capsys.readouterr().err
    assert "NaN" not in (run / "metrics.jsonl").read_text()
    assert "Infinity" not in (run / "metrics.jsonl").read_text()
    train_quietly(small, run, *once, "train.steps=6", resume=True)
    assert train_steps(run) == [1, 2, 3, 4, 5, 6]
    assert state(run)["skipped"] == 1
    assert not equal(weights(run), weights(tmp_path / "two"))


def test_run_that_ends_with_skipped_steps_publishes_nothing(small: Path, tmp_path: Path, call: Call) -> None:
    settings = ("train.lr=1e30", "train.steps=4", "train.warmup=0", "train.validate_every=0", "train.save_every=100")
    assert_user_error(call("train", small, "--out", tmp_path / "run", *settings), "step 4", "train.lr", working=True)
    assert not (tmp_path / "run/model.safetensors").exists()


def test_repeated_skipped_steps_roll_back(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training continues from the newest checkpoint with half the learning rate."""
    settings = (*LEVEL, "data.dev=[]", "train.validate_every=0", "train.save_every=5")
    expected = tmp_path / "expected"  # the same by hand: five steps, then on at half the rate
    train_quietly(small, expected, *settings, "train.steps=5")
    [file] = (expected / "checkpoints").glob("step-*/state.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"scale": 0.5}))
    train_quietly(small, expected, *settings, "train.steps=12", resume=True)

    make_steps_nan("loss", lambda tried: 8 <= tried < 8 + ROLL_BACK_AFTER, monkeypatch)
    train(small, out=tmp_path / "run", overrides=[*settings, "train.steps=12"])
    run = tmp_path / "run"
    assert equal(weights(run), weights(expected))
    assert "back to step 5, learning rate times 0.5" in capsys.readouterr().err
    assert train_steps(run) == list(range(1, 13))
    [record] = of(run, "rolled back")
    assert record == {"event": "rolled back", "step": 5, "after": 12, "scale": 0.5, "skipped": 5}
    assert [record["lr"] for record in of(run, "train")] == [4e-3] * 5 + [2e-3] * 7
    assert state(run)["skipped"] == ROLL_BACK_AFTER
    assert state(run)["flops"] > 1.4 * state(expected)["flops"]  # what was spent stays spent: 19 steps of 12


def test_roll_back_survives_a_kill(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller learning rate is saved before the next step."""
    settings = (*LEVEL, "data.dev=[]", "train.validate_every=0", "train.save_every=5")
    tried = 0

    def bad(number: int) -> bool:
        nonlocal tried
        tried = number
        if number == 8 + ROLL_BACK_AFTER:
            raise KeyboardInterrupt
        return number >= 8

    make_steps_nan("gradient", bad, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train_quietly(small, tmp_path / "run", *settings)
    assert tried == 8 + ROLL_BACK_AFTER
    assert state(tmp_path / "run")["step"] == 5
    assert state(tmp_path / "run")["scale"] == 0.5


def test_no_checkpoint_is_written_after_a_skipped_step(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_steps_nan("gradient", lambda tried: tried in (2, 3), monkeypatch)
    folders = []
    monkeypatch.setattr(
        "dragoman.training.checkpoint.save", lambda _folder, _stepper, progress: folders.append(progress.step)
    )
    monkeypatch.setattr("dragoman.training.trainer.Trainer.write_model", lambda _: None)
    train_quietly(small, tmp_path / "run", "train.save_every=1", "train.validate_every=0", "train.steps=5")
    assert folders == [1, 4, 5]


def test_a_run_that_never_recovers_ends(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    make_steps_nan("gradient", lambda tried: tried > 4, monkeypatch)
    answer = call("train", small, "--out", tmp_path / "run")
    assert_user_error(answer, "after step 4", "train.lr", working=True)
    assert load(tmp_path / "run").translate(["ba."])


def test_steps_not_finite_before_the_first_checkpoint(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    make_steps_nan("loss", lambda _: True, monkeypatch)
    answer = call("train", small, "--out", tmp_path / "run", "train.save_every=100", "train.validate_every=0")
    assert_user_error(answer, "train.lr", working=True)


# What is kept.


def test_best_and_newest_checkpoints_are_kept(small: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_quietly(small, run, "train.validate_every=1", "train.metric=loss", "train.keep=2", "train.steps=6")
    ranked = sorted(of(run, "validate"), key=lambda record: record["loss"])
    best = {f"best-{record['step']:010}.safetensors" for record in ranked[:2]}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-0000000006", *best}


@pytest.mark.parametrize("average", [0, 3])
def test_model_is_the_mean_of_the_best_weights(small: Path, tmp_path: Path, average: int) -> None:
    run = tmp_path / "run"
    train_quietly(small, run, "train.validate_every=1", f"train.average={average}", "train.keep=3", "train.steps=6")
    ranked = [step for _, step in state(run)["best"]]
    chosen = [load_file(run / f"checkpoints/best-{step:010}.safetensors") for step in ranked[: average or 1]]
    assert len(chosen) == (average or 1)
    for name, tensor in weights(run).items():
        assert_same(tensor, torch.stack([one[name].double() for one in chosen]).mean(0).float())
    assert equal(weights(run), average_weights(chosen))


def test_without_dev_the_last_weights_are_the_model(small: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_quietly(small, run, "data.dev=[]", "train.steps=3")
    assert equal(weights(run), load_file(run / "checkpoints/step-0000000003/model.safetensors"))
    assert not of(run, "validate")


def test_ema_is_its_formula(small: Path, tmp_path: Path) -> None:
    """ema = decay * ema + (1 - decay) * weights. The decay is lower at first, so that initial weights fade quickly."""
    one, batches = stepper(tmp_path, small, "train.ema=0.75")
    expected = {name: p.detach().double() for name, p in one.model.named_parameters()}
    for number, batch in enumerate(batches, 1):
        one.update([batch], number, 1e-2)
        for name, parameter in one.model.named_parameters():
            decay = min(0.75, (1 + number) / (10 + number))
            expected[name] = decay * expected[name] + (1 - decay) * parameter.detach().double()
    live = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    assert one.ema.keys() == live.keys()
    for name in live:
        assert_same(one.ema[name], expected[name].float())
    with one.load_eval_weights():
        assert equal(dict(one.model.named_parameters()), one.ema)
    assert equal(dict(one.model.named_parameters()), live)
    assert not equal(one.ema, live)


def test_ema_is_the_published_model(small: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_quietly(small, run, "train.ema=0.9", "train.steps=3", "data.dev=[]")
    assert equal(weights(run), load_file(run / "checkpoints/step-0000000003/ema.safetensors"))
    assert not equal(weights(run), load_file(run / "checkpoints/step-0000000003/model.safetensors"))


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_recorded_dev_loss_is_that_of_the_published_model(small: Path, tmp_path: Path, ema: float) -> None:
    run = train_quietly(small, tmp_path / "run", f"train.ema={ema}", "train.steps=6")
    [record] = of(run, "validate")
    sides = ((tmp_path / f"dev.{side}").read_text().splitlines() for side in ("src", "trg"))
    scores = load(run, device="cpu").score(*sides)
    tokens = sum(len(score.tokens) for score in scores)
    assert record["loss"] == pytest.approx(-sum(score.logp for score in scores) / tokens, rel=1e-5)


# When it ends.


def test_limits_by_steps_epochs_or_minutes(small: Path, tmp_path: Path) -> None:
    train_quietly(small, tmp_path / "steps", "train.steps=3", "train.epochs=50", "train.minutes=50")
    assert train_steps(tmp_path / "steps") == [1, 2, 3]
    train_quietly(small, tmp_path / "minutes", "train.steps=0", "train.minutes=1e-6")
    assert train_steps(tmp_path / "minutes") == [1]
    train_quietly(small, tmp_path / "epochs", "train.steps=0", "train.epochs=2", "train.accumulate=1")
    passed = [record["epoch"] for record in of(tmp_path / "epochs", "train")]
    assert passed[-1] == 2
    assert passed.count(2) == 1  # it ended with the second epoch, not after it
    assert state(tmp_path / "epochs")["tokens"] == 2 * tokens_of(tmp_path)


def test_learning_rate_decays_in_runs_limited_by_epochs(small: Path, tmp_path: Path) -> None:
    settings = ("train.schedule=cosine", "train.warmup=0", "train.steps=0", "train.epochs=2", "train.accumulate=1")
    train_quietly(small, tmp_path / "run", *settings)
    rates = [record["lr"] for record in of(tmp_path / "run", "train")]
    assert len(rates) > 6
    assert sorted(set(rates), reverse=True) == rates
    assert rates[-1] < 0.1 * rates[0]


def test_measured_speed_excludes_validations(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds wherever validations fall between two records."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    usual, valid = Stepper.update, Trainer.validate

    def a_second(*arguments: Any) -> Any:
        now[0] += 1.0
        return usual(*arguments)

    def an_hour(trainer: Trainer) -> None:
        now[0] += 3600.0
        valid(trainer)

    monkeypatch.setattr(Stepper, "update", a_second)
    monkeypatch.setattr(Trainer, "validate", an_hour)
    train_quietly(small, tmp_path / "run", "train.steps=12", "train.log_every=5", "train.validate_every=3")
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    five, ten = (line for line in lines if line["event"] == "train")
    assert ten["tokens_per_second"] == pytest.approx((ten["tokens"] - five["tokens"]) / 5, abs=1)


def tokens_of(folder: Path) -> int:
    """Return the number of tokens in the training corpus, including EOS."""
    source, target = (load(folder / "epochs").tokenizers.source, load(folder / "epochs").tokenizers.target)
    lines = ((folder / "train.src").read_text().splitlines(), (folder / "train.trg").read_text().splitlines())
    sides = zip((source, target), lines, strict=True)
    return sum(len(tokenizer.encode(line)) + 1 for tokenizer, some in sides for line in some)


def test_changed_limit_is_logged(small: Path, tmp_path: Path, call: Call) -> None:
    train_quietly(small, tmp_path / "run", "train.steps=4")
    again = call("train", small, "--out", tmp_path / "run", "--resume", "train.steps=6")
    assert "train.steps was 4 and is 6 from here on" in again.err
    assert "from here on" not in call("train", small, "--out", tmp_path / "run", "--resume", "train.steps=6").err


def test_run_is_resumed_from_another_working_directory(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another path of the same file is accepted; another file is refused, and the message names the setting."""
    monkeypatch.chdir(tmp_path)
    run = train_quietly(small, tmp_path / "run", "train.steps=2")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    train_quietly(Path("../recipe.yaml"), run, "train.steps=4", resume=True)
    shutil.copy(tmp_path / "train.trg", "train.trg")
    with pytest.raises(UserError) as caught:
        train_quietly(small, run, "train.steps=6", resume=True)
    new = tmp_path / "other" / "train.trg"
    assert "started with data.train.0.target=" in str(caught.value)
    assert f"cannot continue with {str(new)!r}; " in str(caught.value)


def test_unfinished_files_of_a_killed_process_are_removed(small: Path, tmp_path: Path) -> None:
    """They are removed at the start, not with the next checkpoint, since they may fill the disk."""
    run = train_quietly(small, tmp_path / "run", "train.steps=4")
    before = files(run / "checkpoints")
    for half in (".step-0000000009.0123456z.dragoman.tmp", "step-0000000009.part"):  # the latter by an earlier version
        (run / "checkpoints" / half).mkdir()
        (run / "checkpoints" / half / "model.safetensors").write_bytes(b"half")
    (run / "checkpoints/best-0000000009.safetensors.part").write_bytes(b"half")
    train_quietly(small, run, "train.steps=4", resume=True)
    assert files(run / "checkpoints") == before


def test_files_of_the_user_among_checkpoints_are_kept(small: Path, tmp_path: Path) -> None:
    """A copy of a checkpoint is kept, and the run is not resumed from it."""
    run = train_quietly(small, tmp_path / "run", "train.steps=4")
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "step-0000000004", checkpoints / "step-0000000004-good")
    (checkpoints / "best.safetensors").write_bytes(b"mine")
    (checkpoints / "film.part").write_bytes(b"mine")
    (checkpoints / "notes").mkdir()
    train_quietly(small, run, "train.steps=8", resume=True)
    mine = {"step-0000000004-good", "best.safetensors", "film.part", "notes"}
    assert mine <= set(files(checkpoints))
    assert (checkpoints / "best.safetensors").read_bytes() == b"mine"
    assert "step-0000000004" not in files(checkpoints)
    assert RunFolder(run).load_state()["step"] == 8


def test_run_with_a_metric_that_is_now_refused_is_resumed(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New runs with it are refused (test_bad_input.py), but a resumed run cannot change its metric."""
    unused = ("train.metric=chrf", "train.validate_lines=0")
    with monkeypatch.context() as before:
        before.setattr(start, "check_scoring", lambda _: None)
        train_quietly(small, tmp_path / "run", *unused, "train.steps=4")
    train_quietly(small, tmp_path / "run", *unused, "train.steps=6", resume=True)
    assert state(tmp_path / "run")["step"] == 6


@pytest.mark.parametrize(("average", "message"), [(1, "the model is in"), (3, "the mean of the 2 best models is in")])
def test_last_message_describes_the_model(small: Path, tmp_path: Path, call: Call, average: int, message: str) -> None:
    settings = ("train.steps=6", "train.validate_every=3", "train.keep=3", f"train.average={average}")
    assert message in call("train", small, "--out", tmp_path / "run", *settings).err.splitlines()[-1]


def test_patience_ends_training(small: Path, tmp_path: Path, call: Call) -> None:
    run = tmp_path / "run"
    still = ("train.lr=1e-30", "train.validate_every=1", "train.patience=2", "train.metric=loss")
    train_quietly(small, run, *still)
    assert train_steps(run) == [1, 2, 3]
    assert state(run)["best"][0][1] == 1
    again = call("train", small, "--out", run, "--resume", *still)
    assert again.code == 0
    assert "train.patience=2" in again.err


def test_last_step_is_validated_and_saved(small: Path, tmp_path: Path) -> None:
    """The last step is validated, saved and published, whatever the intervals are."""
    run = tmp_path / "run"
    train_quietly(
        small, run, "train.steps=2", "train.validate_every=1000", "train.save_every=1000", "train.log_every=1000"
    )
    assert [record["step"] for record in of(run, "validate")] == [2]
    assert state(run)["step"] == 2
    assert load(run).translate(["ba."])


def test_validation_without_translations(small: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_quietly(small, run, "train.validate_lines=0", "train.validate_every=1", "train.steps=3")
    records = of(run, "validate")
    assert [record["bleu"] for record in records] == [None] * 3
    best = min(records, key=lambda record: record["loss"])
    assert state(run)["best"][0] == [[-best["loss"], -best["loss"]], best["step"]]
    for record in records:
        assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))


# Fine-tuning.


@pytest.mark.usefixtures("small")
def test_init_from_starts_with_equal_weights(tmp_path: Path, toy: Toy) -> None:
    run = tmp_path / "run"
    tuned = write_recipe(tmp_path / "tune.yaml", train={"steps": 2, "lr": 1e-30}, model={}, tokenizer={"kind": "char"})
    text = tuned.read_text()
    tuned.write_text(text[: text.index("model:")] + text[text.index("tokenizer:") :])
    train_quietly(tuned, run, init_from=toy.run)
    assert equal(weights(run), weights(toy.run))
    assert tokenizer_files(run) == tokenizer_files(toy.run)
    assert load(run).recipe.model == load(toy.run).recipe.model
    train_quietly(tuned, run, "train.steps=3", resume=True)  # --init-from need not be repeated
    train_quietly(tuned, run, "train.steps=4", resume=True, init_from=toy.run)
    assert train_steps(run) == []  # every tenth step
    assert state(run)["step"] == 4


def tokenizer_files(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "tokenizer").iterdir()}


def test_fine_tuned_model_keeps_the_longest_length(small: Path, tmp_path: Path, toy: Toy) -> None:
    write_lines(tmp_path / "train.src", ["ba.", "ra."])
    write_lines(tmp_path / "train.trg", ["ak.", "zu."])
    train_quietly(small, tmp_path / "run", "train.steps=1", "model.width=64", "model.heads=4", init_from=toy.run)
    assert load(tmp_path / "run").longest_source == load(toy.run).longest_source > 3


def test_init_from_weights_of_other_shapes_is_refused(small: Path, tmp_path: Path, toy: Toy, call: Call) -> None:
    answer = call("train", small, "--out", tmp_path / "run", "--init-from", toy.run)
    assert_user_error(answer, "--init-from", "decoder.layers.0.", "x 64", "x 16", working=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "its"),
    [
        ("tokenizer.size=400", "size=310"),
        ("tokenizer.kind=unigram", "kind=bpe"),
        ("tokenizer={kind: char}", "kind=bpe"),
    ],
)
def test_a_tokenizer_that_init_from_would_ignore_is_refused(
    toy: Toy, tmp_path: Path, call: Call, setting: str, its: str
) -> None:
    """A tokenizer setting on the command line is refused, also on resume."""
    run = tmp_path / "run"
    answer = call("train", toy.recipe, "--out", run, "--init-from", toy.run, "train.steps=2", setting)
    assert_user_error(answer, "has no effect: the tokenizer comes from", toy.run, its)
    assert not run.exists()
    train_quietly(toy.recipe, run, "train.steps=2", "tokenizer.size=310", "tokenizer.sampling=0.1", init_from=toy.run)
    again = call("train", toy.recipe, "--out", run, "--resume", "train.steps=3", setting, "tokenizer.sampling=0.1")
    assert_user_error(again, "has no effect: the tokenizer comes from", toy.run)


def test_inherited_and_changed_settings_are_logged(toy: Toy, tmp_path: Path, call: Call) -> None:
    """Messages name ignored tokenizer settings of the recipe and changed settings of the model."""
    write_corpus(tmp_path)
    tuned = write_recipe(
        tmp_path / "tuned.yaml", tokenizer={"kind": "unigram", "size": 310}, train={"steps": 1}, model={"dropout": 0.4}
    )
    answer = call("train", tuned, "--out", tmp_path / "run", "--init-from", toy.run)
    assert answer.code == 0, answer.err
    assert (
        f"starting from {toy.run}: its weights, its tokenizer and its model's settings except model.dropout=0.4"
        in answer.err
    )
    assert f"tokenizer.kind=unigram has no effect: the tokenizer comes from {toy.run}" in answer.err
    assert "tokenizer.size" not in answer.err
    plain = call("train", toy.recipe, "--out", tmp_path / "plain", "--init-from", toy.run, "train.steps=1")
    assert "and its model's settings\n" in plain.err
    assert "has no effect" not in plain.err


def test_init_from_a_missing_run_is_refused(small: Path, tmp_path: Path, call: Call) -> None:
    assert_user_error(call("train", small, "--out", tmp_path / "run", "--init-from", tmp_path / "no"), tmp_path / "no")
    train_quietly(small, tmp_path / "run", "train.steps=1")
    answer = call("train", small, "--out", tmp_path / "run", "--resume", "--init-from", tmp_path / "run")
    assert_user_error(answer, "not started with --init-from")


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_frozen_parameters_do_not_change(small: Path, tmp_path: Path, ema: float) -> None:
    settings = (f"train.ema={ema}", "train.save_every=1", "data.dev=[]")
    frozen = "train.freeze=[encoder.*, decoder.layers.0.cross.*]"
    train_quietly(small, tmp_path / "run", *settings, frozen, "train.steps=1", "train.lr=1e-30")
    before = weights(tmp_path / "run")
    train_quietly(small, tmp_path / "after", *settings, frozen, "train.steps=3")
    after = weights(tmp_path / "after")
    held = {name for name in before if name.startswith(("encoder.", "decoder.layers.0.cross."))}
    assert held < set(before)
    for name in before:
        assert torch.equal(before[name], after[name]) is (name in held), name
    train_quietly(small, tmp_path / "after", *settings, frozen, "train.steps=4", resume=True)


@pytest.mark.parametrize(("pattern", "culprit"), [("[encodre.*]", "'encodre.*'"), ("['*']", "nothing to train")])
def test_invalid_freeze_pattern_is_refused(small: Path, tmp_path: Path, call: Call, pattern: str, culprit: str) -> None:
    answer = call("train", small, "--out", tmp_path / "run", f"train.freeze={pattern}")
    assert_user_error(answer, "train.freeze", culprit, working=True)


# Small things.


@pytest.mark.parametrize("count", [1, 9])
def test_very_small_corpora(tmp_path: Path, count: int) -> None:
    """The corpus has fewer pairs than a batch, or only one."""
    lines = make_sentences(count)
    write_lines(tmp_path / "train.src", lines)
    write_lines(tmp_path / "train.trg", map(translate_toy, lines))
    recipe = write_recipe(tmp_path / "r.yaml", tokenizer={"kind": "char"}, train={"steps": 120, "warmup": 10})
    run = train_quietly(recipe, tmp_path / "run", "data.dev=[]", "train.tokens=4096", "train.lr=0.01")
    assert [one.text for one in load(run).translate(lines)] == [translate_toy(line) for line in lines]


def test_bf16_is_close_to_float32(small: Path, tmp_path: Path) -> None:
    for precision in ("float32", "bf16"):
        train_quietly(small, tmp_path / precision, *PLAIN, "train.steps=8", f"train.precision={precision}")
    pairs = zip(of(tmp_path / "float32", "train"), of(tmp_path / "bf16", "train"), strict=True)
    losses = [(one["loss"], other["loss"]) for one, other in pairs]
    assert all(one == pytest.approx(other, rel=2e-2) for one, other in losses)
    assert any(one != other for one, other in losses)


def test_training_in_a_thread(small: Path, tmp_path: Path) -> None:
    """Only the main thread can handle signals; training works in other threads too."""
    thread = threading.Thread(target=train_quietly, args=(small, tmp_path / "run", "train.steps=1"))
    thread.start()
    thread.join()
    assert load(tmp_path / "run").translate(["ba."])


def test_training_by_its_public_name(small: Path, tmp_path: Path) -> None:
    """`dragoman.train` stays the function, also after its submodules have been imported."""
    for name in ("one", "two"):
        made = dragoman.train(small, out=tmp_path / name, overrides=["train.steps=1"], report=Report(quiet=True))
        assert made == tmp_path / name
        assert dragoman.load(made).translate(["ba."])


def test_a_recipe_from_python(small: Path, tmp_path: Path) -> None:
    from dragoman.recipe import read_recipe

    recipe = read_recipe(small)
    train(recipe, out=tmp_path / "run", overrides=["train.steps=2"], report=Report(quiet=True))
    assert train_steps(tmp_path / "run") == [1, 2]
    with pytest.raises(UserError, match=r"train\.stpes"):
        train(recipe, out=tmp_path / "other", overrides=["train.stpes=2"])


def test_tensorboard_has_the_numbers_of_metrics_jsonl(small: Path, tmp_path: Path) -> None:
    """The same numbers as in metrics.jsonl, and no step twice after a run was resumed."""
    pytest.importorskip("tensorboard", reason="the extra dragoman[board] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    settings = ("train.tensorboard=true", "train.save_every=3", "train.validate_every=0", "train.steps=7")
    update = Stepper.update

    def killed(self: Stepper, batches: list[Batch], step: int, lr: float) -> steps.PendingStep:
        if step == 6:
            raise KeyboardInterrupt
        return update(self, batches, step, lr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "update", killed)
        with pytest.raises(KeyboardInterrupt):
            train_quietly(small, run, *settings)
    assert train_steps(run) == [1, 2, 3, 4, 5]
    train_quietly(small, run, *settings, resume=True)
    seen = EventAccumulator(str(run / "tensorboard"))
    seen.Reload()
    losses = {event.step: event.value for event in seen.Scalars("train/loss")}
    assert len(seen.Scalars("train/loss")) == len(losses) == 7
    assert losses == {record["step"]: pytest.approx(record["loss"], rel=1e-6) for record in of(run, "train")}


# When the machine gives out.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a separate disk whose size tests can change."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(path)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("to mount a small disk one must be root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def resize(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def test_full_disk_is_reported_and_training_resumes(small: Path, tmp_path: Path, disk: Path, call: Call) -> None:
    """The error is one sentence; the checkpoint stays intact, and the run is resumed once there is space."""
    run, more = disk / "run", (*LEVEL, "train.validate_every=0", "train.save_every=2")
    train_quietly(small, run, *more, "train.steps=2", "data.dev=[]")
    resize(disk, shutil.disk_usage(disk).used + 80_000)
    answer = call("train", small, "--out", run, *more, "train.steps=6", "data.dev=[]", "--resume")
    assert_user_error(answer, run, "No space left", "--resume", working=True)
    assert not list(run.rglob(".*.tmp"))
    assert load(run).translate(["ba."])
    resize(disk, 8_000_000)
    assert call("train", small, "--out", run, *more, "train.steps=6", "data.dev=[]", "--resume").code == 0
    train_quietly(small, tmp_path / "whole", *more, "train.steps=6", "data.dev=[]")
    assert read_tensor_files(run) == read_tensor_files(tmp_path / "whole")


def test_full_disk_at_any_write_is_reported(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    run = tmp_path / "run"
    train_quietly(small, run, "train.steps=2")
    before = read_tensor_files(run)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    answer = call("train", small, "--out", run, "--resume", "train.steps=4")
    assert_user_error(answer, run, "No space left on device", "--resume", working=True)
    assert read_tensor_files(run) == before
    assert load(run).translate(["ba."])


@pytest.mark.parametrize("path", ["file", "file/run", "full"])
def test_path_that_cannot_be_a_run_folder_is_refused(small: Path, tmp_path: Path, call: Call, path: str) -> None:
    (tmp_path / "file").write_text("something")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("something")
    assert_user_error(call("train", small, "--out", tmp_path / path), tmp_path / path.partition("/")[0])
    assert (tmp_path / "full" / "thesis.txt").read_text() == (tmp_path / "file").read_text() == "something"


def test_cache_that_cannot_be_written(small: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "file").write_text("something")
    answer = call("train", small, "--out", tmp_path / "run", f"data.cache={tmp_path / 'file'}")
    assert_user_error(answer, tmp_path / "file", "data.cache", working=True)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_few_steps_on_a_gpu(small: Path, tmp_path: Path, precision: str) -> None:
    settings = ("train.device=cuda", f"train.precision={precision}", "train.steps=30", "model.dropout=0.0")
    train_quietly(small, tmp_path / "gpu", *settings)
    train_quietly(small, tmp_path / "cpu", "train.device=cpu", "train.steps=30", "model.dropout=0.0")
    here, there = (of(tmp_path / name, "train") for name in ("gpu", "cpu"))
    rough = 5e-2 if precision == "bf16" else 5e-3
    assert [r["loss"] for r in here] == [pytest.approx(r["loss"], rel=rough) for r in there]
    lines = make_sentences(20, seed=3)
    gpu_found = load(tmp_path / "gpu", device="cuda").translate(lines)
    assert len(gpu_found) == 20
    assert [one.text for one in load(tmp_path / "gpu", device="cuda").translate(lines[::-1])][::-1] == [
        one.text for one in gpu_found
    ]


@pytest.mark.gpu
def test_resume_on_a_gpu(small: Path, tmp_path: Path) -> None:
    settings = ("train.device=cuda", "train.schedule=constant", "train.ema=0.9")
    train_quietly(small, tmp_path / "run", *settings, "train.steps=6")
    train_quietly(small, tmp_path / "run", *settings, "train.steps=12", resume=True)
    train_quietly(small, tmp_path / "whole", *settings, "train.steps=12")
    assert weights(tmp_path / "run").keys() == weights(tmp_path / "whole").keys()
    close(weights(tmp_path / "run"), weights(tmp_path / "whole"))
