"""Recurrent cells agree with PyTorch's modules; steps agree with full sentences; layers ignore padding."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dragoman.kernels.attention import RowLayout
from dragoman.modules.recurrent import (
    CELLS,
    NONLINEARITIES,
    Cell,
    CellSettings,
    CellStack,
    CellState,
    GruCell,
    RecurrentLayer,
    SentenceEnds,
)
from tolerance import DEVICES, assert_different, assert_same

CELLS_AND_NONLINEARITIES = [
    (kind, name)
    for kind, cell in CELLS.items()
    for name in (NONLINEARITIES if "nonlinearity" in cell.uses else ("tanh",))
]
ALL_CELLS = pytest.mark.parametrize(("kind", "nonlinearity"), CELLS_AND_NONLINEARITIES)
CELLS_IN_PYTORCH = [
    (kind, name) for kind, name in CELLS_AND_NONLINEARITIES if CELLS[kind].torch_module and name in ("tanh", "relu")
]
B, T, I, C = 3, 7, 5, 4


def make_cell(kind: str, nonlinearity: str, *, dtype: torch.dtype = torch.float64, **options: Any) -> Cell:
    """Return a cell with random parameters, so that errors in biases and initial states show."""
    torch.manual_seed(0)
    cell = CELLS[kind](CellSettings(nonlinearity=nonlinearity), I, C, **options)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return cell.to(dtype)


def make_inputs(cell: Cell, *, leaf: bool = True) -> tuple[Tensor, CellState]:
    generator = torch.Generator().manual_seed(1)
    x_BTI = torch.randn(B, T, I, dtype=torch.float64, generator=generator)
    state = [torch.randn(B, C, dtype=torch.float64, generator=generator) * 0.5 for _ in range(cell.state_tensors)]
    x_BTI, *state = (t.to(cell.bias).requires_grad_(leaf) for t in (x_BTI, *state))
    return x_BTI, tuple(state)


def compute_gradients(out: Tensor, *leaves: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out)
    return list(torch.autograd.grad((out * weight).sum(), leaves))


def make_torch_module(cell: Cell, nonlinearity: str) -> nn.RNNBase:
    """Return PyTorch's module with the parameters of the cell."""
    options: dict[str, Any] = {"nonlinearity": nonlinearity} if "nonlinearity" in cell.uses else {}
    module: Any = cell.torch_module
    assert module is not None
    torch_module: nn.RNNBase = module(I, C, batch_first=True, **options).to(cell.bias)
    with torch.no_grad():
        torch_module.weight_ih_l0.copy_(cell.input_weight)
        torch_module.weight_hh_l0.copy_(cell.hidden_weight)
        torch_module.bias_ih_l0.copy_(cell.bias)
        torch_module.bias_hh_l0.copy_(cell.make_hidden_bias())
    return torch_module


