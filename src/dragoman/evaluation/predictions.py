"""Run a model on a test set: a pair of files, a split of the phrasebook, or each corpus under `data.test`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dragoman.errors import UserError
from dragoman.evaluation.systems import SILENT, SystemOutput, read_test
from dragoman.inference.classifier import Classifier, Verdict
from dragoman.inference.generator import Generator
from dragoman.inference.postprocess import warning_kinds
from dragoman.inference.predictor import Predictor
from dragoman.inference.translator import Translator
from dragoman.metrics.metrics import TextLines, count_confusion, select_metrics
from dragoman.phrasebook.generate import Phrase, count_correct_phenomena, generate_phrases
from dragoman.progress import Report
from dragoman.types import Hypothesis, Score, Tree

PROGRESS_LINES = 512  # lines translated between two reports of progress


def predict_own_tests(
    predictor: Predictor[Any], *, metrics: Sequence[str] = (), beam: int | None = None, report: Report = SILENT
) -> Iterator[SystemOutput]:
    """Yield the outputs on every corpus of `data.test`, each by itself."""
    recipe = predictor.recipe
    if not recipe.data.test:
        raise UserError("the run has no data.test; name what to score it on: --source F and --reference F")
    for corpus in recipe.data.test:
        wanted = isinstance(predictor, Translator) and predictor.reads_trees
        sources, references, trees = read_test(corpus, recipe.data.direction, trees=wanted)
        way: dict[str, Any] = {"beam": beam, "trees": trees, "tag": corpus.tag}
        found = predict_lines(predictor, sources, references, metrics=metrics, report=report, **way)
        yield replace(found, test=corpus.shown)


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
    if isinstance(predictor, Translator):
        wanted = trees if predictor.reads_trees else None
        found = translate_lines(predictor, sources, beam=beam, trees=wanted, tag=tag, report=report)
        return SystemOutput(
            sources, references, [one.text for one in found], metrics, {"warnings": count_warnings(found)}
        )
    raise TypeError(predictor)


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
    recipe = translator.recipe
    metrics = metrics or recipe.data.metrics
    select_metrics(metrics)
    phrases = list(generate_phrases(split, count, direction=recipe.data.direction))
    sources, targets = [phrase.source for phrase in phrases], [phrase.target for phrase in phrases]
    trees = [phrase.tree for phrase in phrases] if translator.reads_trees else None
    found = translate_lines(translator, sources, beam=beam, trees=trees, tag=tag, report=report)
    texts = [one.text for one in found]
    about = {"warnings": count_warnings(found), "phenomena": score_phenomena(phrases, texts)}
    return SystemOutput(sources, [targets], texts, metrics, about)


def translate_lines(
    translator: Translator,
    sources: TextLines,
    *,
    beam: int | None,
    trees: Sequence[Tree | None] | None,
    tag: str,
    report: Report,
) -> list[Hypothesis]:
    found: list[Hypothesis] = []
    with report.progress("translating", total=len(sources)) as bar:
        for start in range(0, len(sources), PROGRESS_LINES):
            part = slice(start, start + PROGRESS_LINES)
            wanted = trees[part] if trees is not None else None
            way: dict[str, Any] = {"beam": beam, "trees": wanted, "tag": tag, "search": {"scores": False}}
            found += translator.translate(sources[part], align=False, **way)
            bar.update(len(found))
    return found


def count_warnings(found: Sequence[Hypothesis | Verdict]) -> dict[str, int]:
    """Return how many outputs have each warning."""
    return dict(Counter(kind for one in found for kind in warning_kinds(one.warnings)))


def measure_lm(generator: Generator, lines: TextLines, metrics: Sequence[str]) -> SystemOutput:
    if metrics:
        raise UserError(f"a language model has no outputs that {metrics[0]} could score; leave the metric out")
    found = generator.measure(lines)
    way = f"context:{generator.model.settings.context}|documents:{generator.recipe.data.documents}"
    values = {"loss": found.loss, "perplexity": found.perplexity, "bits_per_character": found.bits_per_character}
    unit = {"loss": "nats per token", "perplexity": "per token", "bits_per_character": "line ends counted"}
    scores = {name: {"value": value, "signature": f"{way}|unit:{unit[name]}"} for name, value in values.items()}
    about = {"tokens": found.tokens, "characters": found.characters, **scores, "warnings": {}}
    return SystemOutput(lines, [], [], about=about)


def predict_labels(
    classifier: Classifier, sources: TextLines, references: Sequence[TextLines], metrics: Sequence[str]
) -> SystemOutput:
    """Return labels and their confusion matrix. A reference label that training did not have counts as an error."""
    found = classifier.classify(sources)
    labels, wanted = [one.label for one in found], [label.strip() for label in references[0]]
    warnings = Counter(count_warnings(found))
    known = classifier.tokenizers.target.encode
    warnings.update("with a reference label that training did not have" for label in wanted if not known(label))
    about = {"confusion": count_confusion(labels, wanted), "warnings": dict(warnings - Counter())}
    return SystemOutput(sources, [wanted, *references[1:]], labels, metrics or ["accuracy"], about)


def score_phenomena(phrases: Sequence[Phrase], texts: TextLines) -> dict[str, dict[str, float]]:
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
    from dragoman.metrics.metrics import compute_metrics

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
