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


class Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: Batch  # where the graph looks for its input
    numbers: Tensor  # where it leaves its output


class Captured:
    def __init__(self, work: Callable[[Batch], Tensor]) -> None:
        self.work = work
        self.seen: Counter[Shape] = Counter()
        self.kept: dict[Shape, Recorded] = {}
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.why_not = ""  # why nothing can be recorded, once that is known

    def __call__(self, batch: Batch) -> Tensor:
        """What `work` gives for a batch. It may draw random numbers; those of a seed are the same either way."""
        shape = shape_of(batch)
        self.seen[shape] += 1
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if shape not in self.kept and not self.why_not and self.seen[shape] > WARM:
                self.record(shape, batch)
            if shape in self.kept:
                numbers = self.replay(self.kept[shape], batch)
            else:
                numbers = self.work(batch.to(self.stream.device))
        torch.cuda.current_stream().wait_stream(self.stream)
        return numbers

    def record(self, shape: Shape, batch: Batch) -> None:
        """Work that waits for its own numbers cannot be recorded; then none is, and all goes on as in the beginning."""
        own, graph = batch.to(self.stream.device), torch.cuda.CUDAGraph()
        pool = next(iter(self.kept.values())).graph.pool() if self.kept else None
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                numbers = self.work(own)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.why_not = str(error).partition("\n")[0]
            return
        self.kept[shape] = Recorded(graph, own, numbers)
        gc.collect()
        gc.freeze()  # compilers leave a million objects behind, which need not be looked through again and again

    def close(self) -> None:
        """Let go of all that was recorded, and of what was hidden from the garbage collector."""
        self.kept.clear()
        gc.unfreeze()

    @staticmethod
    def replay(recorded: Recorded, batch: Batch) -> Tensor:
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
