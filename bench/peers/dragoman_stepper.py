"""Dragoman itself: batches and updates exactly as its trainer takes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from padded import read_pairs
from turns import Turns, task

from dragoman.config import Recipe, TokenizerSettings, TrainSettings
from dragoman.data.batch import LAYOUTS, choose_widths, lay
from dragoman.models.build import build_model, layout_of, parameters
from dragoman.train.choices import choose
from dragoman.train.step import Stepper
from dragoman.types import Batch, Example


def endless_batches(folder: str, tokens: int, layout: str) -> Iterator[Batch]:
    """As training makes them: shuffled, planned, written out."""
    examples = [Example(source, target, line) for line, (source, target) in enumerate(read_pairs(folder))]
    lengths = [np.array([len(getattr(e, side)) + 1 for e in examples]) for side in ("source", "target")]
    widths = choose_widths(*lengths)
    for epoch in itertools.count():
        rng = np.random.default_rng([1, epoch])
        for grid in LAYOUTS[layout](*lengths, tokens=tokens, widths=widths, rng=rng):
            yield lay(grid, examples)


def model_of(asked: dict[str, Any]) -> dict[str, Any]:
    size = asked["size"]
    shared = {"kind": size["kind"], "layers": size["layers"], "width": size["width"], "dropout": asked["dropout"]}
    if size["kind"] == "rnn":
        return {**shared, "cell": "lstm", "attention": "additive", "input_feeding": size["feeding"]}
    return {**shared, "heads": size["heads"], "feedforward_width": size["inner"]}


def recipe(asked: dict[str, Any]) -> Recipe:
    train = TrainSettings(
        tokens=asked["tokens"],
        precision=asked["precision"],
        threads=asked["threads"],
        label_smoothing=asked["smoothing"],
        clip=asked["clip"],
        optimizer="adam",
        device="cpu",
        compile=True if asked["compiled"] else "auto",
    )
    return Recipe(model=model_of(asked), train=train, tokenizer=TokenizerSettings(joint=True, size=asked["vocabulary"]))


def main() -> None:
    asked, turns = task(), Turns()
    torch.manual_seed(1)
    whole = recipe(asked)
    model = build_model(whole, source_size=asked["vocabulary"], target_size=asked["vocabulary"])
    choices = choose(whole.train)
    choices.apply()
    stepper = Stepper(model, whole.train, choices)
    given = (asked["folder"], asked["tokens"], layout_of(whole.model))
    some = list(itertools.islice(endless_batches(*given), 50))
    full = sum(b.tokens for b in some) / sum(b.source_BS.numel() + b.target_out_BT.numel() for b in some)
    shape = [list(grid.shape) for grid in (some[0].source_BS, some[0].target_out_BT)]
    turns.ready(
        version=f"on torch {torch.__version__}",
        fill=full,
        parameters=parameters(model),
        chosen=str(choices),
        grid=shape,
    )
    for step, batch in enumerate(endless_batches(*given), 1):
        turns.before()
        turns.after(stepper.update([batch], step, 1e-4).tokens)


if __name__ == "__main__":
    main()
