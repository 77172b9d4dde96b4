"""Recurrent cells and stacks of them, for sentences that lie one to a row.

Shapes   B rows   T tokens   N rows of one step   I inputs   C width of a state   G width of all gates   L layers
A cell is written twice: `step`, to be read, and `forward`, which runs whole sentences through PyTorch's fused kernel.
On a GPU a step of the LSTM is fused as well; what is written to be read is what a CPU does.
To add a cell: a class below and a line in CELLS.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.kernels.masks import RowLayout
from dragoman.modules.dropout import Dropout

CellState = tuple[Tensor, ...]  # of one layer: what it says, h_NC; and what else it remembers
StackState = list[CellState]  # of a stack, lowest layer first


class Cell(nn.Module, ABC):
    """What all cells share: weights for the input and for the last state, gates side by side, and where they start."""

    gates, parts = 1, 1
    plain = False  # whether its nonlinearity is a matter of choice

    def __init__(self, inputs: int, width: int, *, nonlinearity: str = "tanh", learned: bool = False) -> None:
        super().__init__()
        self.width, self.nonlinearity = width, nonlinearity
        self.input_weight = nn.Parameter(torch.empty(self.gates * width, inputs))
        self.hidden_weight = nn.Parameter(torch.empty(self.gates * width, width))
        self.bias = nn.Parameter(torch.zeros(self.gates * width))
        self.start = nn.Parameter(torch.zeros(self.parts, width)) if learned else None
        nn.init.xavier_uniform_(self.input_weight)
        for weight_CC in self.hidden_weight.data.chunk(self.gates):
            nn.init.orthogonal_(weight_CC)  # neither shrinks nor blows up what it carries

    def first(self, rows: int) -> CellState:
        """The state before anything is read: zeros, or learned."""
        if self.start is None:
            return (self.bias.new_zeros(rows, self.width),) * self.parts
        return tuple(start_C.expand(rows, -1) for start_C in self.start)

    def step(self, x_NI: Tensor, state: CellState) -> CellState:
        """One more token."""
        return self.advance(self.read(x_NI), state)

    def read(self, x: Tensor) -> Tensor:
        """What the input alone says to the gates. It does not depend on the state, so it may be made beforehand."""
        return F.linear(x, self.input_weight, self.bias)

    @abstractmethod
    def advance(self, read_NG: Tensor, state: CellState) -> CellState:
        """The new state, from what the input says and the last state."""

    @abstractmethod
    def forward(self, x_BTI: Tensor, state: CellState) -> Tensor:
        """What it says after each token of whole sentences: h_BTC."""

    def loop(self, x_BTI: Tensor, state: CellState) -> Tensor:
        """The same, step by step: on a CPU the readable twin."""
        said = []
        for read_BG in self.read(x_BTI).unbind(1):
            state = self.advance(read_BG, state)
            said.append(state[0])
        return torch.stack(said, 1)

    def hidden_bias(self) -> Tensor:
        """Fused kernels want a second bias, which would say nothing that the first does not."""
        return torch.zeros_like(self.bias)

    def fused(self, kernel: Callable[..., tuple[Tensor, ...]], x_BTI: Tensor, state: CellState) -> Tensor:
        device = x_BTI.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.bias.dtype
        held = [self.input_weight, self.hidden_weight, self.bias, self.hidden_bias()]
        weights = [weight.to(dtype) for weight in held]
        if device == "cuda":  # cuDNN wants them end to end
            parts = torch.split(torch.cat([weight.flatten() for weight in weights]), [w.numel() for w in weights])
            weights = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
        first = [part_NC[None].to(dtype).contiguous() for part_NC in state]
        # biases, layers, dropout, gradients, both ways, rows first
        options = (True, 1, 0.0, torch.is_grad_enabled(), False, True)
        with torch.autocast(device, enabled=False):
            said: Tensor = kernel(x_BTI.to(dtype), first if len(first) > 1 else first[0], weights, *options)[0]
        return said


class VanillaCell(Cell):
    """h' = f(W h + U x + b)."""

    plain = True

    def advance(self, read_NG: Tensor, state: CellState) -> CellState:
        return (NONLINEARITIES[self.nonlinearity](read_NG + F.linear(state[0], self.hidden_weight)),)

    def forward(self, x_BTI: Tensor, state: CellState) -> Tensor:
        kernel = {"tanh": torch.rnn_tanh, "relu": torch.rnn_relu}.get(self.nonlinearity)
        return self.fused(kernel, x_BTI, state) if kernel else self.loop(x_BTI, state)


class GruCell(Cell):
    """A gate z keeps the old state or takes new content; a gate r says how much of the old the new content sees."""

    gates = 3

    def __init__(self, inputs: int, width: int, *, nonlinearity: str = "tanh", learned: bool = False) -> None:
        super().__init__(inputs, width, nonlinearity=nonlinearity, learned=learned)
        self.content_bias = nn.Parameter(torch.zeros(width))  # of the old state, behind the gate r

    def hidden_bias(self) -> Tensor:
        return F.pad(self.content_bias, (2 * self.width, 0))

    def advance(self, read_NG: Tensor, state: CellState) -> CellState:
        (h_NC,) = state
        reset, update, content = read_NG.chunk(3, -1)
        reset_h, update_h, content_h = F.linear(h_NC, self.hidden_weight, self.hidden_bias()).chunk(3, -1)
        r_NC, z_NC = torch.sigmoid(reset + reset_h), torch.sigmoid(update + update_h)
        new_NC = torch.tanh(content + r_NC * content_h)
        return ((1 - z_NC) * new_NC + z_NC * h_NC,)

    def forward(self, x_BTI: Tensor, state: CellState) -> Tensor:
        return self.fused(torch.gru, x_BTI, state)


