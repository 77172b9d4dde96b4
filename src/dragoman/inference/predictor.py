"""The base class of Translator, Generator and Classifier, and the scoring of given translations.

How floats round depends on the shapes they are computed in. So every batch here has a fixed number of rows and a width
that depends on the length of the text alone; rows without a text are empty. The result for a line is the same whether
it comes alone or in a batch of any size and order.

Shapes   B rows of a batch   T target width   L tokens of one target, EOS included   C model width   V vocabulary
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import nn

from dragoman.data.batches import BatchPlan, Widths, collate_pairs, group_by_key, round_to_bucket
from dragoman.data.tokenizers import Tokenizers
from dragoman.errors import UserError
from dragoman.hardware import ROWS
from dragoman.inference.postprocess import PairStatistics
from dragoman.models.base import Model, Seq2Seq
from dragoman.models.registry import parameters
from dragoman.recipe import Recipe
from dragoman.types import EOS, UNK, Example, Line, PairScore

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Model)
MAX_UNSPLIT = 512  # tokens up to which a text is kept whole, however short those of training were
MAX_SCORED = 4096  # tokens of a side, EOS included: beyond, one attention matrix would fill the memory
ATTENTION_CELLS = 4_000_000  # of the attention in one batch: wide batches have fewer rows
LOGIT_CHUNK = 512  # tokens whose logits are held at a time


@dataclass(frozen=True, slots=True, repr=False)
class Predictor(Generic[_M]):
    """A model with its tokenizers. `longest` is the length of the longest source in training, in tokens."""

    model: _M
    tokenizers: Tokenizers
    recipe: Recipe
    longest: int
    device: torch.device
    statistics: PairStatistics | None = field(default=None, kw_only=True)  # of the training pairs, where known
    run: str = field(default="", kw_only=True, compare=False)  # the folder that it was loaded from
    max_tokens: int = field(init=False)  # of a text, see `limit_tokens`

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_tokens", limit_tokens(self.recipe))

    def __repr__(self) -> str:
        """Return such as Translator('runs/demo', transformer, 3.8 M parameters, cpu)."""
        size = f"{parameters(self.model) / 1e6:.1f} M parameters"
        return f"{type(self).__name__}({self.run!r}, {self.recipe.model.kind}, {size}, {self.device})"

    @property
    def rows(self) -> int:
        return ROWS[self.device.type]

    @property
    def max_unsplit(self) -> int:
        """The number of tokens up to which a text is kept whole."""
        return min(max(self.longest, MAX_UNSPLIT), self.max_tokens)


def limit_tokens(recipe: Recipe) -> int:
    """Return the most tokens that a text may have, EOS and tags not included: as many as the model has positions."""
    positions = recipe.model.length_limit
    tags = max((len(tag.split()) for tag in recipe.data.tags), default=0)
    return sys.maxsize if positions is None else positions - 1 - tags


class eval_mode:
    """A context in which dropout is off; the model's mode is restored after it."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.was_training = model, model.training

    def __enter__(self) -> None:
        if self.was_training:  # setting the mode of all modules takes milliseconds
            self.model.eval()

    def __exit__(self, *_: object) -> None:
        if self.was_training:
            self.model.train()


class pause_garbage_collection:
    """A context without garbage collection: thousands of hypotheses are many small lists, none of which is garbage,
    and scanning them again and again takes longer than making them."""

    def __enter__(self) -> None:
        self.was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.was_enabled:
            gc.enable()


def check_lines(lines: Iterable[str | Line], verb: str) -> list[str | Line]:
    """Return the lines as a list; refuse one line instead of several, and what is no text."""
    return _check_items(lines, verb, "item", (str, Line))


def check_texts(texts: Iterable[str], verb: str, noun: str = "item") -> list[str]:
    """Return the texts as a list; refuse one text, and a `Line`, whose constraints have no use here."""
    return _check_items(texts, verb, noun, (str,))


def _check_items(lines: Iterable[_T], verb: str, noun: str, types: tuple[type, ...]) -> list[_T]:
    if isinstance(lines, str | Line) or not isinstance(lines, Iterable):
        raise UserError(f"{verb} takes a list of lines; put a single line into a list of its own")
    found = list(lines)
    for number, line in enumerate(found):
        if not isinstance(line, types):
            raise UserError(f"{verb} takes lines of text, but {noun} {number} of the list is {line!r}, not a str")
    return found


def bucket_widths(example: Example) -> Widths:
    """Return the widths of the batch in which a pair is read."""
    return Widths(round_to_bucket(len(example.source) + 1), round_to_bucket(len(example.target) + 1))


def score_pairs(predictor: Predictor[Seq2Seq], examples: Sequence[Example]) -> list[PairScore]:
    """Return the score of each pair. A pair that is too long for the model has a warning instead of a score."""
    most = min(MAX_SCORED - 1, predictor.max_tokens)
    fitting = [i for i, one in enumerate(examples) if max(len(one.source), len(one.target)) <= most]
    with eval_mode(predictor.model):
        logps = dict(zip(fitting, compute_logps(predictor, [examples[i] for i in fitting]), strict=True))
    return [make_pair_score(predictor, one, logps.get(i), most) for i, one in enumerate(examples)]


@torch.inference_mode()
def compute_logps(predictor: Predictor[Seq2Seq], examples: Sequence[Example]) -> list[list[float]]:
    """Return the log-probability of each target token, EOS last, given the source and the tokens before it."""
    logps: list[list[float]] = [[] for _ in examples]
    model = predictor.model
    for widths, group in group_by_key(range(len(examples)), lambda i: bucket_widths(examples[i]), len(examples)):
        height = max(1, min(predictor.rows, ATTENTION_CELLS // max(widths) ** 2))
        for _, some in group_by_key(group, lambda _: 0, height):
            rows = [[i] for i in some] + [[]] * (height - len(some))
            batch = collate_pairs(BatchPlan(rows, widths), examples).to(predictor.device)
            states_BTC = model(batch)
            for row, i in enumerate(some):  # one target at a time, so that shapes do not depend on its neighbours
                length = len(examples[i].target) + 1
                states = torch.split(states_BTC[row, :length], LOGIT_CHUNK)
                targets = torch.split(batch.target_out_BT[row, :length], LOGIT_CHUNK)
                for states_LC, target_L in zip(states, targets, strict=True):
                    logp_LV = model.project(states_LC).float().log_softmax(-1)
                    logps[i] += logp_LV.gather(1, target_L[:, None])[:, 0].tolist()
    return logps


def make_pair_score(predictor: Predictor[Seq2Seq], example: Example, logps: list[float] | None, most: int) -> PairScore:
    source, target = len(example.source), example.target.tolist()
    warnings = []
    if logps is None:
        length = max(source, len(target))
        warnings.append(f"without a score: {length} tokens, and the most that can be scored are {most}")
    elif not source and target:
        warnings.append("with an empty source")
    elif source > predictor.longest:
        warnings.append(f"longer than any sentence of training ({source} tokens against {predictor.longest})")
    if UNK in target:
        warnings.append(f"with what the tokenizer does not know: {target.count(UNK)} tokens of the target")
    token_logps = [0.0] if not source and not target else logps or []
    logp = sum(token_logps) if token_logps else float("nan")
    tokens = [*predictor.tokenizers.target.pieces(target), *predictor.tokenizers.target.pieces([EOS])]
    return PairScore(logp, logp / len(tokens), tokens, token_logps, tuple(warnings))
