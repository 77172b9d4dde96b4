"""The loop: step, validate, save, and go on exactly where it was.

dragoman.train("recipe.yaml", out="run")
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch

from dragoman.config import Recipe, TrainSettings, pick, read_recipe
from dragoman.data.stream import Place, Stream, ahead
from dragoman.models.base import Seq2Seq
from dragoman.models.build import build_model, completed, kind_of, parameters
from dragoman.store import RunFolder, load_tensors
from dragoman.text.tokenizer import TOKENIZERS, Tokenizers
from dragoman.train import optim, record
from dragoman.train.choices import choose, rechosen
from dragoman.train.prepare import Prepared, prepare
from dragoman.train.record import Progress
from dragoman.train.report import Metrics, Report
from dragoman.train.step import Stepper, Update
from dragoman.train.validate import Validator
from dragoman.translator import put_weights
from dragoman.types import Batch, Mistake, Stop

ROLL_BACK_AFTER = 5  # non-finite steps in a row
MAY_CHANGE = {
    "steps", "epochs", "minutes", "patience", "log_every", "keep", "average",  # when to stop, what to keep
    "device", "precision", "compile", "threads",  # where to run: said, because the bits may change
}  # fmt: skip


def train(
    recipe: str | Path | Recipe,
    *,
    out: str | Path,
    overrides: Sequence[str] = (),
    resume: bool = False,
    init_from: str | Path | None = None,
    report: Report | None = None,
) -> Path:
    """Train a recipe into the folder `out` and return that folder."""
    report = report or Report()
    folder = RunFolder(out)
    whole = recipe if isinstance(recipe, Recipe) else read_recipe(Path(recipe), overrides)
    begun = folder.format.exists()
    if begun and not resume:
        raise Mistake(
            f"{str(folder.path)!r} already holds a run; add --resume to go on with it, or choose another --out"
        )
    if folder.path.exists() and not begun and any(folder.path.iterdir()):
        raise Mistake(f"{str(folder.path)!r} is not empty and is no run folder; choose another --out")
    tokenizers: Tokenizers | None = None
    if init_from is not None:
        whole, tokenizers = inherited(whole, RunFolder(init_from), report)
    whole = completed(whole)
    check(whole)
    if begun:
        same_run(folder.recipe(), whole)
    folder.begin(whole)
    prepared = prepare(whole, folder, report, tokenizers=tokenizers)
    Trainer(whole, folder, prepared, report, init_from=Path(init_from) if init_from else None).run()
    return folder.path


def check(recipe: Recipe) -> None:
    """Whatever a menu can refuse is refused before anything is read or written."""
    optim.check(recipe.train)
    pick(TOKENIZERS, recipe.tokenizer.kind, "tokenizer.kind")
    if recipe.train.metric == "bleu" and not recipe.data.dev and recipe.train.patience:
        raise Mistake("train.patience watches the dev set, so it needs data.dev")


def inherited(recipe: Recipe, parent: RunFolder, report: Report) -> tuple[Recipe, Tokenizers]:
    """Fine-tuning takes over the parent's tokenizer and model; what the recipe says of the model is laid over it."""
    before = parent.recipe()
    report.say(f"starting from {parent.path}: its tokenizer and its model")
    given = recipe.model if recipe.model != Recipe().model else {}
    tokenizer = before.tokenizer.model_copy(update={"sampling": recipe.tokenizer.sampling})
    update = {"model": {**before.model, **given}, "tokenizer": tokenizer}
    return recipe.model_copy(update=update), Tokenizers.load(parent.tokenizer)


