"""Invariants of all kinds of model and all registry entries.

The tests iterate over the registries, so that new entries are tested too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dragoman.config.settings import TrainSettings
from dragoman.kernels.attention import KERNELS, RowLayout
from dragoman.models.base import Model, collect_weights
from dragoman.models.single_sequence import POOLS, TextClassifier
from dragoman.modules.attention_scores import SCORES
from dragoman.modules.feedforward import FEEDFORWARDS
from dragoman.modules.norms import NORMS
from dragoman.modules.patterns import PATTERNS
from dragoman.modules.positions import POSITIONS, PositionScheme
from dragoman.modules.recurrent import CELLS
from dragoman.run_dir import load_tensors, save_tensors
from dragoman.training.execution import ExecutionPlan
from dragoman.training.step import Stepper, fetch_metrics, load_weights
from dragoman.types import Batch
from pairs import iterate_pairs, pairwise
from tolerance import DEVICES, assert_different, assert_same
from toy_batch import VOCABULARY
from toy_models import (
    HYBRID,
    RNN,
    SMALL_HYBRID,
    SMALL_RNN,
    SMALL_TRANSFORMER,
    TRANSFORMER,
    Section,
    build_small_model,
    collate_rows,
    compute_loss,
    compute_states,
    find_refusal,
    make_examples,
    make_model_sections,
)
from toy_sections import settings_of

pytestmark = pytest.mark.slow
CASES = make_model_sections()
ALL_SECTIONS = pytest.mark.parametrize("section", CASES.values(), ids=CASES.keys())
GENERATORS = {name: section for name, section in CASES.items() if settings_of(section).task != "classify"}
ALL_GENERATORS = pytest.mark.parametrize("section", GENERATORS.values(), ids=GENERATORS.keys())
UNPACKED = [[item] for item in range(6)]
PACKED = [[0, 1, 2], [3], [], [4, 5]]


def choose_rows(section: Section) -> list[list[int]]:
    return PACKED if settings_of(section).layout == "packed" else UNPACKED


@ALL_SECTIONS
@pytest.mark.parametrize("device", DEVICES)
def test_every_weight_gets_a_gradient(section: Section, device: str) -> None:
    model = build_small_model(section, dtype=torch.float32).to(device)
    batch = collate_rows(section, choose_rows(section), make_examples(section), spare=3).to(torch.device(device))
    compute_loss(model, batch).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    reached = [name for name, parameter in model.named_parameters() if parameter.grad.abs().sum() > 0]
    idle = {name for name, _ in model.named_parameters()} - set(reached)
    assert not {name for name in idle if not may_lack_gradient(name, model)}, idle


def may_lack_gradient(name: str, model: Model) -> bool:
    """Return whether a weight has no effect: recurrent weights of the top cell, if only its first state is read."""
    if not isinstance(model, TextClassifier):
        return False
    states_BSC = torch.randn(1, 3, 8, requires_grad=True)
    pooled_BTC = model.pool(states_BSC, RowLayout.from_padding_mask(torch.ones(1, 3, dtype=torch.bool)), 1)
    (grad_BSC,) = torch.autograd.grad(pooled_BTC.sum(), states_BSC)
    read = tuple((grad_BSC != 0).any(-1)[0].tolist())
    idle = {(True, False, False): "1.ahead.hidden_weight", (False, False, True): "1.back.hidden_weight"}
    return idle.get(read, "-") in name


@ALL_SECTIONS
@pytest.mark.parametrize("device", DEVICES)
def test_states_do_not_depend_on_packing_batch_and_padding(section: Section, device: str) -> None:
    """A sentence has the same states alone and packed with others, in a batch of any order, with padding."""
    model, examples = build_small_model(section).to(device).eval(), make_examples(section)
    single = [
        compute_states(model, collate_rows(section, [[item]], examples).to(torch.device(device)))[0]
        for item in range(6)
    ]
    for rows in (choose_rows(section), UNPACKED[::-1]):
        found = compute_states(
            model, fill_padding(collate_rows(section, rows, examples, spare=5)).to(torch.device(device))
        )
        for item, states in zip([item for row in rows for item in row], found, strict=True):
            assert_same(states, single[item])


def fill_padding(batch: Batch) -> Batch:
    """Return the batch with arbitrary ids in place of the padding."""
    source_BS = batch.source_BS.masked_fill(batch.source_segment_BS == 0, 17)
    return replace(
        batch, source_BS=source_BS, target_in_BT=batch.target_in_BT.masked_fill(batch.target_segment_BT == 0, 18)
    )


@ALL_SECTIONS
def test_the_gradient_of_a_batch_is_the_sum_over_its_sentences(section: Section) -> None:
    model, examples = build_small_model(section).eval(), make_examples(section, 3)
    compute_loss(model, collate_rows(section, UNPACKED[:3], examples, spare=4)).backward()
    batch_grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for row in UNPACKED[:3]:
        compute_loss(model, collate_rows(section, [row], examples)).backward()
    for name, parameter in model.named_parameters():
        gradient = batch_grads[name]
        assert gradient is not None, name
        assert parameter.grad is not None, name
        assert_same(gradient, parameter.grad, torch.float32)  # the loss is in float32


@ALL_GENERATORS
def test_states_do_not_depend_on_later_target_tokens(section: Section) -> None:
    model, examples = build_small_model(section).eval(), make_examples(section)
    batch = collate_rows(section, choose_rows(section), examples)
    before = model(batch)
    for position in (1, 2, 7):
        changed_BT = (batch.target_position_BT == position) & (batch.target_segment_BT > 0)
        other = (batch.target_in_BT - 3) % 36 + 4
        after = model(replace(batch, target_in_BT=torch.where(changed_BT, other, batch.target_in_BT)))
        earlier = (batch.target_position_BT < position) & (batch.target_segment_BT > 0)
        assert_same(after[earlier], before[earlier])
        assert not changed_BT.any() or not torch.equal(after[changed_BT], before[changed_BT])


@torch.no_grad()
@ALL_GENERATORS
def test_decoding_step_by_step_equals_the_forward_pass(section: Section) -> None:
    """The cache is used, and rows are copied, dropped and swapped between steps, as in beam search."""
    beams = 3
    model, random = build_small_model(section).eval(), torch.Generator().manual_seed(1)
    batch = repeat_rows(collate_rows(section, UNPACKED, make_examples(section), spare=2), beams)
    N, T = batch.target_in_BT.shape
    token_NT = torch.randint(4, VOCABULARY, (N, T), generator=random)
    token_NT[:, 0] = batch.target_in_BT[:, 0]
    state, logps = start_decoding(model, batch), list[Tensor]()
    for t in range(T):
        logp_NV, state = model.step(token_NT[:, t], state)
        parent_N = torch.arange(N) // beams * beams + torch.randint(beams, (N,), generator=random)
        token_NT[:, : t + 1] = token_NT[parent_N, : t + 1]
        logps = [previous_NV[parent_N] for previous_NV in (*logps, logp_NV)]
        state = state.select(parent_N)
    full_NTV = model.compute_logits(model(replace(batch, target_in_BT=token_NT))).log_softmax(-1)
    real_NT = batch.target_segment_BT > 0
    assert_same(torch.stack(logps, 1)[real_NT], full_NTV[real_NT], torch.float32)


def repeat_rows(batch: Batch, times: int) -> Batch:
    """Return the batch with every row repeated, the copies of a row adjacent."""
    return batch.map_tensors(lambda tensor: tensor.repeat_interleave(times, 0))


def start_decoding(model: Model, batch: Batch) -> Any:
    features = (batch.features,) if batch.features else ()
    return model.start(batch.source_BS, batch.source_segment_BS > 0, *features)


@ALL_SECTIONS
def test_a_saved_and_loaded_model_is_the_same(section: Section, tmp_path: Path) -> None:
    model, other = build_small_model(section), build_small_model(section, seed=1)
    batch = collate_rows(section, choose_rows(section), make_examples(section))
    save_tensors(tmp_path / "model.safetensors", collect_weights(model))
    load_weights(other, load_tensors(tmp_path / "model.safetensors")[0])
    for actual, expected in zip(compute_states(model.eval(), batch), compute_states(other.eval(), batch), strict=True):
        assert torch.equal(actual, expected)


@ALL_SECTIONS
@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_close_to_float32(section: Section, device: str) -> None:
    model = build_small_model(section, dtype=torch.float32).to(device).eval()
    batch = collate_rows(section, choose_rows(section), make_examples(section)).to(torch.device(device))
    with torch.no_grad():
        expected = torch.cat(compute_states(model, batch))
        with torch.autocast(device, torch.bfloat16):
            found = torch.cat(compute_states(model, batch))
    assert float((found.float() - expected).norm() / expected.norm()) < 0.06
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device)
    exact, rounded = compute_grads(model, batch, weights), compute_grads(model, batch, weights, torch.bfloat16)
    assert float((rounded - exact).norm() / exact.norm()) < 0.25  # coarse rounding at width 8; wrong ones are off by 1


def compute_grads(model: Model, batch: Batch, weights: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return all gradients of a weighted sum of the states, as one vector."""
    model.zero_grad()
    with torch.autocast(weights.device.type, dtype, enabled=dtype is not None):
        states = torch.cat(compute_states(model, batch))
    (states * weights).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


