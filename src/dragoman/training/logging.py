"""What a run tells people while it goes: messages and a progress line on stderr, metrics.jsonl, TensorBoard.

Loss, speed and time left: what is said of training on the way, and written into metrics.jsonl.

How long training will take, or how many steps it will have: estimated once, from the speed of its first seconds.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from dragoman.config.settings import TrainSettings
from dragoman.errors import UserError
from dragoman.hardware import matrix_speed
from dragoman.progress import INFO, WARNING, ProgressBar, Report
from dragoman.run_dir import unwritable, write_text
from dragoman.training.checkpoint import Progress
from dragoman.training.choices import Choices, peak_memory
from dragoman.training.optim import MAX_WARMUP
from dragoman.training.step import Update


class Metrics:
    """metrics.jsonl, one record a line, and the same numbers for TensorBoard. Cut back to the step resumed from."""

    def __init__(self, path: Path, *, step: int, board: bool) -> None:
        self.path, self.wants_board = path, board
        self.file: IO[str] | None = None
        self.board: Any = None
        self.cut(step)

    def cut(self, step: int) -> None:
        """Forget what came after this step."""
        self.close()
        kept = [line for line in _lines(self.path) if _step(line) <= step]
        write_text(self.path, "".join(line + "\n" for line in kept))
        self.file = self.path.open("a", encoding="utf-8")
        self.board = _board(self.path.parent / "tensorboard", step) if self.wants_board else None

    def write(self, event: str, step: int, **values: Any) -> None:
        """One more record. What is not a number is null: JSON knows neither NaN nor infinity."""
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        assert self.file is not None
        try:
            self.file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
            self.file.flush()
        except OSError as error:
            raise unwritable(self.path, error) from None
        if self.board:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.board.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        for sink in (self.file, self.board):
            if sink:
                with suppress(OSError):  # a disk that is full was said already
                    sink.close()
        self.file = self.board = None


class Unwritten(Metrics):
    """Those of a process that does not write: the first one does."""

    def __init__(self) -> None:
        """There is no file."""

    def cut(self, step: int) -> None:
        """There is nothing to forget."""

    def write(self, event: str, step: int, **values: Any) -> None:
        """Nowhere."""

    def close(self) -> None:
        """There is nothing to close."""


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")  # a torn line: not kept


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("train.tensorboard=true needs TensorBoard: pip install 'dragoman[board]'") from None
    return SummaryWriter(str(folder), purge_step=step + 1)


class Meter:
    """What has happened since it was last said."""

    def __init__(
        self, bar: ProgressBar, metrics: Metrics | Unwritten, settings: TrainSettings, choices: Choices, flops: float
    ) -> None:
        self.bar, self.metrics, self.settings = bar, metrics, settings
        self.device = torch.device(choices.device)
        self.fastest = choices.world * matrix_speed(self.device, choices.precision)
        self.reset(flops)

    def reset(self, flops: float) -> None:
        self.tokens, self.flops, self.since = 0, flops, time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, time does not count: that of validations is none of training."""
        begun = time.monotonic()
        yield
        self.since += time.monotonic() - begun

    def step(self, update: Update) -> None:
        self.tokens += update.tokens

    def say(self, progress: Progress, update: Update, done: float) -> None:
        """Show and record what the last steps came to: `update` is the newest, `done` the share of the run so far."""
        seconds = time.monotonic() - self.since
        speed, loss, nll, divergence = self.tokens / seconds, *progress.running.means()
        epoch = progress.place.epoch + progress.place.passed
        left = timedelta(seconds=round(progress.seconds * max(1 / done - 1, 0)))
        self.bar.update(
            100 * done,
            f"step {progress.step} ({min(done, 1.0):.0%})  epoch {epoch:.3g}  loss {loss:.3f}  lr {update.lr:.2e}  "
            f"grad norm {update.norm:.2f}  {speed:,.0f} tokens/s  {left} left",
        )
        if progress.step % self.settings.log_every == 0:
            work = (progress.flops - self.flops) / seconds
            self.metrics.write(
                "train",
                progress.step,
                epoch=round(epoch, 4),
                loss=loss,
                nll=nll,
                **({"divergence": divergence} if self.settings.consistency != "none" else {}),
                grad_norm=update.norm,
                lr=update.lr,
                tokens=progress.tokens,
                flops=progress.flops,
                tokens_per_second=round(speed),
                flops_per_second=float(f"{work:.4g}"),
                matrix_flops_per_second=float(f"{self.fastest:.4g}"),
                utilisation=round(work / self.fastest, 4),
                peak_memory=peak_memory(self.device),
                seconds=round(progress.seconds, 2),
            )