class LstmCell(Cell):
    """A cell c beside the state: gates say what it forgets, what it takes in and what it lets out."""

    gates, parts = 4, 2

    def __init__(self, inputs: int, width: int, *, nonlinearity: str = "tanh", learned: bool = False) -> None:
        super().__init__(inputs, width, nonlinearity=nonlinearity, learned=learned)
        nn.init.ones_(self.bias.data[width : 2 * width])  # remember, until taught to forget

    def advance(self, read_NG: Tensor, state: CellState) -> CellState:
        h_NC, c_NC = state
        if read_NG.is_cuda:  # all that follows the product in one kernel
            h_NG = F.linear(h_NC, self.hidden_weight)
            fused = torch.ops.aten._thnn_fused_lstm_cell.default
            h_NC, c_NC, _ = fused(read_NG.to(h_NG.dtype), h_NG, c_NC.to(h_NG.dtype))
            return h_NC, c_NC
        input_, forget, content, output = (read_NG + F.linear(h_NC, self.hidden_weight)).chunk(4, -1)
        i_NC, f_NC, o_NC = torch.sigmoid(input_), torch.sigmoid(forget), torch.sigmoid(output)
        c_NC = f_NC * c_NC + i_NC * torch.tanh(content)
        return o_NC * torch.tanh(c_NC), c_NC

    def forward(self, x_BTI: Tensor, state: CellState) -> Tensor:
        return self.fused(torch.lstm, x_BTI, state)


class RecurrentLayer(nn.Module):
    """One layer that reads whole sentences, from the left or, each with half of the width, from both ends."""

    def __init__(self, cell: Callable[[int, int], Cell], inputs: int, width: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.ahead = cell(inputs, width // 2 if bidirectional else width)
        self.back = cell(inputs, width // 2) if bidirectional else None

    def forward(self, x_BTI: Tensor, ends: SentenceEnds) -> tuple[Tensor, Tensor]:
        """What it says of every token, said_BTC, and after the last one, last_BC."""
        B = len(x_BTI)
        said_BTC = self.ahead(x_BTI, self.ahead.first(B))
        last_BC = ends.last(said_BTC)
        if self.back is None:
            return said_BTC, last_BC
        back_BTC = self.back(ends.turned(x_BTI), self.back.first(B))
        said_BTC, last_BC = (
            torch.cat([said_BTC, ends.turned(back_BTC)], -1),
            torch.cat([last_BC, ends.last(back_BTC)], -1),
        )
        return said_BTC, last_BC


class SentenceEnds:
    """Where sentences end, one to a row: to turn them round inside their own length, and to find their last tokens.

    Padding is at the right, so what reads from the left never meets it before the sentence is over.
    """

    def __init__(self, rows: RowLayout) -> None:
        assert rows.alone
        B, T = rows.segment_BT.shape
        place_T = torch.arange(T, device=rows.segment_BT.device)
        length_B1 = rows.real_BT.sum(1, keepdim=True)
        row_B1 = T * torch.arange(B, device=rows.segment_BT.device)[:, None]
        turned_BT = torch.where(place_T < length_B1, length_B1 - 1 - place_T, place_T)
        self.turned_N = (row_B1 + turned_BT).flatten()
        self.last_B = (row_B1 + (length_B1 - 1).clamp(min=0)).flatten()

    def turned(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.flatten(0, 1).index_select(0, self.turned_N).view_as(x_BTC)

    def last(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.flatten(0, 1).index_select(0, self.last_B)


class CellStack(nn.Module):
    """Cells one above the other, each reading what the one below says; none looks ahead."""

    def __init__(self, cells: Sequence[Cell], dropout: float) -> None:
        super().__init__()
        self.cells = nn.ModuleList(cells)
        self.dropout = Dropout(dropout)

    def first(self, rows: int) -> StackState:
        return [cell.first(rows) for cell in self.each()]

    def each(self) -> list[Cell]:
        return [cell for cell in self.cells if isinstance(cell, Cell)]

    def forward(self, x_BTI: Tensor, states: StackState) -> Tensor:
        """What the top says after each token of whole sentences."""
        for number, (cell, state) in enumerate(zip(self.each(), states, strict=True)):
            x_BTI = cell(self.dropout(x_BTI) if number else x_BTI, state)
        return x_BTI

    def step(self, x_NI: Tensor, states: StackState) -> tuple[Tensor, StackState]:
        """One more token: what the top says, and the new states."""
        bottom = self.each()[0]
        return self.advance(bottom.read(x_NI), states)

    def advance(self, read_NG: Tensor, states: StackState) -> tuple[Tensor, StackState]:
        """The same from what the input says to the lowest cell."""
        bottom, *higher = self.each()
        after = [bottom.advance(read_NG, states[0])]
        for cell, state in zip(higher, states[1:], strict=True):
            after.append(cell.step(self.dropout(after[-1][0]), state))
        return after[-1][0], after


NONLINEARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "identity": lambda x: x,
}
CELLS: dict[str, type[Cell]] = {"vanilla": VanillaCell, "gru": GruCell, "lstm": LstmCell}
