"""The forecast of the end of training is logged once; runs that are too short give a warning."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dragoman.config.settings import TrainSettings
from dragoman.data.stream import StreamPosition
from dragoman.progress import Report
from dragoman.training.checkpoint import TrainState
from dragoman.training.execution import ExecutionPlan
from dragoman.training.logging import MEASURED_SECONDS, Forecast
from dragoman.training.step import Stepper
from dragoman.training.trainer import train


class CollectingReport(Report):
    """A report that collects messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, ...]] = []

    def log(self, message: str, *level: int) -> None:
        self.messages.append((message, *map(str, level)))


def update(forecast: Forecast, fractions: dict[str, float], step: int, epochs: float, seconds: float) -> None:
    position = StreamPosition(passed=epochs)
    plan = ExecutionPlan("cpu", "float32", False, 1)
    forecast.update(TrainState(plan, {}, step=step, position=position, seconds=seconds), fractions)


def forecast_messages(
    limit: str, total: float, *, warmup: int = 0, epoch: float = 1000.0, speed: float = 2.0
) -> list[str]:
    """Return the messages of a run with `speed` steps per second that reaches the limit in `total` steps.

    An epoch has `epoch` steps.
    """
    report = CollectingReport()
    forecast = Forecast(report, TrainSettings(warmup=warmup))
    for step in range(1, 30):
        update(forecast, {limit: step / total}, step, step / epoch, step / speed)
    return [message for message, *_ in report.messages]


def test_time_of_a_run_limited_by_steps_is_logged_once() -> None:
    assert forecast_messages("train.steps=1000", 1000) == [
        "at this speed train.steps=1000 takes about 0:08:20 (1 epochs)"
    ]


def test_limit_without_progress_is_not_estimated() -> None:
    assert forecast_messages("train.steps=1000", float("inf")) == [
        "the time until train.steps=1000 cannot be estimated yet"
    ]


def test_steps_of_a_run_limited_by_minutes_are_logged() -> None:
    [message] = forecast_messages("train.minutes=10", 1200, warmup=100)
    assert message == "at this speed train.minutes=10 gives about 1,200 steps (1.2 epochs) and takes about 0:10:00"
    [message] = forecast_messages("train.minutes=10", 1200, warmup=300)
    shortened = "train.warmup=300 is more than a tenth of them, so the warm-up is shortened to a tenth of the time"
    assert message == f"at this speed train.minutes=10 gives about 1,200 steps (1.2 epochs); {shortened}"


@pytest.mark.parametrize(
    ("limit", "remedy"),
    [
        ("train.minutes=2", "fewer than train.warmup=300, so the warm-up is shortened to a tenth of the time"),
        ("train.epochs=1", "inside the warm-up of 300; set train.warmup lower or train longer"),
    ],
)
def test_end_during_warm_up_gives_a_warning(limit: str, remedy: str) -> None:
    [message] = forecast_messages(limit, 24, warmup=300, epoch=800.0, speed=0.2)
    assert message.startswith(f"at this speed {limit} gives about 24 steps (0.03 of an epoch), {remedy}")


def test_the_slow_first_step_does_not_count() -> None:
    """It compiles and warms up, so the speed is measured from the steps after it."""
    report = CollectingReport()
    forecast = Forecast(report, TrainSettings())
    for step in range(1, 30):
        update(forecast, {"train.steps=1000": step / 1000}, step, 0.0, 100.0 + step)
    assert "takes about 0:18:20" in report.messages[0][0]


def test_nothing_is_logged_before_the_speed_is_known() -> None:
    report = CollectingReport()
    forecast = Forecast(report, TrainSettings())
    update(forecast, {"train.steps=10": 0.1}, 1, 0.0, 0.0)
    update(forecast, {"train.steps=10": 0.2}, 2, 0.0, MEASURED_SECONDS - 0.1)
    assert report.messages == []


def test_run_limited_by_minutes_logs_forecast_and_summary(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a fake clock a step takes two seconds, so a minute has 30 steps: fewer than the warm-up and than an epoch."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    usual = Stepper.update

    def two_seconds(*arguments: Any) -> Any:
        now[0] += 2.0
        return usual(*arguments)

    monkeypatch.setattr(Stepper, "update", two_seconds)
    report = CollectingReport()
    limits = ["train.steps=0", "train.minutes=1", "train.warmup=300", "train.accumulate=1", "train.tokens=64"]
    settings = ["train.validate_every=0", "train.save_every=1000", "data.train.weight=20.0"]
    train(small, out=tmp_path / "run", overrides=[*limits, *settings], report=report)
    logged = [message for message, *_ in report.messages]
    assert sum(one.startswith("at this speed train.minutes=1 gives about 30 steps (0.12 of an") for one in logged) == 1
    assert sum("epoch 0.0236" in one and "grad norm" in one and "lr " in one and "(20%)" in one for one in logged) == 1
    assert "of an epoch) in 60 s" in logged[-1]
