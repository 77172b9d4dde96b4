"""Experiments on the history of machine translation: statistical and neural systems, depth, simple baselines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from dragoman.labs.experiment import Check, Experiment, LabFigure, Numbers, Setup, Table, plot_categories, plot_curves
from dragoman.labs.small_translators import (
    LSTM_ATTENTION,
    NO_ATTENTION,
    SMT,
    SYSTEMS,
    TRANSFORMER,
    list_pairs,
    score_texts,
    train_translator,
    translate_texts,
)
from dragoman.phrasebook.generate import split_words
from dragoman.types import Pair

DEV_PAIRS = 100  # they choose the best checkpoint, and the weights of the statistical system
QUICK_SIZES, FULL_SIZES = (500, 2_000), (500, 2_000, 8_000, 32_000)
STEPS_BY_SIZE = {500: 500, 2_000: 900, 8_000: 1500, 32_000: 2500}  # of full versions; small data is learned early
QUICK_STEPS_BY_SIZE = {500: 30, 2_000: 50}


def measure_system(pairs: Sequence[Pair], system: str, name: str, seed: int, setup: Setup, steps: int) -> Numbers:
    """Train a system on pairs; return BLEU, chrF and the percentage of exact translations of test sentences."""
    dev, test = list_pairs("dev", DEV_PAIRS, setup), list_pairs("test", setup.pick(60, 300), setup)
    translator = train_translator(pairs, system, name, seed, setup, steps=steps, dev=dev)
    return score_texts(translate_texts(translator, test), test)


# `data-size`


def measure_data_sizes(condition: str, seed: int, setup: Setup) -> Numbers:
    """Return the quality of a system by number of training pairs. Smaller sets are parts of larger ones."""
    sizes, steps = setup.pick(QUICK_SIZES, FULL_SIZES), setup.pick(QUICK_STEPS_BY_SIZE, STEPS_BY_SIZE)
    pairs = list_pairs("train", sizes[-1], setup, seed=seed)
    scores = [
        measure_system(pairs[:size], condition, f"{condition.replace(' ', '-')}-{size}", seed, setup, steps[size])
        for size in sizes
    ]
    return {"sizes": list(sizes), "bleu": [score["bleu"] for score in scores], "chrf": [s["chrf"] for s in scores]}


def plot_data_sizes(table: Table) -> list[LabFigure]:
    ticks = [f"{size:,}" for size in next(iter(next(iter(table.values())).values()))["sizes"]]
    return [
        LabFigure(caption, plot_curves(table, "sizes", key, x_title="training pairs", y_title=title, ticks=ticks))
        for key, title, caption in (
            ("bleu", "BLEU", "BLEU by number of training pairs"),
            ("chrf", "chrF", "chrF by number of training pairs"),
        )
    ]


NEURAL = (NO_ATTENTION, LSTM_ATTENTION, TRANSFORMER)
DATA_SIZE = Experiment(
    name="data-size",
    title="Which system wins with little data, and which with much?",
    lecture="002, Lecture 7: Pre-neural and neural machine translation, Difficulties",
    claim="1990s-2010s: statistical machine translation learns a probabilistic model from data. Neural machine "
    "translation is a single end-to-end neural network; low-resource language pairs are one of its difficulties.",
    method="A phrase-based system, an LSTM without and with attention, and a Transformer learn from the same pairs of "
    "the phrasebook: 500 to 32,000, in quick versions 500 and 2,000 short ones. The best checkpoint on held-out pairs "
    "is used. Measured: BLEU and chrF on sentences with other combinations of content words. "
    "The number of updates grows with the number of pairs, from 500 to 2,500.",
    predict="From how many pairs on does the Transformer beat the statistical system? Does the LSTM without attention?",
    conditions=tuple(SYSTEMS),
    measure=measure_data_sizes,
    checks=(
        Check(
            "lead of the statistical system over the best neural one with the fewest pairs, BLEU",
            lambda trials: trials[SMT]["bleu"][0] - max(trials[system]["bleu"][0] for system in NEURAL),
            at_least=0.0,
        ),
        Check(
            "lead of the best neural system over the statistical one with the most pairs, BLEU",
            lambda trials: max(trials[system]["bleu"][-1] for system in NEURAL) - trials[SMT]["bleu"][-1],
            at_least=0.0,
        ),
        Check(
            "gain of the LSTM by attention with the most pairs, BLEU",
            lambda trials: trials[LSTM_ATTENTION]["bleu"][-1] - trials[NO_ATTENTION]["bleu"][-1],
            at_least=0.0,
        ),
    ),
    plot=plot_data_sizes,
    conclusion="With 500 pairs the statistical system is far ahead: a phrase that was seen once can be used at once. "
    "With 2,000 pairs the Transformer has overtaken it, with 8,000 the LSTM with attention; without attention, the "
    "LSTM is still behind with 32,000. The phrasebook is regular, so fewer pairs are needed than for real languages. "
    "Quick versions train neural systems too briefly to show where they overtake.",
)

# `layers`

LAYER_COUNTS = {
    "1 + 1": (1, 1),
    "2 + 1": (2, 1),
    "2 + 2": (2, 2),
    "2 + 4": (2, 4),
    "4 + 4": (4, 4),
    "8 + 8": (8, 8),
}


def measure_layers(condition: str, seed: int, setup: Setup) -> Numbers:
    """Return the quality of an LSTM with attention by its numbers of encoder and decoder layers."""
    encoder_layers, decoder_layers = LAYER_COUNTS[condition]
    pairs = list_pairs("train", setup.pick(2_000, 20_000), setup, seed=seed)
    dev, test = list_pairs("dev", DEV_PAIRS, setup), list_pairs("test", setup.pick(60, 300), setup)
    model = {"encoder_layers": encoder_layers, "decoder_layers": decoder_layers, "input_feeding": False}
    name, steps = condition.replace(" + ", "-"), setup.pick(30, 1200)
    translator = train_translator(pairs, LSTM_ATTENTION, name, seed, setup, steps=steps, dev=dev, model=model)
    return {**score_texts(translate_texts(translator, test), test), "parameters": translator.parameter_count}


LAYERS = Experiment(
    name="layers",
    title="How many layers should the encoder and the decoder of an RNN have?",
    lecture="002, Lecture 7: Multi-layer RNNs",
    claim="Britz et al. (2017) find that for neural machine translation 2 to 4 layers are best for the encoder RNN, "
    "and 4 layers are best for the decoder RNN.",
    method="LSTMs with attention of equal width and with 1 to 8 encoder and decoder layers learn from the same pairs "
    "of the phrasebook for the same number of steps, without input feeding. Measured: BLEU and chrF on test sentences.",
    predict="Which of the six combinations is best, and does the deepest one train at all?",
    conditions=tuple(LAYER_COUNTS),
    measure=measure_layers,
    checks=(
        Check(
            "lead of the better of 2 + 4 and 4 + 4 layers over 1 + 1, BLEU",
            lambda trials: max(trials["2 + 4"]["bleu"], trials["4 + 4"]["bleu"]) - trials["1 + 1"]["bleu"],
            at_least=0.0,
        ),
        Check(
            "lead of 4 decoder layers over 2, with 2 encoder layers, BLEU",
            lambda trials: trials["2 + 4"]["bleu"] - trials["2 + 2"]["bleu"],
            at_least=0.0,
        ),
        Check(
            "lead of the better of 2 + 4 and 4 + 4 layers over 8 + 8, BLEU",
            lambda trials: max(trials["2 + 4"]["bleu"], trials["4 + 4"]["bleu"]) - trials["8 + 8"]["bleu"],
            at_least=0.0,
        ),
    ),
    plot=lambda table: [
        LabFigure("BLEU by encoder + decoder layers", plot_categories(table, "bleu", y_title="BLEU")),
        LabFigure("chrF by encoder + decoder layers", plot_categories(table, "chrf", y_title="chrF")),
    ],
    conclusion="Two layers on each side are enough: 1 + 1 is 16 points worse, and more than 2 + 2 brings nothing. "
    "Eight layers on each side are no better than one. Why was not tested: no model here has residual connections, "
    "and all learn at the same rate, with 2.0 to 9.3 million parameters. The phrasebook is simpler than the news that "
    "Britz et al. translated, which may explain why the fourth decoder layer brings nothing.",
)

# `baselines`

COPY, DICTIONARY = "copy the source", "word by word"


def learn_dictionary(pairs: Sequence[Pair]) -> dict[str, str]:
    """Return the most frequent translation of every source word, by the links of IBM Model 1."""
    from dragoman.smt.alignment import train_aligner
    from dragoman.smt.settings import AlignerSettings

    sources = [split_words(pair.source) for pair in pairs]
    targets = [split_words(pair.target) for pair in pairs]
    source_lines, target_lines = [" ".join(words) for words in sources], [" ".join(words) for words in targets]
    aligner = train_aligner(source_lines, target_lines, AlignerSettings(ibm1=5, hmm=0))
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for source, target, links in zip(sources, targets, aligner.align(source_lines, target_lines), strict=True):
        for i, j in links:
            counts[source[i].lower()][target[j]] += 1
    return {word: found.most_common(1)[0][0] for word, found in counts.items()}


def translate_words(text: str, dictionary: dict[str, str]) -> str:
    """Translate every word by itself, in the order of the source; unknown words are copied."""
    words = [dictionary.get(word.lower(), word) for word in split_words(text)]
    line = " ".join(words)
    for mark in ".,?":
        line = line.replace(f" {mark}", mark)
    return line[:1].upper() + line[1:]


def measure_baseline(condition: str, seed: int, setup: Setup) -> Numbers:
    """Return the quality of a baseline or of a trained system on the same test sentences."""
    pairs = list_pairs("train", setup.pick(1_000, 10_000), setup, seed=seed)
    test = list_pairs("test", setup.pick(60, 300), setup)
    if condition == COPY:
        return score_texts([pair.source for pair in test], test)
    if condition == DICTIONARY:
        dictionary = learn_dictionary(pairs)
        return score_texts([translate_words(pair.source, dictionary) for pair in test], test)
    return measure_system(pairs, condition, condition.replace(" ", "-"), seed, setup, setup.pick(80, 1500))


BASELINES = Experiment(
    name="baselines",
    title="How good are a copy of the source and a word-by-word translation?",
    lecture="004: Announcements (projects)",
    claim="Compare this model with some baseline (either an even simpler model or a non-learning method).",
    method="The baselines are the unchanged source, and the translation of every word by itself with a dictionary that "
    "IBM Model 1 finds in the training pairs. Trained systems are a phrase-based one, an LSTM with attention and a "
    "Transformer, all on the same pairs. Measured: BLEU and chrF.",
    predict="Which BLEU has a copy of the English source as a German translation? Which chrF? And the dictionary?",
    conditions=(COPY, DICTIONARY, SMT, LSTM_ATTENTION, TRANSFORMER),
    measure=measure_baseline,
    checks=(
        Check("BLEU of a copy of the source", lambda trials: trials[COPY]["bleu"], at_most=5.0),
        Check(
            "lead of word-by-word translation over a copy, BLEU",
            lambda trials: trials[DICTIONARY]["bleu"] - trials[COPY]["bleu"],
            at_least=1.0,
        ),
        Check(
            "lead of the worst trained system over word-by-word translation, BLEU",
            lambda trials: (
                min(trials[system]["bleu"] for system in (SMT, LSTM_ATTENTION, TRANSFORMER))
                - trials[DICTIONARY]["bleu"]
            ),
            at_least=10.0,
        ),
    ),
    plot=lambda table: [
        LabFigure("BLEU of baselines and trained systems", plot_categories(table, "bleu", y_title="BLEU")),
        LabFigure("chrF of baselines and trained systems", plot_categories(table, "chrf", y_title="chrF")),
    ],
    conclusion="A copy has a BLEU near 0 but a chrF well above it, since the languages share letters and names: a "
    "score means little without a baseline. A system that has not learned more than a dictionary is not yet a "
    "translator.",
)
