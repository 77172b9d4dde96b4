"""How a run begins, and which run may go on: what is in the way is refused before anything is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
from dragoman.inference.constraints import merge_search
from dragoman.inference.loading import copy_weights, open_run
from dragoman.inference.predictor import Predictor
from dragoman.io import is_temporary, lock_folder, report_write_errors
from dragoman.metrics.metrics import METRICS, metrics_for_task, note_on_wer, select_best_metric
from dragoman.models.base import Model, collect_tensors
from dragoman.models.registry import build_model
from dragoman.phrasebook.generate import DIRECTIONS, check_request
from dragoman.process_group import DEFAULT_MEETING_MINUTES, ProcessGroup
from dragoman.progress import WARNING, Report
from dragoman.recipe import Recipe, check_model, override_recipe, read_recipe
from dragoman.run_dir import RunFolder
from dragoman.training import checkpoint as record
from dragoman.training import consistency, optim
from dragoman.training.choices import choose
from dragoman.training.distributed import PARALLEL
from dragoman.training.loss import LOSSES
from dragoman.training.prepare import check_data, check_files, tagged
from dragoman.training.step import freeze
from dragoman.types import SPECIALS

RESUMABLE = 2  # the earliest format of a run folder whose training can go on
MAY_CHANGE = {
    "train": {
        "steps", "epochs", "minutes", "flops", "patience",  # when to stop
        "keep", "average", "save_every", "log_every", "tensorboard",  # what to keep and show
        "device", "precision", "compile", "threads",  # where to run: said, because the bits may change
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


class Start(NamedTuple):
    recipe: Recipe  # with every setting written out
    newest: Path | None  # the checkpoint to go on from
    parent: Predictor[Any] | None  # the run whose weights a new one begins with
    init_from: str


class Order(NamedTuple):
    """What was asked for."""

    recipe: str | Path | Recipe
    folder: RunFolder
    overrides: Sequence[str]
    resume: bool
    init_from: str | Path | None


def begin(order: Order, report: Report, held: ExitStack, group: ProcessGroup) -> Start:
    """Make the folder, or find where the run in it was. It is ours alone until `held` lets go of it.

    Of several processes the first does so, and the others are told.
    """
    begun: list[Start] = []

    def told() -> tuple[Recipe, Path | None, str]:
        start = first_begin(order, report, held, group)
        begun.append(start)
        return start.recipe, start.newest, start.init_from

    def told_of() -> Start:
        if not order.folder.format.exists():
            raise UserError(
                f"process {group.rank} does not see {str(order.folder.path)!r}, which the first one made; name a "
                "folder with --out that all machines see"
            )
        return Start(whole, newest, open_run(parent, device="cpu") if parent else None, parent)

    whole, newest, parent = group.broadcast(told)
    return group.run_on_all(lambda: begun[0] if begun else told_of())


def first_begin(order: Order, report: Report, held: ExitStack, group: ProcessGroup) -> Start:
    _, folder, overrides, resume, init_from = order
    newest = opened(folder, resume=resume)
    if newest:
        before = folder.recipe()
        whole = gone_on(order, before, record.load(newest).parent)
        for name in LIMITS:
            was, now = getattr(before.train, name), getattr(whole.train, name)
            if was != now:
                report.log(f"train.{name} was {was} and is {now} from here on")
        check_shared(whole, group)
        check_files(whole)
        held.enter_context(alone(folder))
        record.clear(folder)
        folder.begin(whole)
        return Start(whole, newest, None, "")
    parent = open_run(init_from, device="cpu") if init_from is not None else None
    whole = read_order(order, parent.recipe if parent else None)
    ignored = check_tokenizer(whole, parent.recipe, overrides, str(init_from)) if parent else []
    whole = keep_tokenizer(whole, parent.recipe) if parent else whole
    check(check_model(whole))
    check_judging(whole)
    check_shared(whole, group)
    check_files(whole)
    if note := note_on_wer([whole.train.metric, *whole.data.metrics], whole.tokenizer):
        report.log(note)
    if parent:
        report.log(starting_from(str(init_from), parent.recipe, whole))
        for setting in ignored:
            report.log(f"{setting} has no effect: the tokenizer comes from {init_from}", WARNING)
        new_model(whole, tagged(parent.tokenizers, whole), parent)  # what does not fit is said now, not after hours
    held.enter_context(claimed(folder))
    if resume:
        report.log(f"there is nothing in {str(folder.path)!r} to go on from; beginning")
    folder.begin(whole)
    shutil.rmtree(folder.tokenizer, ignore_errors=True)  # of a start that came to nothing
    return Start(whole, None, parent, str(init_from or ""))


def meeting_minutes(recipe: str | Path | Recipe, overrides: Sequence[str]) -> float:
    """Return train.timeout; where the recipe cannot be read, that is reported once when all processes have met."""
    values: dict[str, Any] = {"train": {}}
    try:
        if isinstance(recipe, Recipe):
            values["train"] = recipe.train.model_dump(mode="json")
        else:
            values |= read_values(Path(recipe))[0]
        for item in overrides:
            override(values, item)
        return build(TrainSettings, values["train"]).timeout
    except UserError:
        return DEFAULT_MEETING_MINUTES


def read_order(order: Order, parent: Recipe | None) -> Recipe:
    """Return the recipe of an order; what it leaves out of the model section is the parent's."""
    if isinstance(order.recipe, Recipe):
        return override_recipe(order.recipe, order.overrides, parent=parent)
    return read_recipe(Path(order.recipe), order.overrides, parent=parent)


