"""Probes are compared with finite differences and with the same numbers computed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dragoman.inspection import probes as module
from dragoman.inspection.probes import (
    PROBE_TOKENS,
    Depth,
    Probes,
    compute_mean_loss,
    group_parameters,
    join_steps,
    make_probe_batch,
    measure_attention,
    measure_probes,
    record_outputs,
    select_final_states,
)
from dragoman.kernels.attention import RowLayout
from dragoman.models.base import Model
from dragoman.models.transformer import Transformer
from dragoman.modules.recurrent import CELLS, Cell, RecurrentLayer
from dragoman.types import Batch
from toy_batch import examples
from toy_models import (
    KINDS,
    SMALL_RNN,
    SMALL_TRANSFORMER,
    Section,
    build_small_model,
    collate_rows,
    make_examples,
    make_model_sections,
)

SECTIONS: dict[str, Section] = {
    **KINDS,
    "input feeding": {**SMALL_RNN, "input_feeding": True},
    "shared layers": {**SMALL_TRANSFORMER, "shared": True},
    "untied": {**SMALL_TRANSFORMER, "tied": False},
    "vanilla": {**SMALL_RNN, "cell": "vanilla", "nonlinearity": "identity"},
    "gru": {**SMALL_RNN, "cell": "gru", "bidirectional": False},
}
EPSILON = 1e-5


def make_unpacked(section: Section) -> Batch:
    return collate_rows(section, [[0], [1], [2]], make_examples(section, 3), spare=2)


def measure_slope(loss: Callable[[float], float]) -> float:
    """Return the derivative of a function of one number at 0."""
    return (loss(EPSILON) - loss(-EPSILON)) / (2 * EPSILON)


@pytest.fixture(params=list(SECTIONS.values()), ids=list(SECTIONS))
def section(request: pytest.FixtureRequest) -> Section:
    section: Section = request.param
    return section


@pytest.mark.parametrize("section", make_model_sections().values(), ids=make_model_sections())
def test_every_model_can_be_measured(section: Section) -> None:
    model = build_small_model(section)
    settings: Any = model.settings
    probes = measure_probes(model, make_unpacked(section))
    depths = {"encoder": settings.encoder_depth, "decoder": settings.decoder_depth}
    expected = [(side, layer) for side, depth in depths.items() if hasattr(model, side) for layer in range(depth + 1)]
    assert [(probe.side, probe.layer) for probe in probes.layers] == expected
    assert all(probe.variance > 0 for probe in probes.layers)
    assert {id(p) for group in group_parameters(model).values() for p in group} == set(map(id, model.parameters()))
    gates = sum(cell.gates for cell in model.modules() if isinstance(cell, Cell))
    assert len(probes.recurrent) == gates
    for attention in probes.attention:
        assert all(-1e-9 <= entropy <= attention.maximum + 1e-9 for entropy in attention.entropy)


def test_gradients_of_parameters_are_finite_differences(section: Section) -> None:
    """The loss changes by |g| per unit of length in the direction of the gradient g."""
    model, batch = build_small_model(section).eval(), make_unpacked(section)
    probes = measure_probes(model, batch)
    groups = group_parameters(model)
    assert list(probes.parameter_gradients) == list(groups)
    for group, norm in probes.parameter_gradients.items():
        parameters = groups[group]
        gradients = torch.autograd.grad(compute_mean_loss(model, batch), parameters, allow_unused=True)
        weights = [parameter.detach().clone() for parameter in parameters]

        def move(distance: float) -> float:
            with torch.no_grad():
                for parameter, weight, gradient in zip(parameters, weights, gradients):  # noqa: B023
                    step = 0.0 if gradient is None else gradient * distance / norm  # noqa: B023
                    parameter.copy_(weight + step)
                return float(compute_mean_loss(model, batch))

        assert norm > 0
        assert measure_slope(move) == pytest.approx(norm, rel=1e-5), group
        move(0.0)


@contextmanager
def add_to_output(model: Model, depth: Depth, change_BTC: Tensor) -> Iterator[None]:
    """Add a tensor to one output, wherever `record_outputs` records it."""

    def change_calls(layer: nn.Module, depths: Any, _outputs: Any, stack: Any) -> None:
        keys = iter(depths)

        def add(_module: nn.Module, inputs: Any, output: Any) -> Any:
            if next(keys) != depth:
                return None
            if not isinstance(layer, RecurrentLayer):
                return output + change_BTC
            changed_BTC = output[0] + change_BTC
            return changed_BTC, (select_final_states(layer, changed_BTC, inputs[1]), *output[1][1:])

        stack.callback(layer.register_forward_hook(add).remove)

    def change_steps(cell: Cell, key: Depth, _outputs: Any, stack: Any) -> None:
        advance, steps = cell.advance, iter(range(change_BTC.size(1)))

        def add(gates: Tensor, state: Any) -> Any:
            first, *others = advance(gates, state)
            return (first + change_BTC[:, next(steps)], *others) if key == depth else (first, *others)

        cell.advance = add  # type: ignore[assignment]
        stack.callback(delattr, cell, "advance")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "record_calls", change_calls)
        patch.setattr(module, "record_steps", change_steps)
        with record_outputs(model):
            yield


def test_gradients_of_activations_are_finite_differences(section: Section) -> None:
    model, batch = build_small_model(section).eval(), make_unpacked(section)
    for probe in measure_probes(model, batch).layers:
        depth = probe.side, probe.layer
        with record_outputs(model) as outputs:
            loss = compute_mean_loss(model, batch)
        gradient_BTC = join_steps(torch.autograd.grad(loss, outputs[depth]))
        real_BT = (batch.source_segment_BS if probe.side == "encoder" else batch.target_segment_BT) > 0
        direction_BTC = gradient_BTC * real_BT[..., None] / probe.gradient

        def move(distance: float) -> float:
            with torch.no_grad(), add_to_output(model, depth, distance * direction_BTC):  # noqa: B023
                return float(compute_mean_loss(model, batch))

        assert probe.gradient > 0
        assert measure_slope(move) == pytest.approx(probe.gradient, rel=1e-5), depth


@pytest.mark.parametrize("bidirectional", [True, False])
def test_final_states_are_those_of_the_layer(bidirectional: bool) -> None:
    section = {**SMALL_RNN, "bidirectional": bidirectional}
    model, batch = build_small_model(section), make_unpacked(section)
    found = []

    def compare(layer: Any, inputs: Any, output: Any) -> None:
        found.append(torch.equal(select_final_states(layer, output[0], inputs[1]), output[1][0]))

    for layer in model.modules():
        if isinstance(layer, RecurrentLayer):
            layer.register_forward_hook(compare)
    model(batch)
    assert found == [True, True]


def test_variance_of_a_model_computed_layer_by_layer() -> None:
    """The layers are called one by one, for one sentence at a time, without padding."""
    section = {**SMALL_TRANSFORMER, "dropout": 0.5}
    model, some = build_small_model(section).train(), make_examples(section, 3)
    assert isinstance(model, Transformer)
    measured = measure_probes(model, collate_rows(section, [[0], [1], [2]], some, spare=2)).layers
    outputs: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    model.eval()
    for one in some:
        batch = collate_rows(section, [[0]], [one])
        rows = RowLayout.from_source(batch)
        outputs[0].append(model.encoder.embedding(batch.source_BS)[0] * math.sqrt(8))
        x_BSC = model.encoder.embed(batch.source_BS, rows)
        mask = model.encoder.attention.make_mask(rows)
        for number, layer in enumerate(model.encoder.layers, 1):
            x_BSC = layer(x_BSC, rows, mask)
            outputs[number].append(x_BSC[0])
    expected = [float(np.var(torch.cat(some).detach().numpy())) for some in outputs.values()]
    assert [probe.variance for probe in measured if probe.side == "encoder"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("keys", [1, 2, 7])
def test_entropy_of_uniform_and_of_certain_attention(keys: int) -> None:
    uniform_BHQK = torch.full((2, 3, 4, keys), 1 / keys)
    certain_BHQK = nn.functional.one_hot(torch.zeros(2, 3, 4, dtype=torch.long), keys).float()
    real_BQ = torch.tensor([[True, True, False, False], [True, True, True, True]])
    uniform_BHQK[0, :, 2:] = math.nan  # padding may hold anything
    first, second = measure_attention({"cross": [uniform_BHQK, certain_BHQK]}, {"decoder": real_BQ})
    assert first.entropy == pytest.approx([math.log2(keys)] * 3, abs=1e-6)
    assert first.maximum == pytest.approx(math.log2(keys))
    assert second.entropy == [0.0] * 3
    assert (first.layer, second.layer) == (1, 2)


def test_attention_without_scores_is_uniform_over_visible_tokens() -> None:
    """If all queries are zero, a query attends equally to all tokens that it sees: those before it, in a decoder."""
    model, batch = build_small_model(SMALL_TRANSFORMER), make_unpacked(SMALL_TRANSFORMER)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "query" in name:
                weight.zero_()
    sources, targets = ((s > 0).sum(1).tolist() for s in (batch.source_segment_BS, batch.target_segment_BT))
    expected = {
        "encoder": np.mean([math.log2(length) for length in sources for _ in range(length)]),
        "decoder": np.mean([math.log2(t) for length in targets for t in range(1, length + 1)]),
        "cross": np.mean([math.log2(s) for s, length in zip(sources, targets) for _ in range(length)]),
    }
    for probe in measure_probes(model, batch).attention:
        assert probe.maximum == pytest.approx(expected[probe.part], rel=1e-9)
        assert probe.entropy == pytest.approx([expected[probe.part]] * 2, rel=1e-9)


@pytest.mark.parametrize("cell", CELLS)
def test_singular_values_and_eigenvalues_are_those_of_numpy(cell: str) -> None:
    section = {**SMALL_RNN, "cell": cell}
    model = build_small_model(section)
    found = {(probe.cell, probe.gate): probe for probe in measure_probes(model, make_unpacked(section)).recurrent}
    names = {
        "encoder.layers.0.ahead": "encoder layer 1 ahead",
        "encoder.layers.1.back": "encoder layer 2 back",
        "decoder.stack.cells.1": "decoder layer 2",
    }
    for name, label in names.items():
        part = model.get_submodule(name)
        assert isinstance(part, Cell)
        width = part.width
        for number, gate in enumerate(part.gate_names):
            matrix = part.hidden_weight.detach().numpy()[number * width : (number + 1) * width]
            probe = found.pop((label, gate))
            assert probe.singular_values == pytest.approx(np.linalg.svd(matrix, compute_uv=False).tolist())
            assert probe.spectral_radius == pytest.approx(np.abs(np.linalg.eigvals(matrix)).max())
    assert len(found) == 3 * CELLS[cell].gates


def test_measuring_leaves_no_trace(section: Section) -> None:
    model, batch = build_small_model({**section, "dropout": 0.3}, dtype=torch.float32), make_unpacked(section)
    model.train()
    next(model.parameters()).requires_grad_(False)  # a frozen parameter
    compute_mean_loss(model, batch).backward()

    def snapshot() -> list[Any]:
        hooks = [(part.training, len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()]
        names = [sorted(vars(part)) for part in model.modules()]
        flags = [parameter.requires_grad for parameter in model.parameters()]
        tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters()), torch.get_rng_state()]
        return [hooks, names, flags, [None if t is None else t.clone().numpy().tobytes() for t in tensors]]

    before = snapshot()
    first = measure_probes(model, batch)
    assert snapshot() == before
    assert measure_probes(model, batch) == first


def test_json_is_read_back(section: Section) -> None:
    probes = measure_probes(build_small_model(section), make_unpacked(section))
    text = json.dumps(probes.to_json(), allow_nan=False)
    again = Probes.from_json({"step": 3, "event": "probe", **json.loads(text)})
    assert again.to_json() == probes.to_json()
    assert again.loss == pytest.approx(probes.loss, rel=1e-5)


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    probes = Probes(math.inf, {"a": math.nan}, [], {"target": [1.0, -math.inf]}, [], [])
    text = json.dumps(probes.to_json(), allow_nan=False)
    again = Probes.from_json(json.loads(text))
    assert math.isnan(again.loss)
    assert math.isnan(again.gradient_flow["target"][1])


def test_a_batch_of_probes_has_the_first_examples_that_fit() -> None:
    some = examples(400, longest=30)
    batch = make_probe_batch(some, "pairs")
    assert batch.is_unpacked
    assert max(batch.source_BS.numel(), batch.target_in_BT.numel()) <= PROBE_TOKENS
    assert batch.source_BS[0, : len(some[0].source)].tolist() == some[0].source.tolist()
    assert batch.pairs >= PROBE_TOKENS // 31 - 1
    long = examples(3, longest=10, seed=2)
    long = [one._replace(source=np.full(PROBE_TOKENS + 5 - i, 7)) for i, one in enumerate(long)]
    [row_S] = make_probe_batch(long, "pairs").source_BS
    assert len(row_S) == PROBE_TOKENS + 4
