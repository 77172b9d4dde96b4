"""Export as two ONNX graphs, encoder.onnx and decoder.onnx, and an engine that checks them with our own search.

There is no KV cache: the decoder reads the whole prefix at every step. That is slow, but all that a search needs, in
any language that has an ONNX runtime.

Shapes   B rows   S source width   T target width   C model width   V vocabulary   N rows of a search
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dragoman.decoding.continuous_batching import collate_sources, run_batch
from dragoman.decoding.methods import Request, SearchSettings, decode
from dragoman.decoding.protocol import Job, SearchResult
from dragoman.errors import UserError
from dragoman.inference.engines.base import Engine, SupportedValues, list_vocabulary, require_exportable
from dragoman.inference.predictor import Predictor
from dragoman.kernels.attention import KERNELS, RowLayout
from dragoman.models.base import Model
from dragoman.models.transformer import Transformer
from dragoman.modules.attention import MultiHeadAttention
from dragoman.run_dir import format_json
from dragoman.types import PAD

ONNX_SUPPORTS: SupportedValues = {
    "position": ("none", "sinusoidal", "relative", "rotary", "alibi"),
    "attention": ("full", "bigbird", "local"),
}


class EncoderGraph(nn.Module):
    """From source ids, padded with PAD and each with its EOS, to encoder states."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source_BS: Tensor) -> Tensor:
        memory_BSC: Tensor = self.model.encoder(source_BS, RowLayout.from_padding_mask(source_BS != PAD))
        return memory_BSC


class DecoderGraph(EncoderGraph):
    """From sources, their states and target prefixes with BOS to log-probabilities of the next token."""

    def forward(self, source_BS: Tensor, memory_BSC: Tensor, target_BT: Tensor) -> Tensor:  # type: ignore[override]
        rows, source = RowLayout.from_padding_mask(target_BT >= 0), RowLayout.from_padding_mask(source_BS != PAD)
        states_BTC = self.model.decoder(target_BT, rows, memory_BSC, source)
        logp_BV: Tensor = self.model.project(states_BTC[:, -1]).log_softmax(-1)
        return logp_BV[:, : self.model.output_size]


def save_onnx(run: Predictor[Model], folder: Path) -> None:
    """Write both graphs and the vocabularies."""
    plain = copy.deepcopy(require_exportable(run.model, ONNX_SUPPORTS, "ONNX")).cpu().float().eval()
    for module in plain.modules():
        if isinstance(module, MultiHeadAttention):
            module.kernel = KERNELS["reference"]  # the others are for training, or for one device
    source_BS, target_BT = torch.full((2, 7), 4), torch.full((2, 5), 4)
    source_BS[1, 5:] = PAD
    encoder = EncoderGraph(plain)
    with torch.no_grad():
        memory_BSC = encoder(source_BS)
    export_graph(encoder, folder / "encoder.onnx", "memory", source=source_BS)
    export_graph(
        DecoderGraph(plain), folder / "decoder.onnx", "logp", source=source_BS, memory=memory_BSC, target=target_BT
    )
    tokenizers = run.tokenizers
    source, target = list_vocabulary(tokenizers.source, tokenizers.tags), list_vocabulary(tokenizers.target)
    for side, vocabulary in (("source", source), ("target", target)):
        (folder / f"{side}_vocabulary.json").write_text(format_json(vocabulary), encoding="utf-8")


def export_graph(model: nn.Module, path: Path, output: str, **inputs: Tensor) -> None:
    """Write one graph whose first two axes are dynamic, without messages of the exporter for PyTorch developers."""
    try:
        import onnxscript  # noqa: F401 - PyTorch's exporter needs it
    except ImportError:
        raise UserError("ONNX is not installed; pip install 'dragoman[onnx]' brings it") from None
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
        """Return the state of these rows, in this order."""
        return OnnxState(*[tensor[rows_N] for tensor in self])


class OnnxSession(Protocol):
    """The part of `onnxruntime.InferenceSession` that the engine uses."""

    def run(self, outputs: None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]: ...


class OnnxEngine(Engine):
    """The decoding protocol (`start`, `step`, `select`) over the two graphs."""

    def __init__(self, run: Predictor[Model], folder: Path) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise UserError(
                "there is no ONNX runtime to compare answers with; pip install 'dragoman[onnx]' brings it"
            ) from None
        self.decode = run.tokenizers.target.decode
        self.encoder: OnnxSession = onnxruntime.InferenceSession(folder / "encoder.onnx")
        self.decoder: OnnxSession = onnxruntime.InferenceSession(folder / "decoder.onnx")

    def start(self, source_BS: Tensor, real_BS: Tensor) -> OnnxState:  # noqa: ARG002 - padding is known by its id
        return OnnxState(source_BS, run_session(self.encoder, source=source_BS), source_BS[:, :0])

    def step(self, token_N: Tensor, state: OnnxState) -> tuple[Tensor, OnnxState]:
        state = state._replace(target_NT=torch.cat([state.target_NT, token_N[:, None]], 1))
        logp_NV = run_session(self.decoder, source=state.source_NS, memory=state.memory_NSC, target=state.target_NT)
        return logp_NV, state

    def iter_results(self, jobs: Sequence[Job], search: SearchSettings) -> Iterator[tuple[int, list[SearchResult]]]:
        width = max((len(job.ids) + 1 for job in jobs), default=1)
        source_BS, real_BS, _ = collate_sources(jobs, width, len(jobs))
        run = partial(run_batch, self, source_BS, real_BS)
        return enumerate(decode(Request(jobs, search, run, self.decode)))


def run_session(session: OnnxSession, **inputs: Tensor) -> Tensor:
    """Return the only output of a graph for these inputs."""
    return torch.from_numpy(session.run(None, {name: each.numpy() for name, each in inputs.items()})[0])