@pytest.mark.parametrize(("kind", "nonlinearity"), CELLS_IN_PYTORCH)
@pytest.mark.parametrize("method", ["forward", "run_loop"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_cell_matches_pytorch(kind: str, nonlinearity: str, method: str, dtype: torch.dtype, device: str) -> None:
    """Outputs and gradients of inputs, initial states and parameters are equal."""
    cell = make_cell(kind, nonlinearity, dtype=dtype).to(device)
    torch_cell: Any = make_torch_module(cell, nonlinearity)
    x_BTI, state = make_inputs(cell)
    initial = [part[None] for part in state]
    content_bias = [cell.content_bias] if isinstance(cell, GruCell) else []
    weights = (torch_cell.weight_ih_l0, torch_cell.weight_hh_l0, torch_cell.bias_ih_l0, torch_cell.bias_hh_l0)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # TF32 would round float32 to 11 bits
        out = cell(x_BTI, state) if method == "forward" else cell.run_loop(x_BTI, state)[0]
        grads = compute_gradients(out, x_BTI, *state, cell.input_weight, cell.hidden_weight, cell.bias, *content_bias)
        expected, _ = torch_cell(x_BTI, tuple(initial) if len(initial) > 1 else initial[0])
        *expected_grads, hidden_bias_grad = compute_gradients(expected, x_BTI, *state, *weights)
    assert_same(out, expected)
    for actual, wanted in zip(
        grads, [*expected_grads, hidden_bias_grad[2 * C :]] if content_bias else expected_grads, strict=True
    ):
        assert_same(actual, wanted)


@ALL_CELLS
def test_fused_kernel_matches_steps(kind: str, nonlinearity: str) -> None:
    cell = make_cell(kind, nonlinearity)
    x_BTI, state = make_inputs(cell)
    fused, current, out = cell(x_BTI, state), state, []
    for x_BI in x_BTI.unbind(1):
        current = cell.step(x_BI, current)
        out.append(current[0])
    expected = torch.stack(out, 1)
    assert_same(fused, expected)
    leaves = [x_BTI, *state, *(p for p in cell.parameters())]
    for actual, wanted in zip(compute_gradients(fused, *leaves), compute_gradients(expected, *leaves), strict=True):
        assert_same(actual, wanted)


def test_lstm_equals_its_equations() -> None:
    """Each gate has a matrix W for the state, a matrix U for the input and a bias b."""
    cell = make_cell("lstm", "tanh")
    x_BTI, (h, c) = make_inputs(cell, leaf=False)
    U, W, b = (dict(zip("ifco", t.chunk(4))) for t in (cell.input_weight, cell.hidden_weight, cell.bias))
    out = []
    for x in x_BTI.unbind(1):
        gate = {name: h @ W[name].T + x @ U[name].T + b[name] for name in "ifco"}
        f, i, o = gate["f"].sigmoid(), gate["i"].sigmoid(), gate["o"].sigmoid()
        c = f * c + i * gate["c"].tanh()
        h = o * c.tanh()
        out.append(h)
    assert_same(cell(x_BTI, make_inputs(cell, leaf=False)[1]), torch.stack(out, 1))


@ALL_CELLS
@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_close_to_float32(kind: str, nonlinearity: str, device: str) -> None:
    cell = make_cell(kind, nonlinearity, dtype=torch.float32).to(device)
    x_BTI, state = make_inputs(cell)
    exact = cell(x_BTI, state)
    with torch.autocast(device, torch.bfloat16):
        rounded = cell(x_BTI, state)
    assert rounded.dtype == torch.bfloat16
    assert_same(rounded, exact)
    leaves = [x_BTI, *state, *cell.parameters()]
    for actual, wanted in zip(compute_gradients(rounded, *leaves), compute_gradients(exact, *leaves), strict=True):
        assert actual.dtype == torch.float32
        assert_same(actual, wanted, torch.bfloat16)


def test_lstm_keeps_its_memory_with_an_open_forget_gate() -> None:
    """With a closed input gate and an open forget gate, the memory cell keeps its value."""
    cell = CELLS["lstm"](CellSettings(), I, C).double()
    with torch.no_grad():
        cell.bias[:C], cell.bias[C : 2 * C] = -1e4, 1e4
    state = make_inputs(cell, leaf=False)[1]
    for x_BI in make_inputs(cell, leaf=False)[0].unbind(1):
        after = cell.step(x_BI, state)
        assert_same(after[1], state[1])
        state = after
    assert (CELLS["lstm"](CellSettings(), I, C).bias[C : 2 * C] == 1).all()


@ALL_CELLS
@pytest.mark.parametrize("learned", [False, True])
def test_initial_state(kind: str, nonlinearity: str, learned: bool) -> None:
    cell = make_cell(kind, nonlinearity, learned_start=learned)
    state = cell.make_initial_state(B)
    assert [part.shape for part in state] == [(B, C)] * cell.state_tensors
    if not learned:
        assert all((part == 0).all() for part in state)
        return
    assert cell.start is not None
    for part_BC, start_C in zip(state, cell.start, strict=True):
        assert_same(part_BC, start_C.expand(B, C))
    [start_grad] = compute_gradients(cell(make_inputs(cell)[0], state), cell.start)
    assert (start_grad.abs() > 1e-6).all()


LENGTHS = [7, 4, 1, 0]


def make_rows(lengths: list[int], width: int) -> RowLayout:
    return RowLayout.from_padding_mask(torch.arange(width) < torch.tensor(lengths)[:, None])


def test_reverse_and_select_last_ignore_padding() -> None:
    ends = SentenceEnds(make_rows(LENGTHS, T))
    x_BTC = torch.arange(len(LENGTHS) * T * 2.0).view(len(LENGTHS), T, 2)
    reversed_BTC, last_BC = ends.reverse(x_BTC), ends.select_last(x_BTC)
    for x_TC, reversed_TC, last_C, length in zip(x_BTC, reversed_BTC, last_BC, LENGTHS, strict=True):
        assert (reversed_TC == torch.cat([x_TC[:length].flip(0), x_TC[length:]])).all()
        assert (last_C == x_TC[max(length - 1, 0)]).all()
    assert (ends.reverse(ends.reverse(x_BTC)) == x_BTC).all()


@ALL_CELLS
@pytest.mark.parametrize("bidirectional", [False, True])
def test_layer_encodes_sentences_independently(kind: str, nonlinearity: str, bidirectional: bool) -> None:
    torch.manual_seed(0)
    make = partial(CELLS[kind], CellSettings(nonlinearity=nonlinearity), learned_start=True)
    layer = RecurrentLayer(make, I, C, bidirectional=bidirectional).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    x_BTI = torch.randn(len(LENGTHS), T, I, dtype=torch.float64)
    out_BTC, (last_BC,) = layer(x_BTI, SentenceEnds(make_rows(LENGTHS, T)))
    for b, length in enumerate(LENGTHS[:-1]):
        single, (last,) = layer(x_BTI[b : b + 1, :length], SentenceEnds(make_rows([length], length)))
        assert_same(out_BTC[b, :length], single[0])
        assert_same(last_BC[b], last[0])
        half = C // 2 if bidirectional else C
        assert_same(last[0, :half], single[0, -1, :half])
        assert_same(last[0, half:], single[0, 0, half:])  # the backward cell ends at the first token
    assert out_BTC.isfinite().all()


@ALL_CELLS
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_whole_final_state_is_that_of_the_last_step(kind: str, nonlinearity: str, bidirectional: bool) -> None:
    """The reference reads each sentence alone, token by token; padding and other sentences have no influence."""
    torch.manual_seed(0)
    make = partial(CELLS[kind], CellSettings(nonlinearity=nonlinearity), learned_start=True)
    layer = RecurrentLayer(make, I, C, bidirectional=bidirectional).double()
    x_BTI, ends = torch.randn(len(LENGTHS), T, I, dtype=torch.float64), SentenceEnds(make_rows(LENGTHS, T))
    out_BTC, last = layer(x_BTI, ends, whole_state=True)
    assert_same(out_BTC, layer(x_BTI, ends)[0])
    assert len(last) == CELLS[kind].state_tensors
    for b, length in enumerate(LENGTHS[:-1]):
        tokens = [x_BTI[b : b + 1, t] for t in range(length)]
        states = []
        for cell, order in ((layer.ahead, tokens), (layer.back, tokens[::-1])):
            if cell is not None:
                state = cell.make_initial_state(1)
                for x_1I in order:
                    state = cell.step(x_1I, state)
                states.append(state)
        for part_BC, expected in zip(last, zip(*states, strict=True), strict=True):
            assert_same(part_BC[b], torch.cat(expected, -1)[0])


def test_bidirectional_layer_depends_on_both_sides() -> None:
    torch.manual_seed(0)
    layer = RecurrentLayer(partial(CELLS["lstm"], CellSettings()), I, C, bidirectional=True).double()
    x_BTI = torch.randn(1, T, I, dtype=torch.float64)
    ends = SentenceEnds(make_rows([T], T))
    before = layer(x_BTI, ends)[0]
    for t in range(T):
        changed_BTI = x_BTI.clone()
        changed_BTI[0, t] += 1
        changed_T2 = (layer(changed_BTI, ends)[0] - before)[0].unflatten(-1, (2, -1)).abs().amax(-1) > 1e-9
        assert changed_T2[:, 0].tolist() == [position >= t for position in range(T)]
        assert changed_T2[:, 1].tolist() == [position <= t for position in range(T)]


@ALL_CELLS
def test_stack_steps_equal_one_forward_pass(kind: str, nonlinearity: str) -> None:
    torch.manual_seed(0)
    make = partial(CELLS[kind], CellSettings(nonlinearity=nonlinearity), learned_start=True)
    stack = CellStack([make(I, C), make(C, C), make(C, C)], dropout=0.5).double().eval()
    x_BTI = torch.randn(B, T, I, dtype=torch.float64)
    states = stack.make_initial_state(B)
    out = []
    for x_BI in x_BTI.unbind(1):
        top, states = stack.advance(stack.cells[0].project_input(x_BI), states)
        out.append(top)
    assert_same(stack(x_BTI, stack.make_initial_state(B)), torch.stack(out, 1))


def test_dropout_is_only_between_layers() -> None:
    torch.manual_seed(0)
    cells = [CELLS["gru"](CellSettings(), width, C) for width in (I, C)]
    x_BTI = torch.randn(B, T, I)
    one_layer, two_layers = CellStack(cells[:1], dropout=0.9).train(), CellStack(cells, dropout=0.9).train()
    assert_same(one_layer(x_BTI, one_layer.make_initial_state(B)), one_layer(x_BTI, one_layer.make_initial_state(B)))
    assert_different(
        two_layers(x_BTI, two_layers.make_initial_state(B)), two_layers(x_BTI, two_layers.make_initial_state(B))
    )
    two_layers.eval()
    assert_same(
        two_layers(x_BTI, two_layers.make_initial_state(B)),
        cells[1](one_layer(x_BTI, one_layer.make_initial_state(B)), cells[1].make_initial_state(B)),
    )
