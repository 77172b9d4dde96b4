"""The start of a run: check the recipe, lock the run folder, find the checkpoint to resume from, build the model.

A recipe that cannot work is refused before anything is written. `describe_run` prepares a run in a temporary folder and
describes it; `find_batch_size` measures which train.tokens fits into the memory of a GPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from dragoman.config.settings import LIMITS, Registries, apply_override, check_names, get_entry, read_values
from dragoman.data.corpus import FILE_SETTINGS, SPLITS
from dragoman.data.stream import StreamPosition
from dragoman.data.tokenizers import (
    IMPORTED_TOKENIZERS,
    SAVED_TOKENIZERS,
    TOKENIZERS,
    Tokenizers,
    TokenizerSettings,
    WordTokenizer,
)
from dragoman.errors import UserError
from dragoman.inference.loading import copy_weights, open_run
from dragoman.inference.predictor import Predictor
from dragoman.inference.translator import merge_search, refuse_unused_search_settings
from dragoman.io import is_temporary, lock_folder, report_write_errors
from dragoman.metrics.metrics import METRICS, choose_checkpoint_metric, explain_wer, metrics_for_task
from dragoman.models.base import Model, collect_weights
from dragoman.models.registry import build_model, count_parameters
from dragoman.phrasebook.generate import DIRECTIONS, check_request
from dragoman.process_group import DEFAULT_START_MINUTES, ProcessGroup
from dragoman.progress import WARNING, Report
from dragoman.recipe import Recipe, check_model, override_recipe, read_recipe
from dragoman.run_dir import RunFolder
from dragoman.smt.settings import SmtSettings
from dragoman.training import checkpoint, optim
from dragoman.training.execution import PARALLEL, plan_execution
from dragoman.training.loss import CONSISTENCY, LOSSES, check_consistency
from dragoman.training.prepare import add_tags, check_data, check_files, open_stream, prepare_data
from dragoman.training.step import OptimizerOutOfMemoryError, Stepper, fetch_metrics, freeze_parameters
from dragoman.types import SPECIALS

BYTES_PER_PARAMETER = 16  # in training: float32 weights, gradients and Adam's two moments
FIRST_TOKENS, TOKEN_STEP = 2048, 256  # `find_batch_size` first tries 2,048 tokens; its result is a multiple of 256
MEMORY_FRACTION = 0.85  # of a GPU's memory, for a step; validation, CUDA graphs and fragmentation need the rest
RESUMABLE_FORMAT = 2  # the earliest format of a run folder that can be resumed
# Settings of each section that a resumed run may change.
MAY_CHANGE = {
    "train": {
        "steps", "epochs", "minutes", "flops", "patience",  # when to stop
        "keep", "average", "save_every", "log_every", "probe_every", "tensorboard",  # what to keep and show
        "device", "precision", "compile", "threads",  # where to run: logged, because rounding may differ
        "parallel", "timeout",
    },
    "data": {"cache", "test", "metrics", "source_language", "target_language"},
}  # fmt: skip
TRAIN_REGISTRIES: Registries = {
    "optimizer": optim.OPTIMIZERS,
    "schedule": optim.SCHEDULES,
    "loss": LOSSES,
    "consistency": CONSISTENCY,
    "parallel": PARALLEL,
}


class TrainRequest(NamedTuple):
    """The arguments of `train`."""

    recipe: str | Path | Recipe
    folder: RunFolder
    overrides: Sequence[str]
    resume: bool
    init_from: str | Path | None

    def read_recipe(self, parent: Recipe | None) -> Recipe:
        """Return the recipe with overrides. Model settings that it leaves out are copied from `parent`."""
        if isinstance(self.recipe, Recipe):
            return override_recipe(self.recipe, self.overrides, parent=parent)
        return read_recipe(Path(self.recipe), self.overrides, parent=parent)

    def is_statistical(self) -> bool:
        """Return whether model.kind is smt. The recipe is not validated yet."""
        if isinstance(self.recipe, Recipe):
            values: dict[str, Any] = {"model": {"kind": self.recipe.model.kind}}
        else:
            values, _ = read_values(Path(self.recipe))
        with suppress(UserError):  # reported when the recipe is read
            for item in self.overrides:
                apply_override(values, item)
        return isinstance(model := values.get("model"), dict) and model.get("kind") == "smt"

    def timeout_minutes(self) -> float:
        """Return how long processes wait for each other; a default for an invalid recipe (`open_folder` reports it)."""
        resumed = self.folder.path if self.resume and self.folder.config_file.exists() else None
        parent = self.init_from if self.init_from is not None else resumed  # the run to inherit model settings from
        with suppress(UserError):
            return self.read_recipe(RunFolder(parent).load_recipe() if parent else None).train.timeout
        return DEFAULT_START_MINUTES


class StartedRun(NamedTuple):
    """A new or resumed run whose recipe has been checked and whose folder is locked."""

    recipe: Recipe  # with every setting written out
    folder: RunFolder
    resume_from: Path | None  # the newest checkpoint of a resumed run
    parent: Predictor[Any] | None  # the model of --init-from, whose weights a new run starts from
    init_from: str  # path of the parent; empty if there is none


def start_run(request: TrainRequest, report: Report, locks: ExitStack, group: ProcessGroup) -> StartedRun:
    """Start or resume a run. Its folder stays locked until `locks` is closed. Rank 0 decides for all processes."""
    folder, init_from = request.folder, request.init_from
    resume_from = group.run_on_main(lambda: find_checkpoint(folder, resume=request.resume))
    parent: Predictor[Any] | None = None
    if init_from is not None and not resume_from:
        parent = group.fail_together(lambda: open_run(init_from, device="cpu"))
    recipe = group.run_on_main(lambda: open_folder(request, resume_from, parent, report, locks, group))

    def check_folder() -> None:
        if not folder.format_file.exists():
            raise UserError(
                f"process {group.rank} cannot find {str(folder.path)!r}, which process 0 created; set --out to a "
                "folder that all machines share"
            )

    group.fail_together(check_folder)
    return StartedRun(recipe, folder, resume_from, parent, str(init_from) if parent else "")


def holds_run(folder: RunFolder) -> bool:
    """Return whether the folder is a run folder, or False if it is empty or missing; refuse anything else."""
    name = str(folder.path)
    if folder.path.exists() and not folder.path.is_dir():
        raise UserError(f"{name!r} is a file, but a run needs a folder; choose another --out")
    if not folder.format_file.exists():
        if folder.path.exists() and not all(map(is_temporary, folder.path.iterdir())):
            raise UserError(f"{name!r} is not empty and is no run folder; choose another --out")
        return False
    return True


def find_checkpoint(folder: RunFolder, *, resume: bool) -> Path | None:
    """Return the checkpoint to resume from, or None for a new run. Refuse a folder that is neither empty nor a run."""
    name = str(folder.path)
    if not holds_run(folder):
        return None
    format_version = folder.check_format()
    newest = checkpoint.find_newest(folder)
    if newest and format_version < RESUMABLE_FORMAT:
        raise UserError(f"{name!r} was started by an earlier Dragoman; start a new run with --init-from {name}")
    if not resume and (newest or folder.model_file.exists()):
        raise UserError(f"{name!r} already holds a run; add --resume to continue it, or choose another --out")
    if newest is None and folder.model_file.exists():
        raise UserError(f"{name!r} has no checkpoint to continue from; start a new run with --init-from {name}")
    return newest


def open_folder(
    request: TrainRequest,
    resume_from: Path | None,
    parent: Predictor[Any] | None,
    report: Report,
    locks: ExitStack,
    group: ProcessGroup,
) -> Recipe:
    """Check the recipe, lock the folder, write the recipe there with every setting, and return it.

    A run that starts from the weights of another run also inherits its model settings and tokenizer: a new run from
    `parent`, a resumed run from the recipe in its own folder. A resumed run may change only `MAY_CHANGE`.
    """
    folder, previous = request.folder, request.folder.load_recipe() if resume_from else None
    parent_path = checkpoint.load_state(resume_from).parent if resume_from else str(request.init_from) if parent else ""
    if resume_from and request.init_from is not None and not parent_path:
        raise UserError(f"{str(folder.path)!r} was not started with --init-from; leave it out, or choose another --out")
    inherited = previous if parent_path and previous else parent.recipe if parent else None
    recipe, ignored = request.read_recipe(inherited), list[str]()
    if inherited:
        recipe, ignored = inherit_tokenizer(recipe, inherited, request.overrides, parent_path)
    check_settings(recipe)
    if previous:
        recipe = continue_recipe(previous, recipe, report)
    else:
        check_scoring(recipe)
        if note := explain_wer([recipe.train.metric, *recipe.data.metrics], recipe.tokenizer.for_target().kind):
            report.log(note)
    check_files(recipe)
    if group.is_distributed:
        PARALLEL[recipe.train.parallel].check(build_minimal_model(recipe))
    if parent:
        parent_settings = dict(parent.recipe.model)
        changed = [f"model.{name}={value}" for name, value in recipe.model if value != parent_settings.get(name)]
        exceptions = f" except {', '.join(changed)}" if changed else ""
        report.log(f"starting from {parent_path}: its weights, its tokenizer and its model's settings{exceptions}")
        for setting in ignored:
            report.log(f"{setting} has no effect: the tokenizer comes from {parent_path}", WARNING)
        initialize_model(recipe, add_tags(parent.tokenizers, recipe), parent)  # refuses weights of other shapes
    locks.enter_context(lock_run(folder, discard=not resume_from))
    if resume_from:
        checkpoint.remove_unfinished(folder)
    else:
        shutil.rmtree(folder.tokenizer_folder, ignore_errors=True)  # left behind by a start that failed
        if request.resume:
            report.log(f"there is nothing in {str(folder.path)!r} to resume; a new run is started")
    folder.create(recipe)
    return recipe


def continue_recipe(previous: Recipe, recipe: Recipe, report: Report) -> Recipe:
    """Return the recipe for a resumed run; refuse changes since the run was started, except those in `MAY_CHANGE`."""
    if change := find_changed_setting(previous, recipe, MAY_CHANGE):
        name, was, now = change
        raise UserError(
            f"this run was started with {name}={was!r}, and cannot continue with {now!r}; keep it, or start a new run "
            + ("in another folder" if isinstance(previous.model, SmtSettings) else "with --init-from")
        )
    for name in LIMITS:
        was, now = getattr(previous.train, name), getattr(recipe.train, name)
        if was != now:
            report.log(f"train.{name} was {was} and is {now} from here on")
    corpora = {"train": previous.data.train, "dev": previous.data.dev}  # with the old paths, which checkpoints name
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=corpora)})


@contextmanager
def lock_run(folder: RunFolder, *, discard: bool = False) -> Iterator[None]:
    """Lock the run folder. A second training process is refused: it would overwrite the checkpoints of the first.

    With `discard`, remove a folder that this function created if training fails before it has logged anything.
    """
    refusal = f"another process is training in {str(folder.path)!r}; wait for it or choose another --out"
    with ExitStack() as locks:
        with report_write_errors(folder.path):
            created = locks.enter_context(lock_folder(folder.path, refusal))
        try:
            yield
        except BaseException:  # Ctrl-C too
            logged = folder.metrics_file.exists() and folder.metrics_file.stat().st_size
            if discard and created and not logged and checkpoint.find_newest(folder) is None:
                folder.discard()
            raise


def inherit_tokenizer(recipe: Recipe, parent: Recipe, overrides: Sequence[str], run: str) -> tuple[Recipe, list[str]]:
    """Return the recipe with the tokenizer settings of `parent`, the recipe of `run`, and the settings it ignores.

    Only tokenizer.sampling is kept. A setting that would be ignored is refused if it was given on the command line.
    """
    overridden = {override.partition("=")[0] for override in overrides}
    ignored = []
    for name in TokenizerSettings.model_fields:
        value, other = getattr(recipe.tokenizer, name), getattr(parent.tokenizer, name)
        if name == "sampling" or name not in recipe.tokenizer.model_fields_set or value == other:
            continue
        ignored.append(f"tokenizer.{name}={value}")
        if overridden & {"tokenizer", f"tokenizer.{name}"}:
            raise UserError(
                f"tokenizer.{name}={value} has no effect: the tokenizer comes from {run}, which has {name}={other}; "
                "leave it out"
            )
    tokenizer = parent.tokenizer.model_copy(update={"sampling": recipe.tokenizer.sampling})
    return recipe.model_copy(update={"tokenizer": tokenizer}), ignored


Change = tuple[str, Any, Any]  # name of a setting, old and new value


def find_changed_setting(old: Recipe, new: Recipe, may_change: Mapping[str, set[str]]) -> Change | None:
    """Return the first setting that differs. `may_change` has the settings, by section, that are not compared."""
    return find_difference("", *(r.model_dump(mode="json", exclude=dict(may_change)) for r in (old, new)))


def find_difference(name: str, old: Any, new: Any) -> Change | None:
    """Return the innermost setting in which two values differ. Two paths of the same file do not differ."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        names = {key: f"{name}.{key}".lstrip(".") for key in {**old, **new}}
        changes = (find_difference(inner, old.get(key), new.get(key)) for key, inner in names.items())
        return next(filter(None, changes), None)
    if name.startswith("data.") and name.rpartition(".")[2] in FILE_SETTINGS:
        with suppress(OSError, ValueError, TypeError):
            old = new if os.path.samefile(old, new) else old
    return (name, old, new) if old != new else None


