"""Experiments on the cost of a long text: operations in series, operations in all, memory and time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.kernels.attention import RowLayout
from dragoman.labs.experiment import Check, Experiment, LabFigure, Numbers, Setup, Table, Trials, plot_curves
from dragoman.labs.small_models import FIRST_ID, build_small_model, count_flops
from dragoman.models.base import Model
from dragoman.models.registry import Cost

WIDTH = 32
# The reference kernel keeps all scores in memory.
ATTENTION_ENCODER = {"backbone": "transformer", "heads": 2, "kernel": "reference"}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "recurrent": {"backbone": "rnn", "cell": "vanilla", "bidirectional": False},
    "full": {**ATTENTION_ENCODER, "attention": "full"},
    "linformer": {**ATTENTION_ENCODER, "attention": "linformer", "rank": 32, "max_length": 1 << 14},
    "bigbird": {**ATTENTION_ENCODER, "attention": "bigbird", "block": 16},
    "local": {**ATTENTION_ENCODER, "attention": "local", "window": 16},
}
EFFICIENT = ("linformer", "bigbird", "local")


def build_classifier(condition: str, seed: int) -> Model:
    """Return a classifier, whose encoder has one layer."""
    settings = {"kind": "classifier", "width": WIDTH, "layers": 1, "dropout": 0.0, **ARCHITECTURES[condition]}
    return build_small_model(settings, vocabulary=FIRST_ID + 100, labels=2, seed=seed)


def make_step(model: Model, length: int, device: str) -> Callable[[], Tensor]:
    """Return a function that encodes a text of random tokens, and returns the sum of its states."""
    encoder: Any = model.to(device).encoder
    ids_BT = torch.randint(FIRST_ID, FIRST_ID + 100, (1, length), device=device)
    rows = RowLayout.from_padding_mask(torch.ones_like(ids_BT, dtype=torch.bool))
    return lambda: encoder(ids_BT, rows).sum()


def fit_exponent(lengths: Sequence[float], values: Sequence[float]) -> float:
    """Return the exponent of the power of the length that fits the values best."""
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


# `cost`

COUNTED_LENGTHS = (256, 512, 1024, 2048)


def measure_graph_depth(output: Tensor) -> int:
    """Return the number of operations on the longest path of the autograd graph that ends in `output`.

    They depend on each other, so that no number of processors can compute them in fewer steps.
    """
    depths: dict[Any, int] = {None: 0}
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        node = waiting[-1]
        before = [earlier for earlier, _ in node.next_functions]
        missing = [earlier for earlier in before if earlier not in depths]
        if missing:
            waiting += missing
        else:
            depths[waiting.pop()] = 1 + max((depths[earlier] for earlier in before), default=0)
    return depths[output.grad_fn]


def measure_saved_bytes(model: Model, step: Callable[[], Tensor]) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, without the weights of the model.

    Tensors that share memory count once.
    """
    sizes: dict[int, int] = {}
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = step()  # the graph keeps the tensors, so that no address is used twice
        assert output.grad_fn is not None
    return sum(size for address, size in sizes.items() if address not in weights)


def measure_counts(condition: str, seed: int, setup: Setup) -> Numbers:  # noqa: ARG001 - the signature of all trials
    """Count operations in series, operations in all and saved bytes for texts of several lengths."""
    model = build_classifier(condition, seed)
    formula, none = Cost.from_model(model), np.zeros(1, dtype=np.int64)
    depths, flops, saved, errors = [], [], [], []
    for length in COUNTED_LENGTHS:
        step = make_step(model, length, "cpu")
        depths.append(measure_graph_depth(step()))
        saved.append(measure_saved_bytes(model, step) / 1e6)
        total, interaction = count_flops(model, step)
        flops.append(interaction / 1e6)
        errors.append(abs(formula.count_forward(none + length, none) / total - 1))
    numbers: dict[str, Any] = {"depth": depths, "flops": flops, "saved": saved, "formula_error": max(errors)}
    return numbers | {f"{key}_exponent": fit_exponent(COUNTED_LENGTHS, numbers[key]) for key in ("flops", "saved")}


