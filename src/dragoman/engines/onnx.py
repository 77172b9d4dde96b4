"""ONNX graphs as an engine: our own search, asking an ONNX runtime. It is there to check what was exported.

Shapes   B sentences   S source width   N rows of a search   T prefix length   C model width   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dragoman.config import SearchSettings
from dragoman.engines.base import Engine, Job
from dragoman.engines.flow import laid
from dragoman.search.methods import find
from dragoman.search.request import Request
from dragoman.search.step import Found
from dragoman.types import UserError


@dataclass(frozen=True)
class State:
    source_NS: Tensor
    memory_NSC: Tensor
    target_NT: Tensor

    def select(self, rows_N: Tensor) -> State:
        return State(*(each.index_select(0, rows_N) for each in (self.source_NS, self.memory_NSC, self.target_NT)))


class OnnxEngine(Engine):
    """Search's three verbs over two graphs (exchange/onnx.py)."""

    def __init__(self, folder: Path, decode: Callable[[Sequence[int]], str]) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise UserError(
                "there is no ONNX runtime to compare answers with; pip install 'dragoman[onnx]' brings it"
            ) from None
        self.decode = decode
        self.reads, self.writes = (onnxruntime.InferenceSession(folder / f"{each}coder.onnx") for each in ("en", "de"))

    def start(self, source_BS: Tensor, keep_BS: Tensor) -> State:  # noqa: ARG002 - padding is known by its id
        return State(source_BS, asked(self.reads, source=source_BS), source_BS[:, :0])

    def step(self, token_N: Tensor, state: State) -> tuple[Tensor, State]:
        state = replace(state, target_NT=torch.cat([state.target_NT, token_N[:, None]], 1))
        logp_NV = asked(self.writes, source=state.source_NS, memory=state.memory_NSC, target=state.target_NT)
        return logp_NV, state

    def search(self, jobs: Sequence[Job], search: SearchSettings) -> list[list[Found]]:
        width = max((len(job.ids) + 1 for job in jobs), default=1)
        batch, limit_B = laid(jobs, width, len(jobs)), torch.tensor([job.limit for job in jobs])
        keep_BS = batch.source_segment_BS > 0
        return find(Request(self, batch.source_BS, keep_BS, limit_B, search, [job.wish for job in jobs], self.decode))


def asked(session: Any, **inputs: Tensor) -> Tensor:
    return torch.from_numpy(session.run(None, {name: each.numpy() for name, each in inputs.items()})[0])
