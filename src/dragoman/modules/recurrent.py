"""Recurrent cells and stacks of cells, for unpacked rows: one sentence per row.

`Cell.advance` computes one step; `Cell.forward` computes full sentences, by a fused kernel of PyTorch if there is one.
To add a cell, write a subclass of Cell and add it to CELLS. Settings that only this cell reads are fields of
CellSettings, and the cell lists their names in `uses`.

Shapes   B rows   T tokens   N rows of one step, or all tokens (B x T)   I input width   C state width
         G width of all gates
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.config.settings import Settings, setting
from dragoman.kernels.attention import RowLayout
from dragoman.modules.dropout import Dropout

CellState = tuple[Tensor, ...]  # state of one layer: the output h_NC and, in an LSTM, the memory cell c_NC
StackState = list[CellState]  # states of all layers, lowest layer first


class CellSettings(Settings):
    cell: str = setting("lstm", "recurrent cell")
    nonlinearity: str = setting("tanh", "nonlinearity of the vanilla cell; gru and lstm have their own")


class Cell(nn.Module, ABC):
    """The common part of all cells: initial state, and weights for input and state with all gates concatenated."""

    gates, state_tensors = 1, 1  # number of gates, including the new content; number of tensors in a state
    gate_names: ClassVar[tuple[str, ...]] = ("content",)  # in the order of the rows of `hidden_weight`
    uses: tuple[str, ...] = ()  # names of settings that some other cells ignore
    torch_module: ClassVar[type[nn.RNNBase] | None] = None  # computes the same function, for tests
    kernel: Callable[..., tuple[Tensor, ...]] | None = None  # PyTorch function for full sentences; None: `run_loop`

    def __init__(self, settings: CellSettings, input_width: int, width: int, *, learned_start: bool = False) -> None:
        super().__init__()
        self.settings, self.width = settings, width
        self.input_weight = nn.Parameter(torch.empty(self.gates * width, input_width))
        self.hidden_weight = nn.Parameter(torch.empty(self.gates * width, width))
        self.bias = nn.Parameter(torch.zeros(self.gates * width))
        self.start = nn.Parameter(torch.zeros(self.state_tensors, width)) if learned_start else None
        nn.init.xavier_uniform_(self.input_weight)
        for weight_CC in self.hidden_weight.data.chunk(self.gates):
            nn.init.orthogonal_(weight_CC)  # preserves the norm of the state

    def make_initial_state(self, rows: int) -> CellState:
        """Return the state before the first token: zeros or, with `learned_start`, a parameter."""
        if self.start is None:
            return (self.bias.new_zeros(rows, self.width),) * self.state_tensors
        return tuple(start_C.expand(rows, -1) for start_C in self.start)

    def step(self, x_NI: Tensor, state: CellState) -> CellState:
        """Return the state after one more token (reference implementation of `forward`)."""
        return self.advance(self.project_input(x_NI), state)

    def project_input(self, x: Tensor) -> Tensor:
        """Return the terms of the gates that depend on the input only, for one token or for all at once."""
        return F.linear(x, self.input_weight, self.bias)

    @abstractmethod
    def advance(self, gates_NG: Tensor, state: CellState) -> CellState:
        """Return the next state, given the terms of the gates that depend on the input (`project_input`)."""

    def run_loop(self, x_BTI: Tensor, state: CellState) -> CellState:
        """Return the state after each token: h_BTC, as `forward` computes it, and the other tensors of the state."""
        gates_BTG, states = self.project_input(x_BTI), []
        for gates_BG in gates_BTG.unbind(1):
            state = self.advance(gates_BG, state)
            states.append(state)
        return tuple(torch.stack(part, 1).to(gates_BTG.dtype) for part in zip(*states, strict=True))

    def read(self, x_BTI: Tensor, ends: SentenceEnds, *, whole_state: bool) -> tuple[Tensor, CellState]:
        """Read sentences from the initial state on; return all outputs, h_BTC, and the states after the last tokens.

        These consist of h_BC only or, with `whole_state`, of all tensors of a state. PyTorch's kernels return c_BC only
        after the padding, so a cell that has it then takes the loop.
        """
        state = self.make_initial_state(len(x_BTI))
        takes_loop = whole_state and self.state_tensors > 1
        parts = self.run_loop(x_BTI, state) if takes_loop else (self(x_BTI, state),)
        return parts[0], tuple(ends.select_last(part_BTC) for part_BTC in parts)

    def make_hidden_bias(self) -> Tensor:
        """Return the second bias that PyTorch's kernels expect: zeros, since the cell has only one bias."""
        return torch.zeros_like(self.bias)

    def forward(self, x_BTI: Tensor, state: CellState) -> Tensor:
        """Return the output after each token of full sentences, h_BTC, in the autocast precision."""
        if self.kernel is None:
            return self.run_loop(x_BTI, state)[0]
        device = x_BTI.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.bias.dtype
        parameters = [self.input_weight, self.hidden_weight, self.bias, self.make_hidden_bias()]
        weights = [weight.to(dtype) for weight in parameters]
        if device == "cuda":  # cuDNN needs all weights in one block of memory
            parts = torch.split(torch.cat([weight.flatten() for weight in weights]), [w.numel() for w in weights])
            weights = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
        initial = [part_NC[None].to(dtype).contiguous() for part_NC in state]
        # has_biases, num_layers, dropout, train, bidirectional, batch_first
        options = (True, 1, 0.0, torch.is_grad_enabled(), False, True)
        with torch.autocast(device, enabled=False):
            out = self.kernel(x_BTI.to(dtype), initial if len(initial) > 1 else initial[0], weights, *options)
        return out[0]


