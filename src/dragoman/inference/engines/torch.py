"""Models prepared for a CPU: weights packed once as oneDNN wants them, in the precision asked for.

A product whose weights are packed beforehand is up to twice as fast on few rows, and a row's result does not depend on
how many other rows are in the batch. A precision that the CPU cannot compute correctly is refused here.

Shapes   N rows   I inputs   O outputs

The engine that runs every model: PyTorch, on a CPU or a GPU.

Plain beam search flows through slots (decoding/continuous_batching.py); whatever asks for more, such as terms that must
appear, goes through grids of a fixed number of rows.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.config.settings import SearchSettings, pick
from dragoman.data.batches import group_by_key, round_to_bucket
from dragoman.decoding.beam import BeamPlan
from dragoman.decoding.continuous_batching import GpuScheduler, JobQueue, Scheduler, collate_sources, round_up_length
from dragoman.decoding.methods import decode
from dragoman.decoding.protocol import SearchResult
from dragoman.decoding.request import DecodingConstraints, Job, Request
from dragoman.errors import UserError
from dragoman.hardware import ROWS, CpuFeatures, best_precision, cpu_features, hold_memory, release_memory
from dragoman.inference.engines.base import Engine


class PackedLinear(nn.Module):
    """x W' + b in float32 or bf16."""

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
    """The same with weights and inputs of 8 bits: each output has a scale of its own, and each row of inputs too.

    A row's scale is its largest number, so it does not depend on the rows beside it. Inputs are unsigned, at most 255.
    CPUs without VNNI add two products in 16 signed bits, so weights must stay within 64 there: 2 * 255 * 64 < 2**15.
    """

    ZERO = 128  # of the inputs
    WIDE, SAFE = 127, 64  # the largest weight, where sums are exact in any case and where they would saturate

    def __init__(self, linear: nn.Linear, features: CpuFeatures) -> None:
        super().__init__()
        largest = self.WIDE if features.exact_int8 else self.SAFE
        weight_OI = linear.weight.detach().float()
        self.scale_O = weight_OI.abs().amax(1).clamp(min=1e-12) / largest
        whole_OI = (weight_OI / self.scale_O[:, None]).round().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(whole_OI, None)
        self.zero_O = torch.zeros(len(weight_OI), dtype=torch.int32)
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        x_NI = x.flatten(0, -2)
        scale_N1 = x_NI.abs().amax(1, keepdim=True).clamp_(min=1e-12).div_(127)
        whole_NI = (x_NI / scale_N1).add_(self.ZERO + 0.5).to(torch.uint8)  # cut off after a half was added: rounded
        out_NO = torch.ops.onednn.qlinear_pointwise.default(
            whole_NI,
            1.0,
            self.ZERO,
            self.weight,
            self.scale_O,
            self.zero_O,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        out_NO = out_NO.mul_(scale_N1) if self.bias is None else torch.addcmul(self.bias, out_NO, scale_N1)
        return out_NO.view(*x.shape[:-1], -1)


def prepare_model(
    model: nn.Module, device: torch.device, precision: str, features: CpuFeatures | None = None
) -> nn.Module:
    """Return the model, or a copy where weights change, in a precision that the device computes correctly."""
    make = pick(PRECISIONS, precision, "precision")
    features = features or cpu_features()
    packs = device.type == "cpu" and can_pack_weights()
    if precision == "int8" and not packs:
        raise UserError("int8 needs a CPU and a PyTorch with oneDNN; use float32 (--engine torch)")
    if precision == "bf16" and not supports_bf16(device, features):
        raise UserError(f"this {device.type} has no instructions for bf16; use float32 (--engine torch)")
    if precision == "float32" and not packs:
        return model.eval()
    prepared = copy.deepcopy(model).eval().requires_grad_(False)
    if precision == "bf16":
        prepared = prepared.bfloat16()
    if packs:
        for module in list(prepared.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, make(child, features))
    return prepared


def can_pack_weights() -> bool:
    """Return whether this PyTorch has oneDNN's products with packed weights."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]


def supports_bf16(device: torch.device, features: CpuFeatures) -> bool:
    """Return whether there are instructions for bf16. Packing weights raises without them on some CPUs."""
    return features.bf16 if device.type == "cpu" else best_precision(device) == "bf16"


PRECISIONS: dict[str, Callable[[nn.Linear, CpuFeatures], nn.Module]] = {
    "float32": lambda linear, _: PackedLinear(linear, torch.float32),
    "bf16": lambda linear, _: PackedLinear(linear, torch.bfloat16),
    "int8": Int8Linear,
}

MIN_GRAPH_JOBS = 64  # sentences from which on it pays to capture a step on a GPU


@dataclass(frozen=True)
class WithTrees:
    """A model as search knows it, which is handed the trees of the sources beside them."""

    model: Any
    depth_BS: Tensor
    tree_BSS: Tensor

    def start(self, source_BS: Tensor, keep_BS: Tensor) -> Any:
        return self.model.start(source_BS, keep_BS, self.depth_BS, self.tree_BSS)

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]:
        logp_NV, state = self.model.step(token_N, state)
        return logp_NV, state


class TorchEngine(Engine):
    """A model as it is, or made ready for a precision (inference/engines/torch.py)."""

    def __init__(self, model: Any, device: torch.device, decode: Callable[[Sequence[int]], str]) -> None:
        self.model, self.device, self.decode = model, device, decode
        self.flows: dict[type[Scheduler], Scheduler] = {}
        if device.type == "cpu":
            hold_memory()

    def search(self, jobs: Sequence[Job], search: SearchSettings) -> list[list[SearchResult]]:
        found: list[list[SearchResult]] = [[] for _ in jobs]
        flowing = [number for number, job in enumerate(jobs) if is_plain_beam(job, search)]
        if flowing:
            self.flow(make_queues(jobs, flowing), search, found)
        rest = sorted(set(range(len(jobs))) - set(flowing))
        for width, some in group_by_key(
            rest, lambda number: round_to_bucket(len(jobs[number].ids) + 1), ROWS[self.device.type]
        ):
            answers = decode(self.request([jobs[number] for number in some], width, search))
            for number, answer in zip(some, answers, strict=False):
                found[number] = answer
        if self.device.type == "cpu":
            release_memory()
        return found

    def flow(self, waiting: Sequence[JobQueue], search: SearchSettings, found: list[list[SearchResult]]) -> None:
        """The queues through as many workers as there are cores, and on a GPU through one."""
        plan = BeamPlan.of(
            round_up_length(max(queue.longest for queue in waiting)),
            self.device,
            width=1 if search.method == "greedy" else search.beam,
            nbest=search.nbest,
            alpha=search.length_penalty,
            norm=search.length_norm,
            stop=search.stop,
        )
        jobs = sum(len(queue.waiting) for queue in waiting)
        kind = GpuScheduler if use_cuda_graph(self.model, self.device, jobs) else Scheduler
        if kind not in self.flows:
            self.flows[kind] = kind(self.model, self.device, choose_rows(self.model, self.device))
        flow = self.flows[kind]
        workers = min(torch.get_num_threads() if self.device.type == "cpu" else 1, jobs)

        over = threading.Event()

        def told(number: int, answers: list[SearchResult]) -> None:
            if over.is_set():
                raise SearchCancelled
            found[number] = answers

        def work() -> None:
            for queue in waiting:
                flow.run(queue, plan, told)

        if workers == 1:
            work()
        else:
            run_workers(work, workers, over)

    def request(self, jobs: Sequence[Job], width: int, search: SearchSettings) -> Request[Any]:
        rows = ROWS[self.device.type]
        batch = collate_sources(jobs, width, rows).to(self.device)
        trees = batch.depth_BS is not None and batch.tree_BSS is not None
        spare = rows - len(jobs)
        return Request(
            WithTrees(self.model, batch.depth_BS, batch.tree_BSS) if trees else self.model,  # type: ignore[arg-type]
            batch.source_BS,
            batch.source_segment_BS > 0,
            torch.tensor([job.limit for job in jobs] + [0] * spare, device=self.device),
            search,
            [job.constraints for job in jobs] + [DecodingConstraints()] * spare,
            self.decode,
        )


def is_plain_beam(job: Job, search: SearchSettings) -> bool:
    """Whether nothing is asked for but the likeliest answers."""
    return search.method in ("beam", "greedy") and not (job.constraints.any or search.no_repeat)


def choose_rows(model: Any, device: torch.device) -> int:
    """Rows of the model in one step: enough for its products to be efficient, few enough for a CPU's caches."""
    if device.type == "cuda":
        return 1024
    settings = getattr(model, "settings", None)
    return 256 if settings and settings.width <= 256 else 128


def use_cuda_graph(model: Any, device: torch.device, jobs: int) -> bool:
    return device.type == "cuda" and jobs >= MIN_GRAPH_JOBS and getattr(model, "indexable", False)


def make_queues(jobs: Sequence[Job], numbers: Sequence[int]) -> list[JobQueue]:
    """One for each width, the widest first."""
    groups: dict[int, list[int]] = {}
    for number in numbers:
        groups.setdefault(round_to_bucket(len(jobs[number].ids) + 1), []).append(number)
    return [JobQueue(jobs, groups[width]) for width in sorted(groups, reverse=True)]


class SearchCancelled(Exception):
    """Nobody waits for the answers any more."""


def run_workers(work: Callable[[], None], workers: int, over: threading.Event) -> None:
    """The work in so many threads, each of which computes alone; the first that fails speaks for all.

    If one fails, or whoever waits is interrupted, `over` tells the others to give up, and they are waited for: a thread
    that still computes when the program ends takes it down.
    """
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as crew:
            shares = [crew.submit(work) for _ in range(workers)]
            try:
                done, _ = wait(shares, return_when=FIRST_EXCEPTION)
            finally:
                over.set()
    finally:
        torch.set_num_threads(threads)
    for share in done:
        share.result()
