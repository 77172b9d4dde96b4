"""The door to classification: lines in, labels out.

    classifier = dragoman.load("runs/sst2")
    classifier.classify(["A film to see twice."])

Shapes   B rows of a grid   S source width   V labels
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dragoman.data.batches import BatchPlan, Widths, collate_labels, group_by_key, round_to_bucket
from dragoman.errors import UserError
from dragoman.inference.predictor import Predictor, check_texts, eval_mode
from dragoman.models.base import Model
from dragoman.types import Example

NO_LABEL = np.zeros(1, dtype=np.int64)  # stands where a label would: the grid wants one place for each text


@dataclass(frozen=True, slots=True)
class Verdict:
    """A text's label, how sure the model is of it, and what it holds of all labels, likeliest first."""

    label: str
    probability: float
    probabilities: dict[str, float]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Classifier(Predictor[Model]):
    """Models that put a label on a text."""

    def classify(self, lines: Sequence[str]) -> list[Verdict]:
        """The label of every line, in order. An empty line has none."""
        lines = check_texts(lines, "classify")
        parts = [self.cut(line) for line in lines]
        with eval_mode(self.model):
            found = iter(self.shares([part for some in parts for part in some]))
        return [self.verdict(some, [next(found) for _ in some]) for some in parts]

    def cut(self, line: str) -> list[list[int]]:
        """The ids of a line; of one that is too long for any memory, in parts as long as the model learnt from."""
        ids = self.tokenizers.source.encode(line) if line.strip() else []
        if len(ids) <= self.max_unsplit:
            return [ids] if ids else []
        return [ids[at : at + self.longest] for at in range(0, len(ids), self.longest)]

    @torch.inference_mode()
    def shares(self, parts: Sequence[list[int]]) -> list[list[float]]:
        """Log-probabilities of the labels for every part."""
        examples = [Example(np.array(ids), NO_LABEL, i) for i, ids in enumerate(parts)]
        found: dict[int, list[float]] = {}
        for width, some in group_by_key(range(len(parts)), lambda i: round_to_bucket(len(parts[i]) + 1), self.rows):
            rows = [[i] for i in some] + [[]] * (self.rows - len(some))
            batch = collate_labels(BatchPlan(rows, Widths(width, 1)), examples).to(self.device)
            logp_BV = self.model.project(self.model(batch)[:, 0]).float().log_softmax(-1)
            found.update(zip(some, logp_BV.tolist()))
        return [found[i] for i in range(len(parts))]

    def verdict(self, parts: Sequence[list[int]], shares: Sequence[list[float]]) -> Verdict:
        """Of a text in parts, every part has a say as long as it is."""
        if not parts:
            return Verdict("", 0.0, {})
        warnings = []
        length = sum(map(len, parts))
        if length > self.longest:
            warnings.append(f"longer than any text of training ({length} tokens against {self.longest})")
        if len(parts) > 1:
            warnings.append(f"too long for one piece: read in {len(parts)} parts")
        mean_V = np.average(np.array(shares), axis=0, weights=[len(part) for part in parts])
        share_V = np.exp(mean_V - np.logaddexp.reduce(mean_V))
        names = self.tokenizers.target.pieces(range(len(share_V)))
        ranked = {names[i]: float(share_V[i]) for i in np.argsort(-share_V, kind="stable")}
        label = next(iter(ranked))
        if not math.isfinite(ranked[label]):
            raise UserError("the model gives no numbers: its training went wrong; train it with a smaller train.lr")
        return Verdict(label, ranked[label], ranked, tuple(warnings))
