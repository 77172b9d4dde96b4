"""What to expect of a run: `dry_run` checks a recipe and its data, `fit` finds the largest batches.

fit("recipe.yaml")      # train.tokens, and the memory that a step takes then
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from dragoman.data.stream import StreamPosition
from dragoman.errors import UserError
from dragoman.inference.loading import open_run
from dragoman.models.registry import count_parameters
from dragoman.process_group import ProcessGroup, join_process_group
from dragoman.progress import Report
from dragoman.recipe import check_model, read_recipe
from dragoman.run_dir import RunFolder
from dragoman.training.execution import plan_execution
from dragoman.training.prepare import check_files, open_stream, prepare
from dragoman.training.start import TrainRequest, begin_run, check_settings, find_checkpoint, new_model
from dragoman.training.step import OptimizerOutOfMemoryError, Stepper, fetch_metrics

BYTES_PER_PARAMETER = 16  # in training: float32 weights, gradients and Adam's two moments


def dry_run(recipe: Path, *, out: Path, overrides: Sequence[str] = (), init_from: Path | None = None) -> dict[str, Any]:
    """Check a recipe and its data as training would, and return what would be trained.

    The run folder and the cache are temporary, so the tokenizer is learned and the corpora are encoded anew. Under
    torchrun the main process does so, and the others return an empty dictionary.
    """
    request = TrainRequest(recipe, RunFolder(out), overrides, resume=False, init_from=init_from)
    with join_process_group(request.timeout_minutes) as group:
        found = group.broadcast(lambda: describe_run(request, group))
        return found if group.is_main else {}


def describe_run(request: TrainRequest, group: ProcessGroup) -> dict[str, Any]:
    """Prepare a run in a temporary folder and return what would be trained."""
    find_checkpoint(request.folder, resume=False)
    with TemporaryDirectory(prefix="dragoman-") as made, ExitStack() as held:
        folder, report = RunFolder(Path(made) / "run"), Report()
        request = request._replace(folder=folder, overrides=[*request.overrides, f"data.cache={made}/cache"])
        parent = open_run(request.init_from, device="cpu") if request.init_from is not None else None
        recipe = begin_run(request, parent, report, held, group)
        prepared = prepare(recipe, folder, report, tokenizers=parent.tokenizers if parent else None)
        model, train = new_model(recipe, prepared.tokenizers, parent), recipe.train
        slots, tokens = 0.0, 0  # slots that an epoch takes in batches, padding left out, and tokens on both sides
        for part in prepared.train:
            source_N, target_N = part.store.lengths(np.arange(len(part.store)))
            slots += part.weight * float(np.maximum(source_N, target_N).sum() + len(source_N))
            tokens += int((source_N + target_N).sum())
        return {
            "model": recipe.model.kind,
            "parameters": count_parameters(model),
            "vocabulary": prepared.tokenizers.sizes,
            "train_examples": sum(len(part.store) for part in prepared.train),
            "train_tokens": tokens,
            "dev_examples": sum(len(part.store) for part in prepared.dev),
            "until": train.limit,
            "steps_per_epoch": max(round(slots / (train.tokens * train.accumulate)), 1),
            "memory": count_parameters(model) * (BYTES_PER_PARAMETER + 4 * bool(train.ema)),
            "execution": str(plan_execution(train, recipe.model.layout, can_bucket_shapes=recipe.can_bucket_shapes)),
        }


def render(about: dict[str, Any]) -> str:
    """Return the result of a dry run as lines for people."""
    sizes = ", ".join(f"{size:,} {name.removesuffix('_size')}" for name, size in about["vocabulary"].items())
    rows = {
        "model": f"{about['model']}, {about['parameters']:,} parameters",
        "vocabulary": sizes,
        "train": f"{about['train_examples']:,} examples, {about['train_tokens']:,} tokens",
        "dev": f"{about['dev_examples']:,} examples",
        "steps": f"until {about['until']}; an epoch is about {about['steps_per_epoch']:,} steps",
        "memory": f"{about['memory'] / 1e6:,.0f} MB for weights, gradients and optimizer; activations come on top",
        "compute": about["execution"],
    }
    return "\n".join(f"{name:10}  {value}" for name, value in rows.items())


FIRST_TOKENS = 2048  # of the first batch that is tried
MEMORY_SHARE = 0.85  # the rest is for validation, CUDA graphs and fragments
TOKEN_STEP = 256


class Fit(NamedTuple):
    tokens: int
    needed: float  # bytes
    memory: float  # bytes of the GPU


def fit(recipe: str | Path, overrides: Sequence[str] = (), report: Report | None = None) -> Fit:
    """Find the largest train.tokens by training steps on growing batches of the recipe's data.

    Nothing is written but the cache.
    """
    report = report or Report()
    whole = check_model(read_recipe(Path(recipe), overrides))
    check_settings(whole)
    check_files(whole)
    plan = plan_execution(whole.train, whole.model.layout)
    device = torch.device(plan.device)
    if device.type != "cuda":
        raise UserError(
            f"batches are fitted to the memory of a GPU, and train.device={whole.train.device} finds none here; "
            "run it on a machine that has one"
        )
    plan.apply()
    with TemporaryDirectory() as folder:
        prepared = prepare(whole, RunFolder(folder), report)
    model = new_model(whole, prepared.tokenizers, None)
    stepper = Stepper(model, whole.train, replace(plan, use_cuda_graphs=False, compile=False))
    memory = float(torch.cuda.get_device_properties(device).total_memory)

    def measure(tokens: int) -> float | None:
        settings = whole.train.model_copy(update={"tokens": tokens})
        stream = open_stream(whole.model_copy(update={"train": settings}), prepared, bucketed_shapes=True)
        batch, _ = next(stream.batches(StreamPosition()))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        try:
            fetch_metrics([stepper.update([batch], 1, 0.0)])
            torch.cuda.synchronize(device)
        except (torch.OutOfMemoryError, OptimizerOutOfMemoryError):
            report.log(f"{tokens:,} tokens: too many")
            return None
        needed = float(torch.cuda.max_memory_allocated(device))
        report.log(f"{tokens:,} tokens: {needed / 1e9:.1f} GB")
        return needed

    tokens = find_largest(measure, MEMORY_SHARE * memory)
    return Fit(tokens, measure(tokens) or memory, memory)


def find_largest(measure: Callable[[int], float | None], limit: float) -> int:
    """Return the maximum number of tokens whose memory stays within `limit`.

    `measure` returns the memory of a step with so many tokens, None if it does not fit at all. It grows linearly from
    some size on: batches are doubled until one takes a third of the limit, and the rest is extrapolated and tried.
    """
    tokens, before, now = FIRST_TOKENS, 0.0, measure(FIRST_TOKENS)
    while now is None or now > limit:
        if tokens == TOKEN_STEP:
            return TOKEN_STEP
        tokens, now = tokens // 2, measure(tokens // 2)
    while now is not None and (not before or now < limit / 3):
        tokens, before, now = 2 * tokens, now, measure(2 * tokens)
    if now is None or now > limit:
        tokens, factor = tokens // 2, 1.0
    else:
        factor = max((limit - now) / max(now - before, 1.0), 0.0) / 2 + 1
    found = int(tokens * factor) // TOKEN_STEP * TOKEN_STEP
    while found > tokens and ((need := measure(found)) is None or need > limit):
        found = max(found * 9 // 10 // TOKEN_STEP * TOKEN_STEP, tokens)
    return max(found, TOKEN_STEP)
