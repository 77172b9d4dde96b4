"""Small models for experiments: built from settings, trained on token ids or by a recipe.

    model = build_small_model({"kind": "classifier", "backbone": "rnn", "width": 32}, vocabulary=20, labels=2, seed=1)
    fit(model, sample_batch, steps=200, lr=1e-2)

`fit` is a plain loop without schedules and checkpoints, for synthetic tasks whose batches are made on the fly;
`train_run` trains a recipe by the usual trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dragoman.config.settings import parse_settings
from dragoman.data.batches import EXAMPLE_FORMATS, BatchPlan, Widths
from dragoman.inference.loading import load
from dragoman.inference.predictor import eval_mode
from dragoman.labs.experiment import Setup
from dragoman.models.base import Model
from dragoman.models.registry import build_model
from dragoman.progress import Report
from dragoman.recipe import Recipe
from dragoman.training.trainer import train
from dragoman.types import SPECIALS, Batch, Example

FIRST_ID = len(SPECIALS)  # ids below are special tokens, such as PAD and EOS
REVERSED_LENGTH, REVERSED_TOKENS = 6, 12  # of sentences to reverse: most tokens, and how many different ones
REVERSALS = FIRST_ID + REVERSED_TOKENS  # vocabulary of these sentences
CLIP = 1.0  # maximum gradient norm, unless an experiment is about clipping


def build_small_model(settings: Mapping[str, Any], *, vocabulary: int, labels: int = 0, seed: int = 0) -> Model:
    """Return a model with initial weights. `vocabulary` counts token ids, special ones included.

    `labels` is the number of outputs of a classifier; other models predict tokens of the vocabulary.
    """
    recipe = parse_settings(Recipe, {"model": dict(settings)})
    torch.manual_seed(seed)
    target_size = labels or vocabulary
    return build_model(recipe.neural_model, source_size=vocabulary, target_size=target_size, joint=not labels)


def make_batch(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], *, example_format: str = "pairs"
) -> Batch:
    """Return a batch with one example per row. Formats: "pairs", "labels" (one id per target) and "lines"."""
    examples = [
        Example(np.array(source, dtype=np.int64), np.array(target, dtype=np.int64), line)
        for line, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]
    task_format = EXAMPLE_FORMATS[example_format]
    source_N, target_N = task_format.count_example_slots(examples)
    widths = Widths(int(source_N.max()), int(target_N.max()))
    return task_format.collate(BatchPlan([[index] for index in range(len(examples))], widths), examples)


def sample_reversals(seed: int, step: int, rows: int = 32) -> Batch:
    """Return random sentences of different lengths and their reversals."""
    rng = np.random.default_rng((seed, step))
    lengths = rng.integers(2, REVERSED_LENGTH + 1, rows)
    sources = [rng.integers(FIRST_ID, REVERSALS, length).tolist() for length in lengths]
    return make_batch(sources, [source[::-1] for source in sources])


def compute_losses(model: Model, batch: Batch) -> Tensor:
    """Return the cross-entropy of every target token, loss_N."""
    real_BT = batch.target_segment_BT > 0
    logits_NV = model.compute_logits(model(batch)[real_BT])
    return nn.functional.cross_entropy(logits_NV, batch.target_out_BT[real_BT], reduction="none")


def count_flops(model: Model, step: Callable[[], Tensor]) -> tuple[int, int]:
    """Return the FLOPs of all matrix products that a forward pass executes, and of those by which tokens interact.

    The latter are those of an attention pattern, or else of the recurrent layer. The counter sees neither the matrix
    products of oneDNN, which linear layers use in training, nor fused kernels of attention.
    """
    with eval_mode(model), FlopCounterMode(display=False) as counter:
        step()
    total = counter.get_total_flops()
    by_module = {name: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}
    patterns = [flops for name, flops in by_module.items() if name.endswith(".pattern")]
    return total, sum(patterns) if patterns else total


def fit(
    model: Model,
    sample_batch: Callable[[int], Batch],
    *,
    steps: int,
    lr: float,
    clip: float = CLIP,
    device: str = "cpu",
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam,
    gradient_norms: list[float] | None = None,
    warmup: int = 0,
) -> list[float]:
    """Train a model in place and return the loss of every step. `sample_batch` returns the batch of a step.

    The learning rate rises linearly to `lr` within the first `warmup` steps. The norm of the gradient of every step,
    before clipping, is appended to `gradient_norms`.
    """
    model.to(device).train()
    updates = optimizer(model.parameters(), lr=lr)  # type: ignore[call-arg]
    losses = []
    for step in range(steps):
        for group in updates.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / (warmup + 1))
        loss = compute_losses(model, sample_batch(step).to(torch.device(device))).mean()
        updates.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip if clip > 0 else float("inf"))
        if gradient_norms is not None:
            gradient_norms.append(float(norm))
        updates.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist() if losses else []


def summarize_curve(losses: Sequence[float], points: int) -> tuple[list[int], list[float]]:
    """Return about `points` points of a training curve: the last step of each block of steps, and its mean loss."""
    block = max(len(losses) // points, 1)
    ends = list(range(block, len(losses) + 1, block))
    return ends, [fmean(losses[end - block : end]) for end in ends]


@torch.no_grad()
def measure_accuracy(
    model: Model, batches: Sequence[Batch], *, device: str = "cpu", position: int | None = None
) -> float:
    """Return the fraction of target tokens that the model predicts correctly, given all tokens before them.

    `position` selects the target tokens at this position; by default all count, including EOS.
    """
    correct = total = 0
    model.to(device)
    with eval_mode(model):
        for batch in (batch.to(torch.device(device)) for batch in batches):
            real_BT = batch.target_segment_BT > 0
            if position is not None:
                real_BT &= batch.target_position_BT == position
            predicted_N = model.compute_logits(model(batch)[real_BT]).argmax(-1)
            correct += int((predicted_N == batch.target_out_BT[real_BT]).sum())
            total += len(predicted_N)
    return correct / total


def train_run(recipe: Mapping[str, Any], name: str, seed: int, setup: Setup, *, init_from: Path | None = None) -> Any:
    """Train a recipe, given as nested dictionaries, into a folder of the experiment; return the loaded predictor.

    A finished run is not trained again, and an interrupted one is resumed. `init_from` is a run whose weights training
    starts from.
    """
    folder = setup.folder / "runs" / f"{name}-{seed}"
    train_settings = {"device": setup.device, "compile": False, "validate_every": 0, **recipe["train"], "seed": seed}
    data = {"cache": str(setup.folder / "cache"), **recipe["data"]}
    values = {**recipe, "data": data, "train": train_settings}
    report = Report(quiet=True)
    train(parse_settings(Recipe, values), out=folder, resume=True, init_from=init_from, report=report)
    return load(folder, device=setup.device)
