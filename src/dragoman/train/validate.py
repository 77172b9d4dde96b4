"""How good the model is now: loss on all of dev, and BLEU of real translations of its first lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dragoman.config import Recipe
from dragoman.data.batch import LAYOUTS, Widths, lay
from dragoman.models.base import Seq2Seq
from dragoman.models.build import kind_of
from dragoman.score.metrics import bleu
from dragoman.train.choices import Choices
from dragoman.train.loss import chunked
from dragoman.train.prepare import Prepared
from dragoman.translator import Translator, evaluating
from dragoman.types import Batch


@dataclass(frozen=True, slots=True)
class Validation:
    """`loss` is the plain negative log-likelihood per target token, in nats. BLEU is by greedy search."""

    loss: float
    bleu: float | None = None
    signature: str = ""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 100.0))

    def goodness(self, metric: str) -> tuple[float, float]:
        """Higher is better, whatever the metric. Equal BLEU is settled by the loss; what is not a number is worst."""
        loss = -self.loss if math.isfinite(self.loss) else -math.inf
        return (self.bleu if metric == "bleu" and self.bleu is not None else loss), loss

    def __str__(self) -> str:
        said = f"dev loss {self.loss:.4f}, perplexity {self.perplexity:.2f}"
        return said if self.bleu is None else f"{said}, BLEU {self.bleu:.2f}"


class Validator:
    def __init__(self, recipe: Recipe, prepared: Prepared, widths: Widths, choices: Choices) -> None:
        self.recipe, self.prepared, self.choices = recipe, prepared, choices
        self.batches = _batches(recipe, prepared, widths)

    def __call__(self, model: Seq2Seq) -> Validation:
        with evaluating(model):
            loss = self.loss(model)
        pairs = self.prepared.dev_pairs
        if not pairs:
            return Validation(loss)
        device = torch.device(self.choices.device)
        translator = Translator(model, self.prepared.tokenizers, self.recipe, self.prepared.longest, device)
        found = translator.translate([pair.source for pair in pairs], beam=1)
        score = bleu([one.text for one in found], [[pair.target for pair in pairs]])
        return Validation(loss, score.value, score.signature)

    @torch.inference_mode()
    def loss(self, model: Seq2Seq) -> float:
        total, count = 0.0, 0
        for batch in self.batches:
            moved = batch.to(torch.device(self.choices.device))
            real_BT = moved.target_segment_BT > 0
            with self.choices.autocast():
                _, likelihood = chunked(model(moved)[real_BT], model.project.weight, moved.target_out_BT[real_BT], 0.0)
            total, count = total + float(likelihood), count + batch.target_tokens
        return total / count


def _batches(recipe: Recipe, prepared: Prepared, widths: Widths) -> Sequence[Batch]:
    examples = [part.store.example(line) for part in prepared.dev for line in range(len(part.store))]
    if not examples:
        return []
    source_N, target_N = (np.array([len(getattr(e, side)) + 1 for e in examples]) for side in ("source", "target"))
    layout = LAYOUTS[kind_of(recipe.model).layout]
    grids = layout(source_N, target_N, tokens=recipe.train.tokens, widths=widths, rng=np.random.default_rng(0))
    return [lay(grid, examples) for grid in grids]
