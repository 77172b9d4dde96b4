"""The loop: step, validate, save, and go on exactly where it was.

dragoman.train("recipe.yaml", out="run")
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from dragoman.config.settings import LIMITS
from dragoman.data.batches import RankShare
from dragoman.data.stream import StreamPosition, prefetch
from dragoman.data.tokenizers import Tokenizers
from dragoman.errors import Stop, UserError
from dragoman.models.flops import Cost
from dragoman.models.registry import parameters
from dragoman.process_group import ProcessGroup, join_process_group
from dragoman.progress import WARNING, Report
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder
from dragoman.training import checkpoint as record
from dragoman.training import optim
from dragoman.training.checkpoint import Progress, Running, record_end, record_start
from dragoman.training.choices import Choices, choose, peak_memory, rechosen
from dragoman.training.consistency import passes
from dragoman.training.logging import Forecast, Meter, Metrics, Reached, Unwritten, few
from dragoman.training.prepare import Prepared, check_alike, comes_in_few_shapes, form_of, prepare, stream_of
from dragoman.training.start import Order, Start, begin, meeting_minutes, new_model
from dragoman.training.step import Pending, Stepper, Update, settled
from dragoman.training.validation import Validator
from dragoman.types import Batch

ROLL_BACK_AFTER = 5  # non-finite steps in a row
LOOK = 16  # steps after which the numbers of a GPU's updates are looked at, at the latest
DEPTH = {"cpu": 16, "cuda": 64}  # batches that are made ahead: a GPU is not to wait while a window is packed
SMALLEST_SCALE = 2.0**-10  # of the learning rate: a run that needs less than this will not recover


def train(
    recipe: str | Path | Recipe,
    *,
    out: str | Path,
    overrides: Sequence[str] = (),
    resume: bool = False,
    init_from: str | Path | None = None,
    tokenizers: Tokenizers | None = None,
    report: Report | None = None,
) -> Path:
    """Train a recipe into the run folder `out`, and return that folder.

    `overrides` are settings such as "train.steps=1000", laid over the recipe. `resume` goes on with the run in `out`;
    `init_from` begins with the weights of another run. Tokenizers are learned, unless they are given.
    In processes that torchrun started, all train together (docs/many-machines.md).

        run = dragoman.train("recipe.yaml", out="runs/mine", overrides=["train.steps=30"])
        translator = dragoman.load(run)
        print(translator.translate(["A man walks his dog."])[0].text)
    """
    folder = RunFolder(out)
    with join_process_group(lambda: meeting_minutes(recipe, overrides)) as group, ExitStack() as held:
        report = report if report and group.is_main else Report(quiet=not group.is_main)
        start = begin(Order(recipe, folder, overrides, resume, init_from), report, held, group)
        given = start.parent.tokenizers if start.parent else tokenizers
        prepared = group.in_rank_order(lambda: prepare(start.recipe, folder, report, tokenizers=given))
        check_alike(prepared, group)
        form, resumed = form_of(start.recipe), start.newest is not None
        group.broadcast(lambda: record_start(folder, prepared, form, init_from=start.init_from, resumed=resumed))
        saved = group.run_on_all(lambda: record.load(start.newest) if start.newest else None)
        choices = group.run_on_all(lambda: chosen(start.recipe, saved, group))
        trainer = group.run_on_all(lambda: Trainer(start, saved, choices, folder, prepared, report, group))
        with trainer.group.handle_peer_failure():
            trainer.run()
    return folder.path


def chosen(recipe: Recipe, saved: Progress | None, group: ProcessGroup) -> Choices:
    """What this process is to run on, and how."""
    now = choose(recipe.train, recipe.model.layout, few_shapes=comes_in_few_shapes(recipe))
    return (rechosen(saved.choices, now, recipe.train, group.world_size) if saved else now).shared(group)


class Trainer:
    def __init__(
        self,
        start: Start,
        saved: Progress | None,
        choices: Choices,
        folder: RunFolder,
        prepared: Prepared,
        report: Report,
        group: ProcessGroup,
    ) -> None:
        self.recipe, self.settings, self.folder, self.report = start.recipe, start.recipe.train, folder, report
        self.prepared, self.group = prepared, group
        self.progress = self.begin_or_go_on(start, saved, choices)
        self.cost = Cost.of(self.stepper.model, passes=passes(self.settings))
        share = RankShare(group.rank, group.world_size)
        few_shapes = self.progress.choices.few_shapes
        self.stream = stream_of(self.recipe, prepared, few_shapes=few_shapes, share=share)
        if group.is_distributed and self.stepper.device.type == "cpu":
            self.stepper.rehearse(self.stream.nothing())
        about = (self.stream.widths, self.progress.choices, self.progress.last)
        self.validator = Validator(self.recipe, prepared, *about)
        writes = group.is_main
        board = self.settings.tensorboard
        self.metrics = Metrics(folder.metrics, step=self.progress.step, board=board) if writes else Unwritten()
        self.asked = 0  # the signal that this process got
        self.signal = 0  # the one that all processes know of
        self.forecast = Forecast(report, self.settings)
        self.bar = report.progress("training", total=100)  # in percent, whatever the limit
        self.waiting: list[Pending] = []  # updates whose numbers have not been looked at

    def begin_or_go_on(self, start: Start, saved: Progress | None, choices: Choices) -> Progress:
        newest, parent = start.newest, start.parent
        choices.apply()
        if saved and (changed := self.prepared.changed_since(saved.data)):
            raise UserError(f"{changed} is not what this run was begun with; restore it, or begin a new run")
        self.group = self.group.start_work(torch.device(choices.device), self.settings.timeout)
        model = new_model(self.recipe, self.prepared.tokenizers, parent)
        self.stepper = Stepper(model, self.settings, choices, self.group)
        if not newest or not saved:
            longest = max(self.prepared.longest, parent.longest if parent else 0)
            return Progress(choices, self.prepared.digests, longest=longest, parent=start.init_from)
        record.restore(newest, self.stepper)
        self.report.log(f"going on from step {saved.step}")
        if choices != saved.choices:
            self.report.log(f"it ran on {saved.choices} before: equal within tolerance from here on, not to the bit")
        return replace(saved, choices=choices)

    def run(self) -> None:
        why = self.ended()
        try:
            if why:
                self.report.log(f"this run has already come to its end ({why}); raise it to train on")
                self.publish()  # it may have been killed between its last checkpoint and this
            else:
                self.go()
        finally:
            self.metrics.close()
            self.stepper.record_no_more()
        self.group.broadcast(lambda: record_end(self.folder, trained=not why))
        self.say_how_it_went()

    def go(self) -> None:
        way = f" ({self.settings.parallel})" if self.group.is_distributed else ""
        self.report.log(
            f"{parameters(self.stepper.model):,} parameters; {self.progress.choices}{way}; until {self.settings.limit}"
        )
        if 0 < self.settings.steps <= self.settings.warmup:
            self.report.log(
                f"the run ends inside its warm-up: train.warmup={self.settings.warmup} should be far lower", WARNING
            )
        if not self.validator.batches:
            self.report.log(
                "there is no data.dev: nothing is checked on the way, and the last weights are kept", WARNING
            )
        with self.signals(), self.bar:
            while not self.ended():
                self.laps()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, Ctrl-C and SIGTERM are asked for at the end of a step. Only the main thread may listen to them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """The first one lets the step end and saves; a second one is for those who cannot wait."""
        signal.signal(number, signal.SIG_DFL)
        self.asked = number

    def laps(self) -> None:
        """Steps from where we are, until the end or until a roll-back asks to begin the stream anew."""
        place = self.progress.place
        begun, seconds = time.monotonic(), self.progress.seconds
        meter = Meter(self.bar, self.metrics, self.settings, self.stepper.choices, self.progress.flops)
        with closing(prefetch(lambda: self.batches(place), DEPTH[self.stepper.device.type])) as batches:
            while not self.ended():
                some, place_after = self.gather(batches)
                pending = self.try_update(some)
                spent, now = self.agree(sum(map(self.cost.training, some)), seconds + time.monotonic() - begun)
                self.progress = self.progress.stepped(pending, place_after, now, spent)
                self.waiting.append(pending)
                if not self.due_to_look():
                    continue
                if self.look(meter):
                    return
                if self.progress.step % self.settings.log_every == 0:
                    self.progress = replace(self.progress, running=Running())
                    meter.reset(self.progress.flops)
                with meter.paused():
                    self.after_step()

    def agree(self, flops: float, seconds: float) -> tuple[float, float]:
        """What must be the same everywhere, so that all do the same next: the operations of all, the clock of the
        first, and a signal that any of them got."""
        known = self.group.gather_numbers(flops, seconds, self.asked)
        self.signal = int(max(asked for _, _, asked in known))
        return sum(spent for spent, _, _ in known), known[0][1]

    def due_to_look(self) -> bool:
        """Whether to wait for what the last updates did: on a GPU only where something hangs on it."""
        step, settings = self.progress.step, self.settings
        every = [LOOK, settings.log_every, settings.save_every, settings.validate_every]
        due = any(number and step % number == 0 for number in every)
        return self.stepper.device.type == "cpu" or due or bool(self.signal) or bool(self.ended())

    def look(self, meter: Meter) -> bool:
        """Take in what the updates since the last look did; True if that sent the run back to a checkpoint."""
        some, self.waiting = self.waiting, []
        for step, update in enumerate(settled(some), self.progress.step - len(some) + 1):
            self.progress = self.progress.known(update)
            if not update.finite and self.bad_step(step, update):
                return True
            meter.step(update)
        meter.say(self.progress, update, self.done())
        self.forecast.update(Reached(self.shares(), self.progress.step, self.epochs, self.progress.seconds))
        if (captured := self.stepper.captured) and captured.why_not:
            self.report.log(f"updates cannot be recorded and are launched kernel by kernel ({captured.why_not})")
            self.stepper.record_no_more()
        return False

    def batches(self, place: StreamPosition) -> Iterator[tuple[Batch, StreamPosition]]:
        """From a place on; for a GPU, in memory that it can fetch from by itself."""
        for batch, after in self.stream.batches(place):
            yield (batch if self.stepper.device.type == "cpu" else batch.pin_memory()), after

    def gather(self, batches: Iterator[tuple[Batch, StreamPosition]]) -> tuple[list[Batch], StreamPosition]:
        some, place = [], self.progress.place
        for _ in range(self.settings.accumulate):
            batch, place = next(batches)
            some.append(batch)
        return some, place

    def try_update(self, some: list[Batch]) -> Pending:
        step = self.progress.step + 1
        clock = self.progress.seconds / self.settings.minutes / 60 if self.settings.minutes else 0.0
        rate = optim.compute_learning_rate(step, self.settings, done=self.done(), clock=clock)
        while True:
            try:
                return self.stepper.update(some, step, self.progress.scale * rate)
            except torch.OutOfMemoryError:
                if self.group.is_distributed:
                    raise UserError(
                        f"process {self.group.rank} is out of memory; start more processes, so that each has fewer "
                        f"rows, or begin again with train.tokens={self.settings.tokens // 2}"
                    ) from None
                if self.stepper.choices.split >= max(len(batch.source_BS) for batch in some):
                    raise UserError(
                        "a single row does not fit into memory; make the model smaller or data.max_length lower"
                    ) from None
            choices = self.stepper.shrink()
            self.progress = replace(self.progress, choices=choices)
            tokens, accumulate = self.settings.tokens // choices.split, self.settings.accumulate * choices.split
            self.report.log(
                f"out of memory: batches are cut into {choices.split} parts from now on; next time set "
                f"train.tokens={tokens} train.accumulate={accumulate}",
                WARNING,
            )

    def bad_step(self, step: int, update: Update) -> bool:
        """Say that a step was not taken; after several in a row go back to the last checkpoint with a smaller rate."""
        self.report.log(f"step {step} skipped: loss {update.loss}, gradient norm {update.norm}", WARNING)
        self.metrics.write("skipped", step, count=self.progress.skipped)
        if self.progress.skipped_in_a_row < ROLL_BACK_AFTER:
            return False
        newest = self.group.broadcast(lambda: record.newest(self.folder))
        if newest is None:
            raise self.group.user_error(
                f"{ROLL_BACK_AFTER} steps in a row were not finite before the first checkpoint; try a smaller train.lr"
            )
        self.roll_back(newest)
        return True

    def roll_back(self, newest: Path) -> None:
        now, back = self.progress, self.group.broadcast(lambda: record.load(newest))
        scale = back.scale / 2
        if scale < SMALLEST_SCALE:
            raise self.group.user_error(
                f"the steps after step {back.step} are not finite even at {back.scale:g} of the learning rate; "
                "look at the data, or begin a new run with a smaller train.lr"
            )
        record.restore(newest, self.stepper)
        kept = {"skipped": now.skipped, "seconds": now.seconds, "flops": now.flops, "choices": now.choices}
        self.progress = replace(back, scale=scale, skipped_in_a_row=0, **kept)  # type: ignore[arg-type]
        self.group.broadcast(lambda: record.save_progress(newest, self.progress))
        self.metrics.cut(back.step)
        self.metrics.write("rolled back", back.step, after=now.step, scale=scale, skipped=now.skipped)
        self.report.log(
            f"{ROLL_BACK_AFTER} such steps in a row: back to step {back.step}, learning rate times {scale:g}",
            WARNING,
        )

    def after_step(self) -> None:
        step, settings = self.progress.step, self.settings
        last = bool(self.ended())
        due = bool(settings.validate_every) and step % settings.validate_every == 0
        if self.progress.skipped_in_a_row and not last:
            if due:
                self.report.log(f"nothing is validated at step {step}, in the midst of bad steps")
            if not self.signal:
                return  # a checkpoint there would be none to roll back to
            due = False
        if (due or last) and self.validator.batches:
            self.validate()
        if due or last or step % settings.save_every == 0 or self.signal:
            peak = max(self.progress.peak_memory, peak_memory(self.stepper.device))
            self.progress = replace(self.progress, peak_memory=peak)
            record.save(self.folder, self.stepper, self.progress)
            if due or last or not self.group.broadcast(self.folder.model.exists):
                self.publish()
        if self.signal and not self.ended():
            said = f"stopped by {signal.Signals(self.signal).name} at step {step}, all saved; go on with --resume"
            raise Stop(said if self.group.is_main else "", 128 + self.signal)

    def validate(self) -> None:
        with self.stepper.averaged():
            validation = self.group.broadcast(lambda: self.validator(self.stepper.spare))
        if self.progress.skipped_in_a_row and not math.isfinite(validation.loss):
            raise self.group.user_error(
                f"the run ends at step {self.progress.step} amid steps that are not finite, and neither is its loss on "
                "dev; what was saved before is whole. Try a smaller train.lr"
            )
        self.progress = self.progress.validated(validation, self.settings.metric, self.settings.keep)
        self.report.log(f"step {self.progress.step}: {validation.describe(self.validator.task)}")
        seconds = round(self.progress.seconds, 2)
        self.metrics.write("validate", self.progress.step, **validation.record(), seconds=seconds)

    def publish(self) -> None:
        """The model that users of the folder get, as good as it is known so far; without validation that of now."""
        now = {} if self.progress.best else self.stepper.weights()
        self.group.broadcast(lambda: self.save_model(now))

    def save_model(self, now: dict[str, Tensor]) -> None:
        self.folder.save_model(
            now or record.final_weights(self.folder, self.progress, self.settings.average),
            tokenizer=self.prepared.tokenizers.fingerprint(),
            longest=str(self.progress.longest),
            step=str(self.progress.step),
            **({"usual": self.prepared.usual.text()} if form_of(self.recipe) == "pairs" else {}),
        )

    def shares(self) -> dict[str, float]:
        """How much of each limit is used up."""
        settings, progress = self.settings, self.progress
        reached = (progress.step, self.epochs, progress.seconds / 60, progress.flops)
        limits = [getattr(settings, name) for name in LIMITS]
        rows = zip(LIMITS, limits, reached, strict=True)
        return {f"train.{name}={limit:g}": spent / limit for name, limit, spent in rows if limit}

    @property
    def epochs(self) -> float:
        """How often the training data has been read so far."""
        return self.progress.place.epoch + self.progress.place.passed

    def done(self) -> float:
        """The share of the run that is behind us, by whichever limit comes first."""
        return max(self.shares().values())

    def ended(self) -> str:
        """The setting that ends training here, or nothing."""
        patience = self.settings.patience
        if 0 < patience <= self.progress.stale:
            return f"train.patience={patience}"
        return next((limit for limit, share in self.shares().items() if share >= 1), "")

    def say_how_it_went(self) -> None:
        progress = self.progress
        best = f"; best at step {progress.best[0][1]}" if progress.best else ""
        mean = min(self.settings.average, len(progress.best))
        model = f"the mean of the {mean} best models" if mean > 1 else "the model"
        skipped = f"; {progress.skipped} steps skipped" if progress.skipped else ""
        read = f" ({few(self.epochs)})" if few(self.epochs) else ""
        self.report.log(
            f"done: {progress.step} step{'s' * (progress.step != 1)}, {progress.tokens:,} tokens{read} in "
            f"{progress.seconds:.0f} s{best}{skipped}; {model} is in {self.folder.path}"
        )
