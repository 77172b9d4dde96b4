"""The engine that runs every model: PyTorch, on a CPU or a GPU.

Plain beam search flows through slots (engines/flow.py); whatever asks for more, such as terms that must appear, goes
through grids of a fixed number of rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dragoman.config import SearchSettings
from dragoman.door import ROWS, grouped, rung
from dragoman.engines.base import Engine, Job
from dragoman.engines.flow import Flow, GpuFlow, Queue, laid, roomy
from dragoman.hardware import hold_memory, release_memory
from dragoman.search.beam import Plan
from dragoman.search.methods import find
from dragoman.search.request import Request, Wish
from dragoman.search.step import Found

CAPTURED = 64  # sentences from which on it pays to capture a step on a GPU


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
    """A model as it is, or made ready for a precision (engines/packed.py)."""

    def __init__(self, model: Any, device: torch.device, decode: Callable[[Sequence[int]], str]) -> None:
        self.model, self.device, self.decode = model, device, decode
        self.flows: dict[type[Flow], Flow] = {}
        if device.type == "cpu":
            hold_memory()

    def search(self, jobs: Sequence[Job], search: SearchSettings) -> list[list[Found]]:
        found: list[list[Found]] = [[] for _ in jobs]
        flowing = [number for number, job in enumerate(jobs) if flows(job, search)]
        if flowing:
            self.flow(queues(jobs, flowing), search, found)
        rest = sorted(set(range(len(jobs))) - set(flowing))
        for width, some in grouped(rest, lambda number: rung(len(jobs[number].ids) + 1), ROWS[self.device.type]):
            answers = find(self.request([jobs[number] for number in some], width, search))
            for number, answer in zip(some, answers, strict=False):
                found[number] = answer
        if self.device.type == "cpu":
            release_memory()
        return found

    def flow(self, waiting: Sequence[Queue], search: SearchSettings, found: list[list[Found]]) -> None:
        """The queues through as many workers as there are cores, and on a GPU through one."""
        plan = Plan.of(
            roomy(max(queue.longest for queue in waiting)),
            self.device,
            width=1 if search.method == "greedy" else search.beam,
            nbest=search.nbest,
            alpha=search.length_penalty,
            norm=search.length_norm,
            stop=search.stop,
        )
        jobs = sum(len(queue.waiting) for queue in waiting)
        kind = GpuFlow if worth_capturing(self.model, self.device, jobs) else Flow
        if kind not in self.flows:
            self.flows[kind] = kind(self.model, self.device, side_by_side(self.model, self.device))
        flow = self.flows[kind]
        workers = min(torch.get_num_threads() if self.device.type == "cpu" else 1, jobs)

        over = threading.Event()

        def told(number: int, answers: list[Found]) -> None:
            if over.is_set():
                raise GivenUp
            found[number] = answers

        def work() -> None:
            for queue in waiting:
                flow.run(queue, plan, told)

        if workers == 1:
            work()
        else:
            alone(work, workers, over)

    def request(self, jobs: Sequence[Job], width: int, search: SearchSettings) -> Request[Any]:
        rows = ROWS[self.device.type]
        batch = laid(jobs, width, rows).to(self.device)
        trees = batch.depth_BS is not None and batch.tree_BSS is not None
        spare = rows - len(jobs)
        return Request(
            WithTrees(self.model, batch.depth_BS, batch.tree_BSS) if trees else self.model,  # type: ignore[arg-type]
            batch.source_BS,
            batch.source_segment_BS > 0,
            torch.tensor([job.limit for job in jobs] + [0] * spare, device=self.device),
            search,
            [job.wish for job in jobs] + [Wish()] * spare,
            self.decode,
        )


def flows(job: Job, search: SearchSettings) -> bool:
    """Whether nothing is asked for but the likeliest answers."""
    return search.method in ("beam", "greedy") and not (job.wish.asks or search.no_repeat)


def side_by_side(model: Any, device: torch.device) -> int:
    """Rows of the model in one step: enough for its products to be efficient, few enough for a CPU's caches."""
    if device.type == "cuda":
        return 1024
    settings = getattr(model, "settings", None)
    return 256 if settings and settings.width <= 256 else 128


def worth_capturing(model: Any, device: torch.device, jobs: int) -> bool:
    return device.type == "cuda" and jobs >= CAPTURED and getattr(model, "indexable", False)


def queues(jobs: Sequence[Job], numbers: Sequence[int]) -> list[Queue]:
    """One for each width, the widest first."""
    groups: dict[int, list[int]] = {}
    for number in numbers:
        groups.setdefault(rung(len(jobs[number].ids) + 1), []).append(number)
    return [Queue(jobs, groups[width]) for width in sorted(groups, reverse=True)]


class GivenUp(Exception):
    """Nobody waits for the answers any more."""


def alone(work: Callable[[], None], workers: int, over: threading.Event) -> None:
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