BASES: dict[str, tuple[Section, dict[str, Sequence[Any]]]] = {
    "transformer": (SMALL_TRANSFORMER, TRANSFORMER),
    "rnn": (SMALL_RNN, RNN),
    "hybrid": (SMALL_HYBRID, HYBRID),
}


def train_one_step(section: Section) -> None:
    model = build_small_model(section, dtype=torch.float32)
    batch = collate_rows(section, choose_rows(section), make_examples(section))
    stepper = Stepper(model, TrainSettings(), ExecutionPlan("cpu", "float32", False, 1))
    before = model.project.weight.detach().clone()
    assert fetch_metrics([stepper.update([batch], 1, 1e-3)])[0].finite, section
    assert not torch.equal(before, model.project.weight), section


@pytest.mark.parametrize("kind", BASES)
def test_every_pair_of_choices_trains_or_is_refused_with_a_message(kind: str) -> None:
    """All other settings are chosen at random."""
    base, choices_by_setting = BASES[kind]
    shallow = {**base, "layers": 1}
    combinations = pairwise(choices_by_setting, lambda choices: not find_refusal({**shallow, **choices}))
    trained = {pair for choices in combinations for pair in itertools.combinations(choices.items(), 2)}
    for choices in combinations:
        train_one_step({**shallow, **choices})
    refused = [pair for pair in iterate_pairs(choices_by_setting) if pair not in trained]
    for pair in refused:
        message = find_refusal({**shallow, **dict(pair)})
        assert "model." in message, pair
        assert "\n" not in message
    assert 3 * len(refused) < len(trained)


