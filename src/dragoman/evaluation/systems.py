"""The systems that are judged: runs, and files that hold what other systems answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dragoman.evaluation.answers import Answered, Ticker, on_own_tests, on_phrasebook, on_texts
from dragoman.evaluation.texts import read_hypotheses, read_texts, read_trees
from dragoman.loading import load, load_as
from dragoman.translator import Translator
from dragoman.types import UserError


@dataclass(frozen=True, slots=True)
class Asked:
    """What systems are asked: files, a split of the phrasebook, or, where neither is named, the runs' own data.test."""

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

    def __post_init__(self) -> None:
        files = self.source is not None or bool(self.references)
        if (self.phrasebook and files) or ((files or self.conllu) and not self.source):
            raise UserError(
                "evaluate takes --source F and --reference F, or --phrasebook SPLIT, or the run's own data.test"
            )


def systems(
    runs: Sequence[Path], files: Sequence[Path], asked: Asked, say: Callable[[str], None], ticker: Ticker
) -> Iterator[tuple[str, Answered]]:
    """The name of each system and what it answers, test by test. Files are judged as the first run is."""
    if not runs and not files:
        raise UserError("evaluate needs a run folder, or --hypotheses F: what some system answered")
    if files and not (asked.source and asked.references):
        raise UserError("--hypotheses needs --source F and --reference F: what the answers are to")
    names = asked.names
    given = read_texts(asked.source, asked.references) if asked.source else None
    other = [read_hypotheses(path, given[0], asked.source) for path in files] if given and asked.source else []
    trees = read_trees(asked.conllu, given[0], asked.source) if given and asked.source and asked.conllu else None
    for run in runs:
        if given:
            door = load(run, device=asked.device, engine=asked.engine)
            if trees and not getattr(door, "asks_for_trees", False):
                say(f"{run} reads no trees: it is scored without them")
            way: dict[str, Any] = {"beam": asked.beam, "trees": trees, "tag": asked.tag}
            found = on_texts(door, *given, names=asked.names, ticker=ticker, **way)
            names = names or found.names
            yield str(run), found
        else:
            for found in without_files(run, asked, ticker):
                yield str(run), found
    for path, lines in zip(files, other, strict=True):
        assert given is not None
        yield str(path), Answered(*given, lines, names, {"warnings": {}})


def without_files(run: Path, asked: Asked, ticker: Ticker) -> Iterator[Answered]:
    if not asked.phrasebook:
        yield from on_own_tests(
            load(run, device=asked.device, engine=asked.engine), names=asked.names, beam=asked.beam, ticker=ticker
        )
        return
    translator = load_as(Translator, run, device=asked.device, engine=asked.engine)
    way: dict[str, Any] = {"names": asked.names, "beam": asked.beam, "tag": asked.tag, "ticker": ticker}
    yield on_phrasebook(translator, asked.phrasebook, asked.count, **way)
