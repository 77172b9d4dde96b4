"""The record of a run: all that shapes the next step, saved whole, so that a resumed run goes on to the bit.

checkpoints/step-0000001000/   weights, optimizer, running mean, state.json: the newest only
checkpoints/best-0000001000.safetensors   weights alone, of the best validations

Of several processes the first writes. Where tensors are shared out among them, all do (training/distributed.py).

Where a run comes from: RUN/provenance.json holds data counts, versions, dates and the run it was fine-tuned from.

It is written when training begins, so that the model card (inference/model_card.py) need not read the corpora again.
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dragoman.data.batches import EXAMPLE_FORMATS
from dragoman.data.stream import StreamPosition
from dragoman.errors import UserError
from dragoman.io import move_into_place, sweep, temporary_beside
from dragoman.models.base import collect_tensors
from dragoman.run_dir import (
    RunFolder,
    load_tensors,
    mean,
    read_digest,
    read_json,
    save_tensors,
    unwritable,
    write_text,
    write_whole,
)
from dragoman.training.choices import Choices
from dragoman.training.distributed import shard_like
from dragoman.training.prepare import Prepared
from dragoman.training.step import Pending, Stepper, Update
from dragoman.training.validation import Validation

WRITTEN = re.compile(r"step-\d{10,}|best-\d{10,}\.safetensors")  # names that `save` gives


class Running(NamedTuple):
    """Sums since the last line of metrics.jsonl, so that a resumed run writes the same numbers there."""

    loss: float = 0.0
    likelihood: float = 0.0
    steps: int = 0
    divergence: float = 0.0

    def plus(self, update: Update) -> Running:
        if not update.finite:
            return self
        loss, likelihood = self.loss + update.loss, self.likelihood + update.likelihood
        return Running(loss, likelihood, self.steps + 1, self.divergence + update.divergence)

    def means(self) -> tuple[float, float, float]:
        steps = self.steps or float("nan")
        return self.loss / steps, self.likelihood / steps, self.divergence / steps


@dataclass(frozen=True)
class Progress:
    """Everything but tensors. What is not here may not matter."""

    choices: Choices
    data: dict[str, str]  # digest of each corpus
    longest: int = 0  # source, in tokens, that the model was trained on
    parent: str = ""  # the run that this one began with
    step: int = 0
    place: StreamPosition = field(default_factory=StreamPosition)
    seconds: float = 0.0  # trained so far
    tokens: int = 0  # read so far, both sides
    flops: float = 0.0  # spent so far (models/flops.py)
    peak_memory: int = 0  # bytes: of the GPU, or else of the whole process
    skipped: int = 0  # steps not taken, because loss or gradient was not finite
    skipped_in_a_row: int = 0
    scale: float = 1.0  # of the learning rate; halved at every roll-back
    best: tuple[tuple[tuple[float, float], int], ...] = ()  # (goodness, step), best first
    stale: int = 0  # validations since the best one
    last: Validation | None = None
    running: Running = field(default_factory=Running)

    def stepped(self, update: Pending, place: StreamPosition, seconds: float, flops: float) -> Progress:
        """One step further, taken or skipped."""
        return replace(
            self,
            step=self.step + 1,
            place=place,
            seconds=seconds,
            tokens=self.tokens + update.tokens,
            flops=self.flops + flops,
        )

    def known(self, update: Update) -> Progress:
        """What a step came to, which on a GPU is known later than that it was made."""
        bad = not update.finite
        return replace(
            self,
            skipped=self.skipped + bad,
            skipped_in_a_row=self.skipped_in_a_row + 1 if bad else 0,
            running=self.running.plus(update),
        )

    def validated(self, validation: Validation, metric: str, keep: int) -> Progress:
        """Take in a validation: the `keep` best stay, and how many since the best one were no better."""
        entry, floor = (validation.goodness(metric), self.step), validation.floor(metric)

        def rank(each: tuple[tuple[float, float], int]) -> tuple[float, float]:
            (score, loss), _ = each
            return max(score, floor), loss

        better = not self.best or rank(entry) > rank(self.best[0])
        ranked = sorted([*self.best, entry], key=rank, reverse=True)  # of equals the earlier first
        return replace(self, best=tuple(ranked[:keep]), stale=0 if better else self.stale + 1, last=validation)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        last = state.pop("last")
        return cls(
            **state
            | {
                "choices": Choices(**state["choices"]),
                "place": StreamPosition(**state["place"]),
                "best": tuple((tuple(goodness), step) for goodness, step in state["best"]),
                "last": Validation.from_state(last) if last else None,
                "running": Running(*state["running"]),
            }
        )


def checkpoint(folder: RunFolder, step: int) -> Path:
    return folder.checkpoints / f"step-{step:010}"


def best_file(folder: RunFolder, step: int) -> Path:
    return folder.checkpoints / f"best-{step:010}.safetensors"


def save(folder: RunFolder, stepper: Stepper, progress: Progress) -> None:
    """First the new, then away with the old: a crash between the two costs disk space, nothing else."""
    group, target = stepper.group, checkpoint(folder, progress.step)
    if any(step == progress.step for _, step in progress.best):
        weights = stepper.weights()
        group.broadcast(lambda: save_tensors(best_file(folder, progress.step), weights))
    if not group.broadcast(target.exists):
        if stepper.parallel.sharded:
            save_parts(target, stepper, progress)
        else:
            group.broadcast(lambda: write_whole(target, lambda made: save_whole(made, stepper, progress)))
    group.broadcast(lambda: tidy(folder, {target, *(best_file(folder, step) for _, step in progress.best)}))


def save_whole(made: Path, stepper: Stepper, progress: Progress) -> None:
    made.mkdir()
    for name, tensors in stepper.tensors().items():
        save_tensors(made / f"{name}.safetensors", tensors)
    save_progress(made, progress)


def save_parts(target: Path, stepper: Stepper, progress: Progress) -> None:
    """Let every process write its share into a temporary folder of rank 0, which renames it when all are done."""
    from dragoman.training import distributed as sharded

    group = stepper.group

    def finish() -> None:
        save_progress(made, progress)
        try:
            move_into_place(made, target)
        except OSError as error:
            raise unwritable(target, error) from None

    def begin() -> Path:
        try:
            return held.enter_context(temporary_beside(target))
        except OSError as error:
            raise unwritable(target, error) from None

    with ExitStack() as held:
        made = group.broadcast(begin)
        for name, tensors in stepper.tensors().items():
            sharded.save_sharded(made / name, tensors, group)
        group.broadcast(finish)


def clear(folder: RunFolder) -> None:
    """Remove what a process that was killed had half written. The run is locked, so nobody is writing it now."""
    sweep(folder.path, age=0.0)
    sweep(folder.checkpoints, age=0.0)
    for half in folder.checkpoints.iterdir():
        if half.name.endswith(".part") and WRITTEN.fullmatch(half.name.removesuffix(".part")):  # of earlier versions
            remove(half)


def tidy(folder: RunFolder, kept: set[Path]) -> None:
    """Remove checkpoints that are no longer needed. What Dragoman did not write, such as a copy of one, stays."""
    for old in folder.checkpoints.iterdir():
        if WRITTEN.fullmatch(old.name) and old not in kept:
            remove(old)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def save_progress(path: Path, progress: Progress) -> None:
    write_text(path / "state.json", json.dumps(asdict(progress), indent=1) + "\n")


def newest(folder: RunFolder) -> Path | None:
    found = [p for p in folder.checkpoints.glob("step-*") if p.is_dir() and WRITTEN.fullmatch(p.name)]
    return max(found, default=None)


def load(path: Path) -> Progress:
    try:
        return Progress.from_state(dict(read_json(path / "state.json")))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{str(path / 'state.json')!r} is damaged; restore it") from None


def restore(path: Path, stepper: Stepper) -> None:
    """However many processes wrote it, and however it was shared out among them."""
    like = collect_tensors(stepper.model)

    def tensors(name: str) -> dict[str, Tensor]:
        if (path / name).is_dir():
            from dragoman.training import distributed as sharded

            return sharded.load_sharded(path / name, like, stepper.group)
        found = load_tensors(path / f"{name}.safetensors")[0]
        return {
            one: shard_like(tensor, like.get(one.rpartition(":")[0] or one, tensor)) for one, tensor in found.items()
        }

    stepper.restore(tensors("model"), tensors("optimizer"), tensors("ema"))


def final_weights(folder: RunFolder, progress: Progress, average: int) -> dict[str, Tensor]:
    """The best weights, or the mean of the best few."""
    steps = [step for _, step in progress.best[: max(average, 1)]]
    return mean(load_tensors(best_file(folder, step))[0] for step in steps)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def record_start(folder: RunFolder, prepared: Prepared, form: str, *, init_from: str, resumed: bool) -> None:
    """Write provenance.json. A resumed run keeps the one that it has."""
    if resumed and folder.provenance_file.exists():
        return
    counts = [len(part.store) for part in (*prepared.train, *prepared.dev)]
    left_out = [dict(part.store.dropped) for part in (*prepared.train, *prepared.dev)]
    splits = ["train"] * len(prepared.train) + ["dev"] * len(prepared.dev)
    about = {
        "dragoman": version("dragoman"),
        "torch": torch.__version__,
        "started": None if resumed else now(),  # of a run that an earlier release began it is unknown
        "unit": EXAMPLE_FORMATS[form].noun,
        "corpora": [
            {"split": split, "count": count, "left_out": dropped}
            for split, count, dropped in zip(splits, counts, left_out, strict=True)
        ],
        "parent": describe_parent(Path(init_from)) if init_from else None,
    }
    write(folder, about)


def record_end(folder: RunFolder, *, trained: bool) -> None:
    """Note when training ended and with which versions. A run that had ended before and took no step keeps its note."""
    about = folder.provenance()
    if not trained and about.get("ended"):
        return
    write(folder, {**about, "dragoman": version("dragoman"), "torch": torch.__version__, "ended": now()})


def describe_parent(run: Path) -> dict[str, Any]:
    """Return which run a new one begins with: its path, its weights' digest, its steps and its own parent."""
    folder = RunFolder(run)
    return {
        "run": str(run.absolute()),
        "digest": read_digest(folder.model),
        "steps": int(load_tensors(folder.model)[1].get("step", 0)),
        "teacher": folder.teacher().get("teacher"),
        "parent": folder.provenance().get("parent"),
    }


def write(folder: RunFolder, about: dict[str, Any]) -> None:
    write_text(folder.provenance_file, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
