"""The systems that are scored and their outputs: runs, and files that hold the outputs of other systems.

A run is scored on a pair of files, on a split of the phrasebook, or on each corpus under `data.test`. PyTorch is
imported only where a run is evaluated, so that files are scored at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dragoman.data.corpus import collect_references, read_pairs
from dragoman.data.trees import TreeReader
from dragoman.errors import UserError
from dragoman.io import read_lines
from dragoman.metrics.metrics import TextLines, compute_metrics, count_confusion, refuse_subwords, select_metrics
from dragoman.phrasebook.generate import Phrase, count_correct_phenomena, generate_phrases
from dragoman.progress import Report
from dragoman.types import Hypothesis, Score, Tree

if TYPE_CHECKING:
    from dragoman.inference.classifier import Classifier, Verdict
    from dragoman.inference.generator import Generator
    from dragoman.inference.predictor import Predictor
    from dragoman.inference.translator import Translator

SILENT = Report(quiet=True)
PROGRESS_LINES = 512  # lines translated between two reports of progress
LM_UNITS = {"loss": "nats per token", "perplexity": "per token", "bits_per_character": "line ends counted"}


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
    known = [options.source] if options.source else []
    texts = read_parallel_files([*known, *options.references, *files])
    sources = texts.pop(0) if options.source else []
    references, others = texts[: len(options.references)], texts[len(options.references) :]
    trees = read_trees(options.conllu, sources, options.source) if options.conllu and options.source else None
    for path, lines in zip(files, others, strict=True):
        try:
            refuse_subwords(lines)
        except UserError as fault:
            raise UserError(f"{path}: {fault}") from None
    for run in runs:
        from dragoman.inference.loading import load, load_as
        from dragoman.inference.translator import Translator

        way: dict[str, Any] = {"metrics": options.metrics, "beam": options.beam, "report": report}
        if options.phrasebook:
            translator = load_as(Translator, run, device=options.device, engine=options.engine)
            outputs = iter([predict_phrasebook(translator, options.phrasebook, options.count, tag=options.tag, **way)])
        elif options.source:
            predictor = load(run, device=options.device, engine=options.engine)
            if trees and not getattr(predictor, "reads_trees", False):
                report.log(f"{run} reads no trees: it is scored without them")
            output = predict_lines(predictor, sources, references, trees=trees, tag=options.tag, **way)
            metrics, outputs = metrics or output.metrics, iter([output])
        else:
            outputs = predict_own_tests(load(run, device=options.device, engine=options.engine), **way)
        for output in outputs:
            yield str(run), output
    for path, lines in zip(files, others, strict=True):
        yield str(path), SystemOutput(sources, references, lines, metrics, {"warnings": {}})


def read_parallel_files(paths: Sequence[Path]) -> list[list[str]]:
    """Return the lines of each file. The first must not be empty, and the others must have as many lines."""
    texts = [list(read_lines(path)) for path in paths]
    for path, lines in zip(paths, texts, strict=True):
        if not texts[0]:
            raise UserError(f"{paths[0]} is empty")
        if len(lines) != len(texts[0]):
            raise UserError(
                f"{paths[0]} has {len(texts[0])} lines but {path} has {len(lines)}; they must belong together"
            )
    return texts


def read_trees(conllu: Path, sources: Sequence[str], name: Path) -> list[Tree | None]:
    """Return the trees of these sources, which came from the file `name`."""
    reader = TreeReader(conllu, str(name))
    trees = [reader.tree_of(line) for line in sources]
    reader.end()
    return trees


# Outputs of a run


def predict_own_tests(
    predictor: Predictor[Any], *, metrics: Sequence[str] = (), beam: int | None = None, report: Report = SILENT
) -> Iterator[SystemOutput]:
    """Yield the outputs on every corpus of `data.test`, each by itself.

    References are the target, or the JSONL keys that `references` names; a list in JSONL is several of them.
    """
    data = predictor.recipe.data
    if not data.test:
        raise UserError("the run has no data.test; name what to score it on: --source F and --reference F")
    wanted = getattr(predictor, "reads_trees", False)
    for corpus in data.test:
        source, target = corpus.keys
        reads = [corpus.model_copy(update={"keys": (source, key)}) for key in corpus.references or [target]]
        sides = [list(read_pairs(one, split="test", direction=data.direction, trees=wanted)) for one in reads]
        references = [one for pairs in sides for one in collect_references(pairs)]
        sources, trees = [pair.source for pair in sides[0]], [pair.tree for pair in sides[0]]
        output = predict_lines(
            predictor, sources, references, metrics=metrics, beam=beam, trees=trees, tag=corpus.tag, report=report
        )
        yield replace(output, test=corpus.shown)


def predict_phrasebook(
    translator: Translator,
    split: str,
    count: int,
    *,
    metrics: Sequence[str] = (),
    beam: int | None = None,
    tag: str = "",
    report: Report = SILENT,
) -> SystemOutput:
    """Return the outputs on a split of the built-in corpus, and the share of each phenomenon that is right."""
    phrases = list(generate_phrases(split, count, direction=translator.recipe.data.direction))
    sources, targets = [phrase.source for phrase in phrases], [phrase.target for phrase in phrases]
    trees = [phrase.tree for phrase in phrases]
    output = predict_lines(
        translator, sources, [targets], metrics=metrics, beam=beam, trees=trees, tag=tag, report=report
    )
    return replace(output, about={**output.about, "phenomena": score_phenomena(phrases, output.texts)})


def predict_lines(
    predictor: Predictor[Any],
    sources: TextLines,
    references: Sequence[TextLines],
    *,
    metrics: Sequence[str] = (),
    beam: int | None = None,
    trees: Sequence[Tree | None] | None = None,
    tag: str = "",
    report: Report = SILENT,
) -> SystemOutput:
    """Return the outputs of a translator or a classifier; a language model is measured by the text itself.

    `trees` and `tag` of the sources are for translators; one whose model has no tree input ignores the trees.
    """
    from dragoman.inference.classifier import Classifier
    from dragoman.inference.generator import Generator
    from dragoman.inference.translator import Translator

    metrics = metrics or predictor.recipe.data.metrics
    select_metrics(metrics)  # refuse an unknown metric now, not after the work
    if tag and not isinstance(predictor, Translator):
        raise UserError("--tag is for runs that translate; leave it out")
    if isinstance(predictor, Generator):
        return measure_lm(predictor, references[0] if references else sources, metrics)
    if not references:
        raise UserError("evaluate needs --reference F beside --source F: the reference translations or labels")
    if isinstance(predictor, Classifier):
        return predict_labels(predictor, sources, references, metrics)
    assert isinstance(predictor, Translator)
    trees = trees if predictor.reads_trees else None
    found: list[Hypothesis] = []
    with report.progress("translating", total=len(sources)) as bar:
        for start in range(0, len(sources), PROGRESS_LINES):
            part = slice(start, start + PROGRESS_LINES)
            found += predictor.translate(
                sources[part], beam=beam, trees=trees and trees[part], tag=tag, align=False, search={"scores": False}
            )
            bar.update(len(found))
    return SystemOutput(sources, references, [one.text for one in found], metrics, {"warnings": count_warnings(found)})


def measure_lm(generator: Generator, lines: TextLines, metrics: Sequence[str]) -> SystemOutput:
    """Return the loss of a language model on lines, its perplexity and its bits per character."""
    if metrics:
        raise UserError(f"a language model has no outputs that {metrics[0]} could score; leave the metric out")
    found = generator.measure(lines)
    way = f"context:{generator.model.settings.context}|documents:{generator.recipe.data.documents}"
    scores = {
        name: {"value": getattr(found, name), "signature": f"{way}|unit:{unit}"} for name, unit in LM_UNITS.items()
    }
    about = {"tokens": found.tokens, "characters": found.characters, **scores, "warnings": {}}
    return SystemOutput(lines, [], [], about=about)


def predict_labels(
    classifier: Classifier, sources: TextLines, references: Sequence[TextLines], metrics: Sequence[str]
) -> SystemOutput:
    """Return labels and their confusion matrix. A reference label that training did not have counts as an error."""
    found = classifier.classify(sources)
    labels, wanted = [one.label for one in found], [label.strip() for label in references[0]]
    warnings = count_warnings(found)
    known = classifier.tokenizers.target.encode
    if unknown := sum(not known(label) for label in wanted):
        warnings["with a reference label that training did not have"] = unknown
    about = {"confusion": count_confusion(labels, wanted), "warnings": warnings}
    return SystemOutput(sources, [wanted, *references[1:]], labels, metrics or ["accuracy"], about)


def count_warnings(found: Sequence[Hypothesis | Verdict]) -> dict[str, int]:
    """Return how many outputs have each warning."""
    from dragoman.inference.postprocess import warning_kinds

    return dict(Counter(kind for one in found for kind in warning_kinds(one.warnings)))


def score_phenomena(phrases: Sequence[Phrase], texts: TextLines) -> dict[str, dict[str, float]]:
    """Return how many of each grammatical phenomenon the texts have right."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for phrase, text in zip(phrases, texts, strict=True):
        for name, (good, all_of_it) in count_correct_phenomena(phrase, text).items():
            right[name] += good
            total[name] += all_of_it
    return {
        name: {"right": right[name], "total": total[name], "percent": 100 * right[name] / total[name]}
        for name in sorted(total)
    }


