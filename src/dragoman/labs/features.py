"""Experiments on what the layers of an encoder represent.

A probe is a linear classifier that reads a property of a word or sentence from the states of one layer. The model is
not changed by it.

Shapes   N words or sentences   C width of a state   K classes of a property
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dragoman.inference.predictor import eval_mode
from dragoman.inspection.probes import record_outputs
from dragoman.labs.experiment import Check, Experiment, LabFigure, Numbers, Setup, Table, Trials, plot_curves
from dragoman.labs.small_models import make_batch, train_run
from dragoman.phrasebook.generate import convert_plans
from dragoman.phrasebook.lexicon import load_lexicon
from dragoman.phrasebook.realization import Realizer, SentencePlan

PART_OF_SPEECH, PART_BEFORE, TREE_DEPTH, SUBJECT_NUMBER = PROBED_PROPERTIES = (
    "part of speech",
    "part of speech of the word before",
    "tree depth",
    "number of the subject",
)
# Properties that are compared: both of the first are properties of the word itself, those of the second of other words.
LOW_HIGH_PAIRS = ((PART_OF_SPEECH, TREE_DEPTH), (PART_BEFORE, SUBJECT_NUMBER))
PROBED_MODELS = ("LSTM", "Transformer")
PROBE_LAYERS = 4  # of the encoder
RIDGE = 1e-2  # L2 regularization of a probe, relative to the mean variance of a component
MAX_DEPTH = 4  # deeper words count as this deep
PROBE_SENTENCES = {"train": 600, "test": 300}
PROBE_SEED = 9  # of the sentences; the models are trained on those of another seed
SHARE_OF_GAIN = 0.95  # fraction of the best gain from which a layer counts as having the property
LEAST_GAIN = 0.05  # of the best layer over the most frequent class; below, no layer counts as having the property


class ProbeSentence(NamedTuple):
    """A source sentence with the classes of its properties: of each word, except that of the subject."""

    text: str
    part_of_speech: list[int]
    tree_depth: list[int]
    main_verb: int  # position of its last word, at which the number of the subject is probed
    plural_subject: int


@cache
def list_parts_of_speech() -> dict[str, int]:
    """Return the class of every English form of the phrasebook: 1 noun, 2 verb, 3 adjective; all others are 0."""
    lexicon = load_lexicon()
    classes: dict[str, int] = {}
    for adjective in lexicon.adjectives:
        classes |= dict.fromkeys((*adjective.positive[:1], *adjective.comparative[0].split()), 3)
    for frame in lexicon.all_frames:
        verb = frame.verb
        classes |= dict.fromkeys((*verb.english_present, verb.english_past, verb.english_participle), 2)
    for noun in lexicon.nouns:
        classes |= dict.fromkeys((form for forms in noun.forms[0] for form in forms), 1)
    return classes


def analyse_plan(plan: SentencePlan, source: Realizer, _target: Realizer) -> ProbeSentence | None:
    """Return a source sentence with its properties; None if a word of its main clause agrees with the subject.

    English verbs agree in the present and perfect, and "to be" in the past as well. Elsewhere, the number has to come
    from the subject, which neither the verb nor an auxiliary repeats.
    """
    root, classes = plan.root, list_parts_of_speech()
    if root.verb is None or root.tense not in ("past", "future"):
        return None
    positions = source.locate_nodes()
    heads, depths = source.list_heads(positions, root=root.head), []
    for word in range(len(heads)):
        depth, head = 0, heads[word]
        while head and depth < MAX_DEPTH:
            depth, head = depth + 1, heads[head - 1]
        depths.append(depth)
    parts = [classes.get(word.lower(), classes.get(word, 0)) for word in source.words]
    return ProbeSentence(source.text, parts, depths, positions[root.head], int(root.subject.plural))


def collect_states(translator: Any, sentences: Sequence[ProbeSentence]) -> list[list[NDArray[np.float64]]]:
    """Return the states of each sentence, state_NC, for each layer of the encoder; layer 0 has the embeddings."""
    by_layer: list[list[NDArray[np.float64]]] = [[] for _ in range(PROBE_LAYERS + 1)]
    for start in range(0, len(sentences), 64):
        ids = translator.tokenizers.source.encode_all([one.text for one in sentences[start : start + 64]])
        batch = make_batch(ids, ids).to(translator.device)
        with eval_mode(translator.model), torch.no_grad(), record_outputs(translator.model) as outputs:
            translator.model(batch)
        for layer, states in enumerate(by_layer):
            [state_BSC] = outputs["encoder", layer]
            states += [row_SC[: len(row)].double().cpu().numpy() for row_SC, row in zip(state_BSC, ids)]
    return by_layer


def measure_probe(
    train: tuple[NDArray[np.float64], NDArray[np.int64]], test: tuple[NDArray[np.float64], NDArray[np.int64]]
) -> float:
    """Return the accuracy on `test` of a linear classifier of states, fitted to `train` by ridge regression."""
    state_NC, class_N = train
    mean_C = state_NC.mean(0)

    def add_bias(values_NC: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([values_NC - mean_C, np.ones((len(values_NC), 1))], 1)

    x_NC, target_NK = add_bias(state_NC), np.eye(class_N.max() + 1)[class_N]
    ridge = RIDGE * len(x_NC) * state_NC.var(0).mean() * np.eye(x_NC.shape[1])
    weight_CK = np.linalg.solve(x_NC.T @ x_NC + ridge, x_NC.T @ target_NK)
    return float(((add_bias(test[0]) @ weight_CK).argmax(1) == test[1]).mean())


def select_states(
    name: str, sentences: Sequence[ProbeSentence], states: Sequence[NDArray[np.float64]]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the states from which a property is read, state_NC, and its classes, class_N.

    There are as many plural subjects as others, which are more frequent in the phrasebook.
    """
    if name == SUBJECT_NUMBER:
        verb_NC = np.stack([rows[one.main_verb] for rows, one in zip(states, sentences)])
        plural_N = np.array([one.plural_subject for one in sentences])
        plural, singular = np.flatnonzero(plural_N), np.flatnonzero(plural_N == 0)
        kept = np.concatenate([plural, singular[: len(plural)]])
        return verb_NC[kept], plural_N[kept]
    if name == PART_BEFORE:
        parts = [one.part_of_speech[:-1] for one in sentences]
        return np.concatenate([rows[1:] for rows in states]), np.concatenate(parts)
    classes = [one.tree_depth if name == TREE_DEPTH else one.part_of_speech for one in sentences]
    return np.concatenate(states), np.concatenate(classes)


