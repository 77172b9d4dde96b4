"""Systems and their scores: runs, and files that hold the outputs of other systems, scored side by side.

A run is scored on a pair of files, on a split of the phrasebook, or on each corpus under `data.test`. Scores have
confidence intervals, each system is tested against the first on the same test set, and there are scores by the length
of the source and word F1 by word frequency. PyTorch is imported only where a run is evaluated, so that files are scored
at once.

Shapes   N lines   K counts of a metric (metrics/metrics.py)
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dragoman.data.corpus import collect_references, read_pairs
from dragoman.data.trees import TreeReader
from dragoman.errors import UserError
from dragoman.io import read_lines
from dragoman.metrics.metrics import (
    METRICS,
    SPACELESS_LANGUAGES,
    TextLines,
    compute_metrics,
    count_confusion,
    detect_eastern_script,
    extract_words,
    refuse_subwords,
    select_metrics,
)
from dragoman.metrics.significance import (
    RANDOMISATION,
    Counts,
    Values,
    bootstrap_scores,
    compare_with_first,
    compute_interval,
)
from dragoman.phrasebook.generate import Phrase, count_correct_phenomena, generate_phrases
from dragoman.progress import Report
from dragoman.recipe import Recipe
from dragoman.types import Hypothesis, Score, Tree

if TYPE_CHECKING:
    from dragoman.inference.predictor import Predictor
    from dragoman.inference.single_sequence import Classifier, Generator, Verdict
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
    from dragoman.inference.single_sequence import Classifier, Generator
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
    from dragoman.inference.loading import load
    from dragoman.inference.predictor import check_lines
    from dragoman.inference.single_sequence import Generator
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


LENGTH_BUCKETS = 6
TRAINING_DATA = "the training data of "
FREQUENCIES = ((0, 0), (1, 1), (2, 4), (5, 9), (10, 99), (100, 999), (1000, None))  # buckets of word counts

Bounds = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class ScoredSystem:
    """A system's output on a test set with its scores.

    `values` are the scores of bootstrap resamples, for the comparison with later systems.
    """

    name: str
    output: SystemOutput
    counts: Counts
    values: Values
    result: Mapping[str, Any]


class WordCounts(NamedTuple):
    """How often words occur, and where they were counted."""

    times: Mapping[str, int]
    where: str


class Scorer:
    """Score systems one after another. `tests` holds the systems of each test set in the order in which they came.

    `recipes` are those of the runs, by name: words are counted in their training data. Without them there is no
    breakdown by length and word frequency.
    """

    def __init__(
        self, *, tokenize: str = "", recipes: Mapping[str, Recipe] | None = None, report: Report = SILENT
    ) -> None:
        self.tokenize, self.recipes, self.report = tokenize, recipes, report
        self.tests: list[list[ScoredSystem]] = []

    def score(self, name: str, output: SystemOutput) -> dict[str, Any]:
        """Return one system's result on one test set, as JSON has it."""
        key = (output.sources, output.references)
        same = (some for some in self.tests if (some[0].output.sources, some[0].output.references) == key)
        systems: list[ScoredSystem] = next(same, [])  # the earlier systems on the same test set
        metrics = select_metrics(output.metrics, tokenize=self.tokenize) if output.texts else []
        counts = {metric.name: metric.counted(output.texts, output.references) for metric in metrics}
        values = bootstrap_scores(counts) if counts else {}
        scores: dict[str, dict[str, Any]] = {}
        for metric in metrics:
            counted = counts[metric.name]
            scores[metric.name] = {
                "value": counted.value,
                "signature": counted.signature,
                "interval": list(compute_interval(values[metric.name])),
                **(metric.parts(counted.line_NK.sum(0)) if metric.parts else {}),
            }
        if systems:
            first = systems[0]
            with self.report.progress("comparing with the first system", total=RANDOMISATION, unit="trials") as bar:
                found = compare_with_first(first.counts, counts, first.values, values, tick=bar.update)
            for metric_name, one in found.items():
                scores[metric_name]["against"] = {
                    "run": first.name,
                    "difference": one.value,
                    "p_bootstrap": one.bootstrap,
                    "p_randomisation": one.randomisation,
                    "significant": one.significant,
                }
        result = {"run": name, **output.describe(), **scores, **output.about}
        if counts and self.recipes is not None:
            result["lengths"] = score_by_length(output, counts)
            if "confusion" not in output.about:  # labels are no words
                known = self.training_words or WordCounts(count_words(chain(*output.references)), "the references")
                result["rarity"] = score_by_frequency(output, known)
        if not systems:
            self.tests.append(systems)
        systems.append(ScoredSystem(name, output, counts, values, result))
        return result

    @cached_property
    def training_words(self) -> WordCounts | None:
        """Count the target words in the training data of the first run whose data is still there.

        One count serves all systems, so that they are scored on the same words.
        """
        for name, recipe in (self.recipes or {}).items():
            data = recipe.data
            if data.train and all(Path(file).exists() for corpus in data.train for file in corpus.files):
                pairs = chain.from_iterable(
                    read_pairs(corpus, split="train", direction=data.direction) for corpus in data.train
                )
                bar = self.report.progress("counting words of the training data")
                return WordCounts(count_words(pair.target for pair in bar.iterate(pairs)), f"{TRAINING_DATA}{name}")
        return None


