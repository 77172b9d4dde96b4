"""Checkpoints and provenance.json, written atomically.

A run resumed from a checkpoint continues bit-identically on a CPU, and up to rounding on a GPU.

checkpoints/step-0000001000/              weights, optimizer state, EMA and state.json; only the newest is kept
checkpoints/best-0000001000.safetensors   only the weights (EMA if train.ema is set) of the train.keep best steps
provenance.json                           data counts, versions, dates and the parent run, for the model card

Rank 0 writes. If tensors are sharded, all ranks write their shards (training/execution.py).
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from torch import Tensor

from dragoman.data.batches import EXAMPLE_FORMATS
from dragoman.data.stream import StreamPosition
from dragoman.errors import UserError
from dragoman.io import (
    format_json,
    move_into_place,
    remove_abandoned,
    report_write_errors,
    temporary_beside,
    write_text,
)
from dragoman.models.base import collect_weights
from dragoman.run_dir import RunFolder, average_weights, load_tensors, read_header, read_json, save_tensors
from dragoman.training.execution import ExecutionPlan, load_sharded, save_sharded, shard_like
from dragoman.training.prepare import RunData
from dragoman.training.step import StepMetrics, Stepper
from dragoman.training.validation import Validation

SAVED_NAME = re.compile(r"step-\d{10,}|best-\d{10,}\.safetensors")  # names of the files and folders that `save` writes
NO_SUMS = (0.0, 0.0, 0, 0.0)  # of loss, nll, steps and divergence (KL between the two passes of train.consistency)
# The sums in state.json. Those of earlier releases have no divergence, so it is set to 0.
SavedSums = Annotated[tuple[float, float, int, float], BeforeValidator(lambda sums: (*sums, 0.0)[:4])]


class RankedStep(NamedTuple):
    """A step whose validation is among the best."""

    goodness: tuple[float, float]  # Validation.goodness: score and -loss; higher is better
    step: int


@dataclass(frozen=True)
class TrainState:
    """Everything except tensors that the next step depends on.

    The state is saved as state.json. A field with an alias has that name there, so that earlier runs can be resumed.
    """

    plan: Annotated[ExecutionPlan, Field(alias="choices")]
    data: dict[str, str]  # digest of each corpus
    longest: int = 0  # length in tokens of the longest source that the model was trained on
    parent: str = ""  # the run from whose weights this run started
    step: int = 0
    # Epoch and position in it of the next batch; `passed` is the fraction of the epoch before that batch.
    position: Annotated[StreamPosition, Field(alias="place")] = field(default_factory=StreamPosition)
    seconds: float = 0.0  # of training so far, over all resumptions
    tokens: int = 0  # source and target tokens read so far
    flops: float = 0.0  # spent so far (models/registry.py)
    peak_memory: int = 0  # in bytes, of the GPU or, on a CPU, of the process
    skipped: int = 0  # steps whose loss or gradient was not finite
    skipped_in_a_row: int = 0
    lr_scale: Annotated[float, Field(alias="scale")] = 1.0  # of the learning rate; see Trainer.roll_back
    best: tuple[RankedStep, ...] = ()  # best first
    validations_since_best: Annotated[int, Field(alias="stale")] = 0
    last_validation: Annotated[Validation | None, Field(alias="last")] = None
    sums: Annotated[SavedSums, Field(alias="running")] = NO_SUMS  # since the last record in metrics.jsonl

    @property
    def epochs(self) -> float:
        return self.position.epoch + self.position.passed

    def advance(self, tokens: int, position: StreamPosition, seconds: float, flops: float) -> TrainState:
        """Count one more step, taken or skipped."""
        tokens, flops = self.tokens + tokens, self.flops + flops
        return replace(self, step=self.step + 1, position=position, seconds=seconds, tokens=tokens, flops=flops)

    def add_metrics(self, metrics: StepMetrics) -> TrainState:
        """Add the metrics of a step. On a GPU this happens some steps after `advance`."""
        if not metrics.finite:
            return replace(self, skipped=self.skipped + 1, skipped_in_a_row=self.skipped_in_a_row + 1)
        loss, nll, steps, divergence = self.sums
        sums = (loss + metrics.loss, nll + metrics.nll, steps + 1, divergence + metrics.divergence)
        return replace(self, skipped_in_a_row=0, sums=sums)

    def mean_losses(self) -> tuple[float, float, float]:
        """Return the means of loss, nll and divergence since the last record; NaN if all steps were skipped."""
        loss, nll, count, divergence = self.sums
        steps = count or float("nan")
        return loss / steps, nll / steps, divergence / steps

    def add_validation(self, validation: Validation, metric: str, keep: int) -> TrainState:
        """Add a validation: keep the `keep` best validations, and count how many came after the best one."""
        entry, floor = RankedStep(validation.goodness(metric), self.step), validation.floor(metric)

        def sort_key(entry: RankedStep) -> tuple[float, float]:
            score, negative_loss = entry.goodness
            return max(score, floor), negative_loss  # up to the score of an untrained model, only the loss counts

        is_best = not self.best or sort_key(entry) > sort_key(self.best[0])
        ranked = sorted([*self.best, entry], key=sort_key, reverse=True)  # stable: of equal ones, the earlier is first
        since_best, best = 0 if is_best else self.validations_since_best + 1, tuple(ranked[:keep])
        return replace(self, best=best, validations_since_best=since_best, last_validation=validation)


STATE_ADAPTER = TypeAdapter(TrainState)


def best_file(folder: RunFolder, step: int) -> Path:
    """Return the path of the weights of a step, which exists if its validation is among the best."""
    return folder.checkpoints_folder / f"best-{step:010}.safetensors"


def save(folder: RunFolder, stepper: Stepper, state: TrainState) -> None:
    """Write a checkpoint, then remove older ones. A crash between the two leaves files that the next save removes.

    All processes write to a temporary folder, which rank 0 then renames. Files that Dragoman did not write, such as a
    copy of a checkpoint, are not removed.
    """
    group, target = stepper.group, folder.checkpoints_folder / f"step-{state.step:010}"
    best = [best_file(folder, entry.step) for entry in state.best]

    def make_temporary() -> Path:
        with report_write_errors(target):
            path = cleanup.enter_context(temporary_beside(target))
            path.mkdir()
        return path

    def finish() -> None:
        save_state(temporary, state)
        with report_write_errors(target):
            move_into_place(temporary, target)

    def remove_old() -> None:
        for old in folder.checkpoints_folder.iterdir():
            if SAVED_NAME.fullmatch(old.name) and old not in (target, *best):
                remove(old)

    if (file := best_file(folder, state.step)) in best:
        weights = stepper.weights_to_save()
        group.run_on_main(lambda: save_tensors(file, weights))
    if not group.run_on_main(target.exists):
        with ExitStack() as cleanup:
            temporary = group.run_on_main(make_temporary)
            for name, tensors in stepper.checkpoint_tensors().items():
                if stepper.sharded:
                    save_sharded(temporary / name, tensors, group)
                else:
                    group.run_on_main(partial(save_tensors, temporary / f"{name}.safetensors", tensors))
            group.run_on_main(finish)
    group.run_on_main(remove_old)


def remove_unfinished(folder: RunFolder) -> None:
    """Remove files that a killed process had not finished. The run is locked, so no other process is writing them."""
    remove_abandoned(folder.path, age=0.0)  # temporary files of any age
    remove_abandoned(folder.checkpoints_folder, age=0.0)
    for path in folder.checkpoints_folder.glob("*.part"):  # earlier releases gave temporary files this suffix
        if SAVED_NAME.fullmatch(path.name.removesuffix(".part")):
            remove(path)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def save_state(path: Path, state: TrainState) -> None:
    write_text(path / "state.json", json.dumps(STATE_ADAPTER.dump_python(state, by_alias=True), indent=1) + "\n")


def find_newest(folder: RunFolder) -> Path | None:
    checkpoints = [p for p in folder.checkpoints_folder.glob("step-*") if p.is_dir() and SAVED_NAME.fullmatch(p.name)]
    return max(checkpoints, default=None)


def load_state(path: Path) -> TrainState:
    try:
        return STATE_ADAPTER.validate_python(read_json(path / "state.json"))
    except ValidationError:
        raise UserError(f"{str(path / 'state.json')!r} is damaged; restore it from a copy") from None


def restore(path: Path, stepper: Stepper) -> None:
    """Load the tensors of a checkpoint into the stepper. Any number of processes may have saved it, sharded or not."""
    model_tensors = collect_weights(stepper.model)

    def load(name: str) -> dict[str, Tensor]:
        if (path / name).is_dir():
            return load_sharded(path / name, model_tensors, stepper.group)
        tensors, _ = load_tensors(path / f"{name}.safetensors")
        # An optimizer state, such as "project.weight:exp_avg", is sharded like its parameter.
        parameters = {key: model_tensors.get(key.rpartition(":")[0] or key, tensors[key]) for key in tensors}
        return {key: shard_like(tensor, parameters[key]) for key, tensor in tensors.items()}

    stepper.restore(load("model"), load("optimizer"), load("ema"))


def load_final_weights(folder: RunFolder, state: TrainState, average: int) -> dict[str, Tensor]:
    """Return the weights of the best validation, or the mean of the weights of the `average` best ones."""
    return average_weights(load_tensors(best_file(folder, entry.step))[0] for entry in state.best[: max(average, 1)])


def format_current_time() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_provenance(folder: RunFolder, prepared: RunData, format_name: str, *, init_from: str, resumed: bool) -> None:
    """Write provenance.json. A resumed run keeps the existing file."""
    if resumed and folder.provenance_file.exists():
        return
    parts = [("train", part) for part in prepared.train] + [("dev", part) for part in prepared.dev]
    parent = RunFolder(init_from)
    provenance = {
        "dragoman": version("dragoman"),
        "torch": torch.__version__,
        "started": None if resumed else format_current_time(),  # unknown if an earlier release started the run
        "unit": EXAMPLE_FORMATS[format_name].noun,
        "corpora": [
            {"split": split, "count": len(part.store), "left_out": dict(part.store.dropped_counts)}
            for split, part in parts
        ],
        "parent": {
            "run": str(parent.path.absolute()),
            "digest": read_header(parent.model_file)["digest"],
            "steps": int(read_header(parent.model_file).get("step", 0)),
            "teacher": parent.load_teacher_record().get("teacher"),
            "parent": parent.load_provenance().get("parent"),
        }
        if init_from
        else None,
    }
    if init_from and (origin := parent.load_provenance().get("origin")):  # a published model and its licence
        provenance["origin"] = origin
    write_text(folder.provenance_file, format_json(provenance))


def record_end_of_training(folder: RunFolder, *, trained: bool) -> None:
    """Write the versions and the time of the end into provenance.json, unless a finished run trained no more steps."""
    provenance = folder.load_provenance()
    if trained or not provenance.get("ended"):
        latest = {"dragoman": version("dragoman"), "torch": torch.__version__, "ended": format_current_time()}
        write_text(folder.provenance_file, format_json(provenance | latest))
