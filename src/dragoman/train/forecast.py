"""How long training will take, or how many steps it will have: estimated once, from the speed of its first seconds."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

from dragoman.config import TrainSettings
from dragoman.console import NOTE, WARNING
from dragoman.train.optim import WARM_AT_MOST
from dragoman.train.report import Report

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
            self.report.say(*self.estimate(self.begun, now))

    def estimate(self, begun: Reached, now: Reached) -> tuple[str, int]:
        """Return the message about the end of training and its level; the limit that comes first decides."""
        measured = now.seconds - begun.seconds
        left = {
            limit: (1 - share) * measured / (share - begun.shares[limit])
            for limit, share in now.shares.items()
            if share > begun.shares[limit]
        }
        if not left:  # too far away to be seen
            return f"{next(iter(now.shares))} cannot be estimated yet", NOTE
        limit = min(left, key=lambda name: left[name])
        steps = now.step + round(left[limit] * (now.step - begun.step) / measured)
        epochs = now.epochs + left[limit] * (now.epochs - begun.epochs) / measured
        lasts = timedelta(seconds=round(now.seconds + left[limit]))
        if limit.startswith("train.steps="):
            return f"at this speed {limit} takes about {lasts} ({epochs:.2g} epochs)", NOTE
        gives = f"at this speed {limit} gives about {steps:,} steps ({few(epochs) or f'{epochs:.2g} epochs'})"
        if steps <= self.settings.warmup:
            return f"{gives}, {self.inside_warmup(limit)}", WARNING
        if limit.startswith("train.minutes=") and steps * WARM_AT_MOST < self.settings.warmup:
            shortened = "so the warm-up is shortened to a tenth of the time"
            return f"{gives}; train.warmup={self.settings.warmup} is more than a tenth of them, {shortened}", WARNING
        return f"{gives} and takes about {lasts}", WARNING if few(epochs) else NOTE

    def inside_warmup(self, limit: str) -> str:
        if limit.startswith("train.minutes="):  # the rate rises by the clock then (train/optim.py)
            return (
                f"fewer than train.warmup={self.settings.warmup}, so the warm-up is shortened to a tenth of the time; "
                "train longer"
            )
        return f"inside the warm-up of {self.settings.warmup}; set train.warmup lower or train longer"


def few(epochs: float) -> str:
    """Return how little of the data is read where that is far below an epoch, else nothing."""
    return f"{epochs:.2g} of an epoch" if epochs < FEW_EPOCHS else ""
