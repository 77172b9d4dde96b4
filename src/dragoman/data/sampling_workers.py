"""Worker processes for subword regularization (BPE-dropout, unigram sampling), used if there are spare cores.

In each epoch a text gets a new random segmentation; `rate` is the strength, in BPE the dropout rate of merges. It is a
function of the text, the rate and (seed, epoch, index), so it does not depend on the process that computes it.

A SamplingPool has one thread per worker process. The thread sends the tokenizers and then one SamplingTask after the
other through a pipe, and reads the results. A worker exits when the pipe is closed, so no worker outlives the trainer.
`multiprocessing` is not used because its child processes import the user's script again.

Workers must start quickly: neither this module nor the modules that it imports may import numpy or torch.
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

from dragoman.data.context import STORED_SEPARATOR, find_separator, join_context
from dragoman.data.tokenizers import Tokenizers
from dragoman.hardware import usable_cores

RESERVED_CORES = 2  # cores left to the trainer: one launches GPU kernels, one collates batches
MAX_WORKERS = 8  # one thread collates what about eight workers produce, so more would be idle
WORKER_COMMAND = (
    "import sys; sys.path[:] = sys.argv[1:]; from dragoman.data.sampling_workers import run_worker; run_worker()"
)
# Exceptions that are raised if a worker has exited, or if its output is not the result of a task.
WORKER_FAILURES = (OSError, EOFError, TypeError, ValueError, pickle.UnpicklingError)


def count_workers() -> int:
    """Return how many workers to start: 0 if there are few spare cores. The processes of torchrun share the cores."""
    spare = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1) - RESERVED_CORES
    return min(spare, MAX_WORKERS) if spare > 1 else 0


class SamplingTask(NamedTuple):
    """Pairs of one corpus to segment."""

    rate: float
    seed: int
    epoch: int
    tag: str  # of all sources, such as the target language; its ids precede those of a source
    max_tokens: int
    indices: Sequence[int]  # of the pairs, counted over all corpora
    sources: Sequence[bytes]  # in UTF-8, as in the cached files: context sentences, if any, and the sentence itself
    targets: Sequence[bytes]

    @property
    def task_id(self) -> tuple[int, int, int]:
        """Return the identifier that a worker sends back with the result."""
        return self.epoch, self.indices[0], len(self.indices)


class SampledIds(NamedTuple):
    """One side of the pairs of a task as token ids."""

    ids: array[int]  # of all pairs, concatenated
    ends: array[int]  # end of each pair in `ids`


def sample_task(tokenizers: Tokenizers, task: SamplingTask) -> tuple[SampledIds, ...]:
    """Return sampled segmentations of the sources and of the targets of a task.

    A text that would have more than `max_tokens` tokens gets the deterministic segmentation, which is shorter. Context
    sentences that do not fit are left out.
    """
    tag_ids = tokenizers.tag_ids(task.tag)
    sampled = []
    # The seeds of the two sides differ, so that they are segmented independently.
    for tokenizer, texts, prefix, seed in (
        (tokenizers.source, task.sources, tag_ids, task.seed),
        (tokenizers.target, task.targets, tokenizers.target_tag_ids(task.tag), ~task.seed),
    ):
        side = SampledIds(array("I"), array("I"))
        for index, encoded in zip(task.indices, texts, strict=True):
            *context, text = [sentence.decode() for sentence in encoded.split(STORED_SEPARATOR)]
            key = (seed, task.epoch, index)
            ids = tokenizer.sample(text, rate=task.rate, key=key)
            if len(prefix) + len(ids) > task.max_tokens:
                ids = tokenizer.encode(text)
            if context:
                sentences = [tokenizer.sample(sentence, rate=task.rate, key=key) for sentence in context]
                context_budget = task.max_tokens - len(prefix) - len(ids)
                ids = [*join_context(sentences, find_separator(tokenizers), context_budget), *ids]
            side.ids.extend([*prefix, *ids])
            side.ends.append(len(side.ids))
        sampled.append(side)
    return tuple(sampled)


class SamplingPool:
    """A pool of worker processes, used as a context manager.

    If a worker exits or cannot start, its tasks run in a thread of this process instead.
    """

    def __init__(self, tokenizers: Tokenizers, count: int) -> None:
        self.tokenizers, self.lock = tokenizers, threading.Lock()
        command = [sys.executable or "python", "-c", WORKER_COMMAND, *map(str, sys.path)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.processes: list[subprocess.Popen[bytes]] = []
        with suppress(OSError):  # raised if no more processes can be started
            for _ in range(count):  # in a new session, so that Ctrl-C in a terminal reaches only the trainer
                self.processes.append(subprocess.Popen(command, start_new_session=True, **pipes))
        self.unassigned, self.thread_local = list(self.processes), threading.local()
        self.threads = ThreadPoolExecutor(max(len(self.processes), 1), "sampling", initializer=self.assign_worker)

    def assign_worker(self) -> None:
        """Assign a worker process to the current thread and send it the tokenizers."""
        self.thread_local.process = self.unassigned.pop() if self.unassigned else None
        with suppress(OSError):
            self.send(self.tokenizers)

    def send(self, message: object) -> None:
        """Send an object to the worker of the current thread; raise an OSError if there is none."""
        process = self.thread_local.process
        if not process:
            raise ProcessLookupError
        pickle.dump(message, process.stdin)
        process.stdin.flush()

    def submit(self, task: SamplingTask) -> Future[tuple[SampledIds, ...]]:
        return self.threads.submit(self.run_task, task)

    def run_task(self, task: SamplingTask) -> tuple[SampledIds, ...]:
        """Return the result from the worker of the current thread, or compute it here if the worker fails."""
        with suppress(*WORKER_FAILURES):
            self.send(task)
            task_id, sampled = pickle.load(self.thread_local.process.stdout)
            if task_id == task.task_id:
                return sampled  # type: ignore[no-any-return]
        self.thread_local.process = None  # a worker that failed or sent something else is not used again
        with self.lock:  # a tokenizer has a cache and is not thread-safe
            return sample_task(self.tokenizers, task)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(cancel_futures=True)  # waits for running tasks
        for process in self.processes:
            with suppress(BrokenPipeError), process:  # closes the pipes, so the process exits, and waits for it
                pass


def run_worker() -> None:
    """Run tasks from stdin and write the results to stdout until stdin is closed: the main loop of a worker."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit silently if the trainer has exited
    tasks, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # redirect other output of this process to stderr, so that the pipe has only results
    with suppress(*WORKER_FAILURES):
        tokenizers = pickle.load(tasks)
        while True:
            task = pickle.load(tasks)
            pickle.dump((task.task_id, sample_task(tokenizers, task)), results)
            results.flush()
