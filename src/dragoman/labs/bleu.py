"""Experiments on BLEU: its factors, and right translations that it punishes.

Shapes   N lines   K counts of a metric
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from random import Random
from statistics import fmean

from dragoman.evaluation.figures import Chart
from dragoman.labs.experiment import Check, Experiment, LabFigure, Numbers, Setup, Table, plot_categories, plot_curves
from dragoman.metrics.metrics import METRICS
from dragoman.phrasebook.generate import generate_pairs, realize_plans, split_words
from dragoman.phrasebook.german import German
from dragoman.phrasebook.paraphrases import FRONTABLE, GERMAN, replace_clause, vary_word_order
from dragoman.types import Pair

BLEU_LECTURE = "002, Lecture 7: Evaluation"

# `paraphrases`

MAX_CANDIDATES = 1_000_000  # sentences to choose from
NEGATION, NUMBER, ADVERB = "negation dropped", "number changed", "adverb changed"
NUMBERS = ("zwei", "drei", "vier", "fünf", "sechs", "zehn")
WRONG_WORDS = {  # kind of error -> word -> the wrong word in its place; "" drops the word
    NEGATION: {
        "nicht": "",
        **{f"kein{ending}": f"ein{ending}" for ending in ("", "e", "en", "em", "er", "es")},
        **{f"Kein{ending}": f"Ein{ending}" for ending in ("", "e", "en", "em", "er", "es")},
    },
    NUMBER: dict(zip(NUMBERS, (*NUMBERS[1:], NUMBERS[0]), strict=True)),
    ADVERB: {
        **{"immer": "nie", "nie": "immer", "oft": "selten", "selten": "oft"},
        **{"Sommer": "Winter", "Winter": "Sommer", "Montag": "Freitag", "Freitag": "Montag"},
        **{"letzte": "nächste", "nächste": "letzte", "letztes": "nächstes", "nächstes": "letztes"},
    },
}


def generate_paraphrased_pairs(seed: int) -> Iterator[Pair]:
    """Yield pairs of one clause with other right translations, which begin with other constituents."""
    for plan, source, target in realize_plans("test", MAX_CANDIDATES, seed):
        if plan.clauses != (plan.root,) or plan.root.opening not in ("", *FRONTABLE[GERMAN]):
            continue
        # From the plan that begins with its subject, all others follow.
        subject_first = replace_clause(plan, 0, replace(plan.root, opening=""))
        texts = []
        for varied in (subject_first, *vary_word_order(subject_first, GERMAN)):
            german = German()
            german.write(varied)
            texts.append(german.text)
        if len(texts) > 1:
            yield Pair(source.text, target.text, alternatives=tuple(text for text in texts if text != target.text))


def make_error(text: str, kind: str) -> str | None:
    """Return the translation with one wrong word that changes its meaning; None if it has no word to change."""
    words = text.split(" ")
    for index, word in enumerate(words):
        bare = word.rstrip(".?,")
        if bare in WRONG_WORDS[kind]:
            wrong = WRONG_WORDS[kind][bare] + word[len(bare) :]
            return " ".join([*words[:index], wrong, *words[index + 1 :]]).replace("  ", " ").replace(" .", ".")
    return None


def score_lines(metric: str, texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Return the score of every single line."""
    counted = METRICS[metric].check_and_count(texts, references)
    scores: list[float] = METRICS[metric].compute_scores(counted.count_NK).tolist()
    return scores


def measure_paraphrases(condition: str, seed: int, setup: Setup) -> Numbers:
    """Score right paraphrases and wrong translations that differ from the reference in one word.

    A paraphrase is scored against the reference alone, and against all other right translations too, but never against
    itself.
    """
    candidates = ((pair, make_error(pair.target, condition)) for pair in generate_paraphrased_pairs(seed))
    cases = list(islice(((pair, wrong) for pair, wrong in candidates if wrong), setup.pick(60, 1000)))
    references = [pair.target for pair, _ in cases]
    right = [pair.alternatives[0] for pair, _ in cases]
    wrongs = [wrong for _, wrong in cases]
    numbers: dict[str, float] = {"cases": len(cases)}
    for name in ("bleu", "chrf"):
        numbers[f"{name}_right"] = METRICS[name].compute(right, [references]).value
        numbers[f"{name}_wrong"] = METRICS[name].compute(wrongs, [references]).value
        lines = zip(score_lines(name, right, [references]), score_lines(name, wrongs, [references]), strict=True)
        numbers[f"{name}_wrong_wins"] = fmean(wrong_score > right_score for right_score, wrong_score in lines)
    several = [pair for pair, _ in cases if len(pair.alternatives) > 1]
    texts, others = [pair.alternatives[0] for pair in several], [pair.alternatives[-1] for pair in several]
    one = METRICS["bleu"].compute(texts, [[pair.target for pair in several]]).value
    all_other = METRICS["bleu"].compute(texts, [[pair.target for pair in several], others]).value
    return {**numbers, "bleu_one_reference": one, "bleu_all_references": all_other}


def plot_paraphrases(table: Table) -> list[LabFigure]:
    def plot(keys: dict[str, str], y_title: str) -> Chart:
        charts = [plot_categories(table, key, y_title=title) for key, title in keys.items()]
        return replace(charts[0], series=[chart.series[0] for chart in charts], y_title=y_title)

    scores = plot({"bleu_right": "right paraphrase", "bleu_wrong": "one wrong word"}, "BLEU")
    wins = plot({"bleu_wrong_wins": "BLEU", "chrf_wrong_wins": "chrF"}, "share of sentences")
    return [
        LabFigure("BLEU of right paraphrases and of translations with one wrong word, against one reference", scores),
        LabFigure("How often the wrong translation has the higher score", wins),
    ]


