"""Validation: the loss on the dev set and, for tasks with outputs (translations, labels), the score of the outputs."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Annotated, Any, cast

import numpy as np
import torch
from pydantic import AliasChoices, Field

from dragoman.config.settings import MetricName
from dragoman.data.batches import EXAMPLE_FORMATS, LAYOUTS, Widths
from dragoman.data.corpus import collect_references
from dragoman.data.stream import read_in_order
from dragoman.data.tokenizers import WordTokenizer
from dragoman.inference.engines.torch import TorchEngine
from dragoman.inference.predictor import eval_mode
from dragoman.inference.translator import Translator
from dragoman.metrics.metrics import BEST_METRIC, METRICS, Metric, choose_checkpoint_metric
from dragoman.models.base import Model, Seq2Seq
from dragoman.recipe import Recipe
from dragoman.training.execution import ExecutionPlan
from dragoman.training.loss import LossTerms, compute_chunked_loss, compute_model_loss
from dragoman.training.prepare import RunData
from dragoman.types import Batch, Line

# Used instead of the search section of the recipe: it is faster.
VALIDATION_SEARCH = {"method": "greedy", "coverage": 0.0, "unknown": "drop"}


@dataclass(frozen=True, slots=True)
class Validation:
    """The result of a validation."""

    loss: float  # negative log-likelihood per target token, in nats
    # The score of greedy outputs; None for a language model, which has no outputs. Old checkpoints call it "bleu".
    score: Annotated[float | None, Field(validation_alias=AliasChoices("score", "bleu"))] = None
    metric: MetricName = "bleu"
    signature: str = ""  # sacreBLEU's description of how the score was computed
    bits: float | None = None  # of a language model, per character; the end of a line counts as a character
    by_corpus: dict[str, float] = field(default_factory=dict)  # scores, if data.dev has several corpora

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 100.0))  # exp(710) overflows

    def floor(self, metric: str) -> float:
        """Return the score below which scores count as equal and the loss decides; -inf unless train.metric=auto."""
        return METRICS[self.metric].floor if metric == "auto" and self.score is not None else -math.inf

    def goodness(self, metric: str) -> tuple[float, float]:
        """Return (score, -loss); an error rate is negated too, so that higher is better. NaN is the worst."""
        negative_loss = -self.loss if math.isfinite(self.loss) else -math.inf
        if metric == "loss" or self.score is None:
            return negative_loss, negative_loss
        return METRICS[self.metric].goodness(self.score), negative_loss

    def to_metrics(self) -> dict[str, Any]:
        """Return the values for metrics.jsonl. The score is named after its metric."""
        values = {"loss": self.loss, "perplexity": self.perplexity}
        if self.bits is not None:
            return values | {"bits_per_character": self.bits}
        by_corpus = {f"{self.metric}_by_corpus": self.by_corpus} if self.by_corpus else {}
        return values | {self.metric: self.score, "signature": self.signature} | by_corpus

    def describe(self, task: str) -> str:
        message = f"dev loss {self.loss:.4f}"
        if task != "classify":  # a classifier predicts one label, so it has no perplexity
            message += f", perplexity {self.perplexity:.2f}"
        if self.bits is not None:
            message += f", {self.bits:.4f} bits per character"
        if self.score is not None:
            message += f", {METRICS[self.metric].title} {self.score:.2f}"
        by_corpus = ", ".join(f"{name} {score:.2f}" for name, score in self.by_corpus.items())
        return message + (f" ({by_corpus})" if by_corpus else "")


class Validator:
    """The dev set and how to evaluate a model on it: `validator(model)` returns a Validation."""

    def __init__(
        self, recipe: Recipe, prepared: RunData, widths: Widths, plan: ExecutionPlan, last: Validation | None = None
    ) -> None:
        """Collate the dev set into rows of these widths. `last` is the last validation of a resumed run."""
        self.recipe, self.prepared, self.plan, self.last = recipe, prepared, plan, last
        self.device, self.task = torch.device(plan.device), recipe.model.task
        self.engine: TorchEngine | None = None
        name, context = recipe.example_format, getattr(recipe.model, "context", 0)  # only language models have one
        examples = [example for part in prepared.dev for example in read_in_order(part.store, name, context)]
        example_format, plan_batches = EXAMPLE_FORMATS[name], LAYOUTS[recipe.batch_layout]
        self.batches: list[Batch] = []
        if examples:
            lengths, rng = example_format.count_example_slots(examples), np.random.default_rng(0)
            batch_plans = plan_batches(*lengths, tokens=recipe.train.tokens, widths=widths, rng=rng)
            self.batches = [example_format.collate(batch_plan, examples) for batch_plan in batch_plans]

    @property
    def metric(self) -> Metric:
        """The metric of outputs, even if the loss decides which model is best."""
        name = self.recipe.train.metric
        if name == "auto" and self.last and self.last.score is not None:
            return METRICS[self.last.metric]  # a resumed run keeps its metric, even if data.metrics has changed
        return choose_checkpoint_metric(name, self.task, self.recipe.data.metrics) or METRICS[BEST_METRIC[self.task]]

    def __call__(self, model: Model) -> Validation:
        """Evaluate the model. If memory runs out, free all caches and try again."""
        with torch.compiler.set_stance("force_eager"):  # layers are compiled for training only
            with suppress(torch.OutOfMemoryError):
                return self.evaluate(model)
            self.engine = None
            torch.cuda.empty_cache()  # PyTorch caches memory that training will need again
            return self.evaluate(model)

    def evaluate(self, model: Model) -> Validation:
        with eval_mode(model):
            loss, predicted, gold = self.run_batches(model)
        if self.task == "generate":
            stores = [part.store for part in self.prepared.dev]
            stores_eos = EXAMPLE_FORMATS[self.recipe.example_format].stores_eos  # else there is one more token per line
            tokens = sum(len(store.target_ids) for store in stores) + (0 if stores_eos else sum(map(len, stores)))
            tokens_per_character = tokens / sum(store.characters for store in stores)
            return Validation(loss, metric="loss", bits=loss * tokens_per_character / math.log(2))
        to_labels, classifies = self.prepared.tokenizers.target.ids_to_tokens, self.task == "classify"
        outputs, references = (to_labels(predicted), [to_labels(gold)]) if classifies else self.translate(model)
        if not outputs:
            return Validation(loss)
        score, by_corpus = self.metric.compute(outputs, references), {}
        offsets = list(accumulate(map(len, self.prepared.dev_pairs.values()), initial=0))
        if len(self.prepared.dev_pairs) > 1:
            for name, (start, end) in zip(self.prepared.dev_pairs, pairwise(offsets), strict=True):
                by_corpus[name] = self.metric.compute(outputs[start:end], [r[start:end] for r in references]).value
        return Validation(loss, score.value, score.name, score.signature, by_corpus=by_corpus)

    @torch.inference_mode()
    def run_batches(self, model: Model) -> tuple[float, list[int], list[int]]:
        """Return the mean loss of all target tokens, without label smoothing, and two lists.

        For a classifier, these are the ids of its predicted labels and of the gold labels; otherwise they are empty.
        """
        total, predicted, gold = 0.0, list[int](), list[int]()
        for host_batch in self.batches:
            batch = host_batch.to(self.device)
            is_token_BT = batch.target_segment_BT > 0
            with self.plan.autocast():
                states_NC, target_N = model(batch)[is_token_BT], batch.target_out_BT[is_token_BT]
                _, nll, _ = compute_model_loss(model, states_NC[None], target_N, LossTerms(), compute_chunked_loss)
                total += float(nll)
                if self.task == "classify":
                    predicted += model.compute_logits(states_NC).argmax(-1).tolist()
                    gold += target_N.tolist()
        return total / sum(batch.target_tokens for batch in self.batches), predicted, gold

    def translate(self, model: Model) -> tuple[list[str], list[list[str]]]:
        """Translate the first lines of each corpus of data.dev; return the translations and the references."""
        pairs, tokenizers = list(chain.from_iterable(self.prepared.dev_pairs.values())), self.prepared.tokenizers
        engine = self.engine or TorchEngine(cast(Seq2Seq, model), self.device, tokenizers.target.decode)
        if self.plan.use_cuda_graphs:
            self.engine = engine  # later validations use its CUDA graphs again
        longest = self.prepared.longest
        translator = Translator(cast(Seq2Seq, model), tokenizers, self.recipe, longest, self.device, engine=engine)
        trees = [pair.tree for pair in pairs] if translator.reads_trees else None
        lines = [Line(pair.source, tag=pair.tag, context=pair.context) for pair in pairs]
        # A copying model is judged by the unknown words that it copies, if the recipe's search writes them.
        copies = model.copy_gate is not None and isinstance(tokenizers.target, WordTokenizer)
        keeps_copying = copies and self.recipe.search.unknown == "copy"
        search = VALIDATION_SEARCH | ({"unknown": "copy"} if keeps_copying else {})
        hypotheses = translator.translate(lines, trees=trees, search=search, align=False)
        return [hypothesis.text for hypothesis in hypotheses], collect_references(pairs)
