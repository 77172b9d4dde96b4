"""Loss, speed and time left: what is said of training on the way, and written into metrics.jsonl."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from dragoman.config import TrainSettings
from dragoman.hardware import matrix_speed
from dragoman.train.choices import Choices, peak_memory
from dragoman.train.record import Progress
from dragoman.train.report import Metrics, Report, Unwritten
from dragoman.train.step import Update


class Meter:
    """What has happened since it was last said."""

    def __init__(
        self, report: Report, metrics: Metrics | Unwritten, settings: TrainSettings, choices: Choices, flops: float
    ) -> None:
        self.report, self.metrics, self.settings = report, metrics, settings
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
        self.report.step(
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
