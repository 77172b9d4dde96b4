"""How good the model is now: loss on all of dev, and, where there are answers, the metric that they are judged by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any, cast

import numpy as np
import torch

from dragoman.config.settings import metric_name
from dragoman.data.batches import EXAMPLE_FORMATS, LAYOUTS, Widths
from dragoman.data.corpus import collect_references
from dragoman.data.stream import read_in_order
from dragoman.inference.engines.torch import TorchEngine
from dragoman.inference.predictor import eval_mode
from dragoman.inference.translator import Translator
from dragoman.metrics.metrics import AUTO_METRIC, METRICS, Metric, select_best_metric
from dragoman.models.base import Model, Seq2Seq
from dragoman.recipe import Recipe
from dragoman.training.choices import Choices
from dragoman.training.loss import chunked
from dragoman.training.prepare import Prepared, form_of, layout_for
from dragoman.types import Batch, Line

GREEDY = {"method": "greedy", "coverage": 0.0, "unknown": "drop"}  # the quick way, whatever the recipe's search


@dataclass(frozen=True, slots=True)
class Validation:
    """`loss` is the plain negative log-likelihood per target token, in nats. Answers are by greedy search.

    A language model gives no answers; its `bits` are per character, the end of a line counted as one.
    """

    loss: float
    score: float | None = None
    metric: str = "bleu"
    signature: str = ""
    bits: float | None = None
    by_corpus: dict[str, float] = field(default_factory=dict)  # scores, where dev is several

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 100.0))

    def floor(self, metric: str) -> float:
        """Return the goodness below which scores are equal and the loss decides: with train.metric=auto alone."""
        return METRICS[self.metric].floor if metric == "auto" and self.score is not None else -math.inf

    def goodness(self, metric: str) -> tuple[float, float]:
        """Higher is better, whatever `train.metric` is. Equal scores are settled by the loss; no number is worst."""
        loss = -self.loss if math.isfinite(self.loss) else -math.inf
        return (loss if metric == "loss" or self.score is None else METRICS[self.metric].goodness(self.score)), loss

    def to_metrics(self) -> dict[str, Any]:
        """Return the values for metrics.jsonl. The score is named after its metric."""
        about = {"loss": self.loss, "perplexity": self.perplexity}
        if self.bits is not None:
            return about | {"bits_per_character": self.bits}
        several = {f"{self.metric}_by_corpus": self.by_corpus} if self.by_corpus else {}
        return about | {self.metric: self.score, "signature": self.signature} | several

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Validation:
        """Return what was saved. Format 1 knew only BLEU; metrics may have an earlier name."""
        values = {"score" if name == "bleu" else name: value for name, value in state.items()}
        return cls(**values | ({"metric": metric_name(values["metric"])} if "metric" in values else {}))

    def describe(self, task: str) -> str:
        """Return the message about it that training logs."""
        said = f"dev loss {self.loss:.4f}"
        if task != "classify":  # a classifier predicts one label, so it has no perplexity
            said += f", perplexity {self.perplexity:.2f}"
        if self.bits is not None:
            said += f", {self.bits:.4f} bits per character"
        several = ", ".join(f"{name} {score:.2f}" for name, score in self.by_corpus.items())
        judged = "" if self.score is None else f", {METRICS[self.metric].shown} {self.score:.2f}"
        return said + judged + (f" ({several})" if several else "")


class Validator:
    def __init__(
        self, recipe: Recipe, prepared: Prepared, widths: Widths, choices: Choices, last: Validation | None = None
    ) -> None:
        """`last` is the newest validation of a resumed run, whose metric stays that of the run."""
        self.recipe, self.prepared, self.choices, self.last = recipe, prepared, choices, last
        self.device = torch.device(choices.device)
        self.task = recipe.model.task
        self.batches = _batches(recipe, prepared, widths)
        self.engine: TorchEngine | None = None

    @property
    def metric(self) -> Metric:
        """What answers are judged by, even where the loss decides which model is best."""
        named = self.recipe.train.metric
        if named == "auto" and self.last and self.last.score is not None:
            return METRICS[self.last.metric]  # though data.metrics may have changed since
        return select_best_metric(named, self.task, self.recipe.data.metrics) or METRICS[AUTO_METRIC[self.task]]

    def __call__(self, model: Model) -> Validation:
        with torch.compiler.set_stance("force_eager"):  # layers are compiled for training alone
            with suppress(torch.OutOfMemoryError):
                return self.judged(model)
            self.engine = None
            torch.cuda.empty_cache()  # training holds on to what it will need again
            return self.judged(model)

    def judged(self, model: Model) -> Validation:
        with eval_mode(model):
            loss = self.loss(model)
        if self.task == "generate":
            return Validation(loss, metric="loss", bits=loss * self.tokens_per_character() / math.log(2))
        found, wanted = self.labels(model) if self.task == "classify" else self.translations(model)
        if not found:
            return Validation(loss)
        score = self.metric.compute(found, wanted)
        return Validation(loss, score.value, score.name, score.signature, by_corpus=self.by_corpus(found, wanted))

    def by_corpus(self, found: list[str], wanted: list[list[str]]) -> dict[str, float]:
        """The score of the answers to each corpus, where several are asked for."""
        ends = list(accumulate(map(len, self.prepared.asked.values()), initial=0))
        spans = dict(zip(self.prepared.asked, pairwise(ends), strict=True)) if len(ends) > 2 else {}
        return {
            name: self.metric.compute(found[a:b], [lines[a:b] for lines in wanted]).value
            for name, (a, b) in spans.items()
        }

    @torch.inference_mode()
    def loss(self, model: Model) -> float:
        total, count = 0.0, 0
        for batch in self.batches:
            moved = batch.to(self.device)
            real_BT = moved.target_segment_BT > 0
            with self.choices.autocast():
                _, likelihood = chunked(model(moved)[real_BT], model.project.weight, moved.target_out_BT[real_BT], 0.0)
            total, count = total + float(likelihood), count + batch.target_tokens
        return total / count

    def translations(self, model: Model) -> tuple[list[str], list[list[str]]]:
        """Translate the first lines of each corpus of dev; return the translations and the references."""
        pairs, tokenizers = list(chain.from_iterable(self.prepared.asked.values())), self.prepared.tokenizers
        engine = self.engine or TorchEngine(cast(Seq2Seq, model), self.device, tokenizers.target.decode)
        if self.choices.capture:
            self.engine = engine  # its CUDA graphs serve all later validations
        about = (tokenizers, self.recipe, self.prepared.longest, self.device)
        translator = Translator(cast(Seq2Seq, model), *about, engine=engine)
        trees = [pair.tree for pair in pairs] if translator.reads_trees else None
        lines = [Line(pair.source, tag=pair.tag) for pair in pairs]
        found = translator.translate(lines, trees=trees, search=GREEDY, align=False)
        return [one.text for one in found], collect_references(pairs)

    @torch.inference_mode()
    def labels(self, model: Model) -> tuple[list[str], list[list[str]]]:
        """Labels of all of dev, and the right ones."""
        found, wanted = [], []
        with eval_mode(model), self.choices.autocast():
            for batch in self.batches:
                moved = batch.to(self.device)
                real_BT = moved.target_segment_BT > 0
                found += model.project(model(moved)[real_BT]).argmax(-1).tolist()
                wanted += moved.target_out_BT[real_BT].tolist()
        names = self.prepared.tokenizers.target.pieces
        return names(found), [names(wanted)]

    def tokens_per_character(self) -> float:
        stores = [part.store for part in self.prepared.dev]
        marks = 0 if EXAMPLE_FORMATS[form_of(self.recipe)].keeps_eos else sum(map(len, stores))  # of the ends of lines
        return (sum(s.text_length for s in stores) + marks) / sum(s.characters for s in stores)


def _batches(recipe: Recipe, prepared: Prepared, widths: Widths) -> Sequence[Batch]:
    name = form_of(recipe)
    context = getattr(recipe.model, "context", 0)  # of a language model
    examples = [example for part in prepared.dev for example in read_in_order(part.store, name, context)]
    if not examples:
        return []
    form, layout = EXAMPLE_FORMATS[name], LAYOUTS[layout_for(recipe)]
    rng = np.random.default_rng(0)
    grids = layout(*form.lengths(examples), tokens=recipe.train.tokens, widths=widths, rng=rng)
    return [form.collate(grid, examples) for grid in grids]
