"""The nouns that travel through Dragoman, in the order of the walk.

    files -> Pair -> Example -> Batch -> logits -> loss -> run folder -> Hypothesis -> text -> Score

Shapes   B rows of a batch   S source width   T target width
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")  # every vocabulary begins with these four, in this order
UNKNOWN_DISTANCE = -128  # between two tokens of which no tree is known, where ways through a tree are small integers


class Tree(NamedTuple):
    """A dependency tree over the words of a sentence. Heads count words from 1, as in CoNLL-U, and 0 is the root.

    The words spell the sentence, spaces left out; one that has no letters of its own is "".
    """

    words: tuple[str, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence and its counterpart, as raw text; the tree of the source, where one is known and wanted.

    `tag` stands before the source and says what kind of pair this is. `alternatives` are
    further right targets: references to evaluate with, beside the first one, which is `target`.
    """

    source: str
    target: str
    tree: Tree | None = None
    tag: str = ""
    alternatives: tuple[str, ...] = ()


class TokenTree(NamedTuple):
    """A tree as the tokens of a sentence see it: the word that each belongs to, from 1, and the head of each word.

    A sentence without a tree has no heads, and its tokens belong to word 0.
    """

    word: NDArray[np.integer]
    head: NDArray[np.integer]


class Example(NamedTuple):
    """A pair as token ids, without begin and end marks; `line` is its stable number in the corpus.

    `links` is there for all examples or for none: models that do not ask for trees need not carry them.
    """

    source: NDArray[np.integer]
    target: NDArray[np.integer]
    line: int
    links: TokenTree | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A grid of rows. Several pairs may lie side by side in a row; a pair's two sides lie in the same row.

    Segments count the pairs of a row from 1; segment 0 is padding. Positions restart at 0 in every segment.
    The target is shifted already: `target_in` begins with <s>, `target_out` ends with </s>.
    One sentence per row is the same thing with one segment: `alone` says that no row has more. `tree_BSS` holds, where
    the model asks for trees, the way from each source token to each other (data/trees.py). A batch may be a part of a
    grid, some of its rows; pairs and tokens are counted over the whole grid all the same.
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
    alone: bool = False
    depth_BS: Tensor | None = None  # of each source token in its dependency tree; 0: no tree is known
    tree_BSS: Tensor | None = None
    first: int = 0  # the number of its first row in the whole grid
    height: int = 0  # rows of the whole grid; 0: these are all
    source_seen_BS: Tensor | None = None  # False: of this token the model sees the place alone; None: it sees all
    target_seen_BT: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Real tokens on both sides: what a speed is counted in."""
        return self.source_tokens + self.target_tokens

    def to(self, device: torch.device) -> Batch:
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """In memory that a GPU can fetch from by itself."""
        return self.each(lambda tensor: tensor.pin_memory())

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {k: change(v) for k, v in held.items() if hasattr(v, "pin_memory")}
        return replace(self, **changed)


@dataclass(frozen=True, slots=True)
class Line:
    """A line to answer, with what is asked of the answer.

    A term is a text that must appear in the answer (or, under `avoid`, must not), as a word or words of its own; or a
    pair of a text and a term: then it is asked for where the text stands in the line. `begin` is how the answer begins.
    `tag` is one that the model was trained with, such as the language that is wanted.
    """

    text: str
    terms: tuple[str | tuple[str, str], ...] = ()
    avoid: tuple[str | tuple[str, str], ...] = ()
    begin: str = ""
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One answer of a model.

    `alignment[t][s]` says how much target token t attends to source token s; each row sums to one, over the tokens of
    `source_tokens`. It is empty where attention does not tell source tokens apart (model.attention none and mean).
    `score` is what ranked it, as a rule the length-normalised log-probability; `logp` is the plain sum.
    `warnings` say what was done to it, or not done; `flags` what about it looks odd (inference/postprocess.py).
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
    """How likely a model holds a target to be the answer to a source, as natural logarithms.

    `token_logps` are those of `tokens`, the end mark last; `logp` is their sum and `mean` the same per token. A pair
    that the model has no places for has none of them: they are nan and empty. That nothing answers nothing is sure.
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
