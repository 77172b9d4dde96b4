"""Recurrent cells: PyTorch's own numbers, fused as step by step, turned round inside their own length."""

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
from tolerance import DEVICES, differ, same

KINDS = [
    (kind, name)
    for kind, cell in CELLS.items()
    for name in (NONLINEARITIES if "nonlinearity" in cell.uses else ("tanh",))
]
EVERY = pytest.mark.parametrize(("kind", "nonlinearity"), KINDS)
PYTORCHS = [(kind, name) for kind, name in KINDS if CELLS[kind].torch_module and name in ("tanh", "relu")]
B, T, I, C = 3, 7, 5, 4


def cell_of(kind: str, nonlinearity: str, *, dtype: torch.dtype = torch.float64, **given: Any) -> Cell:
    """A cell whose biases and start are not at rest, so that a fault in them shows."""
    torch.manual_seed(0)
    cell = CELLS[kind](CellSettings(nonlinearity=nonlinearity), I, C, **given)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return cell.to(dtype)


def inputs(cell: Cell, *, leaf: bool = True) -> tuple[Tensor, CellState]:
    generator = torch.Generator().manual_seed(1)
    x_BTI = torch.randn(B, T, I, dtype=torch.float64, generator=generator)
    state = [torch.randn(B, C, dtype=torch.float64, generator=generator) * 0.5 for _ in range(cell.parts)]
    x_BTI, *state = (t.to(cell.bias).requires_grad_(leaf) for t in (x_BTI, *state))
    return x_BTI, tuple(state)


