"""The start of a run: check the recipe, lock the run folder, find the checkpoint to resume from, build the model.

Everything that cannot work is refused before anything is written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dragoman.config.settings import (
    LIMITS,
    Registries,
    TokenizerSettings,
    TrainSettings,
    build,
    check_names,
    override,
    pick,
    read_values,
)
from dragoman.data.corpus import FILES, SPLITS
from dragoman.data.tokenizers import TOKENIZERS, Tokenizers, target_settings
from dragoman.errors import UserError
from dragoman.inference.loading import copy_weights, open_run
from dragoman.inference.predictor import Predictor
from dragoman.inference.translator import merge_search
from dragoman.io import is_temporary, lock_folder, report_write_errors
from dragoman.metrics.metrics import METRICS, metrics_for_task, note_on_wer, select_best_metric
from dragoman.models.base import Model, collect_tensors
from dragoman.models.registry import build_model
from dragoman.phrasebook.generate import DIRECTIONS, check_request
from dragoman.process_group import DEFAULT_MEETING_MINUTES, ProcessGroup
from dragoman.progress import WARNING, Report
from dragoman.recipe import Recipe, check_model, override_recipe, read_recipe
from dragoman.run_dir import RunFolder
from dragoman.training import checkpoint, optim
from dragoman.training import loss as consistency
from dragoman.training.distributed import PARALLEL
from dragoman.training.execution import plan_execution
from dragoman.training.loss import LOSSES
from dragoman.training.prepare import add_tags, check_data, check_files
from dragoman.training.step import freeze_parameters
from dragoman.types import SPECIALS

RESUMABLE_FORMAT = 2  # the earliest format of a run folder that can be resumed
MAY_CHANGE = {
    "train": {
        "steps", "epochs", "minutes", "flops", "patience",  # when to stop
        "keep", "average", "save_every", "log_every", "tensorboard",  # what to keep and show
        "device", "precision", "compile", "threads",  # where to run: logged, because the bits may change
        "parallel", "timeout",
    },
    "data": {"cache", "test", "metrics"},
}  # fmt: skip
TRAIN_REGISTRIES: Registries = {
    "optimizer": optim.OPTIMIZERS,
    "schedule": optim.SCHEDULES,
    "loss": LOSSES,
    "consistency": consistency.CONSISTENCY,
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
        """Return the recipe with overrides; settings of the model that it leaves out are the parent's."""
        if isinstance(self.recipe, Recipe):
            return override_recipe(self.recipe, self.overrides, parent=parent)
        return read_recipe(Path(self.recipe), self.overrides, parent=parent)

    def timeout_minutes(self) -> float:
        """Return train.timeout. A recipe that cannot be read is reported later, once all processes have met."""
        values: dict[str, Any] = {"train": {}}
        try:
            if isinstance(self.recipe, Recipe):
                values["train"] = self.recipe.train.model_dump(mode="json")
            else:
                values |= read_values(Path(self.recipe))[0]
            for item in self.overrides:
                override(values, item)
            return build(TrainSettings, values["train"]).timeout
        except UserError:
            return DEFAULT_MEETING_MINUTES


class Start(NamedTuple):
    recipe: Recipe  # with every setting written out
    newest: Path | None  # the checkpoint to resume from
    parent: Predictor[Any] | None  # the run from whose weights a new run starts
    init_from: str


def begin(request: TrainRequest, report: Report, held: ExitStack, group: ProcessGroup) -> Start:
    """Start or resume a run. Its folder stays locked until `held` is closed. Rank 0 decides for all processes."""
    folder, init_from = request.folder, request.init_from
    newest = group.broadcast(lambda: find_checkpoint(folder, resume=request.resume))
    if newest or init_from is None:
        parent: Predictor[Any] | None = None
    else:
        parent = group.run_on_all(lambda: open_run(init_from, device="cpu"))
    if newest:
        recipe = group.broadcast(lambda: resume_run(request, newest, report, held, group))
    else:
        recipe = group.broadcast(lambda: begin_run(request, parent, report, held, group))

    def check_folder() -> None:
        if not folder.format.exists():
            raise UserError(
                f"process {group.rank} does not see {str(folder.path)!r}, which the first one made; name a folder "
                "with --out that all machines see"
            )

    group.run_on_all(check_folder)
    return Start(recipe, newest, parent, str(init_from) if parent else "")