def check_settings(recipe: Recipe) -> None:
    """Refuse settings that cannot work, before anything is read or written."""
    check_model(recipe)
    if isinstance(recipe.model, SmtSettings):
        check_statistical_settings(recipe)
    else:
        check_neural_settings(recipe)
    for name in recipe.data.metrics:
        get_entry(METRICS, name, "metric")
        if name not in metrics_for_task(recipe.model.task):
            raise UserError(f"data.metrics: {name} cannot judge models that {recipe.model.task}; leave it out")
    get_entry(dict.fromkeys(DIRECTIONS), recipe.data.direction, "data.direction (of the phrasebook)")
    if not recipe.data.train:
        raise UserError("the recipe has no data.train; name a corpus there, such as {source: F, target: F}")
    recipe.data.check()
    for split in SPLITS:
        for corpus in getattr(recipe.data, split):
            if corpus.phrasebook:
                check_request(corpus.split or split, corpus.phrasebook, recipe.data.direction)
    check_data(recipe)
    if not isinstance(recipe.model, SmtSettings):
        check_tokenizer_and_validation(recipe)


def check_neural_settings(recipe: Recipe) -> None:
    """Refuse settings of training and search that a neural model cannot use."""
    train, task = recipe.train, recipe.model.task
    check_names(TRAIN_REGISTRIES, train, "train")
    optim.check_optimization(train, recipe.model)
    check_consistency(train, recipe.model)
    if train.compile is True and not recipe.model.compiles:
        raise UserError("train.compile=true is of no use to recurrent models, whose kernels are compiled; leave it out")
    plan_execution(recipe)
    merge_search(recipe.search)  # refuses invalid settings
    metric = choose_checkpoint_metric(train.metric, task)
    if metric and metric.missing_library:
        raise UserError(f"train.metric: {metric.missing_library}")


