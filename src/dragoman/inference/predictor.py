"""The base class of Translator, Generator and Classifier, and the scoring of existing translations.

The rounding of floats depends on tensor shapes. Therefore every batch here has a fixed number of rows (unused ones are
empty) and a width that depends only on the length of the text. The result for a line is then the same to the bit,
however many other lines there are, and in whatever order.

Shapes   B rows of a batch   T target width   L consecutive tokens of one target   C model width   V vocabulary
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import current_thread, main_thread
from typing import Generic, TypeVar

import torch
from torch import nn

from dragoman.data.batches import BatchPlan, Widths, collate_pairs
from dragoman.data.context import extract_sentence
from dragoman.data.tokenizers import Tokenizers
from dragoman.decoding.continuous_batching import round_to_bucket
from dragoman.errors import UserError
from dragoman.hardware import BATCH_ROWS
from dragoman.inference.postprocess import PairStatistics
from dragoman.models.base import Model, Seq2Seq
from dragoman.models.registry import count_parameters
from dragoman.recipe import Recipe
from dragoman.types import EOS, UNK, Batch, Example, Line, PairScore

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Model, covariant=True)
MIN_SEGMENT_LIMIT = 512  # texts of up to this many tokens are read at once, even if all training texts were shorter
MAX_TOKENS_WITH_EOS = 4096  # maximum tokens per side, EOS included: a larger attention matrix may not fit into memory
MAX_ATTENTION_CELLS = 4_000_000  # maximum number of attention weights (rows * width * width) of a batch
LOGIT_CHUNK = 512  # number of tokens whose logits are computed at a time, to limit memory


@dataclass(frozen=True, slots=True, repr=False)
class Predictor(Generic[_M]):
    """A trained model with everything that is needed to apply it to text."""

    model: _M
    tokenizers: Tokenizers
    recipe: Recipe
    longest_source: int  # number of tokens of the longest source in the training data, without context
    device: torch.device
    statistics: PairStatistics | None = field(default=None, kw_only=True)  # of the training pairs; None if unknown
    run: str = field(default="", kw_only=True, compare=False)
    max_tokens: int = field(init=False)  # maximum length of a text, so that EOS and a tag (a language) fit too
    max_segment_tokens: int = field(init=False)  # longer sentences are split into segments

    def __post_init__(self) -> None:
        positions, tags = self.recipe.model.length_limit, self.recipe.data.tags
        longest_tag = max((len(tag.split()) for tag in tags), default=0)  # each word of a tag is one token
        max_tokens = sys.maxsize if positions is None else positions - 1 - longest_tag
        object.__setattr__(self, "max_tokens", max_tokens)
        object.__setattr__(self, "max_segment_tokens", min(max(self.longest_source, MIN_SEGMENT_LIMIT), max_tokens))

    def __repr__(self) -> str:
        """Return text like Translator('runs/demo', transformer, 3.8 M parameters, cpu)."""
        size = f"{self.parameter_count / 1e6:.1f} M parameters"
        return f"{type(self).__name__}({self.run!r}, {self.recipe.model.kind}, {size}, {self.device})"

    @property
    def parameter_count(self) -> int:
        return count_parameters(self.model)

    @property
    def batch_rows(self) -> int:
        """The number of rows of a batch, which depends only on the kind of device."""
        return BATCH_ROWS[self.device.type]

    def iter_batches(
        self,
        examples: Sequence[Example],
        choose_widths: Callable[[Example], Widths],
        collate: Callable[[BatchPlan, Sequence[Example]], Batch] = collate_pairs,
        max_cells: int = sys.maxsize,
    ) -> Iterator[tuple[list[int], Batch]]:
        """Yield batches and the indices of their examples. A batch has one example per row, all of the same widths.

        All batches of the same widths have the same number of rows; `max_cells` limits rows * width ** 2.
        """
        groups: dict[Widths, list[int]] = {}
        for index, example in enumerate(examples):
            groups.setdefault(choose_widths(example), []).append(index)
        for widths, group in groups.items():
            row_count = max(1, min(self.batch_rows, max_cells // max(widths) ** 2))
            for start in range(0, len(group), row_count):
                indices = group[start : start + row_count]
                rows = [[index] for index in indices] + [[]] * (row_count - len(indices))
                yield indices, collate(BatchPlan(rows, widths), examples).to(self.device)


def parse_header(header: Mapping[str, str], path: Path) -> tuple[int, PairStatistics | None]:
    """Return the length of the longest source of training, in tokens, and the statistics of the training pairs.

    Their keys in `header`, the metadata of the model file `path`, are "longest" and "usual".
    """
    try:
        longest_source = int(header["longest"])
        statistics = PairStatistics(*json.loads(header["usual"])) if "usual" in header else None
        if not 0 <= longest_source < 2**31 or not all(map(math.isfinite, statistics or ())):  # damaged numbers
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        problem = f"the metadata in the header of {str(path)!r} are damaged"
        raise UserError(f"{problem}; copy the file again, or restore it from a backup") from None
    return longest_source, statistics


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Disable dropout and, in the main thread, Python's garbage collection, and restore both at the end.

    Thousands of hypotheses consist of many small lists. While these are created, the garbage collector would scan them
    again and again, which takes longer than creating them. Other threads do not disable it: in a server there is always
    one that translates, so that nothing would ever be collected.
    """
    was_training, in_main_thread = model.training, current_thread() is main_thread()
    was_collecting = in_main_thread and gc.isenabled()
    if was_training:  # skipped if not needed: visiting all modules takes milliseconds
        model.eval()
    if in_main_thread:
        gc.disable()
    try:
        yield
    finally:
        if was_training:
            model.train()
        if was_collecting:
            gc.enable()