@contextmanager
def alone(folder: RunFolder) -> Iterator[bool]:
    """Refuse a second process that trains in one folder: they would ruin each other's checkpoints.

    Yield whether the folder was made here.
    """
    refusal = f"another process is training in {str(folder.path)!r}; wait for it or choose another --out"
    with ExitStack() as held:
        with report_write_errors(folder.path):
            made = held.enter_context(lock_folder(folder.path, refusal))
        yield made


@contextmanager
def claimed(folder: RunFolder) -> Iterator[None]:
    """Lock the folder of a new run, and discard a folder made here if training ends before it has logged anything."""
    with alone(folder) as made:
        try:
            yield
        except BaseException:  # Ctrl-C too
            logged = folder.metrics.exists() and folder.metrics.stat().st_size
            if made and not logged and record.newest(folder) is None:
                folder.discard()
            raise


def gone_on(order: Order, before: Recipe, parent: str) -> Recipe:
    """Return the recipe of a run that is resumed; refuse one that is not the recipe the run was begun with.

    `parent` is the run whose weights it began with, "" if there is none.
    """
    recipe = read_order(order, before if parent else None)
    if parent:
        check_tokenizer(recipe, before, order.overrides, parent)
        recipe = keep_tokenizer(recipe, before)
    elif order.init_from is not None:
        name = str(order.folder.path)
        raise UserError(f"{name!r} was not begun with --init-from; leave it out, or choose another --out")
    check(check_model(recipe))
    same_run(before, recipe)
    kept = {"train": before.data.train, "dev": before.data.dev}  # checkpoints know corpora by the names of their files
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=kept)})