def check_tokenizer_and_validation(recipe: Recipe) -> None:
    """Refuse settings of a neural model that depend on its data: tokenizers, early stopping, averaging, freezing."""
    train, tokenizer = recipe.train, recipe.tokenizer
    kinds = [tokenizer.kind, tokenizer.for_target().kind]
    for name, kind in zip(("kind", "target_kind"), kinds, strict=True):
        if kind not in IMPORTED_TOKENIZERS:
            get_entry(TOKENIZERS, kind, f"tokenizer.{name}")
    if tokenizer.sampling and not any(SAVED_TOKENIZERS[kind].can_sample for kind in kinds):
        sampling_kinds = " or ".join(name for name, kind in TOKENIZERS.items() if kind.can_sample)
        raise UserError(
            f"tokenizer.sampling has no use with tokenizer.kind={kinds[0]}, which has only one way to tokenize a text; "
            f"leave it out, or choose {sampling_kinds}"
        )
    if train.mask_copied and not (
        recipe.neural_model.copying and issubclass(SAVED_TOKENIZERS[kinds[0]], WordTokenizer)
    ):
        raise UserError(
            "train.mask_copied teaches a model to copy unknown words; it needs model.copying=true and a vocabulary of "
            "words, such as tokenizer.kind=word"
        )
    for name in [name for name, minimum in (("patience", 1), ("average", 2)) if getattr(train, name) >= minimum]:
        if not recipe.data.dev:
            raise UserError(f"train.{name} depends on scores of the dev set; set data.dev, or leave it out")
        if not train.validate_every:
            raise UserError(f"train.{name} depends on validations; set train.validate_every, or leave it out")
    if train.freeze:
        freeze_parameters(build_minimal_model(recipe), train.freeze)


