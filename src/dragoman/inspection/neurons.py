"""Neurons of feed-forward layers, shown by the tokens of a corpus that activate them most.

    examples, notes = encode_pairs(predictor, pairs)
    find_top_activations(predictor, examples)[0].top[0].token

A neuron is one component of the activations between the two linear maps of a feed-forward network. A layer has
thousands, so only the most selective are returned: those whose highest activations are farthest above their mean.

Shapes   B rows   T tokens of a row   N tokens except padding   F neurons   K highest activations of a neuron
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dragoman.data.batches import EXAMPLE_FORMATS, Widths
from dragoman.data.stream import TextWindows
from dragoman.data.tokenizers import Tokenizer, name_tokens
from dragoman.decoding.continuous_batching import round_to_bucket
from dragoman.errors import UserError
from dragoman.inference.predictor import MAX_ATTENTION_CELLS, MAX_TOKENS_WITH_EOS, Predictor, eval_mode
from dragoman.inference.single_sequence import Generator
from dragoman.inference.translator import Translator
from dragoman.inspection.probes import SIDES
from dragoman.models.base import Model
from dragoman.types import Example, Line, Pair

TOP_NEURONS, TOP_ACTIVATIONS = 8, 8  # neurons of each layer, and tokens of each neuron
CONTEXT_TOKENS = 6  # shown before and after a token


@dataclass(frozen=True, slots=True)
class Activation:
    """A token in its context, and the activation of a neuron at this token."""

    token: str
    before: str  # text before the token
    after: str  # text after the token; begins with a space if the next token begins a word
    value: float


@dataclass(frozen=True, slots=True)
class Neuron:
    """A neuron and the tokens that activate it most."""

    layer: str  # such as "encoder layer 1"
    number: int  # index of the neuron in the layer, from 0
    mean: float  # activation, over all tokens
    selectivity: float  # mean of the highest activations minus `mean`, in standard deviations of all activations
    top: list[Activation]  # highest first


def encode_pairs(predictor: Predictor[Any], pairs: Sequence[Pair]) -> tuple[list[Example], list[str]]:
    """Return pairs as examples of the model's task, and notes on pairs that were left out.

    A language model reads the targets only; the target of a classifier is the label.
    """
    name = predictor.recipe.example_format
    form, tokenizers = EXAMPLE_FORMATS[name], predictor.tokenizers
    if isinstance(predictor, Translator):
        examples = []
        for tag in dict.fromkeys(pair.tag for pair in pairs):
            some = [pair for pair in pairs if pair.tag == tag]
            lines = [Line(pair.source, context=pair.context) for pair in some]
            trees = [pair.tree for pair in some] if predictor.reads_trees else None
            examples += predictor.make_examples(lines, [pair.target for pair in some], trees=trees, tag=tag)
    elif isinstance(predictor, Generator) and name == "windows":
        ids = np.array(predictor.encode_lines([pair.target for pair in pairs]), dtype=np.int64)
        context = predictor.model.settings.context
        windows = TextWindows(ids, context, context)
        examples = windows.read_examples(np.arange(len(windows)))
    else:
        sources = tokenizers.source.encode_all([pair.source if form.has_source else "" for pair in pairs])
        targets = [tokenizers.target.encode(pair.target) for pair in pairs]
        examples = [
            Example(np.array(source, dtype=np.int64), np.array(target, dtype=np.int64), line)
            for line, (source, target) in enumerate(zip(sources, targets, strict=True))
        ]
    limit = min(predictor.max_tokens, MAX_TOKENS_WITH_EOS - 1)
    reasons = [form.find_reason_to_skip(e.source.tolist(), e.target.tolist(), limit) for e in examples]
    kept = [example for example, reason in zip(examples, reasons, strict=True) if not reason]
    left_out = [
        f"{reasons.count(reason)} {form.noun} left out: {reason}" for reason in dict.fromkeys(reasons) if reason
    ]
    if not kept:
        raise UserError(f"the data have no {form.noun} that the model can read; give others with --source and --target")
    return kept, left_out


@torch.no_grad()
def find_top_activations(
    predictor: Predictor[Any],
    examples: Sequence[Example],
    *,
    neurons: int = TOP_NEURONS,
    tokens: int = TOP_ACTIVATIONS,
) -> list[Neuron]:
    """Return the most selective neurons of every feed-forward layer, with the tokens that activate them most.

    Tokens of the encoder are those of the source, tokens of the decoder those that it reads. A model without
    feed-forward layers has no such neurons.
    """
    form = EXAMPLE_FORMATS[predictor.recipe.example_format]
    texts: dict[str, TokenTexts] = {side: TokenTexts() for side in SIDES}
    highest: dict[str, HighestActivations] = {}

    def choose_widths(example: Example) -> Widths:
        source_1, target_1 = form.count_example_slots([example])
        return Widths(*(round_to_bucket(int(size[0])) if size[0] else 0 for size in (source_1, target_1)))

    with eval_mode(predictor.model):
        for _, batch in predictor.iter_batches(examples, choose_widths, form.collate, MAX_ATTENTION_CELLS):
            sides = {
                "encoder": (batch.source_BS, batch.source_segment_BS > 0),
                "decoder": (batch.target_in_BT, batch.target_segment_BT > 0),
            }
            with record_hidden(predictor.model) as hidden:
                predictor.model(batch)
            for layer, hidden_BTF in hidden.items():
                side = layer.split()[0]
                highest.setdefault(layer, HighestActivations(tokens)).add(
                    hidden_BTF[sides[side][1]].double(), first=texts[side].count
                )
            for side, (ids_BT, real_BT) in sides.items():
                texts[side].add(ids_BT, real_BT)
    tokenizers = {"encoder": predictor.tokenizers.source, "decoder": predictor.tokenizers.target}
    tags = {"encoder": predictor.tokenizers.tags, "decoder": ()}
    found = []
    for layer, activations in highest.items():
        side = layer.split()[0]
        selectivity_F = activations.compute_selectivity()
        for number in selectivity_F.topk(min(neurons, len(selectivity_F))).indices.tolist():
            pairs = zip(activations.index_FK[number].tolist(), activations.value_FK[number].tolist(), strict=True)
            top = [texts[side].describe(index, value, tokenizers[side], tags[side]) for index, value in pairs]
            mean = float(activations.sum_F[number] / activations.count)
            found.append(Neuron(layer, number, mean, float(selectivity_F[number]), top))
    return found


@contextmanager
def record_hidden(model: Model) -> Iterator[dict[str, Tensor]]:
    """Collect the activations of all feed-forward layers, hidden_BTF by layer, within the `with` block."""
    hidden: dict[str, Tensor] = {}

    def make_hook(names: Iterator[str]) -> Any:
        def record(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            hidden[next(names)] = inputs[0]

        return record

    with ExitStack() as stack:
        for side in SIDES:
            layers: list[Any] = list(getattr(getattr(model, side, None), "layers", []))
            names: dict[Any, list[str]] = {}  # several for a layer that shares its weights with others
            for number, layer in enumerate(layers, 1):
                if getattr(layer, "feedforward", None) is not None:
                    names.setdefault(layer.feedforward.sublayer, []).append(f"{side} layer {number}")
            for feedforward, labels in names.items():
                # In eval mode, the input of the second linear map is what `compute_hidden` returns
                handle = feedforward.narrow.register_forward_pre_hook(make_hook(iter(labels)))
                stack.callback(handle.remove)
        yield hidden


class HighestActivations:
    """The highest activations of each neuron of a layer, and the sums from which mean and deviation are computed."""

    def __init__(self, kept: int) -> None:
        self.kept, self.count = kept, 0
        self.value_FK, self.index_FK = torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.long)
        self.sum_F = self.square_F = torch.zeros(())

    def add(self, hidden_NF: Tensor, *, first: int) -> None:
        """Add the activations of further tokens; `first` is the index of the first token in the corpus."""
        value_FN, index_N = hidden_NF.T.cpu(), torch.arange(first, first + len(hidden_NF))
        index_FN = index_N.expand_as(value_FN)
        if self.count:
            value_FN = torch.cat([self.value_FK, value_FN], 1)
            index_FN = torch.cat([self.index_FK, index_FN], 1)
        self.sum_F = self.sum_F + hidden_NF.sum(0).cpu()
        self.square_F = self.square_F + hidden_NF.square().sum(0).cpu()
        self.value_FK, order_FK = value_FN.topk(min(self.kept, value_FN.size(1)), 1)
        self.index_FK = index_FN.gather(1, order_FK)
        self.count += len(hidden_NF)

    def compute_selectivity(self) -> Tensor:
        """Return how far the kept activations are above the mean, in standard deviations; 0 for constant neurons."""
        mean_F = self.sum_F / self.count
        deviation_F = (self.square_F / self.count - mean_F.square()).clamp(min=0).sqrt()
        return torch.where(deviation_F > 1e-9, (self.value_FK.mean(1) - mean_F) / deviation_F, 0.0)


class TokenTexts:
    """The tokens of all rows of one side of a corpus, numbered consecutively."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.starts: list[int] = []  # number of the first token of each row
        self.count = 0

    def add(self, ids_BT: Tensor, real_BT: Tensor) -> None:
        """Add the tokens of a batch, without padding."""
        for ids_T, real_T in zip(ids_BT, real_BT, strict=True):
            self.starts.append(self.count)
            self.rows.append(ids_T[real_T].tolist())
            self.count += len(self.rows[-1])

    def describe(self, index: int, value: float, tokenizer: Tokenizer, tags: Sequence[str]) -> Activation:
        """Return the token with this number and its context."""
        row = bisect_right(self.starts, index) - 1
        ids, position = self.rows[row], index - self.starts[row]
        names = name_tokens(tokenizer, ids, tags)
        start, end = max(position - CONTEXT_TOKENS, 0), position + 1 + CONTEXT_TOKENS
        before, after = ("".join(part).replace("▁", " ") for part in (names[start:position], names[position + 1 : end]))
        return Activation(
            names[position],
            f"{'… ' * (start > 0)}{before.lstrip()}",
            f"{after}{' …' * (end < len(names))}",
            value,
        )