@pytest.mark.parametrize("norm", TRANSFORMER["norm"])
@pytest.mark.parametrize("activation", TRANSFORMER["activation"])
def test_an_encoder_without_positions_is_permutation_equivariant(norm: str, activation: str) -> None:
    """The states of a shuffled sentence are the shuffled states, and its translation is the same."""
    section = {**SMALL_TRANSFORMER, "position": "none", "norm": norm, "activation": activation}
    model, examples = build_small_model(section).eval(), make_examples(section, 1, longest=9)
    order = torch.randperm(len(examples[0].source), generator=torch.Generator().manual_seed(1))
    shuffled = examples[0]._replace(source=examples[0].source[order.numpy()])
    states: list[Tensor] = []
    model.encoder.register_forward_hook(lambda *hooked: states.append(hooked[-1]))
    outputs = [compute_states(model, collate_rows(section, [[0]], [example]))[0] for example in (examples[0], shuffled)]
    assert_same(states[1][0, : len(order)], states[0][0, order])
    assert_same(outputs[1], outputs[0])


ORDERED = [name for name, scheme in POSITIONS.items() if scheme != PositionScheme() and not scheme.source_features]


@pytest.mark.parametrize("position", ORDERED)
def test_an_encoder_with_positions_depends_on_the_order(position: str) -> None:
    section = {**SMALL_TRANSFORMER, "position": position}
    model, examples = build_small_model(section).eval(), make_examples(section, 1, longest=9)
    shuffled = examples[0]._replace(source=examples[0].source[::-1].copy())
    states, shuffled_states = (
        compute_states(model, collate_rows(section, [[0]], [example]))[0] for example in (examples[0], shuffled)
    )
    assert_different(states, shuffled_states)


REGISTRIES: dict[str, tuple[dict[str, Any], Section]] = {
    "norm": (NORMS, SMALL_TRANSFORMER),
    "position": (POSITIONS, SMALL_TRANSFORMER),
    "attention": (PATTERNS, SMALL_TRANSFORMER),
    "activation": (FEEDFORWARDS, SMALL_TRANSFORMER),
    "kernel": (KERNELS, SMALL_TRANSFORMER),
    "cell": (CELLS, SMALL_RNN),
    "attention of an rnn": (SCORES, SMALL_RNN),
    "score": (SCORES, SMALL_HYBRID),
    "pool": (POOLS, {**SMALL_TRANSFORMER, "kind": "classifier"}),
}


@pytest.mark.parametrize("registry_name", REGISTRIES)
def test_a_new_registry_entry_can_be_trained(registry_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To add a variant, one line in its registry suffices."""
    entries, base = REGISTRIES[registry_name]
    monkeypatch.setitem(entries, "new", list(entries.values())[-2])
    section = {**base, registry_name.split()[0]: "new"}
    train_one_step(section)
