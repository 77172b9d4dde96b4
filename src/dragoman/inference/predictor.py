"""What every front door shares: a model that is ready to answer, and grids that make its answers repeatable.

How floats round depends on the shapes they are computed in. So every grid here has a fixed number of rows, and a
width that a text's own length decides; rows with nothing to do run empty. The answer to a line is the same
alone, in a batch of any size and in any order.

How likely a model holds given answers to be: every target is read in one pass, in grids.

Shapes   B rows of a grid   T target width   L tokens of one target, its end mark counted   C model width   V vocabulary
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from dragoman.config.settings import Recipe
from dragoman.data.batches import BatchPlan, Widths, collate_pairs, group_by_key, round_to_bucket
from dragoman.data.tokenizers import Tokenizers
from dragoman.errors import UserError
from dragoman.hardware import ROWS
from dragoman.inference.postprocess import PairStatistics
from dragoman.models.base import Model, Seq2Seq
from dragoman.models.registry import most_tokens, parameters
from dragoman.types import EOS, UNK, Example, Line, PairScore

T = TypeVar("T")
M = TypeVar("M", bound=Model)
MAX_UNSPLIT = 512  # tokens up to which a text is kept whole, however short those of training were


@dataclass(frozen=True, slots=True, repr=False)
class Predictor(Generic[M]):
    """A model with its tokenizers. `longest` is the longest source, in tokens, that it was trained on."""

    model: M
    tokenizers: Tokenizers
    recipe: Recipe
    longest: int
    device: torch.device
    statistics: PairStatistics | None = field(
        default=None, kw_only=True
    )  # what its pairs of training look like, where that is known
    run: str = field(default="", kw_only=True, compare=False)  # the folder that it was loaded from
    max_tokens: int = field(init=False)  # tokens that a text may have at most, its mark and its tags not counted

    def __post_init__(self) -> None:
        most = most_tokens(self.recipe.model)
        tags = max((len(tag.split()) for tag in self.recipe.data.tags), default=0)
        object.__setattr__(self, "max_tokens", sys.maxsize if most is None else most - 1 - tags)

    def __repr__(self) -> str:
        """Return such as Translator('runs/demo', transformer, 3.8 M parameters, cpu)."""
        size = f"{parameters(self.model) / 1e6:.1f} M parameters"
        return f"{type(self).__name__}({self.run!r}, {self.recipe.model['kind']}, {size}, {self.device})"

    @property
    def rows(self) -> int:
        return ROWS[self.device.type]

    @property
    def max_unsplit(self) -> int:
        """Tokens up to which a text is kept whole."""
        return min(max(self.longest, MAX_UNSPLIT), self.max_tokens)


class eval_mode:
    """Dropout off inside, and back as it was after."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.was = model, model.training

    def __enter__(self) -> None:
        if self.was:  # to tell all parts of a model takes milliseconds
            self.model.eval()

    def __exit__(self, *_: object) -> None:
        if self.was:
            self.model.train()


class pause_garbage_collection:
    """No garbage collection inside: thousands of answers are many small lists, none of which is garbage, and looking
    through them again and again takes longer than making them."""

    def __enter__(self) -> None:
        self.was = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.was:
            gc.enable()


def check_lines(lines: Iterable[str | Line], verb: str) -> list[str | Line]:
    """Return the lines as a list; refuse one line instead of several, and what is no text."""
    return _checked(lines, verb, "item", (str, Line))


def check_texts(texts: Iterable[str], verb: str, noun: str = "item") -> list[str]:
    """Do the same where a `Line`, which says how to translate a text, is of no use. Messages call a text `noun`."""
    return _checked(texts, verb, noun, (str,))


def _checked(lines: Iterable[T], verb: str, noun: str, types: tuple[type, ...]) -> list[T]:
    if isinstance(lines, str | Line) or not isinstance(lines, Iterable):
        raise UserError(f"{verb} takes a list of lines; put a single line into a list of its own")
    found = list(lines)
    for number, line in enumerate(found):
        if not isinstance(line, types):
            raise UserError(f"{verb} takes lines of text, but {noun} {number} of the list is {line!r}, not a str")
    return found


MAX_SCORED = 4096  # tokens of a side, its mark counted: beyond, one attention would fill the memory
ATTENTION_CELLS = 4_000_000  # of an attention: wide grids have fewer rows
LOGIT_CHUNK = 512  # tokens whose logits are held at a time


def score_pairs(door: Predictor[Seq2Seq], examples: Sequence[Example]) -> list[PairScore]:
    """The score of every pair. One that the model has no places for has none, and says so."""
    most = min(MAX_SCORED - 1, door.max_tokens)
    fits = [i for i, one in enumerate(examples) if max(len(one.source), len(one.target)) <= most]
    with eval_mode(door.model):
        found = dict(zip(fits, compute_logps(door, [examples[i] for i in fits]), strict=True))
    return [make_pair_score(door, one, found.get(i), most) for i, one in enumerate(examples)]


@torch.inference_mode()
def compute_logps(door: Predictor[Seq2Seq], examples: Sequence[Example]) -> list[list[float]]:
    """The log-probability of each target token, the end mark last, given the source and all that stands before it."""
    found: list[list[float]] = [[] for _ in examples]
    for wide, group in group_by_key(range(len(examples)), lambda i: bucket_widths(examples[i]), len(examples)):
        height = max(1, min(door.rows, ATTENTION_CELLS // max(wide) ** 2))
        for _, some in group_by_key(group, lambda _: 0, height):
            rows = [[i] for i in some] + [[]] * (height - len(some))
            batch = collate_pairs(BatchPlan(rows, wide), examples).to(door.device)
            states_BTC = door.model(batch)
            for row, i in enumerate(some):
                length = len(examples[i].target) + 1
                target_L = batch.target_out_BT[row, :length]
                found[i] = gather_logps(door.model, states_BTC[row, :length], target_L).tolist()
    return found


def bucket_widths(example: Example) -> Widths:
    """Of the grid in which a pair is read."""
    return Widths(round_to_bucket(len(example.source) + 1), round_to_bucket(len(example.target) + 1))


def gather_logps(model: Seq2Seq, states_LC: Tensor, target_L: Tensor) -> Tensor:
    """Of all log-probabilities, those of the targets. Shapes are those of one target, whoever its neighbours are."""
    parts = zip(torch.split(states_LC, LOGIT_CHUNK), torch.split(target_L, LOGIT_CHUNK), strict=True)
    return torch.cat(
        [model.project(states).float().log_softmax(-1).gather(1, target[:, None])[:, 0] for states, target in parts]
    )


def make_pair_score(door: Predictor[Seq2Seq], example: Example, found: list[float] | None, most: int) -> PairScore:
    longest, target = max(len(example.source), len(example.target)), example.target.tolist()
    warnings = []
    if found is None:
        warnings.append(f"without a score: {longest} tokens, and the most that can be scored are {most}")
    elif not len(example.source) and target:
        warnings.append("with an empty source")
    elif len(example.source) > door.longest:
        warnings.append(f"longer than any sentence of training ({len(example.source)} tokens against {door.longest})")
    if UNK in target:
        warnings.append(f"with what the tokenizer does not know: {target.count(UNK)} tokens of the target")
    blank = not len(example.source) and not target
    token_logps = [0.0] if blank else found or []
    logp = sum(token_logps) if token_logps else float("nan")
    tokens = [*door.tokenizers.target.pieces(target), *door.tokenizers.target.pieces([EOS])]
    return PairScore(logp, logp / len(tokens), tokens, token_logps, tuple(warnings))