def count_words(lines: Iterable[str]) -> Counter[str]:
    """Return how often each word occurs, punctuation left out."""
    return Counter(word for line in lines for word in extract_words(line))


def fit_buckets(numbers: Sequence[int], most: int = LENGTH_BUCKETS) -> list[tuple[int, int]]:
    """Return bounds that put about as many of these numbers into each bucket, none of them empty."""
    ends = np.unique(np.quantile(numbers, np.arange(1, most + 1) / most, method="inverted_cdf")).tolist()
    return list(zip([min(numbers), *(end + 1 for end in ends[:-1])], ends, strict=True))


def score_by_length(output: SystemOutput, counts: Counts) -> dict[str, Any]:
    """Return every metric on the lines of each length of the source or, where it is not known, of the reference.

    Scores come from sums of the counts of each line, so no line is counted again.
    """
    texts = output.sources or output.references[0]
    spaceless = detect_eastern_script(texts) in SPACELESS_LANGUAGES
    length_N = np.array([len(line) if spaceless else len(line.split()) for line in texts])
    rows = []
    for low, high in fit_buckets(length_N.tolist()):
        inside_N = (low <= length_N) & (length_N <= high)
        values = {name: float(METRICS[name].values(one.line_NK[inside_N].sum(0))) for name, one in counts.items()}
        rows.append({"low": low, "high": high, "lines": int(inside_N.sum()), **values})
    side = "source" if output.sources else "reference"
    return {"unit": "characters" if spaceless else "words", "side": side, "buckets": rows}


def score_by_frequency(output: SystemOutput, word_counts: WordCounts) -> dict[str, Any]:
    """Return precision, recall and F1 of words by their frequency. Of several references, the first counts."""
    given, wanted, both = Counter[Bounds](), Counter[Bounds](), Counter[Bounds]()
    lows = [low for low, _ in FREQUENCIES]
    for text, reference in zip(output.texts, output.references[0], strict=True):
        here, there = count_words([text]), count_words([reference])
        for tally, counted in ((given, here), (wanted, there), (both, here & there)):
            for word, times in counted.items():
                tally[FREQUENCIES[bisect_right(lows, word_counts.times.get(word, 0)) - 1]] += times
    rows = [
        {
            "low": bounds[0],
            "high": bounds[1],
            "words": wanted[bounds],
            "precision": 100 * both[bounds] / max(given[bounds], 1),
            "recall": 100 * both[bounds] / wanted[bounds],
            "f1": 200 * both[bounds] / (given[bounds] + wanted[bounds]),
        }
        for bounds in FREQUENCIES
        if wanted[bounds]
    ]
    return {"counted_in": word_counts.where, "buckets": rows}
