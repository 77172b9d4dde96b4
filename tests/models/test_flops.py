"""Tests of the number of floating-point operations of a batch, which PyTorch also counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dragoman.models.base import Model
from dragoman.models.registry import Cost, build_model, measure_segments
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder
from toy_batch import VOCABULARY, examples, in_rows
from toy_run import read_run_events, train_quietly

TRANSFORMER = {"kind": "transformer", "layers": 2, "width": 16, "heads": 2, "dropout": 0.0, "kernel": "reference"}
RNN = {"kind": "rnn", "width": 16, "embedding_width": 12, "dropout": 0.0, "cell": "vanilla", "nonlinearity": "identity"}
HYBRID = TRANSFORMER | {"kind": "hybrid", "cell": "vanilla", "score": "multiplicative", "input_feeding": True}
COUNTED = {  # without additive scores and fused cells, whose operations PyTorch does not count
    "transformer": TRANSFORMER,
    "untied, different depths": TRANSFORMER | {"tied": False, "encoder_layers": 3, "decoder_layers": 1},
    "shared": TRANSFORMER | {"shared": True, "layers": 3},
    "narrow queries": TRANSFORMER | {"query_width": 8, "value_width": 24},
    "no projections": TRANSFORMER | {"projections": False, "activation": "none", "position": "none"},
    "swiglu": TRANSFORMER | {"activation": "swiglu", "norm": "rms"},
    "bottleneck": RNN | {"attention": "none"},
    "bidirectional": RNN | {"attention": "dot", "bidirectional": True},
    "multiplicative": RNN | {"attention": "multiplicative", "layers": 2},
    "reduced rank": RNN | {"attention": "reduced_rank", "attention_width": 3},
    "narrow encoder": RNN | {"attention": "multiplicative", "layers": 2, "encoder_width": 10},
    "hybrid": HYBRID,
    "hybrid, different widths": HYBRID | {"embedding_width": 12, "decoder_width": 20, "decoder_layers": 2},
    "context as an input": RNN | {"attention": "multiplicative", "context_place": "input", "encoder_width": 10},
    "input feeding": RNN | {"attention": "dot", "input_feeding": True},
    "copying": TRANSFORMER | {"copying": True},
    "copying rnn": RNN | {"attention": "multiplicative", "copying": True},
    "copying hybrid": HYBRID | {"copying": True},
}


def build(settings: dict[str, object]) -> Model:
    return build_model(
        Recipe.model_validate({"model": settings}).neural_model,
        source_size=VOCABULARY,
        target_size=VOCABULARY,
        joint=True,
    )


@pytest.mark.parametrize("settings", COUNTED.values(), ids=COUNTED)
def test_flops_equal_those_that_pytorch_counts(settings: dict[str, object]) -> None:
    """The batch is one sentence without padding, so that nothing superfluous is computed."""
    model, sentences = build(settings).eval(), examples(1, longest=9, seed=3)
    batch = in_rows([[0]], sentences)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.compute_logits(model(batch))
    source_N, target_N = (np.array([len(side) + 1]) for side in (sentences[0].source, sentences[0].target))
    expected = Cost.from_model(model).count_forward(source_N, target_N)
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize("rows", [[[0, 1], [2]], [[0], [1], [2]], [[2, 1, 0]]], ids=str)
def test_packing_and_padding_do_not_change_the_count(rows: list[list[int]]) -> None:
    cost, sentences = Cost.from_model(build(TRANSFORMER)), examples(3)
    separate_flops = sum(cost.count_training(in_rows([[item]], sentences)) for item in range(3))
    assert cost.count_training(in_rows(rows, sentences)) == separate_flops


def test_lengths_are_those_of_the_sentences() -> None:
    sentences = examples(4)
    batch = in_rows([[3, 1], [], [0, 2]], sentences)
    expected = [len(sentences[item].source) + 1 for item in (3, 1, 0, 2)]
    assert [n for n in measure_segments(batch.source_segment_BS).tolist() if n] == expected


@pytest.mark.parametrize("attention", ["local", "bigbird", "linformer"])
def test_efficient_attention_is_linear_in_the_length(attention: str) -> None:
    """A source of four times the length costs four times as much, apart from the quadratic cost of the decoder."""
    small = {"attention": attention, "window": 4, "block": 4, "rank": 4, "max_length": 8192}
    cost = Cost.from_model(build(TRANSFORMER | small))
    one_token = np.array([1])
    assert cost.count_forward(np.array([8000]), one_token) < 4.1 * cost.count_forward(np.array([2000]), one_token)
    full = Cost.from_model(build(TRANSFORMER))
    assert full.count_forward(np.array([8000]), one_token) > 8 * full.count_forward(np.array([2000]), one_token)


def test_training_is_three_times_the_forward_pass() -> None:
    cost, sentences = Cost.from_model(build(TRANSFORMER)), examples(1)
    source, target = (np.array([len(side) + 1]) for side in (sentences[0].source, sentences[0].target))
    assert cost.count_training(in_rows([[0]], sentences)) == 3 * cost.count_forward(source, target)


def test_training_stops_at_the_limit_of_flops(small: Path, tmp_path: Path) -> None:
    train_quietly(small, tmp_path / "steps", "train.steps=5")
    spent = read_state(tmp_path / "steps")["flops"]
    assert [event["flops"] for event in read_run_events(tmp_path / "steps") if event["event"] == "train"][-1] == spent
    train_quietly(small, tmp_path / "flops", "train.steps=0", f"train.flops={spent}")
    assert read_state(tmp_path / "flops")["step"] == 5
    train_quietly(small, tmp_path / "less", "train.steps=0", f"train.flops={0.9 * spent}", "train.save_every=2")
    train_quietly(small, tmp_path / "less", "train.steps=0", f"train.flops={spent}", "train.save_every=2", resume=True)
    assert read_state(tmp_path / "less")["flops"] == spent


def test_the_peak_memory_is_saved(small: Path, tmp_path: Path) -> None:
    train_quietly(small, tmp_path / "run", "train.steps=2")
    assert read_state(tmp_path / "run")["peak_memory"] > 10 * 2**20  # PyTorch alone takes more


def read_state(run: Path) -> dict[str, Any]:
    return RunFolder(run).load_state()