def evaluate(
    run: str | Path | Sequence[str | Path],
    *,
    sources: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    metrics: Sequence[str] = (),
    beam: int | None = None,
    tag: str = "",
    device: str = "auto",
) -> list[Score]:
    """Return scores of what a run outputs for sources: BLEU, chrF and TER, or the run's own metrics, or those named.

    `references` are one list of lines, or several lists where each source has several references.

        scores = dragoman.evaluate("runs/mine", sources=["A man walks."], references=["Ein Mann geht."])
        for score in scores:
            print(score)
    """
    from dragoman.inference.generator import Generator
    from dragoman.inference.loading import load
    from dragoman.inference.predictor import check_lines
    from dragoman.inference.translator import Translator

    sources = check_lines(sources, "evaluate", "source")
    given = [] if isinstance(references, str) else list(references)
    if not given:
        raise UserError("evaluate takes references=[...], a list of lines, or of such lists; put a line into a list")
    predictor = load(run, device=device)
    if isinstance(predictor, Generator):
        raise UserError("a language model outputs nothing to score; use dragoman.load(run).measure(lines).perplexity")
    if tag and not isinstance(predictor, Translator):
        raise UserError(f"tag={tag!r} is for runs that translate; leave it out")
    single = isinstance(given[0], str)
    texts: Any = [given] if single else given
    lists: list[list[str]] = [check_lines(each, "evaluate", "reference") for each in texts]
    for each in lists:
        if len(each) != len(sources):
            raise UserError(f"there are {len(sources)} sources but {len(each)} references; give one for each source")
    output = predict_lines(predictor, sources, lists, metrics=metrics, beam=beam, tag=tag)
    return compute_metrics(output.texts, output.references, output.metrics)
