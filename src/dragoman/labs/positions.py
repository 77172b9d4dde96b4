"""Experiments on the order of words: what attention knows of positions, and what happens beyond trained lengths.

Shapes   B rows   T tokens   C model width   K shifts
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.inference.predictor import eval_mode
from dragoman.kernels.attention import RowLayout
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
from dragoman.labs.small_models import FIRST_ID, build_small_model, fit, make_batch
from dragoman.models.base import Model
from dragoman.models.transformer import Encoder
from dragoman.modules.positions import POSITIONS
from dragoman.types import Batch

DISTINCT_TOKENS = 20  # distinct tokens of random sentences
VOCABULARY = FIRST_ID + DISTINCT_TOKENS


def build_encoder(position: str, seed: int, **settings: Any) -> Encoder:
    """Return the encoder of a small Transformer with initial weights, in double precision."""
    values = {"kind": "transformer", "width": 32, "heads": 2, "layers": 2, "dropout": 0.0, "position": position}
    model = build_small_model({**values, **settings}, vocabulary=VOCABULARY, seed=seed)
    assert isinstance(model.encoder, Encoder)
    return model.encoder.double().eval()


def make_rows(ids_BT: Tensor) -> RowLayout:
    """Return the layout of rows without padding."""
    return RowLayout.from_padding_mask(torch.ones_like(ids_BT, dtype=torch.bool))


# `permutation`

RANDOM_ORDERS = 20
RANDOM_LENGTH = 10


@torch.no_grad()
def measure_permutations(condition: str, seed: int, setup: Setup) -> Numbers:  # noqa: ARG001 - the signature of all trials
    """Compare the encoder output of a reordered sentence with the reordered output of the sentence.

    The difference is relative to the norm of the output. The first sentence is that of the lecture, three different
    tokens in reverse order; the others are random sentences in random orders.
    """
    encoder = build_encoder(condition, seed)

    def compare(ids_T: Tensor, order_T: Tensor) -> float:
        ids_BT = torch.stack([ids_T, ids_T[order_T]])
        original_TC, reordered_TC = encoder(ids_BT, make_rows(ids_BT))
        return float((reordered_TC - original_TC[order_T]).norm() / original_TC.norm())

    lecture = compare(FIRST_ID + torch.arange(3), torch.tensor([2, 1, 0]))
    others = [
        compare(torch.randint(FIRST_ID, VOCABULARY, (RANDOM_LENGTH,)), torch.randperm(RANDOM_LENGTH))
        for _ in range(RANDOM_ORDERS)
    ]
    return {"lecture": lecture, "largest": max(others), "mean": sum(others) / len(others)}


def plot_permutations(table: Table) -> list[LabFigure]:
    return [
        LabFigure(
            "Random sentences in random orders: change of the states, relative to their norm",
            plot_categories(table, "mean", y_title="mean relative change"),
        ),
        LabFigure(
            "'I study LLM' and 'LLM study I': change of the states, relative to their norm",
            plot_categories(table, "lecture", y_title="relative change"),
        ),
    ]


PERMUTED = ("none", "sinusoidal", "learned", "relative", "rotary", "alibi")
PERMUTATION = Experiment(
    name="permutation",
    title="Is self-attention blind to the order of words?",
    lecture="000, Part 3.2: Position Embeddings",
    claim="If two sentences have the same words but different orders, they almost certainly have different meanings: "
    "`I study LLM`, `LLM study I`. But in multi-head attention only word embeddings and their q, k, v matter. We "
    "should add some tag for each word, representing its position.",
    method="A Transformer encoder of two layers with random weights reads a sentence and the same words in another "
    "order. Its states are compared after they have been brought into the same order, for five position encodings and "
    "for none.",
    predict="By how much does the state of `LLM` differ between the two sentences, without positions and with each "
    "of the position encodings?",
    conditions=PERMUTED,
    measure=measure_permutations,
    checks=(
        Check(
            "largest relative change of the states without positions",
            lambda trials: max(trials["none"]["largest"], trials["none"]["lecture"]),
            at_most=1e-9,
        ),
        Check(
            "`I study LLM`: relative change with sinusoidal positions",
            lambda trials: trials["sinusoidal"]["lecture"],
            at_least=0.01,
        ),
        Check(
            "random orders: mean relative change, smallest of the five position encodings",
            lambda trials: min(trials[name]["mean"] for name in PERMUTED[1:]),
            at_least=0.01,
        ),
    ),
    plot=plot_permutations,
    conclusion="Without positions, the states are the same to rounding: the encoder sees a bag of words. All five "
    "encodings tell random orders apart. ALiBi does not distinguish `I study LLM` from `LLM study I`: in an encoder, "
    "its penalty depends on the distance, not on the direction, and a reversed sentence has the same distances.",
    law=True,
)


# `position-shift`

SHIFTS = (1, 2, 5, 10, 50, 100)
SHIFT_POSITIONS = 512


def make_shift_matrix(shift: int, width: int) -> Tensor:
    """Return M_k of the lecture for a shift k: a rotation of each pair of a sine and a cosine."""
    angle_J = shift * 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.double) / width)
    sine_J, cosine_J = angle_J.sin(), angle_J.cos()
    blocks_J22 = torch.stack([torch.stack([cosine_J, sine_J], -1), torch.stack([-sine_J, cosine_J], -1)], -2)
    matrix_CC: Tensor = torch.block_diag(*blocks_J22)  # type: ignore[no-untyped-call]
    return matrix_CC


@torch.no_grad()
def measure_shifts(condition: str, seed: int, setup: Setup) -> Numbers:  # noqa: ARG001 - the signature of all trials
    """Predict the vector of position pos + k from that of pos by one matrix for all pos.

    The matrix is M_k of the lecture, and the one with the smallest squared error on these vectors.
    """
    encoder = build_encoder(condition, seed, **({"max_length": 2 * SHIFT_POSITIONS} if condition == "learned" else {}))
    width, ids_BT = encoder.settings.width, torch.zeros(1, SHIFT_POSITIONS + max(SHIFTS), dtype=torch.long)
    [p_TC] = encoder.position(torch.zeros(*ids_BT.shape, width, dtype=torch.double), make_rows(ids_BT))
    lecture: list[float] = []
    fitted: list[float] = []
    for shift in SHIFTS:
        before_TC, after_TC = p_TC[:SHIFT_POSITIONS], p_TC[shift : shift + SHIFT_POSITIONS]
        best_CC = torch.linalg.lstsq(before_TC, after_TC).solution
        for matrix_CC, errors in ((make_shift_matrix(shift, width).T, lecture), (best_CC, fitted)):
            errors.append(float((before_TC @ matrix_CC - after_TC).norm() / after_TC.norm()))
    return {"lecture": lecture, "fitted": fitted}


def plot_shifts(table: Table) -> list[LabFigure]:
    ticks = tuple(map(str, SHIFTS))
    axes = {"x_title": "shift k", "y_title": "relative error", "ticks": ticks}
    return [
        LabFigure("Error of the lecture's matrix M_k", plot_curves(table, SHIFTS, "lecture", **axes)),  # type: ignore[arg-type]
        LabFigure("Error of the best matrix for each k", plot_curves(table, SHIFTS, "fitted", **axes)),  # type: ignore[arg-type]
    ]


POSITION_SHIFT = Experiment(
    name="position-shift",
    title="Is a shift by k positions the same linear map everywhere in a sentence?",
    lecture="000, Part 3.2: Sine position encoding, pros and cons",
    claim="Sine position encoding may also represent some relative position difference in a way: p_(pos+k) = M_k p_pos "
    "with M_k = diag(M_(k,1), ..., M_(k,d/2)), where M_(k,j) is a rotation by the angle ω_j k.",
    method="The vectors that the position embedding adds at 612 positions, width 32. The vector of position pos + k is "
    "predicted from that of pos, for all pos below 512, by the lecture's matrix and by the matrix with the least "
    "squared error. Baseline: the table of learned positions with its initial weights.",
    predict="How well does one matrix map all learned position vectors to those k positions later?",
    conditions=("sinusoidal", "learned"),
    measure=measure_shifts,
    checks=(
        Check(
            "sinusoidal: relative error of the lecture's matrix, largest of all shifts",
            lambda trials: max(trials["sinusoidal"]["lecture"]),
            at_most=1e-4,
        ),
        Check(
            "learned: relative error of the best matrix, smallest of all shifts",
            lambda trials: min(trials["learned"]["fitted"]),
            at_least=0.5,
            control=True,
        ),
    ),
    plot=plot_shifts,
    conclusion="The identity holds for sinusoids to the rounding of angles in single precision. Vectors of a table are "
    "unrelated before training, so that no matrix relates them, which by the number of dimensions alone is certain: it "
    "became a control after the run. Training may relate the vectors of trained positions.",
    law=True,
)


# `four-terms`

PAIR_DISTANCE = 3
PERIOD = 5  # tokens repeat after so many positions, so that the same pair occurs at many positions
TERMS_LENGTH = 60
TERMS = ("xWx", "pWx", "xWp", "pWp")


@torch.no_grad()
def measure_terms(condition: str, seed: int, setup: Setup) -> Numbers:  # noqa: ARG001 - the signature of all trials
    """Measure the score of the same two tokens at the same distance at several positions of a sentence.

    Scores are taken from the attention weights of the first layer, whose logarithms are scores up to a constant for
    each query: the score of the pair minus that of the query with itself. There is no norm and no bias, as in the
    lecture's formula. For encodings that are added to the embeddings, the score is also computed as four terms.
    """
    encoder = build_encoder(condition, seed, norm="none", biases=False, heads=1, layers=1)
    attention, width = encoder.attention, encoder.settings.width
    ids_BT = FIRST_ID + torch.arange(TERMS_LENGTH)[None] % PERIOD
    rows = make_rows(ids_BT)
    states_BTC, mask = encoder.embed(ids_BT, rows), attention.make_mask(rows)
    [[weight_TT]] = attention.compute_weights(states_BTC, rows.position_BT, mask)
    first = torch.arange(0, TERMS_LENGTH - PAIR_DISTANCE, PERIOD)
    score_N = weight_TT[first, first + PAIR_DISTANCE].log() - weight_TT[first, first].log()
    numbers: dict[str, Any] = {"positions": first.tolist(), "scores": score_N.tolist()}
    numbers["spread"] = float(score_N.max() - score_N.min())
    if POSITIONS[condition].embedding is not POSITIONS["none"].embedding:
        words_BTC = encoder.embedding(ids_BT) * width**0.5
        parts = {"x": words_BTC, "p": encoder.position(torch.zeros_like(words_BTC), rows)}
        qk = {
            name: attention.split_qkv(attention.query_key_value(part), rows.position_BT) for name, part in parts.items()
        }
        scale = width**-0.5
        terms = {name: (qk[name[0]][0] @ qk[name[-1]][1].mT)[0, 0] * scale for name in TERMS}
        q, k, _ = attention.split_qkv(attention.query_key_value(states_BTC), rows.position_BT)
        score_TT = (q @ k.mT)[0, 0] * scale
        numbers["error"] = float((sum(terms.values()) - score_TT).norm() / score_TT.norm())
        numbers |= {name: term_TT[first, first + PAIR_DISTANCE].tolist() for name, term_TT in terms.items()}
    return numbers


def plot_terms(table: Table) -> list[LabFigure]:
    by_scheme = plot_curves(
        table, "positions", "scores", x_title="position of the query", y_title="score, minus the query's own"
    )
    split = {
        name: {seed: {**trial, "term": trial[name]} for seed, trial in table["sinusoidal"].items()} for name in TERMS
    }
    terms = plot_curves(split, "positions", "term", x_title="position of the query", y_title="term of the score")
    return [
        LabFigure("Score of the same two tokens, three positions apart, by where they are in the sentence", by_scheme),
        LabFigure("The four terms of this score with sinusoidal positions (x: word, p: position)", terms),
    ]


ABSOLUTE, RELATIVE = ("sinusoidal", "learned"), ("relative", "rotary", "alibi")
FOUR_TERMS = Experiment(
    name="four-terms",
    title="Does the score of two words depend on where they are in the sentence?",
    lecture="000, Part 3.2: Pros and cons? What is the disadvantage of absolute position?",
    claim="Sine position encoding is still absolute: q_i k_j = x_i W x_j + p_i W x_j + x_i W p_j + p_i W p_j with "
    "W = W_Q W_K^T. Attention is different for a pair of tokens with the same relative position and a different "
    "absolute position.",
    method="Five tokens are repeated over 60 positions, so that the same two tokens, three positions apart, occur at "
    "twelve positions. Their scores in the first layer of an encoder with random weights are compared. With positions "
    "that are added to the embeddings, the score is also computed as the sum of the four terms.",
    predict="Which of the four terms stay the same when the pair moves? Which position encodings give the pair the "
    "same score everywhere?",
    conditions=(*ABSOLUTE, *RELATIVE),
    measure=measure_terms,
    checks=(
        Check(
            "relative difference between the score and the sum of its four terms",
            lambda trials: max(trials[name]["error"] for name in ABSOLUTE),
            at_most=1e-9,
        ),
        Check(
            "absolute positions: range of the pair's score over positions, smaller of the two encodings",
            lambda trials: min(trials[name]["spread"] for name in ABSOLUTE),
            at_least=0.1,
        ),
        Check(
            "relative, rotary, ALiBi: range of the pair's score over positions, largest of the three encodings",
            lambda trials: max(trials[name]["spread"] for name in RELATIVE),
            at_most=1e-4,
        ),
    ),
    plot=plot_terms,
    conclusion="Only the term of the two words stays the same. The term of the two positions changes as well, because "
    "random weights W_Q W_K^T do not have the structure of the matrices M_k. Relative, rotary and ALiBi positions give "
    "the pair the same score everywhere. Whether a trained model uses absolute positions is another question.",
    law=True,
)


# `extrapolation`

TRAIN_LENGTH = 12
TEST_LENGTHS = tuple(range(TRAIN_LENGTH // 2, 4 * TRAIN_LENGTH + 1, TRAIN_LENGTH // 2))
REPEAT = 3  # every token repeats the one so many positions before it


def sample_repetitions(rng: np.random.Generator, lengths: Sequence[int]) -> Batch:
    """Return sentences of these lengths. From the fourth on, each token repeats the one three positions before it.

    There is no EOS, whose probability would depend on the absolute position.
    """
    starts = rng.integers(FIRST_ID, VOCABULARY, (len(lengths), REPEAT))
    lines = [np.resize(start, length) for start, length in zip(starts, lengths, strict=True)]
    return make_batch([()] * len(lines), lines, example_format="windows")  # type: ignore[arg-type]


@torch.no_grad()
def score_last_tokens(model: Model, length: int, seed: int, device: str) -> float:
    """Return the accuracy on the last three tokens of sentences of a length."""
    batch = sample_repetitions(np.random.default_rng((seed, length)), [length] * 128)
    with eval_mode(model):
        predicted_BT = model.compute_logits(model(batch.to(torch.device(device)))).argmax(-1).cpu()
    return float((predicted_BT == batch.target_out_BT)[:, -REPEAT:].double().mean())


def measure_extrapolation(condition: str, seed: int, setup: Setup) -> Numbers:
    """Train a language model on short sentences, and measure its accuracy at the end of longer ones."""
    settings = {
        "kind": "lm",
        "width": setup.pick(32, 64),
        "heads": 4,
        "layers": 2,
        "dropout": 0.0,
        "position": condition,
    }
    model = build_small_model(settings, vocabulary=VOCABULARY, seed=seed)

    def sample_batch(step: int) -> Batch:
        rng = np.random.default_rng((seed, 1, step))
        return sample_repetitions(rng, rng.integers(REPEAT + 1, TRAIN_LENGTH + 1, setup.pick(32, 64)).tolist())

    fit(model, sample_batch, steps=setup.pick(150, 3000), lr=3e-3, device=setup.device)
    accuracy = [score_last_tokens(model, length, seed, setup.device) for length in TEST_LENGTHS]
    return {"accuracy": accuracy, "trained": accuracy[TEST_LENGTHS.index(TRAIN_LENGTH)], "longest": accuracy[-1]}


def plot_extrapolation(table: Table) -> list[LabFigure]:
    chart = plot_curves(
        table, TEST_LENGTHS, "accuracy", x_title="tokens of the sentence", y_title="accuracy of the last three tokens"
    )
    return [LabFigure(f"Accuracy by length; sentences in training had at most {TRAIN_LENGTH} tokens", chart)]


def accuracy_drop(name: str) -> Callable[[Trials], float]:
    """Return the function that computes the accuracy that a position encoding loses at four times the length."""
    return lambda trials: trials[name]["trained"] - trials[name]["longest"]


EXTRAPOLATED = ("sinusoidal", "learned", "relative", "rotary", "alibi", "none")
EXTRAPOLATION = Experiment(
    name="extrapolation",
    title="Which positions still work in sentences longer than those of training?",
    lecture="002, Lecture 9: Doesn't have an inherent notion of order; 000, Part 3.2",
    claim="Sinusoidal positions: maybe can extrapolate to longer sequences as periods restart; but the extrapolation "
    "doesn't really work. Learned positions definitely can't extrapolate to indices outside 1, ..., T. So most LLMs "
    "now use RoPE, which is a relative position embedding method.",
    method=f"Language models of two layers learn sentences of at most {TRAIN_LENGTH} tokens in which every token "
    f"repeats the one {REPEAT} positions before it. Accuracy is measured on the last tokens of sentences of up to "
    f"{4 * TRAIN_LENGTH} tokens. The vectors of learned positions beyond those of training keep their initial values.",
    predict="Order the encodings by their accuracy at four times the length of training. Where is a model without "
    "positions, which only has its causal mask?",
    conditions=EXTRAPOLATED,
    measure=measure_extrapolation,
    checks=(
        Check(
            "accuracy at the length of training, worst of the five encodings",
            lambda trials: min(trials[name]["trained"] for name in EXTRAPOLATED[:5]),
            at_least=0.95,
            control=True,
        ),
        Check(
            "accuracy that sinusoidal positions lose at four times the length",
            accuracy_drop("sinusoidal"),
            at_least=0.2,
        ),
        Check("accuracy that learned positions lose at four times the length", accuracy_drop("learned"), at_least=0.2),
        Check("accuracy that relative positions lose at four times the length", accuracy_drop("relative"), at_most=0.1),
        Check("accuracy that rotary positions lose at four times the length", accuracy_drop("rotary"), at_most=0.1),
        Check("accuracy that ALiBi loses at four times the length", accuracy_drop("alibi"), at_most=0.1),
    ),
    plot=plot_extrapolation,
    conclusion="Relative positions and ALiBi keep their accuracy at four times the length. Sinusoidal and learned "
    "positions lose a third to two thirds of it; learned ones work up to the last trained position and fail at 18 "
    "tokens, the next length tested. Without positions, accuracy falls by 0.02 to 0.07 only. Rotary positions lose "
    "most, although their score depends on the distance only. Why was not tested; longer sentences also have more "
    "keys and greater distances. Relative positions have one vector for all distances beyond `reach`. The task is one "
    "fixed distance; other tasks may rank the encodings differently. The quick version trains too briefly for "
    "sinusoidal positions and ALiBi.",
)
