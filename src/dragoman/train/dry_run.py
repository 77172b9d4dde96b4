"""Check a recipe and its data without training; no files are kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dragoman.data.stream import Weighted
from dragoman.group import Group, joined
from dragoman.models.build import parameters
from dragoman.store import RunFolder
from dragoman.train.prepare import prepare
from dragoman.train.report import Report
from dragoman.train.start import Order, first_begin, meeting_minutes, new_model, opened
from dragoman.train.trainer import chosen

BYTES = 16  # of a parameter in training: float32 weights, gradients and Adam's two moments


def dry_run(recipe: Path, *, out: Path, overrides: Sequence[str] = (), init_from: Path | None = None) -> dict[str, Any]:
    """Check a recipe and its data as training would, and return what would be trained.

    Under torchrun the main process does so, and the others return an empty dictionary.
    """
    with joined(lambda: meeting_minutes(recipe, overrides)) as group:
        found = group.told(lambda: inspect(Order(recipe, RunFolder(out), overrides, False, init_from), group))
        return found if group.first else {}


def inspect(order: Order, group: Group) -> dict[str, Any]:
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
        count, train = parameters(model), start.recipe.train
        slots, tokens = (sum(sizes) for sizes in zip(*map(epoch_size, prepared.train), strict=True))
        return {
            "model": start.recipe.model["kind"],
            "parameters": count,
            "vocabulary": prepared.tokenizers.sizes,
            "train_examples": sum(len(part.store) for part in prepared.train),
            "train_tokens": tokens,
            "dev_examples": sum(len(part.store) for part in prepared.dev),
            "until": train.limit,
            "steps_per_epoch": max(round(slots / (train.tokens * train.accumulate)), 1),
            "memory": count * (BYTES + 4 * bool(train.ema)),
            "choices": str(chosen(start.recipe, None, Group())),
        }


def epoch_size(part: Weighted) -> tuple[float, int]:
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
