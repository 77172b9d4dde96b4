"""How a contestant takes turns: it trains while it is told to, reports, and waits. Standard library only.

The driver writes "go SECONDS" to standard input; the contestant trains whole updates for at least so long and answers
with one line of JSON: {"tokens": real tokens, "wall": seconds, "cpu": seconds of all threads, "updates": count}.
End of input ends the contestant.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def task() -> dict[str, Any]:
    """What the driver asks for: sizes, precision, threads, and the folder with the pairs."""
    made: dict[str, Any] = json.loads(sys.argv[1])
    return made


class Turns:
    """Call `before` ahead of every update and `after` behind it."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries may chat on standard output; the driver listens to ours alone
        self.started: float | None = None
        self.seconds = self.cpu = 0.0
        self.tokens = self.updates = 0

    def say(self, **answer: Any) -> None:
        print(json.dumps(answer), file=self.out, flush=True)

    def ready(self, **facts: Any) -> None:
        """The first word of a contestant: it is built, and with what."""
        self.say(ready=True, **facts)

    def before(self) -> None:
        now = time.perf_counter()
        if self.started is not None and self.updates and now - self.started >= self.seconds:
            cpu = time.process_time() - self.cpu
            self.say(tokens=self.tokens, wall=now - self.started, cpu=cpu, updates=self.updates)
            self.started = None
        if self.started is None:
            self.seconds = self.wait()
            self.tokens = self.updates = 0
            self.started, self.cpu = time.perf_counter(), time.process_time()

    def after(self, tokens: int) -> None:
        self.tokens += tokens
        self.updates += 1

    @staticmethod
    def wait() -> float:
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        return float(line.split()[1])
