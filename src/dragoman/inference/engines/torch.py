"""The PyTorch engine, which runs every model on a CPU or a GPU, and the preparation of models for it.

On a CPU, `prepare_model` packs the weights of all linear layers once into the memory layout of oneDNN, in the requested
precision. A product with packed weights is up to twice as fast on few rows, and the result for a row does not depend on
the number of other rows in the batch. `prepare_model` refuses a precision that the CPU cannot compute correctly.

`TorchEngine` sorts jobs by source width into queues, and schedulers (decoding/continuous_batching.py) decode them.

Shapes   N rows   I inputs   O outputs
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dragoman.config.settings import get_entry
from dragoman.decoding.continuous_batching import GpuScheduler, JobQueue, Observer, Scheduler, round_to_bucket
from dragoman.decoding.methods import SEARCH_METHODS, Request, SearchSettings, decode
from dragoman.decoding.protocol import IndexedResults, SearchFactory, SearchJob, SearchResult, StepModel
from dragoman.errors import UserError
from dragoman.hardware import BATCH_ROWS, CpuFeatures, best_precision, cpu_features, keep_freed_memory, release_memory
from dragoman.inference.engines.base import Engine

ModuleT = TypeVar("ModuleT", bound=nn.Module)
PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}  # of the linear layers
NARROW_WIDTH = 256  # up to which the products of a step take less time than the calls of its many operations
MIN_GRAPH_JOBS = 64  # minimum number of sentences for which capturing a CUDA graph pays off


class PackedLinear(nn.Module):
    """A linear layer with weights packed for oneDNN, in float32 or bf16."""

    bias: Tensor | None

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        weight_OI = linear.weight.detach().to(dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return out


class Int8Linear(nn.Module):
    """A linear layer with int8 weights (one scale per output) and uint8 inputs (one scale per row).

    The scale of a row comes from its largest absolute value, so it does not depend on the other rows of the batch.
    """

    ZERO_POINT = 128  # the uint8 value that represents an input of 0
    # Largest absolute value of a weight: with VNNI, and without. CPUs without VNNI add two products of a weight and an
    # input (at most 255) in signed int16, which must not saturate: 2 * 255 * 64 < 2**15.
    MAX_WEIGHT, MAX_WEIGHT_WITHOUT_VNNI = 127, 64

    def __init__(self, linear: nn.Linear, features: CpuFeatures | None = None) -> None:
        super().__init__()
        weight_OI = linear.weight.detach().float()
        largest = self.MAX_WEIGHT if (features or cpu_features()).exact_int8 else self.MAX_WEIGHT_WITHOUT_VNNI
        self.scale_O = weight_OI.abs().amax(1).clamp(min=1e-12) / largest
        int8_OI = (weight_OI / self.scale_O[:, None]).round().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(int8_OI, None)
        self.zero_point_O = torch.zeros(len(weight_OI), dtype=torch.int32)
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        x_NI = x.flatten(0, -2)
        scale_N1 = x_NI.abs().amax(1, keepdim=True).clamp_(min=1e-12).div_(127)  # inputs become -127 to 127
        uint8_NI = (x_NI / scale_N1).add_(self.ZERO_POINT + 0.5).to(torch.uint8)  # + 0.5 rounds, as `to` truncates
        # Input and weight, each with its scale and zero point
        factors = (uint8_NI, 1.0, self.ZERO_POINT, self.weight, self.scale_O, self.zero_point_O)
        out_NO = torch.ops.onednn.qlinear_pointwise.default(*factors, None, 1.0, 0, torch.float32, "none", [], "")
        out_NO = out_NO.mul_(scale_N1) if self.bias is None else torch.addcmul(self.bias, out_NO, scale_N1)
        return out_NO.view(*x.shape[:-1], -1)


def prepare_model(model: ModuleT, device: torch.device, precision: str, features: CpuFeatures | None = None) -> ModuleT:
    """Return the model in a precision: a copy, unless nothing needs to be changed.

    Raise a UserError if the device does not support the precision.
    """
    dtype = get_entry(PRECISIONS, precision, "precision")
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]
    can_pack = device.type == "cpu" and has_onednn
    if precision == "int8" and not can_pack:
        raise UserError("int8 needs a CPU and a PyTorch with oneDNN; use float32 (--engine torch)")
    # Without instructions for bf16, packing would fail on some CPUs.
    if precision == "bf16" and not (
        (features or cpu_features()).bf16 if device.type == "cpu" else best_precision(device) == "bf16"
    ):
        raise UserError(f"this {device.type} has no instructions for bf16; use float32 (--engine torch)")
    if precision == "float32" and not can_pack:
        return model.eval()
    prepared = copy.deepcopy(model).eval().requires_grad_(False)
    if precision == "bf16":
        prepared = prepared.to(dtype)
    if can_pack:
        for module in list(prepared.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    is_int8 = precision == "int8"
                    setattr(module, name, Int8Linear(child, features) if is_int8 else PackedLinear(child, dtype))
    return prepared


class TorchEngine(Engine):
    """The engine of a model in PyTorch: the original model, or the one that `prepare_model` returns."""

    def __init__(self, model: StepModel[Any], device: torch.device, detokenize: Callable[[Sequence[int]], str]) -> None:
        self.model, self.device, self.detokenize = model, device, detokenize
        if device.type == "cpu":
            keep_freed_memory()

    @cached_property
    def gpu_scheduler(self) -> GpuScheduler:
        """The scheduler that uses CUDA graphs. It is kept, since capturing a graph takes longer than replaying it."""
        return GpuScheduler(self.model, self.device, choose_rows(self.model, self.device))

    def iter_results(
        self, jobs: Sequence[SearchJob], search: SearchSettings, observe: Observer | None = None
    ) -> IndexedResults:
        """Yield the index and the results of each job. `observe` is called with the state after every step."""
        is_plain_beam = SEARCH_METHODS[search.method].is_beam_search and not search.no_repeat
        run_search = partial(self.run, is_plain_beam=is_plain_beam, observe=observe)
        results = decode(Request(jobs, search, run_search, self.detokenize))
        if self.device.type == "cpu":
            release_memory()
        return enumerate(results)

    def run(
        self, jobs: Sequence[SearchJob], make_search: SearchFactory, *, is_plain_beam: bool, observe: Observer | None
    ) -> list[list[SearchResult]]:
        """Run one search for all jobs: with one worker thread per core on a CPU, with a single one on a GPU.

        There is a queue for each source width. On a GPU, rounding depends on the shape of a batch. There, only plain
        beam search (`is_plain_beam`) without constraints is batched continuously; all else runs in batches of a fixed
        shape.
        """
        results: list[list[SearchResult]] = [[] for _ in jobs]
        queues: dict[tuple[int, bool], list[int]] = {}  # (source width, plain and unconstrained) -> job numbers
        for number, job in enumerate(jobs):
            if job.max_tokens:
                key = (round_to_bucket(len(job.ids) + 1), is_plain_beam and not job.constraints.is_constrained)
                queues.setdefault(key, []).append(number)
        count, rows = sum(map(len, queues.values())), choose_rows(self.model, self.device)
        tasks: list[tuple[Scheduler, JobQueue]] = []
        for (_, plain), numbers in sorted(queues.items(), reverse=True):  # the longest sources first
            if plain and use_cuda_graph(self.model, self.device, count):
                tasks.append((self.gpu_scheduler, JobQueue(jobs, numbers)))
            elif plain or self.device.type == "cpu":
                tasks.append((Scheduler(self.model, self.device, rows), JobQueue(jobs, numbers)))
            else:
                slots = BATCH_ROWS[self.device.type]
                scheduler = Scheduler(self.model, self.device, rows, fixed_slots=slots)
                starts = range(0, len(numbers), slots)
                tasks += [(scheduler, JobQueue(jobs, numbers[start : start + slots])) for start in starts]
        cancelled = threading.Event()

        def work() -> None:
            for scheduler, queue in tasks:
                scheduler.run(queue, make_search, results, cancelled, observe)

        workers = min(torch.get_num_threads() if self.device.type == "cpu" else 1, count)
        if workers <= 1:
            work()
        else:
            run_workers(work, workers, cancelled)
        return results


def choose_rows(model: StepModel[Any], device: torch.device) -> int:
    """Return the number of rows (hypotheses) of a model step: enough for fast matrix products, few for CPU caches."""
    if device.type == "cuda":
        return 1024
    return 256 if is_narrow(model) else 128


def choose_threads(model: StepModel[Any], device: torch.device, cores: int) -> int:
    """Return how many threads decode at a time in a server.

    On a CPU, threads that decode with a narrow model wait for Python's global lock more than they compute: two of them
    are slower than one (docs/LOG.md).
    """
    return 1 if device.type == "cuda" or is_narrow(model) else cores


def is_narrow(model: StepModel[Any]) -> bool:
    settings = getattr(model, "settings", None)
    return bool(settings and settings.width <= NARROW_WIDTH)


def use_cuda_graph(model: StepModel[Any], device: torch.device, jobs: int) -> bool:
    """Return whether the model supports CUDA graphs (by its indirect KV cache) and there are enough jobs for one."""
    return device.type == "cuda" and jobs >= MIN_GRAPH_JOBS and getattr(model, "supports_indirect_cache", False)


def run_workers(work: Callable[[], None], workers: int, cancelled: threading.Event) -> None:
    """Call `work` in several threads, each with a single PyTorch thread; raise the first error.

    If a thread fails or the caller is interrupted, `cancelled` makes the other threads return. This function waits for
    them, since the program would abort if it ended while a thread still computes.
    """
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            futures = [pool.submit(work) for _ in range(workers)]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                cancelled.set()
    finally:
        torch.set_num_threads(threads)
    for future in done:
        future.result()