PARAPHRASES = Experiment(
    name="paraphrases",
    title="Can a wrong translation have a higher BLEU than a right one?",
    lecture=BLEU_LECTURE,
    claim="BLEU is useful but imperfect. There are many valid ways to translate a sentence, so a good translation can "
    "get a poor BLEU score because it has low n-gram overlap with the human translation.",
    method="Sentences of the phrasebook with two translations: a right one with another word order, and the reference "
    "with one wrong word that changes the meaning. Both are scored by BLEU and chrF against the reference; the right "
    "ones also against a further right translation.",
    predict="In what share of sentences does the wrong translation have the higher BLEU? And the higher chrF?",
    conditions=(NEGATION, NUMBER, ADVERB),
    measure=measure_paraphrases,
    checks=(
        Check(
            "BLEU of right paraphrases, highest of all groups",
            lambda trials: max(trial["bleu_right"] for trial in trials.values()),
            at_most=60.0,
        ),
        Check(
            "share of sentences in which the wrong translation has the higher BLEU, lowest of all groups",
            lambda trials: min(trial["bleu_wrong_wins"] for trial in trials.values()),
            at_least=0.5,
        ),
        Check(
            "gain of BLEU of the right paraphrases by a further reference, mean of all groups",
            lambda trials: fmean(t["bleu_all_references"] - t["bleu_one_reference"] for t in trials.values()),
            at_least=5.0,
        ),
    ),
    plot=plot_paraphrases,
    conclusion="BLEU counts shared n-grams. A moved constituent breaks many of them, a dropped negation or a changed "
    "number few, so the wrong translation usually wins. By chrF it wins as often, in 97 to 99 % of the sentences. "
    "Further references help only as far as they contain the n-grams of the new order.",
)

# `bleu-parts`

LENGTHS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)  # of the outputs, relative to the references
UNCHANGED = LENGTHS[:4]  # share of words that are not swapped or replaced
RESIZED, SWAPPED, REPLACED = "shortened or padded", "words swapped", "words replaced"


def change_words(words: list[str], condition: str, amount: float, random: Random) -> list[str]:
    """Return words with another length (`amount` is relative), or with a share of 1 - `amount` exchanged."""
    if condition == RESIZED:
        size = max(round(amount * len(words)), 1)
        return [*words[:size], *random.choices(words, k=max(size - len(words), 0))]
    changed = list(words)
    for index in range(len(words)):
        if random.random() >= amount:
            other = random.randrange(len(words)) if condition == SWAPPED else index
            changed[index], changed[other] = changed[other], changed[index] if condition == SWAPPED else "und"
    return changed


def measure_parts(condition: str, seed: int, setup: Setup) -> Numbers:
    """Compare BLEU with the product of its brevity penalty and the geometric mean of its precisions."""
    metric = METRICS["bleu"]
    assert metric.decompose is not None
    pairs = generate_pairs("test", setup.pick(100, 1000), seed=seed)
    references = [" ".join(split_words(pair.target)) for pair in pairs]
    random = Random(seed)
    numbers: dict[str, list[float]] = {name: [] for name in ("bleu", "penalty", "precision", "error")}
    for amount in LENGTHS if condition == RESIZED else UNCHANGED:
        texts = [" ".join(change_words(line.split(), condition, amount, random)) for line in references]
        counted = metric.check_and_count(texts, [references])
        parts = metric.decompose(counted.count_NK.sum(0))
        precision = math.exp(fmean(math.log(value) for value in parts["precisions"]))
        numbers["bleu"].append(counted.value)
        numbers["penalty"].append(parts["brevity_penalty"])
        numbers["precision"].append(precision)
        numbers["error"].append(abs(counted.value - parts["brevity_penalty"] * precision))
    return dict(numbers)


def plot_parts(table: Table) -> list[LabFigure]:
    ticks = [f"{amount:g}" for amount in LENGTHS]
    charts = {
        key: plot_curves(table, LENGTHS, key, x_title="length or unchanged share", y_title=title, ticks=ticks)
        for key, title in (("bleu", "BLEU"), ("penalty", "brevity penalty"), ("precision", "mean precision"))
    }
    return [
        LabFigure("BLEU", charts["bleu"]),
        LabFigure("Brevity penalty", charts["penalty"]),
        LabFigure("Geometric mean of the precisions, in per cent", charts["precision"]),
    ]


BLEU_PARTS = Experiment(
    name="bleu-parts",
    title="What does BLEU consist of?",
    lecture=BLEU_LECTURE,
    claim="BLEU compares the machine-written translation to one or several human-written translations, and computes a "
    "similarity score.",
    method="References of the phrasebook are shortened or padded, their words swapped or replaced. The product of a "
    "penalty for short outputs and the geometric mean of the four n-gram precisions is compared with the metric.",
    predict="The first half of every reference: which precision does it have, and which BLEU?",
    conditions=(RESIZED, SWAPPED, REPLACED),
    measure=measure_parts,
    checks=(
        Check(
            "largest difference between BLEU and the product of its parts",
            lambda trials: max(max(trial["error"]) for trial in trials.values()),
            at_most=1e-6,
        ),
        Check(
            "least precision of beginnings of the references",
            lambda trials: min(trials[RESIZED]["precision"][:4]),
            at_least=100 - 1e-6,
        ),
        Check("brevity penalty of half the length", lambda trials: trials[RESIZED]["penalty"][1], at_most=0.5),
        Check("brevity penalty of 1.5 times the length", lambda trials: trials[RESIZED]["penalty"][-1], at_least=1.0),
    ),
    plot=plot_parts,
    conclusion="The parts give the metric to rounding. The beginning of a reference has a precision of 100 %, so only "
    "the brevity penalty punishes what is missing; superfluous words are punished by the precisions alone.",
    law=True,
)