def measure_probing(condition: str, seed: int, setup: Setup) -> Numbers:
    """Train a translator and return the accuracy of each probe at each layer of its encoder.

    The numbers called "majority" are the accuracies of the most frequent class, by property.
    """
    width, model_name = setup.pick(48, 128), condition.removeprefix("untrained ")
    recurrent = {"kind": "rnn", "cell": "lstm", "encoder_layers": PROBE_LAYERS, "decoder_layers": 1}
    model = recurrent if model_name == "LSTM" else {"layers": PROBE_LAYERS, "decoder_layers": 1, "heads": 4}
    steps = 1 if model_name != condition else setup.pick(100, 500)
    recipe = {
        "data": {"train": {"phrasebook": setup.pick(1500, 20_000)}},
        "tokenizer": {"kind": "word", "size": 4000, "joint": False},
        "model": {**model, "width": width, "dropout": 0.1},
        "train": {"steps": steps, "tokens": setup.pick(512, 1024), "optimizer": "muon", "lr": setup.pick(2e-2, 1e-2)}
        | {"warmup": min(steps, 50), "schedule": "cosine"},
    }
    translator = train_run(recipe, condition.replace(" ", "-"), seed, setup)
    data = {}
    for split, count in PROBE_SENTENCES.items():
        sentences = list(convert_plans(analyse_plan, split, setup.pick(count, 6 * count), PROBE_SEED, "en-de"))
        data[split] = (sentences, collect_states(translator, sentences))
    numbers: dict[str, list[float]] = {name: [] for name in (*PROBED_PROPERTIES, "majority")}
    for name in PROBED_PROPERTIES:
        for layer in range(PROBE_LAYERS + 1):
            train, test = (select_states(name, sentences, states[layer]) for sentences, states in data.values())
            numbers[name].append(measure_probe(train, test))
        numbers["majority"].append(float((test[1] == np.bincount(train[1]).argmax()).mean()))
    return numbers


