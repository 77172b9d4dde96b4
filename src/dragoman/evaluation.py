"""A run against references: scores with signatures, and, on the phrasebook, phenomenon by phenomenon.

What is scored is a pair of files, a split of the phrasebook, or the corpora that the recipe names under `data.test`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from dragoman.classifier import Classifier
from dragoman.config import CorpusSettings, Recipe
from dragoman.door import Door, kinds
from dragoman.generator import Generator
from dragoman.score.confusion import confusion, drawn
from dragoman.score.metrics import METRICS, of_answers
from dragoman.text import phrasebook
from dragoman.text.corpus import read_lines, read_pairs
from dragoman.text.phrasebook import Phrase
from dragoman.text.trees import Grove
from dragoman.translator import Translator
from dragoman.types import Hypothesis, Mistake, Score, Tree


def read_texts(source: Path, references: Sequence[Path]) -> tuple[list[str], list[list[str]]]:
    """The lines of the source and of each reference, which must belong together line by line."""
    sources = list(read_lines(source))
    if not sources:
        raise Mistake(f"{source} is empty")
    texts = [list(read_lines(path)) for path in references]
    for path, lines in zip(references, texts, strict=True):
        if len(lines) != len(sources):
            raise Mistake(f"{source} has {len(sources)} lines but {path} has {len(lines)}; they must belong together")
    return sources, texts


def read_trees(conllu: Path, sources: Sequence[str], name: Path) -> list[Tree | None]:
    """The trees of these sources, which came from the file `name`."""
    grove = Grove(conllu, str(name))
    trees = [grove.tree_of(line) for line in sources]
    grove.end()
    return trees


def tests_of(recipe: Recipe) -> Sequence[CorpusSettings]:
    """The corpora that the recipe keeps to test on."""
    if not recipe.data.test:
        raise Mistake("the run has no data.test; name what to score it on: --source F and --reference F")
    return recipe.data.test


def read_test(
    corpus: CorpusSettings, direction: str, *, trees: bool = False
) -> tuple[list[str], list[list[str]], list[Tree | None]]:
    """The sources of a corpus, one or several references (the target, or the JSONL keys that `references` names), and,
    if they are wanted, the trees of the sources."""
    source, target = corpus.keys
    reads = [corpus.model_copy(update={"keys": (source, key)}) for key in corpus.references or [target]]
    sides = [list(read_pairs(one, split="test", direction=direction, trees=trees)) for one in reads]
    references = [[pair.target for pair in pairs] for pairs in sides]
    return [pair.source for pair in sides[0]], references, [pair.tree for pair in sides[0]]


def on_own_tests(door: Door[Any], *, names: Sequence[str] = (), beam: int | None = None) -> Iterator[dict[str, Any]]:
    """The scores on every corpus of `data.test`, each by itself."""
    recipe = door.recipe
    for corpus in tests_of(recipe):
        wanted = isinstance(door, Translator) and door.asks_for_trees
        sources, references, trees = read_test(corpus, recipe.data.direction, trees=wanted)
        found = against_references(door, sources, references, names=names, beam=beam, trees=trees)
        yield {"test": corpus.shown, **found}


def against_references(
    door: Door[Any],
    sources: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    names: Sequence[str] = (),
    beam: int | None = None,
    trees: Sequence[Tree | None] | None = None,
) -> dict[str, Any]:
    """The scores of a translator or a classifier; a language model is measured by the text itself.

    `trees` of the sources go to those who ask for them.
    """
    names = names or door.recipe.data.metrics
    if isinstance(door, Generator):
        return measured(door, references[0] if references else sources, names)
    if not references:
        raise Mistake("evaluate needs --reference F beside --source F: what the right answers are")
    if isinstance(door, Classifier):
        return labelled(door, sources, references, names)
    if isinstance(door, Translator):
        wanted = trees if door.asks_for_trees else None
        return scored(door.translate(sources, beam=beam, trees=wanted), references, names)
    raise TypeError(door)


def measured(generator: Generator, lines: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    if names:
        raise Mistake(f"a language model gives no answers that {names[0]} could judge; leave the metric out")
    found = generator.measure(lines)
    way = f"context:{generator.recipe.model['context']}|documents:{generator.recipe.data.documents}"
    values = {"loss": found.loss, "perplexity": found.perplexity, "bits_per_character": found.bits_per_character}
    unit = {"loss": "nats per token", "perplexity": "per token", "bits_per_character": "line ends counted"}
    scores = {name: {"value": value, "signature": f"{way}|unit:{unit[name]}"} for name, value in values.items()}
    return {"lines": found.lines, "tokens": found.tokens, "characters": found.characters, **scores, "warnings": {}}


def labelled(
    classifier: Classifier, sources: Sequence[str], references: Sequence[Sequence[str]], names: Sequence[str]
) -> dict[str, Any]:
    """Accuracy and who was taken for whom. A right label that training never saw counts as a mistake, and is said."""
    found = classifier.classify(sources)
    labels, wanted = [one.label for one in found], [label.strip() for label in references[0]]
    warnings = Counter(kind for one in found for kind in kinds(one.warnings))
    known = classifier.tokenizers.target.encode
    warnings.update("with a right label that training did not have" for label in wanted if not known(label))
    scores = of_answers(labels, [wanted, *references[1:]], names or ["accuracy"])
    table = confusion(labels, wanted)
    return {"lines": len(found), **as_dict(scores), "confusion": table, "warnings": dict(warnings - Counter())}


def on_phrasebook(
    translator: Translator, split: str, count: int, *, names: Sequence[str] = (), beam: int | None = None
) -> dict[str, Any]:
    """The ordinary scores on a split of the built-in corpus, and the share of right answers for each phenomenon."""
    recipe = translator.recipe
    phrases = list(phrasebook.phrases(split, count, direction=recipe.data.direction))
    trees = [phrase.tree for phrase in phrases] if translator.asks_for_trees else None
    found = translator.translate([phrase.source for phrase in phrases], beam=beam, trees=trees)
    scores = scored(found, [[phrase.target for phrase in phrases]], names or recipe.data.metrics)
    return {**scores, "phenomena": phenomena(phrases, [one.text for one in found])}


def scored(
    found: Sequence[Hypothesis], references: Sequence[Sequence[str]], names: Sequence[str] = ()
) -> dict[str, Any]:
    """Scores of the answers, and how many of these came with which warning."""
    warnings = Counter(kind for one in found for kind in kinds(one.warnings))
    scores = of_answers([one.text for one in found], references, names)
    return {"lines": len(found), **as_dict(scores), "warnings": dict(warnings)}


def phenomena(phrases: Sequence[Phrase], texts: Sequence[str]) -> dict[str, dict[str, float]]:
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


def as_dict(scores: Sequence[Score]) -> dict[str, Any]:
    return {score.name: {"value": score.value, "signature": score.signature} for score in scores}


def table(results: Sequence[dict[str, Any]]) -> Text:
    """One row for each score of each run. Signatures are not broken, however narrow the terminal: people copy them."""
    rows = [["run", "test", "score", "value", "how it is counted"]]
    for result in results:
        scores = [
            [SHOWN.get(name, name), f"{held['value']:.{DIGITS.get(name, 2)}f}", held["signature"]]
            for name, held in result.items()
            if isinstance(held, dict) and "signature" in held
        ]
        counts = result.get("phenomena", {}).items()
        scores += [[name, f"{c['percent']:.1f} %", f"{c['right']} of {c['total']} right"] for name, c in counts]
        rows += [[result["run"], result.get("test", ""), *score] for score in scores]
    columns = list(zip(*rows, strict=True))
    told = [column for column in columns[:2] if len(set(column[1:])) > 1]  # a column that is all the same tells nothing
    shown = list(zip(*told, *columns[2:], strict=True))
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    lines += [f"\n{drawn(result['confusion'])}" for result in results if "confusion" in result]
    return Text("\n".join(lines), no_wrap=True, overflow="ignore")


SHOWN = {**{name: metric.shown for name, metric in METRICS.items()}, "bits_per_character": "bits per character"}
DIGITS = {"loss": 4, "bits_per_character": 4}  # behind the point; others have 2