def same_run(before: Recipe, now: Recipe) -> None:
    """A resumed run is the same run: only when to stop and where to run may differ."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    for section in old:
        for key in old[section]:
            if old[section][key] != new[section].get(key) and not (section == "train" and key in MAY_CHANGE):
                raise Mistake(
                    f"this run was begun with {section}.{key}={old[section][key]!r}, and cannot go on with "
                    f"{new[section].get(key)!r}; keep it, or begin a new run with --init-from"
                )


class Trainer:
    def __init__(
        self, recipe: Recipe, folder: RunFolder, prepared: Prepared, report: Report, *, init_from: Path | None
    ) -> None:
        self.recipe, self.settings, self.folder, self.report = recipe, recipe.train, folder, report
        self.prepared = prepared
        newest = record.newest(folder)
        saved = record.load(newest) if newest else None
        choices = rechosen(saved.choices, self.settings) if saved else choose(self.settings)
        torch.set_num_threads(choices.threads)
        self.stepper = Stepper(self.model(init_from), self.settings, choices)
        self.progress = replace(saved, choices=choices) if saved else Progress(choices, prepared.digest)
        if newest:
            if self.progress.data != prepared.digest:
                raise Mistake("the training data is not what this run was begun with; restore it, or begin a new run")
            record.restore(newest, self.stepper)
            report.say(f"going on from step {self.progress.step}")
        self.stream = Stream(
            prepared.train,
            prepared.tokenizers,
            layout=kind_of(recipe.model).layout,
            tokens=self.settings.tokens,
            seed=self.settings.seed,
            sampling=recipe.tokenizer.sampling,
        )
        self.validator = Validator(recipe, prepared, self.stream.widths, choices)
        self.metrics = Metrics(folder.metrics, step=self.progress.step, board=self.settings.tensorboard)
        self.signal = 0

    def model(self, init_from: Path | None) -> Seq2Seq:
        torch.manual_seed(self.settings.seed)
        tokenizers = self.prepared.tokenizers
        model = build_model(self.recipe, source_size=tokenizers.source.size, target_size=tokenizers.target.size)
        if init_from is not None:
            parent = RunFolder(init_from)
            put_weights(model, load_tensors(parent.model)[0], str(parent.model))
        return model

    def run(self) -> None:
        if self.over():
            self.report.say(f"this run has already come to its end ({self.settings.limit}); raise it to train on")
            self.finish()
            return
        self.report.say(
            f"{parameters(self.stepper.model):,} parameters; {self.progress.choices}; until {self.settings.limit}"
        )
        self.report.begin(self.settings.steps, self.progress.step)
        before = {number: signal.signal(number, self.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while not self.over():
                self.laps()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.report.end()
            self.metrics.close()
        self.finish()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """The first one lets the step end and saves; a second one is for those who cannot wait."""
        signal.signal(number, signal.SIG_DFL)
        self.signal = number

    def laps(self) -> None:
        """Steps from where we are, until the end or until a roll-back asks to begin the stream anew."""
        place = self.progress.place
        begun, seconds = time.monotonic(), self.progress.seconds
        meter = Meter(self.report, self.metrics, self.settings)
        with closing(ahead(lambda: self.stream.batches(place))) as batches:
            while not self.over():
                some, place_after = self.gather(batches)
                update = self.try_update(some)
                self.progress = replace(
                    self.progress,
                    step=self.progress.step + 1,
                    place=place_after,
                    seconds=seconds + time.monotonic() - begun,
                    tokens=self.progress.tokens + update.tokens,
                    skipped_in_a_row=0 if update.finite else self.progress.skipped_in_a_row + 1,
                )
                if not update.finite and self.bad_step(update):
                    return
                meter.step(self.progress, update)
                self.after_step()

    def gather(self, batches: Iterator[tuple[Batch, Place]]) -> tuple[list[Batch], Place]:
        some, place = [], self.progress.place
        for _ in range(self.settings.accumulate):
            batch, place = next(batches)
            some.append(batch)
        return some, place

    def try_update(self, some: list[Batch]) -> Update:
        step = self.progress.step + 1
        rate = optim.rate(step, self.done(), self.settings)
        while True:
            try:
                return self.stepper.update(some, step, self.progress.scale * rate)
            except torch.OutOfMemoryError:
                if self.stepper.choices.split >= max(len(batch.source_BS) for batch in some):
                    raise Mistake(
                        "a single row does not fit into memory; make the model smaller or data.max_length lower"
                    ) from None
            choices = self.stepper.shrink()
            self.progress = replace(self.progress, choices=choices)
            self.report.say(
                f"out of memory: batches are cut into {choices.split} parts from now on; next time set "
                f"train.tokens={self.settings.tokens // choices.split} train.accumulate={self.settings.accumulate * choices.split}"
            )

    def bad_step(self, update: Update) -> bool:
        """Count a step that was not taken; after several in a row go back to the last checkpoint with a smaller rate."""
        self.progress = replace(self.progress, skipped=self.progress.skipped + 1)
        step = self.progress.step
        self.report.say(f"step {step} skipped: loss {update.loss}, gradient norm {update.norm}")
        self.metrics.write("skipped", step, count=self.progress.skipped)
        newest = record.newest(self.folder)
        if self.progress.skipped_in_a_row < ROLL_BACK_AFTER:
            return False
        if newest is None:
            raise Mistake(
                f"{ROLL_BACK_AFTER} steps in a row were not finite before the first checkpoint; try a smaller train.lr"
            )
        back = record.load(newest)
        scale = min(self.progress.scale, back.scale) / 2
        record.restore(newest, self.stepper)
        self.report.say(
            f"{ROLL_BACK_AFTER} such steps in a row: back to step {back.step}, learning rate times {scale:g}"
        )
        self.metrics.write("rolled back", step, to=back.step, scale=scale)
        self.progress = replace(back, scale=scale, skipped=self.progress.skipped, skipped_in_a_row=0)
        return True

    def after_step(self) -> None:
        step, settings = self.progress.step, self.settings
        due = bool(settings.validate_every) and step % settings.validate_every == 0
        last = self.over()
        if (due or last) and self.validator.batches:
            self.validate()
        if due or last or step % settings.save_every == 0 or self.signal:
            record.save(self.folder, self.stepper, self.progress)
            if due or last or not self.folder.model.exists():
                self.publish()
        if self.signal and not last:
            name = signal.Signals(self.signal).name
            raise Stop(f"stopped by {name} at step {step}, all saved; go on with --resume", 128 + self.signal)

    def validate(self) -> None:
        with self.stepper.averaged():
            validation = self.validator(self.stepper.model)
        self.progress = self.progress.validated(validation, self.settings.metric, self.settings.keep)
        self.report.say(f"step {self.progress.step}: {validation}")
        self.metrics.write(
            "validate",
            self.progress.step,
            loss=validation.loss,
            perplexity=validation.perplexity,
            bleu=validation.bleu,
            signature=validation.signature,
        )

    def publish(self) -> None:
        """The model that users of the folder get, as good as it is known so far."""
        weights = record.final_weights(self.folder, self.stepper, self.progress, self.settings.average)
        self.folder.save_model(
            weights,
            tokenizer=self.prepared.tokenizers.fingerprint(),
            longest=str(self.prepared.longest),
            step=str(self.progress.step),
        )

    def done(self) -> float:
        """The share of the run's limit that is used up: of steps, epochs or minutes, whichever comes first."""
        settings, progress = self.settings, self.progress
        shares = [
            progress.step / settings.steps if settings.steps else 0.0,
            progress.place.epoch / settings.epochs if settings.epochs else 0.0,
            progress.seconds / settings.minutes / 60 if settings.minutes else 0.0,
        ]
        return max(shares)

    def over(self) -> bool:
        return self.done() >= 1 or 0 < self.settings.patience <= self.progress.stale

    def finish(self) -> None:
        """Say how it went; a run that was cut between its last save and here publishes again."""
        self.publish()
        progress = self.progress
        best = f"; best at step {progress.best[0][1]}" if progress.best else ""
        skipped = f"; {progress.skipped} steps skipped" if progress.skipped else ""
        self.report.say(
            f"done: {progress.step} steps, {progress.tokens:,} tokens in {progress.seconds:.0f} s{best}{skipped}"
        )


