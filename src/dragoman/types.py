"""The records that travel through Dragoman, in the order in which they are made.

    files -> Pair -> Example -> Batch -> logits -> loss -> run folder -> Hypothesis -> text -> Score

Shapes   B rows of a batch   S source width   T target width
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")  # every vocabulary begins with these four, in this order
UNKNOWN_DISTANCE = -128  # distance of two tokens that are not in the same dependency tree


class Tree(NamedTuple):
    """A dependency tree over the words of a sentence. Heads count words from 1, as in CoNLL-U, and 0 is the root.

    The concatenated words are the sentence without spaces; a word without letters of its own is "".
    """

    words: tuple[str, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence and its translation as raw text, with the dependency tree of the source if it is known and needed.

    `tag` is put before the source and names the kind of pair, such as the target language. `alternatives` are further
    reference translations for evaluation, in addition to `target`.
    """

    source: str
    target: str
    tree: Tree | None = None
    tag: str = ""
    alternatives: tuple[str, ...] = ()


class TokenFeature(NamedTuple):
    """A feature of the tokens of one source, such as the word in a dependency tree of each token (data/features.py).

    `record` is data that does not depend on the tokens, such as the tree. If the feature is unknown, `record` is empty
    and the values are 0.
    """

    values: NDArray[np.integer]  # one for each token
    record: NDArray[np.integer]


class Example(NamedTuple):
    """A pair as token ids, without <s> and </s>; `line` is its stable number in the corpus.

    All examples of a batch have the same kinds of `features`: those that the model needs.
    """

    source: NDArray[np.integer]
    target: NDArray[np.integer]
    line: int
    features: Mapping[str, TokenFeature] = {}


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows: a row may contain several pairs, the sources in `source_BS` and the targets in `target_..._BT`.

    Segments number the pairs of a row from 1; segment 0 is padding. Positions restart at 0 in every segment.
    The target is shifted: `target_in` begins with <s>, `target_out` ends with </s>. In an `unpacked` batch
    no row has more than one segment. `features` of the source tokens are for models that need them (data/features.py).
    A batch may contain only the rows of one process; `pairs` and the token counts are always those of all rows.
    """

    source_BS: Tensor
    source_segment_BS: Tensor
    source_position_BS: Tensor
    target_in_BT: Tensor
    target_out_BT: Tensor
    target_segment_BT: Tensor
    target_position_BT: Tensor
    pairs: int
    source_tokens: int
    target_tokens: int
    unpacked: bool = False
    features: Mapping[str, Tensor] = field(default_factory=dict)
    first_row: int = 0  # index of the first row among the rows of all processes
    total_rows: int = 0  # number of rows of all processes; 0 if this batch contains all of them
    source_visible_BS: Tensor | None = None  # False: the embedding is zeroed, the position stays; None: all are visible
    target_visible_BT: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Return the number of tokens on both sides, without padding. Throughput is measured in these."""
        return self.source_tokens + self.target_tokens

    def to(self, device: torch.device) -> Batch:
        """Copy all tensors to a device."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copy all tensors to page-locked memory, from which a GPU can copy asynchronously."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with every tensor changed."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors.items()}
        features = {name: changed.pop(name) for name in self.features}
        return replace(self, **changed, features=features)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, those of the features included."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if hasattr(value, "pin_memory")} | dict(self.features)


@dataclass(frozen=True, slots=True)
class Line:
    """A line to translate, with constraints on its translation.

    A term is a text that must appear in the translation (or, under `avoid`, must not), as complete words. A pair of two
    texts is a term that applies only if the first text occurs in the line. The translation starts with `begin`. `tag`
    is a tag that the model was trained with, such as the target language.
    """

    text: str
    terms: tuple[str | tuple[str, str], ...] = ()
    avoid: tuple[str | tuple[str, str], ...] = ()
    begin: str = ""
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output of a model.

    `alignment[t][s]` is the attention weight of target token t on source token s; each row sums to one, over the tokens
    of `source_tokens`. It is empty if attention does not distinguish source tokens (model.attention none and mean).
    Hypotheses are ranked by `score`, as a rule the length-normalised log-probability; `logp` is the plain sum.
    `warnings` name what was changed, skipped or truncated; `flags` name signs of errors (inference/postprocess.py).
    """

    text: str
    score: float
    tokens: list[str]
    alignment: list[list[float]]
    source_tokens: list[str]
    logp: float
    warnings: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PairScore:
    """The log-probability (natural logarithm) of a target as the translation of a source.

    `token_logps` are those of `tokens`, EOS last; `logp` is their sum and `mean` their mean. For a pair that is longer
    than the model's positions, the numbers are nan and the lists are empty. An empty target of an empty source has
    log-probability 0.
    """

    logp: float
    mean: float
    tokens: list[str]
    token_logps: list[float]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """A metric's value, with the signature that makes it comparable."""

    name: str
    value: float
    signature: str

    def __str__(self) -> str:
        return f"{self.name} {self.value:.2f}  ({self.signature})"
