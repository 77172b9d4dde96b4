"""The records that packages exchange, in the order in which they are created.

    files -> Pair -> Example -> Batch -> logits -> loss -> run folder -> Hypothesis -> text -> Score

Shapes   B rows of a batch   S source width   T target width
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")  # every vocabulary begins with these four, in this order
ParallelTexts = tuple[list[str], list[str]]  # sources and targets, line by line
UNKNOWN_DISTANCE = -128  # distance of two tokens that are not in the same dependency tree; the minimum of int8


class Tree(NamedTuple):
    """A dependency tree over the words of a sentence. The concatenated words are the sentence without spaces."""

    words: tuple[str, ...]  # "" for words that correspond to no letters of the sentence
    heads: tuple[int, ...]  # the head of each word: words are numbered from 1, as in CoNLL-U, and 0 is the root

    def to_brackets(self) -> str:
        """Return the tree as text, in which each bracket contains one word and, in further brackets, its dependents.

        assert Tree(("The", "man", "sleeps", "."), (2, 3, 0, 3)).to_brackets() == "( ( The ) man ) sleeps ( . )"

        The tree has to be projective: a word and all words that depend on it, directly or not, stand together.
        """

        def write_subtree(head: int) -> Iterator[str]:
            for word, its_head in enumerate(self.heads, 1):
                if word == head:
                    yield self.words[head - 1]
                elif its_head == head:
                    yield from ("(", *write_subtree(word), ")")

        return " ".join(write_subtree(self.heads.index(0) + 1))

    @classmethod
    def from_brackets(cls, text: str) -> Tree:
        """Return the tree that `to_brackets` returns as this text.

        The text may have errors, since models write it. Of several words in a bracket, the first is the head of the
        others. Brackets without a word are ignored, and brackets that are still open at the end are closed there.
        """
        words: list[str] = []
        heads: list[int] = []
        levels: list[tuple[list[int], list[int]]] = [([], [])]  # of each open bracket: its word, if read; dependents
        for token in [*text.split(), *[")"] * text.count("(")]:
            head, dependents = levels[-1]
            if token == "(":
                levels.append(([], []))
            elif token != ")":
                words.append(token)
                heads.append(0)
                (dependents if head else head).append(len(words))
            elif len(levels) > 1:
                levels.pop()
                for dependent in dependents if head else ():
                    heads[dependent - 1] = head[0]
                levels[-1][1].extend(head or dependents)
        head, dependents = levels[0]
        for dependent in dependents if head else ():
            heads[dependent - 1] = head[0]
        return cls(tuple(words), tuple(heads))


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence and its translation as raw text."""

    source: str
    target: str
    tree: Tree | None = None  # dependency tree of the source, if it is known and the model needs it
    tag: str = ""  # kind of the pair, such as the target language; a token for it precedes the source tokens
    alternatives: tuple[str, ...] = ()  # further reference translations, for evaluation
    # Not part of repr, by which the shards of earlier releases are found (augmentation/jobs.py).
    context: tuple[str, ...] = field(default=(), repr=False)  # previous sources of the document, oldest first
    # Id of its document, if the corpus has ids; context never crosses documents.
    document: str = field(default="", repr=False)


class TokenFeature(NamedTuple):
    """A value for each source token that the model gets besides its id, such as its word in a tree (data/features.py).

    If the feature is unknown, `annotation` is empty and the values are 0.
    """

    values: NDArray[np.integer]  # one for each token
    annotation: NDArray[np.integer]  # from which values can be computed for any tokenization: the tree as numbers


