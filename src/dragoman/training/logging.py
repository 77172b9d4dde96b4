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
from dragoman.io import report_write_errors, write_text
from dragoman.progress import INFO, WARNING, Report
from dragoman.training.checkpoint import TrainState
from dragoman.training.choices import Choices, peak_memory
from dragoman.training.optim import MAX_WARMUP
from dragoman.training.step import StepMetrics


class Metrics:
    """metrics.jsonl, one record a line, and the same numbers for TensorBoard. Cut back to the step resumed from."""

    def __init__(self, path: Path | None, *, step: int, board: bool) -> None:
        """Without a path, as on ranks other than 0, nothing is written."""
        self.path, self.wants_board = path, board
        self.file: IO[str] | None = None
        self.board: Any = None
        self.truncate(step)

    def truncate(self, step: int) -> None:
        """Remove the records after this step."""
        self.close()
        if self.path is None:
            return
        kept = [line for line in _lines(self.path) if _step(line) <= step]
        write_text(self.path, "".join(line + "\n" for line in kept))
        self.file = self.path.open("a", encoding="utf-8")
        self.board = _board(self.path.parent / "tensorboard", step) if self.wants_board else None

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append a record. Numbers that are not finite become null, since JSON has neither NaN nor infinity."""
        if self.file is None or self.path is None:
            return
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with report_write_errors(self.path):
            self.file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
            self.file.flush()
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


class TrainLogger:
    """Shows progress, writes metrics of training and estimates how long it takes."""

    def __init__(self, report: Report, metrics: Metrics, settings: TrainSettings, choices: Choices) -> None:
        self.report, self.metrics, self.settings = report, metrics, settings
        self.device = torch.device(choices.device)
        self.peak_flops = choices.world * matrix_speed(self.device, choices.precision)
        self.forecast = Forecast(report, settings)
        self.bar = report.progress("training", total=100)  # in percent, whatever the limit

    def reset(self, flops: float) -> None:
        """Begin to measure speed anew, with so many FLOPs spent before."""
        self.tokens, self.flops, self.since = 0, flops, time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside, that of validations, as training."""
        begun = time.monotonic()
        yield
        self.since += time.monotonic() - begun

    def log(self, state: TrainState, newest: StepMetrics, done: float) -> None:
        """Show the mean losses since the last log, and write them if it is time; `done` is the share of the run."""
        seconds = time.monotonic() - self.since
        speed, loss, nll, divergence = self.tokens / seconds, *state.mean_losses()
        left = timedelta(seconds=round(state.seconds * max(1 / done - 1, 0)))
        self.bar.update(
            100 * done,
            f"step {state.step} ({min(done, 1.0):.0%})  epoch {state.epochs:.3g}  loss {loss:.3f}  lr {newest.lr:.2e}  "
            f"grad norm {newest.norm:.2f}  {speed:,.0f} tokens/s  {left} left",
        )
        if state.step % self.settings.log_every == 0:
            work = (state.flops - self.flops) / seconds
            self.metrics.write(
                "train",
                state.step,
                epoch=round(state.epochs, 4),
                loss=loss,
                nll=nll,
                **({"divergence": divergence} if self.settings.consistency != "none" else {}),
                grad_norm=newest.norm,
                lr=newest.lr,
                tokens=state.tokens,
                flops=state.flops,
                tokens_per_second=round(speed),
                flops_per_second=float(f"{work:.4g}"),
                matrix_flops_per_second=float(f"{self.peak_flops:.4g}"),
                utilisation=round(work / self.peak_flops, 4),
                peak_memory=peak_memory(self.device),
                seconds=round(state.seconds, 2),
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