class VanillaCell(Cell):
    """h' = f(W h + U x + b) (Elman 1990)."""

    uses = ("nonlinearity",)
    torch_module = nn.RNN

    def __init__(self, settings: CellSettings, input_width: int, width: int, *, learned_start: bool = False) -> None:
        super().__init__(settings, input_width, width, learned_start=learned_start)
        self.kernel = {"tanh": torch.rnn_tanh, "relu": torch.rnn_relu}.get(settings.nonlinearity)

    def advance(self, gates_NG: Tensor, state: CellState) -> CellState:
        return (NONLINEARITIES[self.settings.nonlinearity](gates_NG + F.linear(state[0], self.hidden_weight)),)


class GruCell(Cell):
    """Gated recurrent unit (Cho 2014): h' = (1 - z) n + z h with n = tanh(U x + r (W h + c) + b).

    The update gate z interpolates between the new content n and the old state h. The reset gate r scales the
    contribution of h to n. c is `content_bias`.
    """

    gates = 3
    gate_names = ("reset", "update", "content")
    torch_module = nn.GRU
    kernel = torch.gru

    def __init__(self, settings: CellSettings, input_width: int, width: int, *, learned_start: bool = False) -> None:
        super().__init__(settings, input_width, width, learned_start=learned_start)
        self.content_bias = nn.Parameter(torch.zeros(width))  # scaled by the reset gate

    def make_hidden_bias(self) -> Tensor:
        return F.pad(self.content_bias, (2 * self.width, 0))  # none for the reset and update gates

    def advance(self, gates_NG: Tensor, state: CellState) -> CellState:
        (h_NC,) = state
        reset, update, content = gates_NG.chunk(3, -1)
        reset_h, update_h, content_h = F.linear(h_NC, self.hidden_weight, self.make_hidden_bias()).chunk(3, -1)
        r_NC, z_NC = torch.sigmoid(reset + reset_h), torch.sigmoid(update + update_h)
        new_NC = torch.tanh(content + r_NC * content_h)
        return ((1 - z_NC) * new_NC + z_NC * h_NC,)


class LstmCell(Cell):
    """Long short-term memory: a memory cell c with input, forget and output gates (Hochreiter 1997, Gers 2000)."""

    gates, state_tensors = 4, 2
    gate_names = ("input", "forget", "content", "output")
    torch_module = nn.LSTM
    kernel = torch.lstm

    def __init__(self, settings: CellSettings, input_width: int, width: int, *, learned_start: bool = False) -> None:
        super().__init__(settings, input_width, width, learned_start=learned_start)
        nn.init.ones_(self.bias.data[width : 2 * width])  # the forget gate is mostly open at first

    def advance(self, gates_NG: Tensor, state: CellState) -> CellState:
        h_NC, c_NC = state
        if gates_NG.is_cuda:  # one fused kernel computes everything after the matrix product
            h_NG = F.linear(h_NC, self.hidden_weight)
            fused = torch.ops.aten._thnn_fused_lstm_cell.default
            h_NC, c_NC, _ = fused(gates_NG.to(h_NG.dtype), h_NG, c_NC.to(h_NG.dtype))
            return h_NC, c_NC
        input_, forget, content, output = (gates_NG + F.linear(h_NC, self.hidden_weight)).chunk(4, -1)
        i_NC, f_NC, o_NC = torch.sigmoid(input_), torch.sigmoid(forget), torch.sigmoid(output)
        c_NC = f_NC * c_NC + i_NC * torch.tanh(content)
        return o_NC * torch.tanh(c_NC), c_NC


