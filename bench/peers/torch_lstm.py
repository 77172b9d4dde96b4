"""An encoder-decoder of torch.nn.LSTM (cuDNN on a GPU) with additive attention, on length buckets.

The sizes are Dragoman's: an encoder that reads both ways with half of the width each, a decoder that starts from a
linear map of the encoder's last states, tied embeddings. With input feeding the decoder goes step by step, as it must;
without, the whole target runs through the library's kernel and looks at the source at once.

Shapes   B rows   S source width   T target width   C width
"""

from __future__ import annotations

import math
from typing import Any

import torch
from padded import PAD
from plain import train, turns_on
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from turns import task


class Translator(nn.Module):
    def __init__(self, *, vocabulary: int, layers: int, width: int, feeding: bool, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.dropout = nn.Dropout(dropout)
        between: dict[str, Any] = {"batch_first": True, "dropout": dropout if layers > 1 else 0.0}
        self.encoder = nn.LSTM(width, width // 2, layers, bidirectional=True, **between)
        self.bridge = nn.Linear(width, layers * 2 * width)
        self.layers, self.width = layers, width
        self.cells = nn.ModuleList(
            nn.LSTMCell(width * (1 + (number == 0)), width) for number in range(layers if feeding else 0)
        )
        self.decoder = None if feeding else nn.LSTM(width, width, layers, **between)
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
        said_BTC = self.at_once(x_BTC, states, source) if self.decoder else self.fed(x_BTC, states, source)
        return F.linear(said_BTC, self.embedding.weight)

    def at_once(self, x_BTC: Tensor, states: Tensor, source: tuple[Tensor, ...]) -> Tensor:
        assert self.decoder
        return self.say(self.decoder(x_BTC, (states[0], states[1]))[0], source)

    def fed(self, x_BTC: Tensor, states: Tensor, source: tuple[Tensor, ...]) -> Tensor:
        held = [(states[0, number], states[1, number]) for number in range(self.layers)]
        said = [torch.zeros_like(states[0, 0])]
        for x_BC in x_BTC.unbind(1):
            below = torch.cat([x_BC, said[-1].to(x_BC.dtype)], -1)
            for number, cell in enumerate(self.cells):
                held[number] = cell(self.dropout(below) if number else below, held[number])
                below = held[number][0]
            said.append(self.say(below[:, None], source)[:, 0])
        return torch.stack(said[1:], 1)

    def say(self, state_BTC: Tensor, source: tuple[Tensor, ...]) -> Tensor:
        """tanh(W [state; what it reads in the source])."""
        memory_BSC, key_BSC, blank_B1S = source
        score_BTS = self.score(torch.tanh(self.query(state_BTC)[:, :, None] + key_BSC[:, None]))[..., 0]
        weight_BTS = score_BTS.masked_fill(blank_B1S, float("-inf")).softmax(-1)
        read_BTC = weight_BTS.to(memory_BSC.dtype) @ memory_BSC
        out: Tensor = self.dropout(torch.tanh(self.join(torch.cat([state_BTC, read_BTC.to(state_BTC.dtype)], -1))))
        return out


def main() -> None:
    asked = task()
    turns = turns_on(asked["device"])
    torch.manual_seed(1)
    size = {name: asked["size"][name] for name in ("layers", "width", "feeding")}
    model = Translator(vocabulary=asked["vocabulary"], dropout=asked["dropout"], **size)
    train(asked, turns, model, model, torch.__version__)


if __name__ == "__main__":
    main()