def find_checkpoint(folder: RunFolder, *, resume: bool) -> Path | None:
    """Return the checkpoint to resume from, or None for a new run. Other contents are refused, never removed."""
    name = str(folder.path)
    if folder.path.exists() and not folder.path.is_dir():
        raise UserError(f"{name!r} is a file, but a run needs a folder; choose another --out")
    if not folder.format.exists():
        if folder.path.exists() and not all(map(is_temporary, folder.path.iterdir())):
            raise UserError(f"{name!r} is not empty and is no run folder; choose another --out")
        return None
    version = folder.check()
    newest = checkpoint.newest(folder)
    if newest and version < RESUMABLE_FORMAT:
        raise UserError(f"{name!r} was begun by an earlier Dragoman; begin a new run with --init-from {name}")
    if not resume and (newest or folder.model.exists()):
        raise UserError(f"{name!r} already holds a run; add --resume to go on with it, or choose another --out")
    if newest is None and folder.model.exists():
        raise UserError(f"{name!r} has no checkpoint to go on from; begin a new run with --init-from {name}")
    return newest


def begin_run(
    request: TrainRequest, parent: Predictor[Any] | None, report: Report, held: ExitStack, group: ProcessGroup
) -> Recipe:
    """Check the recipe of a new run, make its folder and return the recipe with all settings."""
    folder, run = request.folder, str(request.init_from)
    recipe = request.read_recipe(parent.recipe if parent else None)
    ignored: list[str] = []
    if parent:
        recipe, ignored = inherit_tokenizer(recipe, parent.recipe, request.overrides, run)
    check_settings(check_model(recipe))
    check_scoring(recipe)
    check_parallel(recipe, group)
    check_files(recipe)
    if note := note_on_wer([recipe.train.metric, *recipe.data.metrics], recipe.tokenizer):
        report.log(note)
    if parent:
        now, before = (each.model.model_dump(mode="json") for each in (recipe, parent.recipe))
        own = [f"model.{name}={value}" for name, value in now.items() if value != before.get(name)]
        but = f" but for {', '.join(own)}" if own else ""
        report.log(f"starting from {run}: its weights, its tokenizer and its model's settings{but}")
        for setting in ignored:
            report.log(f"{setting} has no effect: the tokenizer comes from {run}", WARNING)
        new_model(recipe, add_tags(parent.tokenizers, recipe), parent)  # refuses weights that do not fit
    held.enter_context(lock_run(folder, discard=True))
    if request.resume:
        report.log(f"there is nothing in {str(folder.path)!r} to go on from; beginning")
    folder.begin(recipe)
    shutil.rmtree(folder.tokenizer, ignore_errors=True)  # of a start that failed
    return recipe


