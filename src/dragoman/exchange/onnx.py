"""A Transformer as two ONNX graphs: encoder.onnx reads sources, decoder.onnx says what may follow target prefixes.

There is no cache: a prefix is read anew at every step. That is slow, but it is all that a search needs, in any language
that has an ONNX runtime.

Shapes   B rows   S source width   T target width   C model width   V vocabulary
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from dragoman.exchange.held import Holds, held, source_vocabulary, vocabulary, write_json
from dragoman.models.transformer import Transformer
from dragoman.nn.attention import Attention
from dragoman.nn.kernel import KERNELS
from dragoman.nn.mask import Rows
from dragoman.text.tokenizer import Tokenizers
from dragoman.types import PAD, UserError

NAME = "ONNX"
HOLDS: Holds = {
    "position": ("none", "sinusoidal", "relative", "rotary", "alibi"),
    "attention": ("full", "bigbird", "local"),
}


class Reading(nn.Module):
    """Source ids in, padded with <pad>, each with its </s>; states out."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source_BS: Tensor) -> Tensor:
        memory_BSC: Tensor = self.model.encoder(source_BS, Rows.one_each(source_BS != PAD))
        return memory_BSC


class Writing(Reading):
    """The same sources, their states and target prefixes in, each with its <s>; log-probabilities of what follows."""

    def forward(self, source_BS: Tensor, memory_BSC: Tensor, target_BT: Tensor) -> Tensor:  # type: ignore[override]
        rows, source = Rows.one_each(target_BT >= 0), Rows.one_each(source_BS != PAD)
        states_BTC = self.model.decoder(target_BT, rows, memory_BSC, source)
        logp_BV: Tensor = self.model.project(states_BTC[:, -1]).log_softmax(-1)
        return logp_BV[:, : self.model.spoken]


def checked(model: nn.Module) -> Transformer:
    return held(model, HOLDS, NAME)


def save(model: nn.Module, tokenizers: Tokenizers, folder: Path) -> None:
    plain = copy.deepcopy(checked(model)).cpu().float().eval()
    for module in plain.modules():
        if isinstance(module, Attention):
            module.kernel = KERNELS["reference"]  # the others are made for training, or for one device
    rows, places, words = (torch.export.Dim.DYNAMIC,) * 3
    source_BS, target_BT = torch.full((2, 7), 4), torch.full((2, 5), 4)
    source_BS[1, 5:] = PAD
    with torch.no_grad():
        memory_BSC = Reading(plain)(source_BS)
    source, memory, target = {0: rows, 1: places}, {0: rows, 1: places}, {0: rows, 1: words}
    graph(Reading(plain), (source_BS,), (source,), folder / "encoder.onnx", ["source"], "memory")
    inputs = ["source", "memory", "target"]
    graph(
        Writing(plain),
        (source_BS, memory_BSC, target_BT),
        (source, memory, target),
        folder / "decoder.onnx",
        inputs,
        "logp",
    )
    write_json(folder / "source_vocabulary.json", source_vocabulary(tokenizers))
    write_json(folder / "target_vocabulary.json", vocabulary(tokenizers.target))


def graph(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    shapes: tuple[dict[int, object], ...],
    path: Path,
    names: list[str],
    answer: str,
) -> None:
    """One graph, whatever the sizes of its inputs. What PyTorch says on the way is for its own developers."""
    try:
        import onnxscript  # noqa: F401 - PyTorch's exporter needs it
    except ImportError:
        raise UserError("ONNX is not installed; pip install 'dragoman[onnx]' brings it") from None
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            inputs,
            path,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=names,
            output_names=[answer],
            external_data=False,
            verbose=False,
        )