def check_lines(lines: Iterable[_T], verb: str, noun: str = "item", types: tuple[type, ...] = (str,)) -> list[_T]:
    """Return the lines as a list; raise a UserError for a single line, and for items of other types than `types`.

    `verb` and `noun` name the operation and the items in messages.
    """
    if isinstance(lines, str | Line) or not isinstance(lines, Iterable):
        raise UserError(f"{verb} takes a list of lines; put a single line into a list")
    checked = list(lines)
    for number, line in enumerate(checked):
        if not isinstance(line, types):
            raise UserError(f"{verb} takes lines of text, but {noun} {number} of the list is {line!r}, not a str")
    return checked


def bucket_widths(example: Example) -> Widths:
    """Return the widths of the batch for a pair: its lengths with EOS, rounded up to one of a few bucket lengths."""
    return Widths(round_to_bucket(len(example.source) + 1), round_to_bucket(len(example.target) + 1))


def score_pairs(predictor: Predictor[Seq2Seq], examples: Sequence[Example]) -> list[PairScore]:
    """Return the score of each pair. A pair that is too long for the model gets a warning and the score NaN."""
    maximum = min(MAX_TOKENS_WITH_EOS - 1, predictor.max_tokens)
    fitting = [i for i, pair in enumerate(examples) if max(len(pair.source), len(pair.target)) <= maximum]
    with eval_mode(predictor.model):
        logps = dict(zip(fitting, compute_logps(predictor, [examples[i] for i in fitting]), strict=True))
    scores = []
    for i, example in enumerate(examples):
        source_length, target, warnings = len(example.source), example.target.tolist(), []
        sentence_length = len(extract_sentence(predictor.tokenizers, example.source.tolist()))
        if i not in logps:
            length = max(source_length, len(target))
            warnings.append(f"without a score: {length} tokens, but the maximum is {maximum}")
        elif not source_length and target:
            warnings.append("with an empty source")
        elif sentence_length > predictor.longest_source:
            lengths = f"{sentence_length} tokens against {predictor.longest_source}"
            warnings.append(f"longer than any sentence of training ({lengths})")
        if UNK in target:
            warnings.append(f"with unknown tokens in the target: {target.count(UNK)}")
        is_empty = not source_length and not target  # an empty line is always translated as an empty line: logp 0
        token_logps = [0.0] if is_empty else logps.get(i, [])
        logp = sum(token_logps) if token_logps else float("nan")
        tokens = [*predictor.tokenizers.target.ids_to_tokens(target), *predictor.tokenizers.target.ids_to_tokens([EOS])]
        scores.append(PairScore(logp, logp / len(tokens), tokens, token_logps, tuple(warnings)))
    return scores


@torch.inference_mode()
def compute_logps(predictor: Predictor[Seq2Seq], examples: Sequence[Example]) -> list[list[float]]:
    """Return the log-probability of each target token and of EOS, given the source and the previous tokens."""
    logps: list[list[float]] = [[] for _ in examples]
    model = predictor.model
    for indices, batch in predictor.iter_batches(examples, bucket_widths, max_cells=MAX_ATTENTION_CELLS):
        states_BTC = model(batch)
        for row, i in enumerate(indices):  # one target at a time, so that tensor shapes depend only on its length
            length = len(examples[i].target) + 1
            states = torch.split(states_BTC[row, :length], LOGIT_CHUNK)
            targets = torch.split(batch.target_out_BT[row, :length], LOGIT_CHUNK)
            for states_LC, target_L in zip(states, targets, strict=True):
                logp_LV = model.compute_logits(states_LC).float().log_softmax(-1)
                logps[i] += logp_LV.gather(1, target_L[:, None])[:, 0].tolist()
    return logps
