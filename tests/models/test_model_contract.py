"""What every model of every registry guarantees: one list of laws, run over all of them.

A new entry of a registry is in these tests without a line being added here.
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
from dragoman.models.base import Model, collect_tensors
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
EVERY = pytest.mark.parametrize("section", CASES.values(), ids=CASES.keys())
WRITERS = {name: section for name, section in CASES.items() if settings_of(section).task != "classify"}
EVERY_WRITER = pytest.mark.parametrize("section", WRITERS.values(), ids=WRITERS.keys())
ALONE = [[item] for item in range(6)]
PACKED = [[0, 1, 2], [3], [], [4, 5]]


def packed(section: Section) -> list[list[int]]:
    return PACKED if settings_of(section).layout == "packed" else ALONE


@EVERY
@pytest.mark.parametrize("device", DEVICES)
def test_forward_and_backward_reach_every_weight(section: Section, device: str) -> None:
    model = build_small_model(section, dtype=torch.float32).to(device)
    batch = collate_rows(section, packed(section), make_examples(section), spare=3).to(torch.device(device))
    compute_loss(model, batch).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    reached = [name for name, parameter in model.named_parameters() if parameter.grad.abs().sum() > 0]
    idle = {name for name, _ in model.named_parameters()} - set(reached)
    assert not {name for name in idle if not may_rest(name, model)}, idle


def may_rest(name: str, model: Model) -> bool:
    """What the top cell does with its state, if the pool reads only the token that the cell reads first."""
    if not isinstance(model, TextClassifier):
        return False
    states_BSC = torch.randn(1, 3, 8, requires_grad=True)
    pooled_BTC = model.pool(states_BSC, RowLayout.from_padding_mask(torch.ones(1, 3, dtype=torch.bool)), 1)
    (grad_BSC,) = torch.autograd.grad(pooled_BTC.sum(), states_BSC)
    read = tuple((grad_BSC != 0).any(-1)[0].tolist())
    idle = {(True, False, False): "1.ahead.hidden_weight", (False, False, True): "1.back.hidden_weight"}
    return idle.get(read, "-") in name


@EVERY
@pytest.mark.parametrize("device", DEVICES)
def test_neighbours_and_padding_change_nothing(section: Section, device: str) -> None:
    """Packed, in a batch, in any order and with room left over, a sentence is what it is alone."""
    model, examples = build_small_model(section).to(device).eval(), make_examples(section)
    alone = [
        compute_states(model, collate_rows(section, [[item]], examples).to(torch.device(device)))[0]
        for item in range(6)
    ]
    for rows in (packed(section), ALONE[::-1]):
        found = compute_states(
            model, scribbled(collate_rows(section, rows, examples, spare=5)).to(torch.device(device))
        )
        for item, states in zip([item for row in rows for item in row], found, strict=True):
            assert_same(states, alone[item])


def scribbled(batch: Batch) -> Batch:
    """The batch with something written where nothing is."""
    source_BS = batch.source_BS.masked_fill(batch.source_segment_BS == 0, 17)
    return replace(
        batch, source_BS=source_BS, target_in_BT=batch.target_in_BT.masked_fill(batch.target_segment_BT == 0, 18)
    )


@EVERY
def test_gradients_of_neighbours_add_up(section: Section) -> None:
    model, examples = build_small_model(section).eval(), make_examples(section, 3)
    compute_loss(model, collate_rows(section, ALONE[:3], examples, spare=4)).backward()
    together = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for row in ALONE[:3]:
        compute_loss(model, collate_rows(section, [row], examples)).backward()
    for name, parameter in model.named_parameters():
        gradient = together[name]
        assert gradient is not None, name
        assert parameter.grad is not None, name
        assert_same(gradient, parameter.grad, torch.float32)  # the loss is in float32


@EVERY_WRITER
def test_nothing_looks_ahead(section: Section) -> None:
    model, examples = build_small_model(section).eval(), make_examples(section)
    batch = collate_rows(section, packed(section), examples)
    before = model(batch)
    for at in (1, 2, 7):
        here = (batch.target_position_BT == at) & (batch.target_segment_BT > 0)
        other = (batch.target_in_BT - 3) % 36 + 4
        after = model(replace(batch, target_in_BT=torch.where(here, other, batch.target_in_BT)))
        earlier = (batch.target_position_BT < at) & (batch.target_segment_BT > 0)
        assert_same(after[earlier], before[earlier])
        assert not here.any() or not torch.equal(after[here], before[here])


@torch.no_grad()
@EVERY_WRITER
@pytest.mark.parametrize("beams", [1, 3])
def test_step_by_step_is_all_at_once(section: Section, beams: int) -> None:
    """With a cache, and with rows that are copied, lost and swapped on the way as beams are."""
    model, random = build_small_model(section).eval(), torch.Generator().manual_seed(1)
    batch = repeated(collate_rows(section, ALONE, make_examples(section), spare=2), beams)
    N, T = batch.target_in_BT.shape
    token_NT = torch.randint(4, VOCABULARY, (N, T), generator=random)
    token_NT[:, 0] = batch.target_in_BT[:, 0]
    state, said = started(model, batch), list[Tensor]()
    for at in range(T):
        logp_NV, state = model.step(token_NT[:, at], state)
        parent_N = torch.arange(N) // beams * beams + torch.randint(beams, (N,), generator=random)
        token_NT[:, : at + 1] = token_NT[parent_N, : at + 1]
        said = [each_NV[parent_N] for each_NV in (*said, logp_NV)]
        state = state.select(parent_N)
    whole_NTV = model.project(model(replace(batch, target_in_BT=token_NT))).log_softmax(-1)
    real_NT = batch.target_segment_BT > 0
    assert_same(torch.stack(said, 1)[real_NT], whole_NTV[real_NT], torch.float32)


def repeated(batch: Batch, times: int) -> Batch:
    """The batch with every row so many times, one after the other."""
    return batch.map_tensors(lambda tensor: tensor.repeat_interleave(times, 0))


def started(model: Model, batch: Batch) -> Any:
    features = (batch.features,) if batch.features else ()
    return model.start(batch.source_BS, batch.source_segment_BS > 0, *features)


@EVERY
def test_saved_and_loaded_it_is_the_same(section: Section, tmp_path: Path) -> None:
    model, other = build_small_model(section), build_small_model(section, seed=1)
    batch = collate_rows(section, packed(section), make_examples(section))
    save_tensors(tmp_path / "model.safetensors", collect_tensors(model))
    load_weights(other, load_tensors(tmp_path / "model.safetensors")[0])
    for one, two in zip(compute_states(model.eval(), batch), compute_states(other.eval(), batch), strict=True):
        assert torch.equal(one, two)


@EVERY
@pytest.mark.parametrize("device", DEVICES)
def test_bf16_is_close(section: Section, device: str) -> None:
    model = build_small_model(section, dtype=torch.float32).to(device).eval()
    batch = collate_rows(section, packed(section), make_examples(section)).to(torch.device(device))
    with torch.no_grad():
        expected = torch.cat(compute_states(model, batch))
        with torch.autocast(device, torch.bfloat16):
            found = torch.cat(compute_states(model, batch))
    assert float((found.float() - expected).norm() / expected.norm()) < 0.06
    slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device)
    exact, rounded = gradients(model, batch, slope), gradients(model, batch, slope, torch.bfloat16)
    assert float((rounded - exact).norm() / exact.norm()) < 0.25  # a width of 8 rounds roughly; a wrong one is off by 1


def gradients(model: Model, batch: Batch, slope: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Of a weighted sum of the states, all in one row."""
    model.zero_grad()
    with torch.autocast(slope.device.type, dtype, enabled=dtype is not None):
        states = torch.cat(compute_states(model, batch))
    (states * slope).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