def plot_lengths(table: Table, key: str, y_title: str, lengths: Sequence[int] = COUNTED_LENGTHS) -> LabFigure:
    ticks = tuple(f"{length:,}" for length in lengths)
    chart = plot_curves(table, lengths, key, x_title="tokens", y_title=y_title, ticks=ticks, logarithmic=True)
    return LabFigure(f"{y_title[0].upper()}{y_title[1:]}, by the length of the text", chart)


def plot_counts(table: Table) -> list[LabFigure]:
    return [
        plot_lengths(table, "depth", "operations in series"),
        plot_lengths(table, "flops", "million FLOPs between tokens"),
        plot_lengths(table, "saved", "MB kept for the backward pass"),
    ]


def find_highest(key: str, *names: str) -> Callable[[Trials], float]:
    """Return the function that finds the highest value of a number among conditions."""
    return lambda trials: max(trials[name][key] for name in names)


COST = Experiment(
    name="cost",
    title="How do operations and memory grow with the length of a text?",
    lecture="002, Lecture 9: Issues with recurrent models, Drawbacks; 003; 004",
    claim="RNNs: linear in sequence length, but all operations have to happen in series. Transformers: quadratic in "
    "sequence length, but the number of unparallelizable operations does not increase with it. Recent work (Linformer, "
    "BigBird) replaces all-pairs interactions.",
    method="Encoders of one layer read texts of 256 to 2,048 tokens. Operations in series are the longest path of the "
    "autograd graph. FLOPs are counted by PyTorch while the encoder runs: those of matrix products between tokens in "
    "attention, or in the recurrent layer. Memory is what the forward pass keeps for the backward pass, with attention "
    "computed by its formula. The control compares all FLOPs with the formula by which Dragoman reports the cost of "
    "training.",
    predict="By which factor does each of the three numbers grow if the text is eight times as long?",
    conditions=tuple(ARCHITECTURES),
    measure=measure_counts,
    checks=(
        Check(
            "recurrent: operations in series at 2,048 tokens relative to 256",
            lambda trials: trials["recurrent"]["depth"][-1] / trials["recurrent"]["depth"][0],
            at_least=7.0,
        ),
        Check(
            "attention: operations in series at 2,048 tokens relative to 256, highest of the patterns",
            lambda trials: max(trials[name]["depth"][-1] / trials[name]["depth"][0] for name in ("full", *EFFICIENT)),
            at_most=1.0,
        ),
        Check("recurrent: exponent of FLOPs", find_highest("flops_exponent", "recurrent"), at_most=1.01),
        Check("full attention: exponent of FLOPs", find_highest("flops_exponent", "full"), at_least=1.99),
        Check(
            "Linformer, BigBird, local attention: exponent of FLOPs, highest of the three",
            find_highest("flops_exponent", *EFFICIENT),
            at_most=1.01,
        ),
        Check("full attention: exponent of memory", find_highest("saved_exponent", "full"), at_least=1.5),
        Check(
            "all others: exponent of memory, highest of the four",
            find_highest("saved_exponent", "recurrent", *EFFICIENT),
            at_most=1.1,
        ),
        Check(
            "FLOPs of a forward pass by formula relative to those counted: difference from 1, largest of all",
            find_highest("formula_error", *ARCHITECTURES),
            at_most=1e-6,
            control=True,
        ),
    ),
    plot=plot_counts,
    conclusion="The counts grow as the lecture says, and the counted FLOPs are exactly those of the usual formula. The "
    "quadratic memory belongs to the formula of attention, not to attention itself: fused kernels, which Dragoman uses "
    "for long texts, compute the same attention without keeping the scores.",
    law=True,
)


# `cost-time`

REPEATS = 5
THREADS = 2  # of PyTorch, whatever the number of cores: the time of large matrix products depends on it


