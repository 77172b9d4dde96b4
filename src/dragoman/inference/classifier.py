"""Classification: lines in, labels out.

    classifier = dragoman.load("runs/sst2")
    classifier.classify(["A film to see twice."])

Shapes   B rows of a batch   S source width   V labels
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dragoman.data.batches import BatchPlan, Widths, collate_labels, group_by_key, round_to_bucket
from dragoman.errors import UserError
from dragoman.inference.predictor import Predictor, check_lines, eval_mode
from dragoman.models.base import Model
from dragoman.types import Example

NO_LABEL = np.zeros(1, dtype=np.int64)  # placeholder: a batch has one target position per text


@dataclass(frozen=True, slots=True)
class Verdict:
    """The label of a text, its probability, and the probabilities of all labels, highest first."""

    label: str
    probability: float
    probabilities: dict[str, float]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Classifier(Predictor[Model]):
    """A model that labels texts."""

    def classify(self, lines: Sequence[str]) -> list[Verdict]:
        """Return the label of each line, in order. An empty line has none."""
        lines = check_lines(lines, "classify")
        parts = [self.split_ids(line) for line in lines]
        with eval_mode(self.model):
            found = iter(self.compute_logps([part for some in parts for part in some]))
        return [self.make_verdict(some, [next(found) for _ in some]) for some in parts]

    def split_ids(self, line: str) -> list[list[int]]:
        """Return the ids of a line; above `max_unsplit`, in parts as long as the longest text of training."""
        ids = self.tokenizers.source.encode(line) if line.strip() else []
        if len(ids) <= self.max_unsplit:
            return [ids] if ids else []
        return [ids[at : at + self.longest] for at in range(0, len(ids), self.longest)]

    @torch.inference_mode()
    def compute_logps(self, parts: Sequence[list[int]]) -> list[list[float]]:
        """Return the log-probabilities of the labels for each part."""
        examples = [Example(np.array(ids), NO_LABEL, i) for i, ids in enumerate(parts)]
        found: dict[int, list[float]] = {}
        for width, some in group_by_key(range(len(parts)), lambda i: round_to_bucket(len(parts[i]) + 1), self.rows):
            rows = [[i] for i in some] + [[]] * (self.rows - len(some))
            batch = collate_labels(BatchPlan(rows, Widths(width, 1)), examples).to(self.device)
            logp_BV = self.model.project(self.model(batch)[:, 0]).float().log_softmax(-1)
            found.update(zip(some, logp_BV.tolist()))
        return [found[i] for i in range(len(parts))]

    def make_verdict(self, parts: Sequence[list[int]], logps: Sequence[list[float]]) -> Verdict:
        """Return the verdict on a text: the mean of its parts' log-probabilities, weighted by length."""
        if not parts:
            return Verdict("", 0.0, {})
        warnings = []
        length = sum(map(len, parts))
        if length > self.longest:
            warnings.append(f"longer than any text of training ({length} tokens against {self.longest})")
        if len(parts) > 1:
            warnings.append(f"too long for one piece: read in {len(parts)} parts")
        mean_V = np.average(np.array(logps), axis=0, weights=[len(part) for part in parts])
        probability_V = np.exp(mean_V - np.logaddexp.reduce(mean_V))
        names = self.tokenizers.target.pieces(range(len(probability_V)))
        ranked = {names[i]: float(probability_V[i]) for i in np.argsort(-probability_V, kind="stable")}
        label = next(iter(ranked))
        if not math.isfinite(ranked[label]):
            raise UserError("the model gives no numbers: its training went wrong; train it with a smaller train.lr")
        return Verdict(label, ranked[label], ranked, tuple(warnings))