def find_layer(numbers: Numbers, name: str) -> float:
    """Return the first layer that has most of the accuracy that the best layer gains over the most frequent class.

    If even the best layer gains next to nothing, no layer has the property: NaN.
    """
    majority, accuracies = numbers["majority"][PROBED_PROPERTIES.index(name)], numbers[name]
    gain = max(accuracies) - majority
    if gain < LEAST_GAIN:
        return math.nan
    return next(layer for layer, accuracy in enumerate(accuracies) if accuracy >= majority + SHARE_OF_GAIN * gain)


def compare_layers(model: str, low: str, high: str) -> Callable[[Trials], float]:
    """Return the function that subtracts the layer of a lower-level property from that of a higher-level one."""
    return lambda trials: find_layer(trials[model], high) - find_layer(trials[model], low)


def compare_with_untrained(model: str) -> Callable[[Trials], float]:
    """Return the function that tells how much better the number of the subject can be read from a trained model."""
    return lambda trials: max(trials[model][SUBJECT_NUMBER]) - max(trials[f"untrained {model}"][SUBJECT_NUMBER])


def plot_probing(table: Table) -> list[LabFigure]:
    layers = range(PROBE_LAYERS + 1)
    return [
        LabFigure(
            f"Accuracy of a linear probe for the {name}, by layer (0: embeddings)",
            plot_curves(table, layers, name, x_title="layer of the encoder", y_title="accuracy"),
        )
        for name in PROBED_PROPERTIES
    ]


PROBING = Experiment(
    name="probing",
    title="Do lower layers compute lower-level features?",
    lecture="002, Lecture 7: Multi-layer RNNs",
    claim="The lower RNNs should compute lower-level features and the higher RNNs should compute higher-level "
    "features.",
    method="Translators with four encoder layers are trained on the phrasebook. A linear probe reads properties from "
    "the states of each layer: the part of speech of each word and of the word before it, which are low-level "
    "features; the depth of each word in the dependency tree; and whether the subject of the main clause is plural. "
    "The number of the subject is read at the main verb, in sentences in which no verb form shows it, such as those in "
    "the past tense: the English verb does not tell it, but the German one needs it. The layer of a property is the "
    "first that has 95 % of the accuracy that the best layer gains over the most frequent class; there is none if that "
    "gain is below 0.05. The number of the subject cannot be read from the embedding of the verb, whatever its level: "
    "so it is compared with the part of speech of the word before, a property of another word as well, and tree depth, "
    "which can partly be guessed from the word itself, with the part of speech of the word. Models after one step of "
    "training are the control.",
    predict="From which layer on can the number of the subject be read at the verb? Can it be read from a model that "
    "was not trained?",
    conditions=tuple(f"{prefix}{model}" for model in PROBED_MODELS for prefix in ("", "untrained ")),
    measure=measure_probing,
    checks=(
        *(
            Check(
                f"{model}: layers from the {low} to the {high}",
                compare_layers(model, low, high),
                at_least=1,
            )
            for model in PROBED_MODELS
            for low, high in LOW_HIGH_PAIRS
        ),
        *(
            Check(
                f"{model}: accuracy for the number of the subject, above that of the untrained one",
                compare_with_untrained(model),
                at_least=0.05,
                control=True,
            )
            for model in PROBED_MODELS
        ),
    ),
    plot=plot_probing,
    conclusion="The number of the subject is learned: in the embedding of the verb it is at chance, and it is read "
    "best from the third or fourth layer of the trained models (accuracy 0.83 in the LSTM, 0.74 in the Transformer), "
    "hardly from the untrained Transformer, and with 0.60 to 0.64 from the untrained LSTM. In the Transformer, the "
    "part of speech is read best from the lowest layers and the tree depth from the highest. But the part of speech "
    "of the word before, a low-level feature of another word, comes nearly as late as the number of the subject: the "
    "layer of a feature depends on where its information comes from, not only on its level. In the LSTM, part of "
    "speech and tree depth are read from the same layer in two of three seeds.",
)
