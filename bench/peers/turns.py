"""How a contestant takes turns: it trains while it is told to, reports, and waits. Standard library only.

The driver writes "go SECONDS UPDATES" to standard input; the contestant trains for at least so long and at least so
many updates, and answers with one line of JSON: {"tokens": real tokens, "wall": seconds, "cpu": seconds of all threads,
"updates": count, "flops": operations, where it counts them, "peak": the most bytes held so far, "at": time of day}. End
of input ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def task() -> dict[str, Any]:
    """What the driver asks for: sizes, precision, threads, and the folder with the pairs."""
    made: dict[str, Any] = json.loads(sys.argv[1])
    return made


class Turns:
    """Call `before` ahead of every update and `after` behind it.

    `settle` waits until all that was asked of the device is done; it is called at both ends of a turn.
    """

    def __init__(self, settle: Callable[[], None] = lambda: None, peak: Callable[[], int] = lambda: 0) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries may chat on standard output; the driver listens to ours alone
        self.settle, self.peak = settle, peak
        self.started: float | None = None
        self.seconds = self.cpu = self.flops = 0.0
        self.tokens = self.updates = self.least = 0

    def say(self, **answer: Any) -> None:
        print(json.dumps({**answer, "at": time.time()}), file=self.out, flush=True)

    def ready(self, **facts: Any) -> None:
        """The first word of a contestant: it is built, and with what."""
        self.say(ready=True, **facts)

    def before(self) -> None:
        if self.started is not None and self.over():
            self.settle()
            wall, cpu = time.perf_counter() - self.started, time.process_time() - self.cpu
            counts = {"tokens": self.tokens, "updates": self.updates, "flops": self.flops}
            self.say(**counts, wall=wall, cpu=cpu, peak=self.peak())
            self.started = None
        if self.started is None:
            self.seconds, self.least = self.wait()
            self.tokens = self.updates = 0
            self.flops = 0.0
            self.settle()
            self.started, self.cpu = time.perf_counter(), time.process_time()

    def over(self) -> bool:
        return self.updates >= self.least and time.perf_counter() - (self.started or 0.0) >= self.seconds

    def after(self, tokens: int, flops: float = 0.0) -> None:
        self.tokens += tokens
        self.flops += flops
        self.updates += 1

    @staticmethod
    def wait() -> tuple[float, int]:
        """The seconds and the updates of the next turn."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        _, seconds, updates = line.split()
        return float(seconds), int(updates)
