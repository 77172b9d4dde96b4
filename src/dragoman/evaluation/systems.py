"""Evaluate systems on test sets. A system is a trained run, or a file with the outputs of any other system.

A run is evaluated on files, on a split of the phrasebook (the built-in corpus), or on each corpus under `data.test`.
`collect_outputs` yields the outputs of all systems. `Scorer` computes scores with confidence intervals, significance
tests against the first system on the same test set, and breakdowns by source length and word frequency. PyTorch is
imported only if a run is evaluated, so that scoring files starts without delay.

Shapes   N lines   K counts of a metric per line (metrics/metrics.py)
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dragoman.data.context import attach_to_lines
from dragoman.data.corpus import CorpusSettings, collect_references, read_pairs
from dragoman.data.trees import TreeReader
from dragoman.errors import UserError
from dragoman.io import read_lines
from dragoman.language_codes import is_same_language
from dragoman.metrics import significance
from dragoman.metrics.metrics import (
    METRICS,
    SPACELESS_LANGUAGES,
    Lines,
    compute_f1,
    compute_metrics,
    count_confusion,
    detect_east_asian_language,
    extract_words,
    refuse_subwords,
    select_metrics,
)
from dragoman.phrasebook.documents import generate_document_phrases
from dragoman.phrasebook.generate import Judged, count_correct_phenomena, generate_phrases
from dragoman.phrasebook.views import generate_views
from dragoman.progress import Report
from dragoman.recipe import Recipe
from dragoman.types import Hypothesis, Line, Score, Tree

if TYPE_CHECKING:
    from dragoman.inference.predictor import Predictor
    from dragoman.inference.single_sequence import Classifier, Generator, Verdict
    from dragoman.inference.translator import Translator

SILENT_REPORT = Report(quiet=True)
LINES_PER_UPDATE = 512  # lines translated between two updates of the progress bar
# Scores of a language model, and their units for signatures
LM_UNITS = {"loss": "nats per token", "perplexity": "per token", "bits_per_character": "line ends counted"}


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """The lines of a test set. `sources` is empty if only hypotheses and references are known."""

    sources: Lines
    references: Sequence[Lines]
    name: str = ""
    trees: Sequence[Tree | None] | None = None  # dependency trees of the sources, for models that use them
    tag: str = ""  # of the sources, such as the target language, for runs trained with tags
    phrases: Sequence[Judged] = ()  # the same lines with their grammatical phenomena, for the phrasebook only
    contexts: Sequence[tuple[str, ...]] | None = None  # of the sources; None: the lines before each source


@dataclass(frozen=True, slots=True)
class SystemOutput:
    """The output of a system on a test set, and the names of the metrics to score it with.

    `details` contains results other than metrics: warnings, confusion matrix, accuracy on grammatical phenomena. A
    language model has no output texts; its loss on the test set is in `details`.
    """

    test: EvaluationSet
    texts: Lines
    metrics: Sequence[str] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def describe_test_set(self) -> dict[str, Any]:
        """Return the name of the test set, if it has one, and its number of lines: the first fields of a result."""
        lines = len(self.test.sources or self.test.references[0])
        return {**({"test": self.test.name} if self.test.name else {}), "lines": lines}

    def result(self) -> dict[str, Any]:
        """Return all results as a dict: the test set, a value and signature for each metric, and `details`."""
        scores = compute_metrics(self.texts, self.test.references, self.metrics) if self.texts else []
        by_name = {score.name: {"value": score.value, "signature": score.signature} for score in scores}
        return {**self.describe_test_set(), **by_name, **self.details}


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """What to evaluate on, and how to translate. By default each run is evaluated on its data.test."""

    source: Path | None = None
    references: Sequence[Path] = ()
    conllu: Path | None = None  # dependency trees of the sources
    phrasebook: str = ""  # a split of the phrasebook, such as test
    count: int = 1000  # number of sentences of that split
    documents: bool = False  # sentences of documents of that split, with pronouns that refer to the sentence before
    metrics: Sequence[str] = ()
    beam: int | None = None
    tag: str = ""  # of the sources (see EvaluationSet)
    device: str = "auto"
    engine: str = "auto"
    context: int | None = None  # number of previous sentences that a run reads; None: as many as in training

    def check(self, *, runs: bool, hypotheses: bool) -> None:
        """Refuse options that cannot be combined. `runs` and `hypotheses`: whether any run or file is evaluated."""
        if not runs and not hypotheses:
            raise UserError("evaluate needs a run folder, or --hypotheses F with the outputs of a system")
        files = self.source is not None or bool(self.references)
        if (self.phrasebook and files) or (self.conllu and not self.source):
            raise UserError(
                "evaluate takes --source F and --reference F, or --phrasebook SPLIT, or neither to use data.test"
            )
        if self.documents and not self.phrasebook:
            raise UserError("--documents is for --phrasebook SPLIT; add it, or leave --documents out")
        if runs and self.references and not self.source:
            raise UserError("--reference F needs --source F with the lines that the runs translate")
        if hypotheses and not self.references:
            raise UserError("--hypotheses F needs --reference F to score the outputs against")


DEFAULT_OPTIONS = EvaluationOptions()


def collect_outputs(
    runs: Sequence[Path], output_files: Sequence[Path], options: EvaluationOptions, report: Report
) -> Iterator[tuple[str, SystemOutput]]:
    """Yield the name and output of each system on each test set: first of `runs`, then of `output_files`.

    The outputs in files are scored with the metrics of the first run. Without runs no source is needed, since no metric
    reads it.
    """
    options.check(runs=bool(runs), hypotheses=bool(output_files))
    source_files = [options.source] if options.source else []
    texts = read_parallel_files([*source_files, *options.references, *output_files])
    sources = texts.pop(0) if options.source else []
    references, outputs_of_files = texts[: len(options.references)], texts[len(options.references) :]
    trees = read_trees(options.conllu, sources, options.source) if options.conllu and options.source else None
    test = EvaluationSet(sources, references, trees=trees, tag=options.tag)
    for path, lines in zip(output_files, outputs_of_files, strict=True):
        try:
            refuse_subwords(lines)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    metrics = options.metrics
    for run in runs:
        from dragoman.inference.loading import load, load_as
        from dragoman.inference.translator import Translator

        if options.phrasebook:
            predictor: Predictor[Any] = load_as(Translator, run, device=options.device, engine=options.engine)
        else:
            predictor = load(run, device=options.device, engine=options.engine)
        if trees and not getattr(predictor, "reads_trees", False):
            report.log(f"{run} does not use trees: it translates without them")
        if options.source:
            outputs = iter([predict_lines(predictor, test, options, report)])
        else:
            outputs = predict_tests(predictor, options, report)
        for output in outputs:
            metrics = metrics or output.metrics
            yield str(run), output
    for path, lines in zip(output_files, outputs_of_files, strict=True):
        yield str(path), SystemOutput(test, lines, metrics, {"warnings": {}})


def read_parallel_files(paths: Sequence[Path]) -> list[list[str]]:
    """Return the lines of each file. The first file must not be empty, and all must have the same number of lines."""
    texts = [list(read_lines(path)) for path in paths]
    for path, lines in zip(paths, texts, strict=True):
        if not texts[0]:
            raise UserError(f"{paths[0]} is empty; evaluate needs at least one line")
        if len(lines) != len(texts[0]):
            raise UserError(
                f"{paths[0]} has {len(texts[0])} lines but {path} has {len(lines)}; they must have the same number"
            )
    return texts


def read_trees(conllu: Path, sources: Sequence[str], source_file: Path) -> list[Tree | None]:
    """Return the dependency trees of these sources. Error messages name `source_file`."""
    reader = TreeReader(conllu, str(source_file))
    trees = [reader.read_next(line) for line in sources]
    reader.check_end()
    return trees


def predict_tests(
    predictor: Predictor[Any], options: EvaluationOptions = DEFAULT_OPTIONS, report: Report = SILENT_REPORT
) -> Iterator[SystemOutput]:
    """Yield the output on every test set of `read_test_sets`."""
    for test in read_test_sets(predictor, options):
        yield predict_lines(predictor, test, options, report)


def check_phrasebook_direction(predictor: Predictor[Any]) -> None:
    """Refuse a model whose recipe names other languages than those of the phrasebook."""
    data = predictor.recipe.data
    for language, known in zip(data.direction.split("-"), (data.source_language, data.target_language), strict=True):
        if known and not is_same_language(language, known):
            raise UserError(
                f"the phrasebook has sentences from {data.direction.replace('-', ' to ')}, but the model in "
                f"{predictor.run!r} has {known} instead of {language}; name files with --source and --reference"
            )


def read_test_sets(predictor: Predictor[Any], options: EvaluationOptions) -> Iterator[EvaluationSet]:
    """Yield a split of the phrasebook, if the options name one, else every corpus of `data.test`.

    A run that was trained on a view of the phrasebook is evaluated on the same view.
    """
    data = predictor.recipe.data
    view = next((corpus.view for corpus in data.train if corpus.phrasebook), "translation")
    if options.phrasebook and view != "translation":
        if options.documents:
            raise UserError(f"the run was trained on the view {view} of the phrasebook, which has no --documents")
        viewed = list(generate_views(view, options.phrasebook, options.count, direction=data.direction))
        pairs = [phrase.pair for phrase in viewed]
        references = collect_references(pairs)
        yield EvaluationSet([pair.source for pair in pairs], references, tag=options.tag, phrases=viewed)
    elif options.phrasebook:
        check_phrasebook_direction(predictor)
        generate = generate_document_phrases if options.documents else generate_phrases
        phrases = list(generate(options.phrasebook, options.count, direction=data.direction))
        corpus = CorpusSettings(phrasebook=options.count, documents=options.documents)
        read = read_pairs(corpus, split=options.phrasebook, direction=data.direction, context=data.context)
        contexts = [pair.context for pair in read]
        sources, targets = [phrase.source for phrase in phrases], [phrase.target for phrase in phrases]
        trees = [phrase.tree for phrase in phrases]
        yield EvaluationSet(sources, [targets], trees=trees, tag=options.tag, phrases=phrases, contexts=contexts)
    elif not data.test:
        raise UserError("the run has no data.test; name files with --source F and --reference F")
    else:
        for corpus in data.test:
            yield read_test_corpus(predictor, corpus)


def read_test_corpus(predictor: Predictor[Any], corpus: CorpusSettings) -> EvaluationSet:
    """Return the lines of a corpus of `data.test`.

    The reference is the target. If `corpus.references` lists keys of a JSONL file, their values are the references; a
    value may also be a list of several references.
    """
    source, target = corpus.keys
    reads_trees = getattr(predictor, "reads_trees", False)
    data = predictor.recipe.data
    corpora = [corpus.model_copy(update={"keys": (source, key)}) for key in corpus.references or [target]]
    read = partial(read_pairs, split="test", direction=data.direction, trees=reads_trees, context=data.context)
    pairs_by_key = [list(read(keyed)) for keyed in corpora]
    references = [lines for pairs in pairs_by_key for lines in collect_references(pairs)]
    sources, contexts = ([getattr(pair, name) for pair in pairs_by_key[0]] for name in ("source", "context"))
    trees = [pair.tree for pair in pairs_by_key[0]]
    return EvaluationSet(sources, references, corpus.title, trees, corpus.tag, contexts=contexts)


def predict_lines(
    predictor: Predictor[Any],
    test: EvaluationSet,
    options: EvaluationOptions = DEFAULT_OPTIONS,
    report: Report = SILENT_REPORT,
) -> SystemOutput:
    """Return the outputs of a translator or a classifier, or the loss of a language model, on a test set."""
    from dragoman.inference.single_sequence import Classifier, Generator
    from dragoman.inference.translator import Translator

    metrics = options.metrics or predictor.recipe.data.metrics
    select_metrics(metrics)  # refuse an unknown metric now, not after translating
    if test.tag and not isinstance(predictor, Translator):
        raise UserError("--tag is for runs that translate; leave it out")
    if isinstance(predictor, Generator):
        return measure_lm(predictor, test, metrics)
    if not test.references:
        raise UserError("evaluate also needs --reference F with the reference translations or labels")
    if isinstance(predictor, Classifier):
        return predict_labels(predictor, test, metrics)
    assert isinstance(predictor, Translator)
    hypotheses = translate_test_set(predictor, test, options, report)
    texts = [hypothesis.text for hypothesis in hypotheses]
    phenomena = {"phenomena": score_phenomena(test.phrases, texts)} if test.phrases else {}
    return SystemOutput(test, texts, metrics, {"warnings": count_warnings(hypotheses), **phenomena})


def translate_test_set(
    translator: Translator, test: EvaluationSet, options: EvaluationOptions, report: Report
) -> list[Hypothesis]:
    """Return the translations of the sources, with their trees and contexts if the model reads them."""
    trees = test.trees if translator.reads_trees else None
    context = translator.choose_context(options.context)
    lines = attach_to_lines(test.sources, context)
    if test.contexts is not None:
        lines = [Line(text, context=before) for text, before in zip(test.sources, test.contexts, strict=True)]
    hypotheses: list[Hypothesis] = []
    with report.progress("translating", total=len(test.sources)) as bar:
        for start in range(0, len(test.sources), LINES_PER_UPDATE):
            part = slice(start, start + LINES_PER_UPDATE)
            # search.scores are the log-probabilities of hypotheses: not needed here, since metrics score their texts
            settings: dict[str, Any] = {"beam": options.beam, "search": {"scores": False}, "tag": test.tag}
            settings["context"] = context
            hypotheses += translator.translate(lines[part], trees=trees and trees[part], align=False, **settings)
            bar.set_done(len(hypotheses))
    return hypotheses


def measure_lm(generator: Generator, test: EvaluationSet, metrics: Sequence[str]) -> SystemOutput:
    """Return loss, perplexity and bits per character of a language model on the references or, if none, the sources."""
    if metrics:
        raise UserError(
            f"the metric {metrics[0]} cannot be used for a language model, which has no outputs to score; leave it out"
        )
    lines = test.references[0] if test.references else test.sources
    likelihood = generator.measure(lines)
    conditions = f"context:{generator.model.settings.context}|documents:{generator.recipe.data.documents}"
    scores = {
        name: {"value": getattr(likelihood, name), "signature": f"{conditions}|unit:{unit}"}
        for name, unit in LM_UNITS.items()
    }
    details = {"tokens": likelihood.tokens, "characters": likelihood.characters, **scores, "warnings": {}}
    return SystemOutput(replace(test, sources=lines, references=[]), [], details=details)


def predict_labels(classifier: Classifier, test: EvaluationSet, metrics: Sequence[str]) -> SystemOutput:
    """Return the predicted labels and a confusion matrix. Labels that are not in the training data count as errors."""
    verdicts = classifier.classify(test.sources)
    labels, expected = [verdict.label for verdict in verdicts], [label.strip() for label in test.references[0]]
    warnings = count_warnings(verdicts)
    encode = classifier.tokenizers.target.encode
    if unknown := sum(not encode(label) for label in expected):
        warnings["with a reference label that was not in the training data"] = unknown
    details = {"confusion": count_confusion(labels, expected), "warnings": warnings}
    test = replace(test, references=[expected, *test.references[1:]])
    return SystemOutput(test, labels, metrics or ["accuracy"], details)


def count_warnings(outputs: Sequence[Hypothesis | Verdict]) -> dict[str, int]:
    from dragoman.inference.postprocess import get_warning_kind

    return dict(Counter(kind for output in outputs for kind in dict.fromkeys(map(get_warning_kind, output.warnings))))


def score_phenomena(phrases: Sequence[Judged], texts: Lines) -> dict[str, dict[str, float]]:
    counts: dict[str, Counter[str]] = {}
    for phrase, text in zip(phrases, texts, strict=True):
        for name, (right, total) in count_correct_phenomena(phrase, text).items():
            counts.setdefault(name, Counter()).update(right=right, total=total)
    return {name: {**count, "percent": 100 * count["right"] / count["total"]} for name, count in sorted(counts.items())}


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
    """Return the scores of a run on sources and references.

    If `metrics` is empty, the metrics are those in the run's data.metrics or, if there are none, BLEU, chrF and TER.
    `references` is a list of lines, or a list of such lists if each source has several references.

        scores = dragoman.evaluate("runs/mine", sources=["A man walks."], references=["Ein Mann geht."])
        for score in scores:
            print(score)
    """
    from dragoman.inference.loading import load
    from dragoman.inference.predictor import check_lines
    from dragoman.inference.single_sequence import Generator
    from dragoman.inference.translator import Translator

    sources = check_lines(sources, "evaluate", "source")
    given_references = [] if isinstance(references, str) else list(references)
    if not given_references:
        raise UserError(
            "evaluate takes references=[...], a list of lines or a list of such lists; put a single line into a list"
        )
    predictor = load(run, device=device)
    if isinstance(predictor, Generator):
        raise UserError("a language model has no outputs to score; use dragoman.load(run).measure(lines).perplexity")
    if tag and not isinstance(predictor, Translator):
        raise UserError(f"tag={tag!r} is for runs that translate; leave it out")
    texts: Any = [given_references] if isinstance(given_references[0], str) else given_references
    reference_lists: list[list[str]] = [check_lines(lines, "evaluate", "reference") for lines in texts]
    for lines in reference_lists:
        if len(lines) != len(sources):
            raise UserError(f"there are {len(sources)} sources but {len(lines)} references; give one for each source")
    test = EvaluationSet(sources, reference_lists, tag=tag)
    output = predict_lines(predictor, test, EvaluationOptions(metrics=metrics, beam=beam))
    return compute_metrics(output.texts, output.test.references, output.metrics)


# Breakdowns by length and word frequency, and comparison with the first system

LENGTH_BUCKETS = 6
TRAINING_DATA_PREFIX = "the training data of "  # followed by the name of the run
Bounds = tuple[int, int | None]  # inclusive; None: no upper bound
# Bounds of the number of occurrences of a word
FREQUENCY_BUCKETS: tuple[Bounds, ...] = ((0, 0), (1, 1), (2, 4), (5, 9), (10, 99), (100, 999), (1000, None))


@dataclass(frozen=True, slots=True)
class ScoredSystem:
    """The output of a system on a test set, with its scores.

    `counts_by_metric` has the counts per line, `resamples` each metric's scores on bootstrap resamples of the lines.
    Later systems are compared with these.
    """

    name: str
    output: SystemOutput
    counts_by_metric: significance.Counts
    resamples: significance.Resamples
    result: Mapping[str, Any]  # as returned by Scorer.score


class WordCounts(NamedTuple):
    """Word frequencies, and a description of the texts they were counted in."""

    frequencies: Mapping[str, int]
    counted_in: str


@dataclass
class Scorer:
    """Scores systems one after another. `systems_by_test` has a list of the systems scored so far for each test set.

    `recipes` maps the names of runs to their recipes, which name the training data in which words are counted. If
    `recipes` is None, there is no breakdown by length and word frequency.
    """

    tokenize: str = ""  # the tokenizer of BLEU; by default it depends on the language
    recipes: Mapping[str, Recipe] | None = None
    report: Report = SILENT_REPORT
    systems_by_test: list[list[ScoredSystem]] = field(default_factory=list)

    def score(self, name: str, output: SystemOutput) -> dict[str, Any]:
        """Return the result of one system on one test set, as a dict that can be written as JSON."""
        test = output.test
        systems: list[ScoredSystem] = []  # systems scored before on the same test set, which is recognized by its lines
        for scored_systems in self.systems_by_test:
            other = scored_systems[0].output.test
            if (other.sources, other.references) == (test.sources, test.references):
                systems = scored_systems
        metrics = select_metrics(output.metrics, tokenize=self.tokenize) if output.texts else []
        counts = {metric.name: metric.check_and_count(output.texts, test.references) for metric in metrics}
        resamples = significance.bootstrap_scores(counts) if counts else {}
        scores: dict[str, dict[str, Any]] = {}
        for metric in metrics:
            counted = counts[metric.name]
            scores[metric.name] = {
                "value": counted.value,
                "signature": counted.signature,
                "interval": significance.compute_interval(resamples[metric.name]),
                **(metric.decompose(counted.count_NK.sum(0)) if metric.decompose else {}),
            }
        if systems:
            first, trials = systems[0], significance.RANDOMISATION_TRIALS
            with self.report.progress("comparing with the first system", total=trials, unit="trials") as bar:
                differences = significance.compare_with_first(
                    first.counts_by_metric, counts, first.resamples, resamples, on_progress=bar.set_done
                )
            for metric_name, difference in differences.items():
                comparison = {"run": first.name, **difference._asdict(), "significant": difference.significant}
                scores[metric_name]["against"] = comparison
        result = {"run": name, **output.describe_test_set(), **scores, **output.details}
        if counts and self.recipes is not None:
            result["lengths"] = score_by_length(output, counts)
            if "confusion" not in output.details:  # not for a classifier, whose outputs are labels
                words = self.training_words or WordCounts(count_words(chain(*test.references)), "the references")
                result["rarity"] = score_by_frequency(output, words)
        if not systems:
            self.systems_by_test.append(systems)
        systems.append(ScoredSystem(name, output, counts, resamples, result))
        return result

    @cached_property
    def training_words(self) -> WordCounts | None:
        """Count the target words in the training data of the first run whose files still exist; None if there is none.

        The same counts are used for all systems, so that words are in the same frequency bucket for all of them.
        """
        for name, recipe in (self.recipes or {}).items():
            data = recipe.data
            if data.train and all(Path(file).exists() for corpus in data.train for file in corpus.files):
                pairs = chain.from_iterable(
                    read_pairs(corpus, split="train", direction=data.direction) for corpus in data.train
                )
                bar = self.report.progress("counting words of the training data")
                words = count_words(pair.target for pair in bar.iterate(pairs))
                return WordCounts(words, f"{TRAINING_DATA_PREFIX}{name}")
        return None


def count_words(lines: Iterable[str]) -> Counter[str]:
    return Counter(word for line in lines for word in extract_words(line))


def make_equal_buckets(numbers: Sequence[int], count: int = LENGTH_BUCKETS) -> list[tuple[int, int]]:
    """Return the inclusive bounds of at most `count` non-empty buckets with about as many numbers in each."""
    ends = np.unique(np.quantile(numbers, np.arange(1, count + 1) / count, method="inverted_cdf")).tolist()
    return list(zip([min(numbers), *(end + 1 for end in ends[:-1])], ends, strict=True))


def score_by_length(output: SystemOutput, counts: significance.Counts) -> dict[str, Any]:
    """Return the scores of every metric by the length of the source or, if there is no source, of the reference.

    Scores are computed from the existing counts per line, which is much faster than counting again.
    """
    texts = output.test.sources or output.test.references[0]
    spaceless = detect_east_asian_language(texts) in SPACELESS_LANGUAGES
    length_N = np.array([len(line) if spaceless else len(line.split()) for line in texts])
    rows = []
    for low, high in make_equal_buckets(length_N.tolist()):
        inside_N = (low <= length_N) & (length_N <= high)
        sums = {name: counted.count_NK[inside_N].sum(0) for name, counted in counts.items()}
        values = {name: float(METRICS[name].compute_scores(sum_K)) for name, sum_K in sums.items()}
        rows.append({"low": low, "high": high, "lines": int(inside_N.sum()), **values})
    side = "source" if output.test.sources else "reference"
    return {"unit": "characters" if spaceless else "words", "side": side, "buckets": rows}


def score_by_frequency(output: SystemOutput, word_counts: WordCounts) -> dict[str, Any]:
    """Return precision, recall and F1 of words by their frequency. Only the first reference is used."""
    predicted, expected, correct = Counter[Bounds](), Counter[Bounds](), Counter[Bounds]()
    lows = [low for low, _ in FREQUENCY_BUCKETS]
    for text, reference in zip(output.texts, output.test.references[0], strict=True):
        output_words, reference_words = count_words([text]), count_words([reference])
        shared_words = output_words & reference_words
        for total, words in ((predicted, output_words), (expected, reference_words), (correct, shared_words)):
            for word, count in words.items():
                total[FREQUENCY_BUCKETS[bisect_right(lows, word_counts.frequencies.get(word, 0)) - 1]] += count
    rows = []
    for bounds, count in sorted(expected.items()):
        scores = compute_f1(correct[bounds], predicted[bounds], count)
        rows.append({"low": bounds[0], "high": bounds[1], "words": count, **scores})
    return {"counted_in": word_counts.counted_in, "buckets": rows}