class Meter:
    """Loss, speed and time left, over the steps since they were last said."""

    def __init__(self, report: Report, metrics: Metrics, settings: TrainSettings) -> None:
        self.report, self.metrics, self.settings = report, metrics, settings
        self.reset()

    def reset(self) -> None:
        self.updates: list[Update] = []
        self.since = time.monotonic()

    def step(self, progress: Progress, update: Update) -> None:
        self.updates.append(update)
        speed = sum(u.tokens for u in self.updates) / (time.monotonic() - self.since)
        loss = sum(u.loss for u in self.updates) / len(self.updates)
        said = f"step {progress.step}  loss {loss:.3f}  {speed:,.0f} tokens/s"
        self.report.step(progress.step, said + self.left(progress))
        if progress.step % self.settings.log_every == 0:
            self.metrics.write(
                "train",
                progress.step,
                epoch=progress.place.epoch,
                loss=loss,
                likelihood=sum(u.likelihood for u in self.updates) / len(self.updates),
                norm=update.norm,
                lr=update.lr,
                tokens=progress.tokens,
                tokens_per_second=round(speed),
                seconds=round(progress.seconds, 2),
            )
            self.reset()

    def left(self, progress: Progress) -> str:
        seconds = []
        if self.settings.steps:
            seconds.append((self.settings.steps - progress.step) * progress.seconds / progress.step)
        if self.settings.minutes:
            seconds.append(self.settings.minutes * 60 - progress.seconds)
        return f"  {max(min(seconds), 0):.0f} s left" if seconds else ""
