"""Check a recipe and its data without training; no files are kept.

How large a batch may be: the largest whose update fits into a GPU's memory.

fit("recipe.yaml")      # train.tokens, and the memory that an update takes then
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from dragoman.data.stream import StreamPosition, WeightedStore
from dragoman.errors import UserError
from dragoman.models.registry import count_parameters
from dragoman.process_group import ProcessGroup, join_process_group
from dragoman.progress import Report
from dragoman.recipe import check_model, read_recipe
from dragoman.run_dir import RunFolder
from dragoman.training.choices import choose
from dragoman.training.prepare import check_files, prepare, stream_of
from dragoman.training.start import Order, check, first_begin, meeting_minutes, new_model, opened
from dragoman.training.step import Full, Stepper, fetch_metrics
from dragoman.training.trainer import choose_hardware

BYTES = 16  # of a parameter in training: float32 weights, gradients and Adam's two moments


def dry_run(recipe: Path, *, out: Path, overrides: Sequence[str] = (), init_from: Path | None = None) -> dict[str, Any]:
    """Check a recipe and its data as training would, and return what would be trained.

    Under torchrun the main process does so, and the others return an empty dictionary.
    """
    with join_process_group(lambda: meeting_minutes(recipe, overrides)) as group:
        found = group.broadcast(lambda: inspect(Order(recipe, RunFolder(out), overrides, False, init_from), group))
        return found if group.is_main else {}


def inspect(order: Order, group: ProcessGroup) -> dict[str, Any]:
    """Prepare a run in a temporary folder and return what would be trained.

    The cache is temporary too, so the tokenizer is learned and the corpora are encoded anew.
    """
    opened(order.folder, resume=False)
    with TemporaryDirectory(prefix="dragoman-") as made, ExitStack() as held:
        folder, report = RunFolder(Path(made) / "run"), Report()
        settings = [*order.overrides, f"data.cache={made}/cache"]
        start = first_begin(order._replace(folder=folder, overrides=settings), report, held, group)
        given = start.parent.tokenizers if start.parent else None
        prepared = prepare(start.recipe, folder, report, tokenizers=given)
        model = new_model(start.recipe, prepared.tokenizers, start.parent)
        count, train = count_parameters(model), start.recipe.train
        slots, tokens = (sum(sizes) for sizes in zip(*map(epoch_size, prepared.train), strict=True))
        return {
            "model": start.recipe.model.kind,
            "parameters": count,
            "vocabulary": prepared.tokenizers.sizes,
            "train_examples": sum(len(part.store) for part in prepared.train),
            "train_tokens": tokens,
            "dev_examples": sum(len(part.store) for part in prepared.dev),
            "until": train.limit,
            "steps_per_epoch": max(round(slots / (train.tokens * train.accumulate)), 1),
            "memory": count * (BYTES + 4 * bool(train.ema)),
            "choices": str(choose_hardware(start.recipe, None, ProcessGroup())),
        }


def epoch_size(part: WeightedStore) -> tuple[float, int]:
    """Return the slots that an epoch takes in batches, padding left out, and its tokens on both sides."""
    source_N, target_N = part.store.lengths_of(np.arange(len(part.store)))
    return part.weight * float(np.maximum(source_N, target_N).sum() + len(source_N)), int((source_N + target_N).sum())


def render(about: dict[str, Any]) -> str:
    """Return what a dry run found as lines for people."""
    sizes = ", ".join(f"{size:,} {name.removesuffix('_size')}" for name, size in about["vocabulary"].items())
    rows = {
        "model": f"{about['model']}, {about['parameters']:,} parameters",
        "vocabulary": sizes,
        "train": f"{about['train_examples']:,} examples, {about['train_tokens']:,} tokens",
        "dev": f"{about['dev_examples']:,} examples",
        "steps": f"until {about['until']}; an epoch is about {about['steps_per_epoch']:,} steps",
        "memory": f"{about['memory'] / 1e6:,.0f} MB for weights, gradients and optimizer; activations come on top",
        "compute": about["choices"],
    }
    return "\n".join(f"{name:10}  {value}" for name, value in rows.items())


FIRST = 2048  # tokens of the first try
SHARE = 0.85  # of the memory is used; the rest is for what validation, graphs and fragments take
GRAIN = 256


class Fit(NamedTuple):
    tokens: int
    needed: float  # bytes
    memory: float  # that the GPU has


def fit(recipe: str | Path, overrides: Sequence[str] = (), report: Report | None = None) -> Fit:
    """Try updates of growing batches of the recipe's own data. Nothing is written but the cache."""
    report = report or Report()
    whole = check_model(read_recipe(Path(recipe), overrides))
    check(whole)
    check_files(whole)
    choices = choose(whole.train, whole.model.layout)
    device = torch.device(choices.device)
    if device.type != "cuda":
        raise UserError(
            f"batches are fitted to the memory of a GPU, and train.device={whole.train.device} finds none here; "
            "run it on a machine that has one"
        )
    choices.apply()
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(whole, RunFolder(folder), report)
    model = new_model(whole, prepared.tokenizers, None)
    stepper = Stepper(model, whole.train, replace(choices, capture=False, compile=False))
    memory = float(torch.cuda.get_device_properties(device).total_memory)

    def needs(tokens: int) -> float | None:
        settings = whole.train.model_copy(update={"tokens": tokens})
        stream = stream_of(whole.model_copy(update={"train": settings}), prepared, few_shapes=True)
        batch, _ = next(stream.batches(StreamPosition()))
        needed = memory_of(lambda: fetch_metrics([stepper.update([batch], 1, 0.0)]), device)
        report.log(f"{tokens:,} tokens: " + ("too many" if needed is None else f"{needed / 1e9:.1f} GB"))
        return needed

    tokens = largest(needs, SHARE * memory)
    return Fit(tokens, needs(tokens) or memory, memory)


def largest(needs: Callable[[int], float | None], room: float) -> int:
    """The most tokens for which `needs`, which grows in a line from some size on, stays within `room`.

    Batches are doubled until one takes more than a third of the room or, then it is None, does not fit at all; from the
    last two the rest is reckoned, and tried.
    """
    tokens, before, now = FIRST, 0.0, needs(FIRST)
    while now is None or now > room:
        if tokens == GRAIN:
            return GRAIN
        tokens, now = tokens // 2, needs(tokens // 2)
    while now is not None and (not before or now < room / 3):
        tokens, before, now = 2 * tokens, now, needs(2 * tokens)
    if now is None or now > room:
        tokens, now = tokens // 2, before
        more = 1.0
    else:
        more = max((room - now) / max(now - before, 1.0), 0.0) / 2 + 1
    found = int(tokens * more) // GRAIN * GRAIN
    while found > tokens and ((need := needs(found)) is None or need > room):
        found = max(found * 9 // 10 // GRAIN * GRAIN, tokens)
    return max(found, GRAIN)


def memory_of(update: Callable[[], object], device: torch.device) -> float | None:
    """The bytes that an update takes at most; None if there are not so many."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        update()
        torch.cuda.synchronize(device)
    except (torch.OutOfMemoryError, Full):
        return None
    return float(torch.cuda.max_memory_allocated(device))