class Example(NamedTuple):
    """A pair as token ids, without <s> and </s>."""

    source: NDArray[np.integer]
    target: NDArray[np.integer]
    line: int  # number of the pair in the corpus
    features: Mapping[str, TokenFeature] = {}  # by name; only features that the model needs


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows of token ids: a row may contain several pairs, with the sources and the targets in separate tensors.

    Segments number the pairs of a row from 1; segment 0 is padding. Positions restart at 0 in every segment.
    `target_in`, the input of the decoder, begins with <s>; `target_out`, the tokens to predict, ends with </s>. In
    distributed training, a batch contains only the rows of one process.
    """

    source_BS: Tensor
    source_segment_BS: Tensor
    source_position_BS: Tensor
    target_in_BT: Tensor
    target_out_BT: Tensor
    target_segment_BT: Tensor
    target_position_BT: Tensor
    pairs: int  # number of pairs in the rows of all processes
    source_tokens: int  # number of tokens in the rows of all processes, without padding
    target_tokens: int
    is_unpacked: bool = False  # no row has more than one segment
    features: Mapping[str, Tensor] = field(default_factory=dict)  # further inputs per source token (data/features.py)
    first_row: int = 0  # index of the first row among the rows of all processes
    total_rows: int = 0  # number of rows of all processes; 0 if this batch contains all of them
    # For the loss simcut. False: the embedding is zeroed, the position stays. None: all are visible.
    source_visible_BS: Tensor | None = None
    target_visible_BT: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Return the number of tokens on both sides, without padding. Throughput is measured in these tokens."""
        return self.source_tokens + self.target_tokens

    def to(self, device: torch.device) -> Batch:
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copy all tensors to page-locked memory, from which a GPU can copy asynchronously."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())

    def map_tensors(self, convert: Callable[[Tensor], Tensor]) -> Batch:
        converted: dict[str, Any] = {name: convert(tensor) for name, tensor in self.tensors.items()}
        features = {name: converted.pop(name) for name in self.features}
        return replace(self, **converted, features=features)

    @property
    def tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        # Tensors are recognized by a method, so that PyTorch is not imported.
        return {name: value for name, value in values.items() if hasattr(value, "pin_memory")} | dict(self.features)


@dataclass(frozen=True, slots=True)
class Line:
    """A line to translate, with constraints on its translation.

    A term is one or more complete words. A pair of texts is a conditional term: if the first text occurs in the line,
    the second one is the term. If it is required, it replaces the words that stand for the first text.
    """

    text: str
    terms: tuple[str | tuple[str, str], ...] = ()  # terms that must appear in the translation
    avoid: tuple[str | tuple[str, str], ...] = ()  # terms that must not appear in the translation
    prefix: str = ""  # the translation must start with this text
    tag: str = ""  # a tag that the model was trained with, such as the target language
    # The sentences before the line in its document, oldest first, for models trained with data.context. None: the
    # previous lines of the list that is translated.
    context: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output of a model.

    `alignment[t][s]` is the attention weight of target token t on source token s; each row sums to one. The alignment
    is empty if attention does not distinguish source tokens (model.attention=none or mean).
    """

    text: str
    score: float = 0.0  # by which hypotheses are ranked; usually the length-normalised log-probability
    tokens: list[str] = field(default_factory=list)
    alignment: list[list[float]] = field(default_factory=list)
    source_tokens: list[str] = field(default_factory=list)
    logp: float = 0.0
    warnings: tuple[str, ...] = ()  # what was changed, skipped or truncated
    flags: tuple[str, ...] = ()  # signs of errors (inference/postprocess.py)
    features: Mapping[str, float] = field(default_factory=dict)  # unweighted features of a log-linear model


@dataclass(frozen=True, slots=True)
class PairScore:
    """The log-probability (natural logarithm) of a target as the translation of a source.

    For a pair that is too long for the model, the numbers are nan and `token_logps` is empty. An empty target of an
    empty source has log-probability 0.
    """

    logp: float
    mean: float
    tokens: list[str]  # of the target, EOS last
    token_logps: list[float]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """The value of a metric, with the signature: the settings that make it comparable, as in sacreBLEU."""

    name: str
    value: float
    signature: str

    def __str__(self) -> str:
        return f"{self.name} {self.value:.2f}  ({self.signature})"
