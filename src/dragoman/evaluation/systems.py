"""The systems that are scored: runs, and files that hold the outputs of other systems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dragoman.evaluation.answered import Answered, Ticker
from dragoman.evaluation.texts import read_hypotheses, read_references, read_texts, read_trees
from dragoman.types import Tree, UserError


@dataclass(frozen=True, slots=True)
class Asked:
    """A test set: files, a split of the phrasebook or, where neither is named, the runs' own data.test."""

    source: Path | None = None
    references: Sequence[Path] = ()
    conllu: Path | None = None  # trees of the sources
    phrasebook: str = ""
    count: int = 1000  # sentences of the phrasebook
    names: Sequence[str] = ()  # of metrics
    beam: int | None = None
    tag: str = ""  # of the sources, for runs that were trained with tags
    device: str = "auto"
    engine: str = "torch"

    def check(self, *, runs: bool, hypotheses: bool) -> None:
        """Refuse options that do not go together."""
        if not runs and not hypotheses:
            raise UserError("evaluate needs a run folder, or --hypotheses F: the outputs of some system")
        files = self.source is not None or bool(self.references)
        if (self.phrasebook and files) or (self.conllu and not self.source):
            raise UserError(
                "evaluate takes --source F and --reference F, or --phrasebook SPLIT, or the run's own data.test"
            )
        if runs and self.references and not self.source:
            raise UserError("--reference F needs --source F: what the runs are to translate")
        if hypotheses and not self.references:
            raise UserError("--hypotheses F needs --reference F: what the outputs are scored against")


def systems(
    runs: Sequence[Path], files: Sequence[Path], asked: Asked, say: Callable[[str], None], ticker: Ticker
) -> Iterator[tuple[str, Answered]]:
    """Yield the name of each system with its outputs, test set by test set.

    Files are scored by the metrics of the first run. Without runs they need no source, since no metric reads it.
    """
    asked.check(runs=bool(runs), hypotheses=bool(files))
    names = asked.names
    sources: list[str] = []
    references: list[list[str]] = []
    trees = None
    if asked.source:
        sources, references = read_texts(asked.source, asked.references)
        trees = read_trees(asked.conllu, sources, asked.source) if asked.conllu else None
    elif asked.references:
        references = read_references(asked.references)
    others = [read_hypotheses(path, references[0], asked.references[0]) for path in files]
    for run in runs:
        for found in run_system(run, sources, references, trees, asked, say, ticker):
            names = names or (found.names if asked.source else ())
            yield str(run), found
    for path, lines in zip(files, others, strict=True):
        yield str(path), Answered(sources, references, lines, names, {"warnings": {}})


def run_system(
    run: Path,
    sources: list[str],
    references: list[list[str]],
    trees: list[Tree | None] | None,
    asked: Asked,
    say: Callable[[str], None],
    ticker: Ticker,
) -> Iterator[Answered]:
    """Yield the outputs of a run on the files, on the phrasebook or on its own data.test."""
    from dragoman.evaluation.answers import on_own_tests, on_phrasebook, on_texts
    from dragoman.loading import load, load_as
    from dragoman.translator import Translator

    way: dict[str, Any] = {"names": asked.names, "beam": asked.beam, "ticker": ticker}
    if asked.phrasebook:
        translator = load_as(Translator, run, device=asked.device, engine=asked.engine)
        yield on_phrasebook(translator, asked.phrasebook, asked.count, tag=asked.tag, **way)
        return
    door = load(run, device=asked.device, engine=asked.engine)
    if asked.source:
        if trees and not getattr(door, "asks_for_trees", False):
            say(f"{run} reads no trees: it is scored without them")
        yield on_texts(door, sources, references, trees=trees, tag=asked.tag, **way)
    else:
        yield from on_own_tests(door, **way)
