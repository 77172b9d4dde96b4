"""Updates as graphs of a GPU: all that one does is recorded once for each shape of batch, and launched with one call.

A small model's kernels are done sooner than a processor can ask for them one by one; so it asks for all at once.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.types import Batch

WARM = 3  # updates of a shape that are made one kernel at a time: libraries choose, compilers compile
Shape = tuple[object, ...]


class CapturedGraph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: Batch  # where the graph looks for its input
    numbers: Tensor  # where it leaves its output


class CudaGraphs:
    def __init__(self, work: Callable[[Batch], Tensor]) -> None:
        self.work = work
        self.seen: Counter[Shape] = Counter()
        self.captured: dict[Shape, CapturedGraph] = {}
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.failure = ""  # why nothing can be recorded, once that is known

    def __call__(self, batch: Batch) -> Tensor:
        """What `work` gives for a batch. It may draw random numbers; those of a seed are the same either way."""
        shape = shape_of(batch)
        self.seen[shape] += 1
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if shape not in self.captured and not self.failure and self.seen[shape] > WARM:
                self.capture(shape, batch)
            if shape in self.captured:
                numbers = self.replay(self.captured[shape], batch)
            else:
                numbers = self.work(batch.to(self.stream.device))
        torch.cuda.current_stream().wait_stream(self.stream)
        return numbers

    def capture(self, shape: Shape, batch: Batch) -> None:
        """Work that waits for its own numbers cannot be recorded; then none is, and all goes on as in the beginning."""
        own, graph = batch.to(self.stream.device), torch.cuda.CUDAGraph()
        pool = next(iter(self.captured.values())).graph.pool() if self.captured else None
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                numbers = self.work(own)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.failure = str(error).partition("\n")[0]
            return
        self.captured[shape] = CapturedGraph(graph, own, numbers)
        gc.collect()
        gc.freeze()  # compilers leave a million objects behind, which need not be looked through again and again

    def close(self) -> None:
        """Let go of all that was recorded, and of what was hidden from the garbage collector."""
        self.captured.clear()
        gc.unfreeze()

    @staticmethod
    def replay(recorded: CapturedGraph, batch: Batch) -> Tensor:
        for name, there in tensors(recorded.batch).items():
            there.copy_(getattr(batch, name), non_blocking=True)
        recorded.graph.replay()
        return recorded.numbers.clone()


def tensors(batch: Batch) -> dict[str, Tensor]:
    return {each.name: found for each in fields(batch) if isinstance(found := getattr(batch, each.name), Tensor)}


def shape_of(batch: Batch) -> Shape:
    """All that the work on a batch depends on, but for what its tensors hold."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors(batch).items()]
    return (*shapes, batch.unpacked, batch.first_row, batch.total_rows)