def check_statistical_settings(recipe: Recipe) -> None:
    """Refuse settings of search, tokenizer and data that a phrase-based system cannot use."""
    tokenizer, search = recipe.tokenizer, merge_search(recipe.search)
    check_names(TRAIN_REGISTRIES, recipe.train, "train")
    choose_checkpoint_metric(recipe.train.metric, recipe.model.task)
    get_entry(TOKENIZERS, tokenizer.kind, "tokenizer.kind")
    get_entry(TOKENIZERS, tokenizer.for_target().kind, "tokenizer.target_kind")
    for kind in (tokenizer.kind, tokenizer.for_target().kind):
        if not issubclass(TOKENIZERS[kind], WordTokenizer) or kind != tokenizer.kind:
            raise UserError(
                f"model.kind=smt translates words, so both sides need tokenizer.kind=word, or space for text that is "
                f"tokenized already; it is {kind}"
            )
    refuse_unused_search_settings(search.model_dump(exclude_defaults=True))
    settings = {"a tag in data.train": any(recipe.data.tags), "data.both_ways": recipe.data.both_ways}
    for setting, is_used in {**settings, "data.context": recipe.data.context}.items():
        if is_used:
            raise UserError(f"{setting} has no effect with model.kind=smt; leave it out")
    if weight := next((corpus.weight for corpus in recipe.data.train if corpus.weight != 1), 0):
        raise UserError(f"model.kind=smt reads every pair once, so no corpus can have weight {weight:g}; leave it out")


