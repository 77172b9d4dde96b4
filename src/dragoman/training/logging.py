"""The output of training.

`MetricsWriter` writes metrics.jsonl and TensorBoard files, `TrainLogger` computes speeds and shows a progress bar, and
`Forecast` predicts when training will end.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch

from dragoman.config.settings import TrainSettings
from dragoman.errors import UserError
from dragoman.hardware import measure_matmul_flops
from dragoman.io import report_write_errors, write_text
from dragoman.progress import INFO, WARNING, Report
from dragoman.training.checkpoint import TrainState
from dragoman.training.execution import ExecutionPlan, peak_memory
from dragoman.training.optim import MAX_WARMUP_FRACTION
from dragoman.training.step import StepMetrics


class MetricsWriter:
    """The writer of metrics.jsonl, which has one JSON record per line, and of the same numbers for TensorBoard."""

    def __init__(self, path: Path | None, *, step: int, tensorboard: bool) -> None:
        """Open the files and keep their records up to `step`. Without a path (on ranks other than 0) write nothing."""
        self.path, self.use_tensorboard = path, tensorboard
        self.file: IO[str] | None = None
        self.tensorboard: Any = None
        self.truncate(step)

    def truncate(self, step: int) -> None:
        """Remove the records after this step, and an incomplete last line, which a killed process leaves."""
        self.close()
        if self.path is None:
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").split("\n") if self.path.exists() else []:
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                if float(json.loads(line)["step"]) <= step:
                    kept.append(line + "\n")
        write_text(self.path, "".join(kept))
        self.file = self.path.open("a", encoding="utf-8")
        if self.use_tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError("train.tensorboard=true needs TensorBoard: pip install 'dragoman[board]'") from None
            self.tensorboard = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=step + 1)

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append a record. Numbers that are not finite become null, since JSON has neither NaN nor infinity."""
        if self.file is None or self.path is None:
            return
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with report_write_errors(self.path):
            self.file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
            self.file.flush()
        if self.tensorboard:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.tensorboard.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        for writer in (self.file, self.tensorboard):
            if writer:
                with suppress(OSError):  # a full disk has already been reported
                    writer.close()
        self.file = self.tensorboard = None


