"""Train with `dragoman train` unchanged, data pipeline and logging included, with a pause between turns."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch
from plain import make_turns
from turns import read_task

from dragoman.config.settings import parse_settings
from dragoman.models.registry import count_parameters
from dragoman.recipe import Recipe
from dragoman.training import trainer
from dragoman.types import SPECIALS, Batch

NEVER_ENDING = 10**9


class UpdateObserver(Protocol):
    """Called around every update: the turns of a contestant, or a profiler."""

    def ready(self, **facts: Any) -> None: ...
    def before(self) -> None: ...
    def after(self, tokens: int, flops: float) -> None: ...


def configure_model(task: dict[str, Any]) -> dict[str, Any]:
    size = task["size"]
    shared = {"kind": size["kind"], "layers": size["layers"], "width": size["width"], "dropout": task["dropout"]}
    if size["kind"] == "rnn":
        return {**shared, "cell": "lstm", "attention": "additive", "input_feeding": size["feeding"]}
    return {**shared, "heads": size["heads"], "feedforward_width": size["inner"]}


def make_recipe(task: dict[str, Any]) -> Recipe:
    folder = Path(task["folder"])
    data = {
        "train": {"source": str(folder / "train.source"), "target": str(folder / "train.target")},
        "cache": str(folder / "cache"),
    }
    train = {
        "steps": NEVER_ENDING,
        "save_every": NEVER_ENDING,
        "validate_every": 0,
        "tokens": task["tokens"],
        "precision": task["precision"],
        "threads": task["threads"],
        "label_smoothing": task["smoothing"],
        "clip": task["clip"],
        "optimizer": "adam",
        "device": task["device"],
        "compile": True if task["compiled"] else "auto",
    }
    tokenizer = {"kind": "space", "size": task["vocabulary"] - len(SPECIALS)}
    model = configure_model(task)
    return parse_settings(Recipe, {"data": data, "tokenizer": tokenizer, "model": model, "train": train})


def train(task: dict[str, Any], observer: UpdateObserver) -> None:
    """Train until the observer raises an exception."""

    class ObservedTrainer(trainer.Trainer):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.flops_before = 0.0
            observer.ready(
                version=f"on torch {torch.__version__}",
                parameters=count_parameters(self.stepper.model),
                chosen=str(self.stepper.plan),
                widths=list(self.stream.widths),
            )

        def train_step(self, batches: list[Batch]) -> Any:
            observer.before()
            result = super().train_step(batches)
            # The trainer counts the operations of a step when the next one starts.
            flops, self.flops_before = self.state.flops - self.flops_before, self.state.flops
            observer.after(sum(batch.tokens for batch in batches), flops)
            return result

    out = Path(tempfile.mkdtemp(dir=task["folder"])) / "run"
    original, trainer.Trainer = trainer.Trainer, ObservedTrainer  # type: ignore[misc,assignment]  # made by `train`
    try:
        trainer.train(make_recipe(task), out=out, overrides=task["overrides"])
    finally:
        trainer.Trainer = original  # type: ignore[misc]


def main() -> None:
    task = read_task()
    train(task, make_turns(task["device"]))


if __name__ == "__main__":
    main()
