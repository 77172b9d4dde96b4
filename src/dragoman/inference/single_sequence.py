"""Predictors of models that read one sequence: language models and classifiers.

    dragoman.load("runs/lm").generate(["To be, or"], tokens=100, seed=1)
    dragoman.load("runs/sst2").classify(["A film to see twice."])
    dragoman.load(["runs/sst2", "runs/sst2-lstm"]).classify(["A film to see twice."])  # an ensemble

If a language model was trained on complete files (data.documents=file), EOS marks the end of a line, and the text
continues after it; if it was trained on lines, EOS ends the text.

Shapes   B rows of a batch   P prompt width   T new tokens   N tokens without padding   V vocabulary or labels
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.config.settings import SampleSettings
from dragoman.data.batches import EXAMPLE_FORMATS, Widths
from dragoman.data.stream import TextWindows
from dragoman.decoding.continuous_batching import round_to_bucket
from dragoman.decoding.protocol import mean_logp
from dragoman.decoding.sampling import sample_continuations
from dragoman.errors import UserError
from dragoman.inference.predictor import Predictor, check_lines, eval_mode
from dragoman.models.base import Model
from dragoman.models.single_sequence import LanguageModel
from dragoman.types import BOS, EOS, PAD, UNK, Batch, Example


@dataclass(frozen=True, slots=True)
class Continuation:
    """The text that a language model generated for a prompt."""

    prompt: str
    text: str  # prompt and new tokens
    tokens: int  # number of new tokens
    logp: float
    finished: bool  # whether the model generated EOS at the end
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextLikelihood:
    """The loss on a text, in nats per token. The end of each line counts as one token and one character."""

    lines: int
    tokens: int
    characters: int
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 100.0))  # limited, since a very high loss would overflow

    @property
    def bits_per_character(self) -> float:
        """Bits per character, by which models with different tokenizers can be compared."""
        return self.loss * self.tokens / self.characters / math.log(2)


@dataclass(slots=True)
class PartialText:
    """A text that is being generated."""

    ids: list[int]  # the prompt and the tokens generated so far, after BOS or EOS
    prompt_length: int  # number of ids of the prompt, BOS or EOS included
    random_T: NDArray[np.float64]  # a random number to sample each token that may still be generated
    logp: float = 0.0
    finished: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Generator(Predictor[LanguageModel]):
    """A language model, which continues prompts and measures the perplexity of texts."""

    def generate(
        self,
        prompts: Sequence[str],
        *,
        count: int = 1,
        tokens: int = 256,
        seed: int = 1,
        settings: SampleSettings | None = None,
    ) -> list[list[Continuation]]:
        """Return `count` continuations of each prompt, each with at most `tokens` new tokens.

        The n-th continuation depends only on the prompt, n and the seed. Temperature 0 is greedy decoding.
        """
        prompts = check_lines(prompts, "generate")
        texts = [self.start_text(prompt, tokens, seeds=(seed, n)) for prompt in prompts for n in range(count)]
        context = self.model.settings.context
        with eval_mode(self.model):
            for start in range(0, len(texts), self.batch_rows):
                batch, history = texts[start : start + self.batch_rows], context - 1
                while any(len(text.random_T) for text in batch):
                    self.fill_window(batch, settings or SampleSettings(), max(history, 1))
                    history = context // 2  # from now on, each window is half previous tokens and half new tokens
        return [
            [self.make_continuation(prompt, text) for text in texts[i * count : (i + 1) * count]]
            for i, prompt in enumerate(prompts)
        ]

    def start_text(self, prompt: str, tokens: int, *, seeds: tuple[int, int]) -> PartialText:
        if self.whole_files:
            ids = [EOS, *self.encode_lines(prompt.split("\n"))[:-1]]  # the last line is continued, so it has no EOS
        else:
            ids = [BOS, *self.tokenizers.target.encode(prompt)]
            tokens = min(tokens, max(self.recipe.data.max_length + 1 - len(ids), 0))
        return PartialText(ids, len(ids), np.random.default_rng(seeds).random(tokens))

    def fill_window(self, texts: list[PartialText], settings: SampleSettings, history: int) -> None:
        """Read the last `history` tokens of each text and extend it until the window is full or the text has ended.

        A window has `context` tokens. Models without a context limit (`has_fixed_context` is false), such as recurrent
        ones, and models trained on lines read each text from its beginning.
        """
        has_window = self.whole_files and self.model.settings.has_fixed_context
        inputs = [text.ids[-history:] if has_window else text.ids for text in texts]
        context = self.model.settings.context
        limits = [len(text.random_T) for text in texts]
        if has_window:
            limits = [min(limit, max(context - len(ids), 1)) for limit, ids in zip(limits, inputs)]
        prompt_BP = torch.full((self.batch_rows, max(map(len, inputs))), PAD)
        random_BT = torch.zeros(self.batch_rows, max(limits), dtype=torch.float64)
        length_B = torch.ones(self.batch_rows, dtype=torch.long)
        limit_B = torch.zeros_like(length_B)
        for row, (ids, text, limit) in enumerate(zip(inputs, texts, limits)):
            prompt_BP[row, : len(ids)] = torch.tensor(ids)
            random_BT[row, :limit] = torch.from_numpy(text.random_T[:limit])
            length_B[row], limit_B[row] = len(ids), limit
        prompt_BP, length_B, random_BT, limit_B = (x.to(self.device) for x in (prompt_BP, length_B, random_BT, limit_B))
        results = sample_continuations(
            self.model, prompt_BP, length_B, random_BT, limit_B, settings, eos_ends=not self.whole_files
        )
        for text, result, limit in zip(texts, results, limits):
            is_full = len(result.tokens) == limit
            text.random_T = text.random_T[limit:] if is_full else text.random_T[:0]  # a text that has ended needs none
            text.ids += result.tokens
            text.logp += result.logp
            text.finished = text.finished or result.finished

    def make_continuation(self, prompt: str, generated: PartialText) -> Continuation:
        """Return the decoded text, in which EOS becomes a line break, with warnings."""
        warnings = []
        if UNK in generated.ids[: generated.prompt_length]:
            warnings.append("the prompt contains tokens that the tokenizer does not know")
        maximum = self.recipe.data.max_length
        if not self.whole_files and not generated.finished and len(generated.ids) > maximum:
            warnings.append(f"stopped at {maximum} tokens, the maximum length of a line (data.max_length)")
        lines: list[list[int]] = [[]]
        for token in generated.ids[1:]:
            if token == EOS:
                lines.append([])
            else:
                lines[-1].append(token)
        text = "\n".join(map(self.tokenizers.target.decode, lines))
        new_tokens = len(generated.ids) - generated.prompt_length
        return Continuation(prompt, text, new_tokens, generated.logp, generated.finished, tuple(warnings))

    def encode_lines(self, lines: Sequence[str]) -> list[int]:
        return [token for ids in self.tokenizers.target.encode_all(lines) for token in (*ids, EOS)]

    def measure(self, lines: Sequence[str]) -> TextLikelihood:
        """Return the loss on a text. The model reads the text in windows or line by line, as in training."""
        lines = check_lines(lines, "measure")
        if self.whole_files:
            ids = np.array(self.encode_lines(lines), dtype=np.int64)
            context = self.model.settings.context
            windows = TextWindows(ids, context, first_length=context) if len(ids) > 1 else ()
            examples = windows.read_examples(np.arange(len(windows))) if windows else []
        else:
            targets = [np.array(ids, dtype=np.int64) for ids in self.tokenizers.target.encode_all(lines)]
            examples = [Example(target[:0], target, i) for i, target in enumerate(targets)]
        if not examples:
            raise UserError("there is no text to measure; give at least one line that is not empty")
        collate = EXAMPLE_FORMATS["windows" if self.whole_files else "lines"].collate
        total_loss, predicted_tokens = 0.0, 0
        with eval_mode(self.model), torch.inference_mode():
            for _, batch in self.iter_batches(
                examples, lambda example: Widths(0, round_to_bucket(len(example.target) + 1)), collate
            ):
                real_BT = batch.target_segment_BT > 0
                logits_NV = self.model.project(self.model(batch)[real_BT]).float()
                total_loss += float(F.cross_entropy(logits_NV, batch.target_out_BT[real_BT], reduction="sum"))
                predicted_tokens += batch.target_tokens
        tokens = sum(len(ids) + 1 for ids in self.tokenizers.target.encode_all(lines))
        return TextLikelihood(len(lines), tokens, sum(len(line) + 1 for line in lines), total_loss / predicted_tokens)

    @property
    def whole_files(self) -> bool:
        """Whether the model was trained on complete files, not on separate lines."""
        return self.recipe.data.documents == "file"


NO_LABEL = np.zeros(1, dtype=np.int64)  # placeholder for the label, since a batch has one target position per text


@dataclass(frozen=True, slots=True)
class Verdict:
    """The classification of a text."""

    label: str
    probability: float
    probabilities: dict[str, float]  # of all labels, highest first
    warnings: tuple[str, ...] = ()


class ClassifierEnsemble(Model):
    """Several classifiers with the same vocabularies, whose probabilities are averaged.

    `forward` returns log-probabilities of the labels instead of states, and `compute_logits` is the identity.
    """

    def __init__(self, models: Sequence[Model]) -> None:
        super().__init__()
        self.members = list(models)
        self.registered = nn.ModuleList(models)  # so that `to`, `train` and `eval` also apply to the members

    def forward(self, batch: Batch) -> Tensor:
        """Return the logarithm of the mean probabilities of the labels of each text, logp_BTV."""
        return mean_logp([model.compute_logits(model(batch)).float().log_softmax(-1) for model in self.members])

    def compute_logits(self, states: Tensor) -> Tensor:
        return states


@dataclass(frozen=True, slots=True, repr=False)
class Classifier(Predictor[Model]):
    """A model that labels texts."""

    def classify(self, lines: Sequence[str]) -> list[Verdict]:
        """Return the label of each line, in the order of the lines. An empty line has no label."""
        lines = check_lines(lines, "classify")
        parts_by_line = [self.split_ids(line) for line in lines]
        with eval_mode(self.model):
            logps = iter(self.compute_logps(list(chain.from_iterable(parts_by_line))))
        return [self.make_verdict(parts, [next(logps) for _ in parts]) for parts in parts_by_line]

    def split_ids(self, line: str) -> list[list[int]]:
        """Return the ids of a line; above `max_segment_tokens` they are split into parts of `longest_source` tokens."""
        ids = self.tokenizers.source.encode(line) if line.strip() else []
        if len(ids) <= self.max_segment_tokens:
            return [ids] if ids else []
        return [ids[start : start + self.longest_source] for start in range(0, len(ids), self.longest_source)]

    @torch.inference_mode()
    def compute_logps(self, parts: Sequence[list[int]]) -> list[list[float]]:
        """Return the log-probabilities of the labels for each part."""
        examples = [Example(np.array(ids), NO_LABEL, i) for i, ids in enumerate(parts)]
        logps: dict[int, list[float]] = {}
        collate = EXAMPLE_FORMATS["labels"].collate
        for indices, batch in self.iter_batches(
            examples, lambda example: Widths(round_to_bucket(len(example.source) + 1), 1), collate
        ):
            logp_BV = self.model.compute_logits(self.model(batch)[:, 0]).float().log_softmax(-1)
            logps.update(zip(indices, logp_BV.tolist()))
        return [logps[i] for i in range(len(parts))]

    def make_verdict(self, parts: Sequence[list[int]], logps: Sequence[list[float]]) -> Verdict:
        """Return the verdict on a text, from the mean log-probabilities of its parts, weighted by their lengths."""
        if not parts:
            return Verdict("", 0.0, {})
        warnings = []
        length = sum(map(len, parts))
        if length > self.longest_source:
            warnings.append(f"longer than any text of training ({length} tokens against {self.longest_source})")
        if len(parts) > 1:
            warnings.append(f"too long for one piece: read in {len(parts)} parts")
        mean_V = np.average(np.array(logps), axis=0, weights=[len(part) for part in parts])
        probability_V = np.exp(mean_V - np.logaddexp.reduce(mean_V))
        names = self.tokenizers.target.ids_to_tokens(range(len(probability_V)))
        ranked = {names[i]: float(probability_V[i]) for i in np.argsort(-probability_V, kind="stable")}
        label = next(iter(ranked))
        if not math.isfinite(ranked[label]):
            raise UserError("the model's outputs are not finite: training has diverged; train with a smaller train.lr")
        return Verdict(label, ranked[label], ranked, tuple(warnings))
