"""Train a recipe: `train` prepares a run, and `Trainer.fit` is the training loop.

The loop validates, saves checkpoints, and rolls back to the newest checkpoint if several steps in a row are not finite.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from dragoman.config.settings import LIMITS
from dragoman.data.batches import RankShard
from dragoman.data.stream import StreamPosition, prefetch
from dragoman.data.tokenizers import Tokenizers
from dragoman.errors import Stop, UserError
from dragoman.models.registry import Cost, count_parameters
from dragoman.process_group import ProcessGroup, join_process_group
from dragoman.progress import WARNING, Report
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder
from dragoman.training import checkpoint
from dragoman.training.checkpoint import NO_SUMS, TrainState, record_end_of_training, write_provenance
from dragoman.training.execution import peak_memory, plan_execution
from dragoman.training.logging import MetricsWriter, TrainLogger, describe_few_epochs
from dragoman.training.optim import compute_learning_rate
from dragoman.training.prepare import RunData, check_same_data, find_changed_corpus, open_stream, prepare_data
from dragoman.training.prober import Prober
from dragoman.training.start import StartedRun, TrainRequest, describe_run, initialize_model, start_run
from dragoman.training.statistical import describe_phrase_run, train_phrase_system
from dragoman.training.step import PendingStep, Stepper, fetch_metrics
from dragoman.training.validation import Validator
from dragoman.types import Batch

ROLL_BACK_AFTER = 5  # non-finite steps in a row
SYNCHRONISE_EVERY = 16  # maximum number of steps between two transfers of metrics from a GPU
PREFETCH = {"cpu": 16, "cuda": 64}  # batches collated in advance; a GPU uses many while new rows are packed
MIN_LR_SCALE = 2.0**-10  # training fails if steps are not finite even at this fraction of train.lr


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

    `overrides` are settings such as "train.steps=1000" that override those of the recipe. `resume` continues the run in
    `out`; `init_from` starts from the weights of another run. Tokenizers are trained unless `tokenizers` is given.
    Processes that torchrun started train one model together (docs/many-machines.md).

        run = dragoman.train("recipe.yaml", out="runs/mine", overrides=["train.steps=30"])
        translator = dragoman.load(run)
        print(translator.translate(["A man walks his dog."])[0].text)
    """
    request = TrainRequest(recipe, RunFolder(out), overrides, resume, init_from)
    with join_process_group(request.timeout_minutes) as group, ExitStack() as stack:
        if request.is_statistical():
            check_single_process(group)
            return train_phrase_system(request, report or Report())
        report = report if report and group.is_main else Report(quiet=not group.is_main)
        start = start_run(request, report, stack, group)
        folder = request.folder
        known_tokenizers = start.parent.tokenizers if start.parent else tokenizers
        prepared = group.run_main_first(lambda: prepare_data(start.recipe, folder, report, tokenizers=known_tokenizers))
        check_same_data(prepared, group)
        format_name, resumed = start.recipe.example_format, start.resume_from is not None
        write = partial(write_provenance, folder, prepared, format_name, init_from=start.init_from, resumed=resumed)
        group.run_on_main(write)
        state = group.fail_together(lambda: prepare_state(start, prepared, report, group))
        trainer = group.fail_together(lambda: Trainer(start, state, prepared, report, group))
        with trainer.group.handle_peer_failure(), closing(trainer):
            trainer.fit()
    return folder.path


def dry_run(recipe: Path, *, out: Path, overrides: Sequence[str] = (), init_from: Path | None = None) -> dict[str, Any]:
    """Check a recipe and its data as training would, and describe the run, for example the size of the model.

    The run folder and the cache are temporary, so the tokenizer is learned and the corpora are encoded anew. Under
    torchrun, only rank 0 does this; the other processes return an empty dictionary.
    """
    request = TrainRequest(recipe, RunFolder(out), overrides, resume=False, init_from=init_from)
    with join_process_group(request.timeout_minutes) as group:
        if request.is_statistical():
            check_single_process(group)
            return describe_phrase_run(request, Report())
        description = group.run_on_main(lambda: describe_run(request, group))
        return description if group.is_main else {}