def check_scoring(recipe: Recipe) -> None:
    """Refuse metrics that cannot be computed. Resumed runs are not checked: an earlier release may have begun them."""
    if missing := next(filter(None, (METRICS[name].missing_library for name in recipe.data.metrics)), ""):
        raise UserError(f"data.metrics: {missing}")
    if recipe.model.task != "translate":
        return
    merge_search(recipe.search, aligns=recipe.model.aligns)  # refuses invalid settings
    if recipe.train.metric not in ("auto", "loss") and not recipe.train.validate_lines:
        raise UserError(
            f"train.metric={recipe.train.metric} is a score of translations, but train.validate_lines=0 translates "
            "none; raise it, or set train.metric=loss"
        )


def build_minimal_model(recipe: Recipe) -> Model:
    """Return the recipe's model with a vocabulary of special tokens only, for checks of its modules and parameters."""
    return build_model(
        recipe.neural_model, source_size=len(SPECIALS), target_size=len(SPECIALS), joint=recipe.tokenizer.joint
    )


def initialize_model(recipe: Recipe, tokenizers: Tokenizers, parent: Predictor[Any] | None) -> Model:
    """Return the model with its initial weights: sampled from the seed, or copied from the parent.

    Embeddings of source tags (such as the target language) new to this run stay as sampled.
    """
    torch.manual_seed(recipe.train.seed)
    model = build_model(recipe.neural_model, **tokenizers.sizes, joint=recipe.tokenizer.joint)
    if parent:
        old_size, new_size = parent.tokenizers.sizes["source_size"], tokenizers.sizes["source_size"]
        weights, sampled = dict(collect_weights(parent.model)), collect_weights(model)
        for name, old in weights.items() if new_size > old_size else ():
            new = sampled.get(name)
            if new is not None and old.shape[:1] == (old_size,) and new.shape == (new_size, *old.shape[1:]):
                weights[name] = torch.cat([old, new.detach()[old_size:]])
        copy_weights(model, weights, "the run of --init-from", "this recipe's model")
    return model


