"""An encoder-decoder of torch.nn.LSTM (cuDNN on a GPU) with additive attention, trained on length buckets.

Sizes are as in Dragoman: a bidirectional encoder with half the width per direction, a decoder whose initial state is a
linear map of the encoder's last states, tied embeddings. With input feeding the decoder runs step by step; without it,
all target positions go through the cuDNN kernel and through attention at once.

Shapes   B rows   S source width   T target width   C model width
"""

from __future__ import annotations

import math
from typing import Any

import torch
from padded import PAD
from plain import make_turns, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from turns import read_task


class Translator(nn.Module):
    def __init__(self, *, vocabulary: int, layers: int, width: int, feeding: bool, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.dropout = nn.Dropout(dropout)
        shared: dict[str, Any] = {"batch_first": True, "dropout": dropout if layers > 1 else 0.0}
        self.encoder = nn.LSTM(width, width // 2, layers, bidirectional=True, **shared)
        self.bridge = nn.Linear(width, layers * 2 * width)
        self.layers, self.width = layers, width
        self.cells = nn.ModuleList(
            nn.LSTMCell(width * (1 + (number == 0)), width) for number in range(layers if feeding else 0)
        )
        self.decoder = None if feeding else nn.LSTM(width, width, layers, **shared)
        self.key, self.query = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)
        self.join = nn.Linear(2 * width, width)

    def embed(self, ids: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.embedding(ids) * math.sqrt(self.width))
        return out

    def forward(self, source_BS: Tensor, target_BT: Tensor, length_B: Tensor) -> Tensor:
        read = pack_padded_sequence(self.embed(source_BS), length_B, batch_first=True, enforce_sorted=False)
        packed, (last, _) = self.encoder(read)
        memory_BSC = pad_packed_sequence(packed, batch_first=True, total_length=source_BS.size(1))[0]
        first = torch.tanh(self.bridge(last[-2:].transpose(0, 1).flatten(1)))
        x_BTC = self.embed(target_BT)
        states = first.to(x_BTC.dtype).view(-1, self.layers, 2, self.width).permute(2, 1, 0, 3).contiguous()
        source = (memory_BSC, self.key(memory_BSC), (source_BS == PAD)[:, None])
        decode = self.decode_at_once if self.decoder else self.decode_stepwise
        return F.linear(decode(x_BTC, states, source), self.embedding.weight)

    def decode_at_once(self, x_BTC: Tensor, states: Tensor, source: tuple[Tensor, ...]) -> Tensor:
        assert self.decoder
        return self.attend(self.decoder(x_BTC, (states[0], states[1]))[0], source)

    def decode_stepwise(self, x_BTC: Tensor, states: Tensor, source: tuple[Tensor, ...]) -> Tensor:
        cell_states = [(states[0, number], states[1, number]) for number in range(self.layers)]
        outputs = [torch.zeros_like(states[0, 0])]
        for x_BC in x_BTC.unbind(1):
            x = torch.cat([x_BC, outputs[-1].to(x_BC.dtype)], -1)
            for number, cell in enumerate(self.cells):
                cell_states[number] = cell(self.dropout(x) if number else x, cell_states[number])
                x = cell_states[number][0]
            outputs.append(self.attend(x[:, None], source)[:, 0])
        return torch.stack(outputs[1:], 1)

    def attend(self, state_BTC: Tensor, source: tuple[Tensor, ...]) -> Tensor:
        """Return tanh(W [state; context]), where the context is the attention-weighted mean of the source."""
        memory_BSC, key_BSC, padding_B1S = source
        score_BTS = self.score(torch.tanh(self.query(state_BTC)[:, :, None] + key_BSC[:, None]))[..., 0]
        weight_BTS = score_BTS.masked_fill(padding_B1S, float("-inf")).softmax(-1)
        context_BTC = weight_BTS.to(memory_BSC.dtype) @ memory_BSC
        out: Tensor = self.dropout(torch.tanh(self.join(torch.cat([state_BTC, context_BTC.to(state_BTC.dtype)], -1))))
        return out


def main() -> None:
    task = read_task()
    turns = make_turns(task["device"])
    torch.manual_seed(1)
    size = {name: task["size"][name] for name in ("layers", "width", "feeding")}
    model = Translator(vocabulary=task["vocabulary"], dropout=task["dropout"], **size)
    train(task, turns, model, model, torch.__version__)


if __name__ == "__main__":
    main()
