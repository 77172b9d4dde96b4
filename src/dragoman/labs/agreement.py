"""Experiments on agreement: whether the number of a verb follows its subject or the noun next to it.

The sentences are beginnings such as "near the lamps the old writer of the books"; the model has to add "is" or "are".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import chain
from random import Random
from typing import Any

from dragoman.io import hash_stably
from dragoman.labs.experiment import (
    Check,
    Experiment,
    LabFigure,
    Numbers,
    Setup,
    Table,
    Trials,
    plot_categories,
    plot_curves,
)
from dragoman.labs.small_models import FIRST_ID, build_small_model, fit, make_batch, measure_accuracy
from dragoman.phrasebook.english import ENGLISH_BE
from dragoman.phrasebook.lexicon import NOMINATIVE, Noun, load_lexicon
from dragoman.types import Batch

ATTRACTOR_SHARE = 0.01  # of the training sentences with nouns after the subject
NOUNS_AFTER = (1, 2, 4, 6)  # nouns after the subject, each with a preposition
QUICK_NOUNS_AFTER = (1, 2)
MOST_NOUNS_BEFORE = 2  # nouns before the subject, each with a preposition; half of them are plural
ADJECTIVE_SHARE = 0.5  # of the nouns
TEST_PERCENT = 20  # of the pairs of a subject and the noun after it: they occur in the test only
VERBS = ENGLISH_BE["present"][1:]  # is, are
NOUN_PREPOSITIONS = ("near", "behind")


def inflect(noun: Noun, plural: bool) -> str:
    return noun.forms[0][plural][NOMINATIVE]


def is_test_pair(subject: Noun, second: Noun) -> bool:
    return hash_stably(f"agreement {subject.lemma} {second.lemma}".encode()) % 100 < TEST_PERCENT


@cache
def list_nouns() -> list[Noun]:
    """Return the countable nouns of the lexicon."""
    return [noun for noun in load_lexicon().nouns if not noun.mass]


@cache
def list_adjectives() -> list[str]:
    return [adjective.lemma for adjective in load_lexicon().adjectives]


@cache
def assign_word_ids() -> dict[str, int]:
    """Return the token ids of all words of the experiment."""
    forms = (inflect(noun, plural) for noun in list_nouns() for plural in (False, True))
    words = dict.fromkeys(chain(("the", "of"), NOUN_PREPOSITIONS, VERBS, list_adjectives(), forms))
    return {word: index for index, word in enumerate(words, FIRST_ID)}


def write_noun_phrase(random: Random, noun: Noun, *, plural: bool) -> list[str]:
    adjectives = [random.choice(list_adjectives())] if random.random() < ADJECTIVE_SHARE else []
    return ["the", *adjectives, inflect(noun, plural)]


def write_subject(random: Random, *, plural: bool, attracts: bool, depth: int, test: bool) -> list[str]:
    """Return the words before the verb, with `depth` nouns after the subject, all of the other number if it `attracts`.

    Nouns before the subject have a random number. So neither the first noun nor any other position tells the number of
    the verb: the subject is the noun without a preposition. Its pair with the noun after it belongs to the test or to
    the training data.
    """
    nouns = list_nouns()
    subject, *after = random.choices(nouns, k=1 + depth)
    while after and is_test_pair(subject, after[0]) != test:
        subject, after[0] = random.choices(nouns, k=2)
    words = []
    for noun in random.choices(nouns, k=random.randint(0, MOST_NOUNS_BEFORE)):
        words += [random.choice(NOUN_PREPOSITIONS), *write_noun_phrase(random, noun, plural=random.random() < 0.5)]
    words += write_noun_phrase(random, subject, plural=plural)
    for noun in after:
        preposition = random.choice(("of", *NOUN_PREPOSITIONS))
        words += [preposition, *write_noun_phrase(random, noun, plural=plural != attracts)]
    return words


def make_agreement_batch(
    random: Random, rows: int, *, attracts: bool | None, depths: Sequence[int], test: bool
) -> Batch:
    """Return sentences without their verbs as sources, and the verbs as targets; every other one is plural.

    With `attracts=None`, attractors are as rare as in training. The number of nouns after the subject is one of
    `depths`.
    """
    ids, sources, targets = assign_word_ids(), [], []
    for row in range(rows):
        plural = bool(row % 2)
        words = write_subject(
            random,
            plural=plural,
            attracts=random.random() < ATTRACTOR_SHARE if attracts is None else attracts,
            depth=random.choice(depths),
            test=test,
        )
        sources.append([ids[word] for word in words])
        targets.append([ids[VERBS[plural]]])
    return make_batch(sources, targets)


def sample_training_batch(seed: int, longest: int, step: int) -> Batch:
    """Return the batch of a training step, with up to `longest` nouns after the subject."""
    random = Random(hash_stably(f"attractor {seed} {step}".encode()))
    return make_agreement_batch(random, 32, attracts=None, depths=range(longest + 1), test=False)


RNN: Mapping[str, Any] = {"kind": "rnn", "width": 32, "bidirectional": False, "dropout": 0.0, "attention": "none"}
VANILLA_RNN, GRU_RNN, LSTM_RNN, ATTENTIVE_RNN = "vanilla RNN", "GRU", "LSTM", "LSTM with attention"
SELF_ATTENTION_MODEL = "Transformer"
AGREEMENT_MODELS: dict[str, Mapping[str, Any]] = {
    VANILLA_RNN: {**RNN, "cell": "vanilla"},
    GRU_RNN: {**RNN, "cell": "gru"},
    LSTM_RNN: {**RNN, "cell": "lstm"},
    ATTENTIVE_RNN: {**RNN, "cell": "lstm", "attention": "additive"},
    SELF_ATTENTION_MODEL: {"kind": "transformer", "width": 32, "layers": 1, "heads": 2, "dropout": 0.0},
}


def measure_attraction(condition: str, seed: int, setup: Setup) -> Numbers:
    """Train a model to add the verb; measure its accuracy with and without attractors, by depth."""
    model = build_small_model(AGREEMENT_MODELS[condition], vocabulary=FIRST_ID + len(assign_word_ids()), seed=seed)
    depths, steps = setup.pick((QUICK_NOUNS_AFTER, 200), (NOUNS_AFTER, 1500))
    sample = partial(sample_training_batch, seed, depths[-1])
    fit(model, sample, steps=steps, lr=setup.pick(1e-2, 2e-3), device=setup.device)
    random = Random(hash_stably(f"attractor test {seed}".encode()))
    accuracies: dict[bool, list[float]] = {}
    for attracts in (False, True):
        tests = [make_agreement_batch(random, 400, attracts=attracts, depths=[depth], test=True) for depth in depths]
        accuracies[attracts] = [measure_accuracy(model, [test], device=setup.device, position=0) for test in tests]
    drops = [100 * (plain - attracted) for plain, attracted in zip(accuracies[False], accuracies[True], strict=True)]
    return {
        "depths": list(depths),
        "plain": accuracies[False],
        "attracted": accuracies[True],
        "drops": drops,
        "drop": sum(drops) / len(drops),
        "growth": drops[-1] - drops[0],
    }


def plot_attraction(table: Table) -> list[LabFigure]:
    curves = partial(plot_curves, table, "depths", x_title="nouns after the subject", y_title="accuracy")
    return [
        LabFigure("Accuracy where all nouns after the subject have the other number", curves("attracted")),
        LabFigure("Accuracy where all nouns after the subject have the same number", curves("plain")),
        LabFigure(
            "Accuracy lost through attractors, in points, averaged over all distances",
            plot_categories(table, "drop", y_title="accuracy lost"),
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
    method="Sources are beginnings of sentences such as *near the lamps the old writer of the books*; the target is "
    "*is* or *are*. Up to two nouns with a preposition come before the subject, up to six (quick: two) after it, and "
    "half of all nouns have an adjective, so that the subject may be at any position. Nouns before the subject have a "
    "random number. Of the training sentences with nouns after the subject, 1 % have attractors: all those nouns have "
    "the other number. In all others they have the same one. The test has as many sentences with attractors as "
    "without, with pairs of nouns that were not trained. Measured: the accuracy that attractors cost, in points. "
    "Recurrent encoders read from left to right.",
    predict="Which architecture loses most, and does it lose more if six nouns follow the subject instead of one?",
    conditions=tuple(AGREEMENT_MODELS),
    measure=measure_attraction,
    checks=(
        Check(
            "accuracy without attractors, one noun after the subject, lowest of all architectures",
            lambda trials: min(trials[name]["plain"][0] for name in AGREEMENT_MODELS),
            at_least=0.9,
            control=True,
        ),
        Check("accuracy that the vanilla RNN loses", lambda trials: trials[VANILLA_RNN]["drop"], at_least=10),
        Check(
            "how much more it loses at the longest distance than at the shortest",
            lambda trials: trials[VANILLA_RNN]["growth"],
            at_least=5,
        ),
        Check("how much less the LSTM with attention loses", partial(compare_drops, ATTENTIVE_RNN), at_least=5),
        Check("how much less the Transformer loses", partial(compare_drops, SELF_ATTENTION_MODEL), at_least=5),
    ),
    plot=plot_attraction,
    conclusion="Attractors are so rare in training that the number of the nearest noun is nearly always right, and "
    "that is what most models learn. Where all nouns after the subject agree, every architecture is right. Where they "
    "do not, the vanilla RNN and the LSTM follow them in almost all sentences, already after one noun, so that "
    "distance cannot make it worse. The Transformer is right in a quarter of the sentences after one noun and in 3 to "
    "4 % after six; so distance matters even to attention. With attention, two of three LSTMs are right in half of "
    "the sentences, which guessing would be too, and one in all; of three GRUs, two are right in half. Three seeds do "
    "not settle by how much attention helps an LSTM. A first version, with the subject always in second place, at "
    "most three nouns and 5 % of attractors, told nothing: after 1,500 steps all architectures were right in 98 % of "
    "the sentences or more. So the training data matters as much as the architecture. All models have the same "
    "learning rate.",
)
