"""Experiments on agreement: whether the number of a verb follows its subject or the noun next to it.

The sentences are subjects of the phrasebook, such as "the writer of the books"; the model has to add "is" or "are".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from itertools import chain
from random import Random
from typing import Any

from dragoman.io import hash_stably
from dragoman.labs.experiment import Check, Experiment, Figure, Numbers, Setup, Table, Trials, plot_bars, plot_curves
from dragoman.labs.small_models import FIRST_ID, build_small_model, fit, make_batch, measure_accuracy
from dragoman.phrasebook.english import ENGLISH_BE
from dragoman.phrasebook.lexicon import NOMINATIVE, Noun, load_lexicon
from dragoman.types import Batch

ATTRACTOR_SHARE = 0.05  # of the training sentences with "of"
DEPTHS = (1, 2, 3)  # nouns after the subject, each with "of the"
TRAINING_DEPTHS = (0, *DEPTHS)
TEST_PERCENT = 20  # of the pairs of a subject and the noun after it: they occur in the test only
VERBS = ENGLISH_BE["present"][1:]  # is, are


def inflect(noun: Noun, plural: bool) -> str:
    return noun.forms[0][plural][NOMINATIVE]


def is_test_pair(subject: Noun, second: Noun) -> bool:
    return hash_stably(f"agreement {subject.lemma} {second.lemma}".encode()) % 100 < TEST_PERCENT


@cache
def list_subjects() -> dict[Noun, list[Noun]]:
    """Return the countable nouns that can be followed by "of the", and the countable nouns that may come there."""
    possessors = load_lexicon().possessors
    countable = {noun: [other for other in others if not other.mass] for noun, others in possessors.items()}
    return {noun: others for noun, others in countable.items() if others and not noun.mass}


@cache
def number_words() -> dict[str, int]:
    """Return the token ids of all words of the experiment."""
    nouns = dict.fromkeys(chain(list_subjects(), *list_subjects().values()))
    forms = [inflect(noun, plural) for noun in nouns for plural in (False, True)]
    return {word: index for index, word in enumerate(dict.fromkeys(["the", "of", *VERBS, *forms]), FIRST_ID)}


def write_subject(random: Random, *, plural: bool, attracts: bool, depth: int, test: bool) -> list[str]:
    """Return the words of a subject with `depth` nouns after its head, all of the other number if it `attracts`.

    The pair of the first two nouns belongs to the test or to the training data.
    """
    subjects = list_subjects()
    while True:
        noun = random.choice(list(subjects))
        words = ["the", inflect(noun, plural)]
        for index in range(depth):
            fitting = [other for other in subjects[noun] if index or is_test_pair(noun, other) == test]
            fitting = [other for other in fitting if other in subjects] if index < depth - 1 else fitting
            if not fitting:
                break
            noun = random.choice(fitting)
            words += ["of", "the", inflect(noun, plural != attracts)]
        else:
            return words


def make_agreement_batch(random: Random, rows: int, *, attracts: bool | None, depth: int | None, test: bool) -> Batch:
    """Return subjects as sources and their verbs as targets. None samples as in the training data, row by row."""
    ids, sources, targets = number_words(), [], []
    for row in range(rows):
        plural = bool(row % 2)
        words = write_subject(
            random,
            plural=plural,
            attracts=random.random() < ATTRACTOR_SHARE if attracts is None else attracts,
            depth=random.choice(TRAINING_DEPTHS) if depth is None else depth,
            test=test,
        )
        sources.append([ids[word] for word in words])
        targets.append([ids[VERBS[plural]]])
    return make_batch(sources, targets)


def sample_training_batch(seed: int, step: int) -> Batch:
    random = Random(hash_stably(f"attractor {seed} {step}".encode()))
    return make_agreement_batch(random, 32, attracts=None, depth=None, test=False)


RNN: Mapping[str, Any] = {"kind": "rnn", "width": 32, "bidirectional": False, "dropout": 0.0, "attention": "none"}
VANILLA_RNN, LSTM_RNN, ATTENTIVE_RNN = "vanilla RNN", "LSTM", "LSTM with attention"
SELF_ATTENTION_MODEL = "Transformer"
ARCHITECTURES: dict[str, Mapping[str, Any]] = {
    VANILLA_RNN: {**RNN, "cell": "vanilla"},
    LSTM_RNN: {**RNN, "cell": "lstm"},
    ATTENTIVE_RNN: {**RNN, "cell": "lstm", "attention": "additive"},
    SELF_ATTENTION_MODEL: {"kind": "transformer", "width": 32, "layers": 1, "heads": 2, "dropout": 0.0},
}


def measure_attraction(condition: str, seed: int, setup: Setup) -> Numbers:
    """Train a model to add the verb; measure its accuracy with and without attractors, by depth."""
    model = build_small_model(ARCHITECTURES[condition], vocabulary=FIRST_ID + len(number_words()), seed=seed)
    steps = setup.pick(200, 1500)
    fit(model, partial(sample_training_batch, seed), steps=steps, lr=2e-3, device=setup.device)
    random = Random(hash_stably(f"attractor test {seed}".encode()))
    accuracies: dict[bool, list[float]] = {}
    for attracts in (False, True):
        tests = [make_agreement_batch(random, 400, attracts=attracts, depth=depth, test=True) for depth in DEPTHS]
        accuracies[attracts] = [measure_accuracy(model, [test], device=setup.device, position=0) for test in tests]
    drops = [100 * (plain - attracted) for plain, attracted in zip(accuracies[False], accuracies[True], strict=True)]
    return {
        "plain": accuracies[False],
        "attracted": accuracies[True],
        "drops": drops,
        "drop": sum(drops) / len(drops),
        "growth": drops[-1] - drops[0],
    }


def plot_attraction(table: Table) -> list[Figure]:
    depths = partial(plot_curves, table, DEPTHS, x_title="nouns after the subject", y_title="accuracy")
    return [
        Figure("Accuracy where all nouns after the subject have the other number", depths("attracted")),
        Figure("Accuracy where all nouns have the same number", depths("plain")),
        Figure(
            "Accuracy lost through attractors, in points, averaged over all distances",
            plot_bars(table, "drop", y_title="accuracy lost"),
        ),
    ]


def compare_drops(model: str, trials: Trials) -> float:
    """Return how much less accuracy a model loses through attractors than the vanilla RNN, in points."""
    return float(trials[VANILLA_RNN]["drop"] - trials[model]["drop"])


ATTRACTOR = Experiment(
    name="attractor",
    title="Does a nearer noun attract the verb: the writer of the books is, or are?",
    lecture="000, Pros and Cons? (of RNNs), and How to encode with proper weight?",
    claim="Remote information will receive significantly more changes, although it may be important. The writer of the "
    "books (is/are?): books is closer and writer is farther.",
    method="Sources are subjects with up to three nouns after the first, such as *the writer of the books*; the target "
    "is *is* or *are*. Of the training sentences with more than one noun, 5 % have attractors: the nouns after the "
    "subject have the other number. In all others they have the same one. In the test each case is half, with pairs "
    "of nouns that were not trained. Measured: the accuracy that attractors cost, in points. Recurrent encoders read "
    "from left to right.",
    predict="Which architecture loses most, and does it lose more if three nouns follow the subject instead of one?",
    conditions=tuple(ARCHITECTURES),
    measure=measure_attraction,
    checks=(
        Check(
            "accuracy without attractors, one noun after the subject, lowest of all architectures",
            lambda trials: min(trials[name]["plain"][0] for name in ARCHITECTURES),
            at_least=0.9,
            control=True,
        ),
        Check("accuracy that the vanilla RNN loses", lambda trials: trials[VANILLA_RNN]["drop"], at_least=10),
        Check("how much more it loses at three nouns", lambda trials: trials[VANILLA_RNN]["growth"], at_least=5),
        Check("how much less the LSTM with attention loses", partial(compare_drops, ATTENTIVE_RNN), at_least=5),
        Check("how much less the Transformer loses", partial(compare_drops, SELF_ATTENTION_MODEL), at_least=5),
    ),
    plot=plot_attraction,
    lesson="Attraction is a matter of training. After 200 steps, in the quick run, attractors cost the vanilla RNN "
    "38 points, down to chance; the LSTM there has not learned the task at all, so its loss of 0 means "
    "nothing. After 1,500 steps all architectures follow the subject, and none loses more than two points at "
    "any distance: 5 % of attractors are enough. The vanilla RNN loses nothing and the Transformer one point. "
    "The subject is always the second word here, which makes it easy to find; sentences of free form are "
    "harder.",
)

EXPERIMENTS = {experiment.name: experiment for experiment in (ATTRACTOR,)}
