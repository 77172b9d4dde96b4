"""Experiments on what the layers of an encoder represent.

A probe is a linear classifier that reads a property of a word or sentence from the states of one layer. The model is
not changed by it.

Shapes   N words or sentences   C width of a state   K classes of a property
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dragoman.inference.predictor import eval_mode
from dragoman.inspection.probes import record_outputs
from dragoman.labs.experiment import Check, Experiment, Figure, Numbers, Setup, Table, Trials, plot_curves
from dragoman.labs.small_models import make_batch, train_run
from dragoman.phrasebook.generate import realize_plans
from dragoman.phrasebook.lexicon import load_lexicon

PROPERTIES = ("part of speech", "tree depth", "number of the subject")
PROBE_LAYERS = 4  # of the encoder
RIDGE = 1e-2  # L2 regularization of a probe, relative to the mean variance of a component
MAX_DEPTH = 4  # deeper words count as this deep
PROBE_SENTENCES = {"train": 600, "test": 300}
REACHED = 0.95  # fraction of the best gain from which a layer counts as having the property


class ProbeSentence(NamedTuple):
    """A source sentence with the classes of its properties: of each word, except that of the subject."""

    text: str
    part_of_speech: list[int]
    tree_depth: list[int]
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


def read_probe_sentences(split: str, count: int) -> list[ProbeSentence]:
    """Return sentences of the phrasebook whose words are their tokens, with the gold classes of their properties."""
    classes, sentences = list_parts_of_speech(), []
    for plan, source, _ in islice(realize_plans(split, count, seed=9), count):
        heads = source.list_heads(source.locate_nodes(), root=plan.root.head)
        depths = []
        for word in range(len(heads)):
            depth, head = 0, heads[word]
            while head and depth < MAX_DEPTH:
                depth, head = depth + 1, heads[head - 1]
            depths.append(depth)
        parts = [classes.get(word.lower(), classes.get(word, 0)) for word in source.words]
        sentences.append(ProbeSentence(source.text, parts, depths, int(plan.root.subject.plural)))
    return sentences


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


def measure_probing(condition: str, seed: int, setup: Setup) -> Numbers:
    """Train a translator and return the accuracy of each probe at each layer of its encoder."""
    width, kind = setup.pick(48, 256), condition.removeprefix("untrained ")
    recurrent = {"kind": "rnn", "cell": "lstm", "encoder_layers": PROBE_LAYERS, "decoder_layers": 1}
    model = recurrent if kind == "LSTM" else {"layers": PROBE_LAYERS, "decoder_layers": 1, "heads": 4}
    steps = 1 if kind != condition else setup.pick(60, 2000)
    recipe = {
        "data": {"train": {"phrasebook": setup.pick(1500, 40_000)}},
        "tokenizer": {"kind": "word", "size": 4000, "joint": False},
        "model": {**model, "width": width, "dropout": 0.1},
        "train": {"steps": steps, "tokens": setup.pick(512, 4096), "lr": 2e-3, "warmup": min(steps, 100)},
    }
    translator = train_run(recipe, condition.replace(" ", "-"), seed, setup)
    data = {}
    for split, count in PROBE_SENTENCES.items():
        sentences = read_probe_sentences(split, setup.pick(count // 3, 3 * count))
        data[split] = (sentences, collect_states(translator, sentences))
    numbers: dict[str, list[float]] = {name: [] for name in PROPERTIES}
    for layer in range(PROBE_LAYERS + 1):
        words = {split: np.concatenate(states[layer]) for split, (_, states) in data.items()}
        ends = {split: np.stack([rows[-1] for rows in states[layer]]) for split, (_, states) in data.items()}
        for name, field in (("part of speech", "part_of_speech"), ("tree depth", "tree_depth")):
            classes = {split: np.concatenate([getattr(s, field) for s in some]) for split, (some, _) in data.items()}
            numbers[name].append(measure_probe((words["train"], classes["train"]), (words["test"], classes["test"])))
        plural = {split: np.array([s.plural_subject for s in some]) for split, (some, _) in data.items()}
        numbers["number of the subject"].append(
            measure_probe((ends["train"], plural["train"]), (ends["test"], plural["test"]))
        )
    return numbers


def find_layer(accuracies: Sequence[float]) -> int:
    """Return the first layer that has most of the accuracy that the best layer gains over the embeddings."""
    goal = accuracies[0] + REACHED * (max(accuracies) - accuracies[0])
    return next(layer for layer, accuracy in enumerate(accuracies) if accuracy >= goal)


def compare_layers(model: str) -> Any:
    """Return a function that subtracts the layer of the part of speech from the layer of the subject's number."""

    def subtract(trials: Trials) -> float:
        found = trials[model]
        return find_layer(found["number of the subject"]) - find_layer(found["part of speech"])

    return subtract


def plot_probing(table: Table) -> list[Figure]:
    layers = range(PROBE_LAYERS + 1)
    return [
        Figure(
            f"Accuracy of a linear probe for the {name}, by layer (0: embeddings)",
            plot_curves(table, layers, name, x_title="layer of the encoder", y_title="accuracy"),
        )
        for name in PROPERTIES
    ]


PROBING = Experiment(
    name="probing",
    title="Do lower layers compute lower-level features?",
    lecture="002, Lecture 7: Multi-layer RNNs",
    claim="The lower RNNs should compute lower-level features and the higher RNNs should compute higher-level "
    "features.",
    method="Translators with four encoder layers are trained on the phrasebook. A linear probe reads three properties "
    "from the states of each layer: the part of speech and the depth in the dependency tree of each word, and from the "
    "last token of the sentence whether the subject of the main clause is plural. The layer of a property is the first "
    "that has 95 % of the accuracy that the best layer gains over the embeddings. A Transformer after one step of "
    "training is the baseline.",
    predict="From which layer on can the number of the subject be read at the last token? Can it be read from a model "
    "that was not trained?",
    conditions=("LSTM", "Transformer", "untrained Transformer"),
    measure=measure_probing,
    checks=(
        Check(
            "LSTM: layers between the part of speech and the number of the subject", compare_layers("LSTM"), at_least=1
        ),
        Check(
            "Transformer: layers between the part of speech and the number of the subject",
            compare_layers("Transformer"),
            at_least=1,
        ),
        Check(
            "Transformer: accuracy for the number of the subject, above that of the untrained one",
            lambda trials: (
                max(trials["Transformer"]["number of the subject"])
                - max(trials["untrained Transformer"]["number of the subject"])
            ),
            at_least=0.05,
        ),
    ),
    plot=plot_probing,
    lesson="The part of speech is nearly determined by the word itself, so it can be read from the embeddings. The "
    "number of the subject is best read one to three layers higher. But an untrained Transformer gives a "
    "probe almost as much: mixing the words at random keeps what the probe needs. So an accurate probe does "
    "not show that the model uses a feature.",
)

EXPERIMENTS = {experiment.name: experiment for experiment in (PROBING,)}
