"""An experiment on the neurons of feed-forward networks: which of them belong to a feature of words, such as plural.

Shapes   B rows   T tokens of a row   N tokens of a batch   F neurons   W nouns   G features   K top words of a neuron
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from dragoman.inference.predictor import eval_mode
from dragoman.inspection.neurons import record_hidden
from dragoman.labs.experiment import Check, Experiment, LabFigure, Numbers, Setup, Table, plot_curves
from dragoman.labs.small_models import build_small_model, fit
from dragoman.labs.word_corpus import load_words
from dragoman.models.base import Model
from dragoman.modules.feedforward import FeedForward
from dragoman.phrasebook.lexicon import load_lexicon

TOP_WORDS = 10  # words that activate a neuron most
DEDICATED = 0.8  # share of them that must have a feature in common
SHUFFLES = 10
TRAINED_MODEL, RANDOM_DIRECTIONS, UNTRAINED_MODEL = "trained", "trained, random neurons", "untrained"


def count_dedicated(activation_WF: Tensor, feature_WG: Tensor) -> float:
    """Return the share of neurons most of whose top words have a feature in common."""
    top_words_KF = activation_WF.topk(TOP_WORDS, dim=0).indices
    share_FG = feature_WG[top_words_KF].mean(0)
    is_active_F = activation_WF.amax(0) > 0
    return float(((share_FG.amax(1) >= DEDICATED) & is_active_F).double().mean())


def find_features(words: Sequence[str]) -> Tensor:
    """Return which of the nouns have which features, feature_WG: kinds of things, such as animals, and plural.

    Features that few or most of the words have are left out.
    """
    tags: dict[str, set[str]] = {}
    for noun in load_lexicon().nouns:
        for number, name in enumerate(("singular", "plural")):
            tags.setdefault(noun.forms[0][number][0], set()).update(noun.tags - {noun.lemma}, {name})
    names = sorted(set().union(*(tags[word] for word in words)))
    feature_WG = torch.tensor([[name in tags[word] for name in names] for word in words], dtype=torch.double)
    share_G = feature_WG.mean(0)
    return feature_WG[:, (share_G >= 0.05) & (share_G <= 0.4)]


@torch.no_grad()
def replace_first_matrices(model: Model, other: Model) -> None:
    """Replace the first matrix of each feed-forward network, whose rows are the neurons, by that of another model."""
    wide, other_wide = (
        [module.wide for module in part.modules() if isinstance(module, FeedForward)] for part in (model, other)
    )
    for matrix, other_matrix in zip(wide, other_wide, strict=True):
        matrix.load_state_dict(other_matrix.state_dict())


def measure_dedicated_neurons(condition: str, seed: int, setup: Setup) -> Numbers:
    """Return the share of neurons of a language model whose top nouns have a feature in common."""
    pairs, steps, width = setup.pick((1500, 150, 32), (20_000, 2000, 128))
    corpus = load_words(pairs)
    sizes = {"kind": "lm", "layers": 2, "width": width, "feedforward_width": 4 * width, "heads": 4, "dropout": 0.0}
    model = build_small_model(sizes, vocabulary=corpus.vocabulary, seed=seed).to(setup.device)
    if condition != UNTRAINED_MODEL:
        fit(
            model,
            lambda step: corpus.sample_batch(seed, step, pairs=32, language_model=True),
            steps=steps,
            lr=setup.pick(6e-3, 1e-3),
            warmup=steps // 8,
            device=setup.device,
        )
    if condition == RANDOM_DIRECTIONS:
        replace_first_matrices(model, build_small_model(sizes, vocabulary=corpus.vocabulary, seed=seed + 1000))
    nouns = {noun.forms[0][number][0] for noun in load_lexicon().nouns for number in (0, 1)}
    counts = Counter(word for source, _ in corpus.train[:2000] for word in source)
    words = [word for word in sorted(nouns) if counts[corpus.id_of.get(word, -1)] >= 5]
    ids_W = torch.tensor([corpus.id_of[word] for word in words])
    sum_WF, count_W1 = torch.zeros(()), torch.zeros(len(words), 1, dtype=torch.double)
    with eval_mode(model), torch.no_grad():
        for start in range(0, min(len(corpus.train), 2000), 100):
            batch = corpus.make_batch(corpus.train[start : start + 100], language_model=True)
            with record_hidden(model) as hidden:
                model(batch.to(torch.device(setup.device)))
            hidden_BTF = torch.cat(list(hidden.values()), -1).double().cpu()  # neurons of all layers
            is_word_WN = (ids_W[:, None] == batch.target_in_BT.flatten()).double()
            sum_WF = sum_WF + is_word_WN @ hidden_BTF.flatten(0, 1)
            count_W1 += is_word_WN.sum(1, keepdim=True)
    activation_WF, feature_WG = sum_WF / count_W1.clamp(min=1), find_features(words)
    generator = torch.Generator().manual_seed(seed)
    shuffled = [
        count_dedicated(activation_WF, feature_WG[torch.randperm(len(words), generator=generator)])
        for _ in range(SHUFFLES)
    ]
    found = count_dedicated(activation_WF, feature_WG)
    return {"shares": [found, sum(shuffled) / SHUFFLES], "nouns": len(words)}


def plot_memory(table: Table) -> list[LabFigure]:
    ticks = ("of the lexicon", "shuffled")
    chart = plot_curves(
        table, range(2), "shares", x_title="features", y_title="share of neurons", ticks=ticks, connected=False
    )
    return [LabFigure("Share of neurons whose top nouns have a feature in common", chart)]


FEEDFORWARD_MEMORY = Experiment(
    name="feedforward-memory",
    title="Are the neurons of a feed-forward network features of words?",
    lecture="000, Part 3.3: Dimension ascent, with a link to Geva et al. (2021)",
    claim="Suppose there are a great many global features, such as: Is it a tool to open something? x k_i is the "
    "relationship of x and feature i.",
    method="A language model of English is trained on the phrasebook. For each neuron of its feed-forward networks, "
    f"the {TOP_WORDS} nouns with the highest mean activation in 2,000 training sentences are found, of those that "
    f"occur at least five times there. The neuron is dedicated if {DEDICATED:.0%} of them have a feature of the "
    "lexicon in common, such as animal, person, food or plural. The baselines are features shuffled among the nouns; a "
    "model that has not been trained; and the trained model with random neurons, that is, with a new first matrix in "
    "each feed-forward network, which shows what the states alone bring.",
    predict="What share of the neurons is dedicated to a feature, and what share by chance?",
    conditions=(TRAINED_MODEL, RANDOM_DIRECTIONS, UNTRAINED_MODEL),
    measure=measure_dedicated_neurons,
    checks=(
        Check(
            "share of dedicated neurons of the trained model, minus the share with shuffled features",
            lambda trials: trials[TRAINED_MODEL]["shares"][0] - trials[TRAINED_MODEL]["shares"][1],
            at_least=0.1,
        ),
        Check(
            "share of dedicated neurons of the trained model, minus the share of the untrained one",
            lambda trials: trials[TRAINED_MODEL]["shares"][0] - trials[UNTRAINED_MODEL]["shares"][0],
            at_least=0.1,
        ),
        Check(
            "share of dedicated neurons of the trained model, minus the share of random neurons on the same states",
            lambda trials: trials[TRAINED_MODEL]["shares"][0] - trials[RANDOM_DIRECTIONS]["shares"][0],
            at_least=0.1,
        ),
    ),
    plot=plot_memory,
    conclusion="A quarter to a third of the neurons belong to one feature of the lexicon, such as animals or plurals, "
    "and hardly any do in an untrained model or with shuffled features. But 15 to 19 % of random neurons do too if "
    "they read the states of the trained model: more than half of what the neurons show is already in the states, "
    "where nouns of a kind are near each other. How much the neurons add, 10 to 15 points, is too near to the "
    "threshold for three seeds. Nobody has told the model about these features; they help to predict the next word. "
    "Most neurons belong to none: a feature may be a direction in which several neurons take part, and the lexicon "
    "does not have all features. Random neurons, and the last check, were added after the run; the verdict had been "
    "'confirmed'.",
)
