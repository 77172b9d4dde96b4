"""The records that an inspection of one sentence consists of.

`Inspection` holds everything that was computed for a sentence: `inspect` (sentence.py) makes it, and `render_page`
(page.py) shows it. `Inspection.to_json` returns the same data as plain lists and numbers.

Shapes   L layers   H heads   Q queries   K keys   T predicted tokens (or 1: the label of a classifier)   S inputs
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.io import format_json, write_text

Floats = NDArray[np.float32]
SHAPE_SUFFIX = re.compile("_[A-Z]+$")


@dataclass(frozen=True, slots=True)
class AttentionMap:
    """The attention weights of all layers and heads of one part of a model. Rows of weights sum to one.

    `queries` and `keys` are names of lists in `Inspection.tokens`.
    """

    name: str  # "encoder", "decoder" or "cross"
    title: str
    queries: str
    keys: str
    weight_LHQK: Floats
    best_layer: int | None = None  # counted from 0: the layer of a cross-attention that serves as word alignment


@dataclass(frozen=True, slots=True)
class Prediction:
    """The probability distribution of one token, given all tokens before it."""

    token: str  # the token whose probability is reported: of the given target, or of the model's own output
    logp: float  # natural logarithm of its probability
    rank: int  # 1 if no other token is more probable
    entropy: float  # of the distribution, in bits
    top: list[tuple[str, float]]  # the most probable tokens with their probabilities


@dataclass(frozen=True, slots=True)
class Attribution:
    """How much each predicted token depends on each input token, by one method (attribution.py).

    `value_TS` belongs to the tokens of the source. `prefix_TT` belongs to the tokens that the decoder has read; it is
    None if there is no decoder, and a language model has no `value_TS`.
    """

    method: str
    title: str
    value_TS: Floats | None
    prefix_TT: Floats | None = None


@dataclass(frozen=True, slots=True)
class SearchNode:
    """A partial translation that a search considered: its parent's tokens and one more."""

    parent: int  # index of the node that it extends; -1 for the root
    step: int  # number of tokens, or of covered source words in a phrase-based system
    token: str
    logp: float  # of all tokens so far
    score: float  # by which it was ranked against others
    state: str  # "kept", "pruned", "finished" or "best" (on the path of the best result)
    detail: str = ""  # further text, such as the source phrase of a phrase-based system


@dataclass(frozen=True, slots=True)
class SearchResultText:
    """A finished translation of a search."""

    text: str
    logp: float
    score: float


@dataclass(frozen=True, slots=True)
class SearchTrace:
    """One search for the translation of the sentence; `nodes` may be empty if only results were asked for."""

    title: str  # such as "beam 4"
    results: list[SearchResultText]  # best first
    nodes: list[SearchNode] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PhraseUse:
    """A phrase pair that a phrase-based system used. Spans count words from 0, and their end is exclusive."""

    source: str
    target: str
    source_span: tuple[int, int]
    target_span: tuple[int, int]
    features: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a model did with one sentence."""

    run: str
    kind: str  # of the model, as in the recipe
    source: str
    target: str  # the given target, or the output of the model
    is_given: bool  # whether the target was given
    # Lists of tokens by name: "source", "input" (of the decoder), "target" and, with Linformer, "projected" keys
    tokens: Mapping[str, Sequence[str]]
    attentions: list[AttentionMap] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    attributions: list[Attribution] = field(default_factory=list)
    searches: list[SearchTrace] = field(default_factory=list)
    phrases: list[PhraseUse] = field(default_factory=list)
    features: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # of a log-linear model: value, weight
    notes: list[str] = field(default_factory=list)  # warnings, and what could not be shown and why

    def to_json(self) -> dict[str, Any]:
        """Return the inspection as dictionaries, lists, numbers and texts."""
        data: dict[str, Any] = replace_infinities(to_plain(self))
        return data

    def to_html(self) -> str:
        """Return the page as one HTML file that needs no other file."""
        from dragoman.inspection.page import render_page

        return render_page(self)

    def save(self, path: str | Path) -> None:
        """Write the page, or the data if the file name ends in .json."""
        is_json = Path(path).suffix == ".json"
        write_text(Path(path), format_json(self.to_json()) if is_json else self.to_html())

    def _repr_html_(self) -> str:
        """Return the page in a frame, for notebooks: its style and scripts do not affect the notebook."""
        from dragoman.inspection.page import render_frame

        return render_frame(self)


def to_plain(value: Any) -> Any:
    """Return records, arrays and numbers as what JSON can hold. Names of arrays lose the suffix of their shape."""
    if is_dataclass(value):
        return {SHAPE_SUFFIX.sub("", f.name): to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, np.ndarray):
        return np.round(value.astype(float), 6).tolist()
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def replace_infinities(value: Any) -> Any:
    """Return plain data with None in place of numbers that are not finite, which JSON cannot hold."""
    if isinstance(value, dict):
        return {key: replace_infinities(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
