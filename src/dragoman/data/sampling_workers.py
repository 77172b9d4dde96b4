"""Samples drawn by several processes, where a machine has cores to spare for them.

A sample is a function of its text, the rate and (seed, epoch, index), so what is drawn does not depend on who draws it.
A process is given its tokenizers, then task after task, through a pipe, and ends when that pipe does: however this
process ends, none is left behind. It is not made by `multiprocessing`, which would run a user's script again in each.

It starts at once because nothing heavy is imported here: neither numpy nor torch.
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

RESERVED_CORES = 2  # cores that are left to the trainer: one that feeds a GPU and one that lays batches
MAX_WORKERS = 8  # processes: about as many draw what one thread can lay
WORKER_COMMAND = (
    "import sys; sys.path[:] = sys.argv[1:]; from dragoman.data.sampling_workers import run_worker; run_worker()"
)
WORKER_FAILURES = (
    OSError,
    EOFError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)  # what no answer of the other looks like


def count_workers() -> int:
    """How many processes draw: none where cores are few. Trainers that torchrun started here share the cores."""
    spare = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1) - RESERVED_CORES
    return min(spare, MAX_WORKERS) if spare > 1 else 0


class SamplingTask(NamedTuple):
    """Pairs of one corpus to be drawn; their texts are in UTF-8, as a store keeps them."""

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
        """By which an answer to it can be told from those to others."""
        return self.epoch, self.indices[0], len(self.indices)


class SampledIds(NamedTuple):
    """The ids of one side of a task's pairs, end to end, and where those of each pair end."""

    ids: array[int]
    ends: array[int]


def sample_pair(
    tokenizers: Tokenizers, pair: Pair, *, rate: float, key: tuple[int, int, int], most: int
) -> tuple[list[int], ...]:
    """Both sides of a pair, cut at random, the source after its tag. `key` is (seed, epoch, index).

    A side that would have more tokens than `most` is cut as it always is.
    """
    seed, epoch, index = key
    tag = tokenizers.before(pair.tag)
    source = tokenizers.source.sample(pair.source, rate=rate, key=key)
    other = (~seed, epoch, index)  # no seed of a source: a word on both sides is not cut alike
    target = tokenizers.target.sample(pair.target, rate=rate, key=other)
    return (
        [*tag, *(source if len(tag) + len(source) <= most else tokenizers.source.encode(pair.source))],
        target if len(target) <= most else tokenizers.target.encode(pair.target),
    )


def sample_task(tokenizers: Tokenizers, task: SamplingTask) -> tuple[SampledIds, ...]:
    """Both sides of all pairs of a task."""
    sides = SampledIds(array("I"), array("I")), SampledIds(array("I"), array("I"))
    for index, source, target in zip(task.indices, task.sources, task.targets, strict=True):
        pair = Pair(source.decode(), target.decode(), tag=task.tag)
        cut = sample_pair(tokenizers, pair, rate=task.rate, key=(task.seed, task.epoch, index), most=task.most)
        for side, ids in zip(sides, cut, strict=True):
            side.ids.extend(ids)
            side.ends.append(len(side.ids))
    return sides


class SamplingPool:
    """Processes that draw. What one that has died, or could not start, leaves undone is drawn here instead."""

    def __init__(self, tokenizers: Tokenizers, count: int) -> None:
        self.tokenizers, self.alone = tokenizers, threading.Lock()
        command = [sys.executable or "python", "-c", WORKER_COMMAND, *map(str, sys.path)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.processes: list[subprocess.Popen[bytes]] = []
        with suppress(OSError):  # no more processes are allowed here
            for _ in range(count):  # Ctrl-C in a terminal is for the trainer: it does not reach another session
                self.processes.append(subprocess.Popen(command, start_new_session=True, **pipes))
        self.unclaimed, self.own = list(self.processes), threading.local()
        self.threads = ThreadPoolExecutor(max(len(self.processes), 1), "samples", initializer=self.claim)

    def claim(self) -> None:
        """Each thread speaks with a process of its own."""
        self.own.process = self.unclaimed.pop() if self.unclaimed else None
        with suppress(OSError):
            self.send(self.tokenizers)

    def send(self, message: object) -> None:
        process = self.own.process
        if not process:
            raise ProcessLookupError
        pickle.dump(message, process.stdin)
        process.stdin.flush()

    def ask(self, task: SamplingTask) -> Future[tuple[SampledIds, ...]]:
        """Have it drawn. Tasks are begun in the order in which they come."""
        return self.threads.submit(self.answer, task)

    def answer(self, task: SamplingTask) -> tuple[SampledIds, ...]:
        with suppress(*WORKER_FAILURES):
            self.send(task)
            name, drawn = pickle.load(self.own.process.stdout)
            if name == task.name:
                return drawn  # type: ignore[no-any-return]
        self.own.process = None  # one that gave no answer, or a wrong one, is not asked again
        with self.alone:  # a tokenizer remembers what it drew, and is not made for several threads
            return sample_task(self.tokenizers, task)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(cancel_futures=True)  # waits for tasks that are begun
        for process in self.processes:
            with suppress(BrokenPipeError), process:  # closes the pipes, which ends it, and waits
                pass


def run_worker() -> None:
    """What a process does, until its input ends."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever asked is gone: end without a word
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what else is printed here is no answer
    with suppress(*WORKER_FAILURES):
        tokenizers = pickle.load(tasks)
        while True:
            task = pickle.load(tasks)
            pickle.dump((task.name, sample_task(tokenizers, task)), answers)
            answers.flush()