def slopes(said: Tensor, *wanted: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(said.shape, dtype=torch.float64, generator=generator).to(said)
    return list(torch.autograd.grad((said * weight).sum(), wanted))


def pytorchs(cell: Cell, nonlinearity: str) -> nn.RNNBase:
    """The module of PyTorch with the weights of ours."""
    given: dict[str, Any] = {"nonlinearity": nonlinearity} if "nonlinearity" in cell.uses else {}
    module: Any = cell.torch_module
    assert module is not None
    made: nn.RNNBase = module(I, C, batch_first=True, **given).to(cell.bias)
    with torch.no_grad():
        made.weight_ih_l0.copy_(cell.input_weight)
        made.weight_hh_l0.copy_(cell.hidden_weight)
        made.bias_ih_l0.copy_(cell.bias)
        made.bias_hh_l0.copy_(cell.hidden_bias())
    return made


@pytest.mark.parametrize(("kind", "nonlinearity"), PYTORCHS)
@pytest.mark.parametrize("way", ["forward", "run_loop"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_a_cell_is_pytorchs(kind: str, nonlinearity: str, way: str, dtype: torch.dtype, device: str) -> None:
    """The same outputs, and the same gradients of inputs, first states and every weight."""
    cell = cell_of(kind, nonlinearity, dtype=dtype).to(device)
    twin: Any = pytorchs(cell, nonlinearity)
    x_BTI, state = inputs(cell)
    first = [part[None] for part in state]
    own = [cell.content_bias] if isinstance(cell, GruCell) else []
    weights = (twin.weight_ih_l0, twin.weight_hh_l0, twin.bias_ih_l0, twin.bias_hh_l0)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # it would round float32 to 11 bits
        said = getattr(cell, way)(x_BTI, state)
        mine = slopes(said, x_BTI, *state, cell.input_weight, cell.hidden_weight, cell.bias, *own)
        theirs, _ = twin(x_BTI, tuple(first) if len(first) > 1 else first[0])
        *other, second = slopes(theirs, x_BTI, *state, *weights)
    same(said, theirs)
    for one, two in zip(mine, [*other, second[2 * C :]] if own else other, strict=True):
        same(one, two)


@EVERY
def test_fused_is_step_by_step(kind: str, nonlinearity: str) -> None:
    cell = cell_of(kind, nonlinearity)
    x_BTI, state = inputs(cell)
    fused, now, said = cell(x_BTI, state), state, []
    for x_BI in x_BTI.unbind(1):
        now = cell.step(x_BI, now)
        said.append(now[0])
    plain = torch.stack(said, 1)
    same(fused, plain)
    wanted = [x_BTI, *state, *(p for p in cell.parameters())]
    for one, two in zip(slopes(fused, *wanted), slopes(plain, *wanted), strict=True):
        same(one, two)


def test_the_lstm_of_the_lecture() -> None:
    """Gate by gate, each with a W for the state, a U for the input and a b of its own."""
    cell = cell_of("lstm", "tanh")
    x_BTI, (h, c) = inputs(cell, leaf=False)
    U, W, b = (dict(zip("ifco", t.chunk(4))) for t in (cell.input_weight, cell.hidden_weight, cell.bias))
    said = []
    for x in x_BTI.unbind(1):
        gate = {name: h @ W[name].T + x @ U[name].T + b[name] for name in "ifco"}
        f, i, o = gate["f"].sigmoid(), gate["i"].sigmoid(), gate["o"].sigmoid()
        c = f * c + i * gate["c"].tanh()
        h = o * c.tanh()
        said.append(h)
    same(cell(x_BTI, inputs(cell, leaf=False)[1]), torch.stack(said, 1))


@EVERY
@pytest.mark.parametrize("device", DEVICES)
def test_bf16_is_near(kind: str, nonlinearity: str, device: str) -> None:
    cell = cell_of(kind, nonlinearity, dtype=torch.float32).to(device)
    x_BTI, state = inputs(cell)
    exact = cell(x_BTI, state)
    with torch.autocast(device, torch.bfloat16):
        rough = cell(x_BTI, state)
    assert rough.dtype == torch.bfloat16
    same(rough, exact)
    wanted = [x_BTI, *state, *cell.parameters()]
    for one, two in zip(slopes(rough, *wanted), slopes(exact, *wanted), strict=True):
        assert one.dtype == torch.float32
        same(one, two, torch.bfloat16)


def test_forgetting_is_learned_not_born() -> None:
    """With the input gate shut and the forget gate open, what the cell holds stays: the seeds' example."""
    cell = CELLS["lstm"](CellSettings(), I, C).double()
    with torch.no_grad():
        cell.bias[:C], cell.bias[C : 2 * C] = -1e4, 1e4
    state = inputs(cell, leaf=False)[1]
    for x_BI in inputs(cell, leaf=False)[0].unbind(1):
        after = cell.step(x_BI, state)
        same(after[1], state[1])
        state = after
    assert (CELLS["lstm"](CellSettings(), I, C).bias[C : 2 * C] == 1).all()


@EVERY
@pytest.mark.parametrize("learned", [False, True])
def test_where_a_cell_starts(kind: str, nonlinearity: str, learned: bool) -> None:
    cell = cell_of(kind, nonlinearity, learned=learned)
    state = cell.make_initial_state(B)
    assert [part.shape for part in state] == [(B, C)] * cell.parts
    if not learned:
        assert all((part == 0).all() for part in state)
        return
    assert cell.start is not None
    for part_BC, start_C in zip(state, cell.start, strict=True):
        same(part_BC, start_C.expand(B, C))
    [slope] = slopes(cell(inputs(cell)[0], state), cell.start)
    assert (slope.abs() > 1e-6).all()


LENGTHS = [7, 4, 1, 0]


def rows_of(lengths: list[int], width: int) -> RowLayout:
    return RowLayout.from_padding_mask(torch.arange(width) < torch.tensor(lengths)[:, None])


def test_sentences_are_turned_round_inside_their_own_length() -> None:
    ends = SentenceEnds(rows_of(LENGTHS, T))
    x_BTC = torch.arange(len(LENGTHS) * T * 2.0).view(len(LENGTHS), T, 2)
    for x_TC, turned_TC, last_C, length in zip(x_BTC, ends.reverse(x_BTC), ends.last(x_BTC), LENGTHS, strict=True):
        assert (turned_TC == torch.cat([x_TC[:length].flip(0), x_TC[length:]])).all()
        assert (last_C == x_TC[max(length - 1, 0)]).all()
    assert (ends.reverse(ends.reverse(x_BTC)) == x_BTC).all()


@EVERY
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_reader_reads_each_sentence_as_if_alone(kind: str, nonlinearity: str, bidirectional: bool) -> None:
    torch.manual_seed(0)
    make = partial(CELLS[kind], CellSettings(nonlinearity=nonlinearity), learned=True)
    reader = RecurrentLayer(make, I, C, bidirectional=bidirectional).double()
    with torch.no_grad():
        for parameter in reader.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    x_BTI = torch.randn(len(LENGTHS), T, I, dtype=torch.float64)
    said_BTC, last_BC = reader(x_BTI, SentenceEnds(rows_of(LENGTHS, T)))
    for b, length in enumerate(LENGTHS[:-1]):
        alone, last = reader(x_BTI[b : b + 1, :length], SentenceEnds(rows_of([length], length)))
        same(said_BTC[b, :length], alone[0])
        same(last_BC[b], last[0])
        half = C // 2 if bidirectional else C
        same(last[0, :half], alone[0, -1, :half])
        same(last[0, half:], alone[0, 0, half:])  # what reads from the right says its last word at the left
    assert said_BTC.isfinite().all()


def test_reading_from_both_ends_sees_both() -> None:
    torch.manual_seed(0)
    reader = RecurrentLayer(partial(CELLS["lstm"], CellSettings()), I, C, bidirectional=True).double()
    x_BTI = torch.randn(1, T, I, dtype=torch.float64)
    ends = SentenceEnds(rows_of([T], T))
    before = reader(x_BTI, ends)[0]
    for at in range(T):
        other = x_BTI.clone()
        other[0, at] += 1
        moved_T2 = (reader(other, ends)[0] - before)[0].unflatten(-1, (2, -1)).abs().amax(-1) > 1e-9
        assert moved_T2[:, 0].tolist() == [place >= at for place in range(T)]
        assert moved_T2[:, 1].tolist() == [place <= at for place in range(T)]


@EVERY
def test_a_stack_step_by_step_is_a_stack(kind: str, nonlinearity: str) -> None:
    torch.manual_seed(0)
    make = partial(CELLS[kind], CellSettings(nonlinearity=nonlinearity), learned=True)
    stack = CellStack([make(I, C), make(C, C), make(C, C)], dropout=0.5).double().eval()
    x_BTI = torch.randn(B, T, I, dtype=torch.float64)
    states = stack.make_initial_state(B)
    said = []
    for x_BI in x_BTI.unbind(1):
        top, states = stack.advance(stack.cells[0].project_input(x_BI), states)
        said.append(top)
    same(stack(x_BTI, stack.make_initial_state(B)), torch.stack(said, 1))


def test_dropout_is_between_layers_alone() -> None:
    torch.manual_seed(0)
    cells = [CELLS["gru"](CellSettings(), width, C) for width in (I, C)]
    x_BTI = torch.randn(B, T, I)
    one, two = CellStack(cells[:1], dropout=0.9).train(), CellStack(cells, dropout=0.9).train()
    same(one(x_BTI, one.make_initial_state(B)), one(x_BTI, one.make_initial_state(B)))
    differ(two(x_BTI, two.make_initial_state(B)), two(x_BTI, two.make_initial_state(B)))
    two.eval()
    same(
        two(x_BTI, two.make_initial_state(B)),
        cells[1](one(x_BTI, one.make_initial_state(B)), cells[1].make_initial_state(B)),
    )