BASES: dict[str, tuple[Section, dict[str, Sequence[Any]]]] = {
    "transformer": (SMALL_TRANSFORMER, TRANSFORMER),
    "rnn": (SMALL_RNN, RNN),
    "hybrid": (SMALL_HYBRID, HYBRID),
}


def takes_a_step(section: Section) -> None:
    model = build_small_model(section, dtype=torch.float32)
    batch = collate_rows(section, packed(section), make_examples(section))
    stepper = Stepper(model, TrainSettings(), ExecutionPlan("cpu", "float32", False, 1))
    before = model.project.weight.detach().clone()
    assert fetch_metrics([stepper.update([batch], 1, 1e-3)])[0].finite, section
    assert not torch.equal(before, model.project.weight), section


@pytest.mark.parametrize("kind", BASES)
def test_every_two_choices_take_a_step_together_or_are_refused_with_a_sentence(kind: str) -> None:
    """Whatever else is chosen: the other choices of a combination are drawn at random."""
    base, menus = BASES[kind]
    shallow = {**base, "layers": 1}
    combinations = pairwise(menus, lambda choices: not find_refusal({**shallow, **choices}))
    met = {pair for choices in combinations for pair in itertools.combinations(choices.items(), 2)}
    for choices in combinations:
        takes_a_step({**shallow, **choices})
    refused = [pair for pair in iterate_pairs(menus) if pair not in met]
    for pair in refused:
        why = find_refusal({**shallow, **dict(pair)})
        assert "model." in why, pair
        assert "\n" not in why
    assert 3 * len(refused) < len(met)


@pytest.mark.parametrize("norm", TRANSFORMER["norm"])
@pytest.mark.parametrize("activation", TRANSFORMER["activation"])
def test_an_encoder_without_positions_does_not_know_the_order(norm: str, activation: str) -> None:
    """A law: the states of a shuffled sentence are the shuffled states, and its translation is the same."""
    section = {**SMALL_TRANSFORMER, "position": "none", "norm": norm, "activation": activation}
    model, examples = build_small_model(section).eval(), make_examples(section, 1, longest=9)
    order = torch.randperm(len(examples[0].source), generator=torch.Generator().manual_seed(1))
    turned = examples[0]._replace(source=examples[0].source[order.numpy()])
    states: list[Tensor] = []
    model.encoder.register_forward_hook(lambda *hooked: states.append(hooked[-1]))
    answers = [compute_states(model, collate_rows(section, [[0]], [example]))[0] for example in (examples[0], turned)]
    assert_same(states[1][0, : len(order)], states[0][0, order])
    assert_same(answers[1], answers[0])


ORDERED = [name for name, each in POSITIONS.items() if each != PositionScheme() and not each.features]


@pytest.mark.parametrize("position", ORDERED)
def test_an_encoder_with_positions_knows_the_order(position: str) -> None:
    section = {**SMALL_TRANSFORMER, "position": position}
    model, examples = build_small_model(section).eval(), make_examples(section, 1, longest=9)
    turned = examples[0]._replace(source=examples[0].source[::-1].copy())
    one, other = (
        compute_states(model, collate_rows(section, [[0]], [example]))[0] for example in (examples[0], turned)
    )
    assert_different(one, other)


MENUS: dict[str, tuple[dict[str, Any], Section]] = {
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


@pytest.mark.parametrize("menu", MENUS)
def test_a_variant_is_one_more_line_on_its_menu(menu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else must be known of it stands with it: a new name on a menu is a setting that trains."""
    entries, base = MENUS[menu]
    monkeypatch.setitem(entries, "new", list(entries.values())[-2])
    section = {**base, menu.split()[0]: "new"}
    takes_a_step(section)