def describe_run(request: TrainRequest, group: ProcessGroup) -> dict[str, Any]:
    """Prepare a run in a temporary folder and describe it (`dragoman train --dry-run`), in a single process."""
    find_checkpoint(request.folder, resume=False)
    with TemporaryDirectory(prefix="dragoman-") as temporary, ExitStack() as locks:
        folder, report = RunFolder(Path(temporary) / "run"), Report()
        request = request._replace(folder=folder, overrides=[*request.overrides, f"data.cache={temporary}/cache"])
        parent = open_run(request.init_from, device="cpu") if request.init_from is not None else None
        recipe = open_folder(request, None, parent, report, locks, group)
        prepared = prepare_data(recipe, folder, report, tokenizers=parent.tokenizers if parent else None)
        model, train = initialize_model(recipe, prepared.tokenizers, parent), recipe.train
        slots, tokens = 0.0, 0  # slots: a pair takes as many of train.tokens as its longer side
        for corpus in prepared.train:
            source_N, target_N = corpus.store.get_lengths(np.arange(len(corpus.store)))
            slots += corpus.weight * float((np.maximum(source_N, target_N) + 1).sum())  # + 1 for EOS
            tokens += int((source_N + target_N).sum())
        return {
            "model": recipe.model.kind,
            "parameters": count_parameters(model),
            "vocabulary": prepared.tokenizers.sizes,
            "train_examples": sum(len(corpus.store) for corpus in prepared.train),
            "train_tokens": tokens,
            "dev_examples": sum(len(corpus.store) for corpus in prepared.dev),
            "until": train.limits_text,
            "steps_per_epoch": max(round(slots / (train.tokens * train.accumulate)), 1),
            "memory": count_parameters(model) * (BYTES_PER_PARAMETER + (4 if train.ema else 0)),
            "execution": str(plan_execution(recipe)),
        }


def render_dry_run(about: dict[str, Any]) -> str:
    model = {"model": about["model"]}
    data = {
        "train": f"{about['train_examples']:,} examples, {about['train_tokens']:,} tokens",
        "dev": f"{about['dev_examples']:,} examples",
    }
    if "parameters" in about:  # a neural model
        sizes = ", ".join(f"{size:,} {name.removesuffix('_size')}" for name, size in about["vocabulary"].items())
        model = {"model": f"{about['model']}, {about['parameters']:,} parameters", "vocabulary": sizes}
        data |= {
            "steps": f"until {about['until']}; an epoch is about {about['steps_per_epoch']:,} steps",
            "memory": f"{about['memory'] / 1e6:,.0f} MB for weights, gradients and optimizer; activations come on top",
            "compute": about["execution"],
        }
    return "\n".join(f"{name:10}  {value}" for name, value in (model | data).items())


