"""Training steps as CUDA graphs: captured once for each shape of batch, then replayed with one launch.

The kernels of a small model finish sooner than a CPU can launch them one by one.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.types import Batch

WARM = 3  # eager steps of a shape before it is captured: libraries choose kernels, compilers compile
Shape = tuple[object, ...]


class CapturedGraph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: Batch  # the graph's input
    numbers: Tensor  # the graph's output


class CudaGraphs:
    def __init__(self, work: Callable[[Batch], Tensor]) -> None:
        self.work = work
        self.seen: Counter[Shape] = Counter()
        self.captured: dict[Shape, CapturedGraph] = {}
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.failure = ""  # why steps cannot be captured, once that is known

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
        """Capture a graph for this shape. Work that waits for the GPU cannot be captured; then all steps stay eager."""
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
        """Free all graphs, and unfreeze what was hidden from the garbage collector."""
        self.captured.clear()
        gc.unfreeze()

    @staticmethod
    def replay(recorded: CapturedGraph, batch: Batch) -> Tensor:
        for there, here in zip(recorded.batch.tensors.values(), batch.tensors.values(), strict=True):
            there.copy_(here, non_blocking=True)
        recorded.graph.replay()
        return recorded.numbers.clone()


def shape_of(batch: Batch) -> Shape:
    """All that the work on a batch depends on, but for what its tensors hold."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in batch.tensors.items()]
    return (*shapes, batch.unpacked, batch.first_row, batch.total_rows)