def check_tokenizer(recipe: Recipe, parent: Recipe, overrides: Sequence[str], run: str) -> list[str]:
    """Return the tokenizer settings of a recipe that have no effect, since the tokenizer is that of the parent run.

    One that was given on the command line is refused: who types it expects something of it.
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
    return ignored


def starting_from(run: str, parent: Recipe, whole: Recipe) -> str:
    """Return what a run takes over from its parent, and which settings of the model are its own."""
    now, before = whole.model.model_dump(mode="json"), parent.model.model_dump(mode="json")
    own = [f"model.{name}={value}" for name, value in now.items() if value != before.get(name)]
    but = f" but for {', '.join(own)}" if own else ""
    return f"starting from {run}: its weights, its tokenizer and its model's settings{but}"


def opened(folder: RunFolder, *, resume: bool) -> Path | None:
    """The checkpoint to go on from; None where a run may begin. What is in the way is refused, never removed."""
    name = str(folder.path)
    if folder.path.exists() and not folder.path.is_dir():
        raise UserError(f"{name!r} is a file, but a run needs a folder; choose another --out")
    if not folder.format.exists():
        if folder.path.exists() and not all(map(is_temporary, folder.path.iterdir())):
            raise UserError(f"{name!r} is not empty and is no run folder; choose another --out")
        return None
    version = folder.check()
    newest = record.newest(folder)
    if newest and version < RESUMABLE:
        raise UserError(f"{name!r} was begun by an earlier Dragoman; begin a new run with --init-from {name}")
    if not resume and (newest or folder.model.exists()):
        raise UserError(f"{name!r} already holds a run; add --resume to go on with it, or choose another --out")
    if newest is None and folder.model.exists():
        raise UserError(f"{name!r} has no checkpoint to go on from; begin a new run with --init-from {name}")
    return newest


def check(recipe: Recipe) -> None:
    """Refuse settings that cannot work, before anything is read or written."""
    task = recipe.model.task
    check_names(TRAIN_REGISTRIES, recipe.train, "train")
    optim.check_optimization(recipe.train, recipe.model)
    consistency.check(recipe.train, recipe.model)
    if recipe.train.compile is True and not recipe.model.compiles:
        raise UserError("train.compile=true is of no use to recurrent models, whose kernels are compiled; leave it out")
    choose(recipe.train)
    merge_search(recipe.search)
    pick(TOKENIZERS, recipe.tokenizer.kind, "tokenizer.kind")
    check_metrics(recipe, task)
    pick(dict.fromkeys(DIRECTIONS), recipe.data.direction, "data.direction (of the phrasebook)")
    if not recipe.data.train:
        raise UserError("the recipe has no data.train; name a corpus there, such as {source: F, target: F}")
    for name in SPLITS:
        for corpus in getattr(recipe.data, name):
            corpus.check(f"data.{name}")
            if corpus.phrasebook:
                check_request(corpus.split or name, corpus.phrasebook, recipe.data.direction)
    check_data(recipe)
    pick(TOKENIZERS, target_settings(recipe.tokenizer).kind, "tokenizer.target_kind")
    kinds = [recipe.tokenizer.kind, target_settings(recipe.tokenizer).kind]
    if recipe.tokenizer.sampling and not any(TOKENIZERS[kind].samples for kind in kinds):
        able = " or ".join(name for name, kind in TOKENIZERS.items() if kind.samples)
        raise UserError(
            f"tokenizer.sampling has no use with tokenizer.kind={kinds[0]}, which cuts every text in one way; "
            f"leave it out, or choose {able}"
        )
    check_validation(recipe)
    if recipe.train.freeze:
        freeze(build_smallest(recipe), recipe.train.freeze)


def check_metrics(recipe: Recipe, task: str) -> None:
    judge = select_best_metric(recipe.train.metric, task)
    if judge and judge.missing_library:
        raise UserError(f"train.metric: {judge.missing_library}")
    for name in recipe.data.metrics:
        pick(METRICS, name, "metric")
        if name not in metrics_for_task(task):
            raise UserError(f"data.metrics: {name} cannot judge models that {task}; leave it out")


def check_validation(recipe: Recipe) -> None:
    """What is asked of validations is refused where there are none."""
    train = recipe.train
    for name in [name for name, least in (("patience", 1), ("average", 2)) if getattr(train, name) >= least]:
        if not recipe.data.dev:
            raise UserError(f"train.{name} goes by the dev set, so it needs data.dev; name one, or leave it out")
        if not train.validate_every:
            raise UserError(f"train.{name} goes by validations on the way; set train.validate_every, or leave it out")


def check_judging(recipe: Recipe) -> None:
    """Refuse to judge answers that nobody asks for, and what could not be counted when the training is done. A run that
    was begun so goes on."""
    if lack := next(filter(None, (METRICS[name].missing_library for name in recipe.data.metrics)), ""):
        raise UserError(f"data.metrics: {lack}")
    train, task = recipe.train, recipe.model.task
    if task == "translate":
        merge_search(recipe.search, aligns=recipe.model.aligns)
    if task == "translate" and train.metric not in ("auto", "loss") and not train.validate_lines:
        raise UserError(
            f"train.metric={train.metric} judges answers, and train.validate_lines=0 asks for none; raise it, or set "
            "train.metric=loss"
        )


def check_shared(recipe: Recipe, group: ProcessGroup) -> None:
    """What several processes cannot train is refused."""
    if group.is_distributed:
        PARALLEL[recipe.train.parallel].check(build_smallest(recipe))


def build_smallest(recipe: Recipe) -> Model:
    """Return the recipe's model with no vocabulary but the special tokens, to check what depends on its modules."""
    sizes = {"source_size": len(SPECIALS), "target_size": len(SPECIALS)}
    return build_model(recipe.model, **sizes, joint=recipe.tokenizer.joint)


