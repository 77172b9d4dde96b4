"""`dragoman train` itself: it reads, packs, copies, learns and logs as ever, and waits at a gate before each update."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch
from plain import turns_on
from turns import task

from dragoman.config.settings import build
from dragoman.models.registry import count_parameters
from dragoman.recipe import Recipe
from dragoman.training import trainer
from dragoman.types import SPECIALS, Batch

FOR_EVER = 10**9


class Gate(Protocol):
    """Who lets updates through: a contestant's turns, or a profiler."""

    def ready(self, **facts: Any) -> None: ...
    def before(self) -> None: ...
    def after(self, tokens: int, flops: float) -> None: ...


def model_of(asked: dict[str, Any]) -> dict[str, Any]:
    size = asked["size"]
    shared = {"kind": size["kind"], "layers": size["layers"], "width": size["width"], "dropout": asked["dropout"]}
    if size["kind"] == "rnn":
        return {**shared, "cell": "lstm", "attention": "additive", "input_feeding": size["feeding"]}
    return {**shared, "heads": size["heads"], "feedforward_width": size["inner"]}


def recipe_of(asked: dict[str, Any]) -> Recipe:
    folder = Path(asked["folder"])
    data = {
        "train": {"source": str(folder / "train.source"), "target": str(folder / "train.target")},
        "cache": str(folder / "cache"),
    }
    train = {
        "steps": FOR_EVER,
        "save_every": FOR_EVER,
        "validate_every": 0,
        "tokens": asked["tokens"],
        "precision": asked["precision"],
        "threads": asked["threads"],
        "label_smoothing": asked["smoothing"],
        "clip": asked["clip"],
        "optimizer": "adam",
        "device": asked["device"],
        "compile": True if asked["compiled"] else "auto",
    }
    tokenizer = {"kind": "space", "size": asked["vocabulary"] - len(SPECIALS)}
    return build(Recipe, {"data": data, "tokenizer": tokenizer, "model": model_of(asked), "train": train})


def train(asked: dict[str, Any], gate: Gate) -> None:
    """Train until the gate ends it."""

    class Gated(trainer.Trainer):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.counted = 0.0
            gate.ready(
                version=f"on torch {torch.__version__}",
                parameters=count_parameters(self.stepper.model),
                chosen=str(self.stepper.plan),
                widths=list(self.stream.widths),
            )

        def train_step(self, batches: list[Batch]) -> Any:
            gate.before()
            done = super().train_step(batches)
            spent, self.counted = self.state.flops - self.counted, self.state.flops  # of the step before
            gate.after(sum(batch.tokens for batch in batches), spent)
            return done

    out = Path(tempfile.mkdtemp(dir=asked["folder"])) / "run"
    usual, trainer.Trainer = trainer.Trainer, Gated  # type: ignore[misc,assignment]  # what `train` makes
    try:
        trainer.train(recipe_of(asked), out=out, overrides=asked["overrides"])
    finally:
        trainer.Trainer = usual  # type: ignore[misc]


def main() -> None:
    asked = task()
    train(asked, turns_on(asked["device"]))


if __name__ == "__main__":
    main()
