"""Metrics: a system's lines against one or several references, as sacreBLEU counts them, signature included.

`hypotheses` is a list of lines of plain text; `references` is a list of such lists, each as long as `hypotheses`.
To add a metric: one function below and one line in METRICS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dragoman.config import pick
from dragoman.types import Mistake, Score

SUBWORD_SHARE = 0.05  # of the tokens; in text cut into subwords the share is far higher, in plain text it is about 0


def bleu(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Score:
    """Word n-grams up to 4 that occur in a reference, with a penalty for being short. 100 is perfect."""
    from sacrebleu.metrics.bleu import BLEU

    return _score("bleu", BLEU(), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Score:
    """Character n-grams up to 6, found and covered, the covered ones counting double (chrF2). 100 is perfect."""
    from sacrebleu.metrics.chrf import CHRF

    return _score("chrf", CHRF(), hypotheses, references)


def ter(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Score:
    """Edits, among them moves of whole phrases, per hundred words of the reference. 0 is perfect."""
    from sacrebleu.metrics.ter import TER

    return _score("ter", TER(), hypotheses, references)


def evaluate(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], names: Iterable[str] = ("bleu", "chrf", "ter")
) -> list[Score]:
    """The scores called `names`, in that order."""
    chosen = [pick(METRICS, name, "metric") for name in names]
    return [metric(hypotheses, references) for metric in chosen]


def _score(name: str, metric: Any, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Score:
    check(hypotheses, references)
    value = metric.corpus_score(list(hypotheses), [list(reference) for reference in references]).score
    return Score(name, float(value), str(metric.get_signature()))


def check(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Refuse what would give a number that means nothing."""
    if not hypotheses:
        raise Mistake("there are no hypotheses to score")
    if not references:
        raise Mistake("there is no reference to score against")
    for number, reference in enumerate(references, 1):
        if isinstance(reference, str):
            raise Mistake("references must be a list of lists of lines; put a single reference into a list of its own")
        if len(reference) != len(hypotheses):
            raise Mistake(
                f"reference {number} of {len(references)} has {_lines(reference)}, "
                f"but there are {len(hypotheses)} hypotheses; line by line they must belong together"
            )
    if subword_share(hypotheses) > SUBWORD_SHARE:
        raise Mistake(
            "the hypotheses look like subword text ('▁' or '@@' marks); detokenise them first, "
            "since a score counted on subwords cannot be compared with any other"
        )


def _lines(reference: Sequence[str]) -> str:
    return "1 line" if len(reference) == 1 else f"{len(reference)} lines"


def subword_share(lines: Iterable[str]) -> float:
    """How many of the tokens between blanks begin with '▁' or end in '@@'."""
    tokens = [token for line in lines for token in line.split()]
    return sum(token.startswith("▁") or token.endswith("@@") for token in tokens) / max(len(tokens), 1)


METRICS: dict[str, Callable[[Sequence[str], Sequence[Sequence[str]]], Score]] = {
    "bleu": bleu,
    "chrf": chrf,
    "ter": ter,
}