def keep_tokenizer(recipe: Recipe, parent: Recipe) -> Recipe:
    """Return the recipe with the parent's tokenizer, which fine-tuning takes over."""
    tokenizer = parent.tokenizer.model_copy(update={"sampling": recipe.tokenizer.sampling})
    return recipe.model_copy(update={"tokenizer": tokenizer})


def same_run(before: Recipe, now: Recipe) -> None:
    """A resumed run is the same run: only when to stop and where to run may differ."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    for section in old:
        for key in old[section]:
            change = first_difference(f"{section}.{key}", old[section][key], new[section].get(key))
            if change and key not in MAY_CHANGE.get(section, ()):
                name, one, other = change
                raise UserError(
                    f"this run was begun with {name}={one!r}, and cannot go on with {other!r}; keep it, or begin a new "
                    "run with --init-from"
                )


def first_difference(name: str, old: Any, new: Any) -> tuple[str, Any, Any] | None:
    """Return the innermost setting in which two values differ, and both values. Two names of one file do not differ."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return next(filter(None, (first_difference(f"{name}.{key}", old[key], new[key]) for key in old)), None)
    if name.startswith("data.") and name.rpartition(".")[2] in FILES:
        with suppress(OSError, ValueError, TypeError):
            old = new if os.path.samefile(old, new) else old
    return (name, old, new) if old != new else None


def new_model(recipe: Recipe, tokenizers: Tokenizers, parent: Predictor[Any] | None) -> Model:
    """Weights drawn from the seed, or those of the run that this one begins with."""
    torch.manual_seed(recipe.train.seed)
    model = build_model(recipe.model, **tokenizers.sizes, joint=recipe.tokenizer.joint)
    if parent:
        copy_weights(model, with_new_tags(parent, tokenizers, model), "the run of --init-from", "this recipe's model")
    return model


def grown(tensor: Tensor, other: Tensor) -> tuple[int, int] | None:
    """How many rows one and the other have, where they are alike but for that."""
    return (len(tensor), len(other)) if tensor.dim() and tensor.shape[1:] == other.shape[1:] else None


def with_new_tags(parent: Predictor[Any], tokenizers: Tokenizers, model: Model) -> dict[str, Tensor]:
    """The parent's weights. The rows of tags that it did not know are those of the model, as they were drawn."""
    before, now = parent.tokenizers.sizes["source_size"], tokenizers.sizes["source_size"]
    weights, own = dict(collect_tensors(parent.model)), collect_tensors(model)
    for name, tensor in weights.items():
        if now > before and name in own and (before, now) == grown(tensor, own[name]):
            weights[name] = torch.cat([tensor, own[name].detach()[before:]])
    return weights
