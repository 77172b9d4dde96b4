"""The protocol between a benchmark and its contestants, which train in turns. Standard library only.

The benchmark writes "go SECONDS UPDATES" to the standard input of a contestant. The contestant trains for at least this
time and this number of updates and answers with one line of JSON: {"tokens": tokens without padding, "wall": seconds,
"cpu": CPU seconds of all threads, "updates": count, "flops": operations, if it counts them, "peak": peak memory in
bytes, "at": time of day}. Then it waits for the next line. It exits at the end of input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def read_task() -> dict[str, Any]:
    """Return the task given by the benchmark: sizes, precision, threads, and the folder with the corpus."""
    task: dict[str, Any] = json.loads(sys.argv[1])
    return task


class Turns:
    """The turns of a contestant, which calls `before` ahead of every update and `after` behind it.

    `synchronize` waits for the device; it is called at the start and at the end of a turn. `peak` returns the peak
    memory in bytes.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None, peak: Callable[[], int] = lambda: 0) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print must not mix with the answers
        self.synchronize, self.peak = synchronize, peak
        self.started: float | None = None
        self.seconds = self.cpu = self.flops = 0.0
        self.tokens = self.updates = self.min_updates = 0

    def answer(self, **fields: Any) -> None:
        print(json.dumps({**fields, "at": time.time()}), file=self.out, flush=True)

    def ready(self, **facts: Any) -> None:
        """Tell the benchmark that the model is built, with facts about it."""
        self.answer(ready=True, **facts)

    def before(self) -> None:
        """End the turn if its time is over, and wait for the next one."""
        if self.started is not None and self.is_over():
            self.synchronize()
            wall, cpu = time.perf_counter() - self.started, time.process_time() - self.cpu
            counts = {"tokens": self.tokens, "updates": self.updates, "flops": self.flops}
            self.answer(**counts, wall=wall, cpu=cpu, peak=self.peak())
            self.started = None
        if self.started is None:
            self.seconds, self.min_updates = self.wait()
            self.tokens = self.updates = 0
            self.flops = 0.0
            self.synchronize()
            self.started, self.cpu = time.perf_counter(), time.process_time()

    def is_over(self) -> bool:
        return self.updates >= self.min_updates and time.perf_counter() - (self.started or 0.0) >= self.seconds

    def after(self, tokens: int, flops: float = 0.0) -> None:
        self.tokens += tokens
        self.flops += flops
        self.updates += 1

    @staticmethod
    def wait() -> tuple[float, int]:
        """Wait for the next turn; return its minimum number of seconds and of updates."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        _, seconds, updates = line.split()
        return float(seconds), int(updates)