def resume_run(request: TrainRequest, newest: Path, report: Report, held: ExitStack, group: ProcessGroup) -> Recipe:
    """Check that the recipe equals that of the run in the folder, except for limits and hardware; return it."""
    folder = request.folder
    before, parent = folder.recipe(), checkpoint.load_state(newest).parent
    recipe = request.read_recipe(before if parent else None)
    if parent:
        recipe, _ = inherit_tokenizer(recipe, before, request.overrides, parent)
    elif request.init_from is not None:
        name = str(folder.path)
        raise UserError(f"{name!r} was not begun with --init-from; leave it out, or choose another --out")
    check_settings(check_model(recipe))
    old, new = before.model_dump(mode="json"), recipe.model_dump(mode="json")
    for section in old:
        for key in old[section]:
            change = find_difference(f"{section}.{key}", old[section][key], new[section].get(key))
            if change and key not in MAY_CHANGE.get(section, ()):
                name, one, other = change
                raise UserError(
                    f"this run was begun with {name}={one!r}, and cannot go on with {other!r}; keep it, or begin a new "
                    "run with --init-from"
                )
    kept = {"train": before.data.train, "dev": before.data.dev}  # checkpoints name corpora by their files
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=kept)})
    for name in LIMITS:
        was, now = getattr(before.train, name), getattr(recipe.train, name)
        if was != now:
            report.log(f"train.{name} was {was} and is {now} from here on")
    check_parallel(recipe, group)
    check_files(recipe)
    held.enter_context(lock_run(folder))
    checkpoint.remove_unfinished(folder)
    folder.begin(recipe)
    return recipe


@contextmanager
def lock_run(folder: RunFolder, *, discard: bool = False) -> Iterator[None]:
    """Refuse a second process that trains in this folder: they would overwrite each other's checkpoints.

    With `discard`, remove a folder that was made here if training ends before it has logged anything.
    """
    refusal = f"another process is training in {str(folder.path)!r}; wait for it or choose another --out"
    with ExitStack() as held:
        with report_write_errors(folder.path):
            made = held.enter_context(lock_folder(folder.path, refusal))
        try:
            yield
        except BaseException:  # Ctrl-C too
            logged = folder.metrics.exists() and folder.metrics.stat().st_size
            if discard and made and not logged and checkpoint.newest(folder) is None:
                folder.discard()
            raise


def inherit_tokenizer(recipe: Recipe, parent: Recipe, overrides: Sequence[str], run: str) -> tuple[Recipe, list[str]]:
    """Return the recipe with the tokenizer of its parent run, and its own tokenizer settings that have no effect.

    A setting without effect is refused if it was given on the command line.
    """
    typed = {item.partition("=")[0] for item in overrides}
    ignored = []
    for name in TokenizerSettings.model_fields:
        own, its = getattr(recipe.tokenizer, name), getattr(parent.tokenizer, name)
        if name == "sampling" or name not in recipe.tokenizer.model_fields_set or own == its:
            continue
        ignored.append(f"tokenizer.{name}={own}")
        if typed & {"tokenizer", f"tokenizer.{name}"}:
            raise UserError(
                f"tokenizer.{name}={own} has no effect: the tokenizer comes from {run}, which has {name}={its}; "
                "leave it out"
            )
    tokenizer = parent.tokenizer.model_copy(update={"sampling": recipe.tokenizer.sampling})
    return recipe.model_copy(update={"tokenizer": tokenizer}), ignored


