"""The outputs of one system on one test set. Needs no PyTorch, so that files are scored at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dragoman.score.metrics import of_answers

Lines = Sequence[str]
Tick = Callable[[int], object]  # called with the amount of work done
Ticker = Callable[[str, int], Tick]  # from the name of some work and its amount, or 0 where that is unknown


def silent(_: str, __: int) -> Tick:
    return id


@dataclass(frozen=True, slots=True)
class Answered:
    """What a system output on a test set, and the names of the metrics to score it with.

    `sources` is empty where only hypotheses and references are known. `about` holds findings other than scores:
    warnings, confusions, phenomena. A language model has no outputs: it is measured by the text itself, and all
    findings are in `about`.
    """

    sources: Lines
    references: Sequence[Lines]
    texts: Lines
    names: Sequence[str] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    test: str = ""

    def head(self) -> dict[str, Any]:
        """Return the first fields of a result: the test set, where it has a name, and its number of lines."""
        return {**({"test": self.test} if self.test else {}), "lines": len(self.sources or self.references[0])}

    def result(self) -> dict[str, Any]:
        """Return the scores and all other findings."""
        scores = of_answers(self.texts, self.references, self.names) if self.texts else []
        found = {score.name: {"value": score.value, "signature": score.signature} for score in scores}
        return {**self.head(), **found, **self.about}
