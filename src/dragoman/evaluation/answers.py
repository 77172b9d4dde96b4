"""Run a model on a test set: a pair of files, a split of the phrasebook, or each corpus under `data.test`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from dragoman.classifier import Classifier, Verdict
from dragoman.door import Door, kinds
from dragoman.evaluation.answered import Answered, Lines, Ticker, silent
from dragoman.evaluation.texts import read_test, tests_of
from dragoman.generator import Generator
from dragoman.score.confusion import confusion
from dragoman.score.metrics import chosen
from dragoman.text import phrasebook
from dragoman.text.phrasebook import Phrase
from dragoman.translator import Translator
from dragoman.types import Hypothesis, Tree, UserError

PORTION = 512  # lines translated between two reports of progress


def on_own_tests(
    door: Door[Any], *, names: Sequence[str] = (), beam: int | None = None, ticker: Ticker = silent
) -> Iterator[Answered]:
    """The answers to every corpus of `data.test`, each by itself."""
    recipe = door.recipe
    for corpus in tests_of(recipe):
        wanted = isinstance(door, Translator) and door.asks_for_trees
        sources, references, trees = read_test(corpus, recipe.data.direction, trees=wanted)
        way: dict[str, Any] = {"beam": beam, "trees": trees, "tag": corpus.tag}
        found = on_texts(door, sources, references, names=names, ticker=ticker, **way)
        yield replace(found, test=corpus.shown)


def on_texts(
    door: Door[Any],
    sources: Lines,
    references: Sequence[Lines],
    *,
    names: Sequence[str] = (),
    beam: int | None = None,
    trees: Sequence[Tree | None] | None = None,
    tag: str = "",
    ticker: Ticker = silent,
) -> Answered:
    """The answers of a translator or a classifier; a language model is measured by the text itself.

    `trees` of the sources go to those who ask for them, and so does their tag.
    """
    names = names or door.recipe.data.metrics
    chosen(names)  # what cannot be counted is refused now, not after the work
    if tag and not isinstance(door, Translator):
        raise UserError("--tag is for runs that translate; leave it out")
    if isinstance(door, Generator):
        return measured(door, references[0] if references else sources, names)
    if not references:
        raise UserError("evaluate needs --reference F beside --source F: the reference translations or labels")
    if isinstance(door, Classifier):
        return labelled(door, sources, references, names)
    if isinstance(door, Translator):
        wanted = trees if door.asks_for_trees else None
        found = translated(door, sources, beam=beam, trees=wanted, tag=tag, ticker=ticker)
        return Answered(sources, references, [one.text for one in found], names, {"warnings": warned(found)})
    raise TypeError(door)


def on_phrasebook(
    translator: Translator,
    split: str,
    count: int,
    *,
    names: Sequence[str] = (),
    beam: int | None = None,
    tag: str = "",
    ticker: Ticker = silent,
) -> Answered:
    """The answers to a split of the built-in corpus, and the share of right ones for each phenomenon."""
    recipe = translator.recipe
    names = names or recipe.data.metrics
    chosen(names)
    phrases = list(phrasebook.phrases(split, count, direction=recipe.data.direction))
    sources, targets = [phrase.source for phrase in phrases], [phrase.target for phrase in phrases]
    trees = [phrase.tree for phrase in phrases] if translator.asks_for_trees else None
    found = translated(translator, sources, beam=beam, trees=trees, tag=tag, ticker=ticker)
    texts = [one.text for one in found]
    about = {"warnings": warned(found), "phenomena": phenomena(phrases, texts)}
    return Answered(sources, [targets], texts, names, about)


def translated(
    translator: Translator,
    sources: Lines,
    *,
    beam: int | None,
    trees: Sequence[Tree | None] | None,
    tag: str,
    ticker: Ticker,
) -> list[Hypothesis]:
    found: list[Hypothesis] = []
    tick = ticker("translating", len(sources))
    for begun in range(0, len(sources), PORTION):
        part = slice(begun, begun + PORTION)
        wanted = trees[part] if trees is not None else None
        way: dict[str, Any] = {"beam": beam, "trees": wanted, "tag": tag, "search": {"scores": False}}
        found += translator.translate(sources[part], align=False, **way)
        tick(len(found))
    return found


def warned(found: Sequence[Hypothesis | Verdict]) -> dict[str, int]:
    """How many answers came with which warning."""
    return dict(Counter(kind for one in found for kind in kinds(one.warnings)))


def measured(generator: Generator, lines: Lines, names: Sequence[str]) -> Answered:
    if names:
        raise UserError(f"a language model has no outputs that {names[0]} could score; leave the metric out")
    found = generator.measure(lines)
    way = f"context:{generator.recipe.model['context']}|documents:{generator.recipe.data.documents}"
    values = {"loss": found.loss, "perplexity": found.perplexity, "bits_per_character": found.bits_per_character}
    unit = {"loss": "nats per token", "perplexity": "per token", "bits_per_character": "line ends counted"}
    scores = {name: {"value": value, "signature": f"{way}|unit:{unit[name]}"} for name, value in values.items()}
    about = {"tokens": found.tokens, "characters": found.characters, **scores, "warnings": {}}
    return Answered(lines, [], [], about=about)


def labelled(classifier: Classifier, sources: Lines, references: Sequence[Lines], names: Sequence[str]) -> Answered:
    """Return labels and their confusion matrix. A reference label that training did not have counts as an error."""
    found = classifier.classify(sources)
    labels, wanted = [one.label for one in found], [label.strip() for label in references[0]]
    warnings = Counter(warned(found))
    known = classifier.tokenizers.target.encode
    warnings.update("with a reference label that training did not have" for label in wanted if not known(label))
    about = {"confusion": confusion(labels, wanted), "warnings": dict(warnings - Counter())}
    return Answered(sources, [wanted, *references[1:]], labels, names or ["accuracy"], about)


def phenomena(phrases: Sequence[Phrase], texts: Lines) -> dict[str, dict[str, float]]:
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for phrase, text in zip(phrases, texts, strict=True):
        for name, (good, all_of_it) in phrasebook.judged(phrase, text).items():
            right[name] += good
            total[name] += all_of_it
    return {
        name: {"right": right[name], "total": total[name], "percent": 100 * right[name] / total[name]}
        for name in sorted(total)
    }
