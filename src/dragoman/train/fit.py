"""How large a batch may be: the largest whose update fits into a GPU's memory.

fit("recipe.yaml")      # train.tokens, and the memory that an update takes then
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from dragoman.config import read_recipe
from dragoman.data.stream import Place
from dragoman.models.build import completed, layout_of
from dragoman.store import RunFolder
from dragoman.train.choices import choose
from dragoman.train.prepare import check_files, prepare, stream_of
from dragoman.train.report import Report
from dragoman.train.start import check, new_model
from dragoman.train.step import Full, Stepper, settled
from dragoman.types import UserError

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
    whole = completed(read_recipe(Path(recipe), overrides))
    check(whole)
    check_files(whole)
    choices = choose(whole.train, layout_of(whole.model))
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
        batch, _ = next(stream.batches(Place()))
        needed = memory_of(lambda: settled([stepper.update([batch], 1, 0.0)]), device)
        report.say(f"{tokens:,} tokens: " + ("too many" if needed is None else f"{needed / 1e9:.1f} GB"))
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