def check_single_process(group: ProcessGroup) -> None:
    if group.is_distributed:
        raise group.user_error("model.kind=smt trains in one process, which uses all cores; leave torchrun out")


def prepare_state(start: StartedRun, prepared: RunData, report: Report, group: ProcessGroup) -> TrainState:
    """Return the state to start from, of the checkpoint or of a new run, with the execution plan of this process."""
    saved = checkpoint.load_state(start.resume_from) if start.resume_from else None
    plan = plan_execution(start.recipe, resumed_plan=saved.plan if saved else None, group=group)
    if not saved:
        longest = max(prepared.longest, start.parent.longest_source if start.parent else 0)
        return TrainState(plan, prepared.digests, longest=longest, parent=start.init_from)
    if changed := find_changed_corpus(prepared.digests, saved.data):
        raise UserError(f"{changed} has changed since this run was started; restore it, or start a new run")
    report.log(f"resuming from step {saved.step}")
    if plan != saved.plan:
        report.log(
            f"the run used {saved.plan} before; from here on results will match an uninterrupted run only within "
            "tolerance, not bit for bit"
        )
    return replace(saved, plan=plan)


class Trainer:
    """The training loop of one run. A checkpoint consists of `state` and of the tensors in `stepper`."""

    def __init__(
        self, start: StartedRun, state: TrainState, prepared: RunData, report: Report, group: ProcessGroup
    ) -> None:
        recipe, settings, plan = start.recipe, start.recipe.train, state.plan
        self.recipe, self.settings, self.state = recipe, settings, state
        self.folder, self.prepared, self.report = start.folder, prepared, report
        plan.apply()
        self.group = group.with_device_and_timeout(torch.device(plan.device), settings.timeout)
        model = initialize_model(recipe, prepared.tokenizers, start.parent)
        self.stepper = Stepper(model, settings, plan, self.group)
        if start.resume_from:
            checkpoint.restore(start.resume_from, self.stepper)
        self.flop_counter = Cost.from_model(self.stepper.model, passes=self.stepper.learner.loss_terms.passes)
        shard = RankShard(group.rank, group.world_size)
        self.stream = open_stream(recipe, prepared, bucketed_shapes=plan.bucketed_shapes, shard=shard)
        if group.is_distributed and self.stepper.device.type == "cpu":
            self.stepper.arrange_ddp_buckets(self.stream.empty_batch())  # only on a CPU is a run bit-identical
        self.validator = Validator(recipe, prepared, self.stream.widths, plan, state.last_validation)
        path = start.folder.metrics_file if group.is_main else None
        self.metrics = MetricsWriter(path, step=state.step, tensorboard=settings.tensorboard)
        self.logger = TrainLogger(report, self.metrics, settings, plan)
        self.prober = Prober(recipe, prepared, start.folder if group.is_main else None, step=state.step)
        self.received_signal = 0  # number of the signal that this process received
        self.signal = 0  # number of a signal that any process received, the same in all processes
        self.pending: list[PendingStep] = []  # steps whose metrics have not been copied to the host
        self.start_time = 0.0  # time.monotonic() at which the run would have started if it had never been interrupted
        self.batches: Generator[tuple[Batch, StreamPosition]] | None = None

    def fit(self) -> None:
        """Train until a limit is reached. On a GPU steps run asynchronously, and metrics are read every few steps."""
        if finished := self.stop_reason():
            self.report.log(f"this run is already finished: {finished} is reached. Raise that limit to train further.")
            self.write_model()  # the run may have been killed after its last checkpoint, before the model was written
        else:
            self.log_start()
        with self.catch_signals(), self.logger.bar:
            while not self.stop_reason():
                batches, position = self.next_batches()
                self.pending.append(self.train_step(batches))
                self.advance(batches, position)
                if not self.should_synchronise():
                    continue
                if not self.read_metrics():  # waits for the GPU
                    self.roll_back()
                    continue
                with self.logger.paused():
                    if self.is_due(self.settings.probe_every):
                        self.probe()
                    if self.should_validate():
                        self.validate()
                    if self.should_save():
                        self.save()
                    if self.signal and not self.stop_reason():
                        message = f"stopped by {signal.Signals(self.signal).name} at step {self.state.step}"
                        message += "; everything is saved, continue with --resume"
                        raise Stop(message if self.group.is_main else "", 128 + self.signal)
        self.group.run_on_main(lambda: record_end_of_training(self.folder, trained=not finished))
        self.log_end()

    def close(self) -> None:
        if self.batches:
            self.batches.close()
        self.metrics.close()
        self.prober.records.close()
        self.stepper.disable_cuda_graphs()

    def log_start(self) -> None:
        """Log the size of the model, the plan and the limits; warn of settings that are probably mistakes."""
        parallel = f" ({self.settings.parallel})" if self.group.is_distributed else ""
        count = count_parameters(self.stepper.model)
        self.report.log(f"{count:,} parameters; {self.state.plan}{parallel}; until {self.settings.limits_text}")
        if 0 < self.settings.steps <= (warmup := self.settings.warmup):
            self.report.log(f"the run ends inside its warm-up: train.warmup={warmup} should be far lower", WARNING)
        if not self.validator.batches:
            self.report.log("there is no data.dev: training is not validated, and the last weights are kept", WARNING)

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM end training after the current step. Only the main thread can do this."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, _frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
            self.received_signal = number

        previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def next_batches(self) -> tuple[list[Batch], StreamPosition]:
        """Return the batches of one step and the position of the stream after them."""
        if self.batches is None:  # at the start and after a roll-back
            position, on_cpu = self.state.position, self.stepper.device.type == "cpu"

            def read() -> Iterator[tuple[Batch, StreamPosition]]:
                for batch, next_position in self.stream.batches(position):
                    yield (batch if on_cpu else batch.pin_memory()), next_position

            self.batches = prefetch(read, PREFETCH[self.stepper.device.type])
            self.start_time = time.monotonic() - self.state.seconds
            self.logger.reset(self.state.flops)
        batches, positions = zip(*(next(self.batches) for _ in range(self.settings.accumulate)), strict=True)
        return list(batches), positions[-1]

    def advance(self, batches: list[Batch], position: StreamPosition) -> None:
        """Update the state after a step.

        All processes get the sum of their FLOPs, the elapsed time of rank 0, and a signal that any of them received.
        """
        flops, seconds = sum(map(self.flop_counter.count_training, batches)), time.monotonic() - self.start_time
        gathered = self.group.gather_numbers(flops, seconds, self.received_signal)
        all_flops, all_seconds, all_signals = zip(*gathered, strict=True)
        self.signal = int(max(all_signals))
        self.state = self.state.advance(self.pending[-1].tokens, position, all_seconds[0], sum(all_flops))

    def should_synchronise(self) -> bool:
        """Return whether to wait for the metrics of the pending steps. On a GPU only if they are needed now."""
        names = ("log_every", "save_every", "validate_every", "probe_every")
        intervals = [SYNCHRONISE_EVERY, *(getattr(self.settings, name) for name in names)]
        due = any(map(self.is_due, intervals)) or self.signal or self.stop_reason()
        return self.stepper.device.type == "cpu" or bool(due)

    def is_due(self, every: int) -> bool:
        """Return whether the current step is a multiple of `every`. 0 means never."""
        return every > 0 and self.state.step % every == 0

    def read_metrics(self) -> bool:
        """Read and log the metrics of pending steps; return False if too many steps in a row were skipped."""
        finished, self.pending = fetch_metrics(self.pending), []
        for step, metrics in enumerate(finished, self.state.step - len(finished) + 1):
            self.state = self.state.add_metrics(metrics)
            if not metrics.finite:
                self.report.log(f"step {step} skipped: loss {metrics.loss}, gradient norm {metrics.norm}", WARNING)
                self.metrics.write("skipped", step, count=self.state.skipped)
                if self.state.skipped_in_a_row >= ROLL_BACK_AFTER:
                    return False
            self.logger.tokens += metrics.tokens
        self.logger.log(self.state, finished[-1], self.run_fraction())
        self.logger.forecast.update(self.state, self.limit_fractions())
        if (graphs := self.stepper.cuda_graphs) and graphs.failure:
            self.report.log(f"steps cannot run as CUDA graphs ({graphs.failure}), so kernels are launched one by one")
            self.stepper.disable_cuda_graphs()
        if self.is_due(self.settings.log_every):
            self.state = replace(self.state, sums=NO_SUMS)
            self.logger.reset(self.state.flops)
        return True

    def train_step(self, batches: list[Batch]) -> PendingStep:
        """Take one step; if memory runs out, split batches into smaller parts and try again."""
        step = self.state.step + 1
        minutes_fraction = self.state.seconds / self.settings.minutes / 60 if self.settings.minutes else 0.0
        fractions = {"run_fraction": self.run_fraction(), "minutes_fraction": minutes_fraction}
        lr = self.state.lr_scale * compute_learning_rate(step, self.settings, **fractions)
        while True:
            try:
                return self.stepper.update(batches, step, lr)
            except torch.OutOfMemoryError:
                if self.group.is_distributed:
                    raise UserError(
                        f"process {self.group.rank} is out of memory; start more processes, so that each has fewer "
                        f"rows, or start again with train.tokens={self.settings.tokens // 2}"
                    ) from None
                if self.stepper.plan.batch_parts >= max(len(batch.source_BS) for batch in batches):
                    raise UserError(
                        "a single row does not fit into memory; make the model smaller or data.max_length lower"
                    ) from None
            parts = self.stepper.halve_batches()
            self.state = replace(self.state, plan=self.stepper.plan)
            advice = f"train.tokens={self.settings.tokens // parts} train.accumulate={self.settings.accumulate * parts}"
            message = f"out of memory: batches are split into {parts} parts from now on; next time set {advice}"
            self.report.log(message, WARNING)

    def roll_back(self) -> None:
        """After ROLL_BACK_AFTER skipped steps in a row, return to the newest checkpoint and halve the learning rate."""
        newest = self.group.run_on_main(lambda: checkpoint.find_newest(self.folder))
        if newest is None:
            raise self.group.user_error(
                f"{ROLL_BACK_AFTER} steps in a row were not finite before the first checkpoint; try a smaller train.lr"
            )
        current, saved = self.state, self.group.run_on_main(lambda: checkpoint.load_state(newest))
        lr_scale = saved.lr_scale / 2
        if lr_scale < MIN_LR_SCALE:
            raise self.group.user_error(
                f"the steps after step {saved.step} are not finite even at {saved.lr_scale:g} of the learning rate; "
                "check the data, or start a new run with a smaller train.lr"
            )
        checkpoint.restore(newest, self.stepper)
        not_rolled_back = {name: getattr(current, name) for name in ("skipped", "seconds", "flops", "plan")}
        self.state = replace(saved, lr_scale=lr_scale, skipped_in_a_row=0, **not_rolled_back)
        self.group.run_on_main(lambda: checkpoint.save_state(newest, self.state))
        self.metrics.truncate(saved.step)
        self.prober.records.truncate(saved.step)
        self.metrics.write("rolled back", saved.step, after=current.step, scale=lr_scale, skipped=current.skipped)
        message = f"{ROLL_BACK_AFTER} steps in a row were skipped: back to step {saved.step}, learning rate"
        self.report.log(f"{message} times {lr_scale:g}", WARNING)
        if self.batches:
            self.batches.close()
        self.batches = None

    def is_skipping_steps(self) -> bool:
        """Return whether the last step was skipped and training continues.

        No checkpoint is saved then: the next steps may be skipped too, and a roll-back to it would not help.
        """
        return bool(self.state.skipped_in_a_row) and not self.stop_reason()

    def should_validate(self) -> bool:
        """Return whether to validate now: every train.validate_every steps and at the end, if there is a dev set."""
        due = self.is_due(self.settings.validate_every)
        if due and self.is_skipping_steps():
            self.report.log(f"no validation at step {self.state.step}, because the last step was skipped")
            return False
        return bool(self.validator.batches) and (due or bool(self.stop_reason()))

    def should_save(self) -> bool:
        """Return whether to save now: after a signal, at the end, every validate_every or save_every steps."""
        if self.signal or self.stop_reason():
            return True
        due = self.is_due(self.settings.validate_every) or self.is_due(self.settings.save_every)
        return due and not self.is_skipping_steps()

    def probe(self) -> None:
        """Measure gradients and activations of the same weights that `validate` evaluates; add them to probes.jsonl."""
        with self.stepper.load_eval_weights():
            self.group.run_on_main(lambda: self.prober(self.stepper.eval_model, self.state.step))

    def validate(self) -> None:
        """Evaluate the weights to save (the EMA, if there is one) on data.dev."""
        with self.stepper.load_eval_weights():
            validation = self.group.run_on_main(lambda: self.validator(self.stepper.eval_model))
        if self.state.skipped_in_a_row and not math.isfinite(validation.loss):
            raise self.group.user_error(
                f"the run ends at step {self.state.step} after skipped steps, and its loss on data.dev is not finite; "
                "earlier checkpoints are intact. Try a smaller train.lr"
            )
        self.state = self.state.add_validation(validation, self.settings.metric, self.settings.keep)
        self.report.log(f"step {self.state.step}: {validation.describe(self.validator.task)}")
        seconds = round(self.state.seconds, 2)
        self.metrics.write("validate", self.state.step, **validation.to_metrics(), seconds=seconds)

    def save(self) -> None:
        """Write a checkpoint and, after a validation and at the end, the model."""
        peak = max(self.state.peak_memory, peak_memory(self.stepper.device))
        self.state = replace(self.state, peak_memory=peak)
        checkpoint.save(self.folder, self.stepper, self.state)
        due = self.is_due(self.settings.validate_every) and not self.is_skipping_steps()
        if due or self.stop_reason() or not self.group.run_on_main(self.folder.model_file.exists):
            self.write_model()

    def write_model(self) -> None:
        """Write model.safetensors: the best weights so far, or the current weights if there is no validation."""
        current = {} if self.state.best else self.stepper.weights_to_save()

        def save_model() -> None:
            header = {"longest": str(self.state.longest), "step": str(self.state.step)}  # metadata of the file
            if self.recipe.example_format == "pairs":  # statistics by which inference flags unusual translations
                header["usual"] = self.prepared.pair_statistics.to_json()
            weights = current or checkpoint.load_final_weights(self.folder, self.state, self.settings.average)
            self.folder.save_model(weights, tokenizer=self.prepared.tokenizers.fingerprint(), **header)

        self.group.run_on_main(save_model)

    def limit_fractions(self) -> dict[str, float]:
        """Return the fraction of each limit that is reached, such as {"train.steps=1000": 0.2}."""
        state = self.state
        reached = (state.step, state.epochs, state.seconds / 60, state.flops)
        limits = [(name, getattr(self.settings, name), spent) for name, spent in zip(LIMITS, reached, strict=True)]
        return {f"train.{name}={limit:g}": spent / limit for name, limit, spent in limits if limit}

    def run_fraction(self) -> float:
        """Return the fraction of the run that is done, according to the limit that will be reached first."""
        return max(self.limit_fractions().values())

    def stop_reason(self) -> str:
        """Return the setting that ends training now, such as "train.steps=1000", or an empty string."""
        patience = self.settings.patience
        if 0 < patience <= self.state.validations_since_best:
            return f"train.patience={patience}"
        return next((limit for limit, fraction in self.limit_fractions().items() if fraction >= 1), "")

    def log_end(self) -> None:
        state = self.state
        best = f"; best at step {state.best[0].step}" if state.best else ""
        averaged = min(self.settings.average, len(state.best))
        model = f"the mean of the {averaged} best models" if averaged > 1 else "the model"
        skipped = f"; {state.skipped} steps skipped" if state.skipped else ""
        epochs = f" ({few_epochs})" if (few_epochs := describe_few_epochs(state.epochs)) else ""
        self.report.log(
            f"done: {state.step} step{'s' * (state.step != 1)}, {state.tokens:,} tokens{epochs} in "
            f"{state.seconds:.0f} s{best}{skipped}; {model} is in {self.folder.path}"
        )
