"""The systems that are scored: runs, and files that hold the outputs of other systems; and the test sets.

Needs no PyTorch unless a run is evaluated, so that files are scored at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dragoman.config.settings import CorpusSettings
from dragoman.data.corpus import collect_references, read_pairs
from dragoman.data.trees import TreeReader
from dragoman.errors import UserError
from dragoman.io import read_lines
from dragoman.metrics.metrics import TextLines, compute_metrics, refuse_subwords
from dragoman.progress import Report
from dragoman.types import Tree

SILENT = Report(quiet=True)


@dataclass(frozen=True, slots=True)
class SystemOutput:
    """The output of a system on a test set, and the names of the metrics to score it with.

    `sources` is empty where only hypotheses and references are known. `about` holds findings other than scores:
    warnings, confusion matrix, phenomena. A language model has no output texts: it is measured by the test set itself,
    and all findings are in `about`.
    """

    sources: TextLines
    references: Sequence[TextLines]
    texts: TextLines
    metrics: Sequence[str] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    test: str = ""

    def describe(self) -> dict[str, Any]:
        """Return the first fields of a result: the test set, where it has a name, and its number of lines."""
        return {**({"test": self.test} if self.test else {}), "lines": len(self.sources or self.references[0])}

    def result(self) -> dict[str, Any]:
        """Return the scores and all other findings."""
        scores = compute_metrics(self.texts, self.references, self.metrics) if self.texts else []
        found = {score.name: {"value": score.value, "signature": score.signature} for score in scores}
        return {**self.describe(), **found, **self.about}


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """What to evaluate on: files, a split of the phrasebook or, where neither is named, the runs' own data.test."""

    source: Path | None = None
    references: Sequence[Path] = ()
    conllu: Path | None = None  # trees of the sources
    phrasebook: str = ""
    count: int = 1000  # sentences of the phrasebook
    metrics: Sequence[str] = ()
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


def collect_outputs(
    runs: Sequence[Path], files: Sequence[Path], options: EvaluationOptions, report: Report
) -> Iterator[tuple[str, SystemOutput]]:
    """Yield the name of each system with its outputs, test set by test set.

    Files are scored by the metrics of the first run. Without runs they need no source, since no metric reads it.
    """
    options.check(runs=bool(runs), hypotheses=bool(files))
    metrics = options.metrics
    sources: list[str] = []
    references: list[list[str]] = []
    trees = None
    if options.source:
        sources, references = read_texts(options.source, options.references)
        trees = read_trees(options.conllu, sources, options.source) if options.conllu else None
    elif options.references:
        references = read_references(options.references)
    others = [read_hypotheses(path, references[0], options.references[0]) for path in files]
    for run in runs:
        for output in evaluate_run(run, sources, references, trees, options, report):
            metrics = metrics or (output.metrics if options.source else ())
            yield str(run), output
    for path, lines in zip(files, others, strict=True):
        yield str(path), SystemOutput(sources, references, lines, metrics, {"warnings": {}})


def evaluate_run(
    run: Path,
    sources: list[str],
    references: list[list[str]],
    trees: list[Tree | None] | None,
    options: EvaluationOptions,
    report: Report,
) -> Iterator[SystemOutput]:
    """Yield the outputs of a run on the files, on the phrasebook or on its own data.test."""
    from dragoman.evaluation.predictions import predict_lines, predict_own_tests, predict_phrasebook
    from dragoman.inference.loading import load, load_as
    from dragoman.inference.translator import Translator

    way: dict[str, Any] = {"metrics": options.metrics, "beam": options.beam, "report": report}
    if options.phrasebook:
        translator = load_as(Translator, run, device=options.device, engine=options.engine)
        yield predict_phrasebook(translator, options.phrasebook, options.count, tag=options.tag, **way)
        return
    predictor = load(run, device=options.device, engine=options.engine)
    if options.source:
        if trees and not getattr(predictor, "reads_trees", False):
            report.log(f"{run} reads no trees: it is scored without them")
        yield predict_lines(predictor, sources, references, trees=trees, tag=options.tag, **way)
    else:
        yield from predict_own_tests(predictor, **way)


# Test sets


def read_texts(source: Path, references: Sequence[Path]) -> tuple[list[str], list[list[str]]]:
    """Return the lines of the source and of each reference, which must belong together line by line."""
    sources = read_filled(source)
    return sources, [read_beside(path, sources, source) for path in references]


def read_references(paths: Sequence[Path]) -> list[list[str]]:
    """Return the lines of each reference, for a test set whose source is not known."""
    first = read_filled(paths[0])
    return [first, *(read_beside(path, first, paths[0]) for path in paths[1:])]


def read_filled(path: Path) -> list[str]:
    """Return the lines of a file that must have some."""
    lines = list(read_lines(path))
    if not lines:
        raise UserError(f"{path} is empty")
    return lines


def read_beside(path: Path, others: Sequence[str], name: Path) -> list[str]:
    """Return the lines of a file, as many as `others`, which came from the file `name`."""
    lines = list(read_lines(path))
    if len(lines) != len(others):
        raise UserError(f"{name} has {len(others)} lines but {path} has {len(lines)}; they must belong together")
    return lines


def read_hypotheses(path: Path, others: Sequence[str], name: Path) -> list[str]:
    """Return the outputs of some system: plain text, not subwords."""
    lines = read_beside(path, others, name)
    try:
        refuse_subwords(lines)
    except UserError as fault:
        raise UserError(f"{path}: {fault}") from None
    return lines


def read_trees(conllu: Path, sources: Sequence[str], name: Path) -> list[Tree | None]:
    """Return the trees of these sources, which came from the file `name`."""
    grove = TreeReader(conllu, str(name))
    trees = [grove.tree_of(line) for line in sources]
    grove.end()
    return trees


def read_test(
    corpus: CorpusSettings, direction: str, *, trees: bool = False
) -> tuple[list[str], list[list[str]], list[Tree | None]]:
    """Return the sources of a corpus, its references, and, if they are wanted, the trees of the sources.

    References are the target, or the JSONL keys that `references` names; a list in JSONL is several of them.
    """
    source, target = corpus.keys
    reads = [corpus.model_copy(update={"keys": (source, key)}) for key in corpus.references or [target]]
    sides = [list(read_pairs(one, split="test", direction=direction, trees=trees)) for one in reads]
    references = [one for pairs in sides for one in collect_references(pairs)]
    return [pair.source for pair in sides[0]], references, [pair.tree for pair in sides[0]]
