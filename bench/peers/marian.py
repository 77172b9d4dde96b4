"""Train with Marian in a process of its own, which is stopped between turns. Its log has a line for every update.

Marian logs target tokens only (EOS included); source tokens are added by the ratio of the two in the whole corpus.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from turns import Turns, read_task

# "... : Cost 9.01 * 4,012 @ 3,998 after 8,010 : ...": the last number is the target tokens so far
LABELS = re.compile(r"after ([\d,]+) : Time")


def command(task: dict[str, Any], folder: Path) -> list[str]:
    size = task["size"]
    options: dict[str, Any] = {
        "model": folder / f"marian-{size['width']}.npz",
        "type": "transformer",
        "enc-depth": size["layers"],
        "dec-depth": size["layers"],
        "dim-emb": size["width"],
        "transformer-dim-ffn": size["inner"],
        "transformer-heads": size["heads"],
        "transformer-dropout": task["dropout"],
        "label-smoothing": task["smoothing"],
        "clip-norm": task["clip"],
        "optimizer": "adam",
        "learn-rate": 0.0001,
        "mini-batch-words": task["tokens"],
        "mini-batch": 1000,
        "maxi-batch": 1000,
        "maxi-batch-sort": "trg",
        "max-length": 512,
        "workspace": 3000,
        "cpu-threads": task["threads"],
        "disp-freq": "1u",
        "save-freq": "1000000u",
        "valid-freq": "1000000u",
        "after": "1000000u",
        "seed": 1,
    }
    words = str(folder / "marian-words.txt")
    sides = ["--train-sets", str(folder / "train.source"), str(folder / "train.target"), "--vocabs", words, words]
    flags = ["--tied-embeddings-all", "--sync-sgd", "--disp-label-counts", "--overwrite"]
    program = str(Path(sys.executable).parent / "pymarian")
    named = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [program, "train", *named, *sides, *flags]


class Marian:
    def __init__(self, task: dict[str, Any]) -> None:
        folder = Path(task["folder"])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command(task, folder), stderr=subprocess.PIPE, text=True, env=environment)
        counts = json.loads((folder / "counts.json").read_text())
        self.tokens_per_target = (counts["source"] + counts["target"]) / counts["target"]
        self.recent: list[str] = []

    def next_update(self) -> tuple[float, float, int]:
        """Wait for the next update in the log; return the time, Marian's CPU seconds and the target tokens so far."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.recent = [*self.recent[-20:], line]
            found = LABELS.search(line)
            if found:
                return time.perf_counter(), self.cpu_seconds(), int(found[1].replace(",", ""))
        raise SystemExit("marian ended: " + "".join(self.recent))

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def train(self, seconds: float) -> dict[str, float]:
        """Train for a turn, timed between two log lines: the update that was stopped halfway does not count."""
        self.process.send_signal(signal.SIGCONT)
        self.next_update()  # this update may have been logged before the process was stopped
        started, started_cpu, before = self.next_update()
        ended, ended_cpu, after, updates = started, started_cpu, before, 0
        while ended - started < seconds:
            ended, ended_cpu, after = self.next_update()
            updates += 1
        self.process.send_signal(signal.SIGSTOP)
        tokens = (after - before) * self.tokens_per_target
        return {"tokens": tokens, "wall": ended - started, "cpu": ended_cpu - started_cpu, "updates": updates}


def main() -> None:
    task, turns = read_task(), Turns()
    marian = Marian(task)
    try:
        marian.next_update()
        marian.process.send_signal(signal.SIGSTOP)
        turns.ready(version=version("pymarian"))
        while True:
            turns.answer(**marian.train(turns.wait()[0]))
    finally:
        marian.process.kill()


if __name__ == "__main__":
    main()