MEASURED = 5.0  # seconds of training from which the speed is estimated; its first step, which is slow, left out
FEW_EPOCHS = 0.5  # below this share of an epoch the user is told how little of the data is read


class Reached(NamedTuple):
    """Where training is: by its limits, such as {"train.steps=1000": 0.2}, in steps, epochs and seconds."""

    shares: Mapping[str, float]
    step: int
    epochs: float
    seconds: float


class Forecast:
    """Log once how long training will take, or how many steps a limit of time allows."""

    def __init__(self, report: Report, settings: TrainSettings) -> None:
        self.report, self.settings = report, settings
        self.begun: Reached | None = None
        self.told = False

    def update(self, now: Reached) -> None:
        """Take in where training is after a step; log where it will end as soon as the speed is known."""
        if self.told:
            return
        if self.begun is None or now.step <= self.begun.step:  # the first step, or the first after a roll-back
            self.begun = now
        elif now.seconds - self.begun.seconds >= MEASURED:
            self.told = True
            self.report.log(*self.estimate(self.begun, now))

    def estimate(self, begun: Reached, now: Reached) -> tuple[str, int]:
        """Return the message about the end of training and its level; the limit that comes first decides."""
        measured = now.seconds - begun.seconds
        left = {
            limit: (1 - share) * measured / (share - begun.shares[limit])
            for limit, share in now.shares.items()
            if share > begun.shares[limit]
        }
        if not left:  # too far away to be seen
            return f"{next(iter(now.shares))} cannot be estimated yet", INFO
        limit = min(left, key=lambda name: left[name])
        steps = now.step + round(left[limit] * (now.step - begun.step) / measured)
        epochs = now.epochs + left[limit] * (now.epochs - begun.epochs) / measured
        lasts = timedelta(seconds=round(now.seconds + left[limit]))
        if limit.startswith("train.steps="):
            return f"at this speed {limit} takes about {lasts} ({epochs:.2g} epochs)", INFO
        gives = f"at this speed {limit} gives about {steps:,} steps ({few(epochs) or f'{epochs:.2g} epochs'})"
        if steps <= self.settings.warmup:
            return f"{gives}, {self.inside_warmup(limit)}", WARNING
        if limit.startswith("train.minutes=") and steps * MAX_WARMUP < self.settings.warmup:
            shortened = "so the warm-up is shortened to a tenth of the time"
            return f"{gives}; train.warmup={self.settings.warmup} is more than a tenth of them, {shortened}", WARNING
        return f"{gives} and takes about {lasts}", WARNING if few(epochs) else INFO

    def inside_warmup(self, limit: str) -> str:
        if limit.startswith("train.minutes="):  # the rate rises by the clock then (training/optim.py)
            return (
                f"fewer than train.warmup={self.settings.warmup}, so the warm-up is shortened to a tenth of the time; "
                "train longer"
            )
        return f"inside the warm-up of {self.settings.warmup}; set train.warmup lower or train longer"


def few(epochs: float) -> str:
    """Return how little of the data is read where that is far below an epoch, else nothing."""
    return f"{epochs:.2g} of an epoch" if epochs < FEW_EPOCHS else ""
