"""Export as two ONNX graphs, encoder.onnx and decoder.onnx, and an engine that checks them with our own search.

There is no KV cache: the decoder reads the complete prefix at every step. That is slow, but any program with an ONNX
runtime can search with these two graphs.

Shapes   B rows   S source width   T target width   C model width   V vocabulary   N rows of a search
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.decoding.continuous_batching import collate_sources, run_batch
from dragoman.decoding.methods import Request, SearchSettings, decode
from dragoman.decoding.protocol import IndexedResults, SearchJob
from dragoman.errors import UserError
from dragoman.inference.engines.base import Engine, list_vocabulary, require_exportable
from dragoman.inference.predictor import Predictor
from dragoman.io import format_json
from dragoman.kernels.attention import KERNELS, RowLayout
from dragoman.models.base import Model
from dragoman.models.transformer import Transformer
from dragoman.modules.attention import MultiHeadAttention
from dragoman.types import PAD


class EncoderGraph(nn.Module):
    """Compute encoder states from source ids; each source ends with EOS and is padded with PAD."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source_BS: Tensor) -> Tensor:
        memory_BSC: Tensor = self.model.encoder(source_BS, RowLayout.from_padding_mask(source_BS != PAD))
        return memory_BSC


class DecoderGraph(EncoderGraph):
    """Compute log-probabilities of the next token from sources, encoder states and target prefixes with BOS."""

    def forward(self, source_BS: Tensor, memory_BSC: Tensor, target_BT: Tensor) -> Tensor:  # type: ignore[override]
        all_real_BT = target_BT >= 0  # prefixes have no padding; computed from the input, so that the shape is dynamic
        target_rows, source_rows = (RowLayout.from_padding_mask(mask) for mask in (all_real_BT, source_BS != PAD))
        states_BTC = self.model.decoder(target_BT, target_rows, memory_BSC, source_rows)
        logp_BV: Tensor = self.model.project(states_BTC[:, -1]).log_softmax(-1)
        return logp_BV[:, : self.model.output_size]


def save_onnx(predictor: Predictor[Model], folder: Path) -> None:
    """Write both graphs and the vocabularies."""
    model = copy.deepcopy(require_exportable(predictor.model, "ONNX")).cpu().float().eval()
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.kernel = KERNELS["reference"]  # the other kernels are for training or for one kind of device
    # Example inputs for tracing, with an arbitrary token id; the graphs accept any numbers of rows and tokens.
    source_BS, target_BT = torch.full((2, 7), 4), torch.full((2, 5), 4)
    source_BS[1, 5:] = PAD
    encoder = EncoderGraph(model)
    with torch.no_grad():
        memory_BSC = encoder(source_BS)
    export_graph(encoder, folder / "encoder.onnx", "memory", source=source_BS)
    export_graph(
        DecoderGraph(model), folder / "decoder.onnx", "logp", source=source_BS, memory=memory_BSC, target=target_BT
    )
    tokenizers = predictor.tokenizers
    source, target = list_vocabulary(tokenizers.source, tokenizers.tags), list_vocabulary(tokenizers.target)
    for side, vocabulary in (("source", source), ("target", target)):
        (folder / f"{side}_vocabulary.json").write_text(format_json(vocabulary), encoding="utf-8")


def export_graph(model: nn.Module, path: Path, output: str, **inputs: Tensor) -> None:
    """Write a graph whose inputs have two dynamic axes each. The exporter's messages for developers are suppressed."""
    try:
        import onnxscript  # noqa: F401 - PyTorch's exporter needs it
    except ImportError:
        raise UserError("ONNX is not installed; pip install 'dragoman[onnx]' installs it") from None
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    dynamic = torch.export.Dim.DYNAMIC
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            tuple(inputs.values()),
            path,
            dynamo=True,
            dynamic_shapes=tuple({0: dynamic, 1: dynamic} for _ in inputs),
            input_names=list(inputs),
            output_names=[output],
            external_data=False,
            verbose=False,
        )


class OnnxState(NamedTuple):
    """Sources, their encoder states and the target prefixes of a search."""

    source_NS: Tensor
    memory_NSC: Tensor
    target_NT: Tensor

    def select(self, rows_N: Tensor) -> OnnxState:
        return OnnxState(*[tensor[rows_N] for tensor in self])


class OnnxEngine(Engine):
    """An engine that runs our own search on the two graphs, by `start` and `step` (decoding/protocol.py)."""

    def __init__(self, predictor: Predictor[Model], folder: Path) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise UserError(
                "onnxruntime is not installed, so translations cannot be compared; "
                "pip install 'dragoman[onnx]' installs it"
            ) from None
        self.detokenize = predictor.tokenizers.target.decode
        self.encoder: Any = onnxruntime.InferenceSession(folder / "encoder.onnx")
        self.decoder: Any = onnxruntime.InferenceSession(folder / "decoder.onnx")

    def start(self, source_BS: Tensor, real_BS: Tensor) -> OnnxState:  # noqa: ARG002 - the graphs recognise PAD
        """Encode the sources; the target prefixes are empty."""
        return OnnxState(source_BS, run_session(self.encoder, source=source_BS), source_BS[:, :0])

    def step(self, token_N: Tensor, state: OnnxState) -> tuple[Tensor, OnnxState]:
        """Append one token to each prefix and return the log-probabilities of the next token."""
        state = state._replace(target_NT=torch.cat([state.target_NT, token_N[:, None]], 1))
        logp_NV = run_session(self.decoder, source=state.source_NS, memory=state.memory_NSC, target=state.target_NT)
        return logp_NV, state

    def iter_results(self, jobs: Sequence[SearchJob], search: SearchSettings) -> IndexedResults:
        """Decode all jobs in one batch with our own search."""
        width = max((len(job.ids) + 1 for job in jobs), default=1)
        source_BS, real_BS, _ = collate_sources(jobs, width, len(jobs))
        run_search = partial(run_batch, self, source_BS, real_BS)
        return enumerate(decode(Request(jobs, search, run_search, self.detokenize)))


def run_session(session: Any, **inputs: Tensor) -> Tensor:
    return torch.from_numpy(session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0])