@contextmanager
def use_threads() -> Iterator[None]:
    """Let PyTorch use THREADS threads, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@use_threads()
def measure_times(condition: str, seed: int, setup: Setup) -> Numbers:
    """Measure a forward and backward pass: elapsed time and CPU time of all threads, and on a GPU its peak memory.

    Times are the lowest of several passes, since other processes can only make a pass slower.
    """
    model, elapsed, cpu, peaks = build_classifier(condition, seed), [], [], []
    lengths = setup.pick((512, 1024, 2048), (512, 1024, 2048, 4096, 8192))
    on_gpu = setup.device.startswith("cuda")
    for length in lengths:
        step, passes = make_step(model, length, setup.device), []
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(REPEATS):
            start, cpu_start = time.perf_counter(), time.process_time()
            step().backward()  # type: ignore[no-untyped-call]
            if on_gpu:
                torch.cuda.synchronize()
            passes.append((time.perf_counter() - start, time.process_time() - cpu_start))
            model.zero_grad()
        elapsed.append(1000 * min(seconds for seconds, _ in passes))
        cpu.append(1000 * min(seconds for _, seconds in passes))
        if on_gpu:
            peaks.append(torch.cuda.max_memory_allocated() / 1e6)
    numbers: dict[str, Any] = {"lengths": list(lengths), "ms": elapsed, "cpu_ms": cpu, "peak_mb": peaks}
    return numbers | {"exponent": fit_exponent(lengths[-2:], elapsed[-2:])}


def plot_times(table: Table) -> list[LabFigure]:
    lengths = next(iter(table["full"].values()))["lengths"]
    figures = [
        plot_lengths(table, "ms", "elapsed milliseconds for forward and backward pass", lengths),
        plot_lengths(table, "cpu_ms", "milliseconds of all CPU threads", lengths),
    ]
    if all(trial["peak_mb"] for by_seed in table.values() for trial in by_seed.values()):
        figures.append(plot_lengths(table, "peak_mb", "peak memory in MB", lengths))
    return figures


COST_TIME = Experiment(
    name="cost-time",
    title="How does the time grow with the length of a text?",
    lecture="002, Lecture 9: Drawbacks; 004",
    claim="Computing all pairs of interactions means our computation grows quadratically with the sequence length. For "
    "recurrent models, it only grew linearly. Transformers can be parallelized (big matrix multiplication).",
    method="Forward and backward pass of encoders of one layer over one text, with attention computed by its formula: "
    f"the elapsed time with {THREADS} threads, lowest of {REPEATS} repetitions. The CPU time of all threads is the "
    "second figure; on a GPU, peak memory is measured as well. Exponents of growth are those from the second longest "
    "to the longest text: 2,048 tokens in the quick version, 8,192 in the full one.",
    predict="From which length on does full attention take longer than a recurrent network? Does it depend on the "
    "machine?",
    conditions=tuple(ARCHITECTURES),
    measure=measure_times,
    checks=(
        Check("full attention: exponent of time", find_highest("exponent", "full"), at_least=1.5),
        Check("recurrent: exponent of time", find_highest("exponent", "recurrent"), at_most=1.3),
        Check(
            "Linformer, BigBird, local attention: exponent of time, highest of the three",
            find_highest("exponent", *EFFICIENT),
            at_most=1.3,
        ),
        Check(
            "time of the recurrent encoder relative to full attention at 512 tokens",
            lambda trials: trials["recurrent"]["ms"][0] / trials["full"]["ms"][0],
            at_least=1.0,
            ratio=True,
        ),
    ),
    plot=plot_times,
    conclusion="From 4,096 to 8,192 tokens, full attention takes four times as long, the recurrent encoder 2.2 to 2.3 "
    "times and the others about twice as long or less. At 512 and 1,024 tokens it is faster than the recurrent "
    "encoder, which has to wait for every step; from 2,048 tokens on it is slower, 6 to 7 times at 8,192. Where they "
    "cross depends on the machine. Part of the time of the short texts is overhead that does not depend on the length.",
)