class RecurrentLayer(nn.Module):
    """An encoder layer: a forward cell and, if bidirectional, a backward cell; then each has half the width."""

    def __init__(self, cell: Callable[[int, int], Cell], input_width: int, width: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.ahead = cell(input_width, width // 2 if bidirectional else width)
        self.back = cell(input_width, width // 2) if bidirectional else None

    def forward(self, x_BTI: Tensor, ends: SentenceEnds, *, whole_state: bool = False) -> tuple[Tensor, CellState]:
        """Return the output of every token, out_BTC, and the final state (see `Cell.read`), both directions joined."""
        ahead_BTC, ahead_last = self.ahead.read(x_BTI, ends, whole_state=whole_state)
        if self.back is None:
            return ahead_BTC, ahead_last
        back_BTC, back_last = self.back.read(ends.reverse(x_BTI), ends, whole_state=whole_state)
        last = tuple(torch.cat(pair, -1) for pair in zip(ahead_last, back_last, strict=True))
        return torch.cat([ahead_BTC, ends.reverse(back_BTC)], -1), last


class SentenceEnds:
    """Indices that reverse the sentences of a batch, one per row, and that select their last tokens.

    Padding is on the right, in reversed sentences too, so that a cell reads it only after the sentence.
    """

    def __init__(self, rows: RowLayout) -> None:
        assert rows.is_unpacked
        B, T = rows.segment_BT.shape
        position_T = torch.arange(T, device=rows.segment_BT.device)
        length_B1 = rows.real_BT.sum(1, keepdim=True)
        first_B1 = T * torch.arange(B, device=rows.segment_BT.device)[:, None]  # first token of each row, flattened
        reversed_BT = torch.where(position_T < length_B1, length_B1 - 1 - position_T, position_T)
        self.reversed_N = (first_B1 + reversed_BT).flatten()
        self.last_B = (first_B1 + (length_B1 - 1).clamp(min=0)).flatten()

    def reverse(self, x_BTC: Tensor) -> Tensor:
        """Return each sentence reversed, with its padding still on the right."""
        return x_BTC.flatten(0, 1).index_select(0, self.reversed_N).view_as(x_BTC)

    def select_last(self, x_BTC: Tensor) -> Tensor:
        """Return the last token of each sentence: x_BC."""
        return x_BTC.flatten(0, 1).index_select(0, self.last_B)


class CellStack(nn.Module):
    """A stack of unidirectional cells; the input of each is the output of the cell below."""

    cells: Sequence[Cell]

    def __init__(self, cells: Sequence[Cell], dropout: float) -> None:
        super().__init__()
        self.cells = nn.ModuleList(cells)  # type: ignore[assignment]
        self.dropout = Dropout(dropout)

    def make_initial_state(self, rows: int) -> StackState:
        """Return the states of all cells before the first token."""
        return [cell.make_initial_state(rows) for cell in self.cells]

    def forward(self, x_BTI: Tensor, states: StackState) -> Tensor:
        """Return the output of the top layer after each token of full sentences."""
        for index, (cell, state) in enumerate(zip(self.cells, states, strict=True)):  # dropout only between layers
            x_BTI = cell(self.dropout(x_BTI) if index else x_BTI, state)
        return x_BTI

    def advance(self, gates_NG: Tensor, states: StackState) -> tuple[Tensor, StackState]:
        """Return the output of the top layer after one more token, and the new states.

        `gates_NG` is the result of `project_input` of the lowest cell.
        """
        bottom, *higher = self.cells
        new_states = [bottom.advance(gates_NG, states[0])]
        for cell, state in zip(higher, states[1:], strict=True):
            new_states.append(cell.step(self.dropout(new_states[-1][0]), state))
        return new_states[-1][0], new_states


NONLINEARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "identity": lambda x: x,
}
CELLS: dict[str, type[Cell]] = {"vanilla": VanillaCell, "gru": GruCell, "lstm": LstmCell}
