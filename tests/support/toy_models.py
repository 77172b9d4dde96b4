"""A small model for every entry of every registry, and batches for it. The contract tests iterate over them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.data.batches import EXAMPLE_FORMATS, BatchPlan, Widths
from dragoman.errors import UserError
from dragoman.kernels.attention import KERNELS
from dragoman.models.base import Model
from dragoman.models.registry import MODEL_KINDS, build_model
from dragoman.models.rnn import BRIDGES
from dragoman.models.single_sequence import POOLS
from dragoman.modules.attention_scores import SCORES
from dragoman.modules.feedforward import FEEDFORWARDS, NORM_PLACES
from dragoman.modules.norms import NORMS
from dragoman.modules.patterns import PATTERNS
from dragoman.modules.positions import POSITIONS
from dragoman.modules.recurrent import CELLS, NONLINEARITIES
from dragoman.types import UNKNOWN_DISTANCE, Batch, Example
from pairs import pairwise
from toy_batch import VOCABULARY
from toy_sections import settings_of

Section = dict[str, Any]
TRANSFORMER: dict[str, Sequence[Any]] = {
    "norm": [*NORMS], "norm_place": [*NORM_PLACES], "activation": [*FEEDFORWARDS], "position": [*POSITIONS],
    "kernel": [*KERNELS], "attention": [*PATTERNS], "decoder_attention": [*PATTERNS],
    "residual": [True, False, "encoder", "decoder"],
    "scaled": [True, False], "projections": [True, False], "shared": [True, False], "tied": [True, False],
    "norm_epsilon": [0.0, 0.1], "biases": [True, False], "output_projection": [True, False],
    "copying": [False, True],
}  # fmt: skip
RNN: dict[str, Sequence[Any]] = {
    "cell": [*CELLS], "attention": [*SCORES], "input_feeding": [True, False], "bidirectional": [True, False],
    "bridge": [*BRIDGES], "initial_state": ["zero", "learned"], "nonlinearity": [*NONLINEARITIES],
    "tied": [True, False], "encoder_width": [0, 6], "context_place": ["output", "input"],
    "copying": [False, True],
}  # fmt: skip
HYBRID: dict[str, Sequence[Any]] = {
    "cell": [*CELLS], "score": [*SCORES], "input_feeding": [True, False], "tied": [True, False],
    "position": [*POSITIONS], "attention": [*PATTERNS], "decoder_layers": [1, 2],
    "context_place": ["output", "input"],
    "copying": [False, True],
}  # fmt: skip
SMALL_TRANSFORMER = {
    "layers": 2, "width": 8, "heads": 2, "dropout": 0.0, "max_length": 40, "window": 3, "block": 2,
    "rank": 4, "reach": 3,
}  # fmt: skip
SMALL_RNN = {"kind": "rnn", "width": 8, "layers": 2, "dropout": 0.0}
SMALL_HYBRID = {**SMALL_TRANSFORMER, "kind": "hybrid"}
FORM = {"translate": "pairs", "generate": "lines", "classify": "labels"}
LABELS = 5


def vary_one_setting(base: Section, menus: dict[str, Sequence[Any]]) -> Iterator[Section]:
    """Yield the base section with one setting changed, for every choice of every menu."""
    for name, menu in menus.items():
        for choice in menu:
            yield {**base, name: choice}


@functools.cache
def make_model_sections() -> dict[str, Section]:
    """Return sections of small models that cover every registry entry, and for RNNs every pair of entries."""
    found: dict[str, Section] = {
        "deep and shallow": {**SMALL_TRANSFORMER, "encoder_layers": 3, "decoder_layers": 1},
        "widths apart": {**SMALL_TRANSFORMER, "query_width": 4, "value_width": 12},
        "deep and shallow rnn": {**SMALL_RNN, "encoder_layers": 1, "decoder_layers": 3},
        "widths apart hybrid": {**SMALL_HYBRID, "embedding_width": 6, "decoder_width": 10},
        "one width apart hybrid": {**SMALL_HYBRID, "decoder_width": 6, "score": "additive", "score_width": 4},
        "widths apart rnn": {**SMALL_RNN, "embedding_width": 6, "attention_width": 10, "encoder_width": 12},
        "low rank rnn": {**SMALL_RNN, "attention": "reduced_rank", "attention_width": 3, "encoder_width": 12},
        "low rank hybrid": {**SMALL_HYBRID, "score": "reduced_rank", "score_width": 3},
    }
    for section in vary_one_setting(SMALL_TRANSFORMER, TRANSFORMER):
        if PATTERNS[section.get("decoder_attention", "full")].causal:
            found[f"transformer {describe_differences(section, SMALL_TRANSFORMER)}"] = section
    for cell in (name for name, kind in CELLS.items() if "nonlinearity" in kind.uses):
        for nonlinearity in NONLINEARITIES:
            found[f"rnn {cell} {nonlinearity}"] = {**SMALL_RNN, "cell": cell, "nonlinearity": nonlinearity}
    others = {name: menu for name, menu in RNN.items() if name != "nonlinearity"}
    for choices in pairwise(others, lambda choices: not find_refusal({**SMALL_RNN, **choices})):
        found[" ".join(["rnn", *(f"{name}={choice}" for name, choice in choices.items())])] = {**SMALL_RNN, **choices}
    for section in vary_one_setting(SMALL_HYBRID, HYBRID):
        found[f"hybrid {describe_differences(section, SMALL_HYBRID)}"] = section
    for backbone in MODEL_KINDS["lm"]:
        small = SMALL_RNN if backbone == "rnn" else SMALL_TRANSFORMER
        found[f"lm {backbone}"] = {**small, "kind": "lm", "backbone": backbone}
        for pool in POOLS:
            found[f"classifier {backbone} {pool}"] = {**small, "kind": "classifier", "backbone": backbone, "pool": pool}
    return found


def find_refusal(section: Section) -> str:
    """Return the message of the UserError for an invalid section; an empty string if the section is valid."""
    try:
        settings_of(section)
    except UserError as error:
        return str(error)
    return ""


def describe_differences(section: Section, base: Section) -> str:
    return " ".join(f"{name}={choice}" for name, choice in section.items() if base.get(name) != choice)


def build_small_model(section: Section, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Model:
    """Build the model with random biases and norms, so that errors in them show."""
    torch.manual_seed(seed)
    target_size = LABELS if settings_of(section).task == "classify" else VOCABULARY
    model = build_model(settings_of(section), source_size=VOCABULARY, target_size=target_size, joint=True)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() <= 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in model.named_buffers():
            buffer.add_(torch.rand_like(buffer) if name.endswith(("mean", "variance")) else 0)
    return model.to(dtype)


def make_examples(section: Section, count: int = 6, *, seed: int = 3, longest: int = 9) -> list[Example]:
    rng, task = np.random.default_rng(seed), settings_of(section).task

    def ids() -> Any:
        return rng.integers(4, VOCABULARY, rng.integers(2, longest + 1))

    def target() -> Any:
        return rng.integers(0, LABELS, 1) if task == "classify" else ids()

    return [Example(ids()[: 0 if task == "generate" else None], target(), line) for line in range(count)]


def collate_rows(
    section: Section, rows: Sequence[Sequence[int]], examples: Sequence[Example], *, spare: int = 0
) -> Batch:
    """Collate examples into rows with `spare` padding; add a tree to each source if the model needs trees."""
    form = EXAMPLE_FORMATS[FORM[settings_of(section).task]]
    source_N, target_N = form.count_example_slots(examples)
    widths = Widths(*(max(sum(int(n[i]) for i in row) for row in rows) + spare for n in (source_N, target_N)))
    batch = form.collate(BatchPlan([list(row) for row in rows], widths), examples)
    return add_chain_trees(batch) if settings_of(section).source_features else batch


def add_chain_trees(batch: Batch) -> Batch:
    """Add the simplest dependency trees to a batch: the head of every token is the previous token."""
    segment_BS, position_BS = batch.source_segment_BS, batch.source_position_BS
    same = (segment_BS[:, :, None] == segment_BS[:, None]) & (segment_BS > 0)[:, None]
    way_BSS = (position_BS[:, None] - position_BS[:, :, None]).masked_fill(~same, UNKNOWN_DISTANCE)
    depth_BS = (position_BS + 1) * (segment_BS > 0)
    return replace(batch, features={"tree_depth": depth_BS, "tree_distance": way_BSS.to(torch.int8)})


def compute_states(model: Model, batch: Batch) -> list[Tensor]:
    """Return the states of the target tokens of each segment, row by row."""
    states_BTC, segment_BT = model(batch), batch.target_segment_BT
    return [
        states_BTC[row][segment_BT[row] == number]
        for row in range(len(segment_BT))
        for number in range(1, int(segment_BT[row].max()) + 1)
    ]


def compute_loss(model: Model, batch: Batch) -> Tensor:
    real_BT = batch.target_segment_BT > 0
    logits_NV = model.compute_logits(model(batch)[real_BT]).float()
    return torch.nn.functional.cross_entropy(logits_NV, batch.target_out_BT[real_BT], reduction="sum")


BASES = {"rnn": SMALL_RNN, "hybrid": SMALL_HYBRID}
KINDS: dict[str, Section] = {
    f"{kind} {backbone}".strip(): {
        **BASES.get(backbone or kind, SMALL_TRANSFORMER), "kind": kind, **({"backbone": backbone} if backbone else {})
    }
    for kind, backbones in MODEL_KINDS.items()
    for backbone in backbones
}  # fmt: skip
OF_TRANSFORMERS = ["head_dropout", "layer_dropout", "activation_dropout"]
RATES = ["dropout", "source_word_dropout", "target_word_dropout", *OF_TRANSFORMERS]


def make_batch(section: Section) -> Batch:
    rows = [[0, 1], [2], [3], [], [4, 5]] if settings_of(section).layout == "packed" else [[item] for item in range(6)]
    return collate_rows(section, rows, make_examples(section), spare=2)