class TrainLogger:
    """Show the progress bar and write a record every train.log_every steps."""

    def __init__(self, report: Report, metrics: MetricsWriter, settings: TrainSettings, plan: ExecutionPlan) -> None:
        self.metrics, self.settings = metrics, settings
        self.device = torch.device(plan.device)
        # FLOPs per second of large matrix products on all devices together, measured on this machine
        self.peak_flops = plan.world_size * measure_matmul_flops(self.device, plan.precision)
        self.forecast = Forecast(report, settings)
        self.bar = report.progress("training", total=100)  # percent of the limit that ends the run

    def reset(self, flops: float) -> None:
        """Restart the measurement of speed. `flops` is the total of the run so far."""
        self.tokens = 0  # since now; the trainer adds those of every step
        self.start_flops, self.start_time = flops, time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside this context, such as that of a validation, from the measured speed."""
        pause_start = time.monotonic()
        yield
        self.start_time += time.monotonic() - pause_start

    def log(self, state: TrainState, last: StepMetrics, run_fraction: float) -> None:
        """Show the mean losses since the last record and the metrics of the last step; write a record if it is due."""
        seconds = time.monotonic() - self.start_time
        speed, loss, nll, divergence = self.tokens / seconds, *state.mean_losses()
        time_left = timedelta(seconds=round(state.seconds * max(1 / run_fraction - 1, 0)))
        self.bar.set_done(
            100 * run_fraction,
            f"step {state.step} ({min(run_fraction, 1.0):.0%})  epoch {state.epochs:.3g}  loss {loss:.3f}  "
            f"lr {last.lr:.2e}  grad norm {last.norm:.2f}  {speed:,.0f} tokens/s  {time_left} left",
        )
        if state.step % self.settings.log_every == 0:
            flops_per_second = (state.flops - self.start_flops) / seconds
            self.metrics.write(
                "train",
                state.step,
                epoch=round(state.epochs, 4),
                loss=loss,
                nll=nll,
                **({"divergence": divergence} if self.settings.consistency != "none" else {}),
                grad_norm=last.norm,
                lr=last.lr,
                tokens=state.tokens,
                flops=state.flops,
                tokens_per_second=round(speed),
                flops_per_second=float(f"{flops_per_second:.4g}"),
                matrix_flops_per_second=float(f"{self.peak_flops:.4g}"),
                utilisation=round(flops_per_second / self.peak_flops, 4),
                peak_memory=peak_memory(self.device),
                seconds=round(state.seconds, 2),
            )


MEASURED_SECONDS = 5.0  # of training after the slow first step, from which the speed is estimated
FEW_EPOCHS = 0.5  # messages point out if a run reads the data less often than this


class Forecast:
    """Log once how long training will take, or how many steps fit into train.minutes or another limit."""

    def __init__(self, report: Report, settings: TrainSettings) -> None:
        self.report, self.settings = report, settings
        self.first: tuple[TrainState, Mapping[str, float]] | None = None  # state and fractions of the first update
        self.logged = False

    def update(self, now: TrainState, fractions: Mapping[str, float]) -> None:
        """Record the progress after a step; log the forecast as soon as the speed can be estimated.

        `fractions` maps each limit to the fraction of it that is reached, such as {"train.steps=1000": 0.2}.
        """
        if self.logged:
            return
        if self.first is None or now.step <= self.first[0].step:  # also after a roll-back
            self.first = now, fractions
        elif now.seconds - self.first[0].seconds >= MEASURED_SECONDS:
            self.logged = True
            self.report.log(*self.estimate(*self.first, now, fractions))

    def estimate(
        self, first: TrainState, first_fractions: Mapping[str, float], now: TrainState, fractions: Mapping[str, float]
    ) -> tuple[str, int]:
        """Return a message about the limit that will be reached first, and the level of the message."""
        measured = now.seconds - first.seconds
        gains = {limit: fraction - first_fractions[limit] for limit, fraction in fractions.items()}
        times_left = {limit: (1 - fractions[limit]) * measured / gain for limit, gain in gains.items() if gain > 0}
        if not times_left:
            return f"the time until {next(iter(fractions))} cannot be estimated yet", INFO
        limit, seconds_left = min(times_left.items(), key=lambda item: item[1])
        steps = now.step + round(seconds_left * (now.step - first.step) / measured)
        epochs = now.epochs + seconds_left * (now.epochs - first.epochs) / measured
        duration = timedelta(seconds=round(now.seconds + seconds_left))
        if limit.startswith("train.steps="):
            return f"at this speed {limit} takes about {duration} ({epochs:.2g} epochs)", INFO
        few_epochs = describe_few_epochs(epochs)
        message = f"at this speed {limit} gives about {steps:,} steps ({few_epochs or f'{epochs:.2g} epochs'})"
        warmup, is_time_limit = self.settings.warmup, limit.startswith("train.minutes=")
        shortened = "so the warm-up is shortened to a tenth of the time"  # see compute_learning_rate
        if steps <= warmup and is_time_limit:
            return f"{message}, fewer than train.warmup={warmup}, {shortened}; train longer", WARNING
        if steps <= warmup:
            return f"{message}, inside the warm-up of {warmup}; set train.warmup lower or train longer", WARNING
        if is_time_limit and steps * MAX_WARMUP_FRACTION < warmup:
            return f"{message}; train.warmup={warmup} is more than a tenth of them, {shortened}", WARNING
        return f"{message} and takes about {duration}", WARNING if few_epochs else INFO


def describe_few_epochs(epochs: float) -> str:
    """Return a text such as "0.2 of an epoch" for less than FEW_EPOCHS, else an empty string."""
    return f"{epochs:.2g} of an epoch" if epochs < FEW_EPOCHS else ""
