"""Worker processes that sample segmentations, where a machine has cores to spare.

A sample is a function of its text, the rate and (seed, epoch, index), so it does not depend on which process makes it.
A worker gets its tokenizers and then task after task through a pipe, and ends when the pipe closes: however the
trainer ends, no worker is left behind. `multiprocessing` is not used: what it spawns runs the user's script again.

Workers start quickly because this module imports neither numpy nor torch.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from array import array
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, Self

from dragoman.data.tokenizers import Tokenizers
from dragoman.hardware import usable_cores
from dragoman.types import Pair

RESERVED_CORES = 2  # cores left to the trainer: one that feeds a GPU and one that collates batches
MAX_WORKERS = 8  # about as many sample what one thread can collate
WORKER_COMMAND = (
    "import sys; sys.path[:] = sys.argv[1:]; from dragoman.data.sampling_workers import run_worker; run_worker()"
)
# A process that is gone, or output that is no result of a task.
WORKER_FAILURES = (OSError, EOFError, TypeError, ValueError, pickle.UnpicklingError)


def count_workers() -> int:
    """Return how many workers to start: none where cores are few. The trainers of torchrun share the cores."""
    spare = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1) - RESERVED_CORES
    return min(spare, MAX_WORKERS) if spare > 1 else 0


class SamplingTask(NamedTuple):
    """Pairs of one corpus to sample; their texts are in UTF-8, as in the token store."""

    rate: float
    seed: int
    epoch: int
    tag: str
    most: int
    indices: Sequence[int]
    sources: Sequence[bytes]
    targets: Sequence[bytes]

    @property
    def name(self) -> tuple[int, int, int]:
        """Return what identifies the result of this task."""
        return self.epoch, self.indices[0], len(self.indices)


class SampledIds(NamedTuple):
    """The ids of one side of a task's pairs, concatenated, and where those of each pair end."""

    ids: array[int]
    ends: array[int]


def sample_pair(
    tokenizers: Tokenizers, pair: Pair, *, rate: float, key: tuple[int, int, int], most: int
) -> tuple[list[int], ...]:
    """Sample a segmentation of both sides of a pair, the source after its tag. `key` is (seed, epoch, index).

    A side that would have more tokens than `most` gets its usual segmentation.
    """
    seed, epoch, index = key
    tag = tokenizers.before(pair.tag)
    source = tokenizers.source.sample(pair.source, rate=rate, key=key)
    other = (~seed, epoch, index)  # never the seed of a source: a word on both sides is segmented independently
    target = tokenizers.target.sample(pair.target, rate=rate, key=other)
    return (
        [*tag, *(source if len(tag) + len(source) <= most else tokenizers.source.encode(pair.source))],
        target if len(target) <= most else tokenizers.target.encode(pair.target),
    )


def sample_task(tokenizers: Tokenizers, task: SamplingTask) -> tuple[SampledIds, ...]:
    """Sample both sides of all pairs of a task."""
    sides = SampledIds(array("I"), array("I")), SampledIds(array("I"), array("I"))
    for index, source, target in zip(task.indices, task.sources, task.targets, strict=True):
        pair = Pair(source.decode(), target.decode(), tag=task.tag)
        cut = sample_pair(tokenizers, pair, rate=task.rate, key=(task.seed, task.epoch, index), most=task.most)
        for side, ids in zip(sides, cut, strict=True):
            side.ids.extend(ids)
            side.ends.append(len(side.ids))
    return sides


class SamplingPool:
    """Worker processes. The tasks of one that died, or could not start, are done in this process instead."""

    def __init__(self, tokenizers: Tokenizers, count: int) -> None:
        self.tokenizers, self.lock = tokenizers, threading.Lock()
        command = [sys.executable or "python", "-c", WORKER_COMMAND, *map(str, sys.path)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.processes: list[subprocess.Popen[bytes]] = []
        with suppress(OSError):  # no more processes are allowed here
            for _ in range(count):  # Ctrl-C in a terminal is for the trainer: it does not reach another session
                self.processes.append(subprocess.Popen(command, start_new_session=True, **pipes))
        self.unclaimed, self.own = list(self.processes), threading.local()
        self.threads = ThreadPoolExecutor(max(len(self.processes), 1), "samples", initializer=self.claim)

    def claim(self) -> None:
        """Give each thread its own worker process."""
        self.own.process = self.unclaimed.pop() if self.unclaimed else None
        with suppress(OSError):
            self.send(self.tokenizers)

    def send(self, message: object) -> None:
        process = self.own.process
        if not process:
            raise ProcessLookupError
        pickle.dump(message, process.stdin)
        process.stdin.flush()

    def submit(self, task: SamplingTask) -> Future[tuple[SampledIds, ...]]:
        """Submit a task. Tasks start in the order in which they are submitted."""
        return self.threads.submit(self.answer, task)

    def answer(self, task: SamplingTask) -> tuple[SampledIds, ...]:
        with suppress(*WORKER_FAILURES):
            self.send(task)
            name, drawn = pickle.load(self.own.process.stdout)
            if name == task.name:
                return drawn  # type: ignore[no-any-return]
        self.own.process = None  # one that failed or answered something else is not used again
        with self.lock:  # a tokenizer has a cache and is not thread-safe
            return sample_task(self.tokenizers, task)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(cancel_futures=True)  # waits for running tasks
        for process in self.processes:
            with suppress(BrokenPipeError), process:  # closes the pipes, which ends it, and waits
                pass


def run_worker() -> None:
    """Run tasks from stdin until it ends: the main loop of a worker."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the trainer is gone: end silently
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything else that is printed must not reach the pipe
    with suppress(*WORKER_FAILURES):
        tokenizers = pickle.load(tasks)
        while True:
            task = pickle.load(tasks)
            pickle.dump((task.name, sample_task(tokenizers, task)), answers)
            answers.flush()
