"""A line, or a part of it, as the input of a model and of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dragoman.decoding.protocol import DecodingConstraints, SearchJob
from dragoman.inference.constraints import TermMatch, output_contains
from dragoman.types import Example, Line, TokenFeature


class SourceSegment(NamedTuple):
    """A line, or a part of a line that is longer than the sentences the model was trained on."""

    text: str
    ids: list[int]
    line: Line
    line_index: int
    leading_ids: Sequence[int] = ()  # precede `ids` in the input of the model: tag and context
    features: Mapping[str, TokenFeature] = {}  # further inputs per token, such as trees
    warning: str = ""  # about the input of the model; becomes a warning of every hypothesis
    matches: Sequence[TermMatch] = ()  # conditional terms, which replace words of the translation after the search
    constraints: DecodingConstraints = DecodingConstraints()
    max_tokens: int = 0  # maximum number of tokens of the translation, EOS included

    def make_example(self, target: Sequence[int] = ()) -> Example:
        """Return an example with this source and the target, for the forward pass of the model."""
        source = np.array([*self.leading_ids, *self.ids], dtype=np.int64)
        return Example(source, np.array(target, dtype=np.int64), self.line_index, self.features)

    def make_job(self) -> SearchJob:
        """Return the segment as a job of an engine, without the terms that replace words after the search."""
        later = {match.target for match in self.matches}
        required = tuple(term for term in self.constraints.required if term.text not in later)
        constraints = replace(self.constraints, required=required) if later else self.constraints
        return SearchJob([*self.leading_ids, *self.ids], self.max_tokens, constraints, self.features)

    def needs_constraints(self, translation: str) -> bool:
        """Return whether a required term is missing after the replacement of words by terms."""
        required = self.constraints.required if self.matches else ()
        return not all(output_contains(term.text, translation) for term in required)