def find_difference(name: str, old: Any, new: Any) -> tuple[str, Any, Any] | None:
    """Return the innermost setting in which two values differ, and both values. Two names of one file do not differ."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return next(filter(None, (find_difference(f"{name}.{key}", old[key], new[key]) for key in old)), None)
    if name.startswith("data.") and name.rpartition(".")[2] in FILES:
        with suppress(OSError, ValueError, TypeError):
            old = new if os.path.samefile(old, new) else old
    return (name, old, new) if old != new else None


def check_settings(recipe: Recipe) -> None:
    """Refuse settings that cannot work, before anything is read or written."""
    train, task, tokenizer = recipe.train, recipe.model.task, recipe.tokenizer
    check_names(TRAIN_REGISTRIES, train, "train")
    optim.check_optimization(train, recipe.model)
    consistency.check_consistency(train, recipe.model)
    if train.compile is True and not recipe.model.compiles:
        raise UserError("train.compile=true is of no use to recurrent models, whose kernels are compiled; leave it out")
    plan_execution(train)
    merge_search(recipe.search)
    pick(TOKENIZERS, tokenizer.kind, "tokenizer.kind")
    metric = select_best_metric(train.metric, task)
    if metric and metric.missing_library:
        raise UserError(f"train.metric: {metric.missing_library}")
    for name in recipe.data.metrics:
        pick(METRICS, name, "metric")
        if name not in metrics_for_task(task):
            raise UserError(f"data.metrics: {name} cannot judge models that {task}; leave it out")
    pick(dict.fromkeys(DIRECTIONS), recipe.data.direction, "data.direction (of the phrasebook)")
    if not recipe.data.train:
        raise UserError("the recipe has no data.train; name a corpus there, such as {source: F, target: F}")
    recipe.data.check()
    for split in SPLITS:
        for corpus in getattr(recipe.data, split):
            if corpus.phrasebook:
                check_request(corpus.split or split, corpus.phrasebook, recipe.data.direction)
    check_data(recipe)
    kinds = [tokenizer.kind, target_settings(tokenizer).kind]
    pick(TOKENIZERS, kinds[1], "tokenizer.target_kind")
    if tokenizer.sampling and not any(TOKENIZERS[kind].samples for kind in kinds):
        able = " or ".join(name for name, kind in TOKENIZERS.items() if kind.samples)
        raise UserError(
            f"tokenizer.sampling has no use with tokenizer.kind={kinds[0]}, which cuts every text in one way; "
            f"leave it out, or choose {able}"
        )
    for name in [name for name, least in (("patience", 1), ("average", 2)) if getattr(train, name) >= least]:
        if not recipe.data.dev:
            raise UserError(f"train.{name} goes by the dev set, so it needs data.dev; name one, or leave it out")
        if not train.validate_every:
            raise UserError(f"train.{name} goes by validations on the way; set train.validate_every, or leave it out")
    if train.freeze:
        freeze_parameters(build_smallest(recipe), train.freeze)


def check_scoring(recipe: Recipe) -> None:
    """Refuse metrics that cannot be computed. A resumed run is not checked: it may be from an earlier release."""
    if missing := next(filter(None, (METRICS[name].missing_library for name in recipe.data.metrics)), ""):
        raise UserError(f"data.metrics: {missing}")
    if recipe.model.task != "translate":
        return
    merge_search(recipe.search, aligns=recipe.model.aligns)
    if recipe.train.metric not in ("auto", "loss") and not recipe.train.validate_lines:
        raise UserError(
            f"train.metric={recipe.train.metric} judges answers, and train.validate_lines=0 asks for none; raise it, "
            "or set train.metric=loss"
        )


def check_parallel(recipe: Recipe, group: ProcessGroup) -> None:
    """Refuse a model that several processes cannot train."""
    if group.is_distributed:
        PARALLEL[recipe.train.parallel].check(build_smallest(recipe))


def build_smallest(recipe: Recipe) -> Model:
    """Return the recipe's model with no vocabulary but the special tokens, to check what depends on its modules."""
    sizes = {"source_size": len(SPECIALS), "target_size": len(SPECIALS)}
    return build_model(recipe.model, **sizes, joint=recipe.tokenizer.joint)


def new_model(recipe: Recipe, tokenizers: Tokenizers, parent: Predictor[Any] | None) -> Model:
    """Return the model with initial weights: sampled from the seed, or the parent's.

    Embeddings of tags that the parent does not have stay as sampled.
    """
    torch.manual_seed(recipe.train.seed)
    model = build_model(recipe.model, **tokenizers.sizes, joint=recipe.tokenizer.joint)
    if parent:
        before, now = parent.tokenizers.sizes["source_size"], tokenizers.sizes["source_size"]
        weights, own = dict(collect_tensors(parent.model)), collect_tensors(model)
        for name, tensor in weights.items():
            grown = name in own and tensor.shape[:1] == (before,) and own[name].shape == (now, *tensor.shape[1:])
            if grown and now > before:
                weights[name] = torch.cat([tensor, own[name].detach()[before:]])
        copy_weights(model, weights, "the run of --init-from", "this recipe's model")
    return model