class FittedBatchSize(NamedTuple):
    """The largest train.tokens that fits into memory."""

    tokens: int
    needed: float  # memory in bytes that a step with so many tokens takes
    memory: float  # memory of the GPU in bytes


def find_batch_size(recipe: str | Path, overrides: Sequence[str] = (), report: Report | None = None) -> FittedBatchSize:
    """Find the largest train.tokens by taking training steps with growing batches of the recipe's data.

    Only the cache is written.
    """
    report = report or Report()
    full_recipe = read_recipe(Path(recipe), overrides)
    check_settings(full_recipe)
    if full_recipe.model.kind == "smt":
        raise UserError("model.kind=smt is not trained in batches, so there is no train.tokens to find")
    check_files(full_recipe)
    plan = plan_execution(full_recipe)
    device = torch.device(plan.device)
    if device.type != "cuda":
        raise UserError(
            f"batches are fitted to the memory of a GPU, but train.device={full_recipe.train.device} selects none; "
            "use a machine with a GPU"
        )
    plan.apply()
    with TemporaryDirectory() as folder:
        prepared = prepare_data(full_recipe, RunFolder(folder), report)
    model = initialize_model(full_recipe, prepared.tokenizers, None)
    stepper = Stepper(model, full_recipe.train, replace(plan, use_cuda_graphs=False, compile=False))
    memory = float(torch.cuda.get_device_properties(device).total_memory)

    def measure(tokens: int) -> float | None:
        settings = full_recipe.train.model_copy(update={"tokens": tokens})
        stream = open_stream(full_recipe.model_copy(update={"train": settings}), prepared, bucketed_shapes=True)
        batch, _ = next(stream.batches(StreamPosition()))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        try:
            fetch_metrics([stepper.update([batch], step=1, lr=0.0)])
            torch.cuda.synchronize(device)
        except (torch.OutOfMemoryError, OptimizerOutOfMemoryError):
            report.log(f"{tokens:,} tokens: too many")
            return None
        needed = float(torch.cuda.max_memory_allocated(device))
        report.log(f"{tokens:,} tokens: {needed / 1e9:.1f} GB")
        return needed

    tokens = find_largest(measure, MEMORY_FRACTION * memory)
    return FittedBatchSize(tokens, measure(tokens) or memory, memory)


def find_largest(measure: Callable[[int], float | None], limit: float) -> int:
    """Return the maximum number of tokens with which a step needs at most `limit` bytes.

    `measure(tokens)` returns the bytes that a step needs, or None if it runs out of memory. For large batches, the
    bytes are a linear function of the tokens. So batches are doubled until one needs a third of the limit, the result
    is extrapolated from the last two batches, and it is reduced by a tenth until it fits.
    """
    tokens, previous_bytes, step_bytes = FIRST_TOKENS, 0.0, measure(FIRST_TOKENS)
    while step_bytes is None or step_bytes > limit:
        if tokens == TOKEN_STEP:
            return TOKEN_STEP
        tokens, step_bytes = tokens // 2, measure(tokens // 2)
    while step_bytes is not None and (not previous_bytes or step_bytes < limit / 3):
        tokens, previous_bytes, step_bytes = 2 * tokens, step_bytes, measure(2 * tokens)
    if step_bytes is None or step_bytes > limit:
        tokens, factor = tokens // 2, 1.0
    else:  # the last doubling, by tokens / 2, took step_bytes - previous_bytes
        factor = max((limit - step_bytes) / max(step_bytes - previous_bytes, 1.0), 0.0) / 2 + 1
    result = int(tokens * factor) // TOKEN_STEP * TOKEN_STEP
    while result > tokens and ((step_bytes := measure(result)) is None or step_bytes > limit):
        result = max(result * 9 // 10 // TOKEN_STEP * TOKEN_STEP, tokens)
    return max(result, TOKEN_STEP)
